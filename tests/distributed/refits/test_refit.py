"""Refits over gloo: a trainer's own tensors become an engine's own, in place, step after step."""

from __future__ import annotations

import pytest

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.pool import Pool
from tests.distributed.tasks import refits


@pytest.mark.parametrize(
    "ranks",
    [
        range(2, 6),
        pytest.param(range(4, 8), marks=pytest.mark.slow),
        pytest.param(range(4), marks=pytest.mark.slow),
    ],
)
def test_every_stored_tensor_is_right_after_every_step(pool: Pool, ranks: range) -> None:
    for rank, right in enumerate(pool.run(refits.move, ranks, 3)):
        assert right == ([[], [], []] if rank in ranks else [])


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("missing", "'lm_head.weight' (3, 8) is stored, and the rank has no such tensor"),
        ("in no row", "'extra' is in no row; add one, or name it in own="),
        ("dtype", "'lm_head.weight' is float64, the refit moves float32"),
        ("moved", "engine 'lm_head.weight' lies otherwise in memory than when prepare()"),
        pytest.param(
            "strides",
            "engine 'lm_head.weight' lies otherwise in memory than when prepare()",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shorter",
            "engine 'lm_head.weight' lies otherwise in memory than when prepare()",
            marks=pytest.mark.slow,
        ),
        ("freed", "engine 'lm_head.weight' lies otherwise in memory than when prepare()"),
    ],
)
def test_one_rank_s_tensors_are_an_error_on_all(pool: Pool, fault: str, what: str) -> None:
    for told in pool.run(refits.refuse, fault):
        assert told is not None
        assert what in told
        assert "rank 5" in told


def test_sides_that_tell_each_other_how_they_store(pool: Pool) -> None:
    assert pool.run(refits.learn) == [[]] * 8


def test_whoever_has_not_prepared_is_named(pool: Pool) -> None:
    for told in pool.run(refits.forget):
        assert told is not None
        assert "has not prepared the refit" in told


def test_engines_that_share_ranks(pool: Pool) -> None:
    found = pool.run(refits.move_to_two)
    assert found == [(0, [])] * 4 + [(1, [])] * 2 + [(2, [])] * 2


def test_a_function_that_fails_is_heard_of(pool: Pool) -> None:
    for told in pool.run(refits.refuse, "function"):
        assert told is not None
        assert "a function of the user's" in told
    pool.broken = True  # the group is, since the move had begun


@pytest.mark.parametrize("chunk", [0, 1])
def test_virtual_stages_with_equal_names(pool: Pool, chunk: int) -> None:
    name = "'decoder.layers.0.self_attention.linear_proj.weight'"
    for told in pool.run(refits.swap_in_a_chunk, chunk):
        assert told is not None
        assert name + (" of chunk 1 lies otherwise" if chunk else " lies otherwise") in told


def test_a_dtensor_with_other_memory(pool: Pool) -> None:
    for told in pool.run(refits.swap_inside_a_dtensor):
        assert told is not None
        assert "source 'w' lies otherwise in memory" in told


def test_memory_that_is_given_again(pool: Pool) -> None:
    for told in pool.run(refits.free_and_take_again):
        assert told is not None
        assert "source 'w' lies otherwise in memory" in told


ELSEWHERE = {
    "src": "rank 5 is not a trainer, and was given src; pass None",
    "dst": "rank 1 is not of the engine, and was given dst; pass None",
    "dst of several": "rank 1 is of no engine, and was given list; pass dst={engine: tensors}",
    "an engine's name": "rank 1 is of no engine, and was given decode; pass dst={engine: tensors}",
    "dst by chunk": "rank 6 is of prefill, decode, and was given list; pass dst={engine: tensors}",
}


def test_tensors_of_a_side_that_the_rank_is_not_of(pool: Pool) -> None:
    """Nobody would move them: an error on all ranks, of which nobody waits."""
    for told in pool.run(refits.prepare_elsewhere):
        assert told.keys() == ELSEWHERE.keys()
        for case, what in ELSEWHERE.items():
            kind, text = told[case]
            assert kind == "ExchangeError" and what in text, (case, text)


def test_what_is_not_a_refit() -> None:
    with pytest.raises(sm.ExchangeError, match="planned is not a refit, but int; give what sm"):
        smt.Refit(5)  # type: ignore[arg-type]


def test_no_tensors_at_all(pool: Pool) -> None:
    for told in pool.run(refits.prepare_nonsense):
        assert told is not None
        assert "rank 6: tensors are int; pass a mapping" in told


def test_tensors_made_in_inference_mode(pool: Pool) -> None:
    assert pool.run(refits.into_inference_tensors) == [[]] * 8


def test_a_module_under_fsdp(pool: Pool) -> None:
    """Uneven shards of two layers become rows of one fused tensor."""
    q = [[6.0 * row + column for column in range(6)] for row in range(5)]
    k = [[100 + 6.0 * row + column for column in range(6)] for row in range(3)]
    whole = q + k
    assert pool.run(refits.from_fsdp) == [None] * 4 + [whole[:4], whole[4:]] + [None] * 2
