"""Moves between two layouts, compiled once and kept.

1. All ranks of a group make its moves in one order, and forget the same ones, since compiling is
   for all of them: so what is kept is bounded by a number that each rank computes from the plans
   alone.
2. Moves, as groups, last as long as the default process group under which they were made.
3. A plan under which every rank keeps what it has is a copy here, about which nobody is asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardmath.base.errors import ExchangeError
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath.plans.reduction import Reduction
from shardmath_torch import compat
from shardmath_torch.dtensors.devicemesh import group_for, world
from shardmath_torch.exchange.compile import compile
from shardmath_torch.exchange.local import by_key, fits, wanted
from shardmath_torch.exchange.mover import move_in_autograd

__all__ = ["Move", "Moves", "move_between", "weight"]

MOST_BYTES = 64 << 20
"""About what the moves of a group may take on a rank, apart from staging."""

BYTES_PER_MOVE, BYTES_PER_PIECE = 30_000, 1_700
"""Measured with tracemalloc: a move without pieces, and each piece that a rank sends or receives (CPython 3.11)."""


class Move(Protocol):
    """A compiled move of one tensor."""

    def __call__(
        self, src: Tensor | None, *, out: Tensor | None, records_gradient: bool = False
    ) -> None:
        """Moves `src`, this rank's source tensor, into `out`, its destination.

        All ranks say alike whether it is a move of a gradient that autograd records.
        """


_Key: TypeAlias = tuple[Layout, Layout]


class _Kept(NamedTuple):
    move: Move
    nbytes: int


class _Used(NamedTuple):
    """A kept move, which says of itself when it is used."""

    moves: Moves
    key: _Key
    move: Move

    def __call__(
        self, src: Tensor | None, *, out: Tensor | None, records_gradient: bool = False
    ) -> None:
        self.moves.use(self.key, self.move, src, out, records_gradient)


class Moves:
    """The latest moves of one group, by layouts, that together weigh at most `most` bytes, or the latest alone."""

    def __init__(self, group: dist.ProcessGroup | None, most: int = MOST_BYTES) -> None:
        self._group, self._most = group, most
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def between(self, src: Layout, dst: Layout) -> Move:
        """The move, made now if it is not kept. Collective over the group."""
        key = src, dst
        if key not in self._kept:
            self._keep(key, self._make(src, dst))
        return _Used(self, key, self._kept[key].move)

    def _make(self, src: Layout, dst: Layout) -> _Kept:
        """The move and its weight, weighed before ranks have agreed, so that all keep it who have."""
        moved = plan(src, dst)
        nbytes = weight(moved)
        if _stays(moved):
            return _Kept(_copy(moved), nbytes)
        mover = compile(moved, group=self._group)
        return _Kept(partial(move_in_autograd, mover), nbytes)

    def use(
        self,
        key: _Key,
        move: Move,
        src: Tensor | None,
        out: Tensor | None,
        records_gradient: bool = False,
    ) -> None:
        """One move. It is the latest once it has gone well, on all ranks alike.

        One that ranks refused is forgotten: if some of them keep it and others do not, a compile
        would meet a move each time; so they find together at the next try.
        """
        try:
            move(src, out=out, records_gradient=records_gradient)
        except ExchangeError:
            forgotten = self._kept.pop(key, None)
            if forgotten is not None:
                self._nbytes -= forgotten.nbytes
            raise
        if key in self._kept:
            self._kept.move_to_end(key)

    def _keep(self, key: _Key, made: _Kept) -> None:
        self._kept[key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self._most and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.nbytes


def weight(moved: Plan) -> int:
    """About the bytes that a move of this plan takes on the rank with most pieces; the same on all ranks."""
    on = moved.lines
    block = np.arange(len(on.nbytes)).repeat(np.diff(on.row_first))  # of each row
    line = np.arange(len(on.holders)).repeat(np.diff(on.first))[block]
    receivers, holders = on.receivers[block], on.holders[line]
    boxes = _count_boxes(moved)
    sizes = np.array([len(ranks) for ranks in on.sets], np.int64)
    leaving = boxes * sizes[receivers]  # a holder sends each box to each of the receivers
    pieces: dict[int, int] = {}
    for number, ranks in enumerate(on.sets):
        received = int(boxes[receivers == number].sum())
        # What a set holds is sent by its ranks in equal shares.
        sent = int(leaving[holders == number].sum()) // max(1, len(ranks))
        for rank in ranks:
            pieces[rank] = pieces.get(rank, 0) + received + sent
    return BYTES_PER_MOVE + BYTES_PER_PIECE * max(pieces.values(), default=0)


def _count_boxes(moved: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Of each row of the plan's lines, how many boxes its unit has: the product over dimensions."""
    on = moved.lines
    counts = np.ones(len(on.unit), np.int64)
    for number, batch in enumerate(moved.batches):
        mine = on.batch == number
        pairs = batch.template.unit_pairs[on.unit[mine]]  # a row per unit, a column per dimension
        for overlay, pair in zip(batch.template.overlays, pairs.T, strict=True):
            runs = np.diff(overlay.first)
            counts[mine] *= runs[pair]
    return counts


def _copy(moved: Plan) -> Move:
    """What the plan does on this rank where no rank is sent anything: so nobody needs to be asked."""
    rank = compat.my_rank()
    want, _ = wanted(moved, rank)
    boxes = [(transfer.src_slices, transfer.dst_slices) for transfer in moved.transfers(src=rank)]

    def copy(src: Tensor | None, *, out: Tensor | None, records_gradient: bool = False) -> None:
        given = by_key(want, src)
        fits(want, given)
        for here, there in boxes:
            assert out is not None, "who keeps something is on both sides"
            out[there].copy_(given[""][here])

    return copy


def _stays(moved: Plan) -> bool:
    """Whether every rank has all that it needs, and has only to copy it."""
    if moved.rules[""] != Reduction():
        return False
    received = moved.received_bytes()
    return not any(received.values())


_ByGroup: TypeAlias = dict[dist.ProcessGroup | None, Moves]


def move_between(src: Layout, dst: Layout, meshes: Iterable[DeviceMesh | None]) -> Move | None:
    """The move among the ranks of both layouts; None on a rank that has no part in it.

    Collective over them, and the first time among such ranks as `group_for` is, to which `meshes`
    go.
    """
    ranks = {*src.mesh.ranks, *dst.mesh.ranks}
    group = group_for(ranks, meshes)
    if compat.my_rank() not in ranks:
        return None
    by_group: _ByGroup = world().kept.setdefault(Moves, {})
    if group not in by_group:
        by_group[group] = Moves(group)
    return by_group[group].between(src, dst)
