"""Plan pictures: a tensor before and after, and a heat map of bytes between ranks, drawn as SVG.

1. In the heat map a row is a sender and a column a receiver; the darker a box, the more bytes. If there are many ranks,
   a row or column stands for several consecutive ones.
2. With a topology, gaps separate the nodes, and bytes that cross from node to node are orange; others are blue.
3. Bytes that stay on their rank are gray. Sums are over all tensors.
4. A plan of several tensors shows the layouts of the tensor named, or of the first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.errors import PlanError
from shardmath.base.text import plural, show_bytes, shown
from shardmath.display.pictures.cells import Panels, cells_of
from shardmath.display.pictures.elements import (
    BLUES,
    LETTER,
    LINE,
    ORANGES,
    Drawing,
    below,
    beside,
    box,
    document,
    draw_entry,
    few_digits,
    ink,
    lines,
    name_ranks,
    shade,
    words,
)
from shardmath.display.pictures.layout_drawing import Colors, colors_of, draw_layout
from shardmath.display.pictures.traffic import RankGroup, TrafficMatrix, traffic
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.plan import Movable, Plan
from shardmath.plans.programs.program import Program

__all__ = ["plan_svg"]

MOST_WINDOWS = 3
SIDE = 224.0
"""Pixels of the columns of a tensor."""
FEW = 8
"""Rows and columns up to which boxes have room for numbers."""
STAYS = "#b0b0b0"
NODE_GAP = 6.0
NODE_NAME = 52
"""Pixels of a node's name."""
TOP = 20.0
"""Pixels above the boxes, for the names of ranks."""
MOST_NAME = 40
"""Letters per line of a tensor's name, even if its pictures are narrower."""
MOST_CELLS = 256
"""Cells that are drawn of each layout."""


def plan_svg(
    value: Plan | Transposed | Program,
    *,
    topology: Topology | None = None,
    tensor: str | None = None,
    inline: bool = False,
) -> str:
    """Return a picture of a plan or program, with the layouts of `tensor` and the nodes of `topology`, as SVG: a
    document, or an element for a web page if `inline`.

    By default the topology is the value's. Raises PlanError for anything but a topology, and for a tensor that the plan
    does not have.
    """
    where = _find_nodes(value) if topology is None else checked(topology)
    name = _choose_tensor(value, tensor)
    moved = traffic(value, where)
    summary = [*_describe(moved, where), *_describe_groups(moved)]
    heat = _draw_heat(moved, where)
    heat_and_text = below([heat, lines(summary)], 4)
    sides = _draw_sides(value, name)
    drawing = beside([sides, heat_and_text], 28) if sides.width else heat_and_text
    tensors = plural(value.src, "tensor")
    senders = len(value.src_ranks)
    receivers = plural(value.dst_ranks, "rank")
    title = f"plan of {tensors}, {senders} to {receivers}"
    return document(drawing, title, "; ".join(summary), inline=inline)


def _choose_tensor(plan: Movable, tensor: str | None) -> str:
    """The tensor whose layouts are drawn."""
    if tensor is None:
        return next(iter(plan.src), "")
    if not isinstance(tensor, str) or tensor not in plan.src:
        first = list(plan.src)[:8]
        names = ", ".join(map(repr, first))
        more = f" and {len(plan.src) - len(first)} more" if len(plan.src) > len(first) else ""
        what = f"the plan has no tensor {shown(tensor)}, only {names}{more}"
        raise PlanError(f"{what}; pass one of these as tensor=, or leave it out for the first")
    return tensor


def _draw_sides(plan: Movable, name: str) -> Drawing:
    """The tensor before and after, with the same color for the same holders in both."""
    if name not in plan.src:
        return lines([])
    before = plan.src[name]
    after = plan.dst[name]
    drawn_layouts = (*before[:MOST_WINDOWS], *after[:MOST_WINDOWS])
    cells = {layout: cells_of(layout, MOST_CELLS) for layout in drawn_layouts}
    colors = colors_of(cells.values())
    sides = [
        _draw_side("before", before, cells, colors),
        _draw_side("after", after, cells, colors),
    ]
    drawn = beside(sides, 28)
    if not name:
        return drawn
    letters = max(int(drawn.width / LETTER), MOST_NAME)
    heads = textwrap.wrap(_name_tensor(plan, name), letters)
    return below([lines(heads, font_weight="bold"), drawn], 6)


def _name_tensor(plan: Movable, name: str) -> str:
    """The name of the drawn tensor, and a hint how to draw another."""
    if len(plan.src) == 1:
        return name
    return f"{name}, 1 of {len(plan.src):,} tensors; tensor= draws another"


