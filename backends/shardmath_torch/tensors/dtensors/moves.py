"""Moves between two layouts, compiled once and kept.

1. All ranks of a group make its moves in one order, and forget the same ones, since compiling is
   for all of them: so what is kept is bounded by a number that each rank computes from the plans
   alone.
2. Moves, as groups, last as long as the default process group under which they were made.
3. A plan under which every rank keeps what it has is a copy here, about which nobody is asked,
   unless ranks have something to agree on besides (`voted`), or some are on one of the meshes alone.
4. A move has a name that is the same on all ranks that made the same moves: what its gradient
   belongs to. Moves that ranks agree on are counted, and copies since the last of them, so that
   ranks which copied more often are in step again after the next move. Each thread has counts of
   its own, since the moves of two threads may come in any order.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardmath.base.arrays import Ints
from shardmath.base.errors import ExchangeError
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath.plans.reduction import Reduction
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.turns import in_thread
from shardmath_torch.moves.exchange.local import by_key, fits, wanted
from shardmath_torch.moves.movers.calls import Call
from shardmath_torch.moves.movers.compile import compile
from shardmath_torch.moves.movers.mover import Mover, move_by
from shardmath_torch.tensors.dtensors.devicemesh import group_for, world

__all__ = ["SILENT", "TensorMove", "Moves", "Said", "Used", "move_between", "weigh_plan"]

MOST_BYTES = 64 << 20
"""About what the moves of a group may take on a rank, apart from staging."""

BYTES_PER_MOVE, BYTES_PER_PIECE = 30_000, 1_700
"""Measured with tracemalloc: a move without pieces, and each piece that a rank sends or receives (CPython 3.11)."""


class Said(NamedTuple):
    """What the move of a gradient says of itself: of which move it is, and whether autograd records it."""

    purpose: str = ""
    records_gradient: bool = False


SILENT = Said()
"""A move of which nothing is said."""


class TensorMove(Protocol):
    """A compiled move of one tensor."""

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        """Moves `src`, this rank's source tensor, into `out`, its destination; all ranks say one `said`."""


class _Compiled(NamedTuple):
    """A mover that autograd uses."""

    mover: Mover

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        purpose, records_gradient = said
        move_by(self.mover, Call(src, out, purpose=purpose, records_gradient=records_gradient))


class _Key(NamedTuple):
    """A move, and whether ranks vote on it even where they only copy."""

    src: Layout
    dst: Layout
    voted: bool


class _Kept(NamedTuple):
    move: TensorMove
    nbytes: int
    copies: bool


class _Counts(NamedTuple):
    """The moves of a thread that ranks agreed on, and its copies since the last of them."""

    moves: int = 0
    copies: int = 0

    def advance(self, copies: bool) -> _Counts:
        """The counts after one more copy, or one more move."""
        return _Counts(self.moves, self.copies + 1) if copies else _Counts(self.moves + 1)

    @property
    def name(self) -> str:
        """What the latest move is called."""
        copy = f"copy {self.copies} after " if self.copies else ""
        return f"{copy}move {self.moves}"


class Used(NamedTuple):
    """A kept move, which says of itself when it is used."""

    moves: Moves
    key: _Key
    kept: _Kept

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said = SILENT) -> str:
        """Moves as `TensorMove` does, and returns the move's name."""
        return self.moves.use(self.key, self.kept, src, out, said)


