"""Mesh pictures: ranks arranged by their coordinates, drawn as SVG.

The last axis goes from left to right, the one before from top to bottom; there is one panel for each coordinate on
the other axes. With a topology, ranks of one node have one color.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmath.base.arrays import Ints
from shardmath.base.text import plural
from shardmath.display.pictures.elements import (
    LETTER,
    Drawing,
    below,
    box,
    document,
    in_rows,
    ink,
    lines,
    palette,
    words,
)
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.plans.flows.topology import Topology

__all__ = ["mesh_svg"]

MOST_SIDE = 16
"""Coordinates per axis that are drawn."""
MOST_PANELS = 6
HIGH = 24.0
TOP = 20.0
"""Pixels above the ranks, for their coordinates."""


class _Look(NamedTuple):
    """The width of each rank's box, and a color for each node."""

    width: float
    nodes: dict[int, str]
    topology: Topology | None

    def fill(self, rank: int) -> tuple[dict[str, str], str]:
        """The SVG attributes of the box of `rank`, and the color of the number in it."""
        if self.topology is None:
            return {"fill": "currentColor", "fill_opacity": "0.1"}, "currentColor"
        color = self.nodes[self.topology.node(rank)]
        return {"fill": color}, ink(color)


def mesh_svg(mesh: Mesh, *, topology: Topology | None = None, inline: bool = False) -> str:
    """Return a picture of the mesh as SVG, colored by node if `topology` is given: a document, or an element for a web
    page if `inline`."""
    title = str(mesh) if mesh.size <= 16 else f"mesh of {mesh.size:,} ranks"
    axes = ", ".join(f"{name} of {n}" for name, n in mesh.axes)
    about = f"axes {axes or 'none'}, last fastest; {plural(mesh.size, 'rank')}"
    drawing = _draw(mesh, topology)
    return document(drawing, title, about, inline=inline)


def _draw(mesh: Mesh, topology: Topology | None) -> Drawing:
    """The panels under a heading."""
    look = _look(mesh, topology)
    panels = [_panel(mesh, coords, look) for coords in _leading(mesh)]
    head = _write_coords(mesh.shape) or "one rank"
    heading = lines([head], font_weight="bold")
    notes = lines(_notes(mesh, len(panels), topology))
    parts = [heading, in_rows(panels), notes]
    return below([part for part in parts if part.height], 6)


def _leading(mesh: Mesh) -> Iterator[dict[str, int]]:
    """The first coordinates on all axes except the last two."""
    lead = dict(mesh.axes[:-2])
    coordinates = map(range, lead.values())
    points = itertools.product(*coordinates)
    for point in itertools.islice(points, MOST_PANELS):
        yield dict(zip(lead, point, strict=True))


def _look(mesh: Mesh, topology: Topology | None) -> _Look:
    """A width, at least 26 pixels, that fits the longest number, and the colors of the nodes."""
    longest = str(max(mesh.ranks))
    needed = len(longest) * LETTER + 10  # 5 pixels on either side stay free
    width = max(26.0, needed)
    if topology is None:
        return _Look(width, {}, None)
    nodes = _list_nodes(mesh, topology)
    colors = dict(zip(nodes, palette(len(nodes)), strict=True))
    return _Look(width, colors, topology)


def _list_nodes(mesh: Mesh, topology: Topology) -> list[int]:
    """The nodes that the mesh has ranks on, ascending."""
    nodes = {topology.node(rank) for rank in mesh.ranks}
    return sorted(nodes)


def _notes(mesh: Mesh, panels: int, topology: Topology | None) -> Iterator[str]:
    """Lines about the meaning of colors, and about ranks that are not drawn."""
    if topology is not None:
        nodes = _list_nodes(mesh, topology)
        yield f"one color per node: {plural(nodes, 'node')}"
    sizes = [n for _, n in mesh.axes]
    slices = math.prod(sizes[:-2])
    more = slices - panels
    if more > 0:
        yield f"... and {plural(more, 'more panel')}"
    if any(n > MOST_SIDE for n in sizes[-2:]):
        yield f"... of {mesh.size:,} ranks"


