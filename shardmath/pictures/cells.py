"""Cells: a layout cut into boxes that the same ranks hold, as many as a picture has room for.

1. A dimension is cut into **stretches** wherever its holders change; a **cell** is a stretch of each dimension, and all
   of it is held by the same ranks.
2. The last two dimensions are the rows and columns of a **panel**; there is one panel for each stretch of those before.
3. Where there are more stretches than a picture has room for, the middle ones are left out, and those that are shown
   are as they are: nothing is averaged. What is left out shows as a gap between the stretches.
4. Holders are listed by addend: one tuple of ranks for each addend of a Partial layout, one tuple without any.

>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> panel = cells_of(Layout((4, 6), Mesh(dp=2, tp=2), "(tp n) h")).panels[0]
>>> panel.rows, panel.columns, panel.holders
(((0, 2), (2, 4)), ((0, 6),), ((((0, 2),),), (((1, 3),),)))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.algebra.dimension import Dimension
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition, spans
from shardmath.base.arrays import Bools, Ints, ranges
from shardmath.layouts.layout import Layout

__all__ = ["Cells", "Holders", "Panel", "Span", "cells_of", "idle_ranks", "rank_text"]

Span: TypeAlias = tuple[int, int]
"""Positions start..stop-1 of a dimension."""
Holders: TypeAlias = tuple[tuple[int, ...], ...]
"""Who holds a cell: by addend, ranks ascending; empty where nobody does."""

MOST_CELLS = 600
MOST_PANELS = 6


class Panel(NamedTuple):
    """A slice of the tensor: `lead` of the dimensions before the last two, its rows, columns, and who holds each cell.

    A tensor of one dimension has one row, one without dimensions one cell.
    """

    lead: tuple[Span, ...]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    holders: tuple[tuple[Holders, ...], ...]


class Cells(NamedTuple):
    """The panels that are drawn, and how many there are in all."""

    panels: tuple[Panel, ...]
    slices: int


class _Strip(NamedTuple):
    """Stretches of a dimension and, by stretch and position in the mesh, who holds them."""

    spans: tuple[Span, ...]
    held: Bools


_Stretch: TypeAlias = tuple[Span, tuple[int, ...]]
"""A span, and the parts of the dimension that have it."""


def cells_of(layout: Layout, most: int = MOST_CELLS) -> Cells:
    """At most so many cells of the layout, in its order."""
    stretches = [_stretches(dim) for dim in layout.dims]
    lead, shown = stretches[:-2], stretches[-2:]
    count = math.prod(len(one) for one in lead)
    room = max(most // max(min(count, MOST_PANELS), 1), 1)
    limits = _limits(len(shown[0]), len(shown[-1]), room) if len(shown) > 1 else (room,)
    cut = [_without_middle(one, limit) for one, limit in zip(shown, limits, strict=False)]
    cut = [one[:MOST_PANELS] for one in lead] + cut
    strips = [_strip(one, dim, layout.mesh) for one, dim in zip(cut, layout.dims, strict=True)]
    whole = _Strip(((0, 1),), np.ones((1, layout.mesh.size), bool))
    *before, rows, columns = [whole] * (2 - len(strips)) + strips
    leads = itertools.islice(_leads(before, layout.mesh.size), MOST_PANELS)
    names = _Names(layout)
    panels = [
        Panel(spans, rows.spans, columns.spans, names.of_panel(held, rows, columns))
        for spans, held in leads
    ]
    return Cells(tuple(panels), count)


def _strip(stretches: Sequence[_Stretch], dim: Dimension, mesh: Mesh) -> _Strip:
    """The stretches, and who holds each."""
    by_rank = partition(dim).by_rank(mesh)
    known = {parts: np.isin(by_rank, parts) for parts in {parts for _, parts in stretches}}
    held = [known[parts] for _, parts in stretches]
    return _Strip(tuple(span for span, _ in stretches), np.array(held, bool).reshape(-1, mesh.size))


def _stretches(dim: Dimension) -> list[_Stretch]:
    """Where the parts of the dimension begin and end, and which of them have what is between."""
    start, stop, _, part = spans(partition(dim).parts)
    borders = np.unique(np.concatenate((start, stop, [0, dim.size])))
    # Segment s has the stretches first[s]..last[s]-1.
    first, last = borders.searchsorted(start), borders.searchsorted(stop)
    stretch, segment = ranges(first, last)
    holding: list[list[int]] = [[] for _ in borders[1:]]
    for at, one in zip(stretch.tolist(), part[segment].tolist(), strict=True):
        holding[at].append(one)
    return _joined(borders, [tuple(sorted(parts)) for parts in holding])


def _joined(borders: Ints, holding: Sequence[tuple[int, ...]]) -> list[_Stretch]:
    """The stretches between borders, where neighbours that are held alike are one."""
    out: list[_Stretch] = []
    for span, parts in zip(itertools.pairwise(borders.tolist()), holding, strict=True):
        if out and out[-1][1] == parts:
            out[-1] = ((out[-1][0][0], span[1]), parts)
        else:
            out.append((span, parts))
    return out


def _leads(strips: Sequence[_Strip], ranks: int) -> Iterator[tuple[tuple[Span, ...], Bools]]:
    """The stretches of the leading dimensions, the last fastest, and who holds each."""
    for index in itertools.product(*(range(len(strip.spans)) for strip in strips)):
        held = np.ones(ranks, bool)
        for i, strip in zip(index, strips, strict=True):
            held &= strip.held[i]
        yield tuple(strip.spans[i] for i, strip in zip(index, strips, strict=True)), held


def _limits(rows: int, columns: int, most: int) -> tuple[int, int]:
    """How many rows and columns are shown, so that there are at most so many cells."""
    if rows * columns <= most:
        return rows, columns
    side = math.isqrt(most)
    if rows <= side:
        return rows, most // rows
    if columns <= side:
        return most // columns, columns
    return side, side


def _without_middle(stretches: list[_Stretch], most: int) -> list[_Stretch]:
    """The first and the last of the stretches, at most so many."""
    if len(stretches) <= most:
        return stretches
    tail = most // 2
    return stretches[: most - tail] + stretches[len(stretches) - tail :]


class _Names:
    """The ranks of a layout by the positions that hold something; the same positions are named once."""

    def __init__(self, layout: Layout) -> None:
        self.ranks = np.array(layout.mesh.ranks, np.int64)
        self.addend = layout.mesh.coordinate(name for name, _ in layout.partial)
        self.known: dict[bytes, Holders] = {}

    def of_panel(
        self, held: Bools, rows: _Strip, columns: _Strip
    ) -> tuple[tuple[Holders, ...], ...]:
        """Who holds each cell of a panel, of which these positions hold some."""
        return tuple(
            tuple(self.of_cell(held & here & there) for there in columns.held) for here in rows.held
        )

    def of_cell(self, held: Bools) -> Holders:
        """Who holds a cell."""
        key = np.packbits(held).tobytes()
        if key not in self.known:
            self.known[key] = self._by_addend(held)
        return self.known[key]

    def _by_addend(self, held: Bools) -> Holders:
        ranks, addend = self.ranks[held], self.addend[held]
        numbers = np.unique(addend)
        return tuple(tuple(np.sort(ranks[addend == number]).tolist()) for number in numbers)


def idle_ranks(layout: Layout) -> list[int]:
    """The ranks that hold no element, ascending."""
    empty = np.zeros(layout.mesh.size, bool)
    for dim in layout.dims:
        parts = partition(dim)
        sizes = np.array([part.size for part in parts.parts], np.int64)
        empty |= (sizes == 0)[parts.by_rank(layout.mesh)]
    return sorted(np.array(layout.mesh.ranks, np.int64)[empty].tolist())


def rank_text(ranks: Sequence[int], most: int = 16) -> str:
    """Ascending ranks in few words: those that follow each other as a range, what is beyond `most` counted.

    >>> rank_text((0, 1, 2, 3, 8)), rank_text((0, 2)), rank_text(range(0, 99, 2), most=3)
    ('0-3, 8', '0, 2', '0, 2, 4, ... (50 in all)')
    """
    words = list(itertools.islice(_rank_words(ranks), most + 1))
    if len(words) <= most:
        return ", ".join(words)
    return f"{', '.join(words[:most])}, ... ({len(ranks):,} in all)"


def _rank_words(ranks: Sequence[int]) -> Iterator[str]:
    """Each rank, or range of at least three, as a word."""
    # Ranks that follow each other differ from their places by the same number.
    numbered = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    for _, group in numbered:
        run = [rank for _, rank in group]
        if len(run) > 2:
            yield f"{run[0]}-{run[-1]}"
        else:
            yield from map(str, run)
