"""Components: what a transform says of itself.

1. A transform is a value that stands for two pure functions. `prepare` makes **wire tensors** of a tensor at its
   source, `finalize` makes the tensor of them at its destination.
2. Each wire tensor is a **component**. A position of it stands for a block of positions of the tensor, of as many in
   each dimension as its **grain** says; the last block of a dimension may be shorter.
3. Functions work block by block: what they make of some blocks does not depend on the others. So a tensor may be cut
   between blocks, and what is made of a slice is a slice of what is made of the whole.
4. A tensor may be held as several: beside `w` lie its **companions**, such as the scales of a quantised one, under
   names of their own. What functions take and give at that end is then a tuple, of the tensor and its companions.
5. Arrays that functions take and give have no holes, and their blocks in ascending order. Of a rank that holds nothing
   no function is called, unless there is something for it to make: what stands for all of a dimension.

>>> scale = Component("scale", "uint8", (32,))
>>> scale.block(2, "source"), scale.shape(Form((6, 70), "bfloat16"), "source")
((1, 32), (6, 3))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer, known, listed, text
from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.layouts.layout import Layout
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.elements import Array

__all__ = [
    "AsHeld",
    "Companion",
    "Component",
    "End",
    "Form",
    "HasConditions",
    "Transform",
    "list_companions",
    "read_end",
]

End: TypeAlias = Literal["source", "destination"]
"""Where a tensor is held."""


class Form(NamedTuple):
    """The global shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class AsHeld(NamedTuple):
    """At which ends the only component is the tensor as it is held: nothing is done there, and nothing copied."""

    source: bool
    destination: bool


Grain: TypeAlias = tuple[int, ...] | Blocks
"""Positions of a tensor that one of a component stands for."""


@dataclass(frozen=True, slots=True)
class Component:
    """A wire tensor of a transform: its name and dtype, and positions of the tensor per position, last dimensions last.

    `grain` is of the source, and of the destination too unless `at_destination` is given; dimensions before those
    named have 1. `Blocks` also say that a position stands for all of a dimension. `spread` is the other way round, of
    the last dimension at each end: positions of this per position, such as numbers per byte. Raises PlanError for a
    name with a dot or a bracket, and for less than 1.
    """

    name: str
    dtype: str
    grain: Grain = ()
    at_destination: Grain | None = None
    spread: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        name = text(self.name, "the name of a component", PlanError)
        if not name or set(name) & set(".[]"):
            raise PlanError(f"component {name!r} has no plain name; write one such as 'scale'")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", dtypes.canonical(self.dtype))
        object.__setattr__(self, "grain", _read_grain(name, self.grain))
        if self.at_destination is not None:
            object.__setattr__(self, "at_destination", _read_grain(name, self.at_destination))

    def __str__(self) -> str:
        blocks = _write_grain(self.grain)
        there = self.at_destination
        other = "" if there is None else f" to {_write_grain(there) or 1}"
        said = f" per {blocks or 1}{other}" if blocks + other else ""
        if self.spread != (1, 1):
            said += f", {max(self.spread)} at a time"
        return f"{self.name} {self.dtype}{said}"

    def blocks(self, ndim: int, end: End) -> Blocks:
        """Positions of the tensor per position of this. Raises PlanError where they have more dimensions."""
        grain = self.grain
        if end == "destination" and self.at_destination is not None:
            grain = self.at_destination
        blocks = grain if isinstance(grain, Blocks) else Blocks(grain)
        if len(blocks.sizes) > ndim:
            what = f"component {str(self)!r} has a grain of {len(blocks.sizes)} dimensions"
            raise PlanError(f"{what}, the tensor {ndim}; give a grain of {ndim} at most")
        return blocks

    def block(self, ndim: int, end: End) -> tuple[int | None, ...]:
        """The same in each of so many dimensions; None for all of one."""
        return self.blocks(ndim, end).per_dimension(ndim)

    def shape(self, form: Form, end: End) -> tuple[int, ...]:
        """The global shape of the wire tensor, by the tensor's form at one end."""
        count = self.blocks(len(form.shape), end).count(form.shape)
        spread = self.spread_at(end)
        if spread == 1:
            return count
        *others, last = count
        return *others, last * spread

    def spread_at(self, end: End) -> int:
        """Positions of this per position of the last dimension of the tensor."""
        return self.spread[0 if end == "source" else 1]


def _read_grain(name: str, grain: object) -> Grain:
    """The grain as integers. Raises PlanError for one that is none."""
    if isinstance(grain, Blocks):
        return grain
    given = listed(grain, f"the grain of component {name!r}", PlanError)
    read = tuple(as_integer(n, f"a grain of component {name!r}", PlanError) for n in given)
    if min(read, default=1) < 1:
        raise PlanError(f"component {name!r} has grain {read}; a block has 1 position at least")
    return read


def _write_grain(grain: Grain) -> str:
    """The grain as people write it; "" for single positions."""
    if not isinstance(grain, Blocks):
        return "x".join(map(str, grain))
    return "" if grain == Blocks(()) else str(grain)


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor beside a tensor, of which a position stands for a block: its name is the tensor's with `suffix` behind.

    `grain` is as of a Component. Raises PlanError for no suffix, and for a grain below 1.
    """

    suffix: str
    dtype: str
    grain: Grain = ()

    def __post_init__(self) -> None:
        suffix = text(self.suffix, "the suffix of a companion", PlanError)
        if not suffix:
            raise PlanError("a companion has no suffix; give one such as '_scale_inv'")
        # What a component checks holds here, too.
        alike = Component("companion", self.dtype, self.grain)
        object.__setattr__(self, "suffix", suffix)
        object.__setattr__(self, "dtype", alike.dtype)
        object.__setattr__(self, "grain", alike.grain)

    @property
    def component(self) -> Component:
        """A component that has as many positions."""
        return Component("companion", self.dtype, self.grain)


@runtime_checkable
class HasConditions(Protocol):
    """A transform that does not go with all layouts where it does something."""

    def check_layout(self, layout: Layout, end: End, name: str) -> None:
        """Raise PlanError where ranks hold the tensor otherwise than its functions need it."""
        ...


def list_companions(transform: object, end: End) -> tuple[Companion, ...]:
    """What lies beside a tensor of that transform at an end, by its method `companions(end)`; most have none."""
    # A runtime protocol instead of getattr takes 40 us, once for each expert of each layer.
    companions = getattr(transform, "companions", None)
    return tuple(companions(end)) if callable(companions) else ()


def read_end(given: object, what: str) -> End:
    """`given`, if it is an end. Raises PlanError, which says `what` has it, if not."""
    if known(given, ("source", "destination")) is None:
        raise PlanError(f"{what} has at={shown(given)}; give 'source' or 'destination'")
    return given  # type: ignore[return-value]


@runtime_checkable
class Transform(Protocol):
    """What stands for a tensor on its way; hashable. Ranks compare `str` of it, so that has to say all that it does.

    `components` are the wire tensors of a tensor that has these forms at its ends; it raises PlanError where the
    transform has no meaning for them. `as_held` says where nothing is done, and that function is then not called.
    """

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """One or more wire tensors, with names of their own."""
        ...

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Where nothing is done."""
        ...

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """An array for each component, made of some blocks of the source's tensor."""
        ...

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """The blocks of the destination's tensor that these parts of the components stand for."""
        ...
