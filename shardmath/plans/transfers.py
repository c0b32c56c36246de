"""Transfers: the pieces of a plan, each one box of one tensor between two ranks.

1. A piece is one box of a unit, or whole rows of one box, as its source and its destination see it. A
   Transfer is a piece of one tensor between two ranks.
2. The tensors of a batch have the same pieces, so a stretch is expanded once for all of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import Partition
from shardmath.layouts.holdings import Windows
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.stretches import Stretch, list_kept, list_received, list_sent
from shardmath.plans.template import Template
from shardmath.plans.units import Listed, Rows, Sizes, list_columns, unit_boxes

__all__ = ["BoxPiece", "Planned", "Transfer", "expand", "list_transfers", "spell_transfers"]


@public
class Transfer(NamedTuple):
    """One box of one tensor that a rank sends to another rank, or keeps if both ranks are the same.

    It prints as `sender -> receiver op [global box] of [box in the sender's tensor] to [box in the
    receiver's], bytes`. Both sides list `shape` elements row-major. `op` is "copy", or the operation
    that combines the piece with the value that is there; pieces of one element enter in order of `addend`.
    """

    tensor: str
    src_rank: int
    dst_rank: int
    op: str
    src_tensor: str
    src_slices: tuple[slice, ...]
    dst_tensor: str
    dst_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    global_slices: tuple[slice, ...]
    addend: int = 0

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.tensor else ""
        box = _show_box(self.global_slices)
        src = _show_box(self.src_slices)
        dst = _show_box(self.dst_slices)
        ends = f"{self.src_rank} -> {self.dst_rank}"
        return f"{name}{ends} {self.op} {box} of {src} to {dst}, {self.nbytes} B"


def _show_box(slices: tuple[slice, ...]) -> str:
    ranges = ", ".join(f"{s.start}:{s.stop}" for s in slices)
    return f"[{ranges}]"


class Planned(Protocol):
    """The parts of a Plan from which its transfers are listed: source and destination layouts by tensor name, groups of
    equally sharded tensors, and a table of the bytes that ranks hold and need."""

    @property
    def src(self) -> Mapping[str, Windows]: ...
    @property
    def dst(self) -> Mapping[str, Windows]: ...
    @property
    def batches(self) -> tuple[Batch, ...]: ...
    @property
    def lines(self) -> Demands: ...
    @property
    def src_ranks(self) -> tuple[int, ...]: ...


def list_transfers(plan: Planned, src: int | None, dst: int | None) -> Iterator[Transfer]:
    """Yield all transfers, or only those from rank `src`, to rank `dst`, or, given both, from `src` to `dst`."""
    if src is not None:
        sent = _list_of_rank(plan, src, list_sent)
        if dst is None:
            return sent
        return (t for t in sent if t.dst_rank == dst)
    if dst is not None:
        return _list_of_rank(plan, dst, list_received)
    by_rank = (_list_of_rank(plan, rank, list_sent) for rank in plan.src_ranks)
    return itertools.chain.from_iterable(by_rank)


def _list_of_rank(
    plan: Planned, rank: int, list_others: Callable[[Demands, int], Iterator[Stretch]]
) -> Iterator[Transfer]:
    """The transfers that stay on the rank, then the sent or the received ones, as `list_others` lists."""
    kept = list_kept(plan.lines, rank)
    for stretch in itertools.chain(kept, list_others(plan.lines, rank)):
        yield from spell_transfers(plan, plan.lines, stretch)


def spell_transfers(
    plan: Planned, demands: Demands, stretch: Stretch, *, relayed: bool = False
) -> Iterator[Transfer]:
    """Yield, tensor by tensor, the transfers that carry `stretch`, a range of bytes in `demands` that goes from one
    rank to another. `relayed` means that the sender forwards bytes that it has received.

    A relay sends what it has received from its place in the destination, where it is folded in already.
    """
    rows = _list_rows(demands)
    for row, first_byte, end_byte in _find_rows(rows, stretch):
        batch = plan.batches[rows.batch[row]]
        t = batch.template
        itemsize = t.src.itemsize
        unit = rows.unit[row]
        first_element = rows.lo[row]
        sending_mesh = batch.dst if relayed else batch.src
        sender = sending_mesh.position(stretch.sender)
        receiver = batch.dst.position(stretch.receiver)
        # A row has the same elements of each tensor of the batch, one tensor after the other.
        for i, k, lo_byte, hi_byte in _divide_by_tensor(first_byte, end_byte, rows.each[row]):
            lo = first_element + lo_byte // itemsize
            hi = first_element + hi_byte // itemsize
            pieces = expand(t, unit, sender, receiver, lo, hi, relayed=relayed)
            names = batch.names[i:k]
            yield from _name_pieces(plan, batch, names, stretch, pieces, relayed)


def _divide_by_tensor(lo: int, hi: int, each: int) -> Iterator[tuple[int, int, int, int]]:
    """(i, k, a, b): bytes a..b-1 of each of tensors i..k-1, for bytes lo..hi-1 of tensors of `each` bytes.

    At most three: the rest of a tensor, then whole ones, then the beginning of one.
    """
    i, a = divmod(lo, each)
    k, b = divmod(hi, each)
    if i == k:
        yield i, i + 1, a, b
        return
    if a:
        yield i, i + 1, a, each
        i += 1
    if i < k:
        yield i, k, 0, each
    if b:
        yield k, k + 1, 0, b


def _name_pieces(
    plan: Planned,
    batch: Batch,
    names: Sequence[str],
    stretch: Stretch,
    pieces: list[BoxPiece],
    relayed: bool,
) -> list[Transfer]:
    """The pieces as transfers of each of these tensors. A sender that relays sends from its destination tensors."""
    rule = batch.template.reduction
    entering = []
    for piece in pieces:
        op = "copy" if relayed else rule.op_of(piece.addend)
        entering.append((op, *piece))
    ends = stretch.sender, stretch.receiver
    # Tensors of a batch have equally many windows, so the first stands for all.
    sources = plan.src[names[0]]
    targets = plan.dst[names[0]]
    new = tuple.__new__  # the same as Transfer(...) in half the time
    # Most tensors are one window on both sides, whose local name is the tensor's. `at` are global slices.
    if sources.is_single and targets.is_single:
        return [
            new(Transfer, (name, *ends, op, name, src, name, dst, shape, nbytes, at, addend))
            for name in names
            for op, src, dst, at, shape, nbytes, addend in entering
        ]
    out = []
    for name in names:
        dst_name = targets.local_name(name, batch.target)
        src_name = dst_name if relayed else sources.local_name(name, batch.source)
        for op, src, dst, at, shape, nbytes, addend in entering:
            fields = (name, *ends, op, src_name, src, dst_name, dst, shape, nbytes, at, addend)
            out.append(new(Transfer, fields))
    return out


class _Rows(NamedTuple):
    """The columns of Demands as lists, in which single items are found faster than in arrays."""

    row_first: list[int]
    nbytes: list[int]
    at: list[int]
    batch: list[int]
    unit: list[int]
    lo: list[int]
    each: list[int]


@memo(8)
def _list_rows(demands: Demands) -> _Rows:
    """Copy the columns of `demands` into lists, in which single items are found faster."""
    columns = [getattr(demands, name) for name in _Rows._fields]
    return _Rows(*(column.tolist() for column in columns))


def _find_rows(rows: _Rows, stretch: Stretch) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first byte in the row, last byte in it + 1) for all rows in which the stretch has bytes."""
    block, _, _, lo, hi = stretch
    begin = rows.row_first[block]
    end = rows.row_first[block + 1]
    first = bisect.bisect_right(rows.at, lo, begin, end) - 1
    for row in range(first, end):
        start = rows.at[row]
        if start >= hi:
            return
        # A row ends where the next one begins, the last one where the block ends.
        is_last = row + 1 == end
        stop = rows.nbytes[block] if is_last else rows.at[row + 1]
        yield row, max(lo - start, 0), min(hi, stop) - start


