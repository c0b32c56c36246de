"""The Python files of a newer vLLM than .venv-vllm has, of which no build for CPUs exists: enough to import it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

__all__ = ["VERSION", "fetch_or_skip", "prefer", "prefer_on_cpu"]

VERSION = "0.33.0"
FOLDER = Path(sys.prefix, "contract", f"vllm-{VERSION}")
"""In the environment, so that `make clean` removes it."""

TIMEOUT_S = 900
LOST = ("connection broken", "Connection aborted", "Max retries exceeded", "ReadTimeoutError")
"""Of which pip says one if the index does not answer."""


def fetch_or_skip(package: str = "vllm", version: str = VERSION) -> Path:
    """The folder with a package's files, which pip downloads once (336 MB for vLLM). Skips the test if pip reaches no
    index.
    """
    to = FOLDER.with_name(f"{package}-{version}")
    if to.exists():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--quiet", "--dest", scratch, f"{package}=={version}"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode and any(words in done.stderr for words in LOST):
            pytest.skip(f"{package} {version} cannot be downloaded: {done.stderr.strip()[-500:]}")
        assert done.returncode == 0, done.stderr
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            kept = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(unpacked, [*kept, f"{package}-{version}.dist-info/METADATA"])
            # SGLang looks for folders of sources beside its files when it is imported.
            for name in archive.namelist():
                Path(unpacked, name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(unpacked, to)
        except OSError:
            # Another process was faster.
            shutil.rmtree(unpacked, ignore_errors=True)
    return to


def prefer(folder: str) -> None:
    """Have this process import vLLM from the folder."""
    assert "vllm" not in sys.modules
    sys.path.insert(0, folder)


def prefer_on_cpu(folder: str) -> None:
    """The same, where vLLM builds models for CPUs: its wheel is for GPUs by name, and asks for one."""
    prefer(folder)
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
