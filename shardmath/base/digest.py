"""Digest: a fingerprint of a value's repr, the same on every rank, machine and Python.

>>> digest((1, "tp"))[:16]
'e4a9d0500096bc8c'
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["digest", "names_digest"]


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
