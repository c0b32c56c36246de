"""Megatron: which rank of a trainer under pipeline, tensor, expert and data parallelism holds which tensor.

1. Tensors go by their Hugging Face names and shapes (`hf`); only what each rank holds is Megatron's.
2. The pipeline is outermost: stage s of pp is the s-th run of consecutive ranks. `stages` says how many layers each
   stage has, evenly if not given. Embeddings are on the first stage; all else without a layer (final norm, head) is on
   the last.
3. Inside a stage dense tensors lie on the mesh (dp, tp), tp fastest: divided over tp by `hf.kind`, else replicated.
4. Routed experts lie on a mesh of their own over the same ranks, (edp, ep), ep fastest. Expert e of E lies whole on
   coordinate e // (E / ep) of ep, whatever tp is (expert tensor parallelism of 1), and is replicated over edp.
5. `stacked` says the same of buffers in which a rank keeps all its experts of one projection: each expert is then a
   tensor (1, ...) and a window, one cell, of the stack (E / ep, ...).
6. What does not divide evenly is an error, as it is in Megatron.

Not expressed: QKV fused and interleaved by groups, gate and up in one buffer (`stored` of a Layout, by hand), virtual
stages, context parallelism (part of dp).

>>> shapes = {"embed_tokens.weight": ((8, 4), "bfloat16"), "layers.0.mlp.up_proj.weight": ((6, 4), "bfloat16")}
>>> shapes |= {f"layers.1.mlp.experts.{e}.up_proj.weight": ((2, 4), "bfloat16") for e in range(4)}
>>> for name, layout in trainer(shapes, ranks=range(8), tp=2, pp=2, ep=2).items():
...     print(layout, layout.mesh.ranks)
bfloat16[8, 4] (tp n) h on dp=2 tp=2 (0, 1, 2, 3)
bfloat16[6, 4] (tp n) h on dp=2 tp=2 (0, 1, 2, 3)
bfloat16[2, 4] n h on edp=2 (4, 6)
bfloat16[2, 4] n h on edp=2 (4, 6)
bfloat16[2, 4] n h on edp=2 (5, 7)
bfloat16[2, 4] n h on edp=2 (5, 7)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmath.algebra.mesh import Mesh
from shardmath.base.errors import LayoutError, MeshError
from shardmath.families.hf import (
    Place,
    Shapes,
    cell,
    expert_counts,
    is_expert,
    layouts,
    numbers,
    tp_text,
)
from shardmath.layouts.layout import Layout

__all__ = ["trainer"]

FIRST = re.compile(r"(?:^|\.)(?:embed(?!_out)\w*|\w*embeddings?|shared|wpe|wte)\.")
"""What lies on the first stage though it is in no layer: embeddings of words, positions and types."""


def trainer(
    shapes: Shapes,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    stages: Sequence[int] | None = None,
    stacked: bool = False,
    vocab_multiple: int = 1,
) -> dict[str, Layout]:
    """The layout of every tensor of `shapes`, by name.

    `ranks` in the order pp, dp, tp, last fastest. `vocab_multiple` pads vocabularies, at their end, to a multiple of it
    (Megatron's own is 128 tp). Raises MeshError where the ranks do not factor, LayoutError where layers do not fit the
    stages, experts ep or a dimension tp.
    """
    meshes = _meshes(tuple(ranks), tp, pp, ep)
    counts = _checked(expert_counts(shapes), ep)
    side = _Trainer(meshes, _stage_of(shapes, pp, stages), counts, stacked, vocab_multiple)
    return layouts(shapes, side.place)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The meshes of one pipeline stage; `holders` are the ranks that hold an expert, by coordinate of ep."""

    dense: Mesh
    experts: Mesh
    holders: tuple[Mesh, ...]


@dataclass(frozen=True, slots=True)
class _Trainer:
    stages: tuple[_Stage, ...]
    stage_of: tuple[int, ...]
    counts: Counter[int | None]
    stacked: bool
    vocab_multiple: int

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        layer, expert = numbers(name)
        stage = self.stages[
            self.stage_of[layer] if layer is not None else 0 if FIRST.search(name) else -1
        ]
        if not is_expert(name):
            tp = stage.dense.axis_size("tp")
            return Place(
                stage.dense, tp_text(name, shape, tp=tp, vocab_multiple=self.vocab_multiple), shape
            )
        if expert is None:
            _check_experts(repr(name), shape[0], len(stage.holders))
            return Place(stage.experts, "(ep n) ...", shape)
        count = self.counts[layer]
        if self.stacked:
            return Place(stage.experts, f"(ep n)={cell(expert, count)} ...", (1, *shape))
        return Place(stage.holders[expert * len(stage.holders) // count], "...", shape)


def _check_experts(whose: str, experts: int, ep: int) -> None:
    if experts % ep:
        raise LayoutError(f"{whose} has {experts} experts and ep is {ep}; choose ep to divide them")


def _checked(counts: Counter[int | None], ep: int) -> Counter[int | None]:
    for layer, experts in counts.items():
        _check_experts(f"layer {layer}", experts, ep)
    return counts


def _meshes(ranks: tuple[int, ...], tp: int, pp: int, ep: int) -> tuple[_Stage, ...]:
    """The meshes of every stage."""
    size = len(ranks) // pp if pp > 0 else 0
    if min(tp, pp, ep) < 1 or len(ranks) % pp or not size or size % tp or size % ep:
        what = f"{len(ranks)} ranks do not fall into pp={pp} stages of tp={tp} times dp, and of ep={ep} times edp"
        raise MeshError(f"{what}; choose ranks that are a multiple of pp tp and of pp ep")
    return tuple(_stage(ranks[i : i + size], tp, ep) for i in range(0, len(ranks), size))


def _stage(ranks: tuple[int, ...], tp: int, ep: int) -> _Stage:
    experts = Mesh(edp=len(ranks) // ep, ep=ep, ranks=ranks)
    holders = tuple(experts.select(ep=at) for at in range(ep))
    return _Stage(Mesh(dp=len(ranks) // tp, tp=tp, ranks=ranks), experts, holders)


def _stage_of(shapes: Shapes, pp: int, stages: Sequence[int] | None) -> tuple[int, ...]:
    """The stage of each layer."""
    layers = 1 + max((layer for layer, _ in map(numbers, shapes) if layer is not None), default=-1)
    if stages is None and layers % pp:
        raise LayoutError(
            f"{layers} layers do not fall evenly into pp={pp} stages; give stages= their number for each"
        )
    each = (layers // pp,) * pp if stages is None else tuple(stages)
    if len(each) != pp or min(each) < 0 or sum(each) != layers:
        what = f"stages={list(each)} are {len(each)} stages of {sum(each)} layers"
        what += f", the model has {layers} and pp is {pp}"
        raise LayoutError(f"{what}; give the number of layers of each of pp stages")
    return tuple(s for s, n in enumerate(each) for _ in range(n))
