"""Cells: a layout divided into boxes that the same ranks hold, up to the number that a picture has room for.

1. A dimension is cut into **stretches** wherever its holders change; a **cell** is a product of one stretch per
   dimension, and all its elements are held by the same ranks.
2. The last two dimensions are the rows and columns of a **panel**; there is one panel for each stretch of the others.
3. If a picture has no room for all stretches, the middle ones are left out, and become a gap. The other stretches are
   exact: nothing is averaged.
4. Holders are listed by addend: one tuple of ranks for each addend of a Partial layout, a single tuple otherwise.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> panel = cells_of(Layout((4, 6), Mesh(dp=2, tp=2), "(tp n) h")).panels[0]
>>> panel.rows, panel.columns, panel.holders
(((0, 2), (2, 4)), ((0, 6),), ((((0, 2),),), (((1, 3),),)))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardmath.base.arrays import Bools, Ints, ranges
from shardmath.base.text import show_ranks
from shardmath.display.pictures.elements import Stretch, brief
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import list_spans, partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout

__all__ = [
    "Panels",
    "Holders",
    "Panel",
    "cells_of",
    "drop_middle",
    "find_limits",
    "idle_ranks",
    "list_pieces",
    "write_holders",
    "write_label",
]

_T = TypeVar("_T")

Holders: TypeAlias = tuple[tuple[int, ...], ...]
"""The holders of a cell: ascending ranks by addend; empty if no rank holds it."""

MOST_PIECES = 12
"""Segments of a dimension of a local tensor that are drawn."""
MOST_CELLS = 600
MOST_PANELS = 6
MOST_TITLE = 160
"""Characters of holders in words."""
MOST_ADDENDS = 16
"""Addends of a sum that are named in words."""
MOST_NAMED = 8
"""Addends of a sum that are named in a box."""


class Panel(NamedTuple):
    """A two-dimensional slice of a tensor, divided into a grid to be drawn: its ranges of rows and of columns, and the
    ranks that hold each cell. A cell is the elements where a range of rows meets a range of columns.

    A tensor of one dimension has one row, one without dimensions one cell.
    """

    lead: tuple[Stretch, ...]
    rows: tuple[Stretch, ...]
    columns: tuple[Stretch, ...]
    holders: tuple[tuple[Holders, ...], ...]


class Panels(NamedTuple):
    """The panels (two-dimensional slices) that are drawn of a tensor, and the number of all its slices."""

    panels: tuple[Panel, ...]
    slices: int


class _Strip(NamedTuple):
    """Stretches of a dimension, and flags by stretch and position in the mesh: which ranks hold them."""

    spans: tuple[Stretch, ...]
    held: Bools


_Owned: TypeAlias = tuple[Stretch, tuple[int, ...]]
"""A stretch, and the numbers of the dimension's parts that contain it."""


def cells_of(layout: Layout, most: int = MOST_CELLS) -> Panels:
    """Return Panels: grids that show which ranks hold which elements, one grid for each of the first 6 two-dimensional
    slices of the tensor. If all grids together would have more than `most` cells, rows and columns in their middle are
    left out, but at least one cell per grid is kept."""
    by_dim = [_divide_dimension(dim) for dim in layout.dims]
    slices = math.prod(map(len, by_dim[:-2]))
    drawn_by_dim = _keep_drawn(by_dim, slices, most)
    *before, rows, columns = _make_strips(layout, drawn_by_dim)
    finder = _HolderFinder(layout)
    panels = []
    leads = _list_leads(before, layout.mesh.size)
    # `lead` has a stretch of each leading dimension, `is_holder` a flag per rank.
    for lead, is_holder in itertools.islice(leads, MOST_PANELS):
        holders = finder.of_panel(is_holder, rows, columns)
        panels.append(Panel(lead, rows.spans, columns.spans, holders))
    return Panels(tuple(panels), slices)


def _make_strips(layout: Layout, drawn_by_dim: Sequence[list[_Owned]]) -> list[_Strip]:
    """A strip for each dimension; tensors of fewer than two dimensions get strips of one position that all
    ranks hold."""
    mesh = layout.mesh
    pairs = zip(drawn_by_dim, layout.dims, strict=True)
    strips = [_make_strip(stretches, dim, mesh) for stretches, dim in pairs]
    held_by_all = _Strip(((0, 1),), np.ones((1, mesh.size), bool))
    return [held_by_all] * (2 - len(strips)) + strips


