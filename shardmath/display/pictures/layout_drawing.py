"""Layout pictures: the elements of a tensor and the ranks that hold them, drawn as SVG.

1. Each box is a cell: elements that the same ranks hold. Its color stands for its set of holders; its label and its
   title name them. A dashed box is held by no rank.
2. Positions are to scale, except that every stretch is wide enough to be seen. If there are too many cells, the middle
   ones are left out, and a line says so.
3. `0 + 1` are the addends of a sum, `max(0 | 1)` of another reduction; `0, 1` hold the same elements.
4. Tensors of more than two dimensions are drawn slice by slice. Local tensors with holes are drawn below.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmath.base.text import plural
from shardmath.display.pictures import elements
from shardmath.display.pictures.cells import (
    Holders,
    Panel,
    Panels,
    cells_of,
    idle_ranks,
    list_pieces,
    write_holders,
    write_label,
)
from shardmath.display.pictures.elements import (
    LETTER,
    LINE,
    VERMILION,
    Drawing,
    Scale,
    Stretch,
    below,
    beside,
    box,
    brief,
    every,
    in_rows,
    ink,
    lines,
    list_ticks,
    name_ranks,
    palette,
    scale_stretches,
)
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout

__all__ = ["colors_of", "draw_layout", "layout_svg", "name_gaps"]

WIDE, HIGH = 336.0, 224.0
"""Pixels of a panel's columns and rows, if there are many elements."""
EDGED = 7.0
"""Pixels from which on a box has an edge."""
LEFT, TOP = 48.0, 20.0
"""Pixels to the left of and above a panel, for the positions at which stretches begin."""
MOST_LEGEND = 8
MOST_DESCRIBED = 16
"""Ranks in the description for people who do not see the picture."""
MOST_SPARSE = 6
"""Letters of a number that is wider than its box."""
MOST_LOCAL = 4
"""Ranks whose local tensors are drawn."""

Colors = Mapping[Holders, str]


def layout_svg(layout: Layout, *, inline: bool = False) -> str:
    """A picture of the layout as SVG: a document, or an element for a web page if `inline`."""
    cells = cells_of(layout)
    colors = colors_of([cells])
    drawing = draw_layout(layout, cells, colors)
    return elements.document(drawing, str(layout), about(layout), inline=inline)


def about(layout: Layout) -> str:
    """A description of the layout for people who do not see its picture: the indices that a rank holds in each
    dimension of the tensor, for the first 16 ranks."""
    by_dimension = _parts_by_rank(layout)
    described = layout.mesh.ranks[:MOST_DESCRIBED]
    texts = []
    for i, rank in enumerate(described):
        runs = " by ".join(_shortened(parts[i]) for parts in by_dimension)
        texts.append(f"rank {rank} holds {runs or 'the scalar'}")
    more = layout.mesh.size - len(texts)
    if more:
        texts.append(f"and {plural(more, 'more rank')}")
    return "; ".join(texts)


def _parts_by_rank(layout: Layout) -> list[list[Runs]]:
    """The Runs of each rank in mesh order, for each dimension."""
    by_dimension = []
    for dim in layout.dims:
        parts = partition(dim)
        numbers = parts.by_rank(layout.mesh).tolist()
        by_dimension.append([parts.parts[i] for i in numbers])
    return by_dimension


def _shortened(runs: Runs) -> str:
    if len(runs.segments) <= 4:
        return str(runs)
    return f"{Runs(runs.segments[:3])} and {len(runs.segments) - 3:,} more ranges"


def draw_layout(layout: Layout, cells: Panels, colors: Colors, wide: float = WIDE) -> Drawing:
    """Return a drawing of the layout: heading, legend, notes, and the 2-d slices in `cells`, each about `wide` pixels
    wide. `colors` maps a set of ranks to the color of the elements that exactly these ranks hold."""
    panels = [_PanelDrawer(layout, panel, colors, wide) for panel in cells.panels]
    drawn = [panel.draw() for panel in panels]
    # Texts above and below a panel are not wider than the panel: plans draw a heat map next to it.
    letters = int((LEFT + wide) / LETTER)
    head = lines(_wrap_heading(layout, letters), font_weight="bold")
    legend = _legend(layout, panels, colors, letters)
    notes = _wrap([*_number_notes(panels), *_notes(layout, cells)], letters)
    parts = [head, in_rows(drawn), *legend, lines(notes)]
    first_ranks = layout.mesh.ranks[:MOST_LOCAL]
    if any(map(layout.holes, first_ranks)):
        parts.append(_local_tensors(layout))
    filled = [part for part in parts if part.height]
    return below(filled, 6)


