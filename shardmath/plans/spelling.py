"""Spelling: the transfers of parts, all at once.

1. Parts of a kind have the same boxes, of which slices are made once.
2. Transfers are rows of columns of objects, and are made some thousands at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, distinct, ranges
from shardmath.plans.boxes import OPS, PartBoxes, list_boxes
from shardmath.plans.demands import Batch, Demands, Ranks
from shardmath.plans.stretch_parts import Stretches, StretchParts, list_parts
from shardmath.plans.stretches import Stretch, list_kept, list_received, list_sent
from shardmath.plans.transfers import Planned, Transfer

__all__ = [
    "Names",
    "Rows",
    "list_names",
    "list_rows",
    "list_stretches",
    "list_transfers",
    "spell_parts",
    "spell_stretches",
]

_Item = TypeVar("_Item")


CHUNK = 4096
"""Transfers that are made together."""

FEW = 1024
"""Byte ranges of senders that are listed together."""


def list_transfers(plan: Planned, src: int | None, dst: int | None) -> Iterator[Transfer]:
    """Yield all transfers, or only those from rank `src`, to rank `dst`, or, given both, from `src` to `dst`."""
    is_all = src is None and dst is None
    tables = _list_all(plan) if is_all else [list_stretches(plan, src, dst)]
    return itertools.chain.from_iterable(spell_stretches(plan, given) for given in tables)


def _list_all(plan: Planned) -> Iterator[Stretches]:
    """All byte ranges, some senders after the others, so that the first transfers do not wait for all."""
    begin, count = 0, 1
    while begin < len(plan.src_ranks):
        given = _list_of_ranks(plan, plan.src_ranks[begin : begin + count], list_sent)
        yield given
        begin += count
        # Senders of few ranges are faster listed together.
        count = 2 * count if len(given.block) < FEW else 1


def list_stretches(plan: Planned, src: int | None, dst: int | None) -> Stretches:
    """Return the byte ranges of all transfers, or only of those from rank `src`, to rank `dst`, or, given both, from
    `src` to `dst`, in the order of transfers."""
    if src is None and dst is not None:
        return _list_of_ranks(plan, (dst,), list_received)
    given = _list_of_ranks(plan, plan.src_ranks if src is None else (src,), list_sent)
    return given if dst is None else given.take(given.receiver == dst)


def _list_of_ranks(
    plan: Planned, ranks: Ranks, list_others: Callable[[Demands, int], Iterator[Stretch]]
) -> Stretches:
    """Of each rank, what stays on it, then what it sends or receives, as `list_others` lists."""
    rows: list[Stretch] = []
    for rank in ranks:
        rows += list_kept(plan.lines, rank)
        rows += list_others(plan.lines, rank)
    return Stretches(*np.array(rows, np.int64).reshape(-1, len(Stretches._fields)).T)


def spell_stretches(plan: Planned, given: Stretches) -> Iterator[Transfer]:
    """Return the transfers of the byte ranges `given` of a plan, in their order."""
    if not len(given.block):
        return iter(())
    parts = list_parts(plan.lines, given)
    relayed = np.zeros(len(given.block), bool)
    transfers, _ = spell_parts(plan, plan.lines, given, parts, relayed)
    return transfers


def spell_parts(
    plan: Planned, demands: Demands, given: Stretches, parts: StretchParts, relayed: Bools
) -> tuple[Iterator[Transfer], Offsets]:
    """Return the transfers that send `parts` (parts of the byte ranges `given`), part by part, and Offsets that say
    which transfers send each part. `demands` is the table of the plan's bytes; where `relayed` is true, a range is sent
    from the sender's destination tensors, where it arrived before.

    The sender of a `relayed` stretch is a rank of the destination. In a reduction it sends what it has
    received and folded. Raises MeshError if a rank is not in the mesh of its side.
    """
    boxes, kind = list_boxes(demands, plan.batches, given, parts, relayed)
    named = list_names(plan, demands.batch[parts.row], relayed[parts.stretch])
    rows = list_rows(parts, named.first, boxes, kind)
    names = named.names, rows.name
    # Most tensors are one window on both sides, whose local name is the tensor's: then they are one column.
    src_names, dst_names = (
        names if local == named.names else (local, rows.name) for local in named[1:3]
    )
    sender, receiver = (
        (ranks[parts.stretch].tolist(), rows.part) for ranks in (given.sender, given.receiver)
    )
    op, src, dst, shape, nbytes, at, addend = (
        (column, rows.box) for column in _list_columns(boxes)
    )
    ends = names, sender, receiver, op, src_names, src, dst_names, dst
    transfers = itertools.chain.from_iterable(_make_transfers([*ends, shape, nbytes, at, addend]))
    counts = np.bincount(rows.part, minlength=len(parts.row))
    return transfers, Offsets.of_counts(counts)


class Rows(NamedTuple):
    """By transfer: the number of its part, the place of its tensor's name, and the number of its box."""

    part: Ints
    name: Ints
    box: Ints


