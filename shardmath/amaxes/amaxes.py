"""Amaxes: what ranks that cut blocks measure, send each other, and make.

    measure   of its own part, the amax of each block that a rank touches
    send      those of blocks that some rank cuts: its slots
    settle    the largest of all slots of a block that it cuts, which is the block's amax
    cast      its own part: data, and scales of all blocks that it touches

1. The largest of floats is exact in any order, so parts are those of the whole tensor's data and scales, to the bit.
2. What travels is a plan like any other, without reductions: it can be proved, and merged with those of other tensors.
   It is 4 bytes for each slot that a rank receives and does not have. Of what nobody cuts nothing travels.
3. A whole channel or tensor is a block as well. NVFP4 needs the amax of all of the tensor, too: a slot more per part.

>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.formats.mxfp8 import MXFP8
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
>>> arrived = np.array([39, 63, 119, 143], np.float32)
>>> data, scales = amaxes.finish(0, x[:, :40], own, {"w": arrived})
>>> (scales == MXFP8().quantise(x)[1][:, :2]).all()
np.True_
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.algebra.partition import partition
from shardmath.amaxes.parts import Part, Touched, read_part, touch
from shardmath.amaxes.slots import Share, join_shares, lay_slots, number_slots
from shardmath.base.arguments import instance, text
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.formats.blocks import Blocks, label
from shardmath.formats.floats import Floats
from shardmath.formats.format import Format
from shardmath.formats.fp8 import FP8
from shardmath.formats.nvfp4 import MOST_OF_ALL, NVFP4
from shardmath.formats.scales import list_stretches
from shardmath.formats.windows import make_window
from shardmath.layouts.holdings import LayoutOrWindows, windows_of
from shardmath.layouts.layout import Layout
from shardmath.numbers.elements import Array, numpy_type
from shardmath.transforms.packing import pack

__all__ = ["Amaxes", "plan_amaxes"]

Side: TypeAlias = Mapping[str, LayoutOrWindows]

WHOLE = Blocks((), others=None)
"""The one block that all of a tensor is."""


class _Place(NamedTuple):
    """A part, how many blocks it touches in each dimension, and its share in the slots of each kind of block.

    The first kind are those of the scales; the second is the whole tensor, where its amax is needed.
    """

    part: Part
    shape: tuple[int, ...]
    shares: tuple[Share, ...]

    @property
    def receives(self) -> int:
        """How many slots it receives."""
        return sum(len(share.received) for share in self.shares)


@public
@dataclass(frozen=True, slots=True)
class Amaxes:
    """How ranks that cut blocks of a tensor quantise their parts; made by `plan_amaxes`.

    `src` and `dst` are the sides of what travels, by the tensor's `name`, and of no tensor where no block is cut.
    `layouts` are those of data and scales: the scale of a block is on every rank that holds some of it.
    """

    format: Format
    layout: Layout
    name: str
    src: Side = field(repr=False, compare=False)
    dst: Side = field(repr=False, compare=False)
    layouts: tuple[Layout, ...] = field(repr=False, compare=False)
    _places: Mapping[int, _Place] = field(repr=False, compare=False)

    def measure(self, rank: int, x: Floats) -> Floats:
        """The amax of each block that the rank touches, of its own part `x`, a local float32 array of the layout.

        Raises PlanError for another array, and a rank that the layout does not have.
        """
        place = self._find_place(rank)
        packed = self._read(rank, x)
        format, shape = self.format, self.layout.shape
        if isinstance(format, FP8) and format.tensor_amax is not None:
            return np.full(place.shape, format.tensor_amax, np.float32)
        out = np.zeros(place.shape, np.float32)
        touched = touch(place.part, format.blocks, shape)
        for there, here in place.part.boxes():
            own = touched.locate(format.cover(there, shape))
            found = format.amax(packed[here], there, shape)
            # Two boxes may have parts of one block.
            out[own] = np.maximum(out[own], found)
        return out

    def send(self, rank: int, own: Floats) -> dict[str, Floats]:
        """What the rank sends of what it has measured, by local name. Raises PlanError."""
        place = self._find_place(rank)
        _check_like(own, place.shape, f"rank {rank}: what it has measured")
        kinds = zip(place.shares, _list_amaxes(own), strict=False)
        slots = [amaxes[share.sends] for share, amaxes in kinds]
        return {key: np.concatenate(slots) for key in self.list_local("source", rank)}

    def settle(
        self, rank: int, own: Floats, arrived: Mapping[str, Floats]
    ) -> tuple[Format, Floats]:
        """The format to go on with, which knows the tensor's amax if it needs it, and the amax of each touched block.

        `own` is what the rank has measured, `arrived` what it has received, by local name. Raises PlanError.
        """
        place = self._find_place(rank)
        _check_like(own, place.shape, f"rank {rank}: what it has measured")
        row = self._find_arrived(rank, place, arrived)
        settled = []
        for share, amaxes in zip(place.shares, _list_amaxes(own), strict=False):
            largest = amaxes.copy()
            # In block-major order, which is also that of the mask.
            if share.starts.size:
                largest[share.cuts] = _reduce(row, share)
            settled.append(largest)
        if not settled:
            return self.format, own
        amax, *of_all = settled
        return _tell(self.format, of_all), amax

    def cast(self, rank: int, x: Floats, format: Format, amax: Floats) -> tuple[Array, ...]:
        """Data and scales of all blocks that the rank touches, as `layouts` have them, of what `settle` gives.

        They are what the rank would have of the whole tensor's. Raises PlanError.
        """
        place = self._find_place(rank)
        packed = self._read(rank, x)
        _check_like(amax, place.shape, f"rank {rank}: amaxes")
        shape = self.layout.shape
        touched = touch(place.part, format.blocks, shape)
        kinds = [one.blocks for one in format.parts]
        grids = [touch(place.part, blocks, shape) for blocks in kinds]
        made = _make_empty(format, grids)
        for there, here in place.part.boxes():
            own = touched.locate(format.cover(there, shape))
            found = format.quantise(packed[here], amax=amax[own], where=there, shape=shape)
            for out, grid, blocks, values in zip(made, grids, kinds, found, strict=True):
                cover = make_window(blocks, there, shape).cover
                out[grid.locate(cover)] = values
        return made

    def finish(
        self, rank: int, x: Floats, own: Floats, arrived: Mapping[str, Floats]
    ) -> tuple[Array, ...]:
        """`settle` and `cast`."""
        format, amax = self.settle(rank, own, arrived)
        return self.cast(rank, x, format, amax)

    def list_local(self, end: str, rank: int) -> list[str]:
        """The local name of the slots that the rank holds at an end, "source" or "destination"; none without any."""
        side = self.src if end == "source" else self.dst
        if self.name not in side:
            return []
        windows = windows_of(side[self.name], self.name, PlanError)
        return [key for key, _ in windows.locals(self.name, rank)]

    def _find_arrived(self, rank: int, place: _Place, arrived: Mapping[str, Floats]) -> Floats:
        row = np.zeros(0, np.float32)
        for key in self.list_local("destination", rank):
            if key not in arrived:
                what = f"{label(self.name)}rank {rank}: slots {key!r} are missing"
                raise PlanError(f"{what}; give what has arrived, by local name")
            row = arrived[key]
        _check_like(row, (place.receives,), f"{label(self.name)}rank {rank}: what has arrived")
        return row

    def _find_place(self, rank: int) -> _Place:
        found = self._places.get(rank)
        if found is None:
            what = f"{label(self.name)}rank {rank} holds nothing under {self.layout}"
            raise PlanError(f"{what}; its ranks are {sorted(self._places)}")
        return found

    def _read(self, rank: int, x: Floats) -> Floats:
        """What the rank holds, without holes."""
        expected = self.layout.local_shape(rank)
        _check_like(x, expected, f"{label(self.name)}rank {rank}: the local array")
        return pack(self.layout, rank, x)


def _check_like(array: object, shape: tuple[int, ...], what: str) -> None:
    """Raise PlanError for what is no float32 array of that shape."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        kind = getattr(array, "dtype", type(array).__name__)
        raise PlanError(f"{what} is {kind}; pass an array of float32")
    if array.shape != shape:
        raise PlanError(f"{what} has shape {array.shape}; pass one of {shape}")


