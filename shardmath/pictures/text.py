"""Show: values as text for people; strings only. A notebook shows the picture of a value that has one.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> print(show(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")))
float32[9, 4] (tp dp n) h on dp=4 tp=2
rank  dp tp  local shape  dimension 0  dimension 1
   0   0  0       (2, 4)        [0:2]        [0:4]
   1   0  1       (1, 4)        [5:6]        [0:4]
   2   1  0       (2, 4)        [2:4]        [0:4]
   3   1  1       (1, 4)        [6:7]        [0:4]
   4   2  0       (1, 4)        [4:5]        [0:4]
   5   2  1       (1, 4)        [7:8]        [0:4]
   6   3  0       (0, 4)           []        [0:4]
   7   3  1       (1, 4)        [8:9]        [0:4]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import singledispatch

import numpy as np

from shardmath.algebra.dimension import Dimension
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs
from shardmath.base.arguments import as_integer
from shardmath.base.arrays import Ints
from shardmath.base.drawn import html
from shardmath.base.errors import LayoutError, PlanError
from shardmath.base.text import make_table, plural, show_bytes, shown
from shardmath.collectives.collective import Collective
from shardmath.flows.certificate import Certificate
from shardmath.flows.topology import Topology
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.program import Program
from shardmath.relabelling.relabelling import Relabelling

__all__ = ["Shown", "count", "count_more", "grid", "show"]


def count(number: int, what: str) -> str:
    """How many.

    >>> count(1, "bucket"), count(5059, "bucket")
    ('1 bucket', '5,059 buckets')
    """
    plural = "" if number == 1 else "s"
    return f"{number:,} {what}{plural}"


def count_more(number: int, most: int, what: str) -> list[str]:
    """A line that counts what is not shown, if there is any."""
    if number <= most:
        return []
    more = count(number - most, f"more {what}")
    return [f"... and {more}"]


LEGEND = "sender -> receiver operation [box of the tensor] of [box at the sender] to [box at the receiver], bytes"
"""What stands where in a transfer's line."""

MOST = 1 << 24
"""Lines; more than anybody reads."""


class Shown(str):
    """The text of `value`. Its repr is the text itself, and a notebook shows the value's picture, if it has one."""

    value: object

    def __new__(cls, text: str, value: object = None) -> Shown:
        made = super().__new__(cls, text)
        made.value = value
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html(self.value)


def show(value: object, most: int = 32) -> Shown:
    """Any value of shardmath as text: a layout as what each rank holds, a plan as what each rank sends and receives.

    At most `most` ranks, and of a plan as many transfers, are listed. A notebook shows meshes, layouts, plans and
    programs as pictures. Raises ShardError for what is not a value of shardmath.
    """
    room = as_integer(most, "most", PlanError)
    if not 0 <= room <= MOST:
        raise PlanError(f"most={room}; show at least 0 and at most {MOST} ranks and transfers")
    return Shown(_text(value, room), value)


@singledispatch
def _text(value: object, most: int) -> str:
    """The text of a value, which lists at most so many of its parts."""
    raise PlanError(f"{shown(value)} is not a value of shardmath; show takes a Layout or a Plan")


def _more(number: int, most: int, what: str) -> str:
    """A line that counts what is not listed."""
    if number <= most:
        return ""
    return f"\n... and {plural(number - most, f'more {what}')}"


@_text.register
def _(mesh: Mesh, most: int) -> str:
    axes = " ".join(f"{name}={n}" for name, n in mesh.axes) or "one rank"
    rows = [[rank, *mesh.coords(rank).values()] for rank in mesh.ranks[:most]]
    return f"{axes}\n{make_table(['rank', *mesh.shape], rows)}{_more(mesh.size, most, 'rank')}"


@_text.register
def _(layout: Layout, most: int) -> str:
    axes = " ".join(layout.mesh.shape)
    dimensions = [f"dimension {d}" for d in range(layout.ndim)]
    head = ["rank", axes, "local shape", *dimensions]
    rows: list[list[object]] = []
    for rank in layout.mesh.ranks[:most]:
        coords = _write_coords(layout.mesh, rank)
        rows.append([rank, coords, layout.local_shape(rank), *layout.runs(rank)])
    if not axes:
        # A mesh of one rank has no coordinates to show.
        del head[1]
        for row in rows:
            del row[1]
    return f"{layout}\n{make_table(head, rows)}{_more(layout.mesh.size, most, 'rank')}"


def _write_coords(mesh: Mesh, rank: int) -> str:
    """The coordinates of a rank, each below the end of its axis's name."""
    coords = mesh.coords(rank).items()
    texts = [str(x).rjust(len(name)) for name, x in coords]
    return " ".join(texts)


