"""Balance: lines and cuts, which holder sends what.

1. A **class** is a set of ranks that hold the same. All that is asked of a class lies on one integer **line** of bytes:
   receiver by receiver, then tensor, then unit.
2. The line is **cut** evenly, at integers, among the holders; holder j sends what lies between cuts j and j + 1.
   Loads are differences of cuts, a rank's own list is its slices of the lines, striping adds one transfer a cut.
3. Cuts snap to whole rows of a box; boxes of at most `SMALL` bytes stay whole.
4. A receiver that holds its cell already copies locally and is not on the line.
5. The order of lines, of what is on them and of their holders depends on holdings alone, so every rank finds the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.box import row_size
from shardmath.overlay import Template, unit_boxes
from shardmath.partition import Ints, overlapping

__all__ = [
    "SMALL",
    "Batch",
    "Lines",
    "Requests",
    "asked_loads",
    "between",
    "lines",
    "requests",
    "senders",
    "sent_loads",
    "share",
    "snap",
    "stacked",
    "unit_order",
]

Bools: TypeAlias = NDArray[np.bool_]
SMALL = 1 << 16
"""Bytes: boxes up to this size are not divided among senders."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors `names` that move by one template, from source window `source` to destination window `target`."""

    template: Template
    names: tuple[str, ...]
    source: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Who asks for elements lo..hi-1 of which unit of which batch: one row a (unit, rank)."""

    batch: Ints
    unit: Ints
    rank: Ints
    lo: Ints
    hi: Ints

    def __getitem__(self, rows: Ints | Bools) -> Requests:
        return Requests(self.batch[rows], self.unit[rows], self.rank[rows], self.lo[rows], self.hi[rows])

    def __len__(self) -> int:
        return len(self.unit)


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """All lines: what is asked of each class, and where it is cut.

    Line l has the requests `first[l]..first[l+1]-1`, each beginning at byte `start` of its line and taking `nbytes` a
    tensor; its holders are `holders[holder_first[l]:holder_first[l+1]]`, and holder h of the array sends the bytes
    `cuts[h + l]..cuts[h + l + 1] - 1`.
    """

    requests: Requests
    start: Ints
    nbytes: Ints
    first: Ints
    holders: Ints
    holder_first: Ints
    cuts: Ints


def requests(index: int, batch: Batch) -> tuple[Requests, Ints, Bools]:
    """All requests of a batch, the class that each is asked of, and whether its rank holds it itself."""
    t = batch.template
    klass = t.unit_class[t.entry_unit]
    here = _holds(t, klass, t.entry_rank)
    size = t.unit_size[t.entry_unit]
    rows = Requests(np.full(len(size), index), t.entry_unit, t.entry_rank, np.zeros_like(size), size)
    return _one_each(t, rows, klass, here) if t.reduction.chosen else (rows, klass, here)


def _holds(t: Template, klass: Ints, rank: Ints) -> Bools:
    """Whether each rank is a holder of the class beside it."""
    span = int(max(t.holders.max(initial=0), rank.max(initial=0))) + 1
    owner = np.repeat(np.arange(len(t.holder_first) - 1), np.diff(t.holder_first))
    return np.isin(klass * span + rank, owner * span + t.holders)


def _one_each(t: Template, rows: Requests, klass: Ints, here: Bools) -> tuple[Requests, Ints, Bools]:
    """Where any one destination addend may receive: for each unit the one that most hold already, or all a stripe.

    Replicas of an addend have to stay equal, so what is chosen depends on the unit alone; where destination parts
    overlap, and one element is in several units, it is the first addend.
    """
    mesh = t.dst.mesh
    place = dict(zip(mesh.ranks, mesh.coordinate(t.reduction.chosen).tolist(), strict=True))
    addend = np.array([place[rank] for rank in rows.rank.tolist()], np.int64)
    count = int(mesh.coordinate(t.reduction.chosen).max()) + 1
    fixed = any(overlapping(dim) for dim in t.dst.dims)
    keep: list[tuple[int, int, int]] = []
    for unit in np.unique(rows.unit).tolist():
        members = np.flatnonzero(rows.unit == unit)
        local = np.bincount(addend[members][here[members]], minlength=count)
        first = 0 if fixed else int(local.argmax())
        stripes = [first] if fixed or local[first] else range(count)
        for (lo, hi), chosen in zip(_stripes(t, unit, len(stripes)), stripes, strict=True):
            keep += [(i, lo, hi) for i in members[addend[members] == chosen].tolist() if lo < hi]
    index, begin, end = np.array(keep, np.int64).reshape(-1, 3).T
    return Requests(rows.batch[index], rows.unit[index], rows.rank[index], begin, end), klass[index], here[index]


def _stripes(t: Template, unit: int, count: int) -> list[tuple[int, int]]:
    """The unit in `count` even ranges of elements, snapped."""
    size = int(t.unit_size[unit])
    return list(itertools.pairwise([*(snap(t, unit, size * j // count) for j in range(count)), size]))


def snap(t: Template, unit: int, at: int) -> int:
    """The last place not after element `at` of the unit where it may be cut: a box, or a row of a large one."""
    _, sizes = unit_boxes(t, unit)
    ends = np.cumsum(sizes.prod(axis=1))
    box = int(np.searchsorted(ends, at, "right"))
    begin = int(ends[box - 1]) if box else 0
    if at == begin or box == len(ends) or (ends[box] - begin) * t.src.itemsize <= SMALL:
        return begin
    row = row_size(sizes[box].tolist())
    return begin + (at - begin) // row * row


def unit_order(t: Template) -> Ints:
    """The place of each unit in the order of its first elements, which is the same for every spelling of a layout."""
    columns = [over.start[over.first[t.unit_pairs[:, d]]] for d, over in enumerate(t.overlays)]
    targets = [over.dst[over.first[t.unit_pairs[:, d]]] for d, over in enumerate(t.overlays)]
    order = np.lexsort((t.unit_size, *reversed(targets), *reversed(columns)))
    return np.argsort(order)


def lines(batches: Sequence[Batch], asked: Sequence[tuple[Requests, Ints]]) -> Lines:
    """The lines of all requests, each given with the class that it is asked of, cut evenly."""
    holders, of_class = _number_lines([b.template for b in batches])
    rows = stacked([rows for rows, _ in asked])
    line = (
        np.concatenate([of_class[b][klass] for b, (_, klass) in enumerate(asked)]) if asked else np.zeros(0, np.int64)
    )
    units = (
        np.concatenate([unit_order(batches[b].template)[r.unit] for b, (r, _) in enumerate(asked)]) if asked else line
    )
    order = np.lexsort((units, rows.batch, rows.rank, line))
    rows, line = rows[order], line[order]
    itemsize = np.array([b.template.src.itemsize for b in batches], np.int64)
    count = np.array([len(b.names) for b in batches], np.int64)
    nbytes = (rows.hi - rows.lo) * itemsize[rows.batch]
    first = np.searchsorted(line, np.arange(len(holders) + 1))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(nbytes * count[rows.batch])))
    start = ends[:-1] - ends[first[line]]
    total = ends[first[1:]] - ends[first[:-1]]
    holder_first = np.cumsum([0, *map(len, holders)])
    flat = np.array([r for h in holders for r in h], np.int64)
    out = Lines(rows, start, nbytes, first, flat, holder_first, np.zeros(0, np.int64))
    return Lines(rows, start, nbytes, first, flat, holder_first, _cuts(batches, out, total.tolist()))


def stacked(parts: Sequence[Requests]) -> Requests:
    """The requests of all parts, one after the other."""
    empty = np.zeros(0, np.int64)
    columns = ("batch", "unit", "rank", "lo", "hi")
    return Requests(*(np.concatenate([empty, *(getattr(p, name) for p in parts)]) for name in columns))


def _number_lines(templates: Sequence[Template]) -> tuple[list[tuple[int, ...]], list[Ints]]:
    """The distinct sets of holders, sorted, and for each template the number of the set of each class."""
    sets = [[tuple(t.holders[lo:hi].tolist()) for lo, hi in itertools.pairwise(t.holder_first)] for t in templates]
    distinct = sorted({holders for held in sets for holders in held})
    number = {holders: i for i, holders in enumerate(distinct)}
    return distinct, [np.array([number[holders] for holders in held], np.int64) for held in sets]


def _cuts(batches: Sequence[Batch], on: Lines, total: list[int]) -> Ints:
    """Even shares of every line, snapped."""
    cuts: list[int] = []
    for line, length in enumerate(total):
        m = int(on.holder_first[line + 1] - on.holder_first[line])
        inner = [length * j // m for j in range(1, m)]
        cuts += [0, *(_snapped(batches, on, line, x) for x in inner), length]
    return np.array(cuts, np.int64)


def _snapped(batches: Sequence[Batch], on: Lines, line: int, at: int) -> int:
    lo, hi = int(on.first[line]), int(on.first[line + 1])
    if at == 0 or lo == hi:
        return 0
    e = lo + int(np.searchsorted(on.start[lo:hi], at, "right")) - 1
    t = batches[int(on.requests.batch[e])].template
    tensors, inside = divmod(at - int(on.start[e]), int(on.nbytes[e]))
    begin = int(on.requests.lo[e])
    place = snap(t, int(on.requests.unit[e]), begin + inside // t.src.itemsize) - begin
    return int(on.start[e]) + tensors * int(on.nbytes[e]) + max(place, 0) * t.src.itemsize


def share(on: Lines, rank: int) -> list[tuple[int, int, int]]:
    """(line, first byte, last byte + 1) of all that `rank` sends."""
    at = np.flatnonzero(on.holders == rank)
    line = np.searchsorted(on.holder_first, at, "right") - 1
    spans = zip(line.tolist(), on.cuts[at + line].tolist(), on.cuts[at + line + 1].tolist(), strict=True)
    return [(n, lo, hi) for n, lo, hi in spans if lo < hi]


def between(on: Lines, line: int, lo: int, hi: int) -> range:
    """The requests that the bytes lo..hi-1 of a line touch."""
    a, b = int(on.first[line]), int(on.first[line + 1])
    begin = a + int(np.searchsorted(on.start[a:b], lo, "right")) - 1
    return range(begin, a + int(np.searchsorted(on.start[a:b], hi, "left")))


def senders(on: Lines, line: int, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """(rank, first byte, last byte + 1) of the holders that send the bytes lo..hi-1 of a line."""
    a, b = int(on.holder_first[line]), int(on.holder_first[line + 1])
    cuts = on.cuts[a + line : b + line + 1]
    first, last = int(np.searchsorted(cuts, lo, "right")) - 1, int(np.searchsorted(cuts, hi, "left"))
    spans = [
        (int(on.holders[a + j]), max(lo, int(cuts[j])), min(hi, int(cuts[j + 1])))
        for j in range(max(first, 0), min(last, b - a))
    ]
    return [(rank, x, y) for rank, x, y in spans if x < y]


def sent_loads(on: Lines) -> tuple[Ints, Ints]:
    """(rank, bytes) of every holder's share of every line."""
    at = np.arange(len(on.holders)) + np.repeat(np.arange(len(on.first) - 1), np.diff(on.holder_first))
    return on.holders, on.cuts[at + 1] - on.cuts[at]


def asked_loads(on: Lines, count: Sequence[int]) -> tuple[Ints, Ints]:
    """(rank, bytes) of every request; `count` tensors move by each batch."""
    return on.requests.rank, on.nbytes * np.array(count, np.int64)[on.requests.batch]
