"""Plan pictures: a tensor before and after, and who sends how much to whom, drawn as SVG.

1. In the heat map a row is a sender and a column a receiver; the darker a box, the more bytes. Where there are many
   ranks, a row or column stands for several that follow each other.
2. With a topology, gaps part the nodes, and what crosses from node to node is orange; the rest is blue.
3. What stays on its rank is grey. Sums are over all tensors.
4. A plan of several tensors shows the layouts of the one named, or the first.
5. A program shows its own streams: what is relayed counts each time that it is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.given import plural, shown
from shardmath.flows.topology import Topology, checked
from shardmath.pictures.cells import cells_of
from shardmath.pictures.elements import (
    LETTER,
    LINE,
    Drawing,
    below,
    beside,
    box,
    document,
    lines,
    words,
)
from shardmath.pictures.layout_drawing import colours_of, draw_layout
from shardmath.pictures.palette import BLUES, ORANGES, ink, shade
from shardmath.pictures.text import nbytes
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Demands, wire
from shardmath.plans.plan import Movable, Plan
from shardmath.programs.loads import pairs
from shardmath.programs.program import Program

__all__ = ["Group", "Traffic", "plan_svg", "traffic"]

MOST_GROUPS = 24
"""Rows and columns of a heat map."""
MOST_WINDOWS = 3
SIDE = 224.0
"""Pixels of the columns of a tensor."""
FEW = 8
"""Rows and columns up to which boxes are large enough for numbers."""
STAYS = "#b0b0b0"
NODE_GAP = 6.0
TOP = 20.0
"""Pixels above the boxes, for the names of ranks."""
MANY = 2048
"""Receivers of a line that are counted by group, not one by one."""
MOST_CELLS = 256
"""Of each layout."""


class Group(NamedTuple):
    """Ranks that share a row or a column, and the node that all of them are on."""

    ranks: tuple[int, ...]
    node: int | None = None


class Traffic(NamedTuple):
    """Bytes by sender and receiver, or groups of them: int64 of shape (senders, receivers).

    `sent` goes to another rank, and `far` of that to another node; `stays` does not leave its rank.
    """

    senders: tuple[Group, ...]
    receivers: tuple[Group, ...]
    sent: Ints
    stays: Ints
    far: Ints


def traffic(
    value: Plan | Transposed | Program, topology: Topology | None = None, most: int = MOST_GROUPS
) -> Traffic:
    """What a plan, or a program, sends from where to where, ranks in at most so many groups on each side."""
    if isinstance(value, Transposed):
        back = traffic(value.forward, topology, most)
        tables = (table.T for table in (back.sent, back.stays, back.far))
        return Traffic(back.receivers, back.senders, *tables)
    p = value.plan if isinstance(value, Program) else value
    of = pairs(value) if isinstance(value, Program) else None
    # Ranks of the destination send too, where a program relays.
    relays = {p.ranks[i] for i in set(of.sender.tolist())} if of is not None else set()
    rows = _groups({*p.src_ranks, *relays}, topology, most)
    columns = _groups(p.dst_ranks, topology, most)
    sums = _Sums(rows, columns, p.lines, topology)
    if of is None:
        sums.add_plan()
    else:
        ranks = np.array(p.ranks, np.int64)
        sums.add(ranks[of.sender], ranks[of.receiver], of.nbytes)
    sums.add_stays()
    return Traffic(rows, columns, sums.sent, sums.stays, sums.far)


class _Sums:
    """Bytes by group of senders and group of receivers, while they are added up."""

    def __init__(
        self,
        rows: tuple[Group, ...],
        columns: tuple[Group, ...],
        on: Demands,
        topology: Topology | None,
    ) -> None:
        self.on = on
        self.row, self.column = _numbers(rows), _numbers(columns)
        shape = len(rows), len(columns)
        self.sent, self.stays, self.far = (np.zeros(shape, np.int64) for _ in range(3))
        # Without a topology all ranks are on one node.
        self.per_node = 1 << 24 if topology is None else topology.ranks_per_node
        self.members: dict[int, Ints] = {}

    def add(self, sender: Ints, receiver: Ints, count: Ints) -> None:
        """Bytes that go from ranks to ranks."""
        at = self.row[sender], self.column[receiver]
        crosses = sender // self.per_node != receiver // self.per_node
        np.add.at(self.sent, at, count)
        np.add.at(self.far, at, np.where(crosses, count, 0))

    def add_plan(self) -> None:
        """All that a plan sends."""
        for line, held in enumerate(self.on.holders.tolist()):
            holders = self.on.sets[held]
            blocks = range(int(self.on.first[line]), int(self.on.first[line + 1]))
            asking = int(self.on.count[blocks.start : blocks.stop].sum())
            if len(holders) == 1 and asking > MANY:
                for block in blocks:
                    self._add_from_one(holders[0], block)
            else:
                self.add(*_of_line(self.on, line, blocks))

    def _add_from_one(self, holder: int, block: int) -> None:
        """A block that one rank sends to all receivers. Their number may be large, and there are many such blocks."""
        receivers, columns = self._set(int(self.on.receivers[block])), len(self.sent[0])
        counts = np.bincount(self.column[receivers], minlength=columns)
        first = holder // self.per_node * self.per_node
        # Ranks ascend, so those of the holder's node are side by side.
        begin, end = receivers.searchsorted([first, first + self.per_node])
        near = np.bincount(self.column[receivers[begin:end]], minlength=columns)
        itself = receivers[begin:end] == holder
        own = np.bincount(self.column[receivers[begin:end][itself]], minlength=columns)
        nbytes = int(self.on.nbytes[block])
        self.sent[self.row[holder]] += nbytes * (counts - own)
        self.far[self.row[holder]] += nbytes * (counts - near)

    def add_stays(self) -> None:
        """What ranks have and need: blocks of which they are a holder and a receiver."""
        line = np.repeat(np.arange(len(self.on.holders)), np.diff(self.on.first))
        for block, held in enumerate(self.on.holders[line].tolist()):
            number = int(self.on.receivers[block])
            if self.on.count[block] == len(self.on.sets[number]):
                continue  # no receiver is a holder
            receivers, holders = self._set(number), self._set(held)
            at = np.minimum(receivers.searchsorted(holders), len(receivers) - 1)
            both = holders[receivers[at] == holders]
            np.add.at(self.stays, (self.row[both], self.column[both]), self.on.nbytes[block])

    def _set(self, number: int) -> Ints:
        """A set of ranks as an array."""
        if number not in self.members:
            self.members[number] = np.array(self.on.sets[number], np.int64)
        return self.members[number]


def _of_line(on: Demands, line: int, blocks: range) -> tuple[Ints, Ints, Ints]:
    """Senders, receivers and bytes of a line, along which both have stretches one after the other."""
    holders = np.array(on.sets[on.holders[line]], np.int64)
    first = int(on.cut_first[line])
    cuts = on.cuts[first : first + len(holders) + 1]
    asking = [wire(on, line, block) for block in blocks]
    receivers = np.array(list(itertools.chain.from_iterable(asking)), np.int64)
    sizes = np.repeat(on.nbytes[blocks.start : blocks.stop], list(map(len, asking)))
    ends = np.append(0, sizes.cumsum())
    # Between two neighbouring borders of either kind there is one sender and one receiver. Of several stretches that
    # begin at one place all but the last are empty.
    borders = np.unique(np.concatenate((cuts, ends)))
    sender = cuts.searchsorted(borders[:-1], "right") - 1
    receiver = ends.searchsorted(borders[:-1], "right") - 1
    return holders[sender], receivers[receiver], np.diff(borders)


def _groups(ranks: Iterable[int], where: Topology | None, most: int) -> tuple[Group, ...]:
    """The ranks, ascending, in at most so many groups: of one node where there are few nodes, else of whole nodes."""
    nodes = [sorted(ranks)] if where is None else list(map(list, where.nodes(ranks).values()))
    if len(nodes) > most:
        each = -(-len(nodes) // most)
        several = [nodes[i : i + each] for i in range(0, len(nodes), each)]
        return tuple(_group(list(itertools.chain.from_iterable(x)), where) for x in several)
    size = 1
    while sum(-(-len(node) // size) for node in nodes) > most:
        size += 1
    parts = [node[i : i + size] for node in nodes for i in range(0, len(node), size)]
    return tuple(_group(part, where) for part in parts)


def _group(ranks: Sequence[int], where: Topology | None) -> Group:
    """These ranks as a row or a column."""
    nodes = set() if where is None else {where.node(ranks[0]), where.node(ranks[-1])}
    return Group(tuple(ranks), nodes.pop() if len(nodes) == 1 else None)


def _numbers(groups: Sequence[Group]) -> Ints:
    """The number of each rank's group, by rank."""
    most = max((group.ranks[-1] for group in groups), default=-1)
    out = np.zeros(most + 1, np.int64)
    for i, group in enumerate(groups):
        out[list(group.ranks)] = i
    return out


