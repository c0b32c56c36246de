"""Program pictures: what each rank sends and receives in each round, drawn as SVG.

1. A row is a rank, with what it sends above what it receives; a column is a round, from left to right.
2. The darker a box, the more bytes. With nodes, a box is orange if most of its bytes cross from node to node, and has
   a bar if any do. A diamond marks bytes that are relayed, and a frame links for which the round waits.
3. Few rounds have room for the peers; otherwise the tooltips have them.
4. Below are the sums, and the program's certificate; triangles mark the ranks that force its bound.
5. If no topology was given, nodes, times and the certificate are left out.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shardmath.base.text import plural, show_bytes, show_ranks, show_seconds
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
    group,
    ink,
    lines,
    number,
    shade,
    words,
)
from shardmath.display.pictures.lanes import Column, Half, Lanes, list_lanes
from shardmath.plans.flows.certificate import Certificate
from shardmath.plans.flows.topology import Topology
from shardmath.plans.programs.certify import certify, find_running
from shardmath.plans.programs.legs import find_passed_on
from shardmath.plans.programs.loads import sum_pairs
from shardmath.plans.programs.program import Program

__all__ = ["program_svg"]

WAYS = ("sends", "receives")
PREPOSITIONS = {"sends": "to", "receives": "from"}
HALF = 17.0
"""Pixels of what a rank sends, or receives."""
LANE_GAP, NODE_GAP = 4.0, 8.0
"""Pixels between two ranks, and more between two nodes."""
FEW = 4
"""Rounds up to which boxes have room for peers."""
WIDE, NARROW, SUMMED = 182.0, 71.0, 90.0
"""Pixels of a column with peers, without, and of several rounds."""
BAR = 3.0
DIAMOND = 4.0
"""Half of the pixels of a diamond."""
MOST_AMOUNTS = 2
"""Different amounts that a tooltip lists."""
LETTERS = 80
"""Letters of a line below the rows, even if these are narrower."""


class _Frame(NamedTuple):
    """Where rows and columns are: the left edge and width of each column, the top of each rank's row, the baseline of
    the last line above them (`head`), and the size."""

    left: tuple[float, ...]
    widths: tuple[float, ...]
    top: dict[int, float]
    head: float
    width: float
    height: float


class _Scene(NamedTuple):
    """A program to draw: its lanes and, if nodes are known, its topology, certificate and the ranks that force the
    bound."""

    prog: Program
    lanes: Lanes
    where: Topology | None = None
    certificate: Certificate | None = None
    witness: tuple[int, ...] = ()


def program_svg(prog: Program, *, topology: Topology | None = None, inline: bool = False) -> str:
    """Return a picture of the rounds of a program as SVG: a document, or an element for a web page if `inline`.

    Raises PlanError if `topology` is another one than the program's.
    """
    scene = _set_scene(prog, topology)
    count = sum(len(column.steps) for column in scene.lanes.columns)
    summary = list(_describe(scene, count))
    parts = _draw_parts(scene) if count else []
    widths = [part.width for part in parts]
    letters = int(max(widths, default=0.0) / LETTER)
    wrapped = [line for text in summary for line in textwrap.wrap(text, max(letters, LETTERS))]
    drawing = below([*parts, lines(wrapped)], 8)
    between = f"{len(prog.src_ranks)} to {plural(prog.dst_ranks, 'rank')}"
    title = f"program of {plural(prog.src, 'tensor')}, {between}, {plural(count, 'round')}"
    return document(drawing, title, "; ".join(summary), inline=inline)


def _set_scene(prog: Program, topology: Topology | None) -> _Scene:
    """The program with its lanes; a topology that was only assumed is not drawn."""
    if topology is None and prog.assumes_nodes:
        return _Scene(prog, list_lanes(prog))
    where = find_running(prog, topology).topology
    certificate = certify(prog, where)
    witness = certificate.witness.ranks if certificate.witness is not None else ()
    return _Scene(prog, list_lanes(prog, witness), where, certificate, witness)


def _describe(scene: _Scene, count: int) -> Iterator[str]:
    """The sums of the program, its certificate, and what is left out."""
    if not count:
        yield "nothing is sent: all ranks have what they need"
        return
    pairs = sum_pairs(scene.prog)
    sent = int(pairs.nbytes.sum())
    texts = [f"{show_bytes(sent)} between ranks"]
    if scene.where is not None:
        far = int(pairs.nbytes[pairs.far].sum())
        texts.append(f"{show_bytes(far)} of it from node to node")
    # Hops of pairs are counted from 0.
    relayed = int(pairs.nbytes[find_passed_on(pairs.leg + 1)].sum())
    if relayed:
        texts.append(f"{show_bytes(relayed)} of it relayed")
    yield ", ".join(texts)
    if scene.where is not None and scene.certificate is not None:
        latency = show_seconds(scene.where.latency_s * count)
        total = show_seconds(scene.certificate.plan_s)
        yield f"{plural(count, 'round')}: {total}, {latency} of it latency"
        yield str(scene.certificate)
    else:
        how = "sm.schedule(plan, topology=...) adds nodes, times and the bound"
        yield f"{scene.prog.word_nodes()}; {how}"
    yield from _describe_rest(scene.lanes)


def _describe_rest(lanes: Lanes) -> Iterator[str]:
    """The ranks without a row, and the rounds without a column of their own."""
    for column in lanes.columns:
        if not column.is_one:
            yield f"the column without color is the sum of {len(column.steps):,} rounds"
    if lanes.others:
        sent = show_bytes(lanes.sent)
        received = show_bytes(lanes.received)
        verbs = ("sends", "receives") if lanes.others == 1 else ("send", "receive")
        more = f"{plural(lanes.others, 'more rank')} without a row"
        yield f"{more} {verbs[0]} {sent} and {verbs[1]} {received}"


def _draw_parts(scene: _Scene) -> list[Drawing]:
    """A heading, the rounds and the legend."""
    head = lines(["what each rank sends and receives, round by round"], font_weight="bold")
    return [head, _draw_rounds(scene), *_draw_legend(scene)]


def _draw_rounds(scene: _Scene) -> Drawing:
    """Rows and columns with their names."""
    heads = _list_heads(scene)
    frame = _find_frame(scene, len(heads))
    parts = [
        *_draw_heads(heads, frame),
        *_draw_names(scene, frame),
        *_draw_halves(scene, frame),
    ]
    return Drawing(frame.width, frame.height, tuple(parts))


def _list_heads(scene: _Scene) -> dict[str, list[str]]:
    """The lines above the columns, by name; phases and turns only if there are several."""
    columns = scene.lanes.columns
    heads = {
        "phase": [_name_step(column, 0) for column in columns],
        "slot": [_name_step(column, 1) for column in columns],
        "turn": [_name_step(column, 2) for column in columns],
    }
    if not any(phase for column in columns for phase, _, _ in column.steps):
        del heads["phase"]
    if scene.prog.turns == 1:
        del heads["turn"]
    if scene.where is not None:
        heads["takes"] = [show_seconds(column.seconds) for column in columns]
    return heads


def _name_step(column: Column, place: int) -> str:
    """One number of a round's step; of several rounds, their number in the place of the slot."""
    if column.is_one:
        return str(column.steps[0][place])
    return f"{len(column.steps):,} rounds" if place == 1 else ""


