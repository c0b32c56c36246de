"""Notes: texts that processes leave each other in a key-value store, read and written without waiting.

1. `get` of torch's stores waits for a key that is not there, for as long as the store waits. `read` compares with a
   text that nobody writes, which changes nothing and answers at once (HashStore, FileStore, TCPStore; torch 2.12-2.15).
2. What every rank has to say is a line of one note: reading all of them is one request, however many ranks there are.

>>> import torch.distributed as dist
>>> store = dist.HashStore()
>>> read(store, "came"), read_lines(store, "came")
(None, [])
>>> add_line(store, "came", "rank 0")
>>> add_line(store, "came", "rank 1")
>>> read_lines(store, "came")
['rank 0', 'rank 1']
>>> swap(store, "lead", None, "a"), swap(store, "lead", None, "b"), swap(store, "lead", "a", "b")
('a', 'a', 'b')
"""

from __future__ import annotations

from shardmath_torch.groups.compat import Store

__all__ = ["add_line", "read", "read_lines", "swap"]

NOWHERE = "\0 nobody writes this"


def read(store: Store, key: str) -> str | None:
    """What the note says; None if there is none. Raises RuntimeError if the store is lost."""
    # What somebody else has put there may be no text.
    found = store.compare_set(key, NOWHERE, NOWHERE).decode(errors="replace")
    return None if found == NOWHERE else found


def swap(store: Store, key: str, old: str | None, new: str) -> str | None:
    """Write `new` if the note says `old`, or if there is none and `old` is None; gives what it says then.

    Raises RuntimeError if the store is lost.
    """
    found = store.compare_set(key, old or "", new).decode()
    # Stores answer with what was expected, and write nothing, if there is no note.
    return None if found == old else found


def add_line(store: Store, key: str, line: str) -> None:
    """Add a line to the note, which begins with an empty one if there was none.

    Raises RuntimeError if the store is lost.
    """
    store.append(key, f"\n{line}")  # type: ignore[attr-defined]  # torch's stubs lack it


def read_lines(store: Store, key: str) -> list[str]:
    """The lines that were added. Raises RuntimeError if the store is lost."""
    found = read(store, key)
    return found.split("\n")[1:] if found else []
