"""Moves that go on beside: in the order of their calls, and of other calls of the group; and what is told of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed.commits.test_commits import DECIDED, check_alike
from tests.distributed.pool import Lost, Pool, alone
from tests.distributed.tasks import beside
from tests.distributed.tasks.commits import NEW, OLD, PHASES


def test_other_collectives_go_on_meanwhile(pool: Pool) -> None:
    """On other groups, and in the store, whatever the move waits for."""
    for said in pool.run(beside.meanwhile):
        assert said == [""] * 5


def test_calls_are_in_order_of_their_making(pool: Pool) -> None:
    """Moves of two movers, and a compile after them; but they do not wait for each other."""
    for said in pool.run(beside.slow_wire, 0.02):
        assert said == [""] * 5


def test_ranks_pair_threads_by_name(pool: Pool) -> None:
    """Moves beside are of the thread that made them."""
    assert pool.run(beside.named) == [[""]] * 8


REFUSED = [
    "rank 1: the source tensor has shape",
    "rank 1: async_op=1 is not a bool; pass True or False",
    "rank 1: async_op=True on the default process group",
    "rank 1: async_op=True in smt.commit, where moves run one after another",
    "in the middle of a save, load or export",
    "rank 1: the source tensor has shape",
    "timeout=-1.0 is not a time to wait",
]


def test_what_is_wrong_is_told_to_all(pool: Pool) -> None:
    """Each time that it is asked for; and the group goes on."""
    for found in pool.run(beside.refused):
        for said, why in zip(found[::2], REFUSED, strict=True):
            assert why in said, found
        assert found[1::2] == [""] * len(REFUSED)


def test_a_wait_may_be_left(pool: Pool) -> None:
    """After a time, or by Ctrl-C, while the move goes on; of one that fails there is a warning if nobody waits."""
    for rank, found in enumerate(pool.run(beside.waits)):
        *left, moved, again, warning = found
        if rank != 1:
            late, interrupted, done = left
            assert "the move is still in flight after 0.05 s" in late
            assert interrupted == "KeyboardInterrupt: "
            assert not done
        assert (moved, again) == ("", "")
        assert "nobody waited for it: rank 1: the source tensor is missing" in warning


def test_what_waits_in_a_block_is_not_overwritten(pool: Pool) -> None:
    """By another thread's move of the same mover, which would receive into the same memory."""
    for meanwhile, held, block, after, end in pool.run(beside.two_threads):
        assert "smt.commit block that has not ended" in meanwhile
        assert (held, block, after, end) == (OLD, "", "", NEW)


def test_what_moves_is_what_was_passed(pool: Pool) -> None:
    """Whatever is put into the mappings later, tensors and positions."""
    assert pool.run(beside.puts_others_in) == [["", "", NEW]] * 8


def kill(phase: str, way: str, victim: int, commit: str) -> list[Any]:
    timeout = 6.0 if way == "stop" else 20.0
    found = alone(3, beside.broken, 3, phase, way, victim, timeout, commit, gone=(victim,))
    assert not any(isinstance(one, Lost) for one in found), found
    assert all(called < 1.0 for _, called in found), found
    return [end for end, _ in found]


@pytest.mark.parametrize(
    ("phase", "way", "victim"),
    [
        ("data", "kill", 2),
        *(
            pytest.param(phase, way, victim % 3, marks=pytest.mark.slow)
            for (victim, phase), way in itertools.product(enumerate(PHASES), ("kill", "stop"))
        ),
    ],
)
def test_survivors_of_a_move_beside(phase: str, way: str, victim: int) -> None:
    """Have one version, and a handle that says who failed."""
    ends = kill(phase, way, victim, "all")
    end = check_alike(ends)
    if phase not in ("in the promise", "before the decision"):
        assert end.version == (2 if phase in DECIDED else 1)
    if phase in PHASES[:3]:
        assert all(f"rank {victim} failed" in one.said for one in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_survivors_of_a_direct_move_beside(way: str) -> None:
    """Are told who failed, and what may be torn."""
    for end in kill("data", way, 1, "direct"):
        assert not end.said or "rank 1 failed" in end.said
        assert end.holds in (OLD, NEW) or end.torn


@pytest.mark.slow
def test_a_group_that_is_destroyed_meanwhile() -> None:
    """Is an error on all ranks, soon, and nothing is half there."""
    for (said, held), took in alone(2, beside.destroyed):
        assert said.startswith(("the process group was destroyed while", "rank 0 "))
        assert (held, took < 10.0) == (OLD, True)
