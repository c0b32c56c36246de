"""Layout pictures: which ranks hold which elements, drawn as SVG.

1. A box is a cell: a box of elements that the same ranks hold. Its colour stands for its set of holders, its label and
   its title name them. A dashed box is held by nobody.
2. Positions are to scale, except that no stretch is narrower than can be seen. Where there are too many cells the
   middle is left out, and a line says so.
3. `0 + 1` are the addends of a sum, `max(0, 1)` of another reduction; `0, 1` hold the same.
4. Tensors of more than two dimensions are drawn slice by slice. Local tensors with holes are drawn below.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs
from shardmath.base.given import plural
from shardmath.layouts.layout import Layout
from shardmath.pictures import elements
from shardmath.pictures.cells import (
    MOST_PANELS,
    Cells,
    Holders,
    Panel,
    Stretch,
    cells_of,
    idle_ranks,
    write_holders,
    write_label,
)
from shardmath.pictures.elements import (
    LETTER,
    LINE,
    VERMILION,
    Drawing,
    below,
    beside,
    box,
    brief,
    ink,
    lines,
    palette,
)

__all__ = ["colours_of", "draw_layout", "layout_svg"]

ELEMENT = 28.0
"""Pixels of an element, where there are few."""
WIDE, HIGH = 336.0, 224.0
"""Pixels of a panel's columns and rows, where there are many elements."""
MOST_PIXELS = 640.0
"""Pixels of a panel's columns or rows, where stretches that are to be seen need more."""
SEEN = 4.0
"""Pixels of a stretch, at least, while there is room."""
EDGED = 7.0
"""Pixels from which a box has an edge."""
GAP = 22.0
"""Pixels of what is left out."""
LEFT, TOP = 48.0, 20.0
"""Pixels beside and above a panel, for the positions where stretches begin."""
MOST_LEGEND = 8
MOST_DESCRIBED = 16
"""Ranks in the description for people who do not see the picture."""
MOST_LOCAL = 4
"""Ranks whose local tensors are drawn."""
MOST_PIECES = 12
"""Segments of a dimension of a local tensor that are drawn."""

Colours = Mapping[Holders, str]


def layout_svg(layout: Layout, *, inline: bool = False) -> str:
    """The layout as SVG: a document, or an element of a page if `inline`."""
    cells = cells_of(layout)
    drawing = draw_layout(layout, cells, colours_of([cells]))
    return elements.document(drawing, str(layout), about(layout), inline=inline)


def about(layout: Layout) -> str:
    """What the picture shows, for people who do not see it."""
    held = _parts_by_rank(layout)
    texts = []
    for i, rank in enumerate(layout.mesh.ranks[:MOST_DESCRIBED]):
        runs = " by ".join(_shortened(parts[i]) for parts in held)
        texts.append(f"rank {rank} holds {runs or 'the scalar'}")
    more = layout.mesh.size - len(texts)
    if more:
        texts.append(f"and {plural(more, 'more rank')}")
    return "; ".join(texts)


def _parts_by_rank(layout: Layout) -> list[list[Runs]]:
    """For each dimension what each rank holds, in mesh order."""
    out = []
    for dim in layout.dims:
        parts = partition(dim)
        out.append([parts.parts[i] for i in parts.by_rank(layout.mesh).tolist()])
    return out


def _shortened(runs: Runs) -> str:
    if len(runs.segments) <= 4:
        return str(runs)
    return f"{Runs(runs.segments[:3])} and {len(runs.segments) - 3:,} more ranges"


def draw_layout(layout: Layout, cells: Cells, colours: Colours, wide: float = WIDE) -> Drawing:
    """The layout with its heading, its panels of `wide` pixels, and what there is to say about them."""
    panels = [_Panel(layout, panel, colours, wide) for panel in cells.panels]
    drawn = [panel.draw() for panel in panels]
    rows = [beside(drawn[i : i + 3], 16) for i in range(0, len(drawn), 3)]
    labelled: set[Holders] = set()
    for panel in panels:
        labelled |= panel.labelled
    parts = [lines([str(layout)], font_weight="bold"), below(rows, 10)]
    parts += _legend(layout, _distinct(cells.panels), colours, labelled)
    parts.append(lines(_notes(layout, cells)))
    if any(map(layout.holes, layout.mesh.ranks[:MOST_LOCAL])):
        parts.append(_local_tensors(layout))
    filled = [part for part in parts if part.height]
    return below(filled, 6)


