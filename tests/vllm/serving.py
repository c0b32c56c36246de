"""Engines that run: their tokens, and their weights replaced while they are up.

vLLM on a CPU repacks what it has loaded, so a refit fills tensors of the form in which weights are loaded, and hands
them to vLLM layer by layer, as a checkpoint's tensors are handed to it (`vllm.model_executor.model_loader.reload`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import shardmath as sm
import shardmath_torch as smt
from shardmath.storage import Stored, parse
from tests.vllm import checkpoints, engine
from tests.vllm.cases import VOCAB

__all__ = ["generate", "load_again", "reload", "start"]

CHECKPOINT = "... = ..."


def start(folder: Path, **more: Any) -> Any:
    """vLLM itself, in this process, with `more` of its arguments."""
    return vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        **more,
    )


def generate(llm: Any) -> list[list[int]]:
    """Greedy tokens after two prompts."""
    greedy = vllm.SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    prompts = []
    for start_ in (3, 50):
        tokens = [(start_ + 37 * i) % VOCAB for i in range(8)]
        prompts.append({"prompt_token_ids": tokens})
    answers = llm.generate(prompts, greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def reload(first: Path, then: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of an engine on one checkpoint, and once it was refitted with another."""
    llm = start(first)
    before = generate(llm)
    shapes = checkpoints.shapes_of(then)
    filled = _refit(first, shapes, dict(checkpoints.read(then)))
    llm.apply_model(lambda model: _hand_over(model, llm, filled))
    llm.reset_prefix_cache()
    return before, generate(llm)


def load_again(first: Path, then: Path) -> list[list[int]]:
    """The tokens of an engine on one checkpoint once vLLM itself has loaded another."""
    llm = start(first)
    generate(llm)

    def load(model: nn.Module) -> None:
        initialize_layerwise_reload(model)
        model.load_weights(checkpoints.read(then))
        finalize_layerwise_reload(model, llm.llm_engine.model_config)

    llm.apply_model(load)
    llm.reset_prefix_cache()
    return generate(llm)


def _refit(
    folder: Path, shapes: checkpoints.Shapes, weights: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A rank's tensors in the form in which they are loaded, filled by a refit."""
    with engine.built(folder) as model:
        recorded = smt.record(model.load_weights, shapes, model, form="pairs")
        own = {name: torch.zeros_like(p, device="cpu") for name, p in model.named_parameters()}
    checkpoint = Stored(parse(CHECKPOINT), (sm.Mesh(one=1, ranks=range(1)),))
    moved = smt.Refit(sm.refit(checkpoint, sm.storage.RecordedSide({0: recorded}), shapes))
    moved.prepare(src=weights, dst=own)
    moved()
    return own


def _hand_over(model: nn.Module, llm: Any, filled: dict[str, Tensor]) -> None:
    """Have vLLM process each layer anew, from these tensors."""
    initialize_layerwise_reload(model)
    for prefix, layer in model.named_modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            tensor = filled.get(f"{prefix}.{name}")
            if tensor is None:
                continue
            # Loaded as it is: it is no checkpoint's tensor, of which vLLM's own loader would take a part.
            parameter.weight_loader = default_weight_loader
            parameter.weight_loader = make_online_process_loader(layer, name)
            parameter.weight_loader(parameter, tensor)
    finalize_layerwise_reload(model, llm.llm_engine.model_config)
