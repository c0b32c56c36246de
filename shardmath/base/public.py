"""Public: classes that users meet by the package's name alone, not by the floor that they stand on.

>>> from shardmath import PlanError
>>> PlanError
<class 'shardmath.PlanError'>
"""

from __future__ import annotations

from typing import TypeVar

__all__ = ["public"]

_C = TypeVar("_C", bound=type)


def public(cls: _C) -> _C:
    """Names the class in tracebacks and pickles as the package gives it: a floor may change, and the name stays."""
    cls.__module__ = cls.__module__.partition(".")[0]
    return cls
