"""Replanning over gloo: engines leave, die and join between moves, and the others go on."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool, alone, free_port
from tests.distributed.tasks import replans

FINE = [""]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"commit": "all"},
        {"engine": "broadcast"},
        pytest.param({"max_inflight_bytes": 256}, id="turns"),
        {"agree": "once"},
    ],
)
def test_engines_leave_and_come_back(pool: Pool, options: dict[str, object]) -> None:
    for said in pool.run(replans.leave_and_come_back, options):
        assert said == FINE * 13


def test_what_did_not_change_is_kept(pool: Pool) -> None:
    """Trainers keep all messages but those of who left; engines all; who left none."""
    for rank, (messages, bound, staging, fewer) in enumerate(pool.run(replans.keep)):
        assert staging and messages
        if rank in replans.engine(1):
            continue
        assert bound and (fewer > 0) == (rank < 2)


@pytest.mark.parametrize("commit", ["direct", "all"])
def test_groups_of_survivors_and_of_newcomers(pool: Pool, commit: str) -> None:
    """Versions go on where they were; who joins has that of the others from the next move on."""
    counts = commit == "all"
    for rank, (said, versions, odd) in enumerate(pool.run(replans.go_on_in_another_group, commit)):
        assert not any(said) and not any(odd)
        joined = rank in replans.engine(1)
        expected = [2, 0, 5] if joined else [2, 4, 4, 5]
        assert versions == [count * counts for count in expected]


def test_who_joins_with_another_plan_is_an_error_on_all(pool: Pool) -> None:
    """All ranks raise and name who has another plan; those who were there move on, and agree in the end."""
    for rank, said in enumerate(pool.run(replans.join_with_another)):
        refused = [text for text in said if text]
        assert said[-1] == "" and len(refused) == 2
        assert len(said) == (4 if rank in replans.engine(1) else 6)
        for text in refused:
            assert "ranks disagree on what to do" in text
            assert "ranks 0-3, 6-7: compile(plan" in text and "ranks 4-5: compile(plan" in text


@pytest.mark.parametrize("programs", [False, True])
def test_experts_are_placed_elsewhere_between_moves(pool: Pool, programs: bool) -> None:
    for said in pool.run(replans.rebalance, programs):
        assert said == FINE * 10


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another plan", "ranks disagree on what to do"),
        ("no plan", "rank 5: compile takes a Plan or Program, got NoneType"),
        ("a time", "rank 5: timeout=-1.0 is not a time to wait"),
        ("a move", "ranks disagree on what to do"),
        ("strangers", "[8] are not in the group"),
        ("a block", "replan was called inside of a smt.commit block"),
    ],
)
def test_what_is_refused_changes_nothing(pool: Pool, what: str, text: str) -> None:
    """An error on all ranks; the next move is by the plan that was, and counts on."""
    for rank, (first, refused, after, version) in enumerate(pool.run(replans.refuse, what)):
        assert (first, after, version) == ("", "", "2")
        assert text in refused or (what == "a move" and rank == 5)


@pytest.mark.parametrize("kind", ["changes", "transforms"])
def test_changes_and_transforms(pool: Pool, kind: str) -> None:
    for said in pool.run(replans.what_else_moves, kind):
        if kind == "transforms":
            assert "for 'v', but the transforms need" in said.pop()
        assert not any(said)


@pytest.mark.parametrize("changes", [False, True])
def test_engines_of_a_refit(pool: Pool, changes: bool) -> None:
    for found in pool.run(replans.refit_on, changes):
        told = [text for text in found if text]
        assert len(told) == 1 and "got NoneType" in told[0]


@pytest.mark.parametrize("kind", ["direct", "all", "changes"])
def test_processes_take_other_ranks(pool: Pool, kind: str) -> None:
    """In another group, of the same plan, and of one that ranks have left."""
    for said in pool.run(replans.renumbered, f"127.0.0.1:{free_port()}", kind):
        assert not any(said), said


REFUSED = "transforms were made for rank 0, but this process is rank 1 in the group"


def test_processes_whose_transforms_are_of_other_ranks(pool: Pool) -> None:
    """An error on all ranks, and the mover stays where it is."""
    where = f"127.0.0.1:{free_port()}"
    for first, second, refused, *after in pool.run(replans.renumbered, where, "transforms"):
        assert f"rank 1: {REFUSED}; give all processes" in refused
        assert not any([first, second, *after])


@pytest.mark.parametrize("casts", [False, True])
def test_processes_of_a_refit_take_other_ranks(pool: Pool, casts: bool) -> None:
    """They give other tensors, unless a rule was made ready for others."""
    where = f"127.0.0.1:{free_port()}"
    for first, replan, step, *after in pool.run(replans.renumbered_refit, where, casts):
        assert (REFUSED in replan) == casts
        assert ("has not prepared the refit" in step) != casts
        assert not any([first, *after])


def test_a_refit_whose_tensors_were_bound_in_part(pool: Pool) -> None:
    """Moves no mixture of these and of those that were bound before."""
    for wrong, without, move in pool.run(replans.refit_bound_in_part):
        assert "stores 'w' as (4,), the rank has (3,)" in wrong
        assert "the rank has no such tensor" in without
        assert "has not prepared the refit" in move


def test_who_is_left_in_the_middle_of_a_replan_breaks_the_group() -> None:
    """No rank moves by another plan than the others; in another group all go on."""
    found = alone(2, replans.interrupted)
    assert all(isinstance(said, list) for said in found), found
    first, second = found
    assert first[1].startswith("KeyboardInterrupt") and second[1] == ""
    for said in (first, second):
        assert said[0] == said[3] == said[4] == ""
        assert "rank 0" in said[2] and "left in the middle by KeyboardInterrupt" in said[2]


@pytest.mark.parametrize(
    ("when", "replaced"),
    [
        ("in a move", True),
        ("between moves", False),
        pytest.param("in a move", False, marks=pytest.mark.slow),
    ],
)
def test_survivors_of_a_death_go_on(when: str, replaced: bool) -> None:
    """Without a restart: they make a group of their own, and then one with a process in the place of who was killed."""
    answers = alone(4, replans.survive, when, replaced, gone=[3])
    for rank, (said, versions) in enumerate(answers):
        failed = [text for text in said if text]
        assert failed == (["rank 3 failed"] if when == "in a move" else [])
        moves = 4 + (when == "in a move")
        assert len(said) == moves + replaced * (4 if rank == 0 else 3)
        assert versions == ([3, 5] if replaced else [3])
