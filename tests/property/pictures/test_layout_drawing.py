"""Pictures of layouts: what is drawn is what the layout says."""

from __future__ import annotations

import itertools
import re
import time
from xml.etree import ElementTree

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardmath import Layout, Mesh, testing, window
from shardmath.display.pictures.cells import Holders
from shardmath.display.pictures.elements import ELEMENT
from shardmath.display.pictures.layout_drawing import HIGH, LEFT, TOP, WIDE, layout_svg

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = st.sampled_from((None, "sum", "max")).flatmap(lambda op: testing.layouts(op=op))


def boxes(text: str) -> list[tuple[tuple[float, ...], str, str]]:
    """(x, y, width, height), fill and title of each cell."""
    out = []
    for found in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        title = found.find(f"{SVG}title")
        if title is not None and re.match(r"\[.*\] ", title.text or ""):
            place = tuple(float(found.attrib[key]) for key in ("x", "y", "width", "height"))
            out.append((place, found.attrib["fill"], title.text or ""))
    return out


def texts(text: str) -> list[str]:
    root = ElementTree.fromstring(text)
    return ["".join(found.itertext()) for found in root.iter(f"{SVG}text")]


def ranks_of(words: str) -> tuple[int, ...]:
    """Ranks, from what a title says."""
    out: list[int] = []
    for word in words.split(", "):
        first, _, last = word.partition("-")
        out += range(int(first), int(last or first) + 1)
    return tuple(out)


def holders_of(who: str) -> Holders:
    """Holders, from what a title says."""
    if who == "nobody":
        return ()
    if who.startswith("rank"):
        return (ranks_of(who.partition(" ")[2]),)
    return tuple(map(ranks_of, re.findall(r"\(([^)]*)\)", who)))


def expected(layout: Layout, index: tuple[int, ...]) -> Holders:
    """Who holds an element."""
    place = layout.mesh.coordinate(name for name, _ in layout.partial).tolist()
    by: dict[int, list[int]] = {}
    for rank, addend in zip(layout.mesh.ranks, place, strict=True):
        if all(i in held for i, held in zip(index, layout.indices(rank), strict=True)):
            by.setdefault(addend, []).append(rank)
    return tuple(tuple(sorted(by[addend])) for addend in sorted(by))


def drawn_at(layout: Layout, place: tuple[float, ...]) -> list[tuple[int, int]]:
    """The (start, stop) of the last two dimensions that a box is drawn at; positions are to scale."""
    x, y, width, height = place
    sizes = [*layout.shape[-2:]]
    left = LEFT if layout.ndim > 1 else 0.0
    across = min(ELEMENT, WIDE / max(sizes[-1] if sizes else 1, 1))
    down = min(ELEMENT, HIGH / max(sizes[0] if len(sizes) > 1 else 1, 1))
    spans = [((y - TOP) / down, (y - TOP + height) / down)]
    spans.append(((x - left) / across, (x - left + width) / across))
    rounded = [(round(start), round(stop)) for start, stop in spans]
    for near, exact in zip(rounded, spans, strict=True):
        assert all(abs(a - b) < 0.01 for a, b in zip(near, exact, strict=True))
    return rounded[2 - len(sizes) :] if sizes else []


@given(LAYOUTS)
def test_boxes_are_where_their_elements_are(layout: Layout) -> None:
    """Read back from the drawing: each element in at most one box, of its holders; every element of a panel in one."""
    seen: dict[tuple[int, ...], Holders] = {}
    leads = set()
    for place, _, title in boxes(layout_svg(layout)):
        inside, _, who = title[1:].partition("] ")
        spans = [tuple(map(int, span.split(":"))) for span in inside.split(", ") if span]
        assert spans[-2:] == drawn_at(layout, place)
        leads.add(tuple(spans[:-2]))
        for index in itertools.product(*(range(*span) for span in spans)):
            assert index not in seen
            seen[index] = holders_of(who)
    for index, holders in seen.items():
        assert holders == expected(layout, index)
    count = sum(
        len(
            list(
                itertools.product(*(range(*span) for span in lead), *map(range, layout.shape[-2:]))
            )
        )
        for lead in leads
    )
    assert len(seen) == count


@given(LAYOUTS, st.data())
def test_windows(layout: Layout, data: st.DataObject) -> None:
    part = window(layout, data.draw(testing.boxes(layout.shape)))
    for place, fill, title in boxes(layout_svg(part)):
        inside, _, who = title[1:].partition("] ")
        first = tuple(int(span.partition(":")[0]) for span in inside.split(", ") if span)
        assert holders_of(who) == expected(part, first)
        assert (fill == "none") == (who == "nobody")
        drawn_at(part, place)


@given(LAYOUTS)
def test_one_color_for_each_set_of_holders(layout: Layout) -> None:
    found: dict[str, set[str]] = {}
    for _, fill, title in boxes(layout_svg(layout)):
        found.setdefault(title.partition("] ")[2], set()).add(fill)
    assert all(len(fills) == 1 for fills in found.values())
    fills = [fill for (fill,) in found.values()]
    assert len(set(fills)) == len(fills)