def _draw_side(
    head: str, windows: Sequence[Layout], cells: Mapping[Layout, Panels], colors: Colors
) -> Drawing:
    """The first windows of a tensor, below each other."""
    parts = [lines([head], font_weight="bold")]
    for layout in windows[:MOST_WINDOWS]:
        parts.append(draw_layout(layout, cells[layout], colors, SIDE))
    more = len(windows) - MOST_WINDOWS
    if more > 0:
        parts.append(lines([f"... and {plural(more, 'more window')}"]))
    return below(parts, 6)


def _find_nodes(value: Plan | Transposed | Program) -> Topology | None:
    """The value's own topology; None if its nodes are only assumed."""
    if isinstance(value, Program) and value.assumes_nodes:
        return None
    return value.topology


def _describe(moved: TrafficMatrix, where: Topology | None) -> list[str]:
    """The sums of the heat map."""
    tables = moved.sent, moved.stays, moved.far
    sent, stays, far = (int(table.sum()) for table in tables)
    texts = [f"{show_bytes(sent)} between ranks, {show_bytes(stays)} stays where it is"]
    if where is not None:
        texts.append(f"{show_bytes(far)} of {show_bytes(sent)} crosses from node to node")
    return texts


def _describe_groups(moved: TrafficMatrix) -> Iterator[str]:
    """The number of ranks that a row and a column stand for, if more than one."""
    for what, groups in (("row", moved.senders), ("column", moved.receivers)):
        sizes = [len(group.ranks) for group in groups]
        most = max(sizes, default=1)
        if most == 1:
            continue
        fewer = sum(size < most for size in sizes)
        text = f"a {what} is {most:,} ranks"
        yield f"{text}, {fewer:,} of {len(sizes):,} are fewer" if fewer else text


class _HeatAxis(NamedTuple):
    """The rows or the columns of a heat map: where each begins, the size of each one, and the total size."""

    groups: tuple[RankGroup, ...]
    at: tuple[float, ...]
    each: float
    total: float


def _place_groups(groups: tuple[RankGroup, ...], each: float) -> _HeatAxis:
    """Rows or columns of size `each`, with a gap between nodes."""
    at = []
    x = 0.0
    node = groups[0].node if groups else None
    for group in groups:
        if group.node != node:
            x += NODE_GAP
        node = group.node
        at.append(x)
        x += each
    return _HeatAxis(groups, tuple(at), each, x)


def _draw_heat(moved: TrafficMatrix, where: Topology | None) -> Drawing:
    """The heat map with its heading and legend."""
    head = lines(["bytes from sender (row) to receiver (column)"], font_weight="bold")
    return below([head, _draw_boxes(moved, where), _draw_legend(moved, where)], 8)


def _draw_boxes(moved: TrafficMatrix, where: Topology | None) -> Drawing:
    """A box for each pair of sender and receiver, with their names."""
    few = max(moved.sent.shape) <= FEW
    row_height, column_width = (24.0, 54.0) if few else (18.0, 18.0)
    rows = _place_groups(moved.senders, row_height)
    columns = _place_groups(moved.receivers, column_width)
    letters = _measure_names(rows) + 1
    left = letters * LETTER
    top = TOP + _column_names_height(columns)
    if where is not None:
        left += NODE_NAME
        top += LINE
    parts = [
        *_row_names(rows, left, top),
        *_column_names(columns, left, top),
        *_boxes(moved, rows, columns, left, top),
    ]
    width = left + columns.total
    height = top + rows.total
    return Drawing(width, height, tuple(parts))


def _measure_names(axis: _HeatAxis) -> int:
    """The letters of the longest name."""
    names = map(_group_name, axis.groups)
    return max(map(len, names), default=0)


def _group_name(group: RankGroup) -> str:
    """The ranks of a row or a column."""
    first = group.ranks[0]
    last = group.ranks[-1]
    return str(first) if first == last else f"{first}-{last}"


def _column_names_height(columns: _HeatAxis) -> float:
    """The extra pixels that upright names need: those wider than their column are upright."""
    longest = _measure_names(columns)
    if (longest + 1) * LETTER <= columns.each:
        return 0.0
    # There are pixels for two letters without extra ones (TOP).
    return (longest - 2) * LETTER


def _row_names(rows: _HeatAxis, left: float, top: float) -> Iterator[str]:
    """The senders, and their nodes."""
    right = left - 6
    yield words(right, top - 6, "rank", text_anchor="end", opacity="0.75")
    # The baseline lies a little below the middle of the row.
    middle = top + rows.each / 2 + 4
    for group, at in zip(rows.groups, rows.at, strict=True):
        name = _group_name(group)
        yield words(right, middle + at, name, text_anchor="end")
    for node, begin, _ in _node_spans(rows):
        yield words(0, middle + begin, f"node {node}", opacity="0.75")


