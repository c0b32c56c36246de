"""Chrome: traces as files in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

1. A place is a process, a track is a thread, and a span is an event of phase "X"; times are microseconds with three
   decimals. A measured rank stands above its model.
2. A link between two spans is drawn as an arrow from the sending end to the receiving end.
3. The key "shardmath" has data that the format cannot express: the clock and the votes.
4. `read` accepts only files that `write` wrote.

The format is Google's "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU),
as Perfetto reads it (src/trace_processor/importers/json). Perfetto stops at the first unknown key next to the events,
so our key comes last. It identifies threads only by number, so numbers are unique across places. Arrows are identified
by integers.

>>> span = Span(TraceRank(3), "moves", "move 1", 0.5e-3, 1e-3)
>>> print(spell(Trace((span,))))
{"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","pid":3,"name":"process_name","args":{"name":"rank 3"}},
{"ph":"M","pid":3,"name":"process_sort_index","args":{"sort_index":6}},
{"ph":"M","pid":3,"tid":536870912,"name":"thread_name","args":{"name":"moves"}},
{"ph":"M","pid":3,"tid":536870912,"name":"thread_sort_index","args":{"sort_index":536870912}},
{"ph":"X","pid":3,"tid":536870912,"name":"move 1","cat":"rank","ts":500.0,"dur":1000.0,"args":{}}
],"shardmath":{"version":1,"left_out":0}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

from shardmath.base.digest import BROKEN
from shardmath.base.errors import ShardError
from shardmath.base.text import message_of, word_error
from shardmath.display.traces.spans import Clock, Span, Trace, TraceRank, Vote

__all__ = ["read", "spell", "write", "write_text"]

VERSION = 1

MODELED = 1 << 30
"""Added to a rank to number its model's process: numbers of processes have 31 bits, ranks at most 24."""

FIRST_THREAD = 1 << 29
"""The number of the first track: a thread with its process's number would be shown first, as the main thread."""

DECIMALS = 3
"""Decimals of times in microseconds."""

LINK = "link"

LINK_BYTES = 6
"""Bytes of the numbers of links: JavaScript's integers have 53 bits."""

LEAST_US = 0.001
"""Microseconds before the end of a span at which an arrow ends, so as to be inside the span."""

Event: TypeAlias = dict[str, Any]