def _panel(mesh: Mesh, lead: dict[str, int], look: _Look) -> Drawing:
    """The ranks with these coordinates on the leading axes."""
    axes = mesh.axes[-2:]
    names = [name for name, _ in axes]
    sizes = [n for _, n in axes]
    # A mesh of one axis is drawn as one row, a mesh without axes as one rank.
    missing = [1] * (2 - len(axes))
    shape = missing + sizes
    rows, columns = map(_choose_coordinates, shape)
    left = _measure_names(names)
    parts = list(_names(names, rows, columns, left, look.width))
    selected = mesh.select(**lead)
    ranks = selected.array().reshape(shape)
    for i, j, rank in _place_ranks(ranks, rows, columns):
        x = left + j * look.width
        y = TOP + i * HIGH
        parts += _rank(mesh, rank, x, y, look)
    width = left + len(columns) * look.width
    height = TOP + len(rows) * HIGH
    panel = Drawing(width, height, tuple(parts))
    if not lead:
        return panel
    return below([lines([_write_coords(lead)]), panel], 2)


def _place_ranks(
    ranks: Ints, rows: Sequence[int | None], columns: Sequence[int | None]
) -> Iterator[tuple[int, int, int]]:
    """Row, column and number of each rank that is drawn."""
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if row is not None and column is not None:
                yield i, j, int(ranks[row, column])


def _measure_names(names: Sequence[str]) -> float:
    """The pixels to the left of the ranks, for the names of their axes."""
    if not names:
        return 0.0
    longest = max(map(len, names))
    return (longest + 2) * LETTER + 6


def _write_coords(coords: Mapping[str, int]) -> str:
    """Coordinates as text, such as dp=0 tp=1."""
    texts = [f"{name}={i}" for name, i in coords.items()]
    return " ".join(texts)


def _names(
    names: Sequence[str],
    rows: Sequence[int | None],
    columns: Sequence[int | None],
    left: float,
    width: float,
) -> Iterator[str]:
    """The names of the two axes, and coordinates above the columns and to the left of the rows."""
    above = TOP - 6
    if names:
        yield _beside(left - 6, above, f"{names[-1]} →", "end")
        for j, column in enumerate(columns):
            x = left + (j + 0.5) * width
            text = _write_coordinate(column)
            yield _beside(x, above, text, "middle")
    if len(names) > 1:
        for i, row in enumerate(rows):
            top = TOP + i * HIGH
            y = top + HIGH / 2 + 4
            text = _write_coordinate(row)
            if row == 0:
                text = f"{names[0]} 0"
            yield _beside(left - 6, y, text, "end")


def _write_coordinate(coordinate: int | None) -> str:
    """A coordinate; dots for those that are not drawn."""
    return "…" if coordinate is None else str(coordinate)


def _beside(x: float, y: float, text: str, anchor: str) -> str:
    """A name or a coordinate next to the ranks."""
    return words(x, y, text, text_anchor=anchor, opacity="0.75")


def _choose_coordinates(size: int) -> Sequence[int | None]:
    """The coordinates that are drawn; None stands for those left out."""
    if size <= MOST_SIDE:
        return range(size)
    head = MOST_SIDE // 2
    return [*range(head), None, *range(size - head + 1, size)]


def _rank(mesh: Mesh, rank: int, x: float, y: float, look: _Look) -> Iterator[str]:
    """A rank's box and number."""
    coords = mesh.coords(rank)
    title = f"rank {rank}: {_write_coords(coords)}"
    fill, color = look.fill(rank)
    stroke = {"stroke": "currentColor", "stroke_opacity": "0.5"}
    yield box(x, y, look.width, HIGH, title, **fill, **stroke)
    centre = x + look.width / 2
    baseline = y + HIGH / 2 + 4
    middle = {"text_anchor": "middle", "pointer_events": "none"}
    yield words(centre, baseline, str(rank), fill=color, **middle)
