"""Views: mappings in frozen dataclasses, which nobody can change.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Sizes(Unchanging):
...     by_name: Mapping[str, int]
>>> sizes = Sizes({"rows": 3})
>>> sizes.by_name["rows"]
3
>>> sizes.by_name["rows"] = 4
Traceback (most recent call last):
TypeError: 'mappingproxy' object does not support item assignment
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = ["Unchanging", "to_dict"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Unchanging:
    """A base of frozen dataclasses whose dicts, which other values may share, become views when a value is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, value in _list_values(self):
            if type(value) is dict:
                object.__setattr__(self, name, MappingProxyType(value))

    def __reduce__(self) -> tuple[object, ...]:
        values = [value for _, value in _list_values(self)]
        # A view cannot be pickled.
        dicts = [to_dict(one) if isinstance(one, MappingProxyType) else one for one in values]
        return type(self), tuple(dicts)


def to_dict(by_name: Mapping[_K, _V]) -> dict[_K, _V]:
    """Return a dict with the items of `by_name`."""
    # dict() would look up each key of a view.
    return by_name | {} if isinstance(by_name, MappingProxyType) else dict(by_name)


def _list_values(value: Any) -> list[tuple[str, object]]:
    """The values of a dataclass's fields, by name."""
    return [(field.name, getattr(value, field.name)) for field in fields(value)]
