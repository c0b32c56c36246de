"""Moved: modules, and names within a module, that are found by a path that they had before, with a warning.

>>> import warnings
>>> with warnings.catch_warnings(record=True) as said:
...     warnings.simplefilter("always")
...     from shardmath.algebra.mesh import Mesh as former
>>> from shardmath import Mesh
>>> former is Mesh, str(said[0].message)
(True, 'shardmath.algebra is shardmath.layouts.algebra')
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["forward", "forward_names"]


def forward(names: Mapping[str, str]) -> None:
    """Have modules of these names, and those within, be found where they are now, with a DeprecationWarning."""
    # First: what is within such a module would be found, and run a second time, by its folder.
    sys.meta_path.insert(0, _Finder(names))


def forward_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module that had these names, each of them now at a path such as `package.module.name`.

    A name that was found there comes with a DeprecationWarning; others are an AttributeError.
    """

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {names[name]}", DeprecationWarning, stacklevel=2)
        path, _, now = names[name].rpartition(".")
        return getattr(import_module(path), now)

    return find


class _Finder(MetaPathFinder):
    """Finds modules by names that they had."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where it is now; None for what never was elsewhere."""
        head = name
        while head not in self._names:
            head, dot, _ = head.rpartition(".")
            if not dot:
                return None
        now = self._names[head] + name[len(head) :]
        if name == head:
            warnings.warn(f"{name} is {now}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, _Loader(now), is_package=True)


class _Loader(Loader):
    """Gives the module that is elsewhere, as it is."""

    def __init__(self, now: str) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, with what it says of where it is."""
        module = import_module(self._now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has run. importlib has written the name that was asked for into it."""
        module.__spec__ = self._spec