def _list_amaxes(own: Floats) -> tuple[Floats, Floats]:
    """Of what a rank has measured, the amaxes of blocks and that of all."""
    largest: Floats = np.max(own, initial=0, keepdims=True)
    return own, largest


def _reduce(row: Floats, share: Share) -> Floats:
    """The largest slot of each block that a part cuts."""
    first = share.starts[0]
    of_kind = row[first : first + len(share.received)]
    largest: Floats = np.maximum.reduceat(of_kind, share.starts - first)
    return largest


def _tell(format: Format, of_all: Sequence[Floats]) -> Format:
    """The format, told the amax of the whole tensor where that is settled."""
    for amax in of_all:
        assert isinstance(format, NVFP4), "of others nobody asks for it"
        largest = amax.item()
        # A tensor with an Inf has the global scale 1, and so has one of this amax, which is finite.
        known = float(MOST_OF_ALL) if math.isinf(largest) else largest
        format = replace(format, tensor_amax=known)
    return format


def _make_empty(format: Format, grids: Sequence[Touched]) -> tuple[Array, ...]:
    """Arrays for data and scales."""
    both = zip(format.parts, grids, strict=True)
    return tuple(np.zeros(grid.shape, numpy_type(one.dtype)) for one, grid in both)


def plan_amaxes(format: Format, layout: Layout, name: str = "") -> Amaxes:
    """How the ranks of a layout, which may cut blocks, quantise their parts of the tensor `name`.

    Raises FormatError as `format.layouts` does, for a Partial layout and a byte of two numbers that is cut; PlanError
    for a tensor without dimensions, and where nobody holds some of a block.
    """
    instance(format, Format, "give one such as formats.MXFP8()", PlanError)
    instance(layout, Layout, "give the layout of the tensor", PlanError)
    name = text(name, "the name of a tensor", PlanError)
    if not layout.ndim:
        raise PlanError(f"{label(name)}{layout} has no dimension; numbers alone are not quantised")
    layouts = format.layouts(layout, name, duplicated=True)
    kinds = _list_kinds(format)
    for blocks in kinds:
        _check_held(layout, blocks, name)
    by_rank, count = _place_ranks(format, layout, kinds)
    sent = {rank: [own.sent for own in place.shares] for rank, place in by_rank.items()}
    received = {rank: [own.received for own in place.shares] for rank, place in by_rank.items()}
    src = _lay_side(name, count, sent)
    dst = _lay_side(name, count, received)
    return Amaxes(format, layout, name, src, dst, layouts, by_rank)


