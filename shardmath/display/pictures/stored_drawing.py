"""Stored pictures: one stored tensor of a rank, what lies where in it, and where it comes from in a refit, as SVG.

1. The stored tensor is drawn once, and next to it each stored tensor of the trainer from which pieces come. A piece has
   the same number in both; a table lists its positions on both sides.
2. Colors stand for logical tensors, which the table names. Hatched boxes are padding; outlined ones are other elements
   of the trainer's tensors.
3. Positions are to scale, except that every stretch has room for a number. If there are too many, the middle ones are
   left out, and a line says so.
4. The two dimensions with the most stretches go down and across; of the other ones, the first slices are drawn.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.text import plural
from shardmath.display.pictures.cells import drop_middle, find_limits
from shardmath.display.pictures.elements import (
    LETTER,
    VERMILION,
    Drawing,
    Stretch,
    below,
    beside,
    box,
    document,
    in_rows,
    ink,
    lines,
    list_ticks,
    palette,
    scale_stretches,
    words,
)
from shardmath.display.pictures.layout_drawing import name_gaps
from shardmath.display.pictures.stored_pieces import Box, PiecedTensor, StoredPiece, find_stored
from shardmath.models.refits.refit import Refit
from shardmath.models.storage.stored import KnownSide

__all__ = ["stored_svg"]

WIDE, HIGH = 180.0, 240.0
"""Pixels of a tensor's columns and rows, if there are many."""
LEAST_WIDE, LEAST_HIGH = 26.0, 16.0
"""Pixels of a stretch of columns, and of rows, that has room for a number."""
LEFT, TOP = 44.0, 20.0
"""Pixels to the left of and above a tensor, for positions."""
MOST_CELLS = 24
"""Boxes of a stored tensor."""
MOST_THERE = 2 * MOST_CELLS + 1
"""Boxes of a stored tensor of the trainer: pieces, and what lies between them."""
MOST_SLICES = 2
"""Slices of a stored tensor of more than two dimensions."""
MOST_SOURCES = 6
"""Stored tensors of the trainer."""
MOST_LETTERS = 100
"""Letters of a line of text above and below the tensors."""
MOST_BELOW = 34
"""Letters of a line below one tensor."""

HATCH = (
    '<defs><pattern id="shardmath-unheld" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="1.5" height="6" fill="{VERMILION}"/></pattern></defs>'
)


def stored_svg(
    value: Refit | KnownSide,
    *,
    tensor: str | None = None,
    rank: int | None = None,
    engine: str | None = None,
    inline: bool = False,
) -> str:
    """Return a picture of the stored tensor `tensor` of `rank`, and in a refit of where its pieces come from, as SVG: a
    document, or an element for a web page if `inline`.

    Arguments that are None are chosen as in `find_stored`, which also raises the errors.
    """
    stored = find_stored(value, tensor, rank, engine)
    title = f"{stored.native} on {_name_rank(stored)}"
    drawing, about = _draw(stored, title)
    return document(drawing, title, about, inline=inline)


def _name_rank(stored: PiecedTensor) -> str:
    """The rank in words, with its side."""
    return f"{stored.side} rank {stored.rank}".strip()


def _draw(stored: PiecedTensor, title: str) -> tuple[Drawing, str]:
    """The picture, and its description in words."""
    grid = _choose_grid([piece.cells for piece in stored.pieces], stored.shape, MOST_CELLS)
    marks = _mark(_list_drawn(stored, grid))
    places = _group_by_source(marks)
    there = _Shortener(native for _, native, _ in places)
    tensors = [_draw_stored(stored, grid, marks)]
    if places:
        tensors.append(_draw_sources(places, there))
    table = list(_list_rows(marks, there, is_traced=stored.is_traced))
    notes = list(_list_notes(stored, marks, places))
    parts = [
        _write_heading([title, *_wrap([f"by {stored.declared}"])]),
        beside(tensors, 28),
        _draw_table(table),
        lines(_wrap([*notes, *there.list_notes()])),
    ]
    about = "; ".join([" ".join(row) for row in table[1:]] + notes)
    return below(_list_filled(parts), 10), about


def _list_filled(parts: Iterable[Drawing]) -> list[Drawing]:
    """The drawings in which there is something."""
    return [part for part in parts if part.height]


def _list_drawn(stored: PiecedTensor, grid: _Grid) -> list[StoredPiece]:
    """The pieces in the drawn cells, each once, in the order of the cells."""
    found = [_find(stored.pieces, start) for start in grid.list_starts()]
    return [stored.pieces[i] for i in dict.fromkeys(found) if i is not None]


def _write_heading(texts: Sequence[str]) -> Drawing:
    """The first text in bold, the others below it."""
    first, *rest = texts
    return below([lines([first], font_weight="bold"), lines(rest)], 0)