def _wrap_heading(layout: Layout, letters: int) -> list[str]:
    """The layout and its mesh, on separate lines if one line is too short."""
    text = str(layout)
    if len(text) <= letters:
        return [text]
    notation, _, mesh = text.partition(" on ")
    return _wrap([notation, f"on {mesh}"], letters)


def _wrap(texts: Iterable[str], letters: int) -> list[str]:
    """The texts in lines of at most `letters` characters."""
    return [line for text in texts for line in textwrap.wrap(text, letters)]


def _number_notes(panels: Sequence[_PanelDrawer]) -> Iterator[str]:
    """A note on the numbers in the boxes, if there are any."""
    numbered = [panel for panel in panels if panel.labeled]
    if numbered:
        step = numbered[0].step
        yield "numbers are ranks" if step == 1 else f"numbers are ranks, in one box of {step:,}"


def colors_of(several: Iterable[Panels]) -> Colors:
    """Choose a color for each distinct Holders (the ranks that hold a cell) in any of the pictures, and return a dict
    from Holders to color, with sorted keys. `several` has one Panels for each picture."""
    panels = [panel for cells in several for panel in cells.panels]
    distinct = _list_holders(panels)
    return dict(zip(distinct, palette(len(distinct)), strict=True))


def _list_holders(panels: Iterable[Panel]) -> list[Holders]:
    """The distinct sets of holders except the empty one, in the order of their first ranks."""
    distinct: set[Holders] = set()
    for panel in panels:
        for row in panel.holders:
            distinct.update(row)
    distinct.discard(())
    return sorted(distinct)


class _CellBox(NamedTuple):
    """A cell: its row and column, and the box in which it is drawn."""

    row: int
    column: int
    x: float
    y: float
    width: float
    height: float