def _find_frame(scene: _Scene, heads: int) -> _Frame:
    """The places of rows and columns below this number of lines."""
    columns = scene.lanes.columns
    each = WIDE if len(columns) <= FEW else NARROW
    widths = tuple(SUMMED if not column.is_one else each for column in columns)
    x = _measure_names(scene)
    left = []
    for width in widths:
        left.append(x)
        x += width
    y = heads * LINE + 4.0
    head = y - 8
    top = {}
    node = None
    for rank in scene.lanes.ranks:
        new = rank // scene.prog.topology.ranks_per_node
        if scene.where is not None and node not in (None, new):
            y += NODE_GAP
        node = new
        top[rank] = y
        y += 2 * HALF + LANE_GAP
    return _Frame(tuple(left), widths, top, head, x, y)


def _measure_names(scene: _Scene) -> float:
    """The pixels left of the columns: nodes, marks of the witness, ranks, and what a half is."""
    last = scene.lanes.ranks[-1]
    letters = max(len(str(last)), 4) + 11
    if scene.where is not None:
        letters += len(f"node {scene.where.node(last)}") + 2
    return letters * LETTER


def _draw_heads(heads: dict[str, list[str]], frame: _Frame) -> Iterator[str]:
    """The lines above the columns."""
    y = 0.75 * LINE
    for name, texts in heads.items():
        yield words(frame.left[0] - 6, y, name, text_anchor="end", opacity="0.75")
        for text, left, width in zip(texts, frame.left, frame.widths, strict=True):
            yield words(left + width / 2, y, text, text_anchor="middle")
        y += LINE


def _draw_names(scene: _Scene, frame: _Frame) -> Iterator[str]:
    """The ranks, with their nodes, and the marks of the witness."""
    right = frame.left[0] - 6
    ranks_right = right - 9 * LETTER
    yield words(ranks_right, frame.head, "rank", text_anchor="end", opacity="0.75")
    node = None
    for rank, top in frame.top.items():
        new = rank // scene.prog.topology.ranks_per_node
        if scene.where is not None and new != node:
            yield words(0, top + HALF + 4, f"node {new}", opacity="0.75")
        node = new
        yield from _draw_rank(rank, ranks_right, top + HALF, is_marked=rank in scene.witness)
        for i, way in enumerate(WAYS):
            yield words(right, top + i * HALF + 12.5, way, text_anchor="end", opacity="0.75")