def list_rows(parts: StretchParts, first_name: Ints, boxes: PartBoxes, kind: Ints) -> Rows:
    """List the transfers of `parts`, which have the boxes of their `kind`: all boxes of a tensor, then all of the
    next. The name of the first tensor of a part's batch has place `first_name`."""
    begin = first_name + parts.tensor
    name, part = ranges(begin, begin + parts.copies)
    of_kind = Offsets.of_counts(np.bincount(boxes.kind)).first
    first = of_kind[kind]
    count = of_kind[kind + 1] - first
    if not (count > 1).any():
        return Rows(part, name, first[part])
    box, copy = ranges(first[part], (first + count)[part])
    return Rows(part[copy], name[copy], box)


class Names(NamedTuple):
    """The names of the tensors of some batches, of their local tensors at the sender, and of those at the receiver; and
    by part, the place of the first tensor of its batch among them."""

    names: Sequence[str]
    sent: Sequence[str]
    received: Sequence[str]
    first: Ints


def list_names(plan: Planned, batch: Ints, relayed: Bools) -> Names:
    """List the names of all tensors of the batches of parts, given the number of each part's batch. A sender that is
    `relayed` sends from its tensors at the destination."""
    codes, which = distinct(batch * 2 + relayed)
    names: list[str] = []
    sent: list[str] = []
    received: list[str] = []
    counts = []
    for code in codes.tolist():
        number, is_relayed = divmod(code, 2)
        source, target = _list_local_names(plan, plan.batches[number])
        names += plan.batches[number].names
        # A relay sends from its tensor at the destination, in which the bytes arrived.
        sent += target if is_relayed else source
        received += target
        counts.append(len(target))
    first = Offsets.of_counts(np.array(counts, np.int64)).first[which]
    return Names(names, sent, received, first)


def _list_local_names(plan: Planned, batch: Batch) -> list[Sequence[str]]:
    """The local names of a batch's tensors at the source and at the destination."""
    ends: list[Sequence[str]] = []
    for side, window in ((plan.src, batch.source), (plan.dst, batch.target)):
        # Tensors of a batch have equally many windows, so the first stands for all.
        windows = side[batch.names[0]]
        local = batch.names
        if not windows.is_single:
            local = tuple(windows.local_name(name, window) for name in batch.names)
        ends.append(local)
    return ends


def _make_transfers(
    columns: Sequence[tuple[Sequence[object], Ints]],
) -> Iterator[Iterable[Transfer]]:
    """Transfers of these columns; a column is values, and the place among them of that of each transfer."""
    # An array of objects finds values in C; and few rows at a time stay in the processor's caches.
    arrays = {
        id(column): (np.fromiter(column[0], object, len(column[0])), column[1])
        for column in columns
    }
    # The same as Transfer(...), and all of it in C.
    make = partial(tuple.__new__, Transfer)
    for begin in range(0, len(columns[0][1]), CHUNK):
        some = slice(begin, begin + CHUNK)
        rows = {key: values.take(place[some]).tolist() for key, (values, place) in arrays.items()}
        yield map(make, zip(*(rows[id(column)] for column in columns), strict=True))


def _list_columns(boxes: PartBoxes) -> list[Sequence[object]]:
    """By box: operation, box at the source, at the destination, shape, bytes, box in the tensor, and addend."""
    tables = [_make_slices(start, boxes.size) for start in (boxes.src, boxes.dst, boxes.tensor)]
    tables.append(_transpose(boxes.size.tolist(), len(boxes.kind)))
    # Dimensions that a tensor lacks are in front.
    front = len(boxes.size) - boxes.ndim
    if front.any():
        first = front.tolist()
        tables = [[row[n:] for row, n in zip(rows, first, strict=True)] for rows in tables]
    src, dst, tensor, shape = tables
    ops = [OPS[number] for number in boxes.op.tolist()]
    return [ops, src, dst, shape, boxes.nbytes.tolist(), tensor, boxes.addend.tolist()]


def _make_slices(start: Ints, size: Ints) -> list[tuple[slice, ...]]:
    """The slices of boxes, which begin at these positions."""
    ends = zip(start.tolist(), (start + size).tolist(), strict=True)
    return _transpose([map(slice, *both) for both in ends], start.shape[1])


def _transpose(rows: Sequence[Iterable[_Item]], count: int) -> list[tuple[_Item, ...]]:
    """The columns of these rows of `count` items."""
    return list(zip(*rows, strict=True)) if rows else [()] * count