def plan_svg(
    value: Plan | Transposed | Program,
    *,
    topology: Topology | None = None,
    tensor: str | None = None,
    inline: bool = False,
) -> str:
    """A plan or a program as SVG: a document, or an element of a page if `inline`.

    `topology` marks nodes (default: the value's own), `tensor` is the one whose layouts are drawn. Raises PlanError for
    what is not a topology, and for a tensor that the plan does not have.
    """
    where = value.topology if topology is None else checked(topology)
    name = _name(value, tensor)
    moved = traffic(value, where)
    summary = _summary(moved, where)
    heat = below([_heat_map(moved, where), lines(summary)], 4)
    tensors = plural(value.src, "tensor")
    title = f"plan of {tensors}, {len(value.src_ranks)} to {plural(value.dst_ranks, 'rank')}"
    drawing = beside([*_sides(value, name), heat], 28)
    return document(drawing, title, "; ".join(summary), inline=inline)


def _name(p: Movable, tensor: str | None) -> str:
    """The tensor whose layouts are drawn."""
    if tensor is None:
        return next(iter(p.src), "")
    if tensor not in p.src:
        names = ", ".join(map(repr, list(p.src)[:8]))
        raise PlanError(f"the plan has no tensor {shown(tensor)}; it has {names}")
    return tensor