def colours_of(several: Iterable[Cells]) -> Colours:
    """A colour for each set of holders, in the order of their first ranks."""
    panels = [panel for cells in several for panel in cells.panels]
    found = _distinct(panels)
    return dict(zip(found, palette(len(found)), strict=True))


def _distinct(panels: Iterable[Panel]) -> list[Holders]:
    """The sets of holders, nobody left out, in the order of their first ranks."""
    found: set[Holders] = set()
    for panel in panels:
        for row in panel.holders:
            found.update(row)
    found.discard(())
    return sorted(found)


class _Scale(NamedTuple):
    """Where each stretch of a dimension is drawn, and how much room all of it takes."""

    at: tuple[float, ...]
    size: tuple[float, ...]
    total: float


def _scale(spans: Sequence[Stretch], room: float) -> _Scale:
    """Stretches to scale; a gap for what is left out between them."""
    sizes = [stop - start for start, stop in spans]
    each = min(ELEMENT, room / max(sum(sizes), 1))
    least = min(SEEN, MOST_PIXELS / max(len(spans), 1))
    at = []
    pixels = []
    x = 0.0
    for i, size in enumerate(sizes):
        if i and spans[i - 1][1] != spans[i][0]:
            x += GAP
        at.append(x)
        pixels.append(max(size * each, least))
        x += pixels[-1]
    return _Scale(tuple(at), tuple(pixels), x)


class _Panel:
    """One panel, and the sets of holders that it names."""

    def __init__(self, layout: Layout, panel: Panel, colours: Colours, wide: float) -> None:
        self.layout = layout
        self.panel = panel
        self.colours = colours
        self.columns = _scale(panel.columns, wide)
        self.rows = _scale(panel.rows, HIGH)
        self.labelled: set[Holders] = set()

    def draw(self) -> Drawing:
        """Boxes under the positions at which they begin."""
        left = LEFT if self.layout.ndim > 1 else 0.0
        parts = [*self._ticks(left), *self._boxes(left)]
        if self.layout.partial:
            area = (left, TOP, self.columns.total, self.rows.total)
            parts += [HATCH, box(*area, fill="url(#shardmath-addends)", pointer_events="none")]
        parts += self._labels(left)
        width = left + self.columns.total + LETTER * 3
        height = TOP + self.rows.total + 4
        return self._under_lead(Drawing(width, height, tuple(parts)))

    def _under_lead(self, drawing: Drawing) -> Drawing:
        """The drawing under the slice of the leading dimensions that it is of."""
        if not self.panel.lead:
            return drawing
        slices = [f"{start}:{stop}" for start, stop in self.panel.lead]
        head = ", ".join([*slices, ":", ":"])
        return below([lines([f"[{head}]"]), drawing], 2)

    def _ticks(self, left: float) -> Iterator[str]:
        """Positions at which stretches begin, and the length of the dimension."""
        if self.layout.ndim:
            for at, position in _shown(self.panel.columns, self.columns, across=True):
                yield elements.words(
                    left + at, TOP - 6, f"{position}", text_anchor="middle", opacity="0.75"
                )
        if self.layout.ndim > 1:
            for at, position in _shown(self.panel.rows, self.rows, across=False):
                y = TOP + at + 4
                yield elements.words(left - 6, y, f"{position}", text_anchor="end", opacity="0.75")

    def _places(self) -> Iterator[tuple[int, int, float, float, float, float]]:
        """Row, column, x, y, width and height of each cell."""
        rows = zip(self.rows.at, self.rows.size, strict=True)
        for i, (y, height) in enumerate(rows):
            columns = zip(self.columns.at, self.columns.size, strict=True)
            for j, (x, width) in enumerate(columns):
                yield i, j, x, TOP + y, width, height

    def _boxes(self, left: float) -> Iterator[str]:
        """A box for each cell."""
        for i, j, x, y, width, height in self._places():
            holders = self.panel.holders[i][j]
            title = f"{self._box_text(i, j)} {write_holders(holders, self.layout.op)}"
            yield box(left + x, y, width, height, title, **self._paint(holders, width, height))

    def _paint(self, holders: Holders, width: float, height: float) -> dict[str, str]:
        """The attributes of a box."""
        if not holders:
            return {"fill": "none", "stroke": VERMILION, "stroke_dasharray": "3 2"}
        fill = {"fill": self.colours[holders]}
        if min(width, height) >= EDGED:
            fill |= {"stroke": "#fff", "stroke_width": "1"}
        return fill

    def _box_text(self, i: int, j: int) -> str:
        """The box of a cell, as a slice of the tensor."""
        spans = (*self.panel.lead, self.panel.rows[i], self.panel.columns[j])
        own = spans[len(spans) - self.layout.ndim :]
        slices = [f"{start}:{stop}" for start, stop in own]
        return f"[{', '.join(slices)}]"

    def _labels(self, left: float) -> Iterator[str]:
        """The holders, in those boxes that have room for them."""
        for i, j, x, y, width, height in self._places():
            holders = self.panel.holders[i][j]
            text = write_label(holders, self.layout.op, int((width - 4) / LETTER))
            if holders and text and height >= LINE - 4:
                self.labelled.add(holders)
                middle = {"text_anchor": "middle", "pointer_events": "none"}
                fill = ink(self.colours[holders])
                yield elements.words(
                    left + x + width / 2, y + height / 2 + 4, text, fill=fill, **middle
                )


