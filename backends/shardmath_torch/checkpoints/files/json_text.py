"""JSON of strangers, and what is said of it in errors: time and memory in proportion to its length.

1. A key that appears twice, NaN and infinite numbers are errors: JSON has none of them, and readers differ in what they
   take instead.
2. Whole numbers are bounded before anything is multiplied, products while they are made.
3. What stood in a file is shown cut short, however long or deep it is.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence

__all__ = ["MOST", "MOST_DIMENSIONS", "count_elements", "read_json", "shown"]

MOST_DIMENSIONS = 64
"""Of a tensor, numpy's limit."""
MOST = (1 << 63) - 1
"""The largest number of bytes, and of elements, that a file can speak of."""


def read_json(text: bytes) -> object:
    """What the text says. Raises ValueError for what is not JSON, and RecursionError where it is too deep."""
    return json.loads(
        text.decode("utf-8"),
        object_pairs_hook=_make_object,
        parse_float=_read_finite,
        parse_constant=_read_finite,
    )


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these members. Raises ValueError for a key that appears twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError(f"{shown(_find_repeated(pairs))} appears twice")
    return out


def _find_repeated(pairs: list[tuple[str, object]]) -> str:
    """The first key that has appeared before, in one pass."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("asked only where one is repeated")


def _read_finite(text: str) -> float:
    """The number. Raises ValueError for NaN, and for one that is or becomes infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)} is not a number of JSON")
    return number


def count_elements(shape: Sequence[int]) -> int:
    """How many elements a shape has. Raises ValueError for more than MOST, and more than MOST_DIMENSIONS dimensions.

    >>> count_elements((3, 4)), count_elements((1 << 62, 1 << 62, 0))
    (12, 0)
    """
    if len(shape) > MOST_DIMENSIONS:
        what = f"{shown(list(shape))} has {len(shape)} dimensions"
        raise ValueError(f"{what}, more than the {MOST_DIMENSIONS} that a tensor can have")
    if 0 in shape:
        return 0
    total = 1
    for n in shape:
        # Looked at after each factor: the product of all may have more digits than there is memory for.
        total *= n
        if total > MOST:
            raise ValueError(f"{shown(list(shape))} has more elements than can be counted")
    return total


class _Short(reprlib.Repr):
    """A repr of bounded length, depth and number of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlist, self.maxtuple, self.maxlevel = 120, 8, 8, 3

    def repr_instance(self, x: object, level: int) -> str:
        """Of other types the name alone: what parts share, their own repr would show again and again."""
        return repr(x) if x is None or isinstance(x, bool | float) else f"<{type(x).__name__}>"


_SHORT = _Short()


def shown(value: object) -> str:
    """The value as an error shows it: its repr, cut short.

    >>> shown("x" * 1000)[:10], len(shown("x" * 1000)), shown([[[[[]]]]])
    ("'xxxxxxxxx", 120, '[[[[...]]]]')
    """
    return _SHORT.repr(value)
