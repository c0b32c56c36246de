"""Amaxes: how ranks measure the amaxes of blocks that they cut, exchange them, and quantize their parts.

    measure   the amax of each block that the rank touches, within its own part
    send      the amaxes of blocks that some rank cuts: the rank's slots
    settle    the amax of each block: the largest of its slots if the rank cuts the block
    cast      the rank's part: its data, and the scales of all blocks that it touches

1. The largest of floats is exact in any order, so results are slices of the whole tensor's data and scales, to the bit.
2. Slots travel by an ordinary plan without reductions, which can be proved, and merged with other tensors' plans: 4
   bytes for each slot that a rank receives and does not have. Nothing travels for blocks that no rank cuts.
3. A whole channel or tensor is a block as well. NVFP4 also needs the whole tensor's amax: one more slot per part.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.values.formats.mxfp8 import MXFP8
>>> layout = Layout((2, 80), Mesh(tp=2), "n (tp k)")
>>> amaxes = plan_amaxes(MXFP8(), layout, "w")
>>> amaxes.src["w"].local_shape(0), amaxes.dst["w"].local_shape(0)
((2,), (4,))
>>> x = np.arange(160, dtype=np.float32).reshape(2, 80)
>>> own = amaxes.measure(0, x[:, :40])
>>> own
array([[ 31.,  39.],
       [111., 119.]], dtype=float32)
>>> amaxes.send(0, own)
{'w': array([ 39., 119.], dtype=float32)}
>>> arrived = np.array([39, 119, 63, 143], np.float32)
>>> data, scales = amaxes.finish(0, x[:, :40], own, {"w": arrived})
>>> np.array_equal(scales, MXFP8().quantize(x)[1][:, :2])
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arguments import instance, text
from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.public import public_in
from shardmath.base.text import shown
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.holdings import windows_of
from shardmath.layouts.layout import Layout
from shardmath.values.amaxes.parts import Box, PartStretches, read_part, touch
from shardmath.values.amaxes.slots import Share, Side, join_slots, lay_slots, number_slots
from shardmath.values.formats.blocks import Blocks, label
from shardmath.values.formats.elements import Array, describe_type, numpy_type
from shardmath.values.formats.floats import Floats
from shardmath.values.formats.format import Format
from shardmath.values.formats.fp8 import FP8
from shardmath.values.formats.nvfp4 import MOST_OF_ALL, NVFP4
from shardmath.values.formats.scales import list_stretches
from shardmath.values.formats.windows import make_window
from shardmath.values.transforms.packing import pack

__all__ = ["Amaxes", "AmaxPiece", "plan_amaxes"]

WHOLE = Blocks((), others=None)
"""The block that is the whole tensor."""


class _AmaxesOfRank(NamedTuple):
    """A rank's part, how many blocks it touches in each dimension, and its share in the slots of each kind of block.

    The first kind are the blocks of the scales; the second is the whole tensor, if its amax is needed.
    """

    part: PartStretches
    shape: tuple[int, ...]
    shares: tuple[Share, ...]


class AmaxPiece(NamedTuple):
    """A box of a rank's elements that can be quantized once the amax (largest magnitude) of each block with elements in
    the box is known. A block is a set of numbers that share a scale.

    `there` is the box in the tensor, `here` in the rank's packed array. `blocks` indexes its blocks among those that
    the rank touches, and `targets` its data and scales in the rank's.
    """

    there: Box
    here: Box
    blocks: Box
    targets: tuple[Box, ...]


@public_in("formats")
@dataclass(frozen=True, slots=True)
class Amaxes:
    """A plan for ranks to exchange amaxes, so that each rank quantizes its part just as in the whole tensor; made by
    `plan_amaxes`. An amax is the largest magnitude in a block of numbers that share a scale; it is exchanged if some
    rank holds only part of the block.

    `src` and `dst` are the sides of the slots, under the tensor's `name`; they are empty if no block is cut. `layouts`
    has the layouts of data and scales: the scale of a block is on every rank that holds some of it.
    """

    format: Format
    layout: Layout
    name: str
    src: Side = field(repr=False, compare=False)
    dst: Side = field(repr=False, compare=False)
    layouts: tuple[Layout, ...] = field(repr=False, compare=False)
    _parts: Mapping[int, _AmaxesOfRank] = field(repr=False, compare=False)

    def measure(self, rank: int, x: Floats) -> Floats:
        """Return the amax (largest magnitude) of each block of which `rank` has elements in `x`, its local float32
        array. If the format was constructed with the amax of the whole tensor, the array repeats that number.

        The array has the shape `count_blocks(rank)`. Only numbers of this rank count; amaxes that the format fixes are
        not measured. Raises PlanError for another array, and a rank that the layout does not have.
        """
        packed = self._read(rank, x)
        known = self.find_known(rank)
        if known is not None:
            return known
        out = np.zeros(self._find_part(rank).shape, np.float32)
        for piece in self.list_pieces(rank):
            values = packed[piece.here]
            amax = self.format.amax(values, piece.there, self.layout.shape)
            # Two pieces may have parts of one block.
            out[piece.blocks] = np.maximum(out[piece.blocks], amax)
        return out

    def find_known(self, rank: int) -> Floats | None:
        """Return an array filled with the `tensor_amax` (largest magnitude of the tensor) that the user gave to an FP8
        format, with one item per block that `rank` holds numbers of. In all other cases amaxes must be measured; return
        None."""
        shape = self._find_part(rank).shape
        if isinstance(self.format, FP8) and self.format.tensor_amax is not None:
            return np.full(shape, self.format.tensor_amax, np.float32)
        return None

    def list_pieces(self, rank: int) -> Iterator[AmaxPiece]:
        """Divide the elements that `rank` holds into boxes that can be quantized one by one, and yield each as an
        AmaxPiece. Callers with their own quantization kernels can loop over these boxes."""
        part = self._find_part(rank).part
        shape = self.layout.shape
        scale_blocks = self.format.blocks
        kinds = [scale_blocks, *(array.blocks for array in self.format.parts)]
        grids = [touch(part, blocks, shape) for blocks in kinds]
        sizes = scale_blocks.per_dimension(len(shape))
        for in_tensor, in_part in part.boxes(sizes):
            # The box's blocks of each kind, among those that the rank touches.
            touched = []
            for blocks, grid in zip(kinds, grids, strict=True):
                window = make_window(blocks, in_tensor, shape)
                touched.append(grid.locate(window.cover))
            of_scales, *targets = touched
            yield AmaxPiece(in_tensor, in_part, of_scales, tuple(targets))

    def send(self, rank: int, own: Floats) -> dict[str, Floats]:
        """Return the amaxes (largest magnitudes of blocks) that `rank` sends to other ranks, as a dict from the sent
        array's name to the array. They are selected from `own`, the array that `measure` returned.

        An amax is sent for each block (numbers that share a scale) that some rank holds only in part. For NVFP4, the
        whole tensor counts as a block, too. Raises PlanError.
        """
        part = self._find_part(rank)
        _check_like(own, part.shape, f"rank {rank}: what it has measured")
        slots = [amaxes.reshape(-1)[share.sources] for share, amaxes in _pair_kinds(part, own)]
        # A rank has one array of slots, or none.
        return {key: np.concatenate(slots) for key in self.list_local("source", rank)}

    def settle(
        self, rank: int, own: Floats, arrived: Mapping[str, Floats]
    ) -> tuple[Format, Floats]:
        """Return the format to quantize with (for NVFP4, one that has the whole tensor's amax), and the amaxes (largest
        magnitudes) of the blocks of `rank` over all ranks. They combine `own`, from `measure`, and `arrived`, the
        arrays from other ranks by the names from `list_local`.

        Raises PlanError.
        """
        part = self._find_part(rank)
        _check_like(own, part.shape, f"rank {rank}: what it has measured")
        row = self._find_arrived(rank, arrived)
        settled = []
        begin = 0
        for share, amaxes in _pair_kinds(part, own):
            end = begin + len(share.received)
            settled.append(_take_largest(amaxes, share, row[begin:end]))
            begin = end
        # Without slots, the format knows the amax, and `own` is filled with it.
        amax, *tensor_amaxes = settled or [own]
        return _with_tensor_amax(self.format, tensor_amaxes), amax

    def cast(self, rank: int, x: Floats, format: Format, amax: Floats) -> tuple[Array, ...]:
        """Quantize `x`, the local array of `rank`, with the `format` and the blocks' largest magnitudes `amax` that
        `settle` returned. Return a tuple of the local arrays of the quantized tensor: data, scales, and any others that
        the format has.

        Results equal slices of the quantized whole tensor. Raises PlanError.
        """
        part = self._find_part(rank)
        packed = self._read(rank, x)
        _check_like(amax, part.shape, f"rank {rank}: amaxes")
        shape = self.layout.shape
        outputs = tuple(_make_empty(layout, rank) for layout in self.layouts)
        for piece in self.list_pieces(rank):
            values = packed[piece.here]
            arrays = format.quantize(
                values, amax=amax[piece.blocks], where=piece.there, shape=shape
            )
            for out, target, array in zip(outputs, piece.targets, arrays, strict=True):
                # Two pieces have the same scale for a block that is in both.
                out[target] = array
        return outputs

    def finish(
        self, rank: int, x: Floats, own: Floats, arrived: Mapping[str, Floats]
    ) -> tuple[Array, ...]:
        """Quantize `x`, the local array of `rank`; return a tuple of data, scales, and any other arrays that the format
        has. Scales follow from the largest magnitudes in `own`, which `measure` returned, and in `arrived`, arrays
        received from other ranks, by name."""
        format, amax = self.settle(rank, own, arrived)
        return self.cast(rank, x, format, amax)

    def list_local(self, end: str, rank: int) -> list[str]:
        """Return the names under which `rank` sends (`end` "source") or receives (`end` "destination") arrays of
        amaxes; [] for a rank without any."""
        side = self.src if end == "source" else self.dst
        if self.name not in side:
            return []
        windows = windows_of(side[self.name], self.name, PlanError)
        return [key for key, _ in windows.locals(self.name, rank)]

    def count_blocks(self, rank: int) -> tuple[int, ...]:
        """Return, for each dimension, how many blocks `rank` holds numbers of: the shape of the array that `measure`
        returns."""
        return self._find_part(rank).shape

    def count_slots(self, end: str, rank: int) -> int:
        """Return the number of amaxes that `rank` sends (`end` "source") or receives (`end` "destination")."""
        shares = self._find_part(rank).shares
        if end == "source":
            return sum(len(share.sent) for share in shares)
        return sum(len(share.received) for share in shares)

    def _find_arrived(self, rank: int, arrived: Mapping[str, Floats]) -> Floats:
        """The amaxes that the rank has received, one per slot. Raises PlanError if they do not fit the plan."""
        row = np.zeros(0, np.float32)
        # A rank has one array of slots, or none.
        for key in self.list_local("destination", rank):
            if key not in arrived:
                what = f"{label(self.name)}rank {rank}: {key!r} is not in arrived"
                raise PlanError(f"{what}; pass the received amaxes by local name")
            row = arrived[key]
        count = self.count_slots("destination", rank)
        _check_like(row, (count,), f"{label(self.name)}rank {rank}: the array of received amaxes")
        return row

    def _find_part(self, rank: int) -> _AmaxesOfRank:
        part = self._parts.get(rank)
        if part is None:
            what = f"{label(self.name)}rank {rank} holds nothing under {self.layout}"
            raise PlanError(f"{what}; give one of its ranks: {shown(sorted(self._parts))}")
        return part

    def _read(self, rank: int, x: Floats) -> Floats:
        """The rank's local array without holes. Raises PlanError if it does not fit the layout."""
        self._find_part(rank)
        what = f"{label(self.name)}rank {rank}: the local array"
        _check_like(x, self.layout.local_shape(rank), what)
        return pack(self.layout, rank, x)


