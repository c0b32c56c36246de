"""Pictures of plans: the heat map is the plan's transfers, summed."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Program,
    Topology,
    Transposed,
    adjoint,
    crossing_bytes,
    plan,
    schedule,
    testing,
)
from shardmath.display.pictures import traffic as traffic_file
from shardmath.display.pictures.plan_drawing import STAYS, plan_svg
from shardmath.display.pictures.traffic import TrafficMatrix, traffic

SVG = "{http://www.w3.org/2000/svg}"
MANY = 1000


def summed(value: Plan | Transposed | Program) -> Counter[tuple[int, int]]:
    """Bytes by sender and receiver, from all that is listed."""
    out: Counter[tuple[int, int]] = Counter()
    if not isinstance(value, Program):
        for t in value.transfers():
            out[t.src_rank, t.dst_rank] += t.nbytes
        return +out
    for rank in value.ranks:
        for one in value.for_rank(rank):
            for message in (*one.sends, *one.keeps):
                out[rank, message.dst_rank] += message.nbytes
    return +out


def drawn(moved: TrafficMatrix) -> Counter[tuple[int, int]]:
    """The same from the tables, where groups are of one rank."""
    out: Counter[tuple[int, int]] = Counter()
    for i, sender in enumerate(moved.senders):
        for j, receiver in enumerate(moved.receivers):
            out[sender.ranks[0], receiver.ranks[0]] += int(moved.sent[i, j] + moved.stays[i, j])
    return +out


@given(testing.trees())
def test_a_plan_is_its_transfers(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    p = plan(*tree)
    assert drawn(traffic(p, most=MANY)) == summed(p)
    stays = traffic(p, most=MANY).stays
    assert stays.sum() == sum(n for (a, b), n in summed(p).items() if a == b)


@given(testing.trees(), st.integers(1, 5))
def test_many_receivers_are_counted_alike(
    tree: tuple[dict[str, Layout], dict[str, Layout]], per_node: int
) -> None:
    p, where = plan(*tree), Topology(ranks_per_node=per_node)
    one_by_one = traffic(p, where, MANY)
    with patch.object(traffic_file, "MANY", 0):
        counted = traffic(p, where, MANY)
    for a, b in zip(one_by_one[2:], counted[2:], strict=True):
        assert np.array_equal(a, b)


def test_what_all_ranks_ask_of_all_is_summed_in_time() -> None:
    mesh = Mesh(dp=4096)
    text = plan_svg(plan(Layout((8192,), mesh, "(dp n)"), Layout((8192,), mesh, "n")))
    assert len(text) < 200_000


@given(testing.pairs(ops=(None,), overlap=False))
def test_an_adjoint_is_its_transfers(pair: tuple[Layout, ...]) -> None:
    back = adjoint(plan(*pair))
    assert drawn(traffic(back, most=MANY)) == summed(back)


@given(testing.pairs(), st.integers(1, 5))
def test_a_program_is_its_messages(pair: tuple[Layout, ...], per_node: int) -> None:
    prog = schedule(plan(*pair), topology=Topology(ranks_per_node=per_node))
    moved = traffic(prog, prog.topology, most=MANY)
    assert drawn(moved) == summed(prog)
    assert moved.far.sum() == crossing_bytes(prog)


@given(testing.trees(), st.integers(1, 5), st.integers(1, 9))
def test_groups_lose_nothing(
    tree: tuple[dict[str, Layout], dict[str, Layout]], per_node: int, most: int
) -> None:
    p, where = plan(*tree), Topology(ranks_per_node=per_node)
    one, some = traffic(p, where, MANY), traffic(p, where, most)
    assert max(some.sent.shape) <= most
    for a, b in ((one.sent, some.sent), (one.stays, some.stays), (one.far, some.far)):
        assert a.sum() == b.sum()
    assert [r for group in some.senders for r in group.ranks] == list(p.src_ranks)
    for group in (*some.senders, *some.receivers):
        nodes = {where.node(rank) for rank in group.ranks}
        assert nodes == {group.node} if len(nodes) == 1 else group.node is None


@given(testing.trees())
def test_any_plan_is_well_formed(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    p = plan(*tree)
    ElementTree.fromstring(plan_svg(p))
    root = ElementTree.fromstring(plan_svg(p, topology=Topology(ranks_per_node=2)))
    titles = [x.text or "" for x in root.iter(f"{SVG}title")]
    assert sum(" to " in x and x.endswith(("B", "stay", "node")) for x in titles) == len(
        p.src_ranks
    ) * len(p.dst_ranks)


def test_boxes_say_their_bytes() -> None:
    src = Layout((9, 4), Mesh(dp=2, tp=2), "(tp dp n) h")
    dst = Layout((9, 4), Mesh(tp=2, ranks=(3, 4)), "n (tp h)")
    text = plan_svg(plan(src, dst), topology=Topology(ranks_per_node=3))
    root = ElementTree.fromstring(text)
    found = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and " to " in (title.text or ""):
            pair, _, what = (title.text or "").partition(": ")
            found[pair] = what, rect.attrib["fill"]
    assert found["0 to 3"] == ("24 B, from node to node", "#a63603")
    assert found["3 to 3"] == ("16 B stay", STAYS)
    assert found["3 to 4"] == ("16 B", "#3182bd")
    said = ["".join(x.itertext()) for x in root.iter(f"{SVG}text")]
    assert {"before", "after", "node 0", "24 B", "stays"} <= set(said)
    assert "128 B between ranks, 16 B stays where it is" in said
    assert "112 B of 128 B crosses from node to node" in said


def test_one_tensor_of_several_is_drawn() -> None:
    mesh = Mesh(tp=2)
    here = {name: Layout((4, n), mesh, "(tp n) h") for name, n in (("a", 2), ("<b>", 6))}
    p = plan(here, {name: Layout(x.shape, mesh, "n (tp h)") for name, x in here.items()})
    note = ", 1 of 2 tensors; tensor= draws another<"
    assert f">&lt;b&gt;{note}" in p.svg() and "float32[4, 6]" in p.svg()
    assert f">a{note}" in p.svg(tensor="a") and "float32[4, 6]" not in p.svg(tensor="a")
    with pytest.raises(PlanError, match="the plan has no tensor 'c', only '<b>', 'a'"):
        p.svg(tensor="c")
    with pytest.raises(PlanError, match="topology=3 is no"):
        p.svg(topology=3)  # type: ignore[arg-type]


def test_names_of_many_holders_do_not_push_the_heat_map_away() -> None:
    # Each box is held by 64 ranks that do not follow each other, whose names take hundreds of pixels.
    mesh = Mesh(data_parallel=64, tensor_model_parallel=16)
    src = Layout((4096, 4096), mesh, "(tensor_model_parallel n) h")
    dst = Layout((4096, 4096), mesh, "n (tensor_model_parallel h)")
    root = ElementTree.fromstring(plan(src, dst).svg())
    assert float(root.attrib["width"]) < 1200


def test_groups_of_ranks_say_how_many_ranks_they_are() -> None:
    src = Layout((500,), Mesh(dp=50), "(dp n)")
    text = plan_svg(plan(src, Layout((500,), Mesh(tp=2), "(tp n)")))
    assert ">a row is 3 ranks, 1 of 17 are fewer<" in text and "a column is" not in text


def test_windows_are_drawn_one_below_the_other() -> None:
    src = Layout((8,), Mesh(tp=2), "(tp n)")
    windows = tuple(Layout((8,), Mesh(), f"(n)=<{i}:{i + 2}>") for i in (0, 2, 4, 6))
    text = plan_svg(plan(src, windows))
    assert text.count("(n)=&lt;") >= 3 and "... and 1 more window" in text


LARGE = {
    "16 ranks": ((4096, 11008), Mesh(dp=4, tp=4), "(dp n) (2 tp h)", Mesh(tp=16), "n (tp h)"),
    "512 ranks": (
        (7168, 2048),
        Mesh(dp=64, tp=8),
        "(tp dp n) h",
        Mesh(tp=64, ranks=range(512, 576)),
        "n (tp h)",
    ),
    "cyclic": ((7168, 2048), Mesh(dp=64, tp=8), "(tp dp n) h", Mesh(tp=512), "(n tp 2) h"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_plans_are_small_pictures(name: str) -> None:
    shape, here, spec, there, into = LARGE[name]
    p = plan(Layout(shape, here, spec), Layout(shape, there, into))
    start = time.perf_counter()
    text = plan_svg(p, topology=Topology())
    assert time.perf_counter() - start < 30  # a second on a quiet machine
    assert len(text) < 200_000
    assert np.max(traffic(p).sent.shape) <= 24


FIGURES = [
    "figure",
    "qkv_figure",
    "commit_figure",
    "program_figure",
    "certificate_figure",
    "stored_figure",
    "states_figure",
]


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_pages_are_current(name: str) -> None:
    """`python tools/NAME.py` writes it again."""
    module = load_tool(name)
    assert module.FIGURE.read_text() == module.figure()


def test_the_figures_of_examples_are_current_and_shown() -> None:
    """`python tools/page_figures.py` writes them again."""
    module = load_tool("page_figures")
    for page, figure in module.figures().items():
        assert (module.DOCS / f"{page}.svg").read_text() == figure
        assert f"]({page}.svg)" in (module.DOCS / f"{page}.md").read_text()


def load_tool(name: str) -> Any:
    """A program in tools/, as a module."""
    place = Path(__file__).parents[3] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
