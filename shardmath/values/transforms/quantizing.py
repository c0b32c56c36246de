"""Quantizing: numbers become data and scales, or the reverse, at the source or at the destination.

1. **Meaning.** `Quantize` rounds numbers to `wire` first, and then quantizes them, at either end: so both ends give the
   same bytes, and an engine holds what it would make from `wire` weights itself. `Dequantize` multiplies in float32
   and rounds once to the destination's dtype; `Requantize` quantizes these float32 numbers.
2. A quantized tensor is several tensors: data under its own name, and scales as its companions.
3. With `at="source"`, data and scales travel; with `at="destination"`, what the source holds.
4. A rank that quantizes needs whole blocks, and everything that shares a scale unless the format knows its amax.
5. Equal formats at both ends need no rule: their tensors are moved like any others.

>>> from shardmath.values.formats.mxfp8 import MXFP8
>>> wide, data = Form((4, 64), "float32"), Form((4, 64), "uint8")
>>> [str(part) for part in Quantize(MXFP8()).components(wide, data)]
['data uint8', 'scales uint8 per 32']
>>> [str(part) for part in Quantize(MXFP8(), at="destination").components(wide, data)]
['data bfloat16']
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shardmath.base import dtypes
from shardmath.base.arguments import listed, text
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.base.text import shown
from shardmath.layouts.holdings import label
from shardmath.layouts.layout import Layout
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.casting import cast_array, is_float
from shardmath.values.formats.elements import Array
from shardmath.values.formats.format import Format
from shardmath.values.formats.fp8 import FP8Blocks
from shardmath.values.formats.nvfp4 import NVFP4
from shardmath.values.transforms.components import AsHeld, Companion, Component, End, Form, read_end

__all__ = ["Dequantize", "Quantize", "Requantize"]

Suffixes: TypeAlias = tuple[str, ...]
"""The ends of the names of scales, which begin with the tensor's name."""


def _read_suffixes(format: Format, given: object, what: str) -> Suffixes:
    """The suffixes; those of checkpoints if none are given. Raises PlanError unless there is one per scale."""
    usual: dict[type, Suffixes] = {FP8Blocks: ("_scale_inv",), NVFP4: ("_scale", "_scale_2")}
    suffixes = listed(given, what, PlanError)
    if not suffixes:
        return usual.get(type(format), ("_scale",))
    scales = format.parts[1:]
    if len(suffixes) != len(scales):
        names = ", ".join(part.name for part in scales)
        fix = "give one suffix for each"
        raise PlanError(f"{what} are {suffixes}, but {format.name} has {names}; {fix}")
    return tuple(text(one, "a suffix of scales", PlanError) for one in suffixes)


def _check_format(given: object) -> None:
    if not isinstance(given, Format):
        raise PlanError(f"{shown(given)} is not a format; give one such as formats.MXFP8()")