def _list_kinds(format: Format) -> tuple[Blocks, ...]:
    """The blocks whose amaxes have to be known of all their positions."""
    if isinstance(format, FP8) and format.tensor_amax is not None:
        return ()
    if isinstance(format, NVFP4) and format.tensor_amax is None:
        return format.blocks, WHOLE
    return (format.blocks,)


def _check_held(layout: Layout, blocks: Blocks, name: str) -> None:
    """Raise PlanError for a block of which some is held, and some by nobody."""
    sizes = blocks.positions(layout.shape)
    for d, (dim, size) in enumerate(zip(layout.dims, sizes, strict=True)):
        is_held = np.zeros(dim.size, np.bool_)
        for runs in partition(dim).parts:
            for start, stop in list_stretches(runs):
                is_held[start:stop] = True
        number = np.arange(dim.size) // size
        some = np.bincount(number, weights=is_held)
        is_torn = (some > 0) & (some < np.bincount(number))
        lost = np.flatnonzero(is_torn[number] & ~is_held)
        if lost.size:
            what = f"{label(name)}nobody holds position {lost[0]} of dimension {d} under {layout}"
            fix = "give a layout under which ranks together hold all of each block"
            raise PlanError(f"{what}, so the amax of its block of {blocks} is not known; {fix}")


def _place_ranks(
    format: Format, layout: Layout, kinds: Sequence[Blocks]
) -> tuple[dict[int, _Place], int]:
    """Each rank's place, and how many slots there are."""
    parts = {rank: read_part(layout.runs(rank)) for rank in layout.mesh.ranks}
    distinct = list(dict.fromkeys(parts.values()))
    slots = [number_slots(distinct, blocks, layout.shape) for blocks in kinds]
    shares = list(join_shares(slots)) or [()] * len(distinct)
    places = {}
    for part, own in zip(distinct, shares, strict=True):
        touched = touch(part, format.blocks, layout.shape)
        places[part] = _Place(part, touched.shape, own)
    return {rank: places[part] for rank, part in parts.items()}, sum(one.count for one in slots)


def _lay_side(name: str, count: int, held: Mapping[int, Sequence[np.ndarray]]) -> Side:
    """The side on which ranks hold these slots; of no tensor where there are none."""
    rows = {rank: np.concatenate(slots) for rank, slots in held.items() if slots}
    windows = lay_slots(count, rows)
    if not windows:
        return {}
    return {name: windows if len(windows) > 1 else windows[0]}