def _sides(p: Movable, name: str) -> list[Drawing]:
    """The tensor before and after; one set of holders has one colour in all."""
    if name not in p.src:
        return []
    before, after = p.src[name][:MOST_WINDOWS], p.dst[name][:MOST_WINDOWS]
    cells = {layout: cells_of(layout, MOST_CELLS) for layout in (*before, *after)}
    colours = colours_of(cells.values())
    sides = []
    for what, layouts, count in (
        ("before", before, len(p.src[name])),
        ("after", after, len(p.dst[name])),
    ):
        head = [f"{what}: {name}" if name else what]
        drawn = [draw_layout(layout, cells[layout], colours, SIDE) for layout in layouts]
        more = [lines([f"... and {plural(count - len(drawn), 'more window')}"])]
        parts = [lines(head, font_weight="bold"), *drawn, *(more if count > len(drawn) else [])]
        sides.append(below(parts, 6))
    return sides


def _summary(moved: Traffic, where: Topology | None) -> list[str]:
    """The sums of the heat map."""
    sent, stays, far = (int(table.sum()) for table in (moved.sent, moved.stays, moved.far))
    texts = [f"{nbytes(sent)} between ranks, {nbytes(stays)} stays where it is"]
    if where is not None:
        texts.append(f"{nbytes(far)} of {nbytes(sent)} crosses from node to node")
    return texts


class _Axis(NamedTuple):
    """The rows or the columns of a heat map: where each begins, how large all are, how much room all take."""

    groups: tuple[Group, ...]
    at: tuple[float, ...]
    each: float
    total: float


def _axis(groups: tuple[Group, ...], each: float) -> _Axis:
    """Rows or columns one after the other, with a gap between nodes."""
    at, x = [], 0.0
    for i, group in enumerate(groups):
        if i and group.node != groups[i - 1].node:
            x += NODE_GAP
        at.append(x)
        x += each
    return _Axis(groups, tuple(at), each, x)


def _heat_map(moved: Traffic, where: Topology | None) -> Drawing:
    """Who sends how much to whom."""
    few = max(moved.sent.shape) <= FEW
    rows = _axis(moved.senders, 24.0 if few else 18.0)
    columns = _axis(moved.receivers, 54.0 if few else 18.0)
    names = [_group_name(group) for group in moved.senders]
    left = (max(map(len, names), default=0) + 1) * LETTER + (52 if where else 0)
    top = TOP + _column_names_height(columns) + (LINE if where else 0)
    parts = [*_row_names(rows, left, top), *_column_names(columns, left, top)]
    parts += _boxes(moved, rows, columns, left, top)
    legend = _legend(int(moved.sent.max(initial=0)), where)
    heat = Drawing(left + columns.total, top + rows.total, tuple(parts))
    head = lines(["bytes from sender (row) to receiver (column)"], font_weight="bold")
    return below([head, heat, legend], 8)


def _group_name(group: Group) -> str:
    """The ranks of a row or a column."""
    if len(group.ranks) == 1:
        return str(group.ranks[0])
    return f"{group.ranks[0]}-{group.ranks[-1]}"


def _column_names_height(columns: _Axis) -> float:
    """Names that are wider than their column stand upright."""
    longest = max((len(_group_name(group)) for group in columns.groups), default=0)
    return 0.0 if (longest + 1) * LETTER <= columns.each else (longest - 2) * LETTER


