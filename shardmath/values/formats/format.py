"""Format: the interface of every quantized format, and the steps that turn numbers into data and scales.

1. A format is a value. It turns a tensor into arrays, its **parts**: data and scales.
2. If a box of a tensor cuts no block, `quantize` needs only the box: quantizing a slice equals slicing the quantized
   tensor. If it cuts blocks, `quantize` needs the amaxes of the whole blocks: ranks take the largest over ranks of the
   results of `amax`, and pass it to `quantize`.
3. Numbers are float32 arrays. Elements of 8 or 4 bits are uint8 arrays.
4. Scales have as many dimensions as the tensor. `pad_scales` adds the padding that some kernels need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import known
from shardmath.base.errors import FormatError
from shardmath.base.moved import former_attributes
from shardmath.base.text import plural, shown
from shardmath.layouts.layout import Layout
from shardmath.values.formats.blocks import Blocks, Index, Sliced, label, read_shape
from shardmath.values.formats.elements import describe_type
from shardmath.values.formats.floats import Codes, Float, Floats, decode, encode
from shardmath.values.formats.scales import lay_blocks, pad_parts
from shardmath.values.formats.windows import Window, make_window

if TYPE_CHECKING:
    from shardmath.proofs.sizes.lengths import Lengths

__all__ = ["Array", "Format", "Part", "read_array", "read_choice", "read_flag"]

Array: TypeAlias = NDArray[Any]


class Part(NamedTuple):
    """A description of one array of a quantized tensor, such as its scales: its name, the type of its elements, and the
    block of positions that each element stands for.

    `kind` is torch's name of the elements' type; `dtype` is the dtype of arrays, in which elements travel.
    """

    name: str
    kind: str
    dtype: str
    blocks: Blocks


@former_attributes(quantise="quantize", dequantise="dequantize")
class Format(ABC):
    """The base class of quantized formats, such as MXFP8 or NVFP4: how data and scales represent float32 numbers."""

    __slots__ = ()

    # Properties of a format

    @property
    @abstractmethod
    def name(self) -> str:
        """The format's name for people, with its options."""

    @property
    @abstractmethod
    def element(self) -> Float:
        """The float type in which the data are encoded."""

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """The size of the blocks whose positions share a scale."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Descriptions of the arrays that `quantize` returns, in their order: data, scales, and any others."""

    @property
    def per_element(self) -> int:
        """The number of values that one element of the data array packs along the last dimension, such as 2 for two per
        byte."""
        sizes = self.parts[0].blocks.sizes
        return 1 if not sizes or sizes[-1] is None else sizes[-1]

    @property
    def nan_magnitude(self) -> float:
        """The magnitude that a NaN counts as in amaxes (largest magnitudes of blocks): 0, or infinity if one NaN makes
        its whole block NaN."""
        return 0

    @property
    def padding(self) -> tuple[int, int]:
        """The multiples to which kernels pad the last two dimensions of the scales; (1, 1) for no padding."""
        return 1, 1

    @abstractmethod
    def _make_scales(self, amax: Floats) -> Array:
        """The scales of blocks with these amaxes."""

    @abstractmethod
    def _scale_down(self, values: Floats, scales: Array) -> Floats:
        """The numbers to encode: each divided by the scale of its block."""

    @abstractmethod
    def _read_scales(self, scales: Array) -> Floats:
        """The float32 factors by which data are multiplied."""

    # Shapes, slices and layouts

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of this `shape`, without padding."""
        return self.blocks.count(read_shape(shape))

    def padded_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of this `shape`, padded as kernels store them."""
        return self._pad_shape(self.scale_shape(shape))

    def _pad_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        pairs = zip(shape, self._list_multiples(len(shape)), strict=True)
        return tuple(n + -n % multiple for n, multiple in pairs)

    def _list_multiples(self, ndim: int) -> tuple[int, ...]:
        """The multiple to which each dimension of the scales is padded."""
        multiples = (1,) * ndim + self.padding
        # The last `ndim` of them: scales of one dimension have only the last multiple.
        return multiples[len(multiples) - ndim :]

    def pad_scales(self, scales: Array) -> Array:
        """Return the `scales` padded with zeros in the last two dimensions, as kernels store them."""
        padded = np.zeros(self._pad_shape(scales.shape), scales.dtype)
        inside = tuple(map(slice, scales.shape))
        padded[inside] = scales
        return padded

    def unpad_scales(self, padded: Array, shape: tuple[int, ...]) -> Array:
        """Return `padded`, the scales of a tensor of this `shape`, without their padding.

        Raises FormatError if `padded` has another shape.
        """
        expected = self.padded_scale_shape(shape)
        if padded.shape != expected:
            what = (
                f"padded has shape {padded.shape}, but a tensor of shape {tuple(shape)} has padded"
            )
            raise FormatError(f"{what} scales of shape {expected}; pass them with all padding")
        return padded[tuple(map(slice, self.scale_shape(shape)))]

    def legal_cuts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return, for each dimension, the positions at which a tensor of this `shape` can be cut without cutting a
        block (numbers that share a scale). They include 0 and the dimension's length."""
        return self.blocks.cuts(read_shape(shape))

    def scale_slice(self, data_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """Return the index that selects, from the scales of a tensor of this `shape`, the scales of those elements that
        the index `data_slice` selects from the tensor. The returned index is a tuple of integers, slices, and None for
        new axes; error messages give the tensor's `name`.

        Raises FormatError, with the tensor's `name`, for a cut or a step inside a block, and for an invalid index.
        """
        return self.blocks.scale_slice(data_slice, read_shape(shape), name)

    def data_slice(self, scale_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """Return the index that selects, from a tensor of this `shape`, all elements whose scales the index
        `scale_slice` selects from the tensor's scales. The returned index is a tuple of integers, slices, and None for
        new axes; error messages give the tensor's `name`.

        Raises FormatError.
        """
        return self.blocks.data_slice(scale_slice, read_shape(shape), name)

    def check_shape(self, shape: tuple[int, ...], name: str = "") -> None:
        """Raise FormatError, with the tensor's `name`, if the format packs several numbers into a byte, and the last
        dimension of `shape` does not fill whole bytes."""
        count = self.per_element
        if shape[-1:] and shape[-1] % count:
            what = f"{label(name)}{self.name} packs {count} numbers per byte, which shape {tuple(shape)}"
            fix = f"make its last dimension a multiple of {count}"
            raise FormatError(f"{what} does not fill; {fix}")

    def layouts(
        self, layout: Layout, name: str = "", *, duplicated: bool = False, kinds: bool = False
    ) -> tuple[Layout, ...]:
        """Return the layouts of the arrays (data, scales and any others) that quantizing makes from a tensor with this
        `layout`; dtypes are torch's if `kinds`, else numpy's. When several ranks hold numbers that share a scale, each
        of them gets the scale if `duplicated`; otherwise FormatError, with the tensor's `name`, is raised.

        The layouts come in the order of `parts`. Local arrays have no unused positions, even if the tensor's local
        arrays have some.

        Raises FormatError, with the tensor's `name`, if a rank cuts a block, as `check_shape` does, and for a Partial
        layout: quantized addends do not add up to the quantized sum. If `duplicated`, ranks may cut blocks: the scale
        of a block is on every rank that holds some of it, which suffices to move and to read a quantized tensor.
        """
        if layout.addend_axes:
            fix = "reduce it first, by a plan to a layout without Partial"
            raise FormatError(f"{label(name)}{layout} is Partial and cannot be quantized; {fix}")
        self.check_shape(layout.shape, name)
        layouts = []
        for i, part in enumerate(self.parts):
            what = f"{part.name} of {self.name}"
            dtype = part.kind if kinds else part.dtype
            # Data are never duplicated: no rank can hold half of a byte of two numbers.
            shared = duplicated and i > 0
            layouts.append(lay_blocks(layout, part.blocks, dtype, what, name, duplicated=shared))
        return tuple(layouts)

    def legal_sizes(self, layout: Layout) -> tuple[Lengths, ...]:
        """Return, for each dimension, the set of all its lengths at which no rank cuts a block (numbers that share a
        scale or a byte) if the tensor is divided as `layout` divides it, whose sizes are examples. A dimension of fixed
        size, in which nothing can be cut, has this one length.

        Raises FormatError for a dimension about which not all lengths can be decided, such as one that a custom
        placement divides.

        >>> from shardmath import Layout, Mesh
        >>> from shardmath.formats import FP8Blocks
        >>> n, k = FP8Blocks().legal_sizes(Layout((256, 512), Mesh(tp=2), "(tp n) k"))
        >>> print(f"{n}; {k}")
        n = 1, and every n with n mod 256 = 0 or 255; every n
        """
        # Only this method needs proofs for all sizes.
        from shardmath.values.formats.legal import find_uncut

        blocks = [part.blocks.per_dimension(layout.ndim) for part in self.parts]
        multiples = (1,) * (layout.ndim - 1) + (self.per_element,)
        out = []
        for d, dim in enumerate(layout.dims):
            what = f"dimension {d} of {layout}"
            out.append(find_uncut(dim, [one[d] for one in blocks], multiples[d], what))
        return tuple(out)

    def scale_layout(
        self, layout: Layout, name: str = "", *, duplicated: bool = False, kinds: bool = False
    ) -> Layout:
        """Return the layout of the scales that quantizing makes from a tensor with this `layout`; the dtype is torch's
        if `kinds`, else numpy's. When several ranks hold numbers that share a scale, each of them gets the scale if
        `duplicated`; otherwise FormatError, with the tensor's `name`, is raised.

        The layout has no holes.

        Raises FormatError as `layouts` does.
        """
        return self.layouts(layout, name, duplicated=duplicated, kinds=kinds)[1]

    def pad_layout(self, layout: Layout) -> Layout:
        """Convert `layout`, the layout of scales without padding, into the layout of scales that `pad_scales` has
        padded on each rank.

        Padding is holes: it is never sent or stored, and is zeros when scales are loaded.
        """
        return pad_parts(layout, self._list_multiples(layout.ndim))

    # Numbers

    def cover(self, where: Index, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return slices, one per dimension, into the array of a tensor's scales: they select the scale of every block
        that has an element in the box `where`. The box is an index into a tensor of this `shape`."""
        return self._window(where, shape).cover

    def straddles(self, where: Index, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return an array of flags, one per block that the box `where` of a tensor of this `shape` touches: whether
        some of the block's positions are outside the box."""
        return self._window(where, shape).straddles()

    def amax(self, x: Floats, where: Index = ..., shape: tuple[int, ...] | None = None) -> Floats:
        """Return an array with the largest magnitude of each block (numbers that share a scale), found only among the
        block's numbers in `x`. The array `x` is the part at the index `where` of a tensor of this `shape`; by default,
        it is the whole tensor.

        Raises FormatError.
        """
        values = read_array(x, "float32", "x")
        window = self._read_window(values.shape, where, shape)
        return window.amax(values, self.nan_magnitude)

    def quantize(
        self,
        x: Floats,
        *,
        amax: Floats | None = None,
        where: Index = ...,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[Array, ...]:
        """Quantize the float32 array `x`; return its data, the scales of the blocks that it overlaps, and any other
        parts, as a tuple. The array is the part at the index `where` of a tensor of this `shape`, by default the whole
        tensor. If it has only some numbers of a block, pass `amax`, each whole block's largest magnitude.

        Raises FormatError if the box cuts blocks and `amax` is not given, and for arrays that do not fit.
        """
        values = read_array(x, "float32", "x")
        window = self._read_window(values.shape, where, shape)
        if amax is None:
            amax = self._find_amax(values, window)
        amaxes = read_array(amax, "float32", "amax")
        if amaxes.shape != window.count:
            what = f"amax has shape {amaxes.shape}, but the part touches {window.count} blocks"
            raise FormatError(f"{what}; give one amax per block")
        with np.errstate(all="ignore"):
            return self._quantize(values, window, amaxes)

    def _find_amax(self, values: Floats, window: Window) -> Floats:
        """The amaxes of the window's blocks. Raises FormatError if it cuts some."""
        is_cut = window.straddles()
        if is_cut.any():
            block = tuple(map(int, np.argwhere(is_cut)[0]))
            what = f"the part {window.spans} of a tensor of shape {window.shape} cuts blocks"
            fix = "give amax=, the maximum over ranks of what the method `amax` returns"
            raise FormatError(
                f"{what} of {self.blocks}, first block {block} of those it touches; {fix}"
            )
        return window.amax(values, self.nan_magnitude)

    def _quantize(self, values: Floats, window: Window, amax: Floats) -> tuple[Array, ...]:
        scales = self._make_scales(amax)
        factors = window.spread(scales)
        data = encode(self.element, self._scale_down(values, factors))
        return data, scales

    def dequantize(
        self, *parts: Array, where: Index = ..., shape: tuple[int, ...] | None = None
    ) -> Floats:
        """Convert `parts`, the arrays that `quantize` returned for a box of a tensor, each passed as a positional
        argument, back into one float32 array of the box's shape. The box is at the index `where` of a tensor of this
        `shape`; by default, it is the whole tensor.

        Numbers outside the range of float32 become infinite. Raises FormatError for arrays that do not fit.
        """
        if len(parts) != len(self.parts):
            names = ", ".join(part.name for part in self.parts)
            what = f"{self.name}.dequantize has {plural(parts, 'array')}, not {len(self.parts)}"
            raise FormatError(f"{what}; give {names}")
        data, scales, *others = [
            read_array(array, part.dtype, part.name)
            for array, part in zip(parts, self.parts, strict=True)
        ]
        window = self._read_window(self._shape_of(data), where, shape)
        if scales.shape != window.count:
            what = f"scales have shape {scales.shape}, but the data have {window.count} blocks"
            raise FormatError(f"{what}; give one scale per block, without padding")
        with np.errstate(all="ignore"):
            return self._dequantize(window, data, scales, *others)

    def _dequantize(self, window: Window, data: Codes, scales: Array, *others: Array) -> Floats:
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
        """The window on a box, whose array has the shape `found`. Raises FormatError if the box has another shape."""
        if shape is None and where is not Ellipsis:
            what = f"where={shown(where)} is a part of a tensor, but shape= is missing"
            raise FormatError(f"{what}; give the shape= of the whole tensor")
        window = self._window(where, found if shape is None else shape)
        if window.sizes != found:
            what = f"the part {window.spans} of a tensor of shape {window.shape}"
            fix = f"pass an array of shape {window.sizes}"
            raise FormatError(f"{what} has shape {window.sizes}, but the array has {found}; {fix}")
        return window


def read_array(given: object, dtype: str, what: str) -> Array:
    """Return `given` as a numpy array. Raises FormatError unless it has the dtype `dtype` and at least one dimension;
    `what` is the array's name, with which the message begins."""
    array = np.asarray(given)
    if array.dtype != np.dtype(dtype):
        raise FormatError(f"{what} {describe_type(array, f'; pass an array of {dtype}')}")
    if not array.ndim:
        fix = "give an array with at least one dimension"
        raise FormatError(f"{what} has no dimension, and single numbers cannot be quantized; {fix}")
    return array


def read_choice(value: Format, field: str, choices: tuple[str, ...]) -> None:
    """Check that the attribute `field` of the format `value` equals one of `choices`, and raise FormatError if not. The
    attribute is replaced by the equal choice, so that an instance of a subclass of str becomes a plain str."""
    given = getattr(value, field)
    choice = known(given, choices)
    if choice is None:
        what = f"{type(value).__name__}({field}={shown(given)})"
        raise FormatError(f"{what} is not known; use {' or '.join(map(repr, choices))}")
    object.__setattr__(value, field, choice)


def read_flag(value: Format, field: str) -> None:
    """Convert the attribute `field` of the format `value` from a bool of Python or numpy to Python's bool. Raises
    FormatError for others."""
    given: object = getattr(value, field)
    if not isinstance(given, bool | np.bool_):
        what = f"{type(value).__name__}({field}={shown(given)})"
        raise FormatError(f"{what} is not a bool; give True or False")
    object.__setattr__(value, field, bool(given))
