"""Refits over gloo: a trainer's own tensors become an engine's own, in place, step after step."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import refits


@pytest.mark.parametrize("ranks", [range(4, 8), range(2, 6), range(4)])
def test_every_stored_tensor_is_right_after_every_step(pool: Pool, ranks: range) -> None:
    for rank, right in enumerate(pool.run(refits.move, ranks, 3)):
        assert right == ([[], [], []] if rank in ranks else [])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("missing", "'lm_head.weight' (3, 8) is stored, and the rank has no such tensor"),
        ("in no row", "'extra' is in no row; add one, or name it in own="),
        ("dtype", "'lm_head.weight' is float64, the refit moves float32"),
        ("moved", "engine lm_head.weight has moved in memory since prepare()"),
    ],
)
def test_one_rank_s_tensors_are_an_error_on_all(pool: Pool, fault: str, what: str) -> None:
    for told in pool.run(refits.refuse, fault):
        assert told is not None
        assert what in told
        assert "rank 5" in told


def test_whoever_has_not_prepared_is_named(pool: Pool) -> None:
    for told in pool.run(refits.forget):
        assert told is not None
        assert "has not prepared the refit" in told


def test_engines_that_share_ranks(pool: Pool) -> None:
    found = pool.run(refits.move_to_two)
    assert found == [(0, [])] * 4 + [(1, [])] * 2 + [(2, [])] * 2
