"""Objects that ranks tell each other: whole and in order; and where one is interrupted, an error of ours on all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import gathers


def test_objects_of_any_size(pool: Pool) -> None:
    """Those that a ballot has room for, and those of several pieces."""
    assert pool.run(gathers.objects) == [[True] * 7] * 8


def test_what_cannot_be_said(pool: Pool) -> None:
    """Is an objection on all ranks, which then go on."""
    for unpicklable, silent, other, again in pool.run(gathers.odd_objects):
        assert "rank 3: its object cannot be pickled" in unpicklable
        assert "rank 5: its object cannot be pickled: Silent: its message cannot be" in silent
        assert "ranks disagree on what to do\nranks 0-3: load\nranks 4-7: save" in other
        assert again == ""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_gather_that_is_left_breaks_the_group(at: int) -> None:
    """Whatever was on its way: no later gather takes it for its own, and none ends the process."""
    others, mine = alone(2, gathers.left, at)
    assert mine[0] == "KeyboardInterrupt: "
    assert "rank 1 failed while ranks were to make this call" in others[0]
    assert "left in the middle by KeyboardInterrupt" in others[0]
    assert all("this group is broken: rank 1" in said for said in mine[1:] + others[1:])


def test_a_wait_for_a_late_rank_can_be_interrupted() -> None:
    """At once, and the rank that comes later is told."""
    (mine, took), (others, _) = alone(2, gathers.waiting)
    assert mine == "KeyboardInterrupt: " and took < 3.0
    assert "left in the middle by KeyboardInterrupt" in others


@pytest.mark.parametrize(
    ("kind", "said"),
    [("Ctrl-C", "KeyboardInterrupt, CheckpointError"), ("error", "CheckpointError, ValueError")],
)
def test_what_a_rank_ends_by_where_the_others_are_gone(kind: str, said: str) -> None:
    """An interrupt is never swallowed, and an error is never lost."""
    workers = Pool(2)
    try:
        found = workers.attempt(gathers.lost, kind, ranks=[0], timeout=40.0)
    finally:
        workers.close()
    assert found == [said]


@pytest.mark.parametrize("call", ["save", "load", "export"])
def test_an_interrupt_in_a_step_is_told_at_once(tmp_path: Path, call: str) -> None:
    """It is an error on the others and itself on its rank; the group goes on."""
    (others, waited), (mine, _) = alone(2, gathers.steps, str(tmp_path), call)
    assert mine == ["KeyboardInterrupt: ", "", ""]
    assert "rank 1 could not" in others[0]
    assert "KeyboardInterrupt" in others[0]
    assert others[1:] == ["", ""]
    assert waited < 10.0


def test_an_interrupt_between_two_steps_breaks_the_group(tmp_path: Path) -> None:
    """The others would wait for the next step."""
    others, mine = alone(2, gathers.between, str(tmp_path))
    assert mine[0] == "KeyboardInterrupt: "
    assert "rank 1 failed while ranks were to load: it was left in the middle" in others[0]
    assert all(
        "ranks could not load together: this group is broken" in said[1] for said in (mine, others)
    )


def test_an_interrupt_in_torchs_own_collectives_breaks_the_group(tmp_path: Path) -> None:
    """Which have no tags: a later one would take the bytes of this."""
    others, mine = alone(2, gathers.in_torch, str(tmp_path))
    assert mine[0] == "KeyboardInterrupt: "
    assert "rank 1 failed while ranks were to save: it was left in the middle" in others[0]
    assert all(
        "ranks could not save together: this group is broken" in said[1] for said in (mine, others)
    )


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("kind", ["gather", "steps", "save"])
def test_threads_never_take_each_others_words(tmp_path: Path, kind: str, alike: bool) -> None:
    """Of the same order on all ranks: right; else an error, also where each call has several steps."""
    for said in alone(2, gathers.threads, kind, alike, str(tmp_path)):
        assert said.keys() == {"A", "B"}
        for end in said.values():
            assert end is True or (not alike and "ranks disagree" in end), said


def test_a_forked_child_makes_no_device_mesh() -> None:
    """It is refused at once, and takes nothing from its parent's connections."""
    said, _ = alone(2, gathers.forked)
    assert said.startswith("this process was forked from a rank")
