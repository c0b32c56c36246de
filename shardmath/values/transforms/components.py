"""Components: the tensors that a transform sends, and the protocol that transforms follow.

1. A transform is a value that stands for two pure functions. `prepare` turns a tensor into **wire tensors** at its
   source; `finalize` turns the wire tensors into a tensor at its destination.
2. Each wire tensor is a **component**. Each of its positions stands for a block of the tensor, whose size in each
   dimension is the component's **grain**; the last block of a dimension may be shorter.
3. Functions work block by block: the result for one block does not depend on other blocks. So a tensor may be cut
   between blocks, and the result for a slice is a slice of the result for the whole tensor.
4. A tensor `w` may have **companions**, such as the scales of a quantized tensor, under their own names. At that end
   functions take and return a tuple: the tensor and its companions.
5. Arrays that functions take and return have no holes, and their blocks ascend. On a rank that holds nothing no
   function is called, unless a component still has positions there: those that stand for a whole dimension.

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
"""The side on which a tensor is held."""


class Form(NamedTuple):
    """The global shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class AsHeld(NamedTuple):
    """Two flags for a transformed tensor: whether it is sent exactly as the source holds it (`source`), and whether it
    arrives exactly as the destination holds it (`destination`)."""

    source: bool
    destination: bool


Grain: TypeAlias = tuple[int, ...] | Blocks
"""Positions of a tensor, by dimension, that one position of a component stands for."""


@dataclass(frozen=True, slots=True)
class Component:
    """A description of a tensor that is sent in place of a transformed one: its name, its dtype, and how many positions
    of the transformed tensor each of its elements stands for (`grain`).

    `grain` gives these counts for the last dimensions; earlier dimensions have 1. It holds at both ends, unless
    `at_destination` gives another. `Blocks` can also say that a position stands for a whole dimension. `spread` is the
    opposite, for the last dimension at each end: positions of the component per position of the tensor, such as numbers
    per byte. Raises PlanError for a name with a dot or a bracket, and for counts below 1.
    """

    name: str
    dtype: str
    grain: Grain = ()
    at_destination: Grain | None = None
    spread: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        name = text(self.name, "the name of a component", PlanError)
        if not name or set(name) & set(".[]"):
            what = f"the name {name!r} of a component is empty, or has one of . [ ]"
            raise PlanError(f"{what}; write one such as 'scale'")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtype", dtypes.canonical(self.dtype))
        object.__setattr__(self, "grain", _read_grain(name, self.grain))
        if self.at_destination is not None:
            object.__setattr__(self, "at_destination", _read_grain(name, self.at_destination))

    def __str__(self) -> str:
        # A grain of single positions is "", written as 1 next to another grain.
        grain = _write_grain(self.grain)
        to_other = ""
        if self.at_destination is not None:
            to_other = f" to {_write_grain(self.at_destination) or 1}"
        suffix = f" per {grain or 1}{to_other}" if grain + to_other else ""
        if self.spread != (1, 1):
            suffix += f", {max(self.spread)} at a time"
        return f"{self.name} {self.dtype}{suffix}"

    def blocks(self, ndim: int, end: End) -> Blocks:
        """Return how many elements of a tensor one element of this component stands for, as Blocks: a count per
        dimension. A component is an array sent in place of a tensor, such as its scales; `end` selects the source's or
        the destination's tensor, and `ndim` is its number of dimensions.

        Raises PlanError if the Blocks have more dimensions than the tensor.
        """
        grain = self.grain
        if end == "destination" and self.at_destination is not None:
            grain = self.at_destination
        blocks = grain if isinstance(grain, Blocks) else Blocks(grain)
        if len(blocks.sizes) > ndim:
            what = f"component {str(self)!r} has a grain of {len(blocks.sizes)} dimensions"
            raise PlanError(f"{what}, but the tensor has {ndim}; give a grain of {ndim} at most")
        return blocks

    def block(self, ndim: int, end: End) -> tuple[int | None, ...]:
        """Return how many elements of a tensor, in each dimension, one element of this component stands for (None: the
        whole dimension). A component is an array sent in place of a tensor, such as its scales; `end` selects the
        tensor at the source or the one at the destination, and `ndim` is its number of dimensions."""
        return self.blocks(ndim, end).per_dimension(ndim)

    def shape(self, form: Form, end: End) -> tuple[int, ...]:
        """Return the global shape of this component, an array sent in place of a tensor, such as its scales. The tensor
        has the shape and dtype `form` at `end`, the source or the destination of the move."""
        count = self.blocks(len(form.shape), end).count(form.shape)
        spread = self.spread_at(end)
        if spread == 1:
            return count
        *others, last = count
        return *others, last * spread

    def spread_at(self, end: End) -> int:
        """Return how many elements of this component stand for one element of a tensor: 2, for example, if each byte of
        the tensor holds two numbers. A component is a tensor that is sent in place of another one; `end` is "source" or
        "destination", where the counts can differ."""
        return self.spread[0 if end == "source" else 1]


