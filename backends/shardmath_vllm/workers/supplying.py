"""Supplying: a trainer's tensors to vLLM's own backends, for which no rank gathers more than they ask for.

1. vLLM 0.33 takes a WeightSource: metadata that says which ranks own a tensor, and in which pieces; then the tensors.
2. What the metadata declares is read back as layouts (`source.read_layout`). A plan moves the trainer's tensors to
   these, a layer at a time. Tensors that lie so already are given as they are.
3. A plan knows FSDP within tensor parallelism, rows that do not divide evenly, and storage by rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    Replicate,
    Shard,
    WeightSource,
    layerwise_groups,
)

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.stored import Stored
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.refits.views import to_local
from shardmath_vllm.source import Source, Told, check_kept, read_layout, read_source, watch_modules

__all__ = ["BACKENDS", "ShardSource"]

BACKENDS = ("nccl", "nccl_m2n", "ipc", "sharded_rdt")
VLLM = "vllm"
"""The side of the plan to which tensors move."""
MOST_AXES = 2
"""What "nccl_m2n" takes as a mesh."""

_T = TypeVar("_T")


class ShardSource(WeightSource):
    """A WeightSource for the trainers of vLLM's own `backend`, from a module or a Source. Collective over the default
    group, as each iteration is; every rank iterates to the end.

    For "nccl" rank 0 alone gets each tensor whole; for "ipc" and "sharded_rdt", which need that, all ranks do. For
    "nccl_m2n" each rank gets its pieces, in a layout that this backend takes. `dtype` is as in TrainerInfo. Raises
    ValueError for another backend, StoreError if vLLM's loader knows the tensors by other names.
    """

    def __init__(self, given: Any, backend: str = "nccl", *, dtype: str | None = None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is unknown; pass one of {', '.join(BACKENDS)}")
        self._backend = backend
        self._size = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = compat.rank_or_0()
        source = read_source(given, dtype, rank=self._rank, trainers=self._size)
        if source.checkpoint is not None:
            raise StoreError(
                "source= stores its tensors in another form than its checkpoint, which vLLM's own backends do not "
                "convert; send it by the backend 'shardmath'"
            )
        self._source = source
        self._watched = watch_modules(source)
        self._moves: dict[bool, _Moves] = {}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Every tensor, a layer after the other, with the ranks that get it and the pieces in which they do."""
        names = [name for group in layerwise_groups(list(self._source.shapes)) for name in group]
        served = self._source.tell().served
        return [self._declare(name, *served[name]) for name in names]

    def _declare(self, name: str, shape: tuple[int, ...], dtype: str) -> ParamMeta:
        """The metadata of a tensor, with the owners that the backend asks for."""
        meta = ParamMeta(name, dtype_of(dtype), shape)
        if self._backend == "nccl":
            return replace(meta, owners=(0,))
        if self._backend == "nccl_m2n":
            held = self._layouts[name]
            pieces = _find_pieces(replace(meta, dtype=dtype_of(held.dtype)), held, self._size)
            return replace(pieces, dtype=meta.dtype)
        return meta

    @cached_property
    def _layouts(self) -> Mapping[str, sm.Layout]:
        """How the trainer stores each tensor."""
        side = self._source.side
        return bind(side, self._source.shapes).layouts if isinstance(side, Stored) else side

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor that this rank owns, whole. Collective."""
        return self._iterate(is_whole=True)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's piece of each tensor that it owns. Collective."""
        return self._iterate(is_whole=False)

    def _iterate(self, *, is_whole: bool) -> Iterator[tuple[str, Tensor]]:
        if is_whole not in self._moves:
            self._moves[is_whole] = self._plan(is_whole)
        targets, refits = self._moves[is_whole]
        source = self._source.renewed()
        check_kept(self._watched, source)
        # A side of rows may have more of these, and then all tensors move.
        held = source.list_chunks()[0]
        arrived: dict[str, Tensor] = {}
        done = set()
        # A refit is collective: ranks that own none of its tensors take part, too.
        for name, target in targets.items():
            refit = refits.get(name)
            if refit is not None and refit not in done:
                done.add(refit)
                arrived |= _move(refit, source, self._rank)
            if self._rank in target.mesh.ranks:
                yield name, to_local(held[name]).detach() if refit is None else arrived.pop(name)

    def _plan(self, is_whole: bool) -> _Moves:
        """The layouts in which tensors are given, and the refits to these. Collective."""
        targets = {}
        for meta in self.metadata:
            layout = read_layout(meta, self._size)
            if is_whole:
                layout = sm.Layout(layout.shape, layout.mesh, {}, dtype=layout.dtype)
            targets[meta.name] = layout
        told = self._source.tell()
        side = told.side
        if not isinstance(side, Stored):
            side = _select(
                side, [name for name in side if not sm.equivalent(side[name], targets[name])]
            )
        moved = _select(targets, targets if isinstance(side, Stored) else side)
        return _Moves(targets, _plan_refits(told, side, moved) if moved else {})


