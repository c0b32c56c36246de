"""The program of docs/ray.md, and an engine that is killed while weights move: FSDP2, vLLM, and Ray."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray.actors import list_shards, send_and_kill
from tests.readme.test_readme import comparable
from tests.vllm import checkpoints
from tests.vllm.cases import fields

PAGE = Path(__file__).parents[2] / "docs/ray.md"
PRINTED = re.compile(r"^```text\n(.*?)^```$", re.M | re.S)
TOKENS = re.compile(r"\[[\d, ]+\]")
LOGGED = re.compile(r"^.*\((?:\w+ )?pid=.*\n|^.*\(raylet\).*\n", re.M)
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights; vLLM's attention on a CPU asks for heads of 32."""
    wide = fields("llama", hidden_size=256, intermediate_size=128, head_dim=32)
    return checkpoints.save(wide, tmp_path_factory.mktemp("llama"))


def plain(text: str) -> str:
    """What a program prints, without what differs: times and tokens."""
    return TOKENS.sub("TOKENS", comparable(LOGGED.sub("", text)))


@pytest.mark.timeout(500)
def test_the_page_s_program(program: Path, checkpoint: Path) -> None:
    """ray_loop.py of docs/ray.md prints what stands there."""
    done = subprocess.run(
        [sys.executable, program, checkpoint], capture_output=True, text=True, timeout=450
    )
    assert done.returncode == 0, done.stderr
    (expected,) = PRINTED.findall(PAGE.read_text())
    assert plain(done.stdout) == plain(expected)
    assert done.stdout.count("tokens equal: True") == 5
    assert len(set(TOKENS.findall(done.stdout))) > 1
    print(done.stdout)


@pytest.fixture
def loop(program: Path) -> Iterator[Any]:
    """The program as a module, with Ray."""
    loop = importlib.import_module(program.stem)
    env = {"env_vars": loop.ON_CPUS}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=env)
    yield loop
    ray.shutdown()


def generate_again(engine: Any) -> list[int]:
    """What an engine generates that Ray starts again."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            tokens: list[int] = ray.get(engine.generate.remote(), timeout=TIMEOUT_S)
            return tokens
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < until
            time.sleep(1)


@pytest.mark.timeout(500)
def test_an_engine_that_is_killed_while_weights_move_comes_back(
    loop: Any, checkpoint: Path
) -> None:
    engine = loop.Engine.options(max_restarts=1).remote(str(checkpoint))
    policies = [loop.Policy.remote(rank) for rank in range(2)]
    address, run = ray.get(policies[0].find_address.remote())
    loop.on_all(policies, "load", str(checkpoint), address)
    loop.on_all(policies, "connect", address, run, engine)
    shards = ray.get([policy.__ray_call__.remote(list_shards) for policy in policies])
    for (whole, first), (_, second) in zip(*shards, strict=True):
        assert first + second == whole
        assert 0 < first < whole
    before = ray.get(engine.generate.remote())
    loop.on_all(policies, "train")

    pid = ray.get(engine.__ray_call__.remote(lambda self: os.getpid()))
    sends = [
        policies[0].send.remote(),
        policies[1].__ray_call__.remote(send_and_kill, engine, pid, 2),
    ]
    for send in sends:
        with pytest.raises(ray.exceptions.RayTaskError) as failed:
            ray.get(send, timeout=TIMEOUT_S)
        assert type(failed.value.cause).__name__ == "ExchangeError"
        assert "engines may have partly new weights" in str(failed.value.cause)

    # Ray has started it again, on the checkpoint; the same handle serves.
    assert generate_again(engine) == before
    address, run = ray.get(policies[0].find_address.remote())
    loop.on_all(policies, "connect", address, run, engine)
    loop.on_all(policies, "send")
    after = ray.get(engine.generate.remote())
    assert after == loop.on_all(policies, "generate")[0]
    assert after != before
