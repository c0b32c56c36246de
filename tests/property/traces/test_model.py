"""What a program does by its model: all its messages, each link at its rate, in the time that it is certified with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Program,
    Topology,
    adjoint,
    certify,
    plan,
    schedule,
)
from shardmath.plans.programs.scheduling import as_planned
from shardmath.traces import Span, Trace, model
from tests.property.drawn.programs import all_rounds, cut_anywhere, messages, plans, programs


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


def told(trace: Trace) -> Counter[tuple[int, str, str, int]]:
    """(rank, track, round, bytes) of the messages of a trace."""
    return Counter(
        (span.place.rank, span.track, str(span.about["round"]), int(str(span.about["bytes"])))
        for span in trace.spans
        if span.track != "rounds"
    )


def listed(prog: Program) -> Counter[tuple[int, str, str, int]]:
    """The same of the program's rounds, piece by piece."""
    rounds = all_rounds(prog)
    found: Counter[tuple[int, str, str, int]] = Counter()
    for way in ("sends", "receives"):
        for rank, (phase, slot, turn), message in messages(rounds, way):
            track = f"to {message.dst_rank}" if way == "sends" else f"from {message.src_rank}"
            nbytes = sum(piece.nbytes for piece in message.pieces)
            found[rank, track, f"phase {phase}, slot {slot}, turn {turn}", nbytes] += 1
    return found


def is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


@given(programs())
def test_all_messages_are_there_and_the_end_is_that_of_the_certificate(prog: Program) -> None:
    trace = model(prog)
    assert told(trace) == listed(prog)
    assert is_near(max((s.end_s for s in trace.spans), default=0.0), certify(prog).plan_s)
    assert all(span.place.is_model for span in trace.spans)
    nodes = {span.about.get("ranks per node") for span in trace.spans if span.track == "rounds"}
    assert nodes <= {prog.topology.ranks_per_node}


@given(programs())
def test_messages_are_in_their_rounds_one_after_another_on_each_link(prog: Program) -> None:
    where = prog.topology
    links: dict[tuple[object, ...], list[Span]] = {}
    rounds: dict[tuple[object, ...], Span] = {}
    spans = model(prog).spans
    for span in spans:
        if span.track == "rounds":
            rounds[span.place, span.name] = span
    for span in spans:
        if span.track == "rounds":
            continue
        way, peer = span.track.split()
        is_far = where.node(int(peer)) != where.node(span.place.rank)
        rate = where.inter_bytes_per_s if is_far else where.intra_bytes_per_s
        assert is_near(span.seconds * rate, int(str(span.about["bytes"])))
        one = rounds[span.place, span.about["round"]]
        assert span.begin_s >= one.begin_s + where.latency_s - 1e-12
        assert span.end_s <= one.end_s * (1 + 1e-9) + 1e-15
        links.setdefault((span.place, one.name, way, is_far), []).append(span)
    for (place, name, _, _), shared in links.items():
        one = rounds[place, name]
        busy = sum(span.seconds for span in shared)
        reached = max(span.end_s for span in shared) - one.begin_s - where.latency_s
        assert abs(reached - busy) <= 1e-9 * one.end_s + 1e-15


@given(plans())
def test_a_plan_is_taken_as_it_is_planned(p: Plan) -> None:
    where = Topology(ranks_per_node=2)
    assert model(p, topology=where) == model(as_planned(p, where))


@given(programs())
def test_some_ranks_are_a_part_of_all(prog: Program) -> None:
    everything = model(prog).spans
    some = prog.ranks[::2]
    of_some = tuple(span for span in everything if span.place.rank in some)
    assert model(prog, ranks=some).spans == of_some
    assert model(prog, ranks=[max(prog.ranks) + 1]).spans == ()


def test_what_is_no_program_is_refused() -> None:
    rows = Layout((4,), Mesh(a=2), "(a n)")
    p = plan(rows, rows)
    with pytest.raises(PlanError, match="not a plan or a Program"):
        model(adjoint(p))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="schedule its plan for that"):
        model(schedule(p), topology=Topology(ranks_per_node=1))
    with pytest.raises(PlanError, match="a rank is 'x'"):
        model(schedule(p, topology=Topology()), ranks=["x"])  # type: ignore[list-item]
