"""Pictures of flat buffers: what they say is what `state_store` and counting say; what they leave out, they count."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Mesh, ParamLayoutError, buffers
from shardmath.buffers import SHARD, FullParamLayout, Param, PerBufferParamLayout
from shardmath.display.pictures.buffer_drawing import LEFT, RIGHT, buffer_svg
from shardmath.display.pictures.buffer_text import KEY, buffer_map
from shardmath.display.pictures.text import buffer_table

RULES = (buffers.distributed_optimizer, buffers.layer_wise, buffers.zero)
SVG = "{http://www.w3.org/2000/svg}"

FOUR = (
    Param("model.embed.weight", (50, 10), shared_embedding=True),
    Param("model.up.weight", (40, 20)),
    Param("model.norm.weight", (20,)),
    Param("head.weight", (50, 10)),
)
EMPTY = PerBufferParamLayout()


def four(ranks: int = 3) -> PerBufferParamLayout:
    return buffers.distributed_optimizer(FOUR, data_parallel_world_size=ranks, bucket_size=600)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[PerBufferParamLayout, int]:
    """A layout by some rule, and its ranks."""
    sizes = draw(st.lists(st.integers(0, 700), min_size=1, max_size=8))
    params = [
        Param(f"p{i}", (n,), shared_embedding=draw(st.booleans())) for i, n in enumerate(sizes)
    ]
    rule, ranks = draw(st.sampled_from(RULES)), draw(st.integers(1, 9))
    more = {} if rule is buffers.zero else {"bucket_size": draw(st.none() | st.integers(1, 900))}
    return rule(params, data_parallel_world_size=ranks, **more), ranks


def listed(text: str) -> dict[str, tuple[str, str, int]]:
    """What the map says of parameters: where each lies, its ranks, and where in the first one's flat array."""
    rows = re.findall(
        r"^[a-zA-Z]  (\[[\d,]+, [\d,]+\)) +(none|[\d-]+) +([\d,]+) +\(.*?\) +(.*)$", text, re.M
    )
    return {name: (span, ranks, int(at.replace(",", ""))) for span, ranks, at, name in rows}


# Text


def test_four_parameters() -> None:
    assert buffer_map(four(), 3, width=48).splitlines() == [
        "4 parameters in 2 buckets: 2,304 elements, 484 of them padding (21.01 %)",
        "3 ranks have 768 elements each; least padding: 12 on rank 0, most: 416 on rank 2",
        "bucket with the largest share of padding: 1, 34.90 %",
        KEY,
        "",
        "bucket 0 [0, 1,536): 3 parameters, 216 padding (14.06 %)",
        "     |0               |1               |2               |",
        "     |aaaaaaaaaaaaaaaa|b.cccccccccccccc|ccccccccccc.....|",
        "   elements      ranks  at  shape     parameter",
        "a  [0, 500)      0      0   (50, 10)  head.weight",
        "b  [512, 532)    1      0   (20,)     model.norm.weight",
        "c  [576, 1,376)  1-2    64  (40, 20)  model.up.weight",
        "",
        "bucket 1 [1,536, 2,304): 1 parameter, 268 padding (34.90 %)",
        "     |0               |1               |2               |",
        "     |aaaaaaaaaaaaaaaa|aaaaaaaaaaaaaaa.|................|",
        "   elements        ranks  at   shape     parameter",
        "a  [1,536, 2,036)  0-1    512  (50, 10)  model.embed.weight",
    ]


@given(laid_out())
@example((four(), 3))
def test_the_map_says_what_the_store_says(case: tuple[PerBufferParamLayout, int]) -> None:
    layout, ranks = case
    mesh = Mesh(dp=ranks)
    flat, store = buffers.state_layouts(layout, mesh), buffers.state_store(layout, mesh)
    found = listed(buffer_map(layout, ranks, most=60))
    assert found.keys() == layout.param_index_map.keys()
    for name, (start, end, _) in layout.placed:
        span, held_by, at = found[name]
        assert span == f"[{start:,}, {end:,})"
        have = [rank for rank in range(ranks) if math.prod(flat[name].local_shape(rank))]
        assert held_by == (
            "none" if not have else "-".join(map(str, dict.fromkeys((have[0], have[-1]))))
        )
        if have:
            place = store.place(name, flat[name], have[0])
            assert (place.buffer, place.offset) == (SHARD, at)