class _PanelDrawer:
    """One panel to be drawn, and the sets of holders that its labels name."""

    def __init__(self, layout: Layout, panel: Panel, colors: Colors, wide: float) -> None:
        self.layout = layout
        self.panel = panel
        self.colors = colors
        self.columns = scale_stretches(panel.columns, wide)
        self.rows = scale_stretches(panel.rows, HIGH)
        self.labeled: set[Holders] = set()
        self.step = 1
        """One in `step` boxes is labeled."""

    def draw(self) -> Drawing:
        """A drawing of the panel (2-d slice): a colored box per cell, and labels where rows and columns begin."""
        left = LEFT if self.layout.ndim > 1 else 0.0
        parts = [*self._ticks(left), *self._boxes(left)]
        if self.layout.partial:
            parts += [HATCH, self._hatch(left)]
        parts += self._labels(left)
        # The numbers of the last ticks are centered at the panel's ends, and reach beyond them.
        width = left + self.columns.total + LETTER * 3
        height = TOP + self.rows.total + 4
        drawing = Drawing(width, height, tuple(parts))
        return self._under_lead(drawing)

    def _hatch(self, left: float) -> str:
        """A hatched box over the panel, which marks its cells as addends."""
        width = self.columns.total
        height = self.rows.total
        return box(left, TOP, width, height, fill="url(#shardmath-addends)", pointer_events="none")

    def _under_lead(self, drawing: Drawing) -> Drawing:
        """The drawing below its slice of the leading dimensions."""
        if not self.panel.lead:
            return drawing
        slices = [f"{start}:{stop}" for start, stop in self.panel.lead]
        head = ", ".join([*slices, ":", ":"])
        title = lines([f"[{head}]"])
        return below([title, drawing], 2)

    def _ticks(self, left: float) -> Iterator[str]:
        """Positions at which stretches begin, and the length of the dimension."""
        ndim = self.layout.ndim
        if ndim:
            y = TOP - 6
            for offset, position in list_ticks(self.panel.columns, self.columns, across=True):
                yield _write_position(left + offset, y, position, "middle")
        if ndim > 1:
            x = left - 6
            for offset, position in list_ticks(self.panel.rows, self.rows, across=False):
                yield _write_position(x, TOP + offset + 4, position, "end")

    def _cell_boxes(self) -> Iterator[_CellBox]:
        """Each cell, row by row."""
        rows = self.rows
        columns = self.columns
        for i, y in enumerate(rows.at):
            height = rows.size[i]
            for j, x in enumerate(columns.at):
                width = columns.size[j]
                yield _CellBox(i, j, x, TOP + y, width, height)

    def _boxes(self, left: float) -> Iterator[str]:
        """A box for each cell."""
        op = self.layout.op
        for place in self._cell_boxes():
            holders = self._find_holders(place)
            title = f"{self._box_text(place)} {write_holders(holders, op)}"
            look = self._paint(holders, place)
            ranks = name_ranks(itertools.chain(*holders))
            yield box(
                left + place.x, place.y, place.width, place.height, title, **look, data_ranks=ranks
            )

    def _find_holders(self, place: _CellBox) -> Holders:
        """The holders of a cell."""
        return self.panel.holders[place.row][place.column]

    def _paint(self, holders: Holders, place: _CellBox) -> dict[str, str]:
        """The attributes of a box."""
        if not holders:
            return {"fill": "none", "stroke": VERMILION, "stroke_dasharray": "3 2"}
        fill = {"fill": self.colors[holders]}
        if min(place.width, place.height) >= EDGED:
            fill |= {"stroke": "#fff", "stroke_width": "1"}
        return fill

    def _box_text(self, place: _CellBox) -> str:
        """The box of a cell, as a slice of the tensor."""
        row = self.panel.rows[place.row]
        column = self.panel.columns[place.column]
        spans = (*self.panel.lead, row, column)
        # A tensor of fewer than two dimensions is drawn with an extra row and column: drop these.
        real = spans[len(spans) - self.layout.ndim :]
        slices = [f"{start}:{stop}" for start, stop in real]
        return f"[{', '.join(slices)}]"

    def _labels(self, left: float) -> Iterator[str]:
        """The holders in those boxes that have room for them; if none has, in one of several boxes."""
        for place in self._cell_boxes():
            letters = int((place.width - 4) / LETTER)
            if place.height >= LINE - 4:
                yield from self._label(place, left, letters)
        if not self.labeled:
            yield from self._sparse_labels(left)

    def _sparse_labels(self, left: float) -> Iterator[str]:
        """The holders of one box in each group of boxes that together have room for a number."""
        rows = self.rows
        columns = self.columns
        room = (MOST_SPARSE + 1) * LETTER
        if columns.total < room or rows.total < LINE:
            return
        group_rows = every(len(rows.at), rows.total, LINE)
        group_columns = every(len(columns.at), columns.total, room)
        self.step = group_rows * group_columns
        for place in self._cell_boxes():
            # The middle box of each group, so that no number extends beyond the panel.
            is_middle_row = place.row % group_rows == group_rows // 2
            if is_middle_row and place.column % group_columns == group_columns // 2:
                yield from self._label(place, left, MOST_SPARSE, hides=True)

    def _label(
        self, place: _CellBox, left: float, letters: int, *, hides: bool = False
    ) -> Iterator[str]:
        """The holders of a cell in at most `letters` characters, if possible; `hides` covers borders behind them."""
        holders = self._find_holders(place)
        text = write_label(holders, self.layout.op, letters)
        if not text:
            return
        self.labeled.add(holders)
        x = left + place.x + place.width / 2
        y = place.y + place.height / 2 + 4
        fill = self.colors[holders]
        stroke = {"stroke": fill, "stroke_width": 3, "paint_order": "stroke"} if hides else {}
        middle = {"text_anchor": "middle", "pointer_events": "none"}
        yield elements.words(x, y, text, fill=ink(fill), **stroke, **middle)


def _write_position(x: float, y: float, position: int, anchor: str) -> str:
    """A position next to a panel."""
    return elements.words(x, y, f"{position}", text_anchor=anchor, opacity="0.75")


HATCH = (
    '<defs><pattern id="shardmath-addends" width="8" height="8" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.5" height="8" fill="#fff" opacity="0.55"/>'
    "</pattern></defs>"
)


def _legend(
    layout: Layout, panels: Sequence[_PanelDrawer], colors: Colors, letters: int
) -> list[Drawing]:
    """The colors of holders that no label names; if there are many, the first and the last color of all."""
    distinct = _list_holders(panel.panel for panel in panels)
    labeled = {holders for panel in panels for holders in panel.labeled}
    unnamed = [holders for holders in distinct if holders not in labeled]
    if not unnamed:
        return []
    op = layout.op
    if len(unnamed) <= MOST_LEGEND:
        entries = [_entry(holders, op, colors[holders], letters) for holders in unnamed]
        return [below(entries, 0)]
    ends = (distinct[0], distinct[-1])
    first, last = [_entry(holders, op, colors[holders], letters) for holders in ends]
    count = lines([f"... {len(distinct):,} colors in the order of ranks ..."])
    return [below([first, count, last], 0)]


