"""Traces: no two spans of a track overlap; files say the same again, and viewers can read them; clocks are aligned."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, ShardError, Topology, plan, schedule
from shardmath.base.text import show_seconds
from shardmath.display import cli
from shardmath.display.traces.chrome import spell
from shardmath.display.traces.drawing import COLORS
from shardmath.traces import Clock, Span, Trace, TraceRank, Vote, merge, model, read, svg, write

SVG = "{http://www.w3.org/2000/svg}"
TRACKS = ("moves", "phases", "rounds", "work", "to 3", "from 0", "rounds in worker")
ABOUT = st.dictionaries(st.sampled_from(("bytes", "for", "é")), st.integers(0, 9) | st.text())


@st.composite
def traces(draw: st.DrawFn, places: st.SearchStrategy[TraceRank] | None = None) -> Trace:
    """Spans of whole nanoseconds, those of a track one after another."""
    some = places or st.builds(TraceRank, st.integers(0, 3), st.booleans())
    spans = []
    for place, track in draw(
        st.lists(st.tuples(some, st.sampled_from(TRACKS)), max_size=6, unique=True)
    ):
        at = draw(st.integers(-(10**6), 10**12))
        for gap, lasting in draw(
            st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 10**7)), max_size=4)
        ):
            at += gap
            link = draw(st.sampled_from(("", "1:2 0>3", "é")))
            name = draw(st.text(max_size=9))
            spans.append(Span(place, track, name, at / 1e9, lasting / 1e9, draw(ABOUT), link))
            at += lasting
    clock = draw(
        st.none() | st.builds(Clock, st.integers(0, 9), st.text(), st.integers(), st.just(()))
    )
    return Trace(tuple(spans), clock, draw(st.integers(0, 3)))


def in_ns(trace: Trace) -> object:
    """The trace with times in whole nanoseconds."""
    spans = [
        (
            s.place,
            s.track,
            s.name,
            round(s.begin_s * 1e9),
            round(s.end_s * 1e9),
            dict(s.about),
            s.link,
        )
        for s in trace.spans
    ]
    return spans, trace.clock, trace.left_out


def test_spans_of_one_track_do_not_overlap() -> None:
    first = Span(TraceRank(0), "work", "packing", 1.0, 2.0)
    after = first._replace(begin_s=3.0)
    beside = first._replace(track="phases")
    assert len(Trace((after, first, beside)).spans) == 3
    with pytest.raises(
        ShardError, match=r"'posting' begins at .* s, before 'packing' ends at .* s, both on track"
    ):
        Trace((after, first, first._replace(name="posting", begin_s=2.5)))


# Files


@given(traces())
def test_what_is_written_is_read_again(tmp_path_factory: Any, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    write(trace, path)
    assert in_ns(read(path)) == in_ns(trace)


@given(traces())
def test_a_file_has_what_the_format_asks_for(trace: Trace) -> None:
    """Required fields by phase, numbers of threads that no two places share, names, arrows that go forward."""
    given_ = json.loads(spell(trace))
    # Perfetto reads up to the first key that it does not know.
    assert list(given_) == ["displayTimeUnit", "traceEvents", "shardmath"]
    events = given_["traceEvents"]
    named: dict[int, int] = {}
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        assert {"ph", "pid", "name"} <= set(event) and 0 <= event["pid"] < 1 << 31
        if event["ph"] == "M":
            assert event["name"] in {
                f"{what}_{told}"
                for what in ("process", "thread")
                for told in ("name", "sort_index")
            }
            if "tid" in event:
                assert named.setdefault(event["tid"], event["pid"]) == event["pid"]
            continue
        assert named[event["tid"]] == event["pid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] in "sf" and isinstance(event["id"], int) and event["id"] < 1 << 53
            assert event["ph"] == "s" or event["bp"] == "e"
            begin, end = tracks[event["tid"]][-1]
            assert begin <= event["ts"] <= end
    assert Counter(e["ph"] for e in events)["X"] == len(trace.spans)
    for spans in tracks.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(spans))


WRONG = {
    "": "Expecting value",
    "[]": "TypeError",
    "{}": "KeyError",
    '{"shardmath": {"version": 2, "left_out": 0}, "traceEvents": []}': "has version 2, this shardmath reads 1",
    '{"shardmath": {"version": 1, "left_out": -1}, "traceEvents": []}': "-1 is negative",
    '{"shardmath": {"version": 1, "left_out": 0}, "traceEvents": [1]}': "TypeError",
    '{"shardmath": {"version": 1, "left_out": 0, "clock": [0, 1, 2, []]}, "traceEvents": []}': "not a text",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ShardError, match=WRONG[text]):
        read(tmp_path / "x.json")


@given(traces(), st.data())
@example(Trace((Span(TraceRank(0), "work", "x", 0.0, 1.0),)), None)
def test_what_is_damaged_is_a_trace_or_refused(
    tmp_path_factory: Any, trace: Trace, data: st.DataObject | None
) -> None:
    """Nothing else is raised, whatever is changed in the file."""
    text = spell(trace)
    at = data.draw(st.integers(0, len(text) - 1)) if data else text.index('"ts":0.0') + 5
    instead = (
        data.draw(st.sampled_from(("", "0", '"', "{", "null", "1e999", "[]"))) if data else "NaN"
    )
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    path.write_text(text[:at] + instead + text[at + 1 :])
    with contextlib.suppress(ShardError):
        assert isinstance(read(path), Trace)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"cannot read .*none\.json"):
        read(tmp_path / "none.json")
    with pytest.raises(ShardError, match=r"cannot write .*none/a\.json"):
        write(Trace(()), tmp_path / "none" / "a.json")


# Clocks


def measured(
    machines: list[str],
    votes: dict[str, list[int]],
    at: dict[str, float],
    ahead_s: dict[str, float],
) -> list[Trace]:
    """A trace of each rank on a machine whose clock is so far ahead: a span for each vote, from when it was left on."""
    found = []
    for rank, machine in enumerate(machines):
        began = 50.0 + 0.25 * rank
        mine = {name: at[name] - began for name, ranks in votes.items() if rank in ranks}
        spans = [Span(TraceRank(rank), "moves", name, when, 1e-3) for name, when in mine.items()]
        left = tuple(Vote(name, when) for name, when in mine.items())
        clock = Clock(rank, machine, round((began + ahead_s[machine]) * 1e9), left)
        found.append(Trace(tuple(spans), clock))
    return found


AHEAD = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.data())
def test_clocks_of_machines_are_aligned(data: st.DataObject) -> None:
    """However far clocks are ahead of each other, where machines vote with each other, directly or by others."""
    machines = data.draw(st.lists(st.sampled_from("abc"), min_size=2, max_size=6))
    count = len(machines)
    everyone = list(range(count))
    votes = {f"{i}": [i, i + 1] for i in range(count - 1)}
    votes |= data.draw(st.sampled_from([{}, {"all": everyone}]))
    at = {name: 100.0 + 0.5 * i for i, name in enumerate(votes)}
    ahead = {machine: data.draw(AHEAD) for machine in "abc"}
    given_ = measured(machines, votes, at, ahead)
    merged = merge(data.draw(st.permutations(given_)))
    first = min(at.values())
    assert len(merged.spans) == sum(map(len, votes.values()))
    for span in merged.spans:
        assert abs(span.begin_s - (at[span.name] - first)) < 1e-6


def test_clocks_of_one_machine_are_left_alone() -> None:
    """Also where its ranks noticed the end of a vote at different times."""
    spans = [Span(TraceRank(rank), "moves", "move 1", 1.0 + rank, 0.5) for rank in (0, 1)]
    clocks = [Clock(rank, "a", 0, (Vote("1", 1.0 + rank),)) for rank in (0, 1)]
    merged = merge(Trace((span,), clock) for span, clock in zip(spans, clocks, strict=True))
    assert [span.begin_s for span in merged.spans] == [0.0, 1.0]


def test_machines_that_never_voted_together_keep_their_time_of_day() -> None:
    given_ = measured(
        ["a", "b"], {"1": [0], "2": [1]}, {"1": 100.0, "2": 107.0}, {"a": 0.0, "b": 0.0}
    )
    assert [round(span.begin_s, 6) for span in merge(given_).spans] == [0.0, 7.0]


def test_what_cannot_be_merged_is_refused() -> None:
    one, two = measured(["a", "a"], {"1": [0, 1]}, {"1": 100.0}, {"a": 0.0})
    with pytest.raises(ShardError, match="two traces are of rank 0"):
        merge([one, one])
    with pytest.raises(ShardError, match="without a clock"):
        merge([merge([one, two]), two])
    assert merge([]).spans == ()


@given(traces())
def test_calls_that_were_left_out_are_counted(trace: Trace) -> None:
    clocks = [Clock(rank, "a", 0) for rank in (0, 1)]
    first, second = (
        Trace(
            tuple(
                s._replace(place=TraceRank(clock.rank, s.place.is_model)) for s in trace.spans[:1]
            ),
            clock,
            trace.left_out,
        )
        for clock in clocks
    )
    assert merge([first, second]).left_out == 2 * trace.left_out


# Pictures


@given(traces())
def test_a_picture_is_a_document_with_a_row_for_each_track(trace: Trace) -> None:
    shown = {(s.place, s.track) for s in trace.spans if s.track in ("phases", "work", "rounds")}
    if not shown:
        with pytest.raises(ShardError, match="has none of the tracks"):
            svg(trace)
        return
    root = ElementTree.fromstring(svg(trace))
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {f"{place} {track}" for place, track in shown} <= texts


def _luminance(color: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    values = [channel / 255 for channel in bytes.fromhex(color[1:])]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("kind", COLORS)
def test_bars_are_seen_on_a_dark_background(kind: str) -> None:
    """WCAG asks for a contrast of 3 to 1; the background is the one of a standalone picture."""
    assert (_luminance(COLORS[kind]) + 0.05) / (_luminance("#0d1117") + 0.05) >= 3


def test_bars_lie_where_their_times_are() -> None:
    """The second half of the time is the second half of the axis."""
    spans = [
        Span(TraceRank(0), "phases", name, i * 2.0, 2.0)
        for i, name in enumerate(("agreeing", "moving"))
    ]
    root = ElementTree.fromstring(svg(Trace(tuple(spans))))
    bars = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    first, second = (float(bar.attrib["x"]) for bar in bars)
    assert abs((second - first) - 420) < 0.01
    assert [bar.find(f"{SVG}title").text for bar in bars] == ["agreeing: 2 s", "moving: 2 s"]  # type: ignore[union-attr]


def test_many_short_spans_are_one_bar() -> None:
    short = [Span(TraceRank(0), "work", "posting", i * 1e-6, 1e-6) for i in range(20_000)]
    root = ElementTree.fromstring(
        svg(Trace((*short, Span(TraceRank(0), "work", "packing", 0.02, 0.1))))
    )
    bars = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(bars) < 600


def test_more_rows_than_are_drawn() -> None:
    spans = tuple(Span(TraceRank(rank), "phases", "moving", 0.0, 1.0) for rank in range(200))
    assert "72 more rows are left out" in svg(Trace(spans))


def test_a_row_too_short_to_be_seen_says_its_time() -> None:
    """The model of fast links, below a move over slow ones."""
    moved = Span(TraceRank(0), "rounds", "round 1", 0.0, 0.1)
    modeled = Span(TraceRank(0, is_model=True), "rounds", "round 1", 0.0, 20e-6)
    root = ElementTree.fromstring(svg(Trace((moved, modeled))))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert show_seconds(20e-6) in texts


def test_what_is_no_trace_has_no_picture() -> None:
    with pytest.raises(ShardError, match="is not a Trace"):
        svg("trace.json")  # type: ignore[arg-type]


# The command


def test_the_command_merges_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for i, trace in enumerate(
        measured(["a", "b"], {"1": [0, 1]}, {"1": 100.0}, {"a": 0.0, "b": 9.0})
    ):
        files.append(str(tmp_path / f"{i}.json"))
        write(trace, files[-1])
    out, picture = tmp_path / "all.json", tmp_path / "all.svg"
    assert cli.main(["trace", *files, "--out", str(out)]) == 0
    assert [span.begin_s for span in read(out).spans] == [0.0, 0.0]
    assert "2 spans of 2 places" in capsys.readouterr().out
    assert cli.main(["trace", str(out), "--svg", str(picture)]) == 1
    assert "has none of the tracks" in capsys.readouterr().err
    p = plan(Layout((8,), Mesh(a=2), "(a n)"), Layout((8,), Mesh(a=2), "n"))
    write(model(schedule(p, topology=Topology())), out)
    assert cli.main(["trace", str(out), "--svg", str(picture)]) == 0
    ElementTree.fromstring(picture.read_text())
    assert cli.main(["trace", str(tmp_path / "none.json")]) == 1
    assert "cannot read" in capsys.readouterr().err
