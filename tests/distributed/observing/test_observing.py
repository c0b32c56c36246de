"""What is told of moves: bytes and messages as the plan has them, times that add up, traces, progress, log lines."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shardmath as sm
import shardmath_torch as smt
from shardmath import traces
from shardmath.traces import Span, Trace
from shardmath_torch.moves.observing.logs import log_move
from shardmath_torch.moves.observing.stopwatch import Ledger
from tests.distributed.pool import Pool
from tests.distributed.tasks import observed as work
from tests.distributed.tasks.cases import make_case, random_plan, thinned

RANKS = range(8)


def crossing(plan: sm.Plan) -> Counter[tuple[int, int]]:
    """Bytes by sender and receiver, transfer by transfer; without those of which there are none."""
    found: Counter[tuple[int, int]] = Counter()
    for t in plan.transfers():
        found[t.src_rank, t.dst_rank] += t.nbytes
    return +found


def told_of(moved: Sequence[smt.Moved]) -> Counter[tuple[int, int]]:
    """The same as each rank says what it sent and kept; what it received is what was sent."""
    found: Counter[tuple[int, int]] = Counter()
    received: Counter[tuple[int, int]] = Counter()
    for rank, one in enumerate(moved):
        found[rank, rank] += one.kept.nbytes
        for peer, amount in one.traffic.sent.items():
            found[rank, peer] += amount.nbytes
        for peer, amount in one.traffic.received.items():
            received[peer, rank] += amount.nbytes
    assert received == Counter({pair: n for pair, n in found.items() if pair[0] != pair[1]})
    return +found


def check_told(told: list[tuple[int, int]], moved: smt.Moved) -> None:
    """From nothing to everything, forward."""
    total = moved.sent.nbytes + moved.received.nbytes
    assert told[0] == (0, total) and told[-1] == (total, total)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(told))
    assert len(told) <= 2 + moved.sent.messages + moved.received.messages


@pytest.mark.parametrize("limit", [1 << 30, 400])
def test_bytes_and_messages_are_those_of_the_plan(pool: Pool, limit: int) -> None:
    """Random plans, which reduce and keep; also where padding is between pieces, and rounds are many."""
    options = {"max_inflight_bytes": limit}
    plans = [random_plan(seed) for seed in thinned(range(700, 760), limit)]
    cases = [make_case(plan, options=options)[0] for plan in plans]
    found = pool.run(work.tell_cases, cases)
    for i, plan in enumerate(plans):
        moved = [mine[i][0] for mine in found]
        assert told_of(moved) == crossing(plan)
        for one, took, told in (mine[i] for mine in found):
            assert one.label == "second" and one.name.startswith("move 2 of plan ")
            assert 0 < one.total_s <= took
            assert sum(one.waited.values()) <= one.seconds.get("waiting", 0.0) + 1e-9
            assert set(one.waited) == {*one.traffic.sent, *one.traffic.received}
            check_told(told, one)


def test_large_pieces_are_messages_of_their_own(pool: Pool) -> None:
    """Gloo sends them apart, and that is what is counted."""
    a = {name: sm.Layout((512, 1024), sm.Mesh(), "n h") for name in "abc"}
    b = {name: sm.Layout((512, 1024), sm.Mesh(ranks=(3,)), "n h") for name in "abc"}
    ((_, _, _),) = found = pool.run(work.tell_cases, [make_case(sm.plan(a, b))[0]])[3]
    ((moved, _, told),) = found
    assert moved.received.messages == 3 and len(told) == 4
    assert moved.traffic.received[0].nbytes == 3 << 21


def test_a_summary_says_all_in_a_few_lines(pool: Pool) -> None:
    plan = sm.plan(
        sm.Layout((8, 8), sm.Mesh(tp=2), "(tp n) h"), sm.Layout((8, 8), sm.Mesh(tp=2), "n (tp h)")
    )
    moved = pool.run(work.tell_cases, [make_case(plan)[0]])[0][0][0]
    head, counts, phases, names, row = str(moved).splitlines()
    assert head.startswith(f"move 2 of plan {plan.digest[:24]} (mover ") and "'second': " in head
    assert counts == "sent 64 B in 1 message, received 64 B in 1 message, kept 64 B"
    assert [name.split()[0] for name in phases.split(", ")] == list(moved.seconds)
    assert names.split() == ["rank", "sent", "messages", "received", "messages", "waited", "for"]
    assert row.split()[:7] == ["1", "64", "B", "1", "64", "B", "1"]


# Traces


def check_trace(trace: Trace, moves: Sequence[sm.Plan], rounds: int) -> None:
    """What messages say at their two ends, and whether bytes are those of the plans, each moved `rounds` times."""
    sent: Counter[tuple[str, int]] = Counter()
    received: Counter[tuple[str, int]] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for span in trace.spans:
        way, _, peer = span.track.partition(" ")
        if span.place.is_model or way not in ("to", "from"):
            continue
        nbytes = int(str(span.about["bytes"]))
        if way == "to":
            sent[span.link, nbytes] += 1
            pairs[span.place.rank, int(peer)] += nbytes
        else:
            received[span.link, nbytes] += 1
    assert sent == received and set(sent.values()) <= {1}
    wanted: Counter[tuple[int, int]] = Counter()
    for plan in moves:
        for (src, dst), nbytes in crossing(plan).items():
            wanted[src, dst] += rounds * nbytes * (src != dst)
    assert pairs == +wanted


def merge(folder: Path, name: str = "move") -> Trace:
    return traces.merge(traces.read(folder / f"{name}.rank{rank}.json") for rank in RANKS)


def named(spans: Sequence[Span], rank: int, track: str) -> list[str]:
    return [s.name for s in spans if s.place == (rank, False) and s.track == track]


def test_traces_have_every_message_once_at_both_ends(pool: Pool, tmp_path: Path) -> None:
    """Of random plans, in one round and in many; and what files say is what was moved. No spans overlap (`Trace`)."""
    plans = [random_plan(seed, ops=()) for seed in thinned(range(800, 840))]
    cases = [(make_case(plan)[0], False) for plan in plans]
    cases += [
        (make_case(plan, options={"max_inflight_bytes": 400})[0], False) for plan in plans[:2]
    ]
    pool.run(work.trace_cases, str(tmp_path / "move.json"), cases)
    trace = merge(tmp_path)
    check_trace(trace, [*plans, *plans[:2]], 2)
    names = named(trace.spans, 0, "moves")
    assert [name.split(" (")[0] for name in names] == [
        f"move {i} of plan {plan.digest[:24]}" for plan in (*plans, *plans[:2]) for i in (1, 2)
    ]


def test_a_program_and_its_model_have_the_same_messages(pool: Pool, tmp_path: Path) -> None:
    """Round for round and byte for byte, and the model lasts as long as the certificate says."""
    src = sm.Layout((64, 64), sm.Mesh(tp=2), "(tp n) h")
    dst = sm.Layout((64, 64), sm.Mesh(dp=4, tp=2), "n (tp h)")
    plan = sm.plan(src, dst, topology=sm.Topology(ranks_per_node=2))
    pool.run(work.trace_cases, str(tmp_path / "move.json"), [(make_case(plan)[0], True)])
    trace = merge(tmp_path)
    seen: dict[bool, Counter[tuple[object, ...]]] = {True: Counter(), False: Counter()}
    for span in trace.spans:
        if span.track.split()[0] in ("to", "from"):
            told = span.place.rank, span.track, span.about["round"], span.about["bytes"]
            seen[span.place.is_model][told] += 1
    assert seen[True] == seen[False] and seen[True]
    program = sm.schedule(plan, max_inflight_bytes=1 << 16)
    modeled = [span for span in trace.spans if span.place == (7, True)]
    agreed = [s.end_s for s in trace.spans if s.place == (7, False) and s.name == "agreeing"]
    # Of two moves; the first model begins where the first vote ended.
    lasts = max(span.end_s for span in modeled[: len(modeled) // 2]) - agreed[0]
    assert abs(lasts - sm.certify(program).plan_s) < 1e-8


def test_moves_of_every_kind_are_in_a_trace(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(work.traced, str(tmp_path / "move.json"))
    trace = merge(tmp_path)
    assert all("inside of another smt.trace of this process" in one["nested"] for one in told)
    for rank in RANKS:
        moves = [s for s in trace.spans if s.place == (rank, False) and s.track == "moves"]
        kinds = [re.sub(r"[0-9a-f]{24}|\(mover \d+\)|\d+", "", s.name).split() for s in moves]
        assert [" ".join(kind) for kind in kinds] == [
            "move of plan , acknowledged, compared",
            "move of plan",
            "move of plan , in smt.commit",
            "commit move: move of plan , in smt.commit",
            "move of plan",
            "changes of plan",
            "move of plan",
            "move of plan",
        ]
        # What a callback tried is refused before it has a number.
        assert "in the middle of a move" in told[rank]["inside"]
        (refused_inside,) = named(trace.spans, rank, "moves inside")
        assert re.fullmatch(r"plan [0-9a-f]{24}", refused_inside)
        refused = moves[4]
        assert told[rank]["refused"].startswith("rank 5: the source tensor has shape (")
        assert str(refused.about["failed"]) == f"ExchangeError: {told[rank]['refused']}"
        # Of packets: a number and a word for each element.
        assert moves[5].about["sent bytes"] == told[rank]["sent"] > 0
        phases = [s for s in trace.spans if s.place == (rank, False) and s.track == "phases"]
        of_first = [s.name for s in phases if s.end_s <= moves[0].end_s + 1e-9]
        assert of_first == [
            "queueing",
            "preparing",
            "agreeing",
            "comparing",
            "moving",
            "agreeing",
            "comparing",
        ]
        assert "committing" in {s.name for s in phases}
        for thread in ("in worker 0", "in worker 1"):
            assert len(named(trace.spans, rank, f"moves {thread}")) == 4


def test_a_trace_that_is_left_has_what_was_there(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(work.left, str(tmp_path)):
        left, none, no_path, no_topology = said
        assert left == "_Broken: enough"
        assert "cannot write" in none and "pass a path in a folder that exists" in none
        assert "3 is not a path" in no_path and "topology=3 is not a Topology" in no_topology
    assert len(named(merge(tmp_path, "left").spans, 3, "moves")) == 1
    full = merge(tmp_path, "full")
    assert len(named(full.spans, 3, "moves")) == 1 and full.left_out == 16
    assert not any(span.place.is_model for span in full.spans)


# Progress


def test_what_a_callback_raises_is_raised_at_the_end(pool: Pool) -> None:
    """All has arrived on all ranks, and the group is whole."""
    found = pool.run(work.raising)
    for rank, (failed, moved_again, well, no_callback) in enumerate(found):
        mine = rank == 1
        assert failed[:2] == (("_Broken: no terminal" if mine else ""), False)
        assert (failed[2] == 1) == mine
        assert ("in the middle of a move" in moved_again[0]) == mine and not moved_again[1]
        assert well[:2] == ("", False) and well[2] > 1
        assert no_callback.startswith("rank 1: progress=3 cannot be called")


def test_a_callback_that_is_interrupted_breaks_the_group(pool: Pool) -> None:
    found = pool.run(work.interrupted)
    assert found[1][0].startswith("KeyboardInterrupt")
    for rank, (first, second) in enumerate(found):
        assert "rank 1" in second and "left in the middle by KeyboardInterrupt" in second
        assert rank == 1 or first == "" or "rank 1" in first


def test_movers_of_other_kinds_tell_as_much(pool: Pool) -> None:
    for rank, (cast, kept, broadcast) in enumerate(pool.run(work.others)):
        for moved, told, right in (cast, kept, broadcast):
            assert right
            check_told(told, moved)
        # bfloat16 travels: 4 columns of one row to each of the others.
        assert cast[0].sent == (7, 56) and rank not in cast[0].traffic.sent
        assert cast[0].kept.nbytes == 8
        assert "finalizing" not in kept[0].seconds and "committing" in kept[0].seconds
        assert kept[0].traffic == broadcast[0].traffic


def test_a_bar_shows_bytes_on_a_terminal_and_nothing_elsewhere() -> None:
    for is_terminal in (True, False):
        screen = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
        with smt.progress_bar("refit", console=screen) as tell:
            for _ in range(2):
                tell(0, 2_000_000)
                tell(1_000_000, 2_000_000)
                tell(2_000_000, 2_000_000)
        shown = screen.file.getvalue()  # type: ignore[attr-defined]
        assert ("2.0/2.0 MB" in shown and "refit" in shown) == is_terminal
        assert bool(shown.strip()) == is_terminal


def test_a_bar_of_nothing() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    with smt.progress_bar(console=screen) as tell:
        tell(0, 0)
    assert "0/0 bytes" in screen.file.getvalue()  # type: ignore[attr-defined]


FIRST_CALLS = """
import io, random, sys, types
import numpy, torch
import shardmath_torch as smt

