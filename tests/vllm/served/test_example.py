"""The example learns: its engine has the trainer's weights at each step, and the reward rises."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.distributed.pool import free_port
from tests.vllm.served.sessions import run

ROOT = Path(__file__).parents[3]
STEP = re.compile(r"^step \d+: reward (\S+), engine and trainer (\S+) apart$", re.M)
PLACE = re.compile(r"127\.0\.0\.1:\d+")
STEPS = 8
LONGEST = 120
CLOSE = 1e-4
"""Of log probabilities in float32, on the average."""


@pytest.mark.timeout(300)
def test_the_reward_rises(tmp_path: Path) -> None:
    text = (ROOT / "examples/rl_vllm.py").read_text()
    assert len(text.splitlines()) <= LONGEST
    program = tmp_path / "rl_vllm.py"
    program.write_text(PLACE.sub(lambda _: f"127.0.0.1:{free_port()}", text))
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    env = {
        "PYTHONPATH": path,
        "PYTHONFAULTHANDLER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    printed = run([str(program), str(STEPS)], env, tmp_path / "log", timeout=250)
    steps = STEP.findall(printed)
    rewards = [float(reward) for reward, _ in steps]
    assert len(rewards) == STEPS
    assert max(float(apart) for _, apart in steps) < CLOSE
    assert rewards[-1] > rewards[0] + 0.2
    print(f"rewards {rewards}")