def _check_like(array: object, shape: tuple[int, ...], what: str) -> None:
    """Raise PlanError for anything but a float32 array of that shape."""
    if not isinstance(array, np.ndarray):
        raise PlanError(f"{what} is of type {type(array).__name__}; pass a numpy array of float32")
    if array.dtype != np.float32:
        raise PlanError(f"{what} {describe_type(array, '; pass an array of float32')}")
    if array.shape != shape:
        raise PlanError(f"{what} has shape {array.shape}; pass an array of shape {shape}")


def _pair_kinds(part: _AmaxesOfRank, own: Floats) -> Iterator[tuple[Share, Floats]]:
    """The part's share of each kind of block, with its amaxes of that kind; a format may need only the first."""
    tensor_amax = np.max(own, initial=0, keepdims=True)
    return zip(part.shares, (own, tensor_amax), strict=False)


def _take_largest(amaxes: Floats, share: Share, slots: Floats) -> Floats:
    """The amaxes, raised to the largest of the received slots for blocks that the part cuts."""
    largest = amaxes.copy()
    flat_view = largest.reshape(-1)
    np.maximum.at(flat_view, share.targets, slots)
    return largest


def _with_tensor_amax(format: Format, tensor_amaxes: Sequence[Floats]) -> Format:
    """The format with the whole tensor's amax, if there is one."""
    for amax in tensor_amaxes:
        assert isinstance(format, NVFP4), "no other format has a slot for the tensor"
        largest = amax.item()
        # A tensor with an Inf has the global scale 1, and this finite amax gives the same scale.
        known = float(MOST_OF_ALL) if math.isinf(largest) else largest
        format = replace(format, tensor_amax=known)
    return format