def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

module = torch.nn.Linear(3, 2)
before = states()
smt.save_state(sys.argv[1], module)
smt.load_state(sys.argv[1], module)
assert states() == before and "rich" not in sys.modules
terminal = io.StringIO()
terminal.isatty = lambda: True
sys.stderr = terminal
with smt.progress_bar() as tell:
    tell(2, 2)
assert "2/2 bytes" in terminal.getvalue() and states() == before
"""


def test_first_calls_draw_no_random_numbers(tmp_path: Path) -> None:
    """A run that saves goes on with the data of one that does not; rich draws a number when it is imported."""
    environment = os.environ | {"TERM": "xterm"}
    command = [sys.executable, "-c", FIRST_CALLS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# Lines


def test_a_line_per_move(pool: Pool) -> None:
    found = pool.run(work.logged)
    for rank, (first, refused, whole, changes) in enumerate(found):
        assert re.match(rf"rank {rank}: move 1 of plan \w+ \(mover \d+\), 'step 7': sent ", first)
        assert " sent 224 B in 7, received 224 B in 7, " in first
        assert re.search(r"B/s; queueing .*agreeing .*waiting ", first)
        assert re.match(
            rf"rank {rank}: move 2 of plan \w+ \(mover \d+\) failed: ExchangeError: rank 5: ",
            refused,
        )
        assert (
            f"rank {rank}: move 1 of plan" in whole and f"rank {rank}: changes 2 of plan" in changes
        )
        # One element changed on each rank, in what goes to rank 0.
        assert (" sent 8 B in 1, " in changes) == (rank > 0)


def test_nothing_is_made_where_nobody_listens() -> None:
    def tell() -> smt.Moved:
        raise AssertionError("nobody asked")

    logger = logging.getLogger("shardmath")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    assert logger.level == logging.NOTSET
    log_move(0, tell, None)
    log_move(0, tell, RuntimeError("no"))


def test_a_call_whose_arguments_are_wrong_is_timed_as_any() -> None:
    """What is wrong with them is said by whoever checks them."""
    plan = sm.plan(sm.Layout((4,), sm.Mesh(), "n"), sm.Layout((4,), sm.Mesh(), "n"))
    ledger = Ledger("a move", plan, 0)
    wrong: Any = 3
    with pytest.raises(RuntimeError), ledger.time(wrong, wrong):
        raise RuntimeError
    assert ledger.last is None
    with ledger.time("", None):
        pass
    assert ledger.last is not None and ledger.last.title == "a move"
    assert ledger.last.bytes_per_s == 0.0
