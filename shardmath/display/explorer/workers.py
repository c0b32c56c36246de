"""Workers: processes that answer questions, so that no question ends the server or makes the next one wait.

1. A layout of a few letters can take all memory or minutes. So a process with a limit of memory answers, and it is
   ended when a newer question comes, or after a limit of time.
2. A process takes half a second to start. So one more is always started before it is needed.
3. A worker is this module run as a program: questions and answers are lines of JSON on its input and output.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from shardmath.base.text import show_bytes
from shardmath.display.explorer.answer import SCHEMA, answers

__all__ = ["LONGEST_S", "Workers"]

LONGEST_S = 60.0
"""The most seconds that a question may take."""

MOST_ASKERS = 4
"""Askers that have a process at the same time."""

PATIENCE_S = 0.5
"""The seconds, from its beginning, that an answer may take before a newer question ends it."""

MOST_BYTES = 4 * 10**9
"""The most memory of a worker."""

Answer = dict[str, Any]

SMALLER = "write smaller sizes, or fewer ranks or blocks, or plan in a script"

SUPERSEDED: Answer = {"schema": SCHEMA, "superseded": True, "done": True}


class Workers:
    """A process for each of the last askers, such as the tabs of a browser, and one that is ready for the next."""

    def __init__(self, longest: float = LONGEST_S, most_bytes: int = MOST_BYTES) -> None:
        self._longest = longest
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._spare = _Worker(most_bytes)
        self._workers: dict[str, _Worker] = {}
        self._last: dict[str, Mapping[str, str]] = {}

    def ask(
        self, texts: Mapping[str, str], seconds: float, *, asker: str = "", have: int = 0
    ) -> Answer:
        """Return the answer to `texts` once it has more than `have` entries or is whole, or as it is after `seconds`.
        Its `done` says whether it is whole; if not, ask for the same again.

        A question ends the one before of the same `asker`, whose answer is then `superseded`.
        """
        until = time.monotonic() + seconds
        self._last[asker] = texts
        with self._lock:
            # While this thread waited for the lock, another one may have come with a newer question.
            if self._last.get(asker) != texts:
                return SUPERSEDED
            worker = self._workers.pop(asker, None) or self._take(asker)
            # Last in the dict, whose first asker is the one who has not asked for longest.
            self._workers[asker] = worker
            if not worker.is_on(texts):
                # To end a process costs more than to wait for an answer that is almost there.
                worker.wait_until_free(PATIENCE_S)
                if worker.is_busy:
                    worker.close()
                    worker = self._take(asker)
                worker.begin(texts, self._longest)
        return worker.wait(texts, max(until - time.monotonic(), 0.0), have)

    def _take(self, asker: str) -> _Worker:
        """Give an asker the process that is ready. If that makes too many, the first asker's process is ended."""
        self._workers.pop(asker, None)
        if len(self._workers) >= MOST_ASKERS:
            first = next(iter(self._workers))
            self._workers.pop(first).close()
            self._last.pop(first, None)
        worker = self._spare if not self._spare.is_busy else _Worker(self._most_bytes)
        self._workers[asker] = worker
        self._spare = _Worker(self._most_bytes)
        return worker

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for worker in (*self._workers.values(), self._spare):
                worker.close()


