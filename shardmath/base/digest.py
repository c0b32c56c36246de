"""Digest: a fingerprint of a value's repr, the same on every rank, machine and Python; and JSON with a digest.

>>> digest((1, "tp"))[:16]
'e4a9d0500096bc8c'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from shardmath.base.errors import NotationError, StoreError
from shardmath.base.text import message_of, shown

__all__ = ["BROKEN", "digest", "names_digest", "read_digested"]

BROKEN = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
"""The errors of reading a text that `to_json` did not write."""

PIECE = 1024
"""The number of names that are hashed at once."""


class _Digested(Protocol):
    """A value that has a digest."""

    @property
    def digest(self) -> str:
        """A hash of this object's content, as a hexadecimal str; equal objects have equal hashes."""
        ...


T = TypeVar("T", bound=_Digested)


def digest(value: object) -> str:
    """The SHA-256 digest of `repr(value)`, as 64 hexadecimal digits.

    `value` is made of numbers, text, Runs, tuples and lists.
    """
    from hashlib import sha256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    printed = repr(value)
    return sha256(printed.encode()).hexdigest()


def names_digest(names: Sequence[str]) -> str:
    """A SHA-256 digest, as 64 hexadecimal digits, of the sequence `names`; equal only for equal sequences.

    >>> names_digest(["ab", "c"]) == names_digest(["a", "bc"])
    False
    """
    from hashlib import sha256

    # Piece by piece: the text of tens of thousands of names at once would be copied through main memory.
    pieces = []
    for first in range(0, len(names), PIECE):
        joined = "\0".join(names[first : first + PIECE])
        pieces.append(joined.encode("utf-8", "surrogatepass"))
    zeros = sum(map(_count_zeros, pieces)) + max(len(pieces) - 1, 0)
    lengths: tuple[int, ...] = ()
    if zeros >= len(names):  # a name has the separator: lengths say where names end
        lengths = tuple(map(len, names))
    found = sha256(f"{len(names)} {lengths} ".encode())
    for number, piece in enumerate(pieces):
        found.update(b"\0" if number else b"")
        found.update(piece)
    return found.hexdigest()


def _count_zeros(piece: bytes) -> int:
    """How many bytes are 0, in a quarter of the time of `bytes.count`."""
    return len(piece) - int(np.count_nonzero(np.frombuffer(piece, np.uint8)))


def read_digested(text: str, name: str, version: int, read: Callable[[Any], T]) -> T:
    """Parse the JSON `text` to a dict and return the object that `read` makes of the dict. Raises StoreError unless the
    dict's "format" is `name`, its "version" is `version`, and its "digest" equals the object's attribute `digest`.

    Raises NotationError if `read` does.
    """
    what = name.removeprefix("shardmath ")
    try:
        fields = json.loads(text)
        header = fields["format"], fields["version"]
        written_digest = str(fields["digest"])
        value = read(fields) if header == (name, version) else None
        value_digest = "" if value is None else value.digest
    except (NotationError, StoreError):
        raise
    except BROKEN as error:
        what = f"the text is not {what} ({message_of(error)})"
        raise StoreError(f"{what}; pass a text that to_json wrote") from error
    if value is None:
        header_text = f"the text has format {shown(header[0])} in version {shown(header[1])}"
        what = f"{header_text}, this shardmath reads {name!r} in version {version}"
        raise StoreError(f"{what}; write it again with to_json of this shardmath")
    if value_digest != written_digest:
        raise StoreError(
            f"{what} has digest {value_digest[:12]}, its text says {written_digest[:12]}; "
            f"write it again with to_json, and do not edit the text"
        )
    return value
