"""Whole: integers as people pass them, and nothing that only looks like one.

numpy's integers become Python's: theirs overflow in products that a layout's sizes take part in, and
print differently, so that equal values would have different digests.

>>> as_integer(3, "the size of axis 'tp'", ValueError)
3
>>> as_integer(2.5, "the size of axis 'tp'", ValueError)
Traceback (most recent call last):
ValueError: the size of axis 'tp' is 2.5; give an integer
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

__all__ = ["as_integer"]

MOST = 1 << 256
"""Beyond anything that is counted here, and short enough to be printed."""


def as_integer(value: object, what: str, error: type[ValueError]) -> int:
    """`value` as an int. Raises `error`, which says `what` it is, for floats, text, bools, ..."""
    if type(value) is int and -MOST <= value <= MOST:
        return value
    if type(value) is not bool:
        try:
            index = operator.index(cast(SupportsIndex, value))
            number = int(index)  # index() keeps subclasses, such as IntEnum
        except TypeError:
            pass
        else:
            if -MOST <= number <= MOST:
                return number
            size = number.bit_length()
            raise error(f"{what} is an integer of {size} bits; give one of 64 bits at most")
    raise error(f"{what} is {value!r}; give an integer")
