"""Cells: a layout cut into boxes that the same ranks hold, as many as a picture has room for.

1. A dimension is cut into **stretches** wherever its holders change; a **cell** is a stretch of each dimension, and all
   of it is held by the same ranks.
2. The last two dimensions are the rows and columns of a **panel**; there is one panel for each stretch of those before.
3. Where there are more stretches than a picture has room for, the middle ones are left out, and those that are shown
   are as they are: nothing is averaged. What is left out shows as a gap between the stretches.
4. Holders are listed by addend: one tuple of ranks for each addend of a Partial layout, one tuple without any.

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
from typing import NamedTuple, TypeAlias

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
    "idle_ranks",
    "list_pieces",
    "write_holders",
    "write_label",
]

Holders: TypeAlias = tuple[tuple[int, ...], ...]
"""Who holds a cell: by addend, ranks ascending; empty where nobody does."""

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
    """A slice of the tensor: `lead` of the dimensions before the last two, its rows, columns, and who holds each cell.

    A tensor of one dimension has one row, one without dimensions one cell.
    """

    lead: tuple[Stretch, ...]
    rows: tuple[Stretch, ...]
    columns: tuple[Stretch, ...]
    holders: tuple[tuple[Holders, ...], ...]


class Panels(NamedTuple):
    """The panels that are drawn, and how many there are in all."""

    panels: tuple[Panel, ...]
    slices: int


class _Strip(NamedTuple):
    """Stretches of a dimension and, by stretch and position in the mesh, who holds them."""

    spans: tuple[Stretch, ...]
    held: Bools


_Owned: TypeAlias = tuple[Stretch, tuple[int, ...]]
"""A stretch, and the parts of the dimension that have it."""


def cells_of(layout: Layout, most: int = MOST_CELLS) -> Panels:
    """At most so many cells of the layout, in its order."""
    owned = [_cut_dimension(dim) for dim in layout.dims]
    slices = math.prod(map(len, owned[:-2]))
    shown = _keep_shown(owned, slices, most)
    *before, rows, columns = _make_strips(layout, shown)
    names = _Names(layout)
    panels = []
    leads = _list_leads(before, layout.mesh.size)
    for lead, held in itertools.islice(leads, MOST_PANELS):
        holders = names.of_panel(held, rows, columns)
        panel = Panel(lead, rows.spans, columns.spans, holders)
        panels.append(panel)
    return Panels(tuple(panels), slices)


def _make_strips(layout: Layout, shown: Sequence[list[_Owned]]) -> list[_Strip]:
    """A strip for each dimension; a tensor of fewer than two is drawn as one row, or as one cell."""
    mesh = layout.mesh
    strips = []
    for owned, dim in zip(shown, layout.dims, strict=True):
        strip = _make_strip(owned, dim, mesh)
        strips.append(strip)
    position = (0, 1)
    everybody = np.ones((1, mesh.size), bool)
    everywhere = _Strip((position,), everybody)
    missing = [everywhere] * (2 - len(strips))
    return missing + strips


def _keep_shown(owned: Sequence[list[_Owned]], slices: int, most: int) -> list[list[_Owned]]:
    """The stretches of each dimension that are shown, so that there are at most so many cells."""
    kept = [one[:MOST_PANELS] for one in owned[:-2]]
    drawn = min(slices, MOST_PANELS)
    panels = max(drawn, 1)
    room = max(most // panels, 1)
    last_two = owned[-2:]
    limits = [room]
    if len(last_two) > 1:
        rows, columns = map(len, last_two)
        limits = list(_find_limits(rows, columns, room))
    for one, limit in zip(last_two, limits, strict=False):
        shown = _drop_middle(one, limit)
        kept.append(shown)
    return kept


def _make_strip(owned: Sequence[_Owned], dim: Dimension, mesh: Mesh) -> _Strip:
    """The stretches, and who holds each."""
    divided = partition(dim)
    by_rank = divided.by_rank(mesh)
    known: dict[tuple[int, ...], Bools] = {}
    held = []
    for _, parts in owned:
        if parts not in known:
            known[parts] = np.isin(by_rank, parts)
        held.append(known[parts])
    stretches = tuple(stretch for stretch, _ in owned)
    # An empty dimension has no stretches.
    table = np.array(held, bool).reshape(-1, mesh.size)
    return _Strip(stretches, table)


def _cut_dimension(dim: Dimension) -> list[_Owned]:
    """Where the parts of the dimension begin and end, and which of them have what is between."""
    divided = partition(dim)
    start, stop, _, part = list_spans(divided.parts)
    ends = [0, dim.size]
    every_border = np.concatenate((start, stop, ends))
    borders = np.unique(every_border)
    # Segment s has the stretches first[s]..last[s]-1.
    first = borders.searchsorted(start)
    last = borders.searchsorted(stop)
    stretch, segment = ranges(first, last)
    holding: list[list[int]] = [[] for _ in borders[1:]]
    places = stretch.tolist()
    owners = part[segment].tolist()
    for at, owner in zip(places, owners, strict=True):
        holding[at].append(owner)
    parts = [tuple(sorted(found)) for found in holding]
    return _join_alike(borders, parts)


def _join_alike(borders: Ints, holding: Sequence[tuple[int, ...]]) -> list[_Owned]:
    """The stretches between borders, where neighbours that are held alike are one."""
    out: list[_Owned] = []
    places = itertools.pairwise(borders.tolist())
    for (start, stop), parts in zip(places, holding, strict=True):
        if out:
            before, same = out[-1]
            if same == parts:
                start, _ = before
                out.pop()
        stretch = (start, stop)
        out.append((stretch, parts))
    return out


def _list_leads(
    strips: Sequence[_Strip], ranks: int
) -> Iterator[tuple[tuple[Stretch, ...], Bools]]:
    """The stretches of the leading dimensions, the last fastest, and who holds each."""
    pairs = [zip(strip.spans, strip.held, strict=True) for strip in strips]
    for chosen in itertools.product(*pairs):
        lead = []
        held = np.ones(ranks, bool)
        for span, here in chosen:
            lead.append(span)
            held &= here
        yield tuple(lead), held


def _find_limits(rows: int, columns: int, most: int) -> tuple[int, int]:
    """How many rows and columns are shown, so that there are at most so many cells."""
    if rows * columns <= most:
        return rows, columns
    side = math.isqrt(most)
    if rows <= side:
        return rows, most // rows
    if columns <= side:
        return most // columns, columns
    return side, side


def _drop_middle(stretches: list[_Owned], most: int) -> list[_Owned]:
    """The first and the last of the stretches, at most so many."""
    if len(stretches) <= most:
        return stretches
    tail = most // 2
    return stretches[: most - tail] + stretches[len(stretches) - tail :]


class _Names:
    """The ranks of a layout by the positions that hold something; the same positions are named once."""

    def __init__(self, layout: Layout) -> None:
        mesh = layout.mesh
        self.ranks = np.array(mesh.ranks, np.int64)
        summed = [name for name, _ in layout.partial]
        self.addend = mesh.coordinate(summed)
        self.known: dict[bytes, Holders] = {}

    def of_panel(
        self, held: Bools, rows: _Strip, columns: _Strip
    ) -> tuple[tuple[Holders, ...], ...]:
        """Who holds each cell of a panel, of which these positions hold some."""
        panel = []
        for here in rows.held:
            row = held & here
            cells = [self.of_cell(row & there) for there in columns.held]
            panel.append(tuple(cells))
        return tuple(panel)

    def of_cell(self, held: Bools) -> Holders:
        """Who holds a cell."""
        key = np.packbits(held).tobytes()
        if key not in self.known:
            self.known[key] = self._by_addend(held)
        return self.known[key]

    def _by_addend(self, held: Bools) -> Holders:
        """The ranks of each addend, ascending."""
        ranks = self.ranks[held]
        addend = self.addend[held]
        holders = []
        for number in np.unique(addend):
            own = np.sort(ranks[addend == number])
            holders.append(tuple(own.tolist()))
        return tuple(holders)


def idle_ranks(layout: Layout) -> list[int]:
    """The ranks that hold no element, ascending."""
    mesh = layout.mesh
    idle = np.zeros(mesh.size, bool)
    for dim in layout.dims:
        divided = partition(dim)
        is_empty = [part.size == 0 for part in divided.parts]
        empty = np.array(is_empty, bool)
        by_rank = divided.by_rank(mesh)
        idle |= empty[by_rank]
    ranks = np.array(mesh.ranks, np.int64)
    found = ranks[idle]
    return sorted(found.tolist())


def list_pieces(runs: Runs) -> tuple[list[Stretch], list[str]]:
    """The local stretches of a dimension, holes too, and the global positions of each; the first of many."""
    pieces = []
    texts = []
    at = 0
    for local, start, size in runs.segments[:MOST_PIECES]:
        if local > at:
            pieces.append((at, local))
            texts.append("")
        at = local + size
        pieces.append((local, at))
        texts.append(f"{start}:{start + size}")
    length = len(runs)
    if at < length and len(runs.segments) <= MOST_PIECES:
        pieces.append((at, length))
        texts.append("")
    return pieces, texts


def write_holders(holders: Holders, op: str | None) -> str:
    """The holders, in words."""
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
    """The holders in so many letters, or how many they are; nothing where even that has no room."""
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
    """The holders by name, with and without spaces; nothing for too many."""
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
    """Ranks as an addend: several are in brackets."""
    return f"({text})" if "," in text or "-" in text else text
