"""Whole: integers as people pass them, and nothing that only looks like one.

>>> whole(3, "the size of axis 'tp'", ValueError)
3
>>> whole(2.5, "the size of axis 'tp'", ValueError)
Traceback (most recent call last):
ValueError: the size of axis 'tp' is 2.5; give an integer
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

__all__ = ["whole"]


def whole(value: object, what: str, error: type[ValueError]) -> int:
    """`value` as an int. Raises `error`, which says `what` it is, for floats, text, bools and everything else."""
    if type(value) is not bool:
        try:
            return operator.index(cast(SupportsIndex, value))
        except TypeError:
            pass
    raise error(f"{what} is {value!r}; give an integer")
