"""Custom: a transform made of functions that the user writes.

>>> import numpy as np
>>> def halve(array):
...     return array[..., ::2], array[..., 1::2]
>>> def interleave(arrays):
...     pairs = np.stack(arrays, axis=-1)
...     return pairs.reshape(*pairs.shape[:-2], -1)
>>> parts = (Component("even", "int64", (2,)), Component("odd", "int64", (2,)))
>>> print(Custom("halves", parts, at_source=halve, at_destination=interleave))
Custom('halves': even int64 per 2, odd int64 per 2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.arguments import instance, listed, text
from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.values.formats.elements import Array
from shardmath.values.transforms.components import AsHeld, Companion, Component, End, Form

__all__ = ["Custom", "OnTensors"]

Preparing: TypeAlias = Callable[[Array], tuple[Array, ...]]
Finalizing: TypeAlias = Callable[[tuple[Array, ...]], Array]
OnTensors: TypeAlias = tuple[Callable[..., object] | None, Callable[..., object] | None]
"""The same two functions for a backend's tensors; None if the backend calls those for arrays."""

Beside: TypeAlias = tuple[tuple[Companion, ...], tuple[Companion, ...]]
"""Companions at the source, and at the destination."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A custom transform: a function at the source makes the components (tensors to send), and a function at the
    destination makes the tensor from them.

    Both work block by block on arrays without holes (see `components`); None leaves the tensor as it is held there.
    `name` stands for the functions: ranks compare it. `on_tensors` are the same two for torch's tensors. `beside` are
    the tensor's companions at the source, and those at the destination. Raises PlanError for invalid components, for
    two with one name, and if both functions are None.
    """

    name: str
    parts: tuple[Component, ...]
    at_source: Preparing | None = None
    at_destination: Finalizing | None = None
    on_tensors: OnTensors = (None, None)
    beside: Beside = ((), ())

    def __post_init__(self) -> None:
        name = text(self.name, "the name of a Custom", PlanError)
        parts = listed(self.parts, f"the components of Custom {name!r}", PlanError)
        for part in parts:
            instance(part, Component, "give Component(name, dtype)", PlanError)
        names = [part.name for part in parts]
        if not names or len(set(names)) < len(names):
            raise PlanError(
                f"Custom {name!r} has components {names}; give one or more different names"
            )
        functions: dict[str, object] = {
            "at_source": self.at_source,
            "at_destination": self.at_destination,
        }
        if all(function is None for function in functions.values()):
            raise PlanError(f"Custom {name!r} has no function; give at_source= or at_destination=")
        for option, function in functions.items():
            if function is not None and not callable(function):
                what = f"Custom {name!r} has {option}={shown(function)}, which cannot be called"
                raise PlanError(f"{what}; give a function or None")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "beside", _read_beside(name, self.beside))

    def __str__(self) -> str:
        src, dst = ["/".join(companion.suffix for companion in end) for end in self.beside]
        names = f" from w{src} to w{dst}" if src or dst else ""
        return f"Custom({self.name!r}: {', '.join(map(str, self.parts))}{names})"

    def companions(self, end: End) -> tuple[Companion, ...]:
        """Return the companions (arrays sent with the tensor, such as scales) that were given for the source
        or the destination, as `end` says."""
        at_source, at_destination = self.beside
        return at_source if end == "source" else at_destination

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the components (tensors to send) that the transform was given, whatever the tensor's shape and dtype
        at the ends (`src`, `dst`)."""
        return self.parts

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags. The first is True if the transform has no function for the source, which sends the tensor
        unchanged; the second is True if it has no function for the destination, which keeps the tensor as it
        arrives."""
        return AsHeld(self.at_source is None, self.at_destination is None)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Call the function given for the source with `array`; return the arrays to send that it makes, one per
        component."""
        assert self.at_source is not None, "sent as held"
        return self.at_source(array)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Call the function given for the destination with the received `arrays`, one per component; return the
        destination's array that it makes."""
        assert self.at_destination is not None, "arrives as held"
        return self.at_destination(arrays)


def _read_beside(name: str, given: object) -> Beside:
    """The companions at both ends. Raises PlanError for anything else."""
    what = f"the companions of Custom {name!r}"
    ends = listed(given, what, PlanError)
    if len(ends) != 2:
        raise PlanError(f"{what} are {shown(given)}; give (at_source, at_destination)")
    checked = []
    for end in ends:
        companions = listed(end, what, PlanError)
        for companion in companions:
            instance(companion, Companion, "give Companion(suffix, dtype, grain)", PlanError)
        checked.append(companions)
    at_source, at_destination = checked
    return at_source, at_destination
