"""Hooks of Megatron-Core plug in unchanged; one that breaks or gives other tensors on one rank is an error on all."""

from __future__ import annotations

import pytest

import shardmath as sm
from tests.distributed.pool import Pool, alone
from tests.distributed.tasks.transforms import COLUMNS, DEALT, move_by_hook

PLAIN = sm.Layout((8, 6), COLUMNS.mesh, "n (tp h)", dtype="bfloat16")


@pytest.mark.parametrize(("dst", "boxes"), [(PLAIN, 1), (DEALT, 2)], ids=["one box", "boxes"])
def test_a_hook_is_called_for_each_box(pool: Pool, dst: sm.Layout, boxes: int) -> None:
    got = pool.run(move_by_hook, dst)
    for rank, (error, right, calls, _) in enumerate(got):
        assert not error and right
        sent = [call for call in calls if call[0] == "prepare_send"]
        received = [call for call in calls if call[0] == "prepare_recv"]
        stored = [call for call in calls if call[0] == "finalize_recv"]
        # Once on zeros, when ranks compile.
        assert len(sent) == (2 if rank in (0, 1) else 0)
        assert len(received) == len(stored) == (boxes if rank in dst.mesh else 0)


@pytest.mark.parametrize(
    ("who", "when", "how", "words"),
    [
        (1, "compile", "should_transform", "no should_transform"),
        (0, "compile", "prepare_send", "no prepare_send"),
        (2, "compile", "prepare_recv", "no prepare_recv"),
        (
            0,
            "compile",
            "send number",
            "prepare_send of Hook gives 1 tensor (4, 6) for 2 components",
        ),
        (0, "compile", "send shape", "gives uint8[24] (4, 6), and uint8[4, 6] travels"),
        (0, "compile", "send dtype", "gives int8[4, 6] (4, 6), and uint8[4, 6] travels"),
        (0, "compile", "send none", "gives NoneType (4, 6), and uint8[4, 6] travels"),
        (
            2,
            "compile",
            "recv number",
            "prepare_recv of Hook gives 1 tensor (8, 3) for 2 components",
        ),
        (2, "compile", "recv shape", "gives uint8[24] (8, 3), and uint8[8, 3] travels"),
        (2, "compile", "recv dtype", "gives int8[8, 3] (8, 3), and uint8[8, 3] travels"),
        (1, "move", "prepare_send", "prepare of 'a.weight' failed: RuntimeError: no prepare_send"),
        (1, "move", "send shape", "gives uint8[24] (4, 6), and uint8[4, 6] travels"),
    ],
)
def test_a_hook_that_breaks_is_an_error_on_all_ranks(
    pool: Pool, who: int, when: str, how: str, words: str
) -> None:
    """Before anything moves; and the next call works."""
    for error, right, _, took in pool.run(move_by_hook, PLAIN, who, when, how):
        assert words in error and f"rank {who}: " in error
        assert right and took < 10


def test_a_hook_that_breaks_after_arrival_is_this_rank_s_failure() -> None:
    got = alone(3, move_by_hook, PLAIN, 2, "move", "finalize_recv")
    for error, right, _, took in got:
        assert "finalize of 'a.weight' failed: RuntimeError: no finalize_recv" in error
        assert not right and took < 15