class BoxPiece(NamedTuple):
    """One box of elements as slices of the source's array, of the destination's array and of the global tensor."""

    src: tuple[slice, ...]
    dst: tuple[slice, ...]
    global_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    addend: int


Columns: TypeAlias = tuple[int, ...]
"""By dimension, the index in the source's key, or in the destination's goal, of the part that an end holds."""


def expand(
    t: Template, unit: int, sender: int, receiver: int, lo: int, hi: int, *, relayed: bool = False
) -> list[BoxPiece]:
    """List, as BoxPieces, the boxes of elements lo..hi-1 of `unit` (elements that move together) that `sender` sends to
    `receiver`, both positions in meshes. With `relayed`, the sender is a destination rank that forwards what it
    received.

    lo and hi are at boxes, or at rows of a box, as `snap` gives them.
    """
    find_sending = _find_columns if relayed else _find_source_columns
    sending = find_sending(t, unit, sender)
    receiving = _find_columns(t, unit, receiver)
    return _expand(t, unit, sending, receiving, lo, hi, relayed)


@memo(1 << 14)
def _find_source_columns(t: Template, unit: int, position: int) -> Columns:
    """By dimension, the index in the unit's key of the part that a source position holds."""
    columns = []
    pairs = t.unit_pairs[unit].tolist()
    for over, pair in zip(t.overlays, pairs, strict=True):
        key_parts = over.keys[over.pair_key[pair]]
        columns.append(_find_column(key_parts, over.source, position, t.src.mesh))
    return tuple(columns)