def _column_names(columns: _HeatAxis, left: float, top: float) -> Iterator[str]:
    """The receivers, upright if there are too many, and their nodes."""
    upright = _column_names_height(columns) > 0
    y = top - 6
    for group, at in zip(columns.groups, columns.at, strict=True):
        middle = left + at + columns.each / 2
        name = _group_name(group)
        if upright:
            x = middle + 4
            yield words(x, y, name, transform=f"rotate(-90 {x:.6g} {y:.6g})")
        else:
            yield words(middle, y, name, text_anchor="middle")
    for node, begin, end in _node_spans(columns):
        text = f"node {node}"
        if len(text) * LETTER > end - begin:
            text = f"{node}"
        yield words(left + begin, 12, text, opacity="0.75")


def _node_spans(axis: _HeatAxis) -> Iterator[tuple[int, float, float]]:
    """Each node that has its own rows or columns, with the pixels at which it begins and ends."""
    spans: dict[int, tuple[float, float]] = {}
    for group, start in zip(axis.groups, axis.at, strict=True):
        node = group.node
        if node is None:
            continue
        end = start + axis.each
        begin, _ = spans.get(node, (start, end))
        spans[node] = (begin, end)
    for node, (begin, end) in spans.items():
        yield node, begin, end


def _boxes(
    moved: TrafficMatrix, rows: _HeatAxis, columns: _HeatAxis, left: float, top: float
) -> Iterator[str]:
    """A box for each pair of groups; without bytes, it is not filled."""
    largest = int(moved.sent.max(initial=0))
    edge = {"stroke": "currentColor", "stroke_opacity": "0.3"}
    senders = list(map(_group_name, moved.senders))
    receivers = list(map(_group_name, moved.receivers))
    sources = [name_ranks(group.ranks) for group in moved.senders]
    destinations = [name_ranks(group.ranks) for group in moved.receivers]
    has_room = columns.each > 3 * LINE
    for i, j in np.ndindex(moved.sent.shape):
        sent, stays, far = _read_pair(moved, i, j)
        ends = f"{senders[i]} to {receivers[j]}"
        title = f"{ends}: {_amount(sent, stays, far)}"
        fill = _fill(sent, stays, far, largest)
        x = left + columns.at[j]
        y = top + rows.at[i]
        pair = {"data_src": sources[i], "data_dst": destinations[j]}
        yield box(x, y, columns.each, rows.each, title, fill=fill, **edge, **pair)
        nbytes = sent or stays
        if has_room and nbytes:
            middle = x + columns.each / 2
            baseline = y + rows.each / 2 + 4
            yield _write_amount(middle, baseline, nbytes, fill)


def _read_pair(moved: TrafficMatrix, row: int, column: int) -> tuple[int, int, int]:
    """The bytes of a pair of groups: sent, staying, and those of the sent ones that go to another node."""
    sent = moved.sent[row, column]
    stays = moved.stays[row, column]
    far = moved.far[row, column]
    return int(sent), int(stays), int(far)


def _write_amount(x: float, y: float, amount: int, fill: str) -> str:
    """The bytes of a pair, written on its color."""
    text = few_digits(amount)
    return words(x, y, text, text_anchor="middle", pointer_events="none", fill=ink(fill))


def _amount(sent: int, stays: int, far: int) -> str:
    """The bytes of a pair in words."""
    texts = [f"{stays:,} B stay"] if stays else []
    if sent or not stays:
        texts.append(f"{sent:,} B")
    if far:
        texts.append("from node to node" if far == sent else f"{far:,} B from node to node")
    return ", ".join(texts)


def _fill(sent: int, stays: int, far: int, largest: int) -> str:
    """The color of a pair: orange if most of its bytes cross nodes."""
    if sent:
        return shade(sent / largest, crossing=2 * far > sent)
    return STAYS if stays else "none"


def _draw_legend(moved: TrafficMatrix, where: Topology | None) -> Drawing:
    """The meaning of the shades."""
    largest = int(moved.sent.max(initial=0))
    most = f"up to {show_bytes(largest)}"
    stays = draw_entry("stays", (STAYS,))
    if where is None:
        sent = draw_entry(f"sent, {most}", BLUES)
        row = beside([stays, sent], 12)
        return below([row], 0)
    near = draw_entry(f"inside a node, {most}", BLUES)
    far = draw_entry(f"from node to node, {most}", ORANGES)
    row = beside([stays, near], 12)
    return below([row, far], 0)