@_text.register
def _(p: Plan | Transposed, most: int) -> str:
    sent, received = p.sent_bytes(), p.received_bytes()
    rows = [[rank, show_bytes(sent[rank]), show_bytes(received[rank])] for rank in p.ranks[:most]]
    loads = make_table(["rank", "sends", "receives"], rows)
    tensors = plural(p.src, "tensor")
    if p.in_part:
        tensors += f", {len(p.in_part)} of which the destination holds in part"
    between = f"{len(p.src_ranks)} and {len(p.dst_ranks)} ranks"
    total = f"{show_bytes(sum(sent.values()))} between {between}, {tensors}"
    return f"{total}\n{loads}{_more(len(p.ranks), most, 'rank')}\n{_transfers(p, most)}"


def _transfers(p: Plan | Transposed, most: int) -> str:
    """The first transfers, below a line that says what stands where."""
    listed = list(itertools.islice(p.transfers(), most + 1))
    if not listed:
        return ""
    texts = [LEGEND, *map(str, listed[:most])]
    if len(listed) > most:
        texts.append("...")
    return "\n".join(texts)


@_text.register
def _(program: Program, most: int) -> str:
    rounds = f"{plural(program.slots, 'slot')} of {plural(program.turns, 'turn')}"
    room = f"at most {show_bytes(program.max_inflight_bytes)} under way per rank"
    between = f"{len(program.plan.src_ranks)} and {len(program.plan.dst_ranks)} ranks"
    head = f"{plural(program.plan.src, 'tensor')} between {between}: {rounds}, {room}"
    rows = [_program_row(program, rank) for rank in program.ranks[:most]]
    loads = make_table(["rank", "rounds", "messages", "sends", "receives"], rows)
    operations = sorted({str(one) for one in program.collectives.values()})
    found = "".join(f"\nas one operation: {one}" for one in operations[:most])
    return f"{head}\n{loads}{_more(len(program.ranks), most, 'rank')}{found}"


def _program_row(program: Program, rank: int) -> list[object]:
    """What one rank does: rounds, messages, bytes sent and received."""
    rounds = program.for_rank(rank)
    count = sent = received = 0
    for one in rounds:
        count += len(one.messages)
        sent += sum(message.nbytes for message in one.sends)
        received += sum(message.nbytes for message in one.receives)
    return [rank, len(rounds), count, show_bytes(sent), show_bytes(received)]


@_text.register
def _(topology: Topology, most: int) -> str:
    node = f"nodes of {plural(topology.ranks_per_node, 'rank')}"
    inside = f"{show_bytes(topology.intra_bytes_per_s)}/s inside a node"
    between = f"{show_bytes(topology.inter_bytes_per_s)}/s to other nodes"
    latency = f"{_seconds(topology.latency_s)} per message"
    return f"{node}; per rank and direction {inside}, {between}; {latency}"


def _seconds(s: float) -> str:
    """A time as people read it."""
    if s >= 1:
        return f"{s:.4g} s"
    return f"{s * 1e3:.4g} ms" if s >= 1e-3 else f"{s * 1e6:.4g} us"


@_text.register
def _(certificate: Certificate, most: int) -> str:
    witness = certificate.witness
    rows: list[list[object]] = [["plan", _seconds(certificate.plan_s)]]
    rows.append(["bound", _seconds(certificate.bound_s)])
    rows.append(["ratio", f"{certificate.ratio:.4g}"])
    if witness is not None:
        way = "must take in" if witness.direction == "in" else "must give out"
        ranks = ", ".join(map(str, witness.ranks[:most]))
        if len(witness.ranks) > most:
            ranks += ", ..."
        rows.append([way, f"{show_bytes(witness.nbytes)} at {show_bytes(witness.bytes_per_s)}/s"])
        rows.append(["ranks", ranks])
    width = max(len(str(name)) for name, _ in rows)
    listed = "\n".join(f"{str(name).rjust(width)}  {what}" for name, what in rows)
    return f"{certificate}\n{listed}"


@_text.register
def _(runs: Runs, most: int) -> str:
    holes = len(runs) - runs.size
    head = f"{plural(runs.size, 'position')} of a dimension, {plural(holes, 'hole')}"
    rows = [[f"{lo}:{lo + n}", f"{g}:{g + n}"] for lo, g, n in runs.segments[:most]]
    listed = make_table(["local", "global"], rows)
    return f"{head}\n{listed}{_more(len(runs.segments), most, 'range')}"


@_text.register
def _(relabelling: Relabelling, most: int) -> str:
    changed = [pair for pair in relabelling.pairs if pair[0] != pair[1]]
    listed = make_table(["rank", "becomes"], changed[:most])
    return f"{relabelling}\n{listed}{_more(len(changed), most, 'rank')}"


@_text.register
def _(collective: Collective, most: int) -> str:
    listed = [f"group of ranks {_members(group)}" for group in collective.groups[:most]]
    more = _more(len(collective.groups), most, "group")
    return "\n".join([str(collective), *listed]) + more