def _draw_rank(rank: int, right: float, middle: float, *, is_marked: bool) -> Iterator[str]:
    """The number of a rank, and its mark if it belongs to the witness."""
    weight = "bold" if is_marked else "normal"
    yield words(right, middle + 4, str(rank), text_anchor="end", font_weight=weight)
    if is_marked:
        width = (len(str(rank)) + 0.5) * LETTER
        path = _trace_triangle(right - width, middle)
        yield f'<path d="{path}" fill="currentColor"/>'


def _trace_triangle(right: float, middle: float) -> str:
    """The path of the mark of a rank of the witness."""
    return f"M{number(right)} {number(middle)}l-7 -4.5v9z"


def _draw_halves(scene: _Scene, frame: _Frame) -> Iterator[str]:
    """An edge around each rank's round, and in it a box for all that the rank sends, and one for all that it receives:
    first the boxes of all ranks, then the marks and texts on them."""
    largest = _find_largest(scene.lanes)
    boxes = {rank: list(_draw_rounds_of(rank, frame)) for rank in scene.lanes.ranks}
    marks = _Marks()
    texts: list[str] = []
    for (rank, i, way), half in scene.lanes.halves.items():
        spot = _Spot(frame.left[i], frame.top[rank] + WAYS.index(way) * HALF, frame.widths[i])
        paint = _choose_paint(scene, i, half, largest)
        title = _write_title(scene, rank, i, way)
        boxes[rank].append(box(spot.x, spot.y, spot.width, HALF, title, **paint.attributes))
        texts += _write_half(half, way, spot, paint.ink)
        marks.add(half, spot, paint.ink, has_nodes=scene.where is not None)
    for rank, drawn in boxes.items():
        yield group(drawn, data_ranks=rank, stroke="currentColor", stroke_opacity="0.3")
    yield group([*marks.draw(), *texts], pointer_events="none")


class _Spot(NamedTuple):
    """The left top corner of a box, and its width."""

    x: float
    y: float
    width: float


def _draw_rounds_of(rank: int, frame: _Frame) -> Iterator[str]:
    """The edges around the rounds of a rank."""
    for left, width in zip(frame.left, frame.widths, strict=True):
        yield box(left, frame.top[rank], width, 2 * HALF, fill="none")


class _Marks:
    """The marks on boxes, as few paths, since there may be hundreds of them."""

    def __init__(self) -> None:
        # Both by color: the color that shows on the box, since the page's own may be like the box's.
        self.filled: dict[str, list[str]] = defaultdict(list)
        self.edges: dict[str, list[str]] = defaultdict(list)

    def add(self, half: Half, spot: _Spot, color: str, *, has_nodes: bool) -> None:
        """Add the marks of a box."""
        if half.relayed:
            diamond = _trace_diamond(spot.x + spot.width - DIAMOND - 4, spot.y + HALF / 2)
            self.filled[color].append(diamond)
        if has_nodes and half.far:
            bar = _trace_box(spot.x + 4, spot.y + 4, BAR, HALF - 8)
            self.filled[color].append(bar)
        if has_nodes and half.is_fullest:
            edge = _trace_box(spot.x + 2, spot.y + 2, spot.width - 4, HALF - 4)
            self.edges[color].append(edge)

    def draw(self) -> Iterator[str]:
        """Yield the paths: edges first, then bars and diamonds."""
        for color, paths in self.edges.items():
            yield f'<path d="{"".join(paths)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for color, paths in self.filled.items():
            yield f'<path d="{"".join(paths)}" fill="{color}"/>'


def _trace_diamond(x: float, y: float) -> str:
    """The path of the mark of relayed bytes, around its middle."""
    d = number(DIAMOND)
    return f"M{number(x - DIAMOND)} {number(y)}l{d} -{d} {d} {d} -{d} {d}z"


def _trace_box(x: float, y: float, width: float, height: float) -> str:
    """The path of a rectangle."""
    wide = number(width)
    return f"M{number(x)} {number(y)}h{wide}v{number(height)}h-{wide}z"


def _find_largest(lanes: Lanes) -> int:
    """The most bytes of a colored box."""
    columns = lanes.columns
    sums = [half.nbytes for (_, i, _), half in lanes.halves.items() if columns[i].is_one]
    return max(sums, default=0)


class _Paint(NamedTuple):
    """The fill of a box as attributes, and the color of what is on it."""

    attributes: Mapping[str, object]
    ink: str


