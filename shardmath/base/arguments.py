"""Arguments: values as callers pass them, checked and made plain when a value of shardmath is made.

1. Values keep plain arguments: `str` and not a subclass, tuples and not lists, so that equal values print,
   pickle and digest in the same way, and cannot be changed afterwards. numpy's integers become Python's:
   numpy's overflow in products of a layout's sizes, and print differently.
2. The type of an argument is checked before it is compared or iterated over: comparing an array, or an object
   with a custom `==`, may return anything or raise.

>>> listed([1, 2], "sizes", ValueError), text("dp", "an axis", ValueError)
((1, 2), 'dp')
>>> known("max", ("min", "max"))
'max'
>>> as_integer(3, "the size of axis 'tp'", ValueError)
3
>>> as_integer(2.5, "the size of axis 'tp'", ValueError)
Traceback (most recent call last):
ValueError: the size of axis 'tp' is 2.5; give an integer
>>> listed("12", "sizes", ValueError)
Traceback (most recent call last):
ValueError: sizes are '12'; give a tuple
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np

from shardmath.base.text import shown

__all__ = ["as_integer", "instance", "known", "listed", "mapping", "text"]

T = TypeVar("T")

MOST = 1 << 256
"""The largest integer: beyond any count, and short enough to be printed."""


def text(value: object, what: str, error: type[ValueError]) -> str:
    """Convert `value`, a str or an instance of a subclass, to a plain str. For other values, raise `error`; its message
    begins with `what`, a noun for the value such as "the name of a tensor"."""
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise error(f"{what} is {shown(value)}; give a str")


def known(value: object, choices: Sequence[str]) -> str | None:
    """The item of `choices` that equals `value`, or None if there is none."""
    if not isinstance(value, str) or value not in choices:
        return None
    return choices[choices.index(value)]


def listed(value: object, what: str, error: type[ValueError]) -> tuple[Any, ...]:
    """Return the items of the iterable `value` as a tuple. If `value` is not iterable, raise `error`; its message
    begins with `what`, a noun for the items such as "sizes".

    It also raises `error` for a str and for bytes.
    """
    if type(value) is tuple:
        return value
    if not isinstance(value, str | bytes):
        try:
            items = iter(value)  # type: ignore[call-overload]
        except TypeError:  # an array without dimensions has an __iter__ that raises
            pass
        else:
            return tuple(items)
    raise error(f"{what} are {shown(value)}; give a tuple")


def mapping(value: object, what: str, of: str, error: type[ValueError]) -> Mapping[Any, Any]:
    """Return `value` if it is a mapping, or else raise `error`. With `what` "layouts are " and `of` "name to Layout",
    the message is, for example, "layouts are 5; give a mapping from name to Layout"."""
    if isinstance(value, Mapping):
        return value
    raise error(f"{what}{shown(value)}; give a mapping from {of}")


def instance(value: object, kind: type[T], fix: str, error: type[ValueError]) -> T:
    """Return `value` if it is an instance of `kind`, or else raise `error`. The error message names `value` and `kind`,
    and ends with `fix`, advice to the user such as "give a Layout"."""
    if isinstance(value, kind):
        return value
    raise error(f"{shown(value)} is not a {kind.__name__}; {fix}")


def as_integer(value: object, what: str, error: type[ValueError]) -> int:
    """Convert `value`, an integer of any type except bool, to an int. For other values, raise `error`; its message
    begins with `what`, a noun for the value such as "a size".

    Also raises it for an integer beyond 2^256.
    """
    if type(value) is int and -MOST <= value <= MOST:
        return value
    # numpy 1 takes its own bool for an index.
    if not isinstance(value, bool | np.bool_):
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