def _row_names(rows: _Axis, left: float, top: float) -> Iterator[str]:
    """The senders, and their nodes."""
    yield words(left - 6, top - 6, "rank", text_anchor="end", opacity="0.75")
    for group, at in zip(rows.groups, rows.at, strict=True):
        y = top + at + rows.each / 2 + 4
        yield words(left - 6, y, _group_name(group), text_anchor="end")
    for node, begin, _ in _node_spans(rows):
        yield words(0, top + begin + rows.each / 2 + 4, f"node {node}", opacity="0.75")


def _column_names(columns: _Axis, left: float, top: float) -> Iterator[str]:
    """The receivers, upright where they are too many, and their nodes."""
    upright = _column_names_height(columns) > 0
    for group, at in zip(columns.groups, columns.at, strict=True):
        x, name = left + at + columns.each / 2, _group_name(group)
        if upright:
            turned = f"rotate(-90 {x + 4:.6g} {top - 6:.6g})"
            yield words(x + 4, top - 6, name, transform=turned)
        else:
            yield words(x, top - 6, name, text_anchor="middle")
    for node, begin, end in _node_spans(columns):
        text = f"node {node}"
        shown = text if len(text) * LETTER <= end - begin else f"{node}"
        yield words(left + begin, 12, shown, opacity="0.75")


def _node_spans(axis: _Axis) -> Iterator[tuple[int, float, float]]:
    """Each node that has rows or columns of its own, where it begins and where it ends."""
    numbered = itertools.groupby(range(len(axis.groups)), lambda i: axis.groups[i].node)
    for node, several in numbered:
        places = list(several)
        if node is not None:
            yield node, axis.at[places[0]], axis.at[places[-1]] + axis.each


def _boxes(moved: Traffic, rows: _Axis, columns: _Axis, left: float, top: float) -> Iterator[str]:
    """A box for each pair of groups; one without bytes is only an edge."""
    largest = int(moved.sent.max(initial=0))
    for i, j in np.ndindex(moved.sent.shape):
        sent, stays, far = (int(table[i, j]) for table in (moved.sent, moved.stays, moved.far))
        x, y = left + columns.at[j], top + rows.at[i]
        names = f"{_group_name(moved.senders[i])} to {_group_name(moved.receivers[j])}"
        title = f"{names}: {_amount(sent, stays, far)}"
        fill = _fill(sent, stays, far, largest)
        edge = {"stroke": "currentColor", "stroke_opacity": "0.3"}
        yield box(x, y, columns.each, rows.each, title, fill=fill, **edge)
        if columns.each > 3 * LINE and sent + stays:
            text = _few_digits(sent or stays)
            middle, baseline = x + columns.each / 2, y + rows.each / 2 + 4
            attributes = {"text_anchor": "middle", "pointer_events": "none", "fill": ink(fill)}
            yield words(middle, baseline, text, **attributes)


def _few_digits(count: int) -> str:
    """A number of bytes that fits into a box."""
    digits, unit = nbytes(count).split()
    return f"{float(digits):.3g} {unit}" if float(digits) < 999.5 else nbytes(count)


def _amount(sent: int, stays: int, far: int) -> str:
    """What goes from one to the other, in words."""
    texts = [f"{stays:,} B stay"] if stays else []
    if sent or not stays:
        texts.append(f"{sent:,} B")
    if far:
        texts.append("from node to node" if far == sent else f"{far:,} B from node to node")
    return ", ".join(texts)


def _fill(sent: int, stays: int, far: int, largest: int) -> str:
    """The colour of a pair: that of most of its bytes."""
    if sent:
        return shade(sent / largest, crossing=2 * far > sent)
    return STAYS if stays else "none"


def _legend(largest: int, where: Topology | None) -> Drawing:
    """What the shades mean."""
    most = f", up to {nbytes(largest)}"
    entries = [("stays", (STAYS,)), (("sent" if where is None else "inside a node") + most, BLUES)]
    if where is not None:
        entries.append((f"from node to node{most}", ORANGES))
    drawn = []
    for text, shades in entries:
        boxes = [box(i * 12, 3, 12, 12, fill=fill) for i, fill in enumerate(shades)]
        width = len(shades) * 12 + 6
        parts = (*boxes, words(width, LINE * 0.75, text))
        drawn.append(Drawing(width + len(text) * LETTER, LINE, parts))
    return below([beside(drawn[:2], 12), *drawn[2:]], 0)
