"""Moves that all ranks commit, or none: whatever ends a rank, and whenever."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest

import shardmath as sm
from tests.distributed.pool import Lost, Pool, alone
from tests.distributed.tasks import commits
from tests.distributed.tasks.cases import make_case, random_plan
from tests.distributed.tasks.commits import NEW, OLD, PHASES, End
from tests.distributed.tasks.scenarios import move_cases

DECIDED = ("after the decision", "in the swap", "after the swap")
"""Phases at whose beginning the record says to commit."""


def check_alike(ends: list[Any], former: int = 1) -> End:
    """All who can tell hold one version, old or new as `version` says; gives one of them."""
    for end in ends:
        assert not isinstance(end, Lost), ends
        assert end.holds == (NEW if end.version > former else OLD), ends
        assert end.torn == ()
    known = [end for end in ends if not end.in_doubt]
    assert len({end.version for end in known}) <= 1, ends
    return known[0] if known else ends[0]


def kill(phase: str, way: str, victim: int, host: int | None = None, size: int = 3) -> list[End]:
    """How the others ended."""
    timeout = 6.0 if way == "stop" else 20.0
    gone = (victim,)
    found: list[End] = alone(
        size, commits.broken, size, phase, way, victim, timeout, host=host, gone=gone
    )
    return found


def test_random_plans(pool: Pool) -> None:
    """As without: reductions, padding, and every element type."""
    made = []
    for seed in range(6):
        engine = "broadcast" if seed == 5 else "exchange"
        options = {"commit": "all", "engine": engine}
        lying = "transposed" if seed % 2 else "contiguous"
        made.append(make_case(random_plan(seed), seed, options=options, lying=lying))
    found = pool.run(move_cases, [case for case, _ in made])
    for rank, outs in enumerate(found):
        for out, (_, wanted) in zip(outs, made, strict=True):
            assert out == wanted.get(rank, {})


def test_what_a_mover_says(pool: Pool) -> None:
    """Overlapping sides, receipts and bytes; and settings on which ranks differ are refused on all."""
    for said in pool.run(commits.alike):
        assert said[:3] + said[4:7] == [""] * 6
        assert "rank 1: OutOfMemoryError: no room for a shadow\nnothing was moved" in said[3]
        assert "ranks disagree" in said[7]
        assert "rank 1: commit='most' is unknown; pass 'direct' or 'all'" in said[8]
        assert "rank 1: the source tensor is missing" in said[9]


def test_threads_of_one_name_commit_together(pool: Pool) -> None:
    assert pool.run(commits.in_one_name) == [NEW] * 8


def test_an_empty_block_has_no_thread(pool: Pool) -> None:
    """Nothing moves in it, so that nothing tells which threads belong together."""
    assert pool.run(commits.empty_in_any_thread) == [""] * 8


def test_blocks(pool: Pool) -> None:
    """All moves of a block are in place on all ranks, or none is on any; and the group goes on."""
    why = {
        "left_out": "but its block ended without that move",
        "last_left_out": "ranks disagree",
        "error_between": "rank 1: left smt.commit by ValueError: mine",
        "error_at_the_end": "rank 1: left smt.commit by ValueError: mine",
        "swallowed": "call in this smt.commit block failed",
        "no_block": "ranks disagree",
        "twice": "moves twice in one smt.commit",
        "directly": "compile it with commit='all'",
        "another": "pass this mover to smt.commit, too",
        "unmoved": "but its block ended without that move",
        "nested": "inside of another smt.commit block",
        "planned_anew": "has moved in a smt.commit block that has not ended",
        "freed": "destination tensor 'w' was freed or moved in smt.commit",
        "elsewhere": "destination tensor 'w' was freed or moved in smt.commit",
    }
    for rank, found in enumerate(pool.run(commits.blocks)):
        assert found.pop("well") == ("", NEW, NEW, 1, 1)
        assert found.pop("nothing") == ("", OLD, OLD, 1, 1)
        assert found.pop("well again") == ("", NEW, NEW, 2, 2)
        assert found.keys() == why.keys()
        for kind, (said, *rest) in found.items():
            expected = "ValueError: mine" if rank == 1 and "error" in kind else why[kind]
            assert expected in said, (kind, rank, said)
            assert rest == [OLD, OLD, 1, 1], (kind, rank)


@pytest.mark.parametrize(
    ("phase", "way", "victim"),
    [
        ("data", "kill", 2),
        ("after the decision", "kill", 0),
        ("before the promise", "stop", 1),
    ],
)
def test_survivors_have_one_version(phase: str, way: str, victim: int) -> None:
    end = check_alike(kill(phase, way, victim))
    assert end.version == (2 if phase in DECIDED else 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_have_one_version_always(phase: str, way: str, victim: int) -> None:
    """Whoever is struck, whenever; and it is the new one where that had been decided."""
    ends = kill(phase, way, victim)
    end = check_alike(ends)
    assert not any(one.in_doubt for one in ends)
    if phase in DECIDED:
        assert end.version == 2
        assert all(not one.said or "is in place here" in one.said for one in ends)
    elif phase in PHASES[:3]:
        assert end.version == 1
        assert all("nothing was committed" in one.said for one in ends)


@pytest.mark.parametrize(
    "phase",
    [
        "before the decision",
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES if "before the d" not in phase),
    ],
)  # fmt: skip
def test_where_the_store_dies_nobody_guesses(phase: str) -> None:
    """Who cannot know says so, and keeps what it has."""
    ends = kill(phase, "kill", 0, host=0)
    check_alike(ends)
    for end in ends:
        if end.in_doubt:
            assert end.holds == OLD
            assert "unknown whether the others have the new version" in end.said
        if phase == "before the vote":
            assert not end.in_doubt


@pytest.mark.parametrize(
    ("phases", "way"),
    [
        (("in the promise", "after the decision", "in the swap"), "Ctrl-C"),
        pytest.param(PHASES[1:], "Ctrl-C", marks=pytest.mark.slow),
        pytest.param(PHASES[1:], "error", marks=pytest.mark.slow),
    ],
)
def test_errors_and_interrupts(phases: tuple[str, ...], way: str) -> None:
    """In any phase after the vote: all ranks, that one too, have one version; what it was left by goes on."""
    for found in zip(*alone(2, commits.errors, 2, phases, way), strict=True):
        phase, victim, *_ = found[0]
        ends = [end for _, _, end, _ in found]
        end = check_alike(ends)
        if phase not in ("in the promise", "before the decision"):
            assert end.version == (2 if phase in DECIDED else 1), found
        left = ends[victim].said
        assert ("KeyboardInterrupt" if way == "Ctrl-C" else "RuntimeError: a fault") in left, found
        assert all(again for *_, again in found), found


@pytest.mark.slow
def test_memory_that_cannot_be_written_is_torn() -> None:
    """However often it is tried: its rank says so, and the other has the new version."""
    other, mine = alone(2, commits.errors, 2, ("before the promise", "in every swap"), "error")
    _, victim, end, _ = mine[1]
    assert victim == 1 and end.version == 1 and end.holds == commits.TORN
    assert end.torn == ("v", "w")
    assert (other[1][2].version, other[1][2].holds) == (2, NEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", ["data", "before the promise", "in the promise", "before the decision", "in the swap"]
)
def test_a_rank_that_goes_on_later_finds_what_was_decided(phase: str) -> None:
    """Once the others have given it up, it ends as they did."""
    workers = Pool(3)
    try:
        ends = workers.attempt(commits.broken, 3, phase, "stop", 1, 6.0, ranks=[0, 2])
        pid = workers.processes[1].pid
        assert pid is not None
        # It may not have stopped yet.
        for _ in range(100):
            os.kill(pid, signal.SIGCONT)
            if workers.channels[1].poll(0.2):
                break
        ends += workers.gather([1], 1.0)
    finally:
        workers.close()
    assert not any(end.in_doubt for end in ends)
    check_alike(ends)


@pytest.mark.parametrize(
    ("phase", "way", "victim"),
    [
        ("before the decision", "kill", 1),
        *(
            pytest.param(phase, way, victim, marks=pytest.mark.slow)
            for (victim, phase), way in itertools.product(enumerate(PHASES), ("kill", "stop"))
        ),
    ],
)
def test_two_movers_in_one_block(phase: str, way: str, victim: int) -> None:
    """Have the same end, and all survivors do."""
    timeout = 6.0 if way == "stop" else 20.0
    victim %= 3
    found = alone(3, commits.block_of_two, 3, phase, way, victim, timeout, gone=(victim,))
    assert not any(isinstance(one, Lost) for one in found), found
    end = check_alike([end for pair in found for end in pair])
    if phase not in ("in the promise", "before the decision"):
        assert end.version == (2 if phase in DECIDED else 1)


@pytest.mark.parametrize("stop", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_torn_names_what_may_be_neither(stop: int) -> None:
    """And no other: those are as they were, or as they should be."""
    for said, held, torn in alone(2, commits.piecemeal, stop):
        assert said
        unharmed = [name for name in "abcd" if name not in torn]
        assert all(held["abcd".index(name)] in (OLD, NEW) for name in unharmed), (held, torn)
        assert torn and unharmed
        assert said.startswith("RuntimeError") or "may be neither old nor new (mover.torn)" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(12))
def test_at_any_moment(seed: int) -> None:
    """Ranks move until one is struck: the survivors end within one commit of each other, and know which."""
    way = ("kill", "stop", "Ctrl-C")[seed % 3]
    victim = seed % 4
    gone = () if way == "Ctrl-C" else (victim,)
    found = alone(4, commits.soak, 4, seed, 1.5, victim, way, gone=gone)
    assert not any(isinstance(one, Lost) for one in found), found
    versions = set()
    for times, end in found:
        # The last call either was committed before it was left, or was not.
        assert end.holds == (NEW if end.version == times else OLD), found
        assert end.version in (times, times - 1)
        versions.add(end.version)
    assert len(versions) == 1, found


def test_shadow_bytes_are_those_of_the_destination() -> None:
    """By rank, without processes."""
    mesh = sm.Mesh(tp=2)
    src, dst = sm.Layout((5, 4), mesh, "(tp n) h"), sm.Layout((5, 4), sm.Mesh(ranks=[7]), "n h")
    p = sm.plan({"v": src, "w": src}, {"v": dst, "w": dst})
    assert p.shadow_bytes() == {0: 0, 1: 0, 7: 160}
    assert sm.adjoint(sm.plan(src, dst)).shadow_bytes() == {0: 48, 1: 32, 7: 0}
