"""Former: layouts of Megatron trainers and vLLM engines, from shapes without a configuration.

`megatron` and `vllm` give the storage of these systems, under their own names, from a model's configuration. This file
needs only Hugging Face names and shapes (`hf`), and gives only layouts.

1. `styles.kind` divides dense tensors over tp; unknown tensors are replicated. A dimension that tp does not divide is
   an error.
2. A trainer's pipeline is outermost: stage s of pp is the s-th run of consecutive ranks. `stages` are the numbers of
   layers of each stage, equal if not given. Embeddings are on the first stage; others without a layer (final norm,
   head) are on the last. Inside a stage dense tensors lie on the mesh (dp, tp), tp fastest.
3. A trainer's routed experts lie on a separate mesh over the same ranks, (edp, ep), ep fastest. Expert e of E lies
   whole on coordinate e // (E / ep) of ep, whatever tp is, and is replicated over edp.
4. An engine's ranks form the mesh (dp, tp), tp fastest; coordinates of dp are replicas. tp divides experts too: gate
   and up by their rows, down by its columns. With fewer key-value heads than tp, rank r holds head
   r // (tp / kv_heads). Vocabularies are padded at their end to a multiple of 64.
5. With `stacked`, buffers hold all experts of a rank: each projection of each expert is then a tensor (1, ...) and a
   window of its buffer. A trainer has one buffer per projection, (E / ep, ...); an engine has w13
   (E, 2I / tp, H), gate rows before up rows, and w2 (E, H, I / tp).

Source: vLLM's `fused_moe/routed_experts.py` 002d6073, `vocab_parallel_embedding.py` 00db0119 and `linear.py`.

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
>>> shapes = {"embed_tokens.weight": ((70, 4), "bfloat16"), "layers.0.self_attn.k_proj.weight": ((6, 4), "bfloat16")}
>>> shapes |= {f"layers.0.mlp.experts.{e}.up_proj.weight": ((8, 4), "bfloat16") for e in range(3)}
>>> for layout in engine(shapes, ranks=range(8), tp=4, kv_heads=2).values():
...     print(layout)
bfloat16[70, 4] (tp n)=128 h on dp=2 tp=4
bfloat16[6, 4] (kv n) h on dp=2 kv=2 rep=2
bfloat16[8, 4] (tp n) h on dp=2 tp=4
bfloat16[8, 4] (tp n) h on dp=2 tp=4
bfloat16[8, 4] (tp n) h on dp=2 tp=4
>>> print(engine(shapes, ranks=range(4), tp=4, kv_heads=2, stacked=True)["layers.0.mlp.experts.1.up_proj.weight"])
bfloat16[1, 8, 4] (n)=<-1 0:1 -1> (2 tp h)=<-8 0:8> w on dp=1 tp=4
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmath.base.errors import LayoutError, MeshError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.layouts.styles import is_expert, tp_text
from shardmath.models.systems.hf import Shapes, TensorPlace, cell, expert_counts, layouts, numbers

__all__ = ["HALVES", "KV", "engine", "trainer"]

FIRST = re.compile(r"(?:^|\.)(?:embed(?!_out)\w*|\w*embeddings?|shared|wpe|wte)\.")
"""Tensors without a layer that lie on the first stage: embeddings of words, positions and types."""


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
    """Return the layout of each tensor in `shapes`, by name, on a Megatron trainer with sizes `tp`, `pp` and `ep`, and
    `stages[s]` layers on stage s. With `stacked`, a rank has one buffer per projection for all its experts;
    vocabularies are padded to a multiple of `vocab_multiple`.

    `ranks` are in the order pp, dp, tp, last fastest. Vocabularies are padded at their end (Megatron's own multiple is
    128 tp). Raises MeshError if the ranks do not factor, LayoutError if layers do not fit the stages, experts ep or a
    dimension tp.
    """
    meshes = _make_stages(tuple(ranks), tp, pp, ep)
    counts = expert_counts(shapes)
    for layer, experts in counts.items():
        _check_experts(f"layer {layer}", experts, ep)
    stage_of = _assign_layers(shapes, pp, stages)
    side = _Trainer(meshes, stage_of, counts, stacked, vocab_multiple)
    return layouts(shapes, side.place)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The meshes of one pipeline stage; `holders` are the ranks that hold an expert, by coordinate of ep."""

    dense: Mesh
    experts: Mesh
    holders: tuple[Mesh, ...]