def _choose_paint(scene: _Scene, column: int, half: Half, largest: int) -> _Paint:
    """The look of a box; the sums of several rounds have no color, since they are no amount of a round."""
    if not scene.lanes.columns[column].is_one:
        # Of a box that is not filled, only the edge would show the tooltip.
        return _Paint({"fill": "none", "pointer_events": "all"}, "currentColor")
    crossing = scene.where is not None and 2 * half.far > half.nbytes
    fill = shade(half.nbytes / largest, crossing=crossing)
    return _Paint({"fill": fill}, ink(fill))


def _write_half(half: Half, way: str, spot: _Spot, color: str) -> Iterator[str]:
    """The bytes of a box, after its peers if there is room."""
    left = spot.x + BAR + 7
    baseline = spot.y + 12.5
    amount = few_digits(half.nbytes)
    if spot.width != WIDE:
        yield words(left, baseline, amount, fill=color)
        return
    ranks = show_ranks(half.peers.tolist(), noun=False)
    if len(ranks) > 8:
        ranks = plural(half.peers, "rank")
    yield words(left, baseline, f"{PREPOSITIONS[way]} {ranks}", fill=color)
    right = spot.x + spot.width - 2 * DIAMOND - 8
    yield words(right, baseline, amount, text_anchor="end", fill=color)


def _write_title(scene: _Scene, rank: int, column: int, way: str) -> str:
    """The tooltip of a box: its rank and round, and the bytes by peer."""
    half = scene.lanes.halves[rank, column, way]
    when = _name_rounds(scene, scene.lanes.columns[column])
    texts = [f"rank {rank} {way} {half.nbytes:,} B in {when}"]
    if half.relayed:
        texts.append(_name_share(half.relayed, half.nbytes, "relayed"))
    if half.far and scene.where is not None:
        texts.append(_name_share(half.far, half.nbytes, "from node to node"))
    # Peers last: long tooltips are cut at their ends.
    return "\n".join([*texts, *_list_peers(half, way)])


def _name_rounds(scene: _Scene, column: Column) -> str:
    """A round, or the number of rounds and the first one."""
    phase, slot, turn = column.steps[0]
    texts = [f"slot {slot}"]
    if any(step[0] for column in scene.lanes.columns for step in column.steps):
        texts.insert(0, f"phase {phase}")
    if scene.prog.turns > 1:
        texts.append(f"turn {turn}")
    first = ", ".join(texts)
    return first if column.is_one else f"{len(column.steps):,} rounds from {first} on"


def _name_share(part: int, whole: int, what: str) -> str:
    """A part of the bytes of a box."""
    return f"all {what}" if part == whole else f"{part:,} B {what}"


def _list_peers(half: Half, way: str) -> Iterator[str]:
    """Peers with equal bytes, from the most bytes on."""
    amounts = np.unique(half.amounts)[::-1].tolist()
    for amount in amounts[:MOST_AMOUNTS]:
        peers = half.peers[half.amounts == amount].tolist()
        ranks = show_ranks(peers, most=4)
        each = " each" if len(peers) > 1 else ""
        yield f"{amount:,} B {PREPOSITIONS[way]} {ranks}{each}"
    more = half.amounts < amounts[:MOST_AMOUNTS][-1]
    if more.any():
        yield f"less {PREPOSITIONS[way]} {plural(int(more.sum()), 'more rank')}"


def _draw_legend(scene: _Scene) -> Iterator[Drawing]:
    """The meaning of the shades, and of the marks that there are."""
    halves = scene.lanes.halves.values()
    has_nodes = scene.where is not None
    darkest = lines([f"darkest: up to {show_bytes(_find_largest(scene.lanes))} in a round"])
    marks = []
    if has_nodes and any(half.far for half in halves):
        near = draw_entry("most inside a node", BLUES)
        far = draw_entry("most from node to node", ORANGES)
        yield beside([near, far, darkest], 16)
        marks.append(_draw_mark(_trace_box(6, 5, BAR, HALF - 8), "some from node to node"))
    else:
        yield beside([draw_entry("bytes", BLUES), darkest], 16)
    if any(half.relayed for half in halves):
        marks.append(_draw_mark(_trace_diamond(6, 9), "some relayed"))
    if has_nodes:
        style = 'fill="none" stroke="currentColor" stroke-width="1.5"'
        marks.append(_draw_mark(_trace_box(1, 4, 14, 10), "links that the round waits for", style))
    if scene.witness:
        marks.append(_draw_mark(_trace_triangle(9, 9), "ranks that force the bound"))
    if marks:
        yield beside(marks, 16)


def _draw_mark(path: str, text: str, style: str = 'fill="currentColor"') -> Drawing:
    """A mark and its meaning."""
    mark = f'<path d="{path}" {style}/>'
    return Drawing(20 + len(text) * LETTER, LINE, (mark, words(20, LINE * 0.75, text)))
