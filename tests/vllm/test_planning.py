"""All ranks of a trainer and an engine of Qwen3-30B-A3B meet, and plan what each is to receive, without data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.planning import TRAINERS, plan
from tests.vllm.test_recording import describe_qwen3_30b

LAYERS = 48


@pytest.mark.parametrize("stacked", [False, True], ids=["checkpoint", "stacked"])
def test_all_ranks_of_qwen3_30b_plan(stacked: bool, tmp_path: Path) -> None:
    config, shapes = describe_qwen3_30b()
    found = plan(config, shapes, stacked, tmp_path)
    # Layers, what is before them and what is behind.
    assert {one.portions for one in found} == {LAYERS + 3}
    for one in found:
        assert one.received == one.stored
    assert all(one.stored for one in found[TRAINERS:])
