"""Given: values as callers pass them, made Python's own where a value of ours is made.

1. What is kept is plain: `str` and not a subclass of it, tuples and not lists, so that equal values
   print, pickle and digest alike, and nobody can change them afterwards. Integers are `whole`'s.
2. A type is looked at before a value is compared or iterated over: comparing an array, or an object
   with an `==` of its own, answers anything or raises.

>>> listed([1, 2], "sizes", ValueError), text("dp", "an axis", ValueError)
((1, 2), 'dp')
>>> known("max", ("min", "max"))
'max'
>>> listed("12", "sizes", ValueError)
Traceback (most recent call last):
ValueError: sizes are '12'; give a tuple
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeVar

__all__ = ["instance", "known", "listed", "mapping", "plural", "shown", "text"]

T = TypeVar("T")

MOST_SHOWN = 200
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """The value's repr, or the beginning of a long one; the type of what cannot be printed.

    An integer of 5,000 digits cannot.
    """
    try:
        out = repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"
    return out if len(out) <= MOST_SHOWN else f"{out[:MOST_SHOWN]}..."


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


def plural(items: int | Sized, what: str, many: str = "") -> str:
    """How many there are, as people say it.

    >>> plural(1, "tensor"), plural([3, 4], "bucket"), plural(0, "box", "boxes")
    ('1 tensor', '2 buckets', '0 boxes')
    """
    count = items if isinstance(items, int) else len(items)
    if count == 1:
        return f"{count} {what}"
    return f"{count} {many or what + 's'}"
