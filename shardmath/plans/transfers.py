"""Transfers: the pieces of a plan, each one box of one tensor between two ranks.

1. A Transfer is a piece of one tensor between two ranks.
2. The tensors of a batch have the same pieces, so a stretch is expanded once for all of them.
3. All stretches of a rank are expanded together. `spell_transfers`, which takes one stretch, defines what this gives.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.layouts.holdings import Windows
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.pieces import BoxPiece, UnitRange, expand, expand_all
from shardmath.plans.stretches import Stretch, list_kept, list_received, list_sent

__all__ = ["Planned", "Transfer", "list_transfers", "spell_transfers"]


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
    stretches = itertools.chain(list_kept(plan.lines, rank), list_others(plan.lines, rank))
    return itertools.chain.from_iterable(_spell_all(plan, stretches))


def _spell_all(plan: Planned, stretches: Iterable[Stretch]) -> Iterator[Iterable[Transfer]]:
    """The transfers of each part of these stretches, a part after the other."""
    rows = _list_rows(plan.lines)
    parts: list[_Part] = []
    for stretch in stretches:
        parts += _list_parts(plan, rows, stretch, relayed=False)
    # Parts of one template are expanded together.
    places: dict[int, list[UnitRange]] = {}
    for part in parts:
        places.setdefault(id(part.batch.template), []).append(part.place)
    templates = {id(part.batch.template): part.batch.template for part in parts}
    pieces = {key: iter(expand_all(templates[key], some)) for key, some in places.items()}
    for part in parts:
        some = next(pieces[id(part.batch.template)])
        yield _name_pieces(plan, part, some, relayed=False)


def spell_transfers(
    plan: Planned, demands: Demands, stretch: Stretch, *, relayed: bool = False
) -> Iterator[Transfer]:
    """Yield, tensor by tensor, the transfers that carry `stretch`, a range of bytes in `demands` that goes from one
    rank to another. `relayed` means that the sender forwards bytes that it has received.

    A relay sends what it has received from its place in the destination, where it is folded in already.
    """
    for part in _list_parts(plan, _list_rows(demands), stretch, relayed):
        pieces = expand(part.batch.template, *part.place, relayed=relayed)
        yield from _name_pieces(plan, part, pieces, relayed)


class _Part(NamedTuple):
    """The same elements of some tensors of a batch, which are a part of a stretch."""

    stretch: Stretch
    batch: Batch
    names: Sequence[str]
    place: UnitRange


def _list_parts(plan: Planned, rows: _Rows, stretch: Stretch, relayed: bool) -> Iterator[_Part]:
    """The parts of a stretch."""
    for row, first_byte, end_byte in _find_rows(rows, stretch):
        batch = plan.batches[rows.batch[row]]
        itemsize = batch.template.src.itemsize
        unit = rows.unit[row]
        first_element = rows.lo[row]
        sending_mesh = batch.dst if relayed else batch.src
        sender = sending_mesh.position(stretch.sender)
        receiver = batch.dst.position(stretch.receiver)
        # A row has the same elements of each tensor of the batch, one tensor after the other.
        for i, k, lo_byte, hi_byte in _divide_by_tensor(first_byte, end_byte, rows.each[row]):
            lo = first_element + lo_byte // itemsize
            hi = first_element + hi_byte // itemsize
            yield _Part(stretch, batch, batch.names[i:k], UnitRange(unit, sender, receiver, lo, hi))


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


_make_transfer = partial(tuple.__new__, Transfer)
"""The same as Transfer(...), but all in C."""


def _name_pieces(
    plan: Planned, part: _Part, pieces: list[BoxPiece], relayed: bool
) -> Iterable[Transfer]:
    """The pieces as transfers of each tensor of a part. A sender that relays sends from its destination tensors."""
    names = part.names
    batch = part.batch
    rule = batch.template.reduction
    # Tensors of a batch have equally many windows, so the first stands for all.
    sources = plan.src[names[0]]
    targets = plan.dst[names[0]]
    dst_names = src_names = names
    # Most tensors are one window on both sides, whose local name is the tensor's.
    if not (sources.is_single and targets.is_single):
        dst_names = [targets.local_name(name, batch.target) for name in names]
        src_names = dst_names
        if not relayed:
            src_names = [sources.local_name(name, batch.source) for name in names]
    same = itertools.repeat
    ends = same(part.stretch.sender), same(part.stretch.receiver)
    by_piece = []
    for src, dst, at, shape, nbytes, addend in pieces:
        op = "copy" if relayed else rule.op_of(addend)
        ours = src_names, same(src), dst_names, same(dst)
        common = same(shape), same(nbytes), same(at), same(addend)
        rows = zip(names, *ends, same(op), *ours, *common, strict=False)  # only names end
        by_piece.append(map(_make_transfer, rows))
    if len(by_piece) == 1:
        return by_piece[0]
    # All pieces of a tensor, then all pieces of the next.
    return itertools.chain.from_iterable(zip(*by_piece, strict=True))


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