def _members(ranks: Sequence[int]) -> str:
    """The first ranks of a group."""
    texts = [str(rank) for rank in ranks[:MOST_MEMBERS]]
    if len(ranks) > MOST_MEMBERS:
        texts.append("...")
    return ", ".join(texts)


MOST_MEMBERS = 16
"""Ranks of a group that are listed."""


def grid(layout: Layout, most: int = 64) -> str:
    """Which ranks hold each element of a 1-d or 2-d tensor, as a grid; `.` where nobody does, `+` where more than one.

    Of more than `most` rows or columns the middle ones are left out, and a line says so. Raises LayoutError for more
    dimensions.

    >>> from shardmath.algebra.mesh import Mesh
    >>> print(grid(Layout((3, 4), Mesh(tp=2), "n (2 tp h)")))
    0 1 0 1
    0 1 0 1
    0 1 0 1
    >>> print(grid(Layout((100,), Mesh(tp=2), "(tp n)"), most=4))
    0 0 … 1 1
    columns 2 to 97 are left out
    """
    if layout.ndim not in (1, 2):
        raise LayoutError(f"{layout} has {layout.ndim} dimensions; grid() draws 1 or 2")
    room = as_integer(most, "most", LayoutError)
    if not 2 <= room <= MOST_SIDE:
        raise LayoutError(f"most={room}; draw at least 2 and at most {MOST_SIDE} rows and columns")
    rows = np.zeros(1, np.int64)
    if layout.ndim == 2:
        rows = _choose_positions(layout.shape[0], room)
    columns = _choose_positions(layout.shape[-1], room)
    cells = _name_cells(layout, rows, columns)
    notes = []
    gap = _find_gap(rows)
    if gap:
        notes.append(_name_gap("rows", rows, gap))
        cells.insert(gap, ["…"] * len(columns))
    across = _find_gap(columns)
    if across:
        notes.append(_name_gap("columns", columns, across))
        for line in cells:
            line.insert(across, "…")
    return "\n".join([*_align_right(cells), *notes])


def _align_right(cells: list[list[str]]) -> Iterator[str]:
    """The rows, all cells as wide as the widest."""
    width = max((len(x) for line in cells for x in line), default=1)
    for line in cells:
        yield " ".join(x.rjust(width) for x in line)


def _name_gap(what: str, positions: Ints, gap: int) -> str:
    """Which positions are left out before the one numbered `gap`."""
    return f"{what} {positions[gap - 1] + 1} to {positions[gap] - 1} are left out"


MOST_SIDE = 1 << 12
"""Rows and columns of a grid."""


def _choose_positions(size: int, most: int) -> Ints:
    """The positions of a dimension that are drawn: at most so many, the first and the last."""
    if size <= most:
        return np.arange(size)
    tail = most // 2
    return np.concatenate((np.arange(most - tail), np.arange(size - tail, size)))


def _find_gap(positions: Ints) -> int:
    """Before which of the positions something is left out; 0 for nothing."""
    steps = np.diff(positions)
    if not (steps > 1).any():
        return 0
    return int(steps.argmax()) + 1


def _name_cells(layout: Layout, rows: Ints, columns: Ints) -> list[list[str]]:
    """The rank that holds each element at these rows and columns, `.` for nobody, `+` for several."""
    ranks = np.array(layout.mesh.ranks, np.int64)
    across = _mark_held(layout.dims[-1], layout.mesh, columns)
    down = np.ones((1, len(ranks)), np.int64)
    if layout.ndim == 2:
        down = _mark_held(layout.dims[0], layout.mesh, rows)
    # A sum over ranks of (holds the row) * (holds the column) counts the holders; where there is
    # one, the sum weighted by rank is that rank.
    holders = down @ across.T
    weighted = (down * ranks) @ across.T
    cells = weighted.astype(str)
    cells[holders == 0] = "."
    cells[holders > 1] = "+"
    lines: list[list[str]] = cells.tolist()
    return lines


def _mark_held(dim: Dimension, mesh: Mesh, positions: Ints) -> Ints:
    """Whether each rank holds each of the positions: 0 or 1, of shape (positions, ranks)."""
    parts = partition(dim)
    held = np.zeros((len(positions), len(parts.parts)), np.int64)
    for i, part in enumerate(parts.parts):
        segments = np.array(part.segments, np.int64).reshape(-1, 3)
        _, start, size = segments[segments[:, 1].argsort()].T
        stop = start + size
        # The last segment that begins at or before a position is the one that may have it.
        at = start.searchsorted(positions, "right") - 1
        held[:, i] = (at >= 0) & (positions < np.append(stop, 0)[at])
    return held[:, parts.by_rank(mesh)]
