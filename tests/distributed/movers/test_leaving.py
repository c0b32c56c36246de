"""Between moves: ranks that leave are named at once, and nothing is done to a mover while it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.distributed.pool import Pool, alone, free_port
from tests.distributed.tasks import leaving

SOON_S = 20.0
"""Far less than the timeout."""

NESTED = "this thread is in the middle of a move"


@pytest.mark.parametrize(
    ("how", "options"),
    [("close", {}), ("error", {"commit": "all"}), ("close", {"agree": "once"})],
)
def test_a_rank_that_leaves_is_named_at_once(how: str, options: Mapping[str, Any]) -> None:
    """To whoever waits for it, and to whoever calls later; it cannot use what it has closed."""
    mine, *others = alone(3, leaving.leave, how, options)
    left, again, twice, in_block, shown = mine
    assert left == ("ValueError: no data" if how == "error" else "")
    assert "was closed; compile another on all ranks" in again
    assert "was closed; compile another on all ranks" in in_block
    assert twice == "" and shown.endswith("closed>")
    why = "rank 0 left: its block of plan " if how == "error" else "rank 0 left: it closed plan "
    for said, took, repeated, repeated_took, version, wrong, gone in others:
        assert said.startswith(why) and "\n" not in said and "gloo" not in said, said
        assert ("ended by ValueError: no data" in said) == (how == "error")
        assert why in repeated
        assert took < SOON_S and repeated_took < SOON_S
        assert version == (options.get("commit") == "all") and wrong == ""
        assert gone == (0,)


def test_an_engine_ends_when_all_that_send_to_it_have_left() -> None:
    """It knows them by number, not by the words of an error."""
    first, second, *engines = alone(4, leaving.serve_until_all_left)
    assert first == second == ((), 3)
    for before, version, left, told in engines:
        assert (before, version, left) == ((), 3, (0, 1))
        assert told and "left: " in told[-1]
        if told[-1].startswith("ranks 0-1 left: "):
            assert told[-1].startswith("ranks 0-1 left: rank 0 because it closed plan "), told


def test_a_rank_whose_store_ends_with_it_is_named_later() -> None:
    """Torch's own page about the store is not written."""
    ((said, took, written),) = alone(2, leaving.end_with_the_store, True, host=0, gone=(0,))
    assert said.startswith("rank 0 left: it closed plan "), said
    assert took < SOON_S and written == ""
    ((said, _, written),) = alone(2, leaving.end_with_the_store, False, host=0, gone=(0,))
    assert "who failed first is not known, since rank 0" in said
    assert "frame #" not in written


@pytest.mark.parametrize("ends_too", [True, False])
def test_who_closes_a_mover_may_come_to_another(ends_too: bool) -> None:
    """Ranks that wait for it in a compile wait on, unless its process ends: then they are told at once that it left."""
    gone = (0,) if ends_too else ()
    for said, took in alone(3, leaving.close_as_others_compile, ends_too, gone=gone):
        assert said.startswith("rank 0 left: it closed plan ") if ends_too else said == "", said
        assert took < SOON_S


@pytest.mark.parametrize(
    ("kind", "waits"), [("", False), ("", True), ("changes", False), ("transforms", False)]
)
def test_who_closes_a_mover_does_not_come_to_its_replan(kind: str, waits: bool) -> None:
    """The others are told at once, and other movers of the group continue, unless ranks waited in the replan."""
    _, *others = answers = alone(3, leaving.close_as_others_replan, kind, waits)
    for (said, took), _ in others:
        assert said.startswith("rank 0 left: it closed plan "), said
        assert took < SOON_S / 2
    for _, (said, _) in answers:
        assert waits == (said != ""), said


@pytest.mark.parametrize(("leaver", "moves"), [(0, True), (0, False), (1, False)])
def test_who_disconnects_has_left(leaver: int, moves: bool) -> None:
    """Of a joint group, whether it serves its store or not, with or without a mover there."""
    told = alone(3, leaving.disconnect, f"127.0.0.1:{free_port()}", leaver, moves)
    for rank, (said, took) in enumerate(told):
        why = f"rank {leaver} left: its process group was disconnected"
        assert said.startswith(why) if rank != leaver else said == "", said
        assert took < SOON_S


def test_a_block_ends_at_once_by_a_goodbye(pool: Pool) -> None:
    """Whoever left before it does not come to its end; whoever is in it does. The group goes on."""
    mine, *others = pool.run(leaving.leave_before_blocks)
    assert mine[0][0] == mine[2][0] == "" and "left smt.commit by" in mine[1][0], mine
    for told in others:
        assert told[0][0].startswith("rank 0 left: "), told
        assert told[1][0].startswith("rank 0 left: "), told
        assert told[2][0] == "", told
    assert max(took for told in (mine, *others) for _, took in told) < SOON_S


def test_who_gives_up_for_a_goodbye_has_not_failed() -> None:
    """Of three ranks, one waits for the one that left; all are told who that was, also in moves of another mover."""
    for *told, other in alone(3, leaving.leave_one_waiting):
        assert all("left: it closed plan" in said for said in told), told
        assert other.startswith("rank 0 left: it closed plan "), other


def test_the_group_goes_on_without_a_mover_that_all_have_closed(pool: Pool) -> None:
    assert pool.run(leaving.all_leave) == [[""] * 4] * 8


@pytest.mark.parametrize("commit", ["direct", "all"])
def test_nothing_is_done_to_a_mover_within_its_move(pool: Pool, commit: str) -> None:
    """From a callback that is an error, of which the move hears nothing; another thread waits."""
    for *within, moved, again, let_go, wrong in pool.run(leaving.knock, commit):
        assert len(within) == 6 and all(said.startswith(NESTED) for said in within), within
        assert [moved, again, let_go, wrong] == [""] * 4


@pytest.mark.parametrize("commit", ["direct", "all"])
def test_a_refit_keeps_its_tensors_within_a_move(pool: Pool, commit: str) -> None:
    for *within, moved, right, once_more, closed, prepared in pool.run(
        leaving.knock_at_refits, commit
    ):
        assert len(within) == 3 and all(said.startswith(NESTED) for said in within), within
        assert [moved, right, once_more] == [""] * 3
        assert "was closed" in closed and "was closed" in prepared


def test_what_a_block_puts_in_place_is_kept_until_then(pool: Pool) -> None:
    for let_go, close, block, wrong, closed in pool.run(leaving.knock_in_a_block):
        assert "has moved in a smt.commit" in let_go and "has moved in a smt.commit" in close
        assert [block, wrong, closed] == [""] * 3
