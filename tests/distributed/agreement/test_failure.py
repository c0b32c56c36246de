"""A rank that dies or stops in the middle: the others raise in time and name it. Workers of their own, not the pool."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

import shardmath as sm
from shardmath_torch.groups.agreement.failure import FailureDetector, Report
from tests.distributed.pool import Pool
from tests.distributed.tasks.cases import make_case
from tests.distributed.tasks.scenarios import dies

TIMEOUT_S = 5.0
MESH = sm.Mesh(dp=2, tp=2)
PLAN = sm.plan(
    {"w": sm.Layout((64, 64), MESH, "(dp tp n) h"), "v": sm.Layout((64,), MESH, "(dp tp n)")},
    {"w": sm.Layout((64, 64), MESH, "n (dp tp h)"), "v": sm.Layout((64,), MESH, "(tp dp n)")},
)


@pytest.mark.parametrize(
    ("when", "victim", "host"),
    [
        ("kill send", 2, 0),
        ("kill receive", 0, 0),
        ("kill before", 1, None),
        ("kill send", 3, 3),
        ("stop send", 2, None),
        ("stop send", 0, 0),
        ("stop before", 2, 0),
    ],
)
def test_the_survivors_name_the_rank_that_failed_first(
    when: str, victim: int, host: int | None
) -> None:
    """In time, with a tensor that was on its way; and the mover says at the next call that it is broken.

    Where the one that is gone serves the store, they say that it is gone, and blame nobody.
    """
    case, _ = make_case(PLAN, options={"max_inflight_bytes": 1 << 12})
    workers = Pool(4, host)
    try:
        started = [rank for rank in range(4) if rank != victim]
        answers = workers.attempt(
            dies, case, victim, when, TIMEOUT_S, ranks=started, timeout=4 * TIMEOUT_S
        )
        for rank, (error, again, took) in zip(started, answers, strict=True):
            if victim == host:  # nobody is left to ask who was first
                assert "broke while tensor '" in error, (rank, error)
                unknown = f"who failed first is not known, since rank {host}, whose process serves"
                assert unknown in error, (rank, error)
            else:
                assert f"rank {victim} failed while tensor '" in error, (rank, error)
            assert again.startswith("this mover is broken: ") and "replan(plan, group=" in again
            assert took < TIMEOUT_S + 4.0
    finally:
        workers.close()


@pytest.mark.parametrize("blames", [None, 1])
@pytest.mark.parametrize(
    ("cause", "seconds"), [("Connection closed by peer", 0.0), ("it did not answer in time", 0.5)]
)
def test_of_two_ranks_only_the_other_can_have_failed(
    blames: int | None, cause: str, seconds: float
) -> None:
    """At once where it has let go, before which it would have reported; else it may only be slow, for a while."""
    detector = FailureDetector(dist.HashStore(), None, "key", 0, (0, 1), grace=2.0)
    start = time.monotonic()
    first, report = detector.detect(Report(blames, None, cause), lambda: None)
    took = time.monotonic() - start
    assert (first, report.cause) == (1, cause)
    assert seconds <= took < seconds + 0.4


def test_of_more_ranks_any_that_is_silent_may_have_failed() -> None:
    """Who saw only that something broke waits for what the others say."""
    detector = FailureDetector(dist.HashStore(), None, "key", 0, (0, 1, 2), grace=2.0)
    start = time.monotonic()
    detector.detect(Report(None, None, "Connection closed by peer"), lambda: None)
    assert time.monotonic() - start > 1.4
