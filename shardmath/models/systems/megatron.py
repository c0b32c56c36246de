"""Megatron-Core: what each rank of a trainer stores, under its own names.

1. `megatron` gives the rows (`megatron_rows`), two meshes over the same ranks, and where each layer is.
2. The order string names axes from the fastest. Dense tensors lie on the mesh of all but ep; routed experts on one
   where tp is etp, cp is gone, and ep and edp have what is left.
3. Layers fall to stages and virtual stages (chunks) in order: evenly, or as the first and last stage ask for, or as
   a layout string says (`Et|(tt|)*3L`).

Source: Megatron-Core 0.16.1, `parallel_state.py`, `transformer_layer.py`, `pipeline_parallel_layer_layout.py`.

>>> side = megatron({"num_layers": 4, "num_attention_heads": 2}, ranks=range(8), tp=2, pp=2, ep=2, etp=1, vocab=100)
>>> side.meshes
(Mesh(pp=2, dp=2, cp=1, tp=2), Mesh(pp=2, edp=2, ep=2, etp=1))
>>> side.indices["l"][2], side.numbers
(Spot(coords={'pp': 1}, chunk=0, number=0), {'vocab': 256, 'groups': 2})
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardmath.base.errors import MeshError, StoreError
from shardmath.base.moved import forward_names
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage import rows
from shardmath.models.storage.stored import Spot, Stored, replicates
from shardmath.models.systems.megatron_rows import table
from shardmath.models.systems.megatron_shapes import MegatronConfig, logical_shapes
from shardmath.models.systems.placing import fill_sizes, place_layers

__all__ = ["logical_shapes", "megatron", "pad_vocab"]

if not TYPE_CHECKING:  # A type checker would believe that the module has every name.
    __getattr__ = forward_names(
        __name__,
        {
            "trainer": "shardmath.models.systems.former.trainer",
        },
    )

ORDER = "tp-cp-ep-dp-pp"
REPEAT = re.compile(r"\(([^()]*)\)\*(\d+)|([Etml])\*(\d+)", re.IGNORECASE)
"""A group, or one letter, so many times."""

OF_EXPERTS = {"tp": "etp", "dp": "edp", "ep": "ep", "pp": "pp"}
"""The axis of routed experts in the place of each of the order's."""

FIX = "give num_layers_in_first_pipeline_stage and _last_, or a layout"