def _read_grain(name: str, grain: object) -> Grain:
    """The grain as integers. Raises PlanError for anything else, and for counts below 1."""
    if isinstance(grain, Blocks):
        return grain
    listed_grain = listed(grain, f"the grain of component {name!r}", PlanError)
    read = tuple(as_integer(n, f"a grain of component {name!r}", PlanError) for n in listed_grain)
    if min(read, default=1) < 1:
        raise PlanError(f"component {name!r} has grain {read}; give sizes of 1 or more")
    return read


def _write_grain(grain: Grain) -> str:
    """The grain as text, such as 128x128; "" for single positions."""
    if not isinstance(grain, Blocks):
        return "x".join(map(str, grain))
    return "" if grain == Blocks(()) else str(grain)


@dataclass(frozen=True, slots=True)
class Companion:
    """A description of a tensor that goes with another one, such as its scales; its name is the other's name followed
    by `suffix`.

    `grain` means the same as in a Component. Raises PlanError for an empty suffix, and for a grain below 1.
    """

    suffix: str
    dtype: str
    grain: Grain = ()

    def __post_init__(self) -> None:
        suffix = text(self.suffix, "the suffix of a companion", PlanError)
        if not suffix:
            raise PlanError("the suffix of a companion is ''; give one such as '_scale_inv'")
        # A component checks and normalizes dtype and grain.
        checked = Component("companion", self.dtype, self.grain)
        object.__setattr__(self, "suffix", suffix)
        object.__setattr__(self, "dtype", checked.dtype)
        object.__setattr__(self, "grain", checked.grain)

    @property
    def component(self) -> Component:
        """The companion as a Component: its dtype, and how many positions of the tensor each of its elements stands for
        (`grain`)."""
        return Component("companion", self.dtype, self.grain)


@runtime_checkable
class HasConditions(Protocol):
    """The protocol of transforms that cannot run under every layout, such as quantization if one scale depends on
    numbers of several ranks. Their method `check_layout` raises PlanError for such a layout, at the source or the
    destination."""

    def check_layout(self, layout: Layout, end: End, name: str) -> None:
        """Raise PlanError if a rank would need other ranks' elements of the tensor `name` to compute the transform at
        `end` ("source" or "destination"). `layout` is the tensor's layout there."""
        ...


def list_companions(transform: object, end: End) -> tuple[Companion, ...]:
    """Return the companions (further tensors, such as scales) of a tensor that `transform` converts; `end` selects
    those at the source or those at the destination of the move."""
    # A runtime protocol instead of getattr takes 40 us, once for each expert of each layer.
    companions = getattr(transform, "companions", None)
    return tuple(companions(end)) if callable(companions) else ()


def read_end(given: object, what: str) -> End:
    """Return `given`, the value of a transform's argument `at`: the end of the move at which it computes, "source" or
    "destination". Raises PlanError for other values; `what` is the transform's name in the message."""
    if known(given, ("source", "destination")) is None:
        raise PlanError(f"{what} has at={shown(given)}; give 'source' or 'destination'")
    return given  # type: ignore[return-value]


@runtime_checkable
class Transform(Protocol):
    """The protocol of transforms, which convert tensors during a move: `prepare` computes the tensors to send at the
    source, and `finalize` computes the destination's tensors from them. Transforms are hashable values.

    `components` lists the wire tensors of a tensor that has these forms at its ends, and raises PlanError for forms
    that the transform does not support. At an end that `as_held` names, that end's function is never called.
    """

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the tensors (components) to send for a tensor with the form (shape and dtype) `src` at the source and
        `dst` at the destination; at least one."""
        ...

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags: whether the source sends a tensor unchanged, and whether the destination keeps it as it
        arrives. `src` and `dst` are the tensor's shape and dtype before and after the move."""
        ...

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Compute from `array`, a part of the source's tensor, the arrays to send in its place, such as quantized data
        and scales. The part has all or none of the elements that are computed together; `src` and `dst` are the
        tensor's shape and dtype before and after the move.

        The result has an array for each item that `components` returns, in that order.
        """
        ...

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Return a part of the destination's tensor, made of whole blocks (elements that are computed together).
        `arrays` has the received parts of the tensors that `components` lists; `src` and `dst` are the tensor's shape
        and dtype at the source and the destination."""
        ...
