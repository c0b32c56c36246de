"""Moves between two layouts, compiled once and cached.

1. Compiling is collective, so all ranks of a group make its moves in the same order and evict the
   same ones: the size of the cache is a number that each rank computes from the plans only.
2. Moves, like groups, last as long as the default process group under which they were made.
3. If every rank has all that it needs, the move is a local copy without communication, unless ranks
   must vote (`voted`), or some are on only one of the meshes.
4. A move has a name, equal on all ranks that made the same moves, which its gradient refers to. It
   counts moves with communication, and copies since the last of them, so that ranks that copied more
   often are in step again after the next move. Each thread has separate counts, since the moves of
   two threads may come in any order.
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
"""About how many bytes the cached moves of a group may take on a rank, without staging."""

BYTES_PER_MOVE, BYTES_PER_PIECE = 30_000, 1_700
"""Measured with tracemalloc: a move without pieces, and each piece that a rank sends or receives (CPython 3.11)."""


class Said(NamedTuple):
    """Facts about the move of a gradient in a backward; ranks compare these facts before the move. `purpose` is text
    that names the forward move to reverse; `records_gradient` is whether autograd records the gradient's move, too
    (`create_graph=True`).
    """

    purpose: str = ""
    records_gradient: bool = False


SILENT = Said()
"""For a move that is not of a gradient."""


class TensorMove(Protocol):
    """The interface of a callable that moves one tensor, as planned before, from this rank's source tensor `src` into
    its destination tensor `out`. `said` has facts that all ranks compare first.
    """

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        """Move `src`, this rank's source tensor, into `out`, its destination; `said` is the same on all ranks."""


class _Compiled(NamedTuple):
    """A mover that autograd uses."""

    mover: Mover

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        purpose, records_gradient = said
        move_by(self.mover, Call(src, out, purpose=purpose, records_gradient=records_gradient))


class _Key(NamedTuple):
    """The key of a move: its layouts, and whether ranks vote on it even if they only copy."""

    src: Layout
    dst: Layout
    voted: bool


class _CachedMove(NamedTuple):
    """A move, its estimated size in the cache, and whether it only copies on this rank, as it then does on all."""

    move: TensorMove
    nbytes: int
    copies: bool


class _Counts(NamedTuple):
    """A thread's moves with communication, and its copies since the last of them."""

    moves: int = 0
    copies: int = 0

    def advance(self, copies: bool) -> _Counts:
        """Return new counters with one more local copy if `copies` is True, otherwise with one more move (with
        communication). The field `moves` counts all moves; the field `copies` counts copies since the last move.
        """
        return _Counts(self.moves, self.copies + 1) if copies else _Counts(self.moves + 1)

    @property
    def name(self) -> str:
        """The latest move or copy in words: "move 3", or "copy 2 after move 3"."""
        copy = f"copy {self.copies} after " if self.copies else ""
        return f"{copy}move {self.moves}"


class Used(NamedTuple):
    """A callable that runs a cached move, and marks that move as the latest used."""

    moves: Moves
    key: _Key
    kept: _CachedMove

    def __call__(self, src: Tensor | None, *, out: Tensor | None, said: Said = SILENT) -> str:
        """Moves as `TensorMove` does, and returns the move's name."""
        return self.moves.use(self.key, self.kept, src, out, said)


class Moves:
    """A cache of a group's compiled moves, by pair of layouts, which evicts the least recently used until they take at
    most `most` bytes or one is left.

    Bytes are estimated, without staging.
    """

    def __init__(self, group: dist.ProcessGroup | None, most: int = MOST_BYTES) -> None:
        self._group, self._most_bytes = group, most
        self._cached: OrderedDict[_Key, _CachedMove] = OrderedDict()
        self._nbytes = 0
        self._counts: dict[str, _Counts] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def between(self, src: Layout, dst: Layout, *, voted: bool = False) -> Used:
        """Return a cached or new callable that moves a tensor from layout `src` to `dst`. With `voted=True`, ranks
        check before each move that all make the same one, even if no rank needs data from another. Collective over the
        group.
        """
        key = _Key(src, dst, voted)
        if key not in self._cached:
            self._add(key, self._make(key))
        return Used(self, key, self._cached[key])

    def _make(self, key: _Key) -> _CachedMove:
        """Compile the move. Its size is from the plan, so that all ranks cache the same moves."""
        moved = plan(key.src, key.dst)
        nbytes = weigh_plan(moved)
        only_copies = _is_local(moved) and not key.voted
        if only_copies:
            return _CachedMove(_copy(moved), nbytes, copies=True)
        mover = compile(moved, group=self._group)
        return _CachedMove(_Compiled(mover), nbytes, copies=False)

    def use(
        self,
        key: _Key,
        kept: _CachedMove,
        src: Tensor | None,
        out: Tensor | None,
        said: Said = SILENT,
    ) -> str:
        """Run the cached move `kept`, whose key in the cache is `key`, from `src` into `out`, and return its name, as
        "move 3 of group 0". `said` tells which gradient is moved, if any, and must be equal on all ranks.

        After a success, all ranks keep the move as the latest in the cache. A move that raised ExchangeError is
        evicted: if only some ranks had it cached, they would move while others compile, at every further try.
        """
        try:
            kept.move(src, out=out, said=said)
        except ExchangeError:
            forgotten = self._cached.pop(key, None)
            if forgotten is not None:
                self._nbytes -= forgotten.nbytes
            raise
        # A caller may use a move that has been evicted since.
        if key in self._cached:
            self._cached.move_to_end(key)
        thread = in_thread(None)  # "" or " in thread NAME"
        counts = self._counts.get(thread, _Counts()).advance(kept.copies)
        self._counts[thread] = counts
        # Moves of two groups have the same numbers, and gradients of both may be moved in one group.
        group = "" if self._group is None else f" of group {self._group.group_name}"
        return counts.name + group + thread

    def _add(self, key: _Key, made: _CachedMove) -> None:
        self._cached[key] = made
        self._nbytes += made.nbytes
        while self._nbytes > self._most_bytes and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._nbytes -= oldest.nbytes