HATCH = (
    '<defs><pattern id="shardmath-addends" width="8" height="8" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.5" height="8" fill="#fff" opacity="0.55"/>'
    "</pattern></defs>"
)


def _shown(spans: Sequence[Stretch], scale: _Scale, *, across: bool) -> Iterator[tuple[float, int]]:
    """Borders of stretches that have room for their number: the last one always, others from the left."""
    if not spans:
        return
    ends = zip(scale.at, scale.size, spans, strict=True)
    borders = {at + size: stop for at, size, (_, stop) in ends}
    borders |= {at: start for at, (start, _) in zip(scale.at, spans, strict=True)}
    *inner, last = sorted(borders.items())
    free = -math.inf
    for at, position in inner:
        half = _half(position, across)
        if at - half >= free and at + half <= last[0] - _half(last[1], across):
            yield at, position
            free = at + half
    yield last


def _half(position: int, across: bool) -> float:
    """Half of the pixels that a number takes along the dimension."""
    if not across:
        return 6.5
    return (len(str(position)) * LETTER + 6) / 2


def _legend(
    layout: Layout, found: Sequence[Holders], colours: Colours, labelled: set[Holders]
) -> list[Drawing]:
    """Who has which colour, of those that no box names; the first and the last of many."""
    unnamed = [holders for holders in found if holders not in labelled]
    if not unnamed:
        return []
    if len(unnamed) <= MOST_LEGEND:
        return [below([_entry(one, layout.op, colours[one]) for one in unnamed], 0)]
    ends = [_entry(one, layout.op, colours[one]) for one in (found[0], found[-1])]
    count = lines([f"... {len(found):,} colours in the order of ranks ..."])
    return [beside([ends[0], count, ends[1]], 8)]


def _entry(holders: Holders, op: str | None, colour: str) -> Drawing:
    """A colour and what it stands for."""
    text = write_holders(holders, op)
    shown = brief(text, 60)
    parts = (box(0, 3, 12, 12, fill=colour), elements.words(18, LINE * 0.75, shown))
    return Drawing(18 + len(shown) * LETTER, LINE, parts)