def _wrap(texts: Iterable[str]) -> list[str]:
    """The texts in lines of at most MOST_LETTERS characters."""
    return [line for text in texts for line in textwrap.wrap(text, MOST_LETTERS)]


# Pieces with numbers


class _Mark(NamedTuple):
    """A piece with its number, and the color and the short name of its logical tensor."""

    number: int
    piece: StoredPiece
    color: str
    name: str


_Marked: TypeAlias = tuple[Box, _Mark]
"""A box of a stored tensor, and the piece in it."""
_StoredPlace: TypeAlias = tuple[int, str, tuple[int, ...]]
"""Rank, name and shape of a stored tensor of the trainer."""


class _Shortener:
    """Names without the beginning that all of them share; each keeps its last two words between dots."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(names))
        # Not a part of the last two words of the shortest name.
        beginnings = [name.split(".")[:-2] for name in self.names]
        # Not strict: names may have different numbers of words.
        by_place = zip(*beginnings, strict=False)
        shared = itertools.takewhile(lambda words: len(set(words)) == 1, by_place)
        self.prefix = "".join(f"{word}." for word, *_ in shared)

    def shorten(self, name: str) -> str:
        """Return the name without the shared beginning."""
        return name.removeprefix(self.prefix)

    def list_notes(self) -> Iterator[str]:
        """Yield a line that says what names of the trainer's tensors are without, unless it is nothing."""
        if self.prefix:
            yield f"the trainer's names begin with {self.prefix}"


def _mark(pieces: Sequence[StoredPiece]) -> list[_Mark]:
    """The pieces with numbers from 1 on; all pieces of one logical tensor have one color."""
    tensors = list(dict.fromkeys(piece.tensor for piece in pieces))
    colors = dict(zip(tensors, palette(len(tensors)), strict=True))
    short = _Shortener(tensors)
    marks = []
    for number, piece in enumerate(pieces, 1):
        marks.append(_Mark(number, piece, colors[piece.tensor], short.shorten(piece.tensor)))
    return marks


def _group_by_source(marks: Iterable[_Mark]) -> dict[_StoredPlace, list[_Marked]]:
    """The pieces by the trainer's stored tensor that they come from, with their boxes there."""
    by_place: dict[_StoredPlace, list[_Marked]] = {}
    for mark in marks:
        source = mark.piece.source
        if source is not None:
            place = source.rank, source.native, source.shape
            by_place.setdefault(place, []).append((source.cells, mark))
    return by_place


def _find(pieces: Sequence[StoredPiece], start: Sequence[int]) -> int | None:
    """The index of the piece with this position; None if it is in no piece."""
    for i, piece in enumerate(pieces):
        if _is_in(piece.cells, start):
            return i
    return None


def _is_in(cells: Box, position: Sequence[int]) -> bool:
    """Whether the box contains the position."""
    return all(at in span for at, span in zip(position, cells, strict=True))


# The parts of a stored tensor that are drawn


_Slice: TypeAlias = Mapping[int | None, Stretch]
"""The stretch of each dimension along which a slice is cut."""


class _Grid(NamedTuple):
    """The stretches of a stored tensor that are drawn: those of each dimension, and the dimensions that go down and
    across, which are None if there are none. `slices` is the number of all slices along the other dimensions."""

    shape: tuple[int, ...]
    drawn: tuple[tuple[Stretch, ...], ...]
    down: int | None
    across: int | None
    slices: int

    def stretches(self, dim: int | None) -> Sequence[Stretch]:
        """Return the drawn stretches of a dimension; one of one position for None."""
        return ((0, 1),) if dim is None else self.drawn[dim]

    def list_slices(self) -> list[_Slice]:
        """Return the slices that are drawn: a stretch of each dimension that goes neither down nor across."""
        others = [d for d in range(len(self.shape)) if d not in (self.down, self.across)]
        chosen = itertools.product(*(self.drawn[d] for d in others))
        some = itertools.islice(chosen, MOST_SLICES)
        keys: list[int | None] = [*others]
        return [dict(zip(keys, stretches, strict=True)) for stretches in some]

    def list_cells(self, fixed: _Slice) -> Iterator[tuple[Stretch, ...]]:
        """Yield each cell of a slice, row by row: a stretch per dimension of the tensor."""
        for row in self.stretches(self.down):
            for column in self.stretches(self.across):
                by_dim = {**fixed, self.down: row, self.across: column}
                yield tuple(by_dim[d] for d in range(len(self.shape)))

    def list_starts(self) -> Iterator[tuple[int, ...]]:
        """Yield the first position of each cell of each slice."""
        for fixed in self.list_slices():
            for cell in self.list_cells(fixed):
                yield tuple(start for start, _ in cell)