class Moves:
    """The latest moves of one group, by layouts, that together weigh at most `most` bytes, or the latest alone."""

    def __init__(self, group: dist.ProcessGroup | None, most: int = MOST_BYTES) -> None:
        self._group, self._most = group, most
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._nbytes = 0
        self._counts: dict[str, _Counts] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def between(self, src: Layout, dst: Layout, *, voted: bool = False) -> Used:
        """The move, made now if it is not kept. Collective over the group.

        Ranks vote on a copy, too, where they have asked for it (`voted`).
        """
        key = _Key(src, dst, voted)
        if key not in self._kept:
            self._keep(key, self._make(key))
        return Used(self, key, self._kept[key])

    def _make(self, key: _Key) -> _Kept:
        """The move and its weight, weighed before ranks have agreed, so that all keep it who have."""
        moved = plan(key.src, key.dst)
        nbytes = weigh_plan(moved)
        copies = _stays(moved) and not key.voted
        if copies:
            return _Kept(_copy(moved), nbytes, copies)
        mover = compile(moved, group=self._group)
        return _Kept(_Compiled(mover), nbytes, copies)

    def use(
        self, key: _Key, kept: _Kept, src: Tensor | None, out: Tensor | None, said: Said = SILENT
    ) -> str:
        """One move, and its name. It is the latest once it has gone well, on all ranks alike.

        One that ranks refused is forgotten: if some of them keep it and others do not, a compile
        would meet a move each time; so they find together at the next try.
        """
        try:
            kept.move(src, out=out, said=said)
        except ExchangeError:
            forgotten = self._kept.pop(key, None)
            if forgotten is not None:
                self._nbytes -= forgotten.nbytes
            raise
        if key in self._kept:
            self._kept.move_to_end(key)
        thread = in_thread(None)
        counts = self._counts.get(thread, _Counts()).advance(kept.copies)
        self._counts[thread] = counts
        # Moves of two groups have the same numbers, and gradients of both may meet in one of them.
        group = "" if self._group is None else f" of group {self._group.group_name}"
        return counts.name + group + thread

    def _keep(self, key: _Key, made: _Kept) -> None:
        self._kept[key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self._most and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.nbytes


def weigh_plan(plan: Plan) -> int:
    """About the bytes that a move of this plan takes on the rank with most pieces; the same on all ranks."""
    sets = plan.lines.sets
    receivers, holders = _sets_of_rows(plan)
    boxes = _count_boxes(plan)
    sizes = np.array([len(ranks) for ranks in sets], np.int64)
    leaving = boxes * sizes[receivers]  # a holder sends each box to each of the receivers
    pieces: Counter[int] = Counter()
    for number, ranks in enumerate(sets):
        received = int(boxes[receivers == number].sum())
        # What a set holds is sent by its ranks in equal shares.
        sent = int(leaving[holders == number].sum()) // max(1, len(ranks))
        pieces.update(dict.fromkeys(ranks, received + sent))
    return BYTES_PER_MOVE + BYTES_PER_PIECE * max(pieces.values(), default=0)


def _sets_of_rows(plan: Plan) -> tuple[Ints, Ints]:
    """Of each row of the plan's lines, the numbers of the sets of its receivers and of its holders."""
    demands = plan.lines
    block = np.arange(len(demands.nbytes)).repeat(np.diff(demands.row_first))
    line_of_block = np.arange(len(demands.holders)).repeat(np.diff(demands.first))
    return demands.receivers[block], demands.holders[line_of_block[block]]


def _count_boxes(plan: Plan) -> Ints:
    """Of each row of the plan's lines, how many boxes its unit has: the product over dimensions."""
    demands = plan.lines
    counts = np.ones(len(demands.unit), np.int64)
    for number, batch in enumerate(plan.batches):
        mine = demands.batch == number
        pairs = batch.template.unit_pairs[
            demands.unit[mine]
        ]  # a row per unit, a column per dimension
        for overlay, pair in zip(batch.template.overlays, pairs.T, strict=True):
            runs = np.diff(overlay.first)
            counts[mine] *= runs[pair]
    return counts


def _copy(plan: Plan) -> TensorMove:
    """What the plan does on this rank where no rank is sent anything: so nobody needs to be asked."""
    rank = compat.my_rank()
    want, _ = wanted(plan, rank)
    boxes = [(transfer.src_slices, transfer.dst_slices) for transfer in plan.transfers(src=rank)]

    def copy(src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        given = by_key(want, src)
        fits(want, given)
        for here, there in boxes:
            assert out is not None, "who keeps something is on both sides"
            out[there].copy_(given[""][here])

    return copy


def _stays(plan: Plan) -> bool:
    """Whether every rank has all that it needs, and has only to copy it."""
    if plan.rules[""] != Reduction():
        return False
    received = plan.received_bytes()
    return not any(received.values())


_ByGroup: TypeAlias = dict[dist.ProcessGroup | None, Moves]


def move_between(
    src: Layout, dst: Layout, meshes: Iterable[DeviceMesh | None], *, voted: bool = False
) -> Used | None:
    """The move among the ranks of both layouts; None on a rank that has no part in it.

    With `voted`, on all ranks alike, they vote even where each only copies; so they do where some
    are on one mesh alone. Collective over them, and the first time among such ranks as `group_for`
    is, to which `meshes` go.
    """
    senders, receivers = set(src.mesh.ranks), set(dst.mesh.ranks)
    ranks = senders | receivers
    # A rank outside a mesh is told by nothing but its DTensor what the tensor is, which may be another.
    voted = voted or senders != receivers
    group = group_for(ranks, meshes)
    if compat.my_rank() not in ranks:
        return None
    by_group: _ByGroup = world().kept.setdefault(Moves, {})
    if group not in by_group:
        by_group[group] = Moves(group)
    return by_group[group].between(src, dst, voted=voted)
