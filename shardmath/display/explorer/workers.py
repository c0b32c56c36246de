"""Workers: processes that answer questions, so that no question ends the server or makes the next one wait.

1. A layout of a few letters can take all memory or minutes. So a process with a limit of memory answers, and it is
   ended when a newer question comes, or after a limit of time.
2. A process takes half a second to start. So one more is always started before it is needed.
3. A worker is this module run as a program: questions and answers are lines of JSON on its input and output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from shardmath.display.explorer.answer import SCHEMA, answers

__all__ = ["LONGEST_S", "Workers"]

LONGEST_S = 60.0
"""The most seconds that a question may take."""

PATIENCE_S = 0.5
"""The seconds, from its beginning, that an answer may take before a newer question ends it."""

MOST_BYTES = 4 << 30
"""The most memory of a worker."""

Answer = dict[str, Any]

SUPERSEDED: Answer = {"schema": SCHEMA, "superseded": True, "done": True}


class Workers:
    """Two processes, of which one answers the last question, and the other is ready for the next one."""

    def __init__(self, longest: float = LONGEST_S) -> None:
        self._longest = longest
        self._lock = threading.Lock()
        self._active = _Worker()
        self._spare = _Worker()
        self._last: Mapping[str, str] = {}

    def ask(self, texts: Mapping[str, str], seconds: float) -> Answer:
        """Return the answer to `texts`, as much of it as is there after `seconds`. Its `done` says whether that is all;
        if not, ask for the same again. An answer that a newer question has ended is `superseded`.
        """
        until = time.monotonic() + seconds
        self._last = texts
        with self._lock:
            # While this thread waited for the lock, another one may have come with a newer question.
            if self._last != texts:
                return SUPERSEDED
            worker = self._active
            if not worker.is_on(texts):
                # To end a process costs more than to wait for an answer that is almost there.
                worker.wait_until_free(PATIENCE_S)
                if worker.is_busy:
                    worker = self._replace()
                worker.begin(texts, self._longest)
        return worker.wait(texts, max(until - time.monotonic(), 0.0))

    def _replace(self) -> _Worker:
        """End the active process, and return the other one, which is now active."""
        self._active.close()
        self._active, self._spare = self._spare, _Worker()
        return self._active

    def close(self) -> None:
        """End both processes."""
        with self._lock:
            self._active.close()
            self._spare.close()


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._changed = threading.Condition()
        self._texts: dict[str, str] | None = None
        self._answer: Answer = {}
        self._began = self._until = self._longest = 0.0
        self._is_superseded = self._is_ended = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether the process cannot take a question: it is at the last one, or has ended."""
        is_open = self._texts is not None and not self._answer.get("done")
        return is_open or self._is_ended

    def is_on(self, texts: Mapping[str, str]) -> bool:
        """Whether this was the last question, unless its process was ended before it had answered."""
        return self._texts == dict(texts) and (bool(self._answer) or not self._is_ended)

    def begin(self, texts: Mapping[str, str], longest: float) -> None:
        """Ask the process; it may take `longest` seconds."""
        with self._changed:
            self._texts = dict(texts)
            self._answer = {}
            self._began = time.monotonic()
            self._longest = longest
            self._until = self._began + longest
        stdin = self._process.stdin
        assert stdin is not None, "it was made with a pipe"
        # If the process has ended, its reader says so.
        with suppress(OSError):
            stdin.write(json.dumps(self._texts) + "\n")
            stdin.flush()

    def wait_until_free(self, patience: float) -> None:
        """Wait until the last question is answered, or `patience` seconds after it was asked."""
        until = self._began + patience
        with self._changed:
            while self.is_busy and not self._is_ended and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def wait(self, texts: Mapping[str, str], seconds: float) -> Answer:
        """Return the answer to `texts` after `seconds`, or once it is whole."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._texts == dict(texts) and not self._answer.get("done"):
                now = time.monotonic()
                if now >= self._until:
                    self._process.kill()
                    self._is_ended = True
                    self._answer = self._refuse(f"it takes more than {self._longest:g} s")
                elif now >= until:
                    break
                else:
                    self._changed.wait(min(until, self._until) - now)
            if self._is_superseded or self._texts != dict(texts):
                return SUPERSEDED
            return self._answer or {"schema": SCHEMA, "done": False, "faults": {}}

    def close(self) -> None:
        """End the process; whoever waits for it is told."""
        with self._changed:
            self._is_superseded = True
            self._changed.notify_all()
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Take the answers as they come, and in the end why no more come."""
        stdout = self._process.stdout
        assert stdout is not None, "it was made with a pipe"
        with stdout:
            for line in stdout:
                with self._changed:
                    self._answer = json.loads(line)
                    self._changed.notify_all()
        with self._changed:
            self._is_ended = True
            if self._texts is not None and not self._answer.get("done"):
                self._answer = self._refuse(f"it needs more than {MOST_BYTES >> 30} GiB of memory")
            self._changed.notify_all()

    def _refuse(self, why: str) -> Answer:
        """The answer so far, and why there is no more."""
        fix = "write smaller sizes, or fewer ranks or blocks, or plan in a script"
        nothing: Answer = {"schema": SCHEMA, "faults": {}}
        return nothing | self._answer | {"refused": f"{why}; {fix}", "done": True}


def _limit_memory() -> None:
    """Let requests for more memory than MOST_BYTES raise MemoryError in this process, where the system can do so."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _work(questions: IO[str], out: IO[str]) -> None:
    """Answer each line of `questions`, and end at the first that cannot be answered."""
    for line in questions:
        for answer in answers(json.loads(line)):
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    _limit_memory()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _work(sys.stdin, sys.stdout)