def _choose_grid(boxes: Sequence[Box], shape: tuple[int, ...], most: int) -> _Grid:
    """The stretches of a stored tensor between the borders of these boxes, so that there are at most `most` cells."""
    by_dim = [_list_stretches([cells[d] for cells in boxes], n) for d, n in enumerate(shape)]
    # The two dimensions with the most stretches; of equally many, the last ones.
    counts = sorted((len(stretches), d) for d, stretches in enumerate(by_dim))
    chosen = sorted(d for _, d in counts[-2:])
    down, across = [*chosen, None, None][:2]
    others = [len(by_dim[d]) for d in range(len(shape)) if d not in chosen]
    slices = math.prod(others)
    room = most // max(min(slices, MOST_SLICES), 1)
    limits = find_limits(
        1 if down is None else len(by_dim[down]), 1 if across is None else len(by_dim[across]), room
    )
    for d, limit in zip(chosen, limits, strict=False):
        by_dim[d] = drop_middle(by_dim[d], limit)
    return _Grid(shape, tuple(map(tuple, by_dim)), down, across, slices)


def _list_stretches(spans: Iterable[range], size: int) -> list[Stretch]:
    """The stretches of a dimension of this size between the borders of the spans."""
    borders = {0, size}
    for span in set(spans):
        borders.update(_list_borders(span))
    return list(itertools.pairwise(sorted(borders)))


def _list_borders(span: range) -> Iterable[int]:
    """The positions at which the span begins and ends; each of its positions if it has gaps."""
    if span.step == 1:
        return span.start, span.stop
    return itertools.chain(span, (at + 1 for at in span))


# Drawings


def _draw_sources(places: Mapping[_StoredPlace, list[_Marked]], names: _Shortener) -> Drawing:
    """The trainer's stored tensors from which pieces come."""
    drawn = []
    for place in list(places)[:MOST_SOURCES]:
        rank, native, shape = place
        boxes = places[place]
        grid = _choose_grid([cells for cells, _ in boxes], shape, MOST_THERE)
        head = [f"from trainer rank {rank}", f"{names.shorten(native)} {shape}"]
        drawn.append(_draw_tensor(grid, boxes, head, ""))
    return in_rows(drawn)


def _draw_stored(stored: PiecedTensor, grid: _Grid, marks: Sequence[_Mark]) -> Drawing:
    """The stored tensor that the picture is about."""
    boxes = [(mark.piece.cells, mark) for mark in marks]
    name = _Shortener([stored.native]).shorten(stored.native)
    return _draw_tensor(grid, boxes, [_name_rank(stored), f"{name} {stored.shape}"], "padding")


def _draw_tensor(grid: _Grid, boxes: Sequence[_Marked], head: Sequence[str], rest: str) -> Drawing:
    """A stored tensor, slice by slice, below its rank and its name. Cells in no box are what `rest` says, or other
    elements if it is ""."""
    slices = []
    for fixed in grid.list_slices():
        panel = _draw_slice(grid, fixed, boxes, rest)
        slices.append(below([lines(_name_slice(grid, fixed)), panel], 2))
    left_out = [line for text in _name_left_out(grid) for line in textwrap.wrap(text, MOST_BELOW)]
    parts = [_write_heading(head), *slices, lines(left_out)]
    return below(_list_filled(parts), 4)


def _name_left_out(grid: _Grid) -> Iterator[str]:
    """Lines about positions and slices of a stored tensor that are not drawn."""
    for name, dim in (("rows", grid.down), ("columns", grid.across)):
        if dim is not None:
            yield from name_gaps(name, grid.drawn[dim])
    more = grid.slices - len(grid.list_slices())
    if more > 0:
        yield f"... and {plural(more, 'more slice')}"


def _name_slice(grid: _Grid, fixed: _Slice) -> list[str]:
    """A line for a slice of a tensor of more than two dimensions."""
    if not fixed:
        return []
    by_dim = {d: _show_stretch(stretch) for d, stretch in fixed.items()}
    by_dim |= {grid.down: "↓", grid.across: "→"}
    texts = [by_dim[d] for d in range(len(grid.shape))]
    return [f"[{', '.join(texts)}]"]


def _show_stretch(stretch: Stretch) -> str:
    """A stretch as Python writes a slice."""
    return f"{stretch[0]}:{stretch[1]}"


