"""Steps: what a process does to notes of a store, as values that somebody else carries out.

So how processes find each other (`rendezvous`) is tested in every order in which they can act, without threads, stores
and clocks.

1. A process is a generator of steps. It is sent what each step gives, a text or None.
2. If the process does not go on, as after Ctrl-C, `Quit` is raised in the generator, whose next steps undo what it did.
3. No step waits for another process. `Pause` is the only one that takes time: it gives LATE once the time is over.
4. A store whose server has stopped never answers: it counts as lost GRACE_S after the time is over.
"""

from __future__ import annotations

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
"""Between two looks: at first, and after a while."""

LINGER_S = 0.3
"""For others, who look ten times per second, to read why this process has given up."""

GRACE_S = 1.0
"""For an answer of a store that is there, after the time is over."""

LATE = "the time is over"

_T = TypeVar("_T")


class Read(NamedTuple):
    """Gives the note; None if there is none."""

    key: str


class Swap(NamedTuple):
    """Writes `new` where the note is `old`, None for none; gives the note then."""

    key: str
    old: str | None
    new: str


class Add(NamedTuple):
    """Adds a line to a note, or begins one by an empty line before."""

    key: str
    line: str


class Drop(NamedTuple):
    """Removes a note, if it is there."""

    key: str


class Purge(NamedTuple):
    """Removes a note whose key no other process has drawn, and all notes below it: its key and a slash come before."""

    key: str


class Pause(NamedTuple):
    """Gives LATE once the time is over, and None after a while before."""


class Linger(NamedTuple):
    """Leaves others time to read what this process has written last."""


class Quit(Exception):
    """The process does not go on."""


Step: TypeAlias = Read | Swap | Add | Drop | Purge | Pause | Linger
Steps: TypeAlias = Generator[Step, str | None, _T]


def carry_out(steps: Steps[_T], store: Store, until: float) -> _T:
    """What the steps come to in the store, whose time is over then.

    Raises what they raise, RuntimeError if the store is lost, and whatever comes in between, once they have quit.
    """
    pauses = _list_pauses(until)
    answer: str | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            made: _T = end.value
            return made
        try:
            answer = next(pauses) if isinstance(step, Pause) else _ask(step, store, until)
        except RuntimeError:
            raise
        except BaseException:
            _quit(steps, store)
            raise


def _list_pauses(until: float) -> Iterator[str | None]:
    """What each pause gives, after it."""
    pause, longest = PAUSES_S
    while True:
        left = until - time.monotonic()
        time.sleep(max(0.0, min(pause, left)))
        yield LATE if left <= 0 else None
        pause = min(2 * pause, longest)


def _quit(steps: Steps[_T], store: Store) -> None:
    """Have the steps undo what they did, as far as the store is there."""
    with suppress(Quit, RuntimeError):
        step = steps.throw(Quit())
        while True:
            step = steps.send(_ask(step, store, 0.0))


def _ask(step: Step, store: Store, until: float) -> str | None:
    """What the step gives. Raises RuntimeError if the store is lost, or does not answer by that time and a little more.

    An interrupt waits for the step: those that undo it come after it.
    """
    left = max(0.0, until - time.monotonic())
    return threads.within(left + GRACE_S, partial(_act, step, store), GRACE_S)


def _act(step: Step, store: Store) -> str | None:
    """What the step gives, which does not wait."""
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
        case _:
            time.sleep(LINGER_S)
    return None


def _purge(store: Store, key: str) -> None:
    store.delete_key(key)
    # A PrefixStore fails to list its keys if another key is its prefix (torch 2.13). No other key has a meeting's name.
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    # A store of somebody else's kind may list none.
    with suppress(NotImplementedError):
        for name in root.list_keys():
            if f"/{key}/" in f"/{name}":
                root.delete_key(name)