def weigh_plan(plan: Plan) -> int:
    """Estimate the bytes of memory that a compiled move of `plan` takes on its busiest rank, from the table of all
    bytes that it sends (`plan.lines`): a row of the table is elements that one set of ranks holds and another needs.

    All ranks get the same number.
    """
    sets = plan.lines.sets
    receivers, holders = _sets_of_rows(plan)
    boxes = _count_boxes(plan)
    sizes = np.array([len(ranks) for ranks in sets], np.int64)
    sent_boxes = boxes * sizes[receivers]  # a holder sends each box to each of the receivers
    pieces: Counter[int] = Counter()
    for number, ranks in enumerate(sets):
        received = int(boxes[receivers == number].sum())
        # The ranks of a set of holders send equal shares.
        sent = int(sent_boxes[holders == number].sum()) // max(1, len(ranks))
        pieces.update(dict.fromkeys(ranks, received + sent))
    return BYTES_PER_MOVE + BYTES_PER_PIECE * max(pieces.values(), default=0)


def _sets_of_rows(plan: Plan) -> tuple[Ints, Ints]:
    """For each row of the plan's table, the numbers of the sets of its receivers and of its holders.

    A line has one set of holders and consists of blocks, each with one set of receivers, which consist of rows.
    """
    demands = plan.lines
    rows_per_block = np.diff(demands.row_first)
    blocks_per_line = np.diff(demands.first)
    block_of_row = np.arange(len(demands.nbytes)).repeat(rows_per_block)
    line_of_block = np.arange(len(demands.holders)).repeat(blocks_per_line)
    line_of_row = line_of_block[block_of_row]
    return demands.receivers[block_of_row], demands.holders[line_of_row]


def _count_boxes(plan: Plan) -> Ints:
    """For each row of the plan's table, how many boxes its unit (the row's elements of one tensor) has: the product of
    the numbers of runs over dimensions."""
    demands = plan.lines
    counts = np.ones(len(demands.unit), np.int64)
    for number, batch in enumerate(plan.batches):
        in_batch = demands.batch == number
        # A row per unit, a column per dimension: the number of a pair, as which an overlay lists the positions in a
        # dimension that one set of ranks holds and one needs.
        pairs = batch.template.unit_pairs[demands.unit[in_batch]]
        for overlay, pair in zip(batch.template.overlays, pairs.T, strict=True):
            runs_of_pair = np.diff(overlay.first)
            counts[in_batch] *= runs_of_pair[pair]
    return counts


def _copy(plan: Plan) -> TensorMove:
    """The move of a plan that sends nothing: a copy on this rank, without communication."""
    rank = compat.my_rank()
    want, _ = wanted(plan, rank)
    boxes = [(transfer.src_slices, transfer.dst_slices) for transfer in plan.transfers(src=rank)]

    def copy(src: Tensor | None, *, out: Tensor | None, said: Said) -> None:
        given = by_key(want, src)
        fits(want, given)
        for src_slices, dst_slices in boxes:
            assert out is not None, "a rank that copies is on both sides"
            # The only tensor of a plan of two layouts is called "".
            out[dst_slices].copy_(given[""][src_slices])

    return copy


def _is_local(plan: Plan) -> bool:
    """Whether every rank holds all that it needs, so that the move only copies."""
    # The default rule is for tensors without partial values.
    if plan.rules[""] != Reduction():
        return False
    received = plan.received_bytes()
    return not any(received.values())


_ByGroup: TypeAlias = dict[dist.ProcessGroup | None, Moves]


def move_between(
    src: Layout, dst: Layout, meshes: Iterable[DeviceMesh | None], *, voted: bool = False
) -> Used | None:
    """Return a cached or newly compiled callable that moves a tensor from layout `src` to `dst`, or None on a rank
    outside both. `meshes` are searched for a process group of all ranks of `src` and `dst`. With `voted=True`, ranks
    check before each move that all make the same one, even if no rank needs data from another.

    They also check this if some are on only one mesh; `voted` is the same on all ranks. Collective over these ranks,
    and the first time among them as `group_for` is.
    """
    senders, receivers = set(src.mesh.ranks), set(dst.mesh.ranks)
    ranks = senders | receivers
    # A rank outside a mesh knows the tensor only by its DTensor, which may be of another tensor: so all vote.
    voted = voted or senders != receivers
    group = group_for(ranks, meshes)
    if compat.my_rank() not in ranks:
        return None
    by_group: _ByGroup = world().kept.setdefault(Moves, {})
    if group not in by_group:
        by_group[group] = Moves(group)
    return by_group[group].between(src, dst, voted=voted)
