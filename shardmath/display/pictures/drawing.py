"""Drawing: any value as a picture, for files and for notebooks; a layout as a grid of ranks.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> print(svg(Mesh(tp=2)).splitlines()[1])
<title>Mesh(tp=2)</title>
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TypeAlias

import numpy as np

from shardmath.base.arguments import as_integer, instance
from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import LayoutError, ShardError
from shardmath.base.text import plural, shown
from shardmath.display.pictures.certificate_drawing import certificate_svg
from shardmath.display.pictures.layout_drawing import layout_svg
from shardmath.display.pictures.mesh_drawing import mesh_svg
from shardmath.display.pictures.plan_drawing import plan_svg
from shardmath.display.pictures.program_drawing import program_svg
from shardmath.display.pictures.stored_drawing import stored_svg
from shardmath.display.pictures.text import show
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.models.recordings.sides import BoundRecorded
from shardmath.models.refits.plain import PlainSide
from shardmath.models.refits.refit import Refit
from shardmath.models.storage.binding import Bound
from shardmath.models.storage.stored import KnownSide
from shardmath.plans.adjoint import Transposed
from shardmath.plans.flows.certificate import Certificate
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program

__all__ = ["Drawn", "grid", "html", "svg"]

Drawn: TypeAlias = Mesh | Layout | Plan | Transposed | Program | Certificate
"""The values that draw themselves in notebooks."""

BOUND_SIDES = Bound | BoundRecorded | PlainSide
"""The classes of sides whose stored tensors are known."""


def svg(
    value: Drawn | Refit | KnownSide,
    *,
    topology: Topology | None = None,
    tensor: str | None = None,
    rank: int | None = None,
    engine: str | None = None,
    inline: bool = False,
) -> str:
    """Return the SVG of a mesh, layout, plan, program, certificate, refit or bound side: a document, or an element for
    a web page if `inline`. `topology` gives the nodes to mark; `tensor` names the one tensor of a plan whose layouts
    are drawn, or the stored tensor, of `rank` (and `engine`), that is drawn of a refit or side.

    A layout has no nodes, and a program only those for which it was scheduled. A program is drawn as its rounds; if
    `tensor` is given, as the layouts of that tensor and the bytes between ranks. Raises ShardError for values of other
    types.
    """
    if isinstance(value, Refit | BOUND_SIDES):
        return stored_svg(value, tensor=tensor, rank=rank, engine=engine, inline=inline)
    where = None if topology is None else checked(topology)
    if isinstance(value, Layout):
        return layout_svg(value, inline=inline)
    if isinstance(value, Mesh):
        return mesh_svg(value, topology=where, inline=inline)
    if isinstance(value, Certificate):
        return certificate_svg(value, inline=inline)
    if isinstance(value, Program) and tensor is None:
        return program_svg(value, topology=where, inline=inline)
    if isinstance(value, Plan | Transposed | Program):
        return plan_svg(value, topology=where, tensor=tensor, inline=inline)
    raise ShardError(
        f"{shown(value)} has no picture; draw a Mesh, a Layout, a Plan, a Program, a Certificate or a Refit, or show "
        f"it as text"
    )


def html(value: object) -> str:
    """The HTML with which a notebook shows `value`: its picture, or its text if it has no picture.

    Raises ShardError for anything but an object that `show` accepts.
    """
    if isinstance(value, Drawn):
        return svg(value, inline=True)
    return f"<pre>{escape(show(value))}</pre>"


def grid(layout: Layout, most: int = 64) -> str:
    """Return a text grid, of at most `most` rows and columns, with the rank that holds each element of a 1-d or 2-d
    tensor; `.` for none, `+` for several.

    If there are more than `most` rows or columns, the middle ones are left out, and a line says so. Raises LayoutError
    for other numbers of dimensions, and for anything but a layout.

    >>> from shardmath.layouts.algebra.mesh import Mesh
    >>> print(grid(Layout((3, 4), Mesh(tp=2), "n (2 tp h)")))
    0 1 0 1
    0 1 0 1
    0 1 0 1
    >>> print(grid(Layout((100,), Mesh(tp=2), "(tp n)"), most=4))
    0 0 … 1 1
    columns 2 to 97 are left out
    """
    fix = "pass grid() a layout; of a plan, one of its sides, such as plan.src['w'][0]"
    instance(layout, Layout, fix, LayoutError)
    if layout.ndim not in (1, 2):
        what = f"{layout} has {plural(layout.ndim, 'dimension')}"
        raise LayoutError(f"{what}; pass grid() a layout of 1 or 2 dimensions")
    room = as_integer(most, "most", LayoutError)
    if not 2 <= room <= MOST_SIDE:
        what = f"most={room} rows and columns cannot be drawn"
        raise LayoutError(f"{what}; pass a number from 2 to {MOST_SIDE}")
    rows = np.zeros(1, np.int64)
    if layout.ndim == 2:
        rows = _choose_positions(layout.shape[0], room)
    columns = _choose_positions(layout.shape[-1], room)
    cells = _name_cells(layout, rows, columns)
    notes = _mark_gaps(cells, rows, columns)
    return "\n".join([*_align_right(cells), *notes])


def _mark_gaps(cells: list[list[str]], rows: Ints, columns: Ints) -> list[str]:
    """Insert dots for rows and columns that are left out; return lines that name these."""
    notes = []
    row_gap = _find_gap(rows)
    if row_gap:
        notes.append(_name_gap("rows", rows, row_gap))
        cells.insert(row_gap, ["…"] * len(columns))
    column_gap = _find_gap(columns)
    if column_gap:
        notes.append(_name_gap("columns", columns, column_gap))
        for line in cells:
            line.insert(column_gap, "…")
    return notes


def _align_right(cells: list[list[str]]) -> Iterator[str]:
    """The rows as lines, with all cells as wide as the widest."""
    width = max((len(cell) for row in cells for cell in row), default=1)
    for row in cells:
        yield " ".join(cell.rjust(width) for cell in row)


def _name_gap(what: str, positions: Ints, gap: int) -> str:
    """A line that names the positions left out before index `gap`."""
    first = positions[gap - 1] + 1
    last = positions[gap] - 1
    return f"{what} {first} to {last} are left out"


MOST_SIDE = 1 << 12
"""The largest value of `most`."""


def _choose_positions(size: int, most: int) -> Ints:
    """The positions of a dimension that are drawn: at most `most`, the first and the last ones."""
    if size <= most:
        return np.arange(size)
    tail = most // 2
    first = np.arange(most - tail)
    last = np.arange(size - tail, size)
    return np.concatenate((first, last))


def _find_gap(positions: Ints) -> int:
    """The index of the position before which others are left out; 0 if none are."""
    steps = np.diff(positions)
    if not (steps > 1).any():
        return 0
    return int(steps.argmax()) + 1


def _name_cells(layout: Layout, rows: Ints, columns: Ints) -> list[list[str]]:
    """The rank that holds each element at these rows and columns, `.` for no rank, `+` for several."""
    ranks = np.array(layout.mesh.ranks, np.int64)
    holds_column = _mark_held(layout.dims[-1], layout.mesh, columns)
    holds_row = np.ones((1, len(ranks)), np.int64)
    if layout.ndim == 2:
        holds_row = _mark_held(layout.dims[0], layout.mesh, rows)
    # A sum over ranks of (holds the row) * (holds the column) counts the holders. If there is one, the sum weighted by
    # rank is its rank.
    holders = holds_row @ holds_column.T
    weighted = (holds_row * ranks) @ holds_column.T
    cells = weighted.astype(str)
    cells[holders == 0] = "."
    cells[holders > 1] = "+"
    lines: list[list[str]] = cells.tolist()
    return lines


def _mark_held(dim: Dimension, mesh: Mesh, positions: Ints) -> Ints:
    """Whether each rank holds each of the positions: 0 or 1, of shape (positions, ranks)."""
    divided = partition(dim)
    shape = len(positions), len(divided.parts)
    held = np.zeros(shape, np.int64)
    for i, part in enumerate(divided.parts):
        held[:, i] = _find_held(part, positions)
    by_rank = divided.by_rank(mesh)
    return held[:, by_rank]


def _find_held(part: Runs, positions: Ints) -> Bools:
    """Whether the part contains each of the positions."""
    segments = np.array(part.segments, np.int64).reshape(-1, 3)
    order = segments[:, 1].argsort()
    _, start, size = segments[order].T
    stop = start + size
    # Only the last segment that begins at or before a position can contain it.
    segment = start.searchsorted(positions, "right") - 1
    # A stop for index -1, so that a part without segments can be indexed, too.
    stops = np.append(stop, 0)
    is_held: Bools = (segment >= 0) & (positions < stops[segment])
    return is_held
