"""Format: what every quantised format knows of itself, and how numbers become data and scales.

1. A format is a value. It stands for **parts**, which are the arrays that it makes of a tensor: data and scales.
2. Where a box of a tensor cuts no block, `quantise` needs nothing but the box: quantising a slice is slicing what is
   quantised. Where it cuts some, their amaxes have to be those of whole blocks: ranks take the largest of what `amax`
   gives each of them, and pass it to `quantise`.
3. Arrays are float32 on one side, and on the other uint8 where elements have 8 or 4 bits.
4. Scales have as many dimensions as the tensor. Padding, where kernels want some, is added by `pad_scales`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import known
from shardmath.base.errors import FormatError
from shardmath.base.text import plural, shown
from shardmath.layouts.layout import Layout
from shardmath.values.formats.blocks import Blocks, Index, Sliced, label, read_shape
from shardmath.values.formats.elements import describe_type
from shardmath.values.formats.floats import Codes, Float, Floats, decode, encode
from shardmath.values.formats.scales import lay_blocks, pad_parts
from shardmath.values.formats.windows import Window, make_window

__all__ = ["Array", "Format", "Part", "read_array", "read_choice", "read_flag"]

Array: TypeAlias = NDArray[Any]


class Part(NamedTuple):
    """One of the arrays that stand for a tensor: one element per block of positions.

    `kind` is what its elements mean, by torch's name; `dtype` the type that arrays have and that travels.
    """

    name: str
    kind: str
    dtype: str
    blocks: Blocks


class Format(ABC):
    """A quantised format. Those that there are: MXFP8, FP8Blocks, FP8 and NVFP4."""

    __slots__ = ()

    # What a format says of itself

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    @abstractmethod
    def element(self) -> Float:
        """The type of the data."""

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """The positions that share a scale."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The arrays that stand for a tensor, as `quantise` returns them: data, scales, and what else there is."""

    @property
    def per_element(self) -> int:
        """How many numbers an element of the data holds, along the last dimension."""
        sizes = self.parts[0].blocks.sizes
        return 1 if not sizes or sizes[-1] is None else sizes[-1]

    @property
    def nan_magnitude(self) -> float:
        """What NaN counts as in amaxes, which are never NaN: 0, or infinite where it spoils its block."""
        return 0

    @property
    def padding(self) -> tuple[int, int]:
        """The last two dimensions of the scales are stored as multiples of these by kernels that want padding."""
        return 1, 1

    @abstractmethod
    def _make_scales(self, amax: Floats) -> Array:
        """The scales of blocks of these largest magnitudes."""

    @abstractmethod
    def _scale_down(self, values: Floats, scales: Array) -> Floats:
        """The numbers, each with the scale of its block, as they are rounded."""

    @abstractmethod
    def _read_scales(self, scales: Array) -> Floats:
        """What data are multiplied with."""

    # Shapes, slices and layouts

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of that shape, without padding."""
        return self.blocks.count(read_shape(shape))

    def padded_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The same with padding."""
        return self._pad_shape(self.scale_shape(shape))

    def _pad_shape(self, count: tuple[int, ...]) -> tuple[int, ...]:
        padded = []
        multiples = self._list_multiples(len(count))
        for n, multiple in zip(count, multiples, strict=True):
            n += -n % multiple
            padded.append(n)
        return tuple(padded)

    def _list_multiples(self, ndim: int) -> tuple[int, ...]:
        """What each dimension of the scales is padded to a multiple of."""
        every = (1,) * ndim + self.padding
        # Of scales of one dimension the last multiple counts.
        return every[len(every) - ndim :]

    def pad_scales(self, scales: Array) -> Array:
        """The scales as kernels store them, zeros behind them in the last two dimensions."""
        padded = np.zeros(self._pad_shape(scales.shape), scales.dtype)
        inside = tuple(map(slice, scales.shape))
        padded[inside] = scales
        return padded

    def unpad_scales(self, padded: Array, shape: tuple[int, ...]) -> Array:
        """The scales of a tensor of that shape without their padding. Raises FormatError for another shape."""
        expected = self.padded_scale_shape(shape)
        if padded.shape != expected:
            what = f"padded scales have shape {padded.shape}, those of a tensor {tuple(shape)}"
            raise FormatError(f"{what} have {expected}; pass them as they are stored")
        return padded[tuple(map(slice, self.scale_shape(shape)))]

    def legal_cuts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Where a tensor of that shape may be cut so that each part can be quantised alone, per dimension."""
        return self.blocks.cuts(read_shape(shape))

    def scale_slice(self, data_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """The index of the scales that belongs to an index of a tensor of that shape.

        Raises FormatError, with the tensor's `name`, for a cut or a step inside a block, and for what is no index.
        """
        return self.blocks.scale_slice(data_slice, read_shape(shape), name)

    def data_slice(self, scale_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """The index of a tensor of that shape that belongs to an index of its scales. Raises FormatError."""
        return self.blocks.data_slice(scale_slice, read_shape(shape), name)

    def check_shape(self, shape: tuple[int, ...], name: str = "") -> None:
        """Raise FormatError where an element of the data would hold a number of the tensor and one of none."""
        count = self.per_element
        if shape[-1:] and shape[-1] % count:
            what = f"{label(name)}a tensor of shape {tuple(shape)}"
            fix = f"its last dimension has to be a multiple of {count}"
            raise FormatError(f"{what} parts {count} numbers of one byte of {self.name}; {fix}")

    def layouts(
        self, layout: Layout, name: str = "", *, duplicated: bool = False, kinds: bool = False
    ) -> tuple[Layout, ...]:
        """The packed layout of each part of a tensor that lies so, `kinds` with its own type instead of uint8.

        Raises FormatError, with the tensor's `name`, where a rank's part cuts a block, as `check_shape` does, and for a
        Partial layout: what is made of addends does not add up to what is made of their sum. If `duplicated`, ranks may
        cut blocks: the scale of a block is on every rank that holds some of it, as is enough to move and to read what
        is quantised.
        """
        if layout.partial:
            fix = "reduce it before it is quantised"
            raise FormatError(f"{label(name)}{layout} is Partial; {fix}")
        self.check_shape(layout.shape, name)
        found = []
        for i, part in enumerate(self.parts):
            what = f"{part.name} of {self.name}"
            dtype = part.kind if kinds else part.dtype
            # Data are not: of a byte of two numbers nobody can have half.
            shared = duplicated and i > 0
            lies = lay_blocks(layout, part.blocks, dtype, what, name, duplicated=shared)
            found.append(lies)
        return tuple(found)

    def scale_layout(
        self, layout: Layout, name: str = "", *, duplicated: bool = False, kinds: bool = False
    ) -> Layout:
        """The packed layout of the scales of a tensor that lies so, and errors, as `layouts` has them."""
        return self.layouts(layout, name, duplicated=duplicated, kinds=kinds)[1]

    def pad_layout(self, layout: Layout) -> Layout:
        """The layout of scales where each rank pads its own as `pad_scales` does; `layout` is that without padding.

        Padding is holes: nobody sends or stores it, and it is zeros where scales are loaded.
        """
        multiples = self._list_multiples(layout.ndim)
        return pad_parts(layout, multiples)

    # Numbers

    def cover(self, where: Index, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of the scales of all blocks that a box touches, those that it cuts too."""
        return self._window(where, shape).cover

    def straddles(self, where: Index, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Of each block that a box touches, whether some of it lies outside, so that its amax is reduced over ranks."""
        return self._window(where, shape).straddles()

    def amax(self, x: Floats, where: Index = ..., shape: tuple[int, ...] | None = None) -> Floats:
        """The largest magnitude of each block that the box `where` of a tensor of that shape touches, of the box alone.

        `x` is what is in the box, and without the other two the whole tensor. Raises FormatError.
        """
        values = read_array(x, "float32", "x")
        window = self._read_window(values.shape, where, shape)
        return window.amax(values, self.nan_magnitude)

    def quantise(
        self,
        x: Floats,
        *,
        amax: Floats | None = None,
        where: Index = ...,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[Array, ...]:
        """The parts of a float32 array: data like `x`, and scales of all blocks that it touches.

        `x` is what the box `where` of a tensor of that shape has, and without these the whole tensor; `amax` are the
        largest magnitudes of the blocks, if they are known. Raises FormatError where the box cuts blocks and `amax` is
        not given, and for arrays that do not fit.
        """
        values = read_array(x, "float32", "x")
        window = self._read_window(values.shape, where, shape)
        if amax is None:
            amax = self._find_amax(values, window)
        amaxes = read_array(amax, "float32", "amax")
        if amaxes.shape != window.count:
            what = f"amax has shape {amaxes.shape}, the part touches blocks {window.count}"
            raise FormatError(f"{what}; give one for each")
        with np.errstate(all="ignore"):
            return self._quantise(values, window, amaxes)

    def _find_amax(self, values: Floats, window: Window) -> Floats:
        """The amaxes of blocks that are all inside. Raises FormatError where some are not."""
        cut = window.straddles()
        if cut.any():
            at = tuple(map(int, np.argwhere(cut)[0]))
            what = f"the part {window.spans} of a tensor of shape {window.shape} cuts blocks"
            fix = "give amax=, the largest over ranks of what `amax` gives them"
            raise FormatError(
                f"{what} of {self.blocks}, first block {at} of those it touches; {fix}"
            )
        return window.amax(values, self.nan_magnitude)

    def _quantise(self, values: Floats, window: Window, amax: Floats) -> tuple[Array, ...]:
        scales = self._make_scales(amax)
        factors = window.spread(scales)
        data = encode(self.element, self._scale_down(values, factors))
        return data, scales

    def dequantise(
        self, *parts: Array, where: Index = ..., shape: tuple[int, ...] | None = None
    ) -> Floats:
        """The float32 numbers that data and scales stand for, of a box or the whole tensor as in `quantise`.

        Numbers beyond float32's become infinite. Raises FormatError for arrays that do not fit.
        """
        if len(parts) != len(self.parts):
            names = ", ".join(part.name for part in self.parts)
            raise FormatError(f"{self.name}: {plural(parts, 'array')}; give {names}")
        read = [
            read_array(array, part.dtype, part.name)
            for array, part in zip(parts, self.parts, strict=True)
        ]
        window = self._read_window(self._shape_of(read[0]), where, shape)
        if read[1].shape != window.count:
            what = f"scales have shape {read[1].shape}, the data have blocks {window.count}"
            raise FormatError(f"{what}; give one for each, without padding")
        with np.errstate(all="ignore"):
            return self._dequantise(window, *read)

    def _dequantise(self, window: Window, data: Codes, scales: Array) -> Floats:
        factors = self._read_scales(scales)
        return decode(self.element, data) * window.spread(factors)

    def _shape_of(self, data: Codes) -> tuple[int, ...]:
        """The shape of the numbers that the data stand for."""
        return data.shape

    def _window(self, where: Index, shape: tuple[int, ...]) -> Window:
        return make_window(self.blocks, where, read_shape(shape))

    def _read_window(
        self, found: tuple[int, ...], where: Index, shape: tuple[int, ...] | None
    ) -> Window:
        """The box, whose content has the shape `found`. Raises FormatError where that is not the box's."""
        if shape is None and where is not Ellipsis:
            raise FormatError("where= is a part of a tensor; give the tensor's shape=, too")
        window = self._window(where, found if shape is None else shape)
        if window.sizes != found:
            what = f"the part {window.spans} of a tensor of shape {window.shape}"
            raise FormatError(f"{what} has shape {window.sizes}, the array {found}; pass that part")
        return window


def read_array(given: object, dtype: str, what: str) -> Array:
    """The array, if it has dimensions and elements of that type. Raises FormatError, which says `what` it is."""
    array = np.asarray(given)
    if array.dtype != np.dtype(dtype):
        raise FormatError(f"{what} {describe_type(array, f'; pass an array of {dtype}')}")
    if not array.ndim:
        raise FormatError(f"{what} has no dimension; numbers alone are not quantised")
    return array


def read_choice(value: Format, field: str, choices: tuple[str, ...]) -> None:
    """Make the field of a format one of the choices. Raises FormatError."""
    given = getattr(value, field)
    found = known(given, choices)
    if found is None:
        what = f"{type(value).__name__}({field}={shown(given)})"
        raise FormatError(f"{what} is not known; use {' or '.join(map(repr, choices))}")
    object.__setattr__(value, field, found)


def read_flag(value: Format, field: str) -> None:
    """Make the field of a format True or False. Raises FormatError for anything else."""
    given: object = getattr(value, field)
    if not isinstance(given, bool | np.bool_):
        what = f"{type(value).__name__}({field}={shown(given)})"
        raise FormatError(f"{what} is neither; give True or False")
    object.__setattr__(value, field, bool(given))