def brute_padding(layout: PerBufferParamLayout, ranks: int) -> list[int]:
    """Element by element: what of each rank's shards is no parameter's."""
    owned = {i for _, (start, end, _) in layout.placed for i in range(start, end)}
    return [
        sum(
            i not in owned
            for span in buffers.shard_ranges(layout, ranks, rank)
            for i in range(*span)
        )
        for rank in range(ranks)
    ]


@given(laid_out())
def test_padding_is_counted(case: tuple[PerBufferParamLayout, int]) -> None:
    layout, ranks = case
    text, by_rank = buffer_map(layout, ranks), brute_padding(layout, ranks)
    assert f"{layout.numel:,} elements, {layout.padding:,} of them padding" in text
    if ranks > 1 and len(set(by_rank)) > 1:
        least, most = (by_rank.index(f(by_rank)) for f in (min, max))
        assert (
            f"least padding: {by_rank[least]:,} on rank {least}, most: {by_rank[most]:,} on rank {most}"
            in text
        )
    elif ranks > 1:
        assert f"each, {by_rank[0]:,} of them padding" in text


@given(laid_out(), st.integers(16, 130))
def test_bars_are_as_wide_as_asked(case: tuple[PerBufferParamLayout, int], width: int) -> None:
    layout, ranks = case
    bars = [
        line[6:-1]
        for line in buffer_map(layout, ranks, width=width).splitlines()
        if line.startswith("     |")
    ]
    each = width // ranks
    wide = (each + 1) * ranks - 1 if each >= 4 else width
    assert {len(bar) for bar in bars} <= {wide} and len(bars) == 2 * min(
        8, len(layout.bucket_indices)
    )


def test_many_ranks_are_numbered_where_there_is_room() -> None:
    layout = buffers.zero([Param("w", (1024,))], data_parallel_world_size=256)
    ruler, bar = buffer_map(layout, 256, width=32).splitlines()[5:7]
    assert (ruler, bar) == ("     |0       |64     |128    |192    |", f"     |{'a' * 32}|")


def test_a_large_buffer_is_cut_short() -> None:
    params = [Param(f"layers.{i}.w", (64, 2)) for i in range(45_337)]
    layout = buffers.distributed_optimizer(params, data_parallel_world_size=8, bucket_size=12_800)
    text = buffer_map(layout, 8, most=3)
    assert (
        text.endswith("\n... and 451 more buckets")
        and text.count("... and 97 more parameters") == 3
    )
    assert len(text.splitlines()) < 40
    one = buffer_map(buffers.zero(params, data_parallel_world_size=8), 8, most=2)
    assert one.endswith("... and 45,335 more parameters") and "more bucket" not in one


def test_the_largest_have_letters_and_others_take_turns() -> None:
    layout = buffers.data_parallel([Param("a", (8,)), Param("b", (16,)), Param("c", (8,))])
    lines = buffer_map(layout, 1, width=16, most=1).splitlines()
    assert lines[6] == "     |####aaaaaaaa####|" and lines[8].split()[-1] == "b"
    assert lines[-1] == "... and 2 more parameters"
    pair = buffers.data_parallel([Param("a", (8,)), Param("b", (8,)), Param("c", (16,))])
    assert buffer_map(pair, 1, width=16, most=1).splitlines()[6] == "     |aaaaaaaa====####|"


def test_one_rank_and_unknown_shapes() -> None:
    layout = PerBufferParamLayout({"w": (0, 4, 0)}, [(0, 4)], [4])
    assert buffer_map(layout, 1).splitlines()[1] == "1 rank has 4 elements"
    assert buffer_map(layout, 1).splitlines()[-1].split() == ["a", "[0,", "4)", "0", "0", "?", "w"]


