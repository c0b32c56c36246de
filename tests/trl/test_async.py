"""TRL's AsyncGRPOTrainer updates a real vLLM server from two processes under FSDP2, by TRL's own `_sync_weight`.

Its training loop, and its rollouts, need GPUs, and are not run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trl.test_grpo import FSDP2, RANKS, ROOT, TIMEOUT_S, TORCHRUN
from tests.vllm.served.sessions import run

PROGRAM = str(ROOT / "tests/trl/async_sync.py")

pytestmark = pytest.mark.timeout(600)


def test_the_server_has_the_policy_after_each_sync(folder: Path, url: str, tmp_path: Path) -> None:
    words = [*TORCHRUN, PROGRAM, str(tmp_path), str(folder / "tiny"), url]
    run(words, FSDP2, tmp_path / "log", timeout=TIMEOUT_S)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    assert all(one["parameters"] == ["DTensor"] for one in seen)
    assert seen[0]["versions"] == [1, 2, 3]
    tokens = [sync["server"] for sync in seen[0]["syncs"]]
    assert tokens == [sync["policy"] for sync in seen[0]["syncs"]]
    assert tokens[0] != tokens[1] != tokens[2]