def _draw_slice(grid: _Grid, fixed: _Slice, boxes: Sequence[_Marked], rest: str) -> Drawing:
    """A box for each cell of the slice, with positions next to them."""
    down, across = grid.stretches(grid.down), grid.stretches(grid.across)
    rows = scale_stretches(down, HIGH, LEAST_HIGH)
    columns = scale_stretches(across, WIDE, LEAST_WIDE)
    parts = [HATCH] if rest else []
    if grid.down is not None:
        for at, position in list_ticks(down, rows, across=False):
            parts.append(_write_position(LEFT - 6, TOP + at + 4, position, "end"))
    if grid.across is not None:
        for at, position in list_ticks(across, columns, across=True):
            parts.append(_write_position(LEFT + at, TOP - 6, position, "middle"))
    areas = itertools.product(
        zip(rows.at, rows.size, strict=True), zip(columns.at, columns.size, strict=True)
    )
    for ((y, height), (x, width)), cell in zip(areas, grid.list_cells(fixed), strict=True):
        parts += _draw_cell(cell, boxes, rest, (LEFT + x, TOP + y, width, height))
    return Drawing(LEFT + columns.total + 3 * LETTER, TOP + rows.total + 4, tuple(parts))


def _write_position(x: float, y: float, position: int, anchor: str) -> str:
    """A position next to a tensor."""
    return words(x, y, f"{position}", text_anchor=anchor, opacity="0.75")


def _draw_cell(
    cell: tuple[Stretch, ...],
    boxes: Sequence[_Marked],
    rest: str,
    area: tuple[float, float, float, float],
) -> Iterator[str]:
    """A cell: the box of the piece in it with number and name, or a box of what else is there."""
    x, y, width, height = area
    where = f"[{', '.join(map(_show_stretch, cell))}]"
    start = [first for first, _ in cell]
    mark = next((mark for cells, mark in boxes if _is_in(cells, start)), None)
    if mark is None:
        fill = "url(#shardmath-unheld)" if rest else "none"
        look = {"fill": fill, "stroke": "currentColor", "stroke_opacity": "0.5"}
        yield box(x, y, width, height, f"{where} {rest or 'not sent here'}", **look)
        return
    title = f"{where} {mark.number}: {mark.piece.tensor}"
    yield box(x, y, width, height, title, fill=mark.color, stroke="currentColor")
    letters = int((width - 4) / LETTER)
    texts = [f"{mark.number} {mark.name}", f"{mark.number}"]
    text = next((one for one in texts if len(one) <= letters), "")
    place = {"text_anchor": "middle", "pointer_events": "none"}
    yield words(x + width / 2, y + height / 2 + 4, text, fill=ink(mark.color), **place)


# Text


def _list_rows(
    marks: Iterable[_Mark], names: _Shortener, *, is_traced: bool
) -> Iterator[list[str]]:
    """The rows of the table: a heading, then one for each piece."""
    head = ["", "positions", "hold"]
    yield [*head, "which come from"] if is_traced else head
    for mark in marks:
        piece = mark.piece
        elements = _show_box([range(part.start, part.stop) for part in piece.elements])
        held = f"{piece.tensor} {elements}"
        if piece.function:
            held = f"{piece.function}({held})"
        row = [str(mark.number), _show_box(piece.cells), held]
        yield [*row, _show_source(piece, names)] if is_traced else row


def _show_box(cells: Iterable[range]) -> str:
    """A box as Python writes slices."""
    texts = []
    for span in cells:
        step = f":{span.step}" if span.step != 1 and len(span) > 1 else ""
        texts.append(f"{span.start}:{span[-1] + 1}{step}")
    return f"[{', '.join(texts)}]"


def _show_source(piece: StoredPiece, names: _Shortener) -> str:
    """The place that a piece comes from, in words."""
    source = piece.source
    if source is None:
        return f"made by {piece.made}" if piece.made else "nobody sends it"
    return f"rank {source.rank} {names.shorten(source.native)} {_show_box(source.cells)}"


def _draw_table(rows: Sequence[Sequence[str]]) -> Drawing:
    """The rows with aligned columns."""
    columns = [lines(column) for column in zip(*rows, strict=True)]
    return beside(columns, 2 * LETTER)


def _list_notes(
    stored: PiecedTensor, marks: Sequence[_Mark], places: Mapping[_StoredPlace, Sequence[_Marked]]
) -> Iterator[str]:
    """Lines about padding, and about what is not drawn."""
    if stored.padding:
        yield f"hatched: padding, {stored.padding:,} of {plural(math.prod(stored.shape), 'element')}"
    if any(_is_in_part(place, places[place]) for place in places):
        yield "without a number: not sent to the boxes on the left"
    if len(marks) < len(stored.pieces):
        ranks = {piece.source.rank for piece in stored.pieces if piece.source is not None}
        senders = f", from {plural(ranks, 'rank')}" if ranks else ""
        yield f"{len(marks)} of {len(stored.pieces):,} pieces are drawn{senders}"
    more = len(places) - MOST_SOURCES
    if more > 0:
        yield f"... and {plural(more, 'more stored tensor')} of the trainer"


def _is_in_part(place: _StoredPlace, boxes: Iterable[_Marked]) -> bool:
    """Whether some elements of a stored tensor are in none of these boxes."""
    _, _, shape = place
    return sum(math.prod(map(len, cells)) for cells, _ in boxes) < math.prod(shape)
