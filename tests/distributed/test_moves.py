"""Moves over gloo do what `simulate` says, bit for bit, and so does the broadcast reference."""

from __future__ import annotations

import dataclasses

import pytest

import shardmath as sm
from tests.distributed.cases import make_case, random_plan
from tests.distributed.pool import Pool
from tests.distributed.scenarios import Case, move_cases

Wanted = dict[int, dict[str, bytes]]


def check(pool: Pool, cases: list[tuple[Case, Wanted]]) -> None:
    """All cases in one task; every destination byte is as wanted."""
    got = pool.run(move_cases, [case for case, _ in cases], timeout=90)
    for i, (case, wanted) in enumerate(cases):
        for rank, named in wanted.items():
            assert got[rank][i] == named, f"case {i} ({case.plan.src} -> {case.plan.dst}, {case.options}) on rank {rank}"


@pytest.mark.parametrize("engine", ["exchange", "broadcast"])
def test_random_plans(pool: Pool, engine: str) -> None:
    """Random layouts, meshes that overlap or not, reductions, empty dimensions, scalars."""
    check(pool, [make_case(random_plan(seed), seed, options={"engine": engine}) for seed in range(100)])
