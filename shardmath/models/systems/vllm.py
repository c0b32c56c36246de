"""vLLM: what each rank of an engine stores, under its own names.

1. `vllm` gives the rows (`vllm_rows`), two meshes over the same ranks, and where each layer is. World rank is
   `(dp * PP + pp) * TP + tp`, dp slowest.
2. Data parallelism cuts experts: those of one pipeline stage lie on all its ranks, in the order dp, tp. With `ep` they
   are dealt whole, else each is cut.
3. Layers keep their global numbers. Where stages do not divide them, the last but one has one more, then the one
   before it.
4. What vLLM refuses to load, such as heads that tp does not divide, is an error where tensors are bound.

Source: vLLM 0.33.0, `distributed/utils.py`, `layers/fused_moe`, `layers/linear.py`.

>>> config = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 8}
>>> side = vllm({**config, "vocab_size": 100}, ranks=range(4), tp=2, pp=2)
>>> side.meshes
(Mesh(dp=1, pp=2, tp=2), Mesh(pp=2, ep=1, etp=2))
>>> side.indices["l"][1]
Spot(coords={'pp': 0}, chunk=0, number=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardmath.base.arguments import known
from shardmath.base.errors import StoreError
from shardmath.base.moved import forward_names
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage.stored import Spot, Stored, replicates
from shardmath.models.systems.config import Config
from shardmath.models.systems.placing import divide_layers, place_layers
from shardmath.models.systems.vllm_rows import VLLMForm, draft_table, table

__all__ = ["vllm"]

if not TYPE_CHECKING:  # A type checker would believe that the module has every name.
    __getattr__ = forward_names(
        __name__,
        {
            "HALVES": "shardmath.models.systems.former.HALVES",
            "KV": "shardmath.models.systems.former.KV",
            "engine": "shardmath.models.systems.former.engine",
        },
    )

PLACEMENTS = ("linear", "round_robin")
TILES = {"flashinfer_trtllm": 128}
"""Rows and columns of which each rank's part of an expert is made whole, by MoE backend."""
SWAPS = ("flashinfer_cutlass",)
"""MoE backends that put up before gate once weights are loaded."""
UNREPEATED = ("gptoss",)
"""Kinds that vLLM does not load on more ranks than there are key heads."""
VOCAB_MULTIPLE = 64
WHOLE_SHARED = ("deepseekv2", "deepseekv3", "nemotronh", "llama4", "qwen3next", "qwen35moe")
"""Models whose shared experts each rank has whole, where vLLM divides tokens instead."""


def vllm(
    config: object,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    placement: str = "linear",
    redundant: int = 0,
    backend: str = "triton",
    stages: Sequence[int] | None = None,
    processed: bool = False,
    draft: bool = False,
    unknown: str = "refuse",
) -> Stored:
    """How the ranks of an engine store a model of this Hugging Face configuration.

    `ep` deals experts whole, as `placement` says, with `redundant` copies of the first ones; `backend` is that of
    experts; `stages` are the layers of each pipeline stage, vLLM's own choice if not given; `processed` is after
    `process_weights_after_loading`, `draft` the model that predicts further tokens; `unknown` is "refuse" or
    "replicate". Raises MeshError where ranks do not factor, StoreError where layers do not fall to stages, for a word
    that is none of those named, and for processed weights whose order no row says.
    """
    fields = Config(config)
    meshes = _make_meshes(ranks, tp, pp, dp, ep)
    deal = _choose_deal(fields, dp, ep, placement, redundant)
    gated = _choose_gated(backend, processed)
    form = VLLMForm(deal, gated, fields.has_scales, replicates(unknown))
    make = draft_table if draft else table
    layers = _place_layers(fields, pp, stages)
    experts = _list_expert_numbers(fields, 1 if ep else tp * dp, redundant, backend)
    # With tokens divided over the ranks instead, there is nothing left to divide in a shared expert.
    whole = ep and dp > 1 and fields.kind in WHOLE_SHARED
    numbers = {**_list_numbers(fields, tp), **experts, "alike": tp if whole else 1}
    return Stored(make(fields.kind, form), meshes, layers, numbers)


def _choose_gated(backend: str, processed: bool) -> str:
    """How gate and up lie in an expert. Raises StoreError where no row says it."""
    if not processed:
        return "parts"
    if backend in TILES:
        raise StoreError(
            f"{backend} lays processed experts out in blocks, which no row says; "
            f"declare them as loaded"
        )
    return "swapped" if backend in SWAPS else "parts"


def _make_meshes(ranks: Iterable[int], tp: int, pp: int, dp: int, ep: bool) -> tuple[Mesh, Mesh]:
    """The mesh of dense tensors, and that of routed experts. Raises MeshError where ranks do not factor."""
    dense = Mesh(dp=dp, pp=pp, tp=tp, ranks=ranks)
    # World ranks count dp slowest, the ranks of one stage are therefore not neighbours.
    stages = dense.transpose(["pp", "dp", "tp"]).merge(["dp", "tp"], into="parts")
    size = dp * tp
    return dense, stages.split("parts", ep=size if ep else 1, etp=1 if ep else size)


def _choose_deal(config: Config, dp: int, ep: bool, placement: str, redundant: int) -> str:
    """How experts are dealt. Raises StoreError for a placement that is none."""
    chosen = known(placement, PLACEMENTS)
    if chosen is None:
        raise StoreError(f"placement={placement!r}; use one of {', '.join(PLACEMENTS)}")
    if not ep:
        return "linear"
    if redundant:
        return "redundant"
    # vLLM falls back to linear, and says so in its log alone, where experts have no groups.
    grouped = int(config.get("n_group", 1)) > 1
    return chosen if grouped and dp == 1 else "linear"


def _place_layers(
    config: Config, pp: int, stages: Sequence[int] | None
) -> dict[str, tuple[Spot, ...]]:
    """Where each layer is. Those that predict further tokens are numbered behind the others."""
    # The last stage has the head, and the first the embedding: those before the last take more.
    counts = divide_layers(config.layers, pp, spared=1) if stages is None else stages
    layers = place_layers(counts, layers=config.layers, pp=pp)
    further = tuple(Spot({"pp": pp - 1}, 0, config.layers + m) for m in range(config.drafts))
    return {"l": layers, "m": further}


def _list_expert_numbers(
    config: Config, parts: int, redundant: int, backend: str
) -> dict[str, int]:
    """What the words of experts' rows stand for, where each expert is cut into so many parts."""
    return {
        "slots": config.experts + redundant,
        "tile": TILES.get(backend, 1),
        # So wide that all of a bias is the first part, and the other parts are padding.
        "wide": config.hidden * parts,
        "own_ffn": config.ffn // parts,
    }


def _list_numbers(config: Config, tp: int) -> dict[str, int]:
    """What the words of other rows stand for."""
    vocab = int(config.get("vocab_size", 0))
    return {
        "vocab": -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hd": config.head_dim,
        # Where a kind does not repeat heads, a tp above their number divides nothing, and is refused.
        "rep": 1 if config.kind in UNREPEATED else max(1, tp // config.kv_heads),
        "own": max(1, config.heads // tp),
        "own_keys": max(1, config.kv_heads // tp),
        "own_linear": max(1, config.linear_key_heads // tp),
        "group": max(1, int(config.get("ssm_state_size", 1))),
        "shared": tp if config.groups == 1 else 1,
    }