def _plan_refits(
    told: Told, side: Stored | Mapping[str, sm.Layout], moved: Mapping[str, sm.Layout]
) -> dict[str, smt.Refit]:
    """The refit of each tensor that moves from `side` to the layouts `moved`: one refit for each layer. Collective."""
    rules = _select(told.rules, moved)
    planned = sm.refit(
        side,
        {VLLM: moved},
        _select(told.shapes, moved),
        served=_select(told.served, moved) if rules else None,
        rules=rules or None,
    )
    sm.verify(planned.plan)
    refits = {}
    for portion in sm.divide(planned, layerwise_groups(list(moved))):
        refit = smt.Refit(portion, agree="once")
        refits.update(dict.fromkeys(portion.moved, refit))
    return refits


def _select(named: Mapping[str, _T], names: Container[str]) -> dict[str, _T]:
    """The entries with these names."""
    return {name: value for name, value in named.items() if name in names}


class _Moves(NamedTuple):
    """The layout in which each tensor is given, and the refit that moves it there; no refit if it lies so already."""

    targets: Mapping[str, sm.Layout]
    refits: Mapping[str, smt.Refit]


def _move(refit: smt.Refit, source: Source, rank: int) -> dict[str, Tensor]:
    """Move the tensors of one refit, and return by name those that this rank gets."""
    engine = refit.planned.engines[VLLM]
    held = refit.planned.trainer
    arrived = {}
    mine = [tensor for chunk in source.list_chunks() for tensor in chunk.values()]
    # A rank may own no tensor, and yet get some.
    device = to_local(mine[0]).device if mine else compat.device_of(compat.group_of(None))
    if rank in engine.ranks:
        for (_, name), shape in engine.natives(rank).items():
            kind = dtype_of(engine.layouts[name].dtype)
            arrived[name] = torch.empty(shape, dtype=kind, device=device)
    refit.prepare(
        src=source.select(held.natives(rank)) if rank in held.ranks else None,
        dst={VLLM: arrived} if rank in engine.ranks else None,
        modules=source.modules,
    )
    refit()
    refit.release()
    return arrived


def _find_pieces(meta: ParamMeta, held: sm.Layout, size: int) -> ParamMeta:
    """The metadata with pieces that "nccl_m2n" takes: equal ones along one axis of a mesh of one or two. These are the
    pieces that the trainer holds, if it can be said so; else parts of the first dimension that divides, or replicas.
    """
    replicas = replace(meta, owners=tuple(range(size)))
    meshes = [(size,), tuple(held.mesh.shape.values())]
    divided: list[ParamMeta] = []
    for mesh in meshes:
        if len(mesh) <= MOST_AXES and math.prod(mesh) == size:
            divided += _list_divided(replicas, mesh)
    for pieces in (replicas, *divided):
        if sm.equivalent(read_layout(pieces, size), held):
            return pieces
    return divided[0] if divided else replicas


def _list_divided(meta: ParamMeta, mesh: tuple[int, ...]) -> Iterator[ParamMeta]:
    """The metadata with equal parts of each dimension along each axis of the mesh."""
    for axis, dim in itertools.product(range(len(mesh)), range(len(meta.shape))):
        if meta.shape[dim] % mesh[axis] == 0:
            placements: list[Replicate | Shard] = [Replicate()] * len(mesh)
            placements[axis] = Shard(dim)
            yield replace(meta, mesh_shape=mesh, placements=tuple(placements))