def _entry(holders: Holders, op: str | None, color: str, letters: int) -> Drawing:
    """A color and its holders, in at most `letters` characters."""
    full_text = write_holders(holders, op)
    text = brief(full_text, letters - 3)  # the square takes the room of 3
    square = box(0, 3, 12, 12, full_text, fill=color)
    label = elements.words(18, LINE * 0.75, text)
    width = 18 + len(text) * LETTER
    return Drawing(width, LINE, (square, label))


def _notes(layout: Layout, cells: Panels) -> Iterator[str]:
    """Lines below the boxes: replication, addends, idle ranks, and what is not drawn."""
    empty = 0 in layout.shape
    if empty:
        yield "no elements"
    free = layout.free_axes
    copies = math.prod(map(layout.mesh.axis_size, free))
    if copies > 1:
        yield f"the same along {', '.join(free)}: {copies:,} ranks hold each"
    if layout.partial:
        axes = ", ".join(name for name, _ in layout.partial)
        yield f"hatched: addends of a {layout.op} along {axes}"
    idle = tuple(idle_ranks(layout))
    if idle and not empty:
        yield f"{write_holders((idle,), None)}: nothing"
    if any(map(_has_unheld, cells.panels)):
        yield "dashed: nobody"
    yield from _left_out(layout, cells)


def _has_unheld(panel: Panel) -> bool:
    """Whether some cell of the panel has no holder."""
    return any(() in row for row in panel.holders)


def _left_out(layout: Layout, cells: Panels) -> Iterator[str]:
    """Lines about slices and positions that are not drawn."""
    more = cells.slices - len(cells.panels)
    if more:
        yield f"... and {plural(more, 'more slice')}"
    if not cells.panels:
        return
    # All panels have the same rows and columns.
    panel = cells.panels[0]
    across = "columns" if layout.ndim > 1 else "positions"
    yield from name_gaps("rows", panel.rows)
    yield from name_gaps(across, panel.columns)


def name_gaps(name: str, spans: Sequence[Stretch]) -> Iterator[str]:
    """Yield a line for each range of positions between `spans` (drawn ranges of a dimension) that is not drawn. `name`
    is the plural noun for positions, such as "rows"."""
    for (_, stop), (start, _) in itertools.pairwise(spans):
        if stop != start:
            yield f"gap: {name} {stop:,} to {start - 1:,} are not drawn"


def _local_tensors(layout: Layout) -> Drawing:
    """The local tensors of the first ranks, with dashed holes."""
    first_ranks = layout.mesh.ranks[:MOST_LOCAL]
    drawn = [_local_tensor(layout, rank) for rank in first_ranks]
    head = lines(["local tensors; dashed cells are holes, no elements of the tensor"])
    parts = [head, beside(drawn, 20)]
    more = layout.mesh.size - len(first_ranks)
    if more:
        parts.append(lines([f"... and {plural(more, 'more rank')}"]))
    return below(parts, 4)


def _local_tensor(layout: Layout, rank: int) -> Drawing:
    """The last two dimensions of a rank's local tensor: its stretches of positions, and holes."""
    *before, columns = layout.runs(rank)[-2:]
    down, texts_down = _scale_rows(before)
    spans, texts = list_pieces(columns)
    across = scale_stretches(spans, WIDE / 2)
    sizes = map(str, layout.local_shape(rank))
    head = f"rank {rank}: {'x'.join(sizes)}"
    parts = [elements.words(0, 12, head)]
    top = LINE + 4
    for row_texts, y, height in zip(texts_down, down.at, down.size, strict=True):
        for text, x, width in zip(texts, across.at, across.size, strict=True):
            parts.append(_piece((*row_texts, text), (x, top + y, width, height)))
    room = max(across.total, len(head) * LETTER)
    bottom = top + 2 + down.total
    return Drawing(room, bottom, tuple(parts))


def _scale_rows(before: Sequence[Runs]) -> tuple[Scale, list[tuple[str, ...]]]:
    """Where the rows of boxes are drawn, and the text of each row's positions. `before` has the Runs of the dimension
    before the last; without one there is one row."""
    if not before:
        return scale_stretches([(0, 1)], HIGH / 2), [()]
    (rows,) = before
    spans, texts = list_pieces(rows)
    return scale_stretches(spans, HIGH / 2), [(text,) for text in texts]


def _piece(held: Sequence[str], area: tuple[float, float, float, float]) -> str:
    """A box of a local tensor with these positions of each dimension; a hole if one of them is ""."""
    if all(held):
        title = f"[{', '.join(held)}]"
        return box(*area, title, fill="currentColor", fill_opacity="0.25", stroke="currentColor")
    return box(*area, "hole", fill="none", stroke=VERMILION, stroke_dasharray="3 2")
