"""Pictures of programs: boxes are the messages of each rank's rounds, summed."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import example, given

from shardmath import Layout, Mesh, PlanError, Program, Topology, certify, plan, schedule
from shardmath.base.text import show_bytes, show_seconds
from shardmath.display.pictures.elements import few_digits
from shardmath.display.pictures.plan_drawing import plan_svg
from shardmath.pictures import svg
from shardmath.plans.programs.loads import sum_round_pairs
from shardmath.plans.programs.messages import Message, Step
from tests.property.drawn.programs import cut_anywhere, programs

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def messages_of(prog: Program) -> dict[tuple[int, Step, str], list[Message]]:
    """By rank, step and way: the messages of the rank's rounds."""
    out = {}
    for rank in prog.ranks:
        for one in prog.for_rank(rank):
            for way, messages in (("sends", one.sends), ("receives", one.receives)):
                if messages:
                    out[rank, one.step, way] = list(messages)
    return out


def peer_of(message: Message, way: str) -> int:
    return message.dst_rank if way == "sends" else message.src_rank


def crosses(prog: Program, message: Message) -> bool:
    where = prog.topology
    return where.node(message.src_rank) != where.node(message.dst_rank)


class Box(NamedTuple):
    """What a box's tooltip says: its rank, way, first step, number of rounds, bytes, and the lines below."""

    rank: int
    way: str
    step: Step
    rounds: int
    nbytes: int
    lines: list[str]


TITLE = re.compile(
    r"rank (\d+) (sends|receives) ([\d,]+) B in (?:([\d,]+) rounds from )?"
    r"(?:phase (\d+), )?slot (\d+)(?:, turn (\d+))?(?: on)?"
)


def boxes_of(root: ElementTree.Element) -> list[Box]:
    out = []
    for group in root.iter(f"{SVG}g"):
        if "data-ranks" not in group.attrib:
            continue
        for title in group.iter(f"{SVG}title"):
            head, *lines = (title.text or "").split("\n")
            found = TITLE.fullmatch(head)
            assert found, head
            rank, way, nbytes, rounds, *step = found.groups()
            assert rank == group.attrib["data-ranks"]
            phase, slot, turn = (int(x or 0) for x in step)
            count = int((rounds or "1").replace(",", ""))
            size = int(nbytes.replace(",", ""))
            out.append(Box(int(rank), way, (phase, slot, turn), count, size, lines))
    return out


def texts_of(root: ElementTree.Element) -> list[str]:
    return ["".join(x.itertext()) for x in root.iter(f"{SVG}text")]


def paths_of(root: ElementTree.Element) -> str:
    return "".join(x.attrib["d"] for x in root.iter(f"{SVG}path"))


def share(part: int, whole: int, what: str) -> list[str]:
    if not part:
        return []
    return [f"all {what}" if part == whole else f"{part:,} B {what}"]


FEW = schedule(
    plan(
        Layout((8192, 8192), Mesh(tp=2), "(tp n) h"),
        Layout((8192, 8192), Mesh(dp=4, tp=2, ranks=range(4, 12)), "n (tp h)"),
    ),
    topology=Topology(ranks_per_node=4),
    fanout="node",
)
MANY = schedule(
    plan(
        Layout((65536, 8192), Mesh(tp=8), "(tp n) h", dtype="bfloat16"),
        Layout((65536, 8192), Mesh(dp=16, tp=2, ranks=range(8, 40)), "n (tp h)", dtype="bfloat16"),
    ),
    topology=Topology(),
    max_ops_per_group=4,
)


@given(programs())
@example(FEW)
@example(MANY)
def test_boxes_are_the_messages_of_rounds(prog: Program) -> None:
    messages = messages_of(prog)
    steps = sorted({step for _, step, _ in messages})
    boxes = boxes_of(ElementTree.fromstring(svg(prog)))
    drawn = {box.rank for box in boxes}
    seen = set()
    for box in boxes:
        first = steps.index(box.step)
        covered = steps[first : first + box.rounds]
        keys = [(box.rank, step, box.way) for step in covered]
        seen |= {key for key in keys if key in messages}
        found = [message for key in keys for message in messages.get(key, [])]
        assert box.nbytes == sum(message.nbytes for message in found)
        relayed = sum(message.nbytes for message in found if message.relayed or message.is_handed)
        far = sum(message.nbytes for message in found if crosses(prog, message))
        said = [line for line in box.lines if line.endswith(("relayed", "node to node"))]
        if prog.assumes_nodes:
            far = 0
        expected = share(relayed, box.nbytes, "relayed")
        assert said == [*expected, *share(far, box.nbytes, "from node to node")]
    # Nothing of a drawn rank is left out.
    assert seen == {key for key in messages if key[0] in drawn}


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    def has(self, text: ElementTree.Element) -> bool:
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        return self.x < x < self.x + self.width and self.y < y < self.y + self.height


def rectangle(element: ElementTree.Element) -> Rectangle:
    return Rectangle(*(float(element.attrib[name]) for name in Rectangle._fields))