def test_an_empty_buffer() -> None:
    assert buffer_map(EMPTY, 4).splitlines()[0] == (
        "0 parameters in 0 buckets: 0 elements, 0 of them padding (0.00 %)"
    )
    hollow = buffers.data_parallel([Param("none", (0, 3))])
    assert listed(buffer_map(hollow, 1)) == {"none": ("[0, 0)", "none", 0)}
    assert len(boxes(buffer_svg(hollow, 1))) == 0


# The table


def test_the_table() -> None:
    params = [*FOUR, Param("experts.0.w", (7, 5), expert_parallel=True, grad_dtype="float32")]
    layouts = buffers.full_layout(params, rule=buffers.layer_wise, data_parallel_world_size=2)
    lines = buffer_table(layouts).splitlines()
    assert lines[0].split() == [
        "dtype", "gradients", "expert", "managed", "parameters", "buckets", "elements", "padding", "share", "bytes"
    ]  # fmt: skip
    rows = {tuple(line.split()[:4]): line.split()[4:] for line in lines[1:]}
    assert rows["bfloat16", "float32", "yes", "yes"] == [
        "1",
        "1",
        "128",
        "93",
        "72.66",
        "%",
        "512",
        "B",
    ]
    for key, one in layouts.items():
        marks = (key.is_expert_parallel, key.is_managed_by_layer_wise_optimizer)
        found = rows[key.param_dtype, key.grad_dtype, *("yes" if mark else "no" for mark in marks)]
        counts = (len(one.placed), len(one.bucket_indices), one.numel, one.padding)
        assert found[:4] == [f"{n:,}" for n in counts]
    assert lines[-1].split()[:2] == ["all", "5"]


def test_one_buffer_needs_no_sum() -> None:
    layouts = buffers.full_layout(FOUR, rule=buffers.data_parallel)
    assert len(buffer_table(layouts).splitlines()) == 2
    assert len(buffer_table(FullParamLayout({})).splitlines()) == 1


# SVG


def boxes(text: str) -> list[tuple[float, float, float, str, str]]:
    """x, y, width, fill and title of every box of a row."""
    out = []
    for box in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            x, y, wide = (float(box.attrib[key]) for key in ("x", "y", "width"))
            out.append((x, y, wide, box.attrib["fill"], title.text or ""))
    return out


def texts(text: str) -> list[str]:
    return ["".join(found.itertext()) for found in ElementTree.fromstring(text).iter(f"{SVG}text")]


def rows_of(
    found: Sequence[tuple[float, float, float, str, str]],
) -> dict[float, list[tuple[float, float, str, str]]]:
    rows: dict[float, list[tuple[float, float, str, str]]] = {}
    for x, y, *rest in found:
        rows.setdefault(y, []).append((x, *rest))
    return rows


def test_the_picture_of_four_parameters() -> None:
    text = buffer_svg(four(), 3, title="four & <more>")
    said = texts(text)
    assert (
        said[0] == "four & <more>"
        and "4 parameters in 2 buckets: 2,304 elements, 484 of them padding" in said[1]
    )
    assert {
        "bucket 0",
        "bucket 1",
        "0",
        "1",
        "2",
        "14.06 % padding",
        "34.90 % padding",
        "padding",
    } <= set(said)
    assert {"head", "model.up", "model.embed"} <= set(said)
    titles = [title for *_, title in boxes(text)]
    assert "model.up.weight (40, 20)\n800 elements at [576, 1,376), ranks 1-2" in titles
    assert "padding\n268 elements at [2,036, 2,304), ranks 1-2" in titles
    assert sum(title.startswith("padding") for title in titles) == 4
    paths = {found.attrib["d"] for found in ElementTree.fromstring(text).iter(f"{SVG}path")}
    assert [path.count("M") for path in paths if "V" in path] == [2]


def test_the_picture_is_self_contained() -> None:
    text = buffer_svg(four(), 3)
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.attrib["role"] == "img" and root[0].tag == f"{SVG}title"
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|<script|@import|//(?!www\.w3\.org/2000/svg)", text)
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


@given(laid_out())
def test_boxes_fill_every_row(case: tuple[PerBufferParamLayout, int]) -> None:
    """Side by side, without a gap, whatever was merged."""
    layout, ranks = case
    for row in rows_of(boxes(buffer_svg(layout, ranks, width=700))).values():
        room, at = 700 - LEFT - RIGHT, float(LEFT)
        for x, wide, _, _ in row:
            assert abs(x - at) < 0.76
            at = x + wide
        assert abs(at - LEFT - room) < 0.76