@dataclass(frozen=True, slots=True)
class _Trainer:
    """A trainer: its stages, the stage of each layer, the experts of each layer."""

    stages: tuple[_Stage, ...]
    stage_of: tuple[int, ...]
    counts: Counter[int | None]
    stacked: bool
    vocab_multiple: int

    def place(self, name: str, shape: tuple[int, ...]) -> TensorPlace:
        """Return the mesh, layout text and shape of the tensor `name`. Raises LayoutError if a dimension that is
        divided over tp or ep is not a multiple of the axis size."""
        stage = self._find_stage(name)
        if is_expert(name):
            return self._place_expert(name, shape, stage)
        tp = stage.dense.axis_size("tp")
        text = tp_text(name, shape, tp=tp, vocab_multiple=self.vocab_multiple)
        return TensorPlace(stage.dense, text, shape)

    def _find_stage(self, name: str) -> _Stage:
        """The stage of a tensor, by its layer; without one, the first or the last."""
        layer, _ = numbers(name)
        if layer is not None:
            return self.stages[self.stage_of[layer]]
        return self.stages[0] if FIRST.search(name) else self.stages[-1]

    def _place_expert(self, name: str, shape: tuple[int, ...], stage: _Stage) -> TensorPlace:
        """The place of an expert, or of a group of experts, in its stage."""
        ep = len(stage.holders)
        layer, expert = numbers(name)
        if expert is None:
            _check_experts(repr(name), shape[0], ep)
            return TensorPlace(stage.experts, "(ep n) ...", shape)
        count = self.counts[layer]
        if self.stacked:
            return TensorPlace(stage.experts, f"(ep n)={cell(expert, count)} ...", (1, *shape))
        return TensorPlace(stage.holders[expert * ep // count], "...", shape)


def _check_experts(whose: str, experts: int, ep: int) -> None:
    if experts % ep:
        raise LayoutError(f"{whose} has {experts} experts and ep is {ep}; choose ep to divide them")


def _make_stages(ranks: tuple[int, ...], tp: int, pp: int, ep: int) -> tuple[_Stage, ...]:
    """The meshes of every stage. Raises MeshError where the ranks do not factor."""
    total = len(ranks)
    size = total // pp if pp > 0 else 0
    if min(tp, pp, ep) < 1 or total % pp or not size or size % tp or size % ep:
        raise MeshError(
            f"{total} ranks do not fall into pp={pp} stages of tp={tp} times dp, "
            f"and of ep={ep} times edp; "
            f"choose sizes of 1 or more, and a number of ranks that pp * tp and pp * ep divide"
        )
    stages = []
    for start in range(0, total, size):
        of_stage = ranks[start : start + size]
        stages.append(_make_stage(of_stage, tp, ep))
    return tuple(stages)


def _make_stage(ranks: tuple[int, ...], tp: int, ep: int) -> _Stage:
    """The meshes of one stage."""
    size = len(ranks)
    dp = size // tp
    dense = Mesh(dp=dp, tp=tp, ranks=ranks)
    edp = size // ep
    experts = Mesh(edp=edp, ep=ep, ranks=ranks)
    holders = tuple(experts.select(ep=coordinate) for coordinate in range(ep))
    return _Stage(dense, experts, holders)


def _assign_layers(shapes: Shapes, pp: int, stages: Sequence[int] | None) -> tuple[int, ...]:
    """The stage of each layer. Raises LayoutError if the layers do not fit the stages."""
    layers = _count_layers(shapes)
    if stages is not None:
        counts = tuple(stages)
    elif layers % pp:
        raise LayoutError(
            f"{layers} layers do not fall evenly into pp={pp} stages; "
            f"pass stages= with the number of layers of each stage"
        )
    else:
        counts = (layers // pp,) * pp
    if len(counts) != pp or min(counts) < 0 or sum(counts) != layers:
        raise LayoutError(
            f"stages={list(counts)} are {len(counts)} stages of {sum(counts)} layers, "
            f"the model has {layers} and pp is {pp}; "
            f"pass {pp} numbers of layers that add up to {layers}"
        )
    stage_of: list[int] = []
    for stage, count in enumerate(counts):
        stage_of += [stage] * count
    return tuple(stage_of)


def _count_layers(shapes: Shapes) -> int:
    """One more than the highest layer that a name numbers; layers count from 0."""
    numbered = [layer for layer, _ in map(numbers, shapes) if layer is not None]
    return 1 + max(numbered, default=-1)


KV = ("k_proj", "v_proj")
"""The modules with one part per key-value head."""

HALVES: dict[str, int] = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}
"""The half of w13's rows that each module has."""


def engine(
    shapes: Shapes,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    kv_heads: int | None = None,
    stacked: bool = False,
    vocab_multiple: int = 64,
) -> dict[str, Layout]:
    """Return the layout of each tensor in `shapes`, by name, on a vLLM engine's `ranks` with tensor-parallel size `tp`
    and `kv_heads` key-value heads. With `stacked`, a rank has common buffers for all its experts; vocabularies are
    padded to a multiple of `vocab_multiple`.

    `ranks` are in the order dp, tp, last fastest. Without `kv_heads` there are at least tp of them. Vocabularies are
    padded at their end. Raises MeshError if tp does not divide the ranks, LayoutError if it does not divide a
    dimension, or if neither of tp and the key-value heads divides the other.
    """
    ids = tuple(ranks)
    size = len(ids)
    if tp < 1 or not size or size % tp:
        raise MeshError(
            f"{size} ranks do not fall into engines of tp={tp}; "
            f"pass a number of ranks that is a multiple of tp, or another tp"
        )
    mesh = Mesh(dp=size // tp, tp=tp, ranks=ids)
    counts = expert_counts(shapes) if stacked else None
    side = _Engine(mesh, _split_heads(mesh, tp, kv_heads), counts, vocab_multiple)
    return layouts(shapes, side.place)


def _split_heads(mesh: Mesh, tp: int, kv_heads: int | None) -> Mesh | None:
    """The mesh of key-value heads that are fewer than tp; None if tp divides them."""
    if kv_heads is None or (kv_heads > 0 and kv_heads % tp == 0):
        return None
    if kv_heads < 1 or tp % kv_heads:
        raise LayoutError(
            f"{kv_heads} key-value heads and tp={tp}: neither divides the other; "
            f"choose a tp that divides the number of heads or is a multiple of it"
        )
    return mesh.split("tp", kv=kv_heads, rep=tp // kv_heads)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine: its mesh, `kv` the mesh of few key-value heads, `counts` the experts of each layer if stacked."""

    mesh: Mesh
    kv: Mesh | None
    counts: Counter[int | None] | None
    vocab_multiple: int

    def place(self, name: str, shape: tuple[int, ...]) -> TensorPlace:
        """Return the mesh, layout text and shape of the tensor `name`. Raises LayoutError if a dimension is not a
        multiple of the size of the mesh axis that divides it: tp, or kv (key-value heads) for weights that compute keys
        and values."""
        module = name.rsplit(".", 2)[-2] if "." in name else ""
        if self.kv is not None and module in KV:
            heads = self.kv.axis_size("kv")
            return TensorPlace(self.kv, tp_text(name, shape, tp=heads, axis="kv"), shape)
        tp = self.mesh.axis_size("tp")
        text = tp_text(name, shape, tp=tp, vocab_multiple=self.vocab_multiple)
        layer, expert = numbers(name)
        if self.counts is None or expert is None:
            return TensorPlace(self.mesh, text, shape)
        stored = cell(expert, self.counts[layer])
        return TensorPlace(self.mesh, _stack(text, module, shape, stored), (1, *shape))


def _stack(text: str, module: str, shape: tuple[int, ...], stored: str) -> str:
    """The layout of one expert in its buffer: a half of w13's rows for gate and up, w2 for down."""
    if module not in HALVES:
        return f"(n)={stored} {text}"
    rows = shape[0]
    # In text of Runs, -n is a hole of n: the rows of the other half.
    half = f"<-{rows} 0:{rows}>" if HALVES[module] else f"<0:{rows} -{rows}>"
    return f"(n)={stored} (2 tp d0)={half} ..."