@pytest.mark.parametrize("prog", [FEW, MANY, schedule(FEW.plan)], ids=["few", "many", "assumed"])
def test_boxes_are_where_their_rank_and_round_are(prog: Program) -> None:
    root = ElementTree.fromstring(svg(prog))
    boxes = iter(boxes_of(root))
    texts = list(root.iter(f"{SVG}text"))
    lanes = [x for x in root.iter(f"{SVG}g") if "data-ranks" in x.attrib]
    assert [int(x.attrib["data-ranks"]) for x in lanes] == sorted(
        {box.rank for box in boxes_of(root)}
    )
    places = set()
    for lane in lanes:
        rects = list(lane.iter(f"{SVG}rect"))
        edges = [rectangle(x) for x in rects if x.find(f"{SVG}title") is None]
        assert edges == sorted(edges)
        for rect in rects[len(edges) :]:
            box, spot = next(boxes), rectangle(rect)
            (edge,) = (x for x in edges if x.x == spot.x)
            assert spot.height == edge.height / 2 and spot.width == edge.width
            assert spot.y == edge.y + spot.height * (box.way == "receives")
            inside = [x.text for x in texts if spot.has(x)]
            assert few_digits(box.nbytes) in inside and len(inside) <= 2
            places.add((spot.x, spot.width, box.step, box.rounds))
    # From left to right, columns are in the order of steps, each with one place and its slot above.
    assert [step for *_, step, _ in sorted(places)] == sorted({step for *_, step, _ in places})
    heads = [x for x in texts if x.attrib.get("text-anchor") == "middle"]
    for x, width, (_, slot, _), rounds in places:
        above = [head.text for head in heads if x < float(head.attrib["x"]) < x + width]
        assert (f"{rounds} rounds" if rounds > 1 else str(slot)) in above


@given(programs())
@example(MANY)
def test_tooltips_say_the_bytes_of_each_peer(prog: Program) -> None:
    messages = messages_of(prog)
    steps = sorted({step for _, step, _ in messages})
    for box in boxes_of(ElementTree.fromstring(svg(prog))):
        first = steps.index(box.step)
        by_peer: dict[int, int] = defaultdict(int)
        for step in steps[first : first + box.rounds]:
            for message in messages.get((box.rank, step, box.way), []):
                by_peer[peer_of(message, box.way)] += message.nbytes
        by_amount: dict[int, list[int]] = defaultdict(list)
        for peer in sorted(by_peer):
            by_amount[by_peer[peer]].append(peer)
        amounts = sorted(by_amount, reverse=True)[:2]
        lines = [line for line in box.lines if not line.endswith(("relayed", "node to node"))]
        starts = [line.split(" B ")[0] for line in lines[: len(amounts)]]
        assert starts == [f"{amount:,}" for amount in amounts]
        more = sum(len(peers) for amount, peers in by_amount.items() if amount < amounts[-1])
        assert len(lines) == len(amounts) + bool(more)
        assert not more or re.fullmatch(rf"less (to|from) {more} more ranks?", lines[-1])
        for line, amount in zip(lines, amounts, strict=False):
            _, ranks, each = re.split(r" ranks? | each|$", f"{line} each")[:3]
            assert not each
            if "..." not in ranks:
                assert list(read_ranks(ranks)) == by_amount[amount]


def read_ranks(text: str) -> Iterator[int]:
    """The ranks in a text such as "0-3, 8"."""
    for span in text.split(", "):
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1)


@given(programs())
@example(FEW)
@example(MANY)
def test_marks_and_times_are_those_of_the_rounds(prog: Program) -> None:
    """The fullest links of each round, counted from the messages of all ranks."""
    messages = messages_of(prog)
    if not messages:
        return
    root = ElementTree.fromstring(svg(prog))
    boxes = boxes_of(root)
    where = prog.topology
    rates = {False: where.intra_bytes_per_s, True: where.inter_bytes_per_s}
    seconds: dict[tuple[int, Step, str], float] = {}
    for key, listed in messages.items():
        loads = {False: 0, True: 0}
        for message in listed:
            loads[crosses(prog, message)] += message.nbytes
        seconds[key] = max(loads[far] / rates[far] for far in loads)
    rounds: dict[Step, float] = defaultdict(float)
    for (_, step, _), time_s in seconds.items():
        rounds[step] = max(rounds[step], time_s)
    single = [(box.rank, box.step, box.way) for box in boxes if box.rounds == 1]
    fullest = [key for key in single if seconds[key] == rounds[key[1]]]
    thick = [x.attrib["d"] for x in root.iter(f"{SVG}path") if "stroke-width" in x.attrib]
    *edges, _ = thick  # the last one is in the legend
    assert "".join(edges).count("M") == len(fullest)
    # A diamond and a bar more are in the legend.
    relayed = sum("relayed" in " ".join(box.lines) for box in boxes)
    assert paths_of(root).count("l4 -4 4 4") == relayed + bool(relayed)
    far = sum("node to node" in " ".join(box.lines) for box in boxes)
    assert paths_of(root).count("h3v9") == far + bool(far)
    texts = texts_of(root)
    total = sum(rounds.values()) + where.latency_s * len(rounds)
    assert certify(prog).plan_s == pytest.approx(total)
    for step in {step for _, step, _ in single}:
        assert show_seconds(rounds[step] + where.latency_s) in texts


