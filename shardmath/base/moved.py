"""Moved: modules, and names within a module, found by their former paths, with a warning.

>>> import warnings
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     from shardmath.algebra.mesh import Mesh as former
>>> from shardmath import Mesh
>>> former is Mesh, str(caught[0].message)
(True, 'shardmath.algebra is shardmath.layouts.algebra')
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["find_former", "former_attributes", "forward", "forward_names"]

_T = TypeVar("_T")


def forward(names: Mapping[str, str]) -> None:
    """Make imports of former modules (keys of `names`) load the present ones (values), with a DeprecationWarning."""
    # First in the list: otherwise a module within would be found by its folder, and run a second time.
    sys.meta_path.insert(0, _FormerNameFinder(names))


def forward_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for `module` that looks up former names (keys of `names`) at present paths (values).

    Looking up a former name gives a DeprecationWarning; other names raise AttributeError.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return find_former(f"{module}.{name}", names[name])

    return find


def find_former(name: str, now: str) -> object:
    """Return the object at the dotted path `now`, and give a DeprecationWarning that `name` moved there."""
    warnings.warn(f"{name} is {now}", DeprecationWarning, stacklevel=3)
    path, _, attribute = now.rpartition(".")
    return getattr(import_module(path), attribute)


def former_attributes(**names: str) -> Callable[[type[_T]], type[_T]]:
    """Return a class decorator that keeps old attribute names working, with a DeprecationWarning. Each keyword is an
    old name, and its value is the present name, as in `old="new"`.

    They work for reading an attribute, and as keywords of the constructor.

    >>> from dataclasses import dataclass
    >>> @former_attributes(colour="color")
    ... @dataclass(frozen=True)
    ... class Pen:
    ...     color: str
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     made = Pen(colour="red")
    >>> made, str(caught[0].message)
    (Pen(color='red'), 'Pen.colour is Pen.color')
    """

    def warn(cls: type, former: str) -> str:
        now = names[former]
        text = f"{cls.__name__}.{former} is {cls.__name__}.{now}"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return now

    def read_as(former: str) -> property:
        return property(lambda self: getattr(self, warn(type(self), former)))

    def decorate(cls: type[_T]) -> type[_T]:
        plain_init: Callable[..., None] = cls.__init__

        @wraps(plain_init)
        def init(self: Any, *args: Any, **named: Any) -> None:
            # Models have many thousands of such values, few of them made by a former name: only these take longer.
            try:
                plain_init(self, *args, **named)
            except TypeError:
                if names.keys().isdisjoint(named):
                    raise
                for former in names.keys() & named.keys():
                    named[warn(cls, former)] = named.pop(former)
                plain_init(self, *args, **named)

        cls.__init__ = init  # type: ignore[method-assign]
        for former in names:
            setattr(cls, former, read_as(former))
        return cls

    return decorate


class _FormerNameFinder(MetaPathFinder):
    """Finds modules by their former names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import spec that loads the present module for a former `name`; None for any other name.

        A module inside a former package is a former one, too.
        """
        # `head` becomes the former name that `name` is, or is inside of.
        head = name
        while head not in self._names:
            head, dot, _ = head.rpartition(".")
            if not dot:
                return None
        present_name = self._names[head] + name[len(head) :]
        # One warning per former name is enough: a module inside of it does not warn again.
        if name == head:
            warnings.warn(f"{name} is {present_name}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, _PresentLoader(present_name), is_package=True)


class _PresentLoader(Loader):
    """Loads a former name as the module at the present path."""

    def __init__(self, now: str) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import a renamed module by the new name that this loader was given, and return it; `spec`, with the former
        name, is not read. The module's `__spec__` is saved, because importlib overwrites that attribute before
        `exec_module` runs."""
        module = import_module(self._now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec that importlib overwrote in `module`; do not run the module again."""
        module.__spec__ = self._spec
