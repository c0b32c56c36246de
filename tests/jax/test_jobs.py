"""A JAX job refits another JAX job, and an engine of torch: four real processes, two by two."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax.job import EACH, SHAPES, STEPS, value

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/from-jax.md"
PROGRAM = re.compile(
    r"^```python\n# (\w+\.py), in \.venv-jax\n(.*?)^```$.*?^```text\n(.*?)^```$", re.M | re.S
)
ENVIRONMENT = os.environ | {
    "GLOO_SOCKET_IFNAME": "lo",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}",
    "XLA_FLAGS": "",
}


def free_address() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


def run_jobs(program: list[str], folder: Path) -> list[str]:
    """What each of the four processes prints, trainers first. Ends all if one fails."""
    meeting = free_address()
    processes = []
    try:
        for role in ("trainer", "engine"):
            of_jax = free_address()
            for place in range(EACH):
                command = [sys.executable, *program, role, str(place), of_jax, meeting]
                processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
                    )
                )
        printed = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes)
    # JAX's own gloo says there how many peers it has.
    return [re.sub(r"^\[Gloo\].*\n", "", text, flags=re.M) for text in printed]


def test_into_another_jax_job() -> None:
    sums = [float(value(name, step).sum()) for step in range(STEPS) for name in SHAPES]
    arrived = [json.loads(text) for text in run_jobs(["-m", "tests.jax.job"], ROOT)]
    assert arrived == [None] * EACH + [pytest.approx(sums)] * EACH


@pytest.mark.parametrize(("processes", "read"), [(1, 24), (2, 18)])
def test_what_a_process_of_several_devices_holds(processes: int, read: int) -> None:
    """All that JAX makes a local array of: not if devices of two processes take turns in a row of the mesh."""
    devices = 8 // processes
    flags = f"--xla_force_host_platform_device_count={devices}"
    of_jax = free_address()
    started = []
    try:
        for place in range(processes):
            words = ["-m", "tests.jax.held", str(place), str(processes), of_jax]
            started.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=ENVIRONMENT | {"XLA_FLAGS": flags},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        printed = [each.communicate(timeout=100)[0].splitlines()[-1] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for place, (count, said, absent) in enumerate(map(json.loads, printed)):
        assert count == read
        assert all("contiguous subcube" in words for words in said)
        assert ("on one rank" if place == 0 else "process 1 has none of the devices") in absent


def read_programs() -> dict[str, tuple[str, str]]:
    """The programs of the page, and what they print, by name."""
    found = {name: (code, text) for name, code, text in PROGRAM.findall(PAGE.read_text())}
    assert found.keys() == {"shardings.py", "refit_jax.py"}
    return found


def test_the_page_s_shardings(tmp_path: Path) -> None:
    code, text = read_programs()["shardings.py"]
    (tmp_path / "shardings.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "shardings.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == text


def test_the_page_s_refit_of_fused_torch_weights(tmp_path: Path) -> None:
    code, text = read_programs()["refit_jax.py"]
    (tmp_path / "refit_jax.py").write_text(code)
    assert run_jobs(["refit_jax.py"], tmp_path) == [""] * EACH + [text] * EACH