@given(programs())
@example(MANY)
def test_ranks_without_a_row_are_summed(prog: Program) -> None:
    messages = messages_of(prog)
    root = ElementTree.fromstring(svg(prog))
    groups = [x.attrib["data-ranks"] for x in root.iter(f"{SVG}g") if "data-ranks" in x.attrib]
    drawn = set(map(int, groups))
    if not messages:
        assert texts_of(root) == ["nothing is sent: all ranks have what they need"]
        return
    others = set(prog.ranks) - drawn
    assert len(drawn) == min(len(prog.ranks), 20)
    sums = {"sends": 0, "receives": 0}
    for (rank, _, way), listed in messages.items():
        if rank in others:
            sums[way] += sum(message.nbytes for message in listed)
    said = [x for x in texts_of(root) if "without a row" in x]
    amounts = [show_bytes(nbytes) for nbytes in sums.values()]
    assert len(said) == bool(others)
    for line in said:
        assert line.startswith(f"{len(others)} more rank")
        assert re.findall(r"[\d.]+ [kMG]?B", line) == amounts


@given(programs())
def test_messages_by_round_are_those_of_the_ranks(prog: Program) -> None:
    some = prog.ranks[::2]
    pairs = sum_round_pairs(prog, some)
    listed = [tuple(row) for row in zip(*(column.tolist() for column in pairs), strict=True)]
    expected = set()
    for messages in messages_of(prog).values():
        for m in messages:
            if {m.src_rank, m.dst_rank} & set(some):
                beyond = m.pieces[0].dst_rank if m.leg == 4 else m.pieces[0].src_rank
                ends = m.src_rank, m.dst_rank, beyond if m.leg > 3 else 0
                expected.add((*m.step, m.leg, *ends, m.nbytes))
    assert len(listed) == len(expected) and set(listed) == expected


def test_the_witness_is_marked() -> None:
    root = ElementTree.fromstring(svg(MANY))
    witness = certify(MANY).witness
    assert witness is not None
    bold = [x.text for x in root.iter(f"{SVG}text") if x.attrib.get("font-weight") == "bold"]
    assert bold[1:] == [str(rank) for rank in witness.ranks]
    assert paths_of(root).count("l-7 -4.5v9z") == len(witness.ranks) + 1
    assert str(certify(MANY)) in texts_of(root)
    assert str(certify(MANY)) in (root.findtext(f"{SVG}desc") or "")


def test_nodes_are_drawn_only_if_they_were_given() -> None:
    assumed = schedule(FEW.plan)
    texts = texts_of(ElementTree.fromstring(svg(assumed)))
    assert not any(text.startswith("node ") or text == "takes" for text in texts)
    assert any(text.startswith("assumed nodes of 8 ranks; sm.schedule(") for text in texts)
    given = texts_of(ElementTree.fromstring(svg(assumed, topology=Topology())))
    assert {"node 0", "node 1", "takes"} <= set(given)
    with pytest.raises(PlanError, match="was scheduled for Topology"):
        svg(assumed, topology=Topology(ranks_per_node=2))


def test_a_tensor_is_drawn_with_its_layouts() -> None:
    assert FEW.svg(tensor="") == plan_svg(FEW, tensor="") != FEW.svg()
    with pytest.raises(PlanError, match="the plan has no tensor 'w'"):
        FEW.svg(tensor="w")


def test_few_rounds_name_the_peers() -> None:
    texts = texts_of(ElementTree.fromstring(svg(FEW)))
    assert {"to 4-11", "from 0-1"} <= set(texts)


@pytest.mark.parametrize("fanout", ["none", "node", "auto"])
def test_large_programs_are_small_pictures(fanout: str) -> None:
    names = [f"w{i}" for i in range(50)]
    src = Layout((4096, 4096), Mesh(dp=16, tp=8), "(tp n) h")
    mesh = Mesh(dp=4, tp=64, ranks=range(128, 384))
    dst = Layout((4096, 4096), mesh, "n (tp h)")
    p = plan(dict.fromkeys(names, src), dict.fromkeys(names, dst))
    limits = itertools.product((1 << 24, 1 << 30), (8, 1024))
    for most_bytes, most_ops in limits:
        prog = schedule(
            p,
            topology=Topology(),
            fanout=fanout,
            max_inflight_bytes=most_bytes,
            max_ops_per_group=most_ops,
        )
        start = time.perf_counter()
        text = svg(prog)
        assert time.perf_counter() - start < 30  # a second on a quiet machine
        assert len(text) < 200_000
        assert float(ElementTree.fromstring(text).attrib["width"]) < 1100
