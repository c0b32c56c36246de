"""Arguments: values as callers pass them, made Python's own where a value of ours is made.

1. What is kept is plain: `str` and not a subclass of it, tuples and not lists, so that equal values
   print, pickle and digest alike, and nobody can change them afterwards. numpy's integers become Python's:
   theirs overflow in products that a layout's sizes take part in, and print differently.
2. A type is looked at before a value is compared or iterated over: comparing an array, or an object
   with an `==` of its own, answers anything or raises.

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

from shardmath.base.text import shown

__all__ = ["as_integer", "instance", "known", "listed", "mapping", "text"]

T = TypeVar("T")

MOST = 1 << 256
"""Beyond anything that is counted here, and short enough to be printed."""


def text(value: object, what: str, error: type[ValueError]) -> str:
    """`value` as a plain str. Raises `error`, which says `what` it is, for anything else."""
    if type(value) is str:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    raise error(f"{what} is {shown(value)}; give a str")


def known(value: object, choices: Sequence[str]) -> str | None:
    """The choice that `value` is, or None if it is not one of them."""
    if not isinstance(value, str) or value not in choices:
        return None
    return choices[choices.index(value)]


def listed(value: object, what: str, error: type[ValueError]) -> tuple[Any, ...]:
    """The items of `value` as a tuple.

    Raises `error`, which says `what` they are, for text and what has no items.
    """
    if type(value) is tuple:
        return value
    if not isinstance(value, str | bytes):
        try:
            items = iter(value)  # type: ignore[call-overload]
        except TypeError:  # an array without dimensions has __iter__, and refuses
            pass
        else:
            return tuple(items)
    raise error(f"{what} are {shown(value)}; give a tuple")


def mapping(value: object, what: str, of: str, error: type[ValueError]) -> Mapping[Any, Any]:
    """`value` itself. Raises `error`, which says `what` it is, if it is not a mapping.

    The message asks for a mapping `of` what it should map.
    """
    if isinstance(value, Mapping):
        return value
    raise error(f"{what}{shown(value)}; give a mapping from {of}")


def instance(value: object, kind: type[T], fix: str, error: type[ValueError]) -> T:
    """`value` itself. Raises `error`, which says what to do instead, if it is not of this kind."""
    if isinstance(value, kind):
        return value
    raise error(f"{shown(value)} is not a {kind.__name__}; {fix}")


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
