"""Notes: short texts in a key-value store, read and written without waiting.

1. `get` of torch's stores waits for a missing key until the store's timeout. `read` is a compare-and-set against a
   text that nobody writes, which changes nothing and answers at once (HashStore, FileStore, TCPStore; torch 2.12-2.15).
2. Ranks add lines to one note, so that reading all ranks' lines is one request, however many ranks there are.

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
    """Return the text stored under `key`; None if there is none. Raises RuntimeError if the store is lost."""
    # Not `get`, which waits for a missing key; this changes nothing. Another program's value may not be UTF-8.
    text = store.compare_set(key, NOWHERE, NOWHERE).decode(errors="replace")
    return None if text == NOWHERE else text


def swap(store: Store, key: str, old: str | None, new: str) -> str | None:
    """Write `new` under `key` if its text is `old` (None: no text yet), and return the text that is then there.

    Raises RuntimeError if the store is lost.
    """
    # An expected "" means that there is no text yet.
    text = store.compare_set(key, old or "", new).decode()
    # Without a text, stores that expect `old` write nothing and answer with `old`.
    return None if text == old else text


def add_line(store: Store, key: str, line: str) -> None:
    """Append a line break and `line` to the text stored under `key`; a missing text counts as empty.

    Raises RuntimeError if the store is lost.
    """
    store.append(key, f"\n{line}")  # type: ignore[attr-defined]  # torch's stubs lack it


def read_lines(store: Store, key: str) -> list[str]:
    """Return the lines that `add_line` stored under `key`. Raises RuntimeError if the store is lost."""
    text = read(store, key)
    return text.split("\n")[1:] if text else []
