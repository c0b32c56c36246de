"""A rank that dies or stops in the middle: the others raise in time and name it. Workers of their own, not the pool."""

from __future__ import annotations

import signal

import pytest

import shardmath as sm
from tests.distributed.cases import make_case
from tests.distributed.pool import Lost, Pool
from tests.distributed.scenarios import dies

TIMEOUT_S = 8.0
MESH = sm.Mesh(dp=2, tp=2)
PLAN = sm.plan(
    {"w": sm.Layout((64, 64), MESH, "(dp n) (tp h)"), "v": sm.Layout((64,), MESH, "(dp tp n)")},
    {"w": sm.Layout((64, 64), MESH, "(tp n) (dp h)"), "v": sm.Layout((64,), MESH, "(tp dp n)")},
)


@pytest.mark.parametrize(
    ("when", "victim", "host"),
    [
        ("kill send", 2, 0),
        ("kill receive", 0, 0),
        ("kill before", 1, None),
        ("stop send", 2, None),
        ("stop send", 0, 0),
        ("stop before", 3, 0),
    ],
)
def test_the_survivors_name_the_rank_that_failed_first(when: str, victim: int, host: int | None) -> None:
    """In time, with a tensor that was on its way; and the mover says at the next call that it is broken."""
    case, _ = make_case(PLAN, options={"max_inflight_bytes": 1 << 12})
    workers = Pool(4, host)
    try:
        answers = workers.attempt(dies, case, victim, when, TIMEOUT_S, timeout=3 * TIMEOUT_S)
        for rank, answer in enumerate(answers):
            if rank == victim:
                assert isinstance(answer, Lost)
                continue
            error, again, took = answer
            assert f"rank {victim} failed while tensor '" in error, (rank, error)
            assert again.startswith("this mover is broken: ")
            assert took < TIMEOUT_S + 2.0
        if when.startswith("stop"):
            workers.signal(victim, signal.SIGKILL)
    finally:
        workers.close()
