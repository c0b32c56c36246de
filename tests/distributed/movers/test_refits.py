"""Refits of all kinds, and transforms that commit: every step is whole, and what fails leaves all as it was."""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import refitted, transforms
from tests.distributed.tasks.refitted import Way

FEW = [
    Way({"changes": True, "commit": "all", "agree": "once"}, {}, in_block=True),
    Way({"changes": True, "agree": "once"}, {"async_op": True, "check": "digest"}, computes=True),
]


def list_ways() -> list[Way]:
    """All that go together."""
    ways = []
    for commit, agree, changes, computes, kind in itertools.product(
        ("direct", "all"), ("every", "once"), (False, True), (False, True),
        ("called", "compared", "beside", "in a block"),
    ):  # fmt: skip
        options = {"commit": commit, "agree": agree, "changes": changes}
        call = {"compared": {"check": "digest"}, "beside": {"async_op": True}}.get(kind, {})
        if commit == "direct" and kind == "in a block":
            continue
        if commit == "all" and changes and computes:
            continue
        ways.append(Way(options, call, kind == "in a block", computes))
    return ways


@pytest.mark.parametrize("ways", [FEW, pytest.param(list_ways(), marks=pytest.mark.slow)])
def test_every_step_brings_all(pool: Pool, ways: list[Way]) -> None:
    """Changes after a whole step; a whole one after other tensors were prepared."""
    for rank, found in enumerate(pool.run(refitted.steps, ways, timeout=300)):
        for way, wrong in zip(ways, found, strict=True):
            assert not any(wrong), f"rank {rank}, {way}: {wrong}"


def test_a_refit_may_go_by_one_name_in_threads_of_several(pool: Pool) -> None:
    for wrong in pool.run(refitted.in_one_name):
        assert not any(wrong), wrong


def test_preparing_waits_for_a_step_beside(pool: Pool) -> None:
    assert pool.run(refitted.prepare_meanwhile) == [[[], []]] * 8


def test_what_is_not_prepared_does_not_move_beside(pool: Pool) -> None:
    for first, second in pool.run(refitted.object_beside):
        assert "has not prepared the refit" in first
        assert "rank 5: " in second and "lies elsewhere in memory" in second


def test_functions_of_committed_changes_are_refused(pool: Pool) -> None:
    """They would be given what was there before."""
    for said in pool.run(refitted.refuse_functions):
        assert "from a whole received tensor" in said and "nothing was moved" in said


def test_changes_that_come_to_nothing_are_sent_again(pool: Pool) -> None:
    """Also where a source has again what it had before them."""
    assert pool.run(refitted.come_to_nothing) == [[""] * 10 + ["5"]] * 8


def test_what_a_comparison_finds_is_repaired(pool: Pool) -> None:
    for said, *after in pool.run(refitted.found_wrong):
        assert "differs from its source" in said
        assert after == ["", ""]


@pytest.mark.parametrize("where", ["making", "updating"])
def test_a_snapshot_that_cannot_be(pool: Pool, where: str) -> None:
    """The move goes well; of the next all ranks are told, and a whole one helps."""
    for first, second, told, *after in pool.run(refitted.lack_memory, where):
        assert (first, second) == ("", "")
        assert "rank 1: snapshots could not be made: OutOfMemoryError: no room" in told
        assert after == ["", ""]


@pytest.mark.parametrize(
    ("how", "agree"),
    [
        ("prepare", "every"),
        ("finalize", "every"),
        ("finalize", "once"),
        pytest.param("prepare", "once", marks=pytest.mark.slow),
    ],
)
def test_a_transform_that_fails_where_ranks_commit(pool: Pool, how: str, agree: str) -> None:
    """At either end: all is as it was on all ranks, and the group is whole. But where nobody is asked what is wrong at
    the source is wrong for all."""
    options = {"commit": "all", "agree": agree}
    if (how, agree) == ("prepare", "once"):
        found = alone(3, transforms.go_wrong, 1, how, options)
    else:
        found = pool.run(transforms.go_wrong, 1, how, options)
    for error, kept, right, took in found:
        assert f"{how} of 'w' failed: KeyError: 'no such scale'" in error and "rank 1" in error
        assert kept and took < 10
        assert right == ((how, agree) != ("prepare", "once"))