def pad_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Rows of the vocabulary that are stored: a multiple of `multiple` times tp."""
    step = multiple * tp
    return -(-vocab // step) * step


def megatron(
    config: object,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    order: str = ORDER,
    spec: str = "te",
    experts: str | None = None,
    vocab: int | None = None,
    vocab_multiple: int = 128,
    unknown: str = "refuse",
) -> Stored:
    """How the ranks of a trainer store a model of this TransformerConfig.

    `etp` is tp if not given, `vpp` the virtual stages of a rank, `spec` "te" or "local", `experts` "grouped",
    "sequential" or "legacy", found from the configuration if not given, `vocab` the vocabulary before it is padded,
    `unknown` "refuse" or "replicate".
    Raises MeshError where ranks do not factor, StoreError where layers do not fall to stages.
    """
    fields = MegatronConfig(config)
    etp = tp if etp is None else etp
    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    meshes = _make_meshes(tuple(ranks), sizes, order)
    experts = experts or _find_experts(fields, spec)
    text = table(spec, experts, unknown=replicates(unknown))
    if fields.get("is_hybrid_model"):
        text = text.replace("decoder.final_layernorm", "decoder.final_norm")
    table_rows = rows.parse(text)
    indices = _place_layers(fields, pp, vpp)
    numbers = {}
    if vocab is not None:
        numbers["vocab"] = pad_vocab(vocab, tp, vocab_multiple)
    if fields.get("num_attention_heads"):
        numbers["groups"] = fields.groups
    return Stored(table_rows, meshes, indices, numbers)


def _place_layers(config: MegatronConfig, pp: int, vpp: int) -> dict[str, tuple[Spot, ...]]:
    """Where each layer is. Those that predict further tokens are where the last one is, numbered from 0."""
    written = config.get("pipeline_model_parallel_layout")
    counts = _count_evenly(config, pp, vpp) if written is None else _read_layout(written)
    layers = place_layers(counts, layers=config.layers, pp=pp, chunks=vpp, renumber=True, fix=FIX)
    chunk = layers[-1].chunk if layers else 0
    last = {"pp": pp - 1}
    further = tuple(Spot(last, chunk, m) for m in range(config.mtp))
    return {"l": layers, "m": further}


def _find_experts(config: MegatronConfig, spec: str) -> str:
    """How routed experts are stored."""
    if not config.get("moe_grouped_gemm"):
        return "sequential"
    return "grouped" if spec == "te" else "legacy"


def _make_meshes(ranks: tuple[int, ...], sizes: Mapping[str, int], order: str) -> tuple[Mesh, ...]:
    """The mesh of dense tensors, and that of routed experts. Raises MeshError where ranks do not factor."""
    names = _read_order(order)
    dense = [name for name in names if name != "ep"]
    routed = [OF_EXPERTS[name] for name in names if name != "cp"]
    # Data parallelism, dp or edp, has no size: it is over the ranks that the others leave.
    return tuple(
        Mesh(fill_sizes(len(ranks), {axis: sizes.get(axis) for axis in axes}), ranks=ranks)
        for axes in (dense, routed)
    )


def _read_order(order: str) -> list[str]:
    """The axes, slowest first. The text names the fastest first, and may leave out axes of size 1."""
    known = ORDER.split("-")
    names = order.split("-")
    names += [name for name in known if name not in names]
    if sorted(names) != sorted(known):
        raise MeshError(f"order {order!r} names other axes than {ORDER}; write each of them once")
    return names[::-1]


def _count_evenly(config: MegatronConfig, pp: int, vpp: int) -> list[int]:
    """As many layers everywhere, but for a first or last stage that asks for others."""
    first = config.get("num_layers_in_first_pipeline_stage")
    last = config.get("num_layers_in_last_pipeline_stage")
    ends = (
        bool(config.get("account_for_embedding_in_pipeline_split")),
        bool(config.get("account_for_loss_in_pipeline_split")),
    )
    # What is counted as a layer for the balance, but is none, is taken off its stage below.
    total = config.layers + sum(ends)
    stages = _divide_among_stages(total, pp, first, last)
    # Chunk 0 of every stage comes before chunk 1 of any, as the schedule interleaves them.
    counts = [count // vpp for _ in range(vpp) for count in stages]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _divide_among_stages(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """The layers of each stage: what the first and the last are given, and an even part of the rest for the others."""
    middle = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    each = left // middle if middle else 0
    stages = [each] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages


def _read_layout(written: object) -> list[int]:
    """The decoder layers of each virtual stage of a layout: text, or lists of names."""
    if not isinstance(written, str):
        return [list(stage).count("decoder") for stage in _flatten(written)]
    text = written.replace(",", "")
    text = text.replace(" ", "")
    while REPEAT.search(text):
        text = REPEAT.sub(_repeat, text)
    stages = text.split("|")
    return [stage.count("t") for stage in stages]


def _repeat(match: re.Match[str]) -> str:
    """A group or a letter, as often as is written behind it."""
    what = match[1] or match[3] or ""
    return what * int(match[2] or match[4])


def _flatten(written: object) -> list[list[str]]:
    """The stages of a list of stages, or of a list for each chunk."""
    if not isinstance(written, list | tuple):
        raise StoreError(f"layout {written!r} is not a layout; write text, or lists of names")
    stages: list[list[str]] = []
    for one in written:
        nested = bool(one) and isinstance(one[0], list | tuple)
        stages += one if nested else [one]
    return stages
