"""Public: classes that users know by the package's name, not by the wing that defines them.

>>> from shardmath import PlanError
>>> PlanError
<class 'shardmath.PlanError'>
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["public", "public_in"]

_C = TypeVar("_C", bound=type)


def public(cls: _C) -> _C:
    """Set `__module__` of the class `cls` to its top package, which tracebacks and pickles then name; return `cls`."""
    cls.__module__ = cls.__module__.partition(".")[0]
    return cls


def public_in(face: str) -> Callable[[_C], _C]:
    """A class decorator that sets `__module__` to `shardmath.<face>`, such as `shardmath.storage`."""

    def name(cls: _C) -> _C:
        cls.__module__ = f"shardmath.{face}"
        return cls

    return name