@memo(1 << 14)
def _find_columns(t: Template, unit: int, position: int) -> Columns:
    """By dimension, the index in the unit's goal (the parts that get the unit) of the part that the destination
    position holds."""
    columns = []
    pairs = t.unit_pairs[unit].tolist()
    for over, pair in zip(t.overlays, pairs, strict=True):
        goal = over.goals[over.pair_goal[pair]]
        columns.append(_find_column(goal, over.target, position, t.dst.mesh))
    return tuple(columns)


def _find_column(parts: tuple[int, ...], held: Partition, position: int, mesh: Mesh) -> int:
    """The index in `parts`, a key or a goal, of the part that the rank at this position of the mesh holds."""
    if len(parts) == 1:
        return 0
    part_of_position = held.by_rank(mesh)
    return parts.index(int(part_of_position[position]))


@memo(1 << 14)
def _expand(
    t: Template, unit: int, sending: Columns, receiving: Columns, lo: int, hi: int, relayed: bool
) -> list[BoxPiece]:
    """The pieces between any two positions with these columns."""
    boxes, sizes, ends = unit_boxes(t, unit)
    listed = [list_columns(over) for over in t.overlays]
    first = bisect.bisect_right(ends, lo)
    last = bisect.bisect_left(ends, hi)
    out = []
    for box in range(first, last + 1):
        begin = ends[box - 1] if box else 0
        end = min(hi, ends[box])
        starts = _find_starts(listed, boxes[box], sending, receiving, relayed)
        shape = _cut_box(starts, sizes[box], max(lo - begin, 0), end - begin)
        piece = _make_piece(t, starts, shape)
        out.append(piece)
    return out


class _Starts(NamedTuple):
    """The first position of a box at the source, at the destination, and in the tensor; hidden dimensions first."""

    src: list[int]
    dst: list[int]
    tensor: list[int]


def _find_starts(
    listed: list[Listed], rows: Rows, sending: Columns, receiving: Columns, relayed: bool
) -> _Starts:
    """The starts of the box of these rows."""
    starts = _Starts([], [], [])
    for overlay, row, src, dst in zip(listed, rows, sending, receiving, strict=True):
        # A relay sends from its destination tensor.
        source = overlay.dst if relayed else overlay.src
        starts.src.append(source[row][src])
        starts.dst.append(overlay.dst[row][dst])
        starts.tensor.append(overlay.start[row])
    return starts


def _cut_box(starts: _Starts, sizes: Sizes, lo: int, hi: int) -> Sizes:
    """The sizes of elements lo..hi-1 of a box, which are whole rows; moves `starts` to the first of them."""
    if hi - lo == math.prod(sizes):
        return sizes
    # The rows of a box are its slices along the first dimension that is longer than 1.
    d = next(i for i, n in enumerate(sizes) if n > 1)
    inner = sizes[d + 1 :]
    row = math.prod(inner)
    for start in starts:
        start[d] += lo // row
    rows = (hi - lo) // row
    return (*sizes[:d], rows, *inner)


def _make_piece(t: Template, starts: _Starts, sizes: Sizes) -> BoxPiece:
    """The piece of this box, whose first `t.hidden` dimensions are addends and not the tensor's."""
    hidden = t.hidden
    shape = sizes[hidden:]
    src, dst, in_tensor = [_slice(start[hidden:], shape) for start in starts]
    nbytes = math.prod(shape) * t.src.itemsize
    # The first hidden dimension is that of the folded addends.
    addend = starts.tensor[0] if t.reduction.folded else 0
    return BoxPiece(src, dst, in_tensor, shape, nbytes, addend)


def _slice(start: list[int], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The box of this shape that begins at `start`."""
    return tuple([slice(a, a + n) for a, n in zip(start, shape, strict=True)])
