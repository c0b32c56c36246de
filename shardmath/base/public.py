"""Public: classes that users meet by the package's name alone, not by the wing that has them.

>>> from shardmath import PlanError
>>> PlanError
<class 'shardmath.PlanError'>
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["public"]

_C = TypeVar("_C", bound=type)


def public(cls: _C) -> _C:
    """Name the class in tracebacks and pickles as the package gives it, whatever its wing."""
    cls.__module__ = cls.__module__.partition(".")[0]
    return cls