def test_who_holds_the_same_is_named() -> None:
    hsdp = layout_svg(Layout((8, 6), Mesh(rep=2, dp=2, tp=2), "(dp n) (tp h)"))
    assert {"0, 4", "1, 5", "2, 6", "3, 7"} <= set(texts(hsdp))
    assert "the same along rep: 2 ranks hold each" in texts(hsdp)
    summed = layout_svg(Layout((6, 8), Mesh(dp=2, tp=2), "(dp n) h {sum: tp}"))
    assert {"0 + 1", "2 + 3", "hatched: addends of a sum along tp"} <= set(texts(summed))
    largest = layout_svg(Layout((6, 8), Mesh(dp=2, tp=2), "n h {max: tp}"))
    assert "max(0, 2 | 1, 3)" in texts(largest)


def test_what_boxes_do_not_say() -> None:
    uneven = texts(layout_svg(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")))
    assert "rank 6: nothing" in uneven and "5" in uneven
    padded = layout_svg(Layout((7, 6), Mesh(tp=2), "(tp n)=8 h"))
    assert "rank 1: 4x6" in texts(padded) and padded.count(">hole<") == 1
    assert "no elements" in texts(layout_svg(Layout((0, 4), Mesh(dp=3), "(dp n) h")))
    slices = texts(layout_svg(Layout((9, 2, 2), Mesh(pp=9), "(pp l) n h")))
    assert "[5:6, :, :]" in slices and "... and 3 more slices" in slices


LARGE = {
    "rows": ((4096, 11008), Mesh(dp=4, tp=4), "(tp dp n) h"),
    "both": ((4096, 11008), Mesh(dp=4, tp=4), "(dp n) (2 tp h)"),
    "experts": ((7168, 2048), Mesh(dp=64, tp=8), "(tp dp n) h"),
    "blocks": ((7168, 2048), Mesh(dp=64, tp=8), "(dp n) (tp h)"),
    "cyclic": ((7168, 2048), Mesh(dp=64, tp=8), "(n dp 1) (h tp 1)"),
    "addends": ((7168, 2048), Mesh(dp=64, tp=8), "(n dp 1) h {sum: tp}"),
    "replicas": ((7168, 2048), Mesh(r=64, dp=8), "(n dp 1) h"),
    "slices": ((256, 7168, 2048), Mesh(ep=64, tp=8), "(ep e) (n tp 16) h"),
    "many": ((65536,), Mesh(dp=16384), "(dp n)"),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_layouts_are_small_pictures(name: str) -> None:
    layout = Layout(LARGE[name][0], LARGE[name][1], LARGE[name][2])
    start = time.perf_counter()
    text = layout_svg(layout)
    assert time.perf_counter() - start < 20  # a tenth of a second on a quiet machine
    assert len(text) < 200_000
    for _, fill, title in boxes(text)[:50]:
        inside, _, who = title[1:].partition("] ")
        first = tuple(int(span.partition(":")[0]) for span in inside.split(", "))
        if "..." not in who:
            coords = [layout.runs(rank) for rank in holders_of(who)[0]]
            assert fill != "none" and coords
            for runs in coords:
                held = zip(first, runs, strict=True)
                assert all(any(g <= i < g + n for _, g, n in one.segments) for i, one in held)


@pytest.mark.parametrize(
    ("shape", "text", "numbered"),
    [((4096,), "(dp n)", 8), ((8192, 4096), "(dp n) h", 32), ((8192, 4096), "(16 n) (dp h)", 8)],
)
def test_boxes_without_room_are_numbered_now_and_then(
    shape: tuple[int, ...], text: str, numbered: int
) -> None:
    root = ElementTree.fromstring(layout_svg(Layout(shape, Mesh(dp=512), text)))
    texts = list(root.iter(f"{SVG}text"))
    labels = [one for one in texts if one.attrib.get("paint-order") == "stroke"]
    assert len(labels) >= numbered
    assert any((one.text or "").startswith("numbers are ranks, in one box of ") for one in texts)


def test_what_is_left_out_is_said() -> None:
    text = layout_svg(Layout((7168, 2048), Mesh(dp=64, tp=8), "(n dp 1) (h tp 1)"))
    assert "gap: rows 12 to 7,155 are not drawn" in texts(text)
    assert "gap: columns 12 to 2,035 are not drawn" in texts(text)


def test_the_picture_says_what_it_is() -> None:
    layout = Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")
    root = ElementTree.fromstring(layout_svg(layout))
    assert root.attrib["role"] == "img"
    assert root[0].text == str(layout)
    assert (root[1].text or "").startswith("rank 0 holds [0:2] by [0:4]; rank 1 holds [5:6] by")
    many = ElementTree.fromstring(layout_svg(Layout((64,), Mesh(dp=64), "(dp n)")))
    assert (many[1].text or "").endswith("; and 48 more ranks")