def _divide_blocks(blocks: Blocks, count: int) -> Blocks:
    """Blocks of numbers as blocks of data elements, each of which holds `count` numbers."""
    *before, last = blocks.sizes or (None,)
    # A block of the whole dimension, or without sizes, needs no division.
    if last is None:
        return blocks
    return Blocks((*before, last // count), blocks.others)


@memo()
def _list_scales(format: Format, suffixes: Suffixes) -> tuple[Companion, ...]:
    """The scales as companions of the data."""
    count = format.per_element
    scales = []
    for part, suffix in zip(format.parts[1:], suffixes, strict=True):
        blocks = _divide_blocks(part.blocks, count)
        scales.append(Companion(suffix, part.dtype, blocks))
    return tuple(scales)


def _list_parts(format: Format, dtype: str, ends: tuple[bool, bool]) -> tuple[Component, ...]:
    """Data and scales as components; `ends` says which ends hold data rather than numbers."""
    count = format.per_element
    components = []
    for number, part in enumerate(format.parts):
        is_data = number == 0
        # The size of a block counted in elements of data, of which each may hold several numbers.
        data_blocks = Blocks(()) if is_data else _divide_blocks(part.blocks, count)
        src, dst = (data_blocks if holds_data else part.blocks for holds_data in ends)
        wire_dtype = dtype if is_data else part.dtype
        components.append(Component(part.name, wire_dtype, src, None if dst == src else dst))
    return tuple(components)


def _list_numbers(format: Format, dtype: str, ends: tuple[bool, bool]) -> tuple[Component, ...]:
    """The numbers as the only component; `ends` says which ends hold data rather than numbers."""
    src, dst = (format.per_element if holds_data else 1 for holds_data in ends)
    return (Component("data", dtype, spread=(src, dst)),)


def _check_data(format: Format, form: Form, shape: tuple[int, ...] | None, what: str) -> None:
    """Raise PlanError unless the data of a tensor of that shape have this form; None for any shape."""
    data = format.parts[0]
    if form.dtype not in (data.dtype, data.kind):
        kinds = " or ".join(dict.fromkeys((data.dtype, data.kind)))
        raise PlanError(f"{what}: {form} cannot be the data of {format.name}; give dtype {kinds}")
    if not form.shape:
        what = f"{what}: {form} has no dimension, and single numbers cannot be quantized"
        raise PlanError(f"{what}; give a tensor with at least one dimension")
    if shape is None:
        return
    count = format.per_element
    if shape[-1:] and shape[-1] % count:
        what = f"{what}: {count} numbers share a byte, which shape {list(shape)} does not fill"
        raise PlanError(f"{what}; make its last dimension a multiple of {count}")
    expected = data.blocks.count(shape)
    if form.shape != expected:
        what = f"{what}: the data of a tensor of shape {list(shape)} have shape {list(expected)}"
        raise PlanError(f"{what}, but {form} is given; give data of that shape")


def _check_numbers(form: Form, what: str) -> None:
    if not is_float(form.dtype):
        raise PlanError(f"{what}: {form.dtype} is not a float dtype; give a tensor of floats")


def _check_whole(format: Format, layout: Layout, name: str) -> None:
    """Raise PlanError if a rank holds only a part of what shares a scale, and the format does not know its amax."""
    if getattr(format, "tensor_amax", None) is not None:
        return
    for part in format.parts:
        sizes = part.blocks.per_dimension(layout.ndim, name)
        for d, size in enumerate(sizes):
            if size is None and _is_cut(layout, d):
                what = f"{label(name)}: {layout} divides dimension {d}"
                why = f"all of which shares {part.name} of {format.name}"
                fix = "give the format tensor_amax=, or a layout that does not divide the dimension"
                raise PlanError(f"{what}, {why}; {fix}")


def _is_cut(layout: Layout, d: int) -> bool:
    """Whether some rank holds only a part of the dimension."""
    # An empty part counts too: even a rank that holds nothing has a scale, and could not compute it.
    sizes = {layout.runs(rank)[d].size for rank in layout.mesh.ranks}
    return sizes != {layout.shape[d]}


def _to_float32(array: Array, dtype: str, wire: str) -> Array:
    """The numbers as float32, after they were rounded to the dtype `wire`."""
    rounded = cast_array(array, dtype, wire)
    return cast_array(rounded, wire, "float32")


@dataclass(frozen=True, slots=True)
class Quantize:
    """A transform that rounds numbers to the dtype `wire` at the source, and then quantizes them to `format`, at the
    source or at the destination, as `at` says. If the destination quantizes, numbers are sent in the dtype `wire`.

    The destination holds data and scales. A scale's name is the tensor's name and one of `suffixes`, which default to
    checkpoints' suffixes. The dtype of data is uint8, or their float8 type. `transformed` raises PlanError for sides
    that do not fit.
    """

    format: Format
    at: End = "source"
    suffixes: Suffixes = ()
    wire: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_format(self.format)
        read_end(self.at, "Quantize")
        object.__setattr__(self, "wire", dtypes.canonical(self.wire))
        _check_numbers(Form((), self.wire), "Quantize")
        suffixes = _read_suffixes(self.format, self.suffixes, "the suffixes of Quantize")
        object.__setattr__(self, "suffixes", suffixes)

    def companions(self, end: End) -> tuple[Companion, ...]:
        """Return the companions of the tensor at `end`: its scales at the destination, none at the source."""
        return _list_scales(self.format, self.suffixes) if end == "destination" else ()

    def check_layout(self, layout: Layout, end: End, name: str) -> None:
        """Raise PlanError if the tensor is quantized at `end`, and `layout` divides a dimension along which all numbers
        share one scale. A format with `tensor_amax=` (the tensor's largest magnitude, known in advance) has no such
        limit."""
        if end == self.at:
            _check_whole(self.format, layout, name)

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the components to send: data and scales if quantized at the source, else numbers in dtype `wire`."""
        what = f"{self.format.name} of {src}"
        _check_numbers(src, what)
        _check_data(self.format, dst, src.shape, what)
        ends = (False, True)  # only the destination holds data
        if self.at == "source":
            return _list_parts(self.format, dst.dtype, ends)
        return _list_numbers(self.format, self.wire, ends)

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags: whether the source sends the tensor unchanged, and whether the destination keeps it as it
        arrives. If this transform quantizes at the source, they are False and True. If it quantizes at the destination,
        the first is True if the source's dtype equals `wire`, the dtype of sent numbers; the second is False."""
        if self.at == "source":
            return AsHeld(False, True)
        return AsHeld(src.dtype == self.wire, False)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Return the arrays to send: data, scales and any other arrays of the format if the source quantizes; otherwise
        one array, with the numbers of `array` rounded to the attribute `wire`, the dtype of sent numbers."""
        if self.at == "destination":
            return (cast_array(array, src.dtype, self.wire),)
        numbers = _to_float32(array, src.dtype, self.wire)
        return self.format.quantize(numbers)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Any:
        """Quantize the received numbers, which are the one array in `arrays`, and return a tuple of data, scales and
        any other arrays of the format. Only called if the destination quantizes."""
        (array,) = arrays
        numbers = cast_array(array, self.wire, "float32")
        return self.format.quantize(numbers)


@dataclass(frozen=True, slots=True)
class Dequantize:
    """A transform that turns quantized data and scales into numbers, at the source or at the destination.

    Arguments are as of Quantize. `transformed` raises PlanError for sides that do not fit.
    """

    format: Format
    at: End = "destination"
    suffixes: Suffixes = ()

    def __post_init__(self) -> None:
        _check_format(self.format)
        read_end(self.at, "Dequantize")
        suffixes = _read_suffixes(self.format, self.suffixes, "the suffixes of Dequantize")
        object.__setattr__(self, "suffixes", suffixes)

    def companions(self, end: End) -> tuple[Companion, ...]:
        """Return the companions of the tensor at `end`: its scales at the source, none at the destination."""
        return _list_scales(self.format, self.suffixes) if end == "source" else ()

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the components to send: data and scales if dequantized at the destination, else the numbers."""
        what = f"{self.format.name} to {dst}"
        _check_numbers(dst, what)
        _check_data(self.format, src, dst.shape, what)
        ends_with_data = True, False  # the source, not the destination
        if self.at == "destination":
            return _list_parts(self.format, src.dtype, ends_with_data)
        return _list_numbers(self.format, dst.dtype, ends_with_data)

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags: whether the tensor is sent exactly as the source holds it (the destination dequantizes),
        and whether it is kept exactly as it arrives (the source dequantizes)."""
        return AsHeld(self.at == "destination", self.at == "source")

    def prepare(self, array: Any, src: Form, dst: Form) -> tuple[Array, ...]:
        """Dequantize at the source: convert `array`, a tuple of data and scales, into numbers of the destination's
        dtype; return them as a tuple of one array. Not used if the destination dequantizes."""
        return (self._dequantize_to(array, dst),)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Return the destination's array: the numbers that the data and scales in `arrays` stand for, in the
        destination's dtype."""
        return self._dequantize_to(arrays, dst)

    def _dequantize_to(self, parts: tuple[Array, ...], dst: Form) -> Array:
        numbers = self.format.dequantize(*parts)
        # Processors make NaNs of different bits; all become the same one.
        numbers[np.isnan(numbers)] = np.nan
        return cast_array(numbers, "float32", dst.dtype)


@dataclass(frozen=True, slots=True)
class Requantize:
    """A transform of quantized data and scales from one format to another, by way of float32, at the source or at the
    destination.

    `suffixes` are the suffixes of scales at the source, and at the destination. Raises PlanError for equal formats,
    which need no rule; `transformed` raises it for sides that do not fit.
    """

    old: Format
    new: Format
    at: End = "destination"
    suffixes: tuple[Suffixes, Suffixes] = field(default=((), ()))

    def __post_init__(self) -> None:
        for format in (self.old, self.new):
            _check_format(format)
        read_end(self.at, "Requantize")
        if self.old == self.new:
            what = f"Requantize converts {self.old.name} to the same format"
            raise PlanError(f"{what}; leave the rule out, then the bytes are moved as they are")
        src_suffixes, dst_suffixes = self.suffixes
        first = _read_suffixes(self.old, src_suffixes, "the suffixes of the source")
        last = _read_suffixes(self.new, dst_suffixes, "the suffixes of the destination")
        object.__setattr__(self, "suffixes", (first, last))

    def companions(self, end: End) -> tuple[Companion, ...]:
        """Return the companions of the tensor at `end`: its scales there."""
        at_source, at_destination = self.suffixes
        if end == "source":
            return _list_scales(self.old, at_source)
        return _list_scales(self.new, at_destination)

    def check_layout(self, layout: Layout, end: End, name: str) -> None:
        """Raise PlanError if the tensor `name` is requantized at `end`, and `layout` divides a dimension along which
        all numbers share one scale of the new format, since no rank can compute that scale alone.

        A new format with `tensor_amax=` (the tensor's largest magnitude, known in advance) has no such limit.
        """
        if end == self.at:
            _check_whole(self.new, layout, name)

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the components to send: data and scales, in the new format if requantized at the source, else in the
        old one."""
        what = f"{self.old.name} to {self.new.name}"
        _check_data(self.old, src, None, what)
        _check_data(self.new, dst, None, what)
        if self.old.per_element != self.new.per_element:
            counts = f"a byte holds {self.old.per_element} and {self.new.per_element} numbers"
            fix = "use Dequantize at the source or Quantize at the destination instead"
            raise PlanError(f"{what}: {counts}; {fix}")
        data_at_both_ends = True, True
        if self.at == "source":
            return _list_parts(self.new, dst.dtype, data_at_both_ends)
        return _list_parts(self.old, src.dtype, data_at_both_ends)

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags: whether the tensor is sent exactly as the source holds it (the destination requantizes),
        and whether it is kept exactly as it arrives (the source requantizes)."""
        return AsHeld(self.at == "destination", self.at == "source")

    def prepare(self, array: Any, src: Form, dst: Form) -> tuple[Array, ...]:
        """Return the arrays to send: data and scales in the new format, computed from `array`, a tuple of data and
        scales in the old format."""
        numbers = self.old.dequantize(*array)
        return self.new.quantize(numbers)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Any:
        """Return the destination's arrays: data and scales in the new format, from data and scales in the old one."""
        numbers = self.old.dequantize(*arrays)
        return self.new.quantize(numbers)
