"""All ranks of a trainer and an engine of Qwen3-30B-A3B meet and plan in seconds, without data."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import pool
from tests.vllm.planning import TP, TRAINERS, Asked, plan
from tests.vllm.test_recording import describe_qwen3_30b

LARGEST_S = 10.0
"""Of a processor, on any rank, to record, to exchange what was recorded, and to plan 48 layers."""
TIMEOUT_S = 250.0
LAYERS = 48


@pytest.mark.parametrize("stacked", [False, True], ids=["checkpoint", "stacked"])
def test_all_ranks_of_qwen3_30b_plan_in_seconds(stacked: bool, tmp_path: Path) -> None:
    config, shapes = describe_qwen3_30b()
    config.save_pretrained(tmp_path)
    asked = Asked(f"127.0.0.1:{pool.free_port()}", tmp_path, shapes, stacked)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool.PRELOADED)
    with ProcessPoolExecutor(TRAINERS + TP, context) as ranks:
        made = ranks.map(partial(plan, asked=asked), range(TRAINERS + TP), timeout=TIMEOUT_S)
        found = list(made)
    seconds = [round(one.seconds, 1) for one in found]
    print(f"Qwen3-30B-A3B, seconds of each rank's processor: {seconds}")
    # Layers, what is before them and what is behind.
    assert {one.portions for one in found} == {LAYERS + 3}
    for one in found:
        assert one.received == one.stored
    assert all(one.stored for one in found[TRAINERS:])
    assert max(seconds) < LARGEST_S
