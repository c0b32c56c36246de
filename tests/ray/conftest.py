"""Ray on this machine, in a session of its own, and what its workers need to find the packages of this tree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), str(ROOT / "backends"), str(ROOT / "integrations")]
sys.path[:0] = PATHS
PROGRAM = re.compile(r"^```python\n(# ray_loop\.py, .*?)^```$", re.M | re.S)

# Read by Ray as it is imported, and by all processes that it starts.
os.environ.update(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program of docs/ray.md, in a folder where workers of Ray find it, and which is their home."""
    # Ray writes a token into the home folder of whoever starts it.
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(folder))
        patched.setenv("PYTHONPATH", os.pathsep.join([str(folder), *PATHS]))
        patched.syspath_prepend(str(folder))
        (found,) = PROGRAM.findall((ROOT / "docs/ray.md").read_text())
        (folder / "ray_loop.py").write_text(found)
        yield folder / "ray_loop.py"