class _Worker:
    """A process that answers one question at a time."""

    def __init__(self, most_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(most_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._changed = threading.Condition()
        self._texts: dict[str, str] | None = None
        self._answer: Answer = {}
        self._began = 0.0
        self._is_superseded = self._is_ended = self._has_failed = False
        self._complaint = ""
        for read in (self._read, self._read_errors):
            threading.Thread(target=read, daemon=True, name="shardmath explorer").start()

    @property
    def is_busy(self) -> bool:
        """Whether the process cannot take a question: it is at the last one, or has ended."""
        is_open = self._texts is not None and not self._answer.get("done")
        return is_open or self._is_ended

    def is_on(self, texts: Mapping[str, str]) -> bool:
        """Whether this was the last question, and the process has not ended by itself, in which case another may do
        better.
        """
        return self._texts == dict(texts) and not self._has_failed

    def begin(self, texts: Mapping[str, str], longest: float) -> None:
        """Ask the process; it may take `longest` seconds."""
        with self._changed:
            self._texts = dict(texts)
            self._answer = {}
            self._began = time.monotonic()
            if self._is_ended:
                self._has_failed = True
                self._answer = self._refuse(self._explain_end())
                return
        timer = threading.Timer(longest, self._end_if_on, (self._texts, longest))
        timer.daemon = True
        timer.start()
        stdin = self._process.stdin
        assert stdin is not None, "it was made with a pipe"
        # If the process has ended, its reader says so.
        with suppress(OSError):
            stdin.write(json.dumps(self._texts) + "\n")
            stdin.flush()

    def _end_if_on(self, texts: Mapping[str, str], longest: float) -> None:
        """End the process if it is still at this question."""
        with self._changed:
            if self._texts is texts and not self._answer.get("done"):
                self._process.kill()
                self._is_ended = True
                self._answer = self._refuse(f"it takes more than {longest:g} s; {SMALLER}")
                self._changed.notify_all()

    def wait_until_free(self, patience: float) -> None:
        """Wait until the last question is answered, or `patience` seconds after it was asked."""
        until = self._began + patience
        with self._changed:
            while self.is_busy and not self._is_ended and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())

    def wait(self, texts: Mapping[str, str], seconds: float, have: int) -> Answer:
        """Return the answer to `texts` after `seconds`, or once it has more than `have` entries or, if that is 0, is
        whole.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while self._texts == dict(texts) and not self._is_enough(have):
                now = time.monotonic()
                if now >= until or self._is_superseded:
                    break
                self._changed.wait(until - now)
            if self._is_superseded or self._texts != dict(texts):
                return SUPERSEDED
            return self._answer or {"schema": SCHEMA, "done": False, "faults": {}}

    def _is_enough(self, have: int) -> bool:
        """Whether the answer is whole, or has more than `have` entries, if that is not 0."""
        return bool(self._answer.get("done")) or 0 < have < len(self._answer)

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
        self._process.wait()
        with self._changed:
            self._is_ended = True
            if self._texts is not None and not self._answer.get("done"):
                self._has_failed = True
                self._answer = self._refuse(self._explain_end())
            self._changed.notify_all()

    def _read_errors(self) -> None:
        """Keep the last line that the process writes to stderr."""
        stderr = self._process.stderr
        assert stderr is not None, "it was made with a pipe"
        with stderr:
            for line in stderr:
                self._complaint = line.strip() or self._complaint

    def _explain_end(self) -> str:
        """Why the process has ended by itself."""
        status = self._process.poll()
        return f"the process that answers ended with status {status}: {self._complaint or 'it said nothing'}"

    def _refuse(self, why: str) -> Answer:
        """The answer so far, and why there is no more."""
        nothing: Answer = {"schema": SCHEMA, "faults": {}}
        return nothing | self._answer | {"refused": why, "done": True}


def _limit_memory(most_bytes: int) -> None:
    """Let requests for more memory raise MemoryError in this process, if the system can do so."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def _work(questions: IO[str], out: IO[str], most_bytes: int) -> None:
    """Answer each line of `questions`."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in questions:
            lines.put(line)
        # The server has ended, however it did; an answer under way is for nobody.
        os._exit(0)

    threading.Thread(target=read, daemon=True, name="shardmath explorer").start()
    while True:
        answer: Answer = {"schema": SCHEMA, "faults": {}}
        is_full = False
        try:
            for answer in answers(json.loads(lines.get())):
                _write(answer, out)
        except MemoryError:
            is_full = True
        # Only here has the error given up the frames, and with them the memory, in which it was raised.
        if is_full:
            why = f"it needs more than {show_bytes(most_bytes)} of memory; {SMALLER}"
            _write(answer | {"refused": why, "done": True}, out)


def _write(answer: Answer, out: IO[str]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    most = int(sys.argv[1])
    _limit_memory(most)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _work(sys.stdin, sys.stdout, most)
