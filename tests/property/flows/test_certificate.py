"""Certificates as text, and times that cannot have one."""

from __future__ import annotations

import math

import pytest

from shardmath import PlanError
from shardmath.plans.flows.certificate import Witness, make_certificate


@pytest.mark.parametrize(
    ("witness", "plan_s", "text"),
    [
        (
            Witness((3,), "out", 999, 1.0),
            1998.0,
            "1.998 ks, 2 times the bound of 999 s: rank 3 must give out 999 B at 1 B/s",
        ),
        (
            Witness(tuple(range(0, 18, 2)), "in", 1000, 1e12),
            2.5e-9,
            "0.0025 us, 2.5 times the bound of 0.001 us: 9 ranks (0, 2, 4, ..., 16) must take in 1 kB at 1 TB/s",
        ),
        (
            Witness((0, 1), "in", 999960, 1e6),
            1.0,
            "1 s, 1 times the bound of 1 s: 2 ranks (0, 1) must take in 1 MB at 1 MB/s",
        ),
    ],
)
def test_certificate_as_text(witness: Witness, plan_s: float, text: str) -> None:
    assert str(make_certificate((witness.nbytes / witness.bytes_per_s, witness), plan_s)) == text


def test_certificate_errors(fails) -> None:
    for time in (-1.0, math.inf, math.nan):
        fails(
            lambda time=time: make_certificate((1.0, None), time),
            PlanError,
            f"plan_s is {time!r} seconds; give a finite time of 0 or more",
        )
    fails(
        lambda: make_certificate((2.0, Witness((1,), "in", 2, 1.0)), 1.0),
        PlanError,
        (
            "plan_s is less than a bound that no schedule beats: 1 s, 0.5 times the bound of "
            "2 s: rank 1 must take in 2 B at 1 B/s; give the time of the whole plan, on the "
            "topology of the bound"
        ),
    )
