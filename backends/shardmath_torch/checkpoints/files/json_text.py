"""JSON text: untrusted JSON read, and shown in errors, in time and memory proportional to its length.

1. A repeated key, NaN and infinite numbers raise: JSON has none of them, and readers treat them differently.
2. Whole numbers are bounded before they are multiplied, and products while they are computed.
3. Errors show a file's content cut short, however long or deep it is.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence

__all__ = ["MOST", "MOST_DIMENSIONS", "count_elements", "read_json", "shown"]

MOST_DIMENSIONS = 64
"""The most dimensions of a tensor: numpy's limit."""
MOST = (1 << 63) - 1
"""The largest number of bytes, and of elements, that a file may give."""


def read_json(text: bytes) -> object:
    """Return the Python value of the JSON text `text`. Raises ValueError if it is not strict JSON (with finite numbers
    and no repeated keys), RecursionError if it nests too deep."""
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_make_object,
        parse_float=_read_finite,
        parse_constant=_read_finite,
    )


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The dict of these pairs of key and value in a JSON object. Raises ValueError for a key that appears twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        name = shown(_find_repeated(pairs))
        raise ValueError(f"the key {name} appears twice in one object; remove one of the two")
    return members


def _find_repeated(pairs: list[tuple[str, object]]) -> str:
    """The first key of the pairs that has appeared before."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("asked only where one is repeated")


def _read_finite(text: str) -> float:
    """The number in `text`. Raises ValueError for NaN, infinity, and a number too large for a float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is not a number of JSON; write a finite one")
    return number


def count_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this `shape`. Raises ValueError for more than MOST (2^63 - 1)
    elements or MOST_DIMENSIONS (64) dimensions.

    >>> count_elements((3, 4)), count_elements((1 << 62, 1 << 62, 0))
    (12, 0)
    """
    if len(shape) > MOST_DIMENSIONS:
        what = f"shape {shown(list(shape))} has {len(shape)} dimensions"
        raise ValueError(
            f"{what}, more than the {MOST_DIMENSIONS} that a tensor can have; join some"
        )
    if 0 in shape:
        return 0
    total = 1
    for n in shape:
        # Checked after each factor: the product of all may have more digits than fit into memory.
        total *= n
        if total > MOST:
            what = f"shape {shown(list(shape))} has more than {MOST} elements, the most of a tensor"
            raise ValueError(f"{what}; make it smaller")
    return total


class _BoundedRepr(reprlib.Repr):
    """A repr of bounded length, depth and number of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlist, self.maxtuple, self.maxlevel = 120, 8, 8, 3

    def repr_instance(self, x: object, level: int) -> str:
        """Return the repr of `x` if it is None, a bool or a float, and otherwise the name of its type, since other
        reprs might be long."""
        return repr(x) if x is None or isinstance(x, bool | float) else f"<{type(x).__name__}>"


_REPR = _BoundedRepr()


def shown(value: object) -> str:
    """Return the repr of `value`, cut short to be shown in an error.

    >>> shown("x" * 1000)[:10], len(shown("x" * 1000)), shown([[[[[]]]]])
    ("'xxxxxxxxx", 120, '[[[[...]]]]')
    """
    return _REPR.repr(value)
