"""A real `vllm serve` of the policy of docs/trl.md, on CPUs, that all tests here share."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "integrations"))

from tests.distributed.pool import free_port
from tests.vllm.served.sessions import Running, begin, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/trl.md"
PROGRAM = re.compile(r"^```python\n# (\w+\.py), in \.venv-vllm\n(.*?)^```$", re.M | re.S)
SERVER = re.compile(r"^VLLM_SERVER_DEV_MODE=1 vllm (serve tiny .*)$", re.M)
START_S = 280.0
SMALL = ["--host=127.0.0.1", "--enforce-eager", "--max-model-len=64"]
"""Beside what the page's command says: a start that takes no minutes, and nobody else on the network."""

os.environ.update(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / part) for part in ("", "backends", "integrations")
        ),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


@pytest.fixture(scope="session")
def programs() -> dict[str, str]:
    """The programs of the page, by name."""
    return dict(PROGRAM.findall(PAGE.read_text()))


@pytest.fixture(scope="session")
def folder(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's first program has written the policy."""
    made = tmp_path_factory.mktemp("policy")
    (made / "tiny_policy.py").write_text(programs["tiny_policy.py"])
    run(["tiny_policy.py", "tiny"], {}, made / "tiny.log", timeout=100)
    return made


@pytest.fixture(scope="session")
def url(folder: Path) -> Iterator[str]:
    """The page's server."""
    found = SERVER.search(PAGE.read_text())
    assert found is not None
    port = free_port()
    words = ["-m", "vllm.entrypoints.cli.main", *shlex.split(found[1]), f"--port={port}", *SMALL]
    log = folder / "server.log"
    with begin(words, {"VLLM_SERVER_DEV_MODE": "1"}, log) as process:
        wait_until_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"


def wait_until_up(url: str, process: Running, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        time.sleep(0.5)
    raise AssertionError(f"no answer in {START_S:g} s: {log.read_text()[-4000:]}")