def _make_empty(layout: Layout, rank: int) -> Array:
    """A zeroed local array of the rank."""
    return np.zeros(layout.local_shape(rank), numpy_type(layout.dtype))


def plan_amaxes(format: Format, layout: Layout, name: str = "") -> Amaxes:
    """Return an Amaxes: a plan to quantize each rank's part of the tensor `name` to `format`, with the same result as
    quantizing the whole tensor. `layout` can divide blocks (numbers that share a scale) between ranks.

    Raises FormatError as `format.layouts` does, for a Partial layout and for a cut byte of two numbers; PlanError for
    a tensor without dimensions, and for a block of which ranks hold some positions but not all.
    """
    name = text(name, "the name of a tensor", PlanError)
    _check_given(format, layout, name)
    layouts = format.layouts(layout, name, duplicated=True)
    kinds = _list_kinds(format)
    for blocks in kinds:
        _check_held(layout, blocks, name)
    parts, size = _divide_ranks(format, layout, kinds)
    sent = {}
    received = {}
    for rank, part in parts.items():
        sent[rank] = _concatenate([share.sent for share in part.shares])
        received[rank] = _concatenate([share.received for share in part.shares])
    src = lay_slots(name, size, sent)
    dst = lay_slots(name, size, received)
    return Amaxes(format, layout, name, src, dst, layouts, parts)


