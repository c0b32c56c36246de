"""Calls of a mover that wait for another thread's replan of it, or for the call that waits for them."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import queued


@pytest.mark.parametrize(
    "kind",
    ["move", "move beside", "let go", "replan", "replan there"],
)
def test_calls_in_a_replan_to_another_group(pool: Pool, kind: str) -> None:
    """Are made in that group, once the mover is there; and all groups are whole."""
    for said in pool.run(queued.calls_in_a_replan, kind):
        assert not any(said), said


def test_a_mover_is_closed_in_a_replan(pool: Pool) -> None:
    """In its new group."""
    for replan, close, turn, move, _, *compiles in pool.run(queued.calls_in_a_replan, "close"):
        assert (replan, close, turn, compiles) == ("", "", "", [""] * 3)
        assert "was closed; compile another on all ranks" in move


def test_a_replan_in_the_group_that_the_mover_had(pool: Pool) -> None:
    """Is an error on all ranks, and leaves it where it is."""
    for replan, here, *others in pool.run(queued.calls_in_a_replan, "replan here"):
        assert replan == ""
        assert "another thread has replanned the mover to another process group" in here
        assert not any(others)


def test_replans_of_two_threads(pool: Pool) -> None:
    """The second goes on from the first."""
    for said in pool.run(queued.replans_at_once):
        assert not any(said), said


def test_a_refit_is_prepared_in_a_replan(pool: Pool) -> None:
    for said in pool.run(queued.prepares_in_a_replan):
        assert not any(said), said


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_wait_for_a_move_that_waits(pool: Pool, is_beside: bool) -> None:
    """Is an error at once of the call that it is made in; both moves are well."""
    for rank, (first, *others) in enumerate(pool.run(queued.waits_in_a_move, is_beside)):
        assert ("this thread is in the middle of a move" in first) == (rank == 0)
        assert not any(others), others