_Numbers: TypeAlias = dict[tuple[TraceRank, str], int]
"""The thread of each track."""


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace to the file `path` as JSON for trace viewers such as Perfetto. Raises ShardError if that
    fails."""
    write_text(spell(trace), path)


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write the text to the file `path`. Raises ShardError if that fails."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        what = f"cannot write {os.fspath(path)}: {message_of(error)}"
        raise ShardError(f"{what}; pass a path in a folder that exists") from error


def spell(trace: Trace) -> str:
    """The trace as JSON text for trace viewers, one event per line."""
    numbers = _number_tracks(trace)
    events = [*_name_places(numbers)]
    for span in trace.spans:
        events += _make_events(span, numbers)
    rows = ",\n".join(map(_to_json, events))
    metadata = _to_json(_make_metadata(trace))
    return f'{{"displayTimeUnit":"ms","traceEvents":[\n{rows}\n],"shardmath":{metadata}}}'


def _to_json(value: object) -> str:
    """The value as JSON on one line."""
    return json.dumps(value, separators=(",", ":"))


def _make_metadata(trace: Trace) -> Event:
    """The version, the clock and the count of left-out calls."""
    metadata: Event = {"version": VERSION, "left_out": trace.left_out}
    clock = trace.clock
    if clock is not None:
        votes = [[vote.name, round(vote.at_s * 1e9)] for vote in clock.votes]
        metadata["clock"] = [clock.rank, clock.machine, clock.began_ns, votes]
    return metadata


def _number_tracks(trace: Trace) -> _Numbers:
    """The thread number of each track, in the order in which tracks first appear."""
    tracks = dict.fromkeys((span.place, span.track) for span in trace.spans)
    return {track: number for number, track in enumerate(tracks, FIRST_THREAD)}


def _find_process(place: TraceRank) -> int:
    return place.rank + MODELED * place.is_model


def _name_places(numbers: _Numbers) -> Iterator[Event]:
    """Events that name places and tracks, and set their order."""
    named = set()
    for (place, track), number in numbers.items():
        process = {"ph": "M", "pid": _find_process(place)}
        if place not in named:
            named.add(place)
            # The model of a rank stands right below what was measured.
            order = 2 * place.rank + place.is_model
            yield from _make_names(process, "process", str(place), order)
        yield from _make_names(process | {"tid": number}, "thread", track, number)


def _make_names(where: Event, what: str, name: str, order: int) -> Iterator[Event]:
    yield where | {"name": f"{what}_name", "args": {"name": name}}
    yield where | {"name": f"{what}_sort_index", "args": {"sort_index": order}}


def _make_events(span: Span, numbers: _Numbers) -> Iterator[Event]:
    """The event of a span, and the event of its end of an arrow if it has a link."""
    where = {"pid": _find_process(span.place), "tid": numbers[span.place, span.track]}
    about = dict(span.about)
    if span.link:
        about[LINK] = span.link
    begin = _count_us(span.begin_s)
    # Round the end, not the duration, so that no span ends later than the next one begins.
    end = _count_us(span.end_s)
    duration = round(end - begin, DECIMALS)
    yield {
        "ph": "X",
        **where,
        "name": span.name,
        "cat": "model" if span.place.is_model else "rank",
        "ts": begin,
        "dur": duration,
        "args": about,
    }
    if span.link:
        yield {**_make_arrow(span, begin, duration), **where}


def _make_arrow(span: Span, begin: float, duration: float) -> Event:
    """An end of an arrow, which Perfetto binds to the span at the same time. Phase "s" is where an arrow starts, "f"
    where it finishes; "bp": "e" binds the finish to the span around it."""
    link_digest = blake2b(span.link.encode(), digest_size=LINK_BYTES).digest()
    arrow: Event = {"name": "message", "cat": LINK, "id": int.from_bytes(link_digest)}
    if span.track.startswith("to "):
        return {"ph": "s", "ts": begin, **arrow}
    # A receive may be posted before its message is sent, but an arrow must go forward in time.
    inside = max(duration - LEAST_US, 0)
    last = round(begin + inside, DECIMALS)
    return {"ph": "f", "bp": "e", "ts": last, **arrow}


def _count_us(seconds: float) -> float:
    return round(seconds * 1e6, DECIMALS)


# Reading


def read(path: str | os.PathLike[str]) -> Trace:
    """Return the Trace that `write` wrote to the file `path`. Raises ShardError for any other file."""
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read {name}: {message_of(error)}"
        raise ShardError(f"{what}; pass a file that smt.trace wrote") from error
    try:
        return _parse(json.loads(text))
    except ShardError:
        raise
    except BROKEN as error:
        what = f"{name} is not a trace that shardmath wrote"
        why = word_error(error)
        raise ShardError(f"{what} ({why}); pass a file that smt.trace wrote") from error


def _parse(given: Any) -> Trace:
    """The trace. Raises an exception of any class for anything that `write` does not write."""
    metadata = given["shardmath"]
    if metadata["version"] != VERSION:
        what = f"the trace has version {metadata['version']!r}, this shardmath reads {VERSION}"
        raise ShardError(f"{what}; read it with the release of shardmath that wrote it")
    places: dict[int, TraceRank] = {}
    tracks: dict[tuple[int, int], str] = {}
    spans: list[Span] = []
    for event in given["traceEvents"]:
        kind = event["ph"]
        if kind == "M":
            _note_name(event, places, tracks)
        elif kind == "X":
            spans.append(_read_span(event, places, tracks))
    return Trace(tuple(spans), _read_clock(metadata), _check_count(metadata["left_out"]))


def _note_name(
    event: Event, places: dict[int, TraceRank], tracks: dict[tuple[int, int], str]
) -> None:
    """Note the process or thread that the event names."""
    process = _check_count(event["pid"])
    if event["name"] == "process_name":
        is_model = process >= MODELED
        places[process] = TraceRank(process - MODELED * is_model, is_model)
    elif event["name"] == "thread_name":
        tracks[process, event["tid"]] = _check_text(event["args"]["name"])


def _read_span(
    event: Event, places: Mapping[int, TraceRank], tracks: Mapping[tuple[int, int], str]
) -> Span:
    process = event["pid"]
    thread = event["tid"]
    place = places[process]
    track = tracks[process, thread]
    begin = float(event["ts"]) / 1e6
    seconds = float(event["dur"]) / 1e6
    if not (abs(begin) < float("inf") and 0 <= seconds < float("inf")):
        raise ValueError(f"a span from {begin} s on of {seconds} s")
    about = dict(event["args"])
    link = _check_text(about.pop(LINK, ""))
    return Span(place, track, _check_text(event["name"]), begin, seconds, about, link)


def _read_clock(metadata: Event) -> Clock | None:
    if "clock" not in metadata:
        return None
    rank, machine, began_ns, pairs = metadata["clock"]
    votes = tuple(Vote(_check_text(name), _check_int(at_ns) / 1e9) for name, at_ns in pairs)
    return Clock(_check_count(rank), _check_text(machine), _check_int(began_ns), votes)


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _check_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _check_count(value: object) -> int:
    count = _check_int(value)
    if count < 0:
        raise ValueError(f"{count} is negative")
    return count