def _check_given(format: object, layout: object, name: str) -> None:
    """Raise PlanError for arguments that cannot be quantized."""
    if not isinstance(format, Format):
        what = f"{shown(format)} is not a format"
        raise PlanError(f"{what}; give one such as formats.MXFP8()")
    checked = instance(layout, Layout, "give the layout of the tensor", PlanError)
    if not checked.ndim:
        what = f"{label(name)}{layout} has no dimension, and single numbers cannot be quantized"
        raise PlanError(f"{what}; give the layout of a tensor with at least one dimension")


def _list_kinds(format: Format) -> tuple[Blocks, ...]:
    """The kinds of blocks whose amaxes ranks have to exchange: none for FP8 with a given amax of the tensor; for NVFP4
    without one, the whole tensor is also a block."""
    if isinstance(format, FP8) and format.tensor_amax is not None:
        return ()
    if isinstance(format, NVFP4) and format.tensor_amax is None:
        return format.blocks, WHOLE
    return (format.blocks,)


def _check_held(layout: Layout, blocks: Blocks, name: str) -> None:
    """Raise PlanError for a block of which ranks hold some positions but not all."""
    sizes = blocks.positions(layout.shape)
    for d, size in enumerate(sizes):
        lost = _find_lost(layout.dims[d], size)
        if lost is not None:
            what = f"{label(name)}no rank holds position {lost} of dimension {d} under {layout}"
            fix = "give a layout under which ranks together hold all of each block"
            raise PlanError(f"{what}, so the amax of its block of {blocks} is not known; {fix}")


def _find_lost(dim: Dimension, size: int) -> int | None:
    """A position that no rank holds although some rank holds another one of its block; None if there is none."""
    is_held = np.zeros(dim.size, np.bool_)
    for runs in partition(dim).parts:
        for start, stop in list_stretches(runs):
            is_held[start:stop] = True
    block_of = np.arange(dim.size) // size
    count = np.bincount(block_of)
    held = np.bincount(block_of, weights=is_held)
    # A block that no rank holds at all needs no amax.
    is_torn = (held > 0) & (held < count)
    is_lost = is_torn[block_of] & ~is_held
    if not is_lost.any():
        return None
    return int(is_lost.argmax())


def _divide_ranks(
    format: Format, layout: Layout, kinds: Sequence[Blocks]
) -> tuple[dict[int, _AmaxesOfRank], int]:
    """Each rank's part with its slots, and the number of all slots."""
    shape = layout.shape
    # In ascending order, so that slots are the same however the layout is spelled.
    part_of = {rank: read_part(layout.runs(rank)) for rank in sorted(layout.mesh.ranks)}
    # Ranks with equal parts share their slots.
    distinct = list(dict.fromkeys(part_of.values()))
    slots_by_kind = [number_slots(distinct, blocks, shape) for blocks in kinds]
    with_slots = {}
    for part, shares in zip(distinct, join_slots(slots_by_kind, len(distinct)), strict=True):
        touched = touch(part, format.blocks, shape)
        with_slots[part] = _AmaxesOfRank(part, touched.shape, shares)
    by_rank = {rank: with_slots[part] for rank, part in part_of.items()}
    return by_rank, sum(slots.size for slots in slots_by_kind)


def _concatenate(slots: Sequence[Ints]) -> Ints:
    """Slots of several kinds in one array, which is empty without any kind."""
    return np.concatenate([*slots, np.zeros(0, np.int64)])