def test_narrow_parameters_are_drawn_as_one_up_to_a_border() -> None:
    params = [Param(f"layers.{i}.norm", (64,)) for i in range(4000)]
    layout = buffers.distributed_optimizer(params, data_parallel_world_size=4)
    found = boxes(buffer_svg(layout, 4))
    assert len(found) == 4
    assert found[0][4].splitlines() == [
        "1,000 parameters: layers.3999.norm",
        "... layers.3000.norm",
        "64,000 elements at [0, 64,000), rank 0",
    ]
    assert texts(buffer_svg(layout, 4)).count("1,000 parameters") == 4


def test_borders_of_many_ranks_are_fewer() -> None:
    layout = buffers.zero([Param("w", (2048,))], data_parallel_world_size=1024)
    assert "border, every 8 ranks" in texts(buffer_svg(layout, 1024))
    fewer = buffers.zero([Param("w", (2048,))], data_parallel_world_size=64)
    assert "border between ranks" in texts(buffer_svg(fewer, 64))


def test_narrow_padding_is_counted_where_it_is_hidden() -> None:
    params = [Param(f"p{i}", (60,)) for i in range(4000)]
    (box,) = boxes(buffer_svg(buffers.distributed_optimizer(params, data_parallel_world_size=1), 1))
    assert box[4].endswith("rank 0\n16,000 of them padding")


def test_names_are_escaped() -> None:
    name = '<w> & "q" \'\x00\ud800é'
    layout = buffers.data_parallel([Param(name, (4,))])
    text = buffer_svg(layout, 1, title=name)
    assert boxes(text)[0][4].startswith('<w> & "q" \'��é (4,)')
    assert texts(text)[0] == '<w> & "q" \'��é'
    text.encode()


def test_labels_are_as_long_as_there_is_room() -> None:
    names = [f"model.layers.{i}.experts.17.down_proj.weight" for i in range(6)]
    layout = buffers.data_parallel([Param(name, (64,)) for name in names])
    assert texts(buffer_svg(layout, 1)).count("…17.down_proj") == 6
    assert "model.layers.5.experts.17.down_proj" in texts(buffer_svg(layout, 1, width=2200))


def test_buckets_beyond_the_first_are_counted() -> None:
    layout = buffers.data_parallel([Param(f"p{i}", (4,)) for i in range(20)], bucket_size=4)
    text = buffer_svg(layout, 1, most=3)
    assert len(boxes(text)) == 3 and texts(text)[-1] == "... and 17 more buckets"
    assert ElementTree.fromstring(buffer_svg(EMPTY, 2)).tag == f"{SVG}svg"


# Errors


@pytest.mark.parametrize("draw", [buffer_map, buffer_svg])
@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        (0, {}, "shards is 0; give at least 1"),
        (5, {}, "the buffer is laid out for 3 ranks, 5 share it"),
        (3, {"width": 3}, r"width is 3; give at least \d+"),
        (3, {"most": 0}, "most .* is 0; give at least 1"),
    ],
)
def test_errors(draw: object, shards: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ParamLayoutError, match=message):
        draw(four(), shards, **options)  # type: ignore[operator]


def test_one_buffer_is_not_all() -> None:
    layouts = buffers.full_layout(FOUR, rule=buffers.data_parallel)
    with pytest.raises(
        ParamLayoutError, match="FullParamLayout is not a PerBufferParamLayout; pass each value"
    ):
        buffer_map(layouts, 1)  # type: ignore[arg-type]
    with pytest.raises(
        ParamLayoutError,
        match="PerBufferParamLayout is not a FullParamLayout; pass the result of full_",
    ):
        buffer_table(four())  # type: ignore[arg-type]


def test_names_are_on_one_line() -> None:
    layout = buffers.zero([Param("a\nb\tc", (4,))], data_parallel_world_size=1)
    assert buffer_map(layout, 1).endswith("a  [0, 4)    0      0   (4,)   a b c")
