"""vLLM's own backends get whole tensors and pieces from trainers that their own sources gather on every rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.contract import wheel

ROOT = Path(__file__).parents[3]
PARAMETERS = 12


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each rank has found."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    command = [sys.executable, "-m", "tests.vllm.contract.supplying", str(wheel.fetch_or_skip())]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 4, done.stderr[-4000:]
    return found


@pytest.mark.parametrize("backend", ["nccl", "nccl_m2n", "ipc", "sharded_rdt"])
def test_whole_tensors_and_pieces_are_the_model_s(
    ranks: list[dict[str, Any]], backend: str
) -> None:
    """Also after a step, of rows that do not divide, under FSDP within tensor parallelism."""
    assert [found[backend] for found in ranks] == [[]] * 4


def test_each_rank_gets_what_the_backend_asks_for(ranks: list[dict[str, Any]]) -> None:
    """For a broadcast rank 0 alone has whole tensors."""
    owned = sorted(found["owned"] for found in ranks)
    every = [PARAMETERS] * 3
    assert owned == [[0, *every]] * 3 + [[PARAMETERS, *every]]
    assert {found["broadcast"] for found in ranks} == {0, PARAMETERS}


def test_pieces_are_such_as_m2n_takes(ranks: list[dict[str, Any]]) -> None:
    """All but two vectors of a prime length are divided."""
    biases = ["layers.0.up.bias", "layers.1.up.bias"]
    assert [found["m2n"] for found in ranks] == [{"fits": True, "replicas": biases}] * 4
    for found in ranks:
        # As vLLM's own source declares them: owned by some ranks alone, or of rows that do not divide.
        assert {"embed.weight", "head.weight", "layers.0.down.weight"} <= set(found["refused"])


def test_dtypes_rows_and_the_way_back(ranks: list[dict[str, Any]]) -> None:
    """A cast, a fused tensor by rows, and a WeightSource of vLLM's that our trainer sends."""
    for found in ranks:
        assert found["cast"] == ["torch.bfloat16"]
        assert found["rows"]
        assert found["sent"]


def test_ranks_that_declare_other_owners_are_told(ranks: list[dict[str, Any]]) -> None:
    """As vLLM's ModuleSource does on each line of a mesh of two dimensions, and our reading of modules does not."""
    for found in ranks:
        assert re.search(
            "different layouts of 'embed.weight', .*ranks.* the same metadata", found["differs"]
        )