def _keep_drawn(by_dim: Sequence[list[_Owned]], slices: int, most: int) -> list[list[_Owned]]:
    """The stretches of each dimension that are drawn, so that there are at most `most` cells; `slices` is the number of
    the tensor's two-dimensional slices."""
    kept = [stretches[:MOST_PANELS] for stretches in by_dim[:-2]]
    drawn_slices = min(slices, MOST_PANELS)
    # An empty tensor may have no slices.
    panels = max(drawn_slices, 1)
    room = max(most // panels, 1)
    last_two = by_dim[-2:]
    limits = [room]
    if len(last_two) > 1:
        rows, columns = map(len, last_two)
        limits = list(find_limits(rows, columns, room))
    # Not strict: a tensor without dimensions has no stretches to limit.
    for stretches, limit in zip(last_two, limits, strict=False):
        kept.append(drop_middle(stretches, limit))
    return kept


def _make_strip(owned_stretches: Sequence[_Owned], dim: Dimension, mesh: Mesh) -> _Strip:
    """The stretches, and the ranks that hold each."""
    divided = partition(dim)
    by_rank = divided.by_rank(mesh)
    known: dict[tuple[int, ...], Bools] = {}
    held = []
    for _, parts in owned_stretches:
        if parts not in known:
            known[parts] = np.isin(by_rank, parts)
        held.append(known[parts])
    stretches = tuple(stretch for stretch, _ in owned_stretches)
    # An empty dimension has no stretches.
    table = np.array(held, bool).reshape(-1, mesh.size)
    return _Strip(stretches, table)


def _divide_dimension(dim: Dimension) -> list[_Owned]:
    """The stretches of the dimension between the borders of its parts, and the parts that contain each."""
    divided = partition(dim)
    start, stop, _, part = list_spans(divided.parts)
    ends = [0, dim.size]
    every_border = np.concatenate((start, stop, ends))
    borders = np.unique(every_border)
    # Segment s has the stretches first[s]..last[s]-1; `ranges` lists each of these with its segment.
    first = borders.searchsorted(start)
    last = borders.searchsorted(stop)
    stretch, segment = ranges(first, last)
    owners: list[list[int]] = [[] for _ in borders[1:]]
    for number, owner in zip(stretch.tolist(), part[segment].tolist(), strict=True):
        owners[number].append(owner)
    return _merge_equal(borders, [tuple(sorted(parts)) for parts in owners])


def _merge_equal(borders: Ints, owners: Sequence[tuple[int, ...]]) -> list[_Owned]:
    """The stretches between borders; neighbors with the same owners are merged."""
    merged: list[_Owned] = []
    for (start, stop), parts in zip(itertools.pairwise(borders.tolist()), owners, strict=True):
        if merged and merged[-1][1] == parts:
            (start, _), _ = merged.pop()
        merged.append(((start, stop), parts))
    return merged


def _list_leads(
    strips: Sequence[_Strip], ranks: int
) -> Iterator[tuple[tuple[Stretch, ...], Bools]]:
    """The products of stretches of the leading dimensions, the last fastest, and flags of the ranks that hold each."""
    pairs = [zip(strip.spans, strip.held, strict=True) for strip in strips]
    for chosen in itertools.product(*pairs):
        lead = []
        held = np.ones(ranks, bool)
        for span, span_held in chosen:
            lead.append(span)
            held &= span_held
        yield tuple(lead), held


def find_limits(rows: int, columns: int, most: int) -> tuple[int, int]:
    """Return how many of `rows` and of `columns` are drawn, so that there are at most `most` cells."""
    if rows * columns <= most:
        return rows, columns
    side = math.isqrt(most)
    if rows <= side:
        return rows, most // rows
    if columns <= side:
        return most // columns, columns
    return side, side


def drop_middle(stretches: list[_T], most: int) -> list[_T]:
    """Return the first and the last of `stretches`, together at most `most`."""
    if len(stretches) <= most:
        return stretches
    tail = most // 2
    return stretches[: most - tail] + stretches[len(stretches) - tail :]


class _HolderFinder:
    """Finds Holders from flags by position in the mesh; equal flags give one shared value."""

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        self.ranks = np.array(mesh.ranks, np.int64)
        summed = [name for name, _ in layout.partial]
        self.addend = mesh.coordinate(summed)
        self.known: dict[bytes, Holders] = {}

    def of_panel(
        self, held: Bools, rows: _Strip, columns: _Strip
    ) -> tuple[tuple[Holders, ...], ...]:
        """Return the ranks (Holders) of each cell of a grid over a two-dimensional slice of the tensor, one tuple per
        row of cells. `held` has a flag per rank: whether it holds the slice's indices in the leading dimensions; `rows`
        and `columns` have such flags for each row and column of cells."""
        panel = []
        for row_held in rows.held:
            held_here = held & row_held
            cells = [self.of_cell(held_here & column_held) for column_held in columns.held]
            panel.append(tuple(cells))
        return tuple(panel)

    def of_cell(self, held: Bools) -> Holders:
        """Return the ranks whose flags in `held` are True. If the layout is Partial, there is a tuple of ranks for each
        partial value that they hold; otherwise all ranks are in one tuple."""
        key = np.packbits(held).tobytes()
        if key not in self.known:
            self.known[key] = self._by_addend(held)
        return self.known[key]

    def _by_addend(self, held: Bools) -> Holders:
        """The ranks of each addend, ascending."""
        ranks = self.ranks[held]
        addend = self.addend[held]
        by_addend = [np.sort(ranks[addend == number]) for number in np.unique(addend)]
        return tuple(tuple(holders.tolist()) for holders in by_addend)


def idle_ranks(layout: Layout) -> list[int]:
    """The ranks of the layout that hold no element, ascending."""
    mesh = layout.mesh
    idle = np.zeros(mesh.size, bool)
    for dim in layout.dims:
        divided = partition(dim)
        is_empty = np.array([part.size == 0 for part in divided.parts], bool)
        idle |= is_empty[divided.by_rank(mesh)]
    ranks = np.array(mesh.ranks, np.int64)
    return sorted(ranks[idle].tolist())


def list_pieces(runs: Runs) -> tuple[list[Stretch], list[str]]:
    """Divide one dimension of a rank's local tensor into ranges to be drawn; `runs` maps its local positions to global
    ones. Return two lists: the local ranges, and for each a text with its global range, or "" for padding.

    Of many ranges, only the first are listed.
    """
    pieces = []
    texts = []
    end = 0
    for local, start, size in runs.segments[:MOST_PIECES]:
        if local > end:
            pieces.append((end, local))
            texts.append("")
        end = local + size
        pieces.append((local, end))
        texts.append(f"{start}:{start + size}")
    length = len(runs)
    if end < length and len(runs.segments) <= MOST_PIECES:
        pieces.append((end, length))
        texts.append("")
    return pieces, texts


def write_holders(holders: Holders, op: str | None) -> str:
    """Return text with the ranks that hold a cell: "ranks 0, 1" or "nobody". If they hold partial values that `op`
    still has to reduce, the text is "sum of (0) + (1)", with ranks in the parentheses.

    A long text is shortened.
    """
    if not holders:
        return "nobody"
    if len(holders) == 1:
        text = show_ranks(holders[0], joined_from=3, most=16)
    else:
        addends = [
            f"({show_ranks(one, noun=False, joined_from=3, most=16)})"
            for one in holders[:MOST_ADDENDS]
        ]
        text = f"{op} of {' + '.join(addends)}"
    return brief(text, MOST_TITLE)


def write_label(holders: Holders, op: str | None, letters: int) -> str:
    """Return text with the ranks that hold a cell, or with only their number if the ranks do not fit in `letters`
    characters; "" if neither fits. In a Partial layout, the reduction `op` joins ranks with different partial values,
    as in "0 + 1" for "sum"; for other layouts pass None."""
    if not holders:
        return ""
    count = sum(map(len, holders))
    texts = [*_list_names(holders, op), f"{count:,} ranks"]
    if count > 1:
        texts.append(f"×{count:,}")
    for text in texts:
        if len(text) <= letters:
            return text
    return ""


def _list_names(holders: Holders, op: str | None) -> tuple[str, ...]:
    """The holders by name, with and without spaces; nothing if there are too many addends."""
    if len(holders) > MOST_NAMED:
        return ()
    texts = [show_ranks(one, noun=False, joined_from=3, most=4) for one in holders]
    if len(holders) == 1:
        wide = texts[0]
    elif op in ("sum", "avg"):
        wide = " + ".join(map(_bracket_several, texts))
    else:
        wide = f"{op}({' | '.join(texts)})"
    return wide, wide.replace(" ", "")


def _bracket_several(text: str) -> str:
    """Ranks as an addend, in brackets if there are several."""
    return f"({text})" if "," in text or "-" in text else text
