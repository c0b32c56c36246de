"""Movers of other kinds that commit, struck in every phase: all have one version, or nobody guesses."""

from __future__ import annotations

import itertools

import pytest

from tests.distributed.commits.test_commits import DECIDED, check_alike
from tests.distributed.pool import Lost, alone
from tests.distributed.tasks import commits
from tests.distributed.tasks.commits import PHASES

KINDS = ("changes", "transformed")


@pytest.mark.parametrize(
    ("kind", "phase", "way", "victim"),
    [
        ("changes", "in the swap", "kill", 1),
        *(
            pytest.param(kind, phase, way, victim % 3, marks=pytest.mark.slow)
            for kind, (victim, phase), way in itertools.product(
                KINDS, enumerate(PHASES), ("kill", "stop")
            )
        ),
    ],
)
def test_survivors_have_one_version(kind: str, phase: str, way: str, victim: int) -> None:
    timeout = 6.0 if way == "stop" else 20.0
    ends = alone(3, commits.broken, 3, phase, way, victim, timeout, kind, gone=(victim,))
    assert not any(isinstance(end, Lost) for end in ends), ends
    end = check_alike(ends)
    if phase not in ("in the promise", "before the decision"):
        assert end.version == (2 if phase in DECIDED else 1)


@pytest.mark.parametrize("way", ["Ctrl-C", pytest.param("error", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["changes", pytest.param("transformed", marks=pytest.mark.slow)])
def test_errors_and_interrupts(kind: str, way: str) -> None:
    """In any phase after the vote: all ranks, that one too, have one version; what it was left by goes on."""
    phases = ("data", "in the swap") if (kind, way) == ("changes", "Ctrl-C") else PHASES[1:]
    for found in zip(*alone(2, commits.errors, 2, phases, way, kind), strict=True):
        phase, victim, *_ = found[0]
        end = check_alike([end for _, _, end, _ in found])
        if phase not in ("in the promise", "before the decision"):
            assert end.version == (2 if phase in DECIDED else 1), found
        left = found[victim][2].said
        assert ("KeyboardInterrupt" if way == "Ctrl-C" else "RuntimeError: a fault") in left, found
        assert all(again for *_, again in found), found


@pytest.mark.slow
def test_memory_that_cannot_be_written_is_torn() -> None:
    """However often changes are put in place; the other rank has the new version."""
    phases = ("before the promise", "in every swap")
    other, mine = alone(2, commits.errors, 2, phases, "error", "changes")
    _, victim, end, _ = mine[1]
    assert victim == 1 and (end.version, end.torn) == (1, ("v", "w"))
    assert other[1][2].version == 2