def _notes(layout: Layout, cells: Cells) -> Iterator[str]:
    """What the boxes do not say by themselves."""
    if 0 in layout.shape:
        yield "no elements"
    copies = math.prod(layout.mesh.axis_size(name) for name in layout.free_axes)
    if copies > 1:
        yield f"the same along {', '.join(layout.free_axes)}: {copies:,} ranks hold each"
    if layout.partial:
        axes = ", ".join(name for name, _ in layout.partial)
        yield f"hatched: addends of a {layout.op} along {axes}"
    idle = idle_ranks(layout)
    if idle and 0 not in layout.shape:
        yield f"{write_holders((tuple(idle),), None)}: nothing"
    if any(map(_has_unheld, cells.panels)):
        yield "dashed: nobody"
    yield from _left_out(layout, cells)


def _has_unheld(panel: Panel) -> bool:
    """Whether nobody holds some cell of the panel."""
    return any(() in row for row in panel.holders)


def _left_out(layout: Layout, cells: Cells) -> Iterator[str]:
    """What is not drawn."""
    if cells.slices > len(cells.panels):
        yield f"... and {plural(cells.slices - MOST_PANELS, 'more slice')}"
    if not cells.panels:
        return
    for what, spans in (("rows", cells.panels[0].rows), ("columns", cells.panels[0].columns)):
        for before, after in itertools.pairwise(spans):
            if before[1] != after[0]:
                name = what if layout.ndim > 1 else "positions"
                yield f"gap: {name} {before[1]:,} to {after[0] - 1:,} are not drawn"


def _local_tensors(layout: Layout) -> Drawing:
    """The local tensors of the first ranks, holes dashed."""
    shown = layout.mesh.ranks[:MOST_LOCAL]
    drawn = [_local_tensor(layout, rank) for rank in shown]
    parts = [lines(["local tensors; dashed cells are holes, no elements of the tensor"])]
    parts.append(beside(drawn, 20))
    more = layout.mesh.size - len(shown)
    if more:
        parts.append(lines([f"... and {plural(more, 'more rank')}"]))
    return below(parts, 4)


def _local_tensor(layout: Layout, rank: int) -> Drawing:
    """The last two dimensions of what a rank stores: what each box holds, and holes."""
    runs = layout.runs(rank)[-2:]
    rows = [((0, 1), "0:1")]
    if len(runs) > 1:
        rows = _pieces(runs[0])
    columns = _pieces(runs[-1])
    down = _scale([span for span, _ in rows], HIGH / 2)
    across = _scale([span for span, _ in columns], WIDE / 2)
    parts = []
    for i, (_, held_rows) in enumerate(rows):
        for j, (_, held) in enumerate(columns):
            texts = [held_rows, held][-len(runs) :]
            y = LINE + 4 + down.at[i]
            parts.append(_piece(texts, (across.at[j], y, across.size[j], down.size[i])))
    shape = "x".join(map(str, layout.local_shape(rank)))
    head = f"rank {rank}: {shape}"
    width = max(across.total, len(head) * LETTER)
    return Drawing(width, LINE + 6 + down.total, (elements.words(0, 12, head), *parts))


def _piece(held: Sequence[str], area: tuple[float, float, float, float]) -> str:
    """A box of a local tensor that holds these positions of each dimension, or a hole."""
    if all(held):
        title = f"[{', '.join(held)}]"
        return box(*area, title, fill="currentColor", fill_opacity="0.25", stroke="currentColor")
    return box(*area, "hole", fill="none", stroke=VERMILION, stroke_dasharray="3 2")


def _pieces(runs: Runs) -> list[tuple[Stretch, str]]:
    """The local stretches of a dimension, holes too, and the global positions that each has; the first of many."""
    out: list[tuple[Stretch, str]] = []
    at = 0
    for local, start, size in runs.segments[:MOST_PIECES]:
        if local > at:
            out.append(((at, local), ""))
        at = local + size
        out.append(((local, at), f"{start}:{start + size}"))
    if at < len(runs) and len(runs.segments) <= MOST_PIECES:
        out.append(((at, len(runs)), ""))
    return out
