"""Custom: a transform made of functions of the user's own.

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
"""The same two functions, of tensors of a backend; None where that uses the arrays'."""


Beside: TypeAlias = tuple[tuple[Companion, ...], tuple[Companion, ...]]
"""Companions at the source, and at the destination."""


@dataclass(frozen=True, slots=True)
class Custom:
    """Functions that make an array of each component, and of these the array that the destination holds.

    Both work block by block on arrays without holes (see `components`). None: what travels is the tensor as held there.
    `name` stands for the functions: ranks compare it. `on_tensors` are the same two of torch's tensors. `beside` are
    the companions of the tensor at the source, and those at the destination. Raises PlanError for components that are
    none, or of one name, and where both functions are None.
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
            raise PlanError(f"Custom {name!r} has components {names}; give some, each its own name")
        functions = self.at_source, self.at_destination
        if functions == (None, None):
            raise PlanError(f"Custom {name!r} does nothing; give at_source= or at_destination=")
        for function in functions:
            if function is not None and not callable(function):
                raise PlanError(f"Custom {name!r} has {shown(function)}; give a function or None")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "beside", _read_beside(name, self.beside))

    def __str__(self) -> str:
        here, there = ["/".join(one.suffix for one in ones) for ones in self.beside]
        held = ""
        if here or there:
            held = f" from w{here} to w{there}"
        return f"Custom({self.name!r}: {', '.join(map(str, self.parts))}{held})"

    def companions(self, end: End) -> tuple[Companion, ...]:
        """Those given."""
        at_source, at_destination = self.beside
        return at_source if end == "source" else at_destination

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Those given."""
        return self.parts

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Where no function is given."""
        return AsHeld(self.at_source is None, self.at_destination is None)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """What the function at the source makes of the array."""
        assert self.at_source is not None, "sent as held"
        return self.at_source(array)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """What the function at the destination makes of the arrays."""
        assert self.at_destination is not None, "arrives as held"
        return self.at_destination(arrays)


def _read_beside(name: str, given: object) -> Beside:
    """The companions at both ends. Raises PlanError for what are none."""
    what = f"the companions of Custom {name!r}"
    ends = listed(given, what, PlanError)
    if len(ends) != 2:
        raise PlanError(f"{what} are {shown(given)}; give (at_source, at_destination)")
    read = []
    for end in ends:
        beside = listed(end, what, PlanError)
        for one in beside:
            instance(one, Companion, "give Companion(suffix, dtype, grain)", PlanError)
        read.append(beside)
    at_source, at_destination = read
    return at_source, at_destination
