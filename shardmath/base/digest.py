"""Digest: a fingerprint of a value's repr, the same on every rank, machine and Python; and JSON that carries it.

>>> digest((1, "tp"))[:16]
'e4a9d0500096bc8c'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from shardmath.base.errors import NotationError, StoreError
from shardmath.base.text import message_of, shown

__all__ = ["BROKEN", "digest", "names_digest", "read_digested"]

BROKEN = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
"""What reading a text raises that the reader's writer did not write."""


class _Digested(Protocol):
    """A value that has a digest."""

    @property
    def digest(self) -> str:
        """The same for equal values."""
        ...


T = TypeVar("T", bound=_Digested)


def digest(value: object) -> str:
    """SHA-256 of the repr of a value made of tuples, numbers, text and Runs: 64 hexadecimal digits."""
    from hashlib import sha256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    printed = repr(value)
    return sha256(printed.encode()).hexdigest()


def names_digest(names: Sequence[str]) -> str:
    """The same of a sequence of names: of all of them in a row, and of their lengths if need be.

    >>> names_digest(["ab", "c"]) == names_digest(["a", "bc"])
    False
    """
    from hashlib import sha256

    joined = "\0".join(names)
    lengths: tuple[int, ...] = ()
    if joined.count("\0") >= len(names):  # a name has the separator in it
        lengths = tuple(map(len, names))
    printed = f"{len(names)} {lengths} {joined}"
    return sha256(printed.encode("utf-8", "surrogatepass")).hexdigest()


def read_digested(text: str, name: str, version: int, read: Callable[[Any], T]) -> T:
    """The value of JSON that says its format's name, its version and its digest; `read` makes it of the rest.

    Raises StoreError for any other text, NotationError where `read` does.
    """
    what = name.removeprefix("shardmath ")
    try:
        given = json.loads(text)
        written = given["format"], given["version"]
        told = str(given["digest"])
        value = read(given) if written == (name, version) else None
        made = "" if value is None else value.digest
    except (NotationError, StoreError):
        raise
    except BROKEN as error:
        raise StoreError(f"no {what} ({message_of(error)}); give what to_json wrote") from error
    if value is None:
        raise StoreError(f"{shown(written[0])} of version {shown(written[1])}; give {version}")
    if made != told:
        raise StoreError(
            f"{what} has digest {made[:12]}, its text says {told[:12]}; write it again"
        )
    return value
