"""Engines in the processes of a trainer, which torchrun starts: vLLM's executor `external_launcher`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import free_port
from tests.vllm.served.sessions import run
from tests.vllm.transfer.engines import save

ROOT = Path(__file__).parents[3]
PROGRAM = str(Path(__file__).with_name("colocated.py"))
RANKS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("checkpoint"), 0)


@pytest.fixture
def folder() -> Iterator[str]:
    """For sockets, whose paths are short."""
    with tempfile.TemporaryDirectory() as made:
        yield made


def train(ranks: int, checkpoint: Path, kind: str, folder: str, log: Path) -> str:
    """What the ranks of colocated.py print."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = [str(ROOT), str(ROOT / "backends")]
    words = [PROGRAM, str(checkpoint), f"127.0.0.1:{free_port()}", kind, folder]
    return run([*launch, *words], {"PYTHONPATH": os.pathsep.join(path)}, log, timeout=200)


def test_one_process_with_an_engine(checkpoint: Path, folder: str, tmp_path: Path) -> None:
    assert "rank 0: three updates" in train(1, checkpoint, "first", folder, tmp_path / "log")


def test_a_client_of_the_llms_of_all_processes(
    checkpoint: Path, folder: str, tmp_path: Path
) -> None:
    printed = train(RANKS, checkpoint, "every", folder, tmp_path / "log")
    for rank in range(RANKS):
        assert f"rank {rank}: three updates" in printed


def test_a_client_of_one_llm_does_not_reach_the_others(
    checkpoint: Path, folder: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"rank 3 of 4 ranks did not call smt.connect in time"):
        train(RANKS, checkpoint, "first", folder, tmp_path / "log")
