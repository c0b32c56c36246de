"""Steps: a process's operations on a store's notes, as values that `carry_out` executes.

So tests run the protocol (`rendezvous`) in every order in which processes can act, without threads, stores and clocks.

1. A process is a generator of steps. It is sent each step's answer, a text or None.
2. If the process has to stop, as after Ctrl-C, `Quit` is raised in the generator, whose next steps undo its changes.
3. No step waits for another process. Only `Pause` takes time: its answer is LATE once the time is over.
4. A store whose server has stopped never answers: it counts as lost GRACE_S after the time is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from shardmath_torch.groups.agreement import notes, threads
from shardmath_torch.groups.compat import PrefixStore, Store

__all__ = [
    "LATE",
    "Add",
    "Drop",
    "Linger",
    "Pause",
    "Purge",
    "Quit",
    "Read",
    "Step",
    "Steps",
    "Swap",
    "carry_out",
]

PAUSES_S = (0.005, 0.1)
"""The first and the longest pause between two reads."""

LINGER_S = 0.3
"""Time for others, who read ten times per second, to see why this process has given up."""

GRACE_S = 1.0
"""Time for a running store to answer after the time is over."""

LATE = "the time is over"

_T = TypeVar("_T")


class Read(NamedTuple):
    """A request (step) to read the text stored under `key`; the answer is the text, or None if the key is absent."""

    key: str


class Swap(NamedTuple):
    """A request (step) to store `new` under `key` if the text there is `old` (None: no text); the answer is the text
    that is then there."""

    key: str
    old: str | None
    new: str


class Add(NamedTuple):
    """A request (step) to append a line break and `line` to the text stored under `key`; a missing text counts as
    empty."""

    key: str
    line: str


class Drop(NamedTuple):
    """A request (step) to remove the text stored under `key`, if there is one."""

    key: str


class Purge(NamedTuple):
    """A request (step) to remove the text stored under `key`, and, if the store can list its keys, all texts whose keys
    begin with `key` and a slash. No other group may use such keys."""

    key: str


class Pause(NamedTuple):
    """A step between requests to the store: wait a moment; the answer is LATE if the time for all steps is over, else
    None."""


class Linger(NamedTuple):
    """A request (step) to sleep for a short fixed time, so that other processes can read this process's last message in
    the store before this process ends."""


class Quit(Exception):
    """The exception that is raised in a generator of requests to a store if this process has to stop, as after Ctrl-C.
    The generator then yields the requests that undo its changes."""


Step: TypeAlias = Read | Swap | Add | Drop | Purge | Pause | Linger
Steps: TypeAlias = Generator[Step, str | None, _T]


def carry_out(steps: Steps[_T], store: Store, until: float) -> _T:
    """Carry out the requests to `store` that the generator `steps` yields, and return the generator's result. A `Pause`
    that is requested after `until`, a time of `time.monotonic()`, gets the answer LATE, so that the generator can give
    up.

    `until` is compared with `time.monotonic()`, and the answer to a late Pause is LATE; other requests are still
    carried out. A Pause waits at most 0.1 seconds.

    Raises the steps' exceptions, RuntimeError if the store is lost, and an interrupt once the steps have undone theirs.
    """
    pauses = _list_pauses(until)
    process = os.getpid()
    answer: str | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        try:
            answer = next(pauses) if isinstance(step, Pause) else _execute(step, store, until)
        except RuntimeError:
            raise
        except BaseException:
            # Not in a process that was forked here, as by a signal handler: its parent goes on with these steps.
            if os.getpid() == process:
                _quit(steps, store)
            raise


def _list_pauses(until: float) -> Iterator[str | None]:
    """Sleep for each pause in turn, doubling up to the longest, and yield its answer."""
    pause, longest = PAUSES_S
    while True:
        seconds_left = until - time.monotonic()
        time.sleep(max(0.0, min(pause, seconds_left)))
        yield LATE if seconds_left <= 0 else None
        pause = min(2 * pause, longest)


def _quit(steps: Steps[_T], store: Store) -> None:
    """Have the steps undo their changes, unless the store is lost."""
    with suppress(Quit, RuntimeError):
        step = steps.throw(Quit())
        while True:
            step = steps.send(_execute(step, store, 0.0))


def _execute(step: Step, store: Store, until: float) -> str | None:
    """The step's answer. Raises RuntimeError if the store is lost, or does not answer GRACE_S after that time.

    An interrupt waits for the step to end, since the steps that undo it must follow it.
    """
    seconds_left = max(0.0, until - time.monotonic())
    return threads.within(seconds_left + GRACE_S, partial(_act, step, store), GRACE_S)


def _act(step: Step, store: Store) -> str | None:
    """Execute a step in the calling thread, and return its answer."""
    match step:
        case Read(key):
            return notes.read(store, key)
        case Swap(key, old, new):
            return notes.swap(store, key, old, new)
        case Add(key, line):
            notes.add_line(store, key, line)
        case Drop(key):
            store.delete_key(key)
        case Purge(key):
            _purge(store, key)
        # Linger: `carry_out` itself answers a Pause.
        case _:
            time.sleep(LINGER_S)
    return None


def _purge(store: Store, key: str) -> None:
    store.delete_key(key)
    # A PrefixStore fails to list its keys if another key is its prefix (torch 2.13), so the root store lists all keys.
    # A meeting's name is unique, so no other group's key matches.
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    # Custom stores may not list their keys.
    with suppress(NotImplementedError):
        for name in root.list_keys():
            if f"/{key}/" in f"/{name}":
                root.delete_key(name)
