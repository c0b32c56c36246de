"""Sessions: programs and all that they start, of which nothing is left afterwards, whatever went wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["Running", "begin", "run"]

END_S = 20.0

Running = subprocess.Popen[bytes]


@contextlib.contextmanager
def begin(words: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[Running]:
    """Python with these words and variables, in a session of its own, as long as the block is; it prints to `log`."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=log.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def run(words: Sequence[str], env: Mapping[str, str], log: Path, timeout: float) -> str:
    """What Python prints with these words and variables. Raises AssertionError where it fails."""
    with begin(words, env, log) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
    text = log.read_text()
    assert code == 0, f"exit code {code}: {text[-4000:]}"
    return text


def _end(process: Running) -> None:
    """End the program and all that it started, in time or by force."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    deadline = time.monotonic() + END_S
    while left := _list_left(process.pid):
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        assert time.monotonic() < deadline, f"processes {left} do not end"
        time.sleep(0.1)
    process.wait()


def _list_left(session: int) -> list[int]:
    """Processes of a session that run."""
    left = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may have anything in it: state, parent, group, session.
            state, _, _, own, *_ = path.read_text().rpartition(")")[2].split()
            if int(own) == session and state != "Z":
                left.append(int(path.parent.name))
    return left
