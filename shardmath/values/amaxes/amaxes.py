"""Amaxes: what ranks that cut blocks measure, send each other, and make.

    measure   of its own part, the amax of each block that a rank touches
    send      those of blocks that some rank cuts: its slots
    settle    the largest of all slots of a block that it cuts, which is the block's amax
    cast      its own part: data, and scales of all blocks that it touches

1. The largest of floats is exact in any order, so parts are those of the whole tensor's data and scales, to the bit.
2. What travels is a plan like any other, without reductions: it can be proved, and merged with those of other tensors.
   It is 4 bytes for each slot that a rank receives and does not have. Of what nobody cuts nothing travels.
3. A whole channel or tensor is a block as well. NVFP4 needs the amax of all of the tensor, too: a slot more per part.

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
>>> (scales == MXFP8().quantise(x)[1][:, :2]).all()
np.True_
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
"""The one block that all of a tensor is."""


class _Place(NamedTuple):
    """A part, how many blocks it touches in each dimension, and its share in the slots of each kind of block.

    The first kind are those of the scales; the second is the whole tensor, where its amax is needed.
    """

    part: PartStretches
    shape: tuple[int, ...]
    shares: tuple[Share, ...]


class AmaxPiece(NamedTuple):
    """A box of a rank's part, which can be quantised alone where the amaxes of its blocks are known.

    `there` is where it is in the tensor, `here` in what the rank holds of it, packed; `blocks` where its blocks are
    among those that the rank touches, and `targets` where its data and scales are in those of the rank.
    """

    there: Box
    here: Box
    blocks: Box
    targets: tuple[Box, ...]


@public_in("formats")
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
        packed = self._read(rank, x)
        known = self.find_known(rank)
        if known is not None:
            return known
        out = np.zeros(self._find_place(rank).shape, np.float32)
        for piece in self.list_pieces(rank):
            values = packed[piece.here]
            found = self.format.amax(values, piece.there, self.layout.shape)
            # Two pieces may have parts of one block.
            out[piece.blocks] = np.maximum(out[piece.blocks], found)
        return out

    def find_known(self, rank: int) -> Floats | None:
        """The amax of each block that the rank touches, where the format says it; None where it is to be measured."""
        shape = self._find_place(rank).shape
        if isinstance(self.format, FP8) and self.format.tensor_amax is not None:
            return np.full(shape, self.format.tensor_amax, np.float32)
        return None

    def list_pieces(self, rank: int) -> Iterator[AmaxPiece]:
        """The boxes of which the rank's part is made, for those who measure and cast by other means than these."""
        part = self._find_place(rank).part
        shape = self.layout.shape
        scales = self.format.blocks
        kinds = [scales, *(one.blocks for one in self.format.parts)]
        grids = [touch(part, blocks, shape) for blocks in kinds]
        sizes = scales.per_dimension(len(shape))
        for there, here in part.boxes(sizes):
            found = []
            for blocks, grid in zip(kinds, grids, strict=True):
                window = make_window(blocks, there, shape)
                own = grid.locate(window.cover)
                found.append(own)
            first, *others = found
            yield AmaxPiece(there, here, first, tuple(others))

    def send(self, rank: int, own: Floats) -> dict[str, Floats]:
        """What the rank sends of what it has measured, by local name. Raises PlanError."""
        place = self._find_place(rank)
        _check_like(own, place.shape, f"rank {rank}: what it has measured")
        told = []
        for share, amaxes in _pair(place, own):
            slots = amaxes.reshape(-1)[share.sources]
            told.append(slots)
        sent = {}
        for key in self.list_local("source", rank):
            sent[key] = np.concatenate(told)
        return sent

    def settle(
        self, rank: int, own: Floats, arrived: Mapping[str, Floats]
    ) -> tuple[Format, Floats]:
        """The format to go on with, which knows the tensor's amax if it needs it, and the amax of each touched block.

        `own` is what the rank has measured, `arrived` what it has received, by local name. Raises PlanError.
        """
        place = self._find_place(rank)
        _check_like(own, place.shape, f"rank {rank}: what it has measured")
        row = self._find_arrived(rank, arrived)
        settled = []
        at = 0
        for share, amaxes in _pair(place, own):
            behind = at + len(share.received)
            slots = row[at:behind]
            largest = _take_largest(amaxes, share, slots)
            settled.append(largest)
            at = behind
        amax, *of_all = settled or [own]
        return _tell(self.format, of_all), amax

    def cast(self, rank: int, x: Floats, format: Format, amax: Floats) -> tuple[Array, ...]:
        """Data and scales of all blocks that the rank touches, as `layouts` have them, of what `settle` gives.

        They are what the rank would have of the whole tensor's. Raises PlanError.
        """
        place = self._find_place(rank)
        packed = self._read(rank, x)
        _check_like(amax, place.shape, f"rank {rank}: amaxes")
        shape = self.layout.shape
        made = tuple(_make_empty(layout, rank) for layout in self.layouts)
        for piece in self.list_pieces(rank):
            values = packed[piece.here]
            own = amax[piece.blocks]
            parts = format.quantise(values, amax=own, where=piece.there, shape=shape)
            for out, target, part in zip(made, piece.targets, parts, strict=True):
                # Two pieces have the same scale for a block that is in both.
                out[target] = part
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

    def count_blocks(self, rank: int) -> tuple[int, ...]:
        """How many blocks the rank touches in each dimension: the shape of what it measures."""
        return self._find_place(rank).shape

    def count_slots(self, end: str, rank: int) -> int:
        """How many slots the rank holds at an end."""
        shares = self._find_place(rank).shares
        if end == "source":
            return sum(len(share.sent) for share in shares)
        return sum(len(share.received) for share in shares)

    def _find_arrived(self, rank: int, arrived: Mapping[str, Floats]) -> Floats:
        row = np.zeros(0, np.float32)
        for key in self.list_local("destination", rank):
            if key not in arrived:
                what = f"{label(self.name)}rank {rank}: slots {key!r} are missing"
                raise PlanError(f"{what}; give what has arrived, by local name")
            row = arrived[key]
        count = self.count_slots("destination", rank)
        _check_like(row, (count,), f"{label(self.name)}rank {rank}: what has arrived")
        return row

    def _find_place(self, rank: int) -> _Place:
        found = self._places.get(rank)
        if found is None:
            what = f"{label(self.name)}rank {rank} holds nothing under {self.layout}"
            raise PlanError(f"{what}; its ranks are {sorted(self._places)}")
        return found

    def _read(self, rank: int, x: Floats) -> Floats:
        """What the rank holds, without holes."""
        self._find_place(rank)
        expected = self.layout.local_shape(rank)
        what = f"{label(self.name)}rank {rank}: the local array"
        _check_like(x, expected, what)
        return pack(self.layout, rank, x)


def _check_like(array: object, shape: tuple[int, ...], what: str) -> None:
    """Raise PlanError for what is no float32 array of that shape."""
    if not isinstance(array, np.ndarray):
        raise PlanError(f"{what} is {type(array).__name__}; pass an array of float32")
    if array.dtype != np.float32:
        raise PlanError(f"{what} {describe_type(array, '; pass an array of float32')}")
    if array.shape != shape:
        raise PlanError(f"{what} has shape {array.shape}; pass one of {shape}")


def _pair(place: _Place, own: Floats) -> Iterator[tuple[Share, Floats]]:
    """The shares of a part, and the amaxes of its blocks of that kind."""
    of_all = np.max(own, initial=0, keepdims=True)
    return zip(place.shares, (own, of_all), strict=False)


def _take_largest(amaxes: Floats, share: Share, slots: Floats) -> Floats:
    """The amaxes of blocks, of which those that the part cuts have these slots."""
    largest = amaxes.copy()
    row = largest.reshape(-1)
    np.maximum.at(row, share.targets, slots)
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


def _make_empty(layout: Layout, rank: int) -> Array:
    """Memory for what the rank has of data, or of scales."""
    shape = layout.local_shape(rank)
    return np.zeros(shape, numpy_type(layout.dtype))


def plan_amaxes(format: Format, layout: Layout, name: str = "") -> Amaxes:
    """How the ranks of a layout, which may cut blocks, quantise their parts of the tensor `name`.

    Raises FormatError as `format.layouts` does, for a Partial layout and a byte of two numbers that is cut; PlanError
    for a tensor without dimensions, and where nobody holds some of a block.
    """
    name = text(name, "the name of a tensor", PlanError)
    _check_given(format, layout, name)
    layouts = format.layouts(layout, name, duplicated=True)
    kinds = _list_kinds(format)
    for blocks in kinds:
        _check_held(layout, blocks, name)
    places, size = _place_ranks(format, layout, kinds)
    sent = {}
    received = {}
    for rank, place in places.items():
        own = [share.sent for share in place.shares]
        wanted = [share.received for share in place.shares]
        sent[rank] = _join(own)
        received[rank] = _join(wanted)
    src = lay_slots(name, size, sent)
    dst = lay_slots(name, size, received)
    return Amaxes(format, layout, name, src, dst, layouts, places)


def _check_given(format: object, layout: object, name: str) -> None:
    """Raise PlanError for what cannot be quantised."""
    if not isinstance(format, Format):
        what = f"{shown(format)} is no format"
        raise PlanError(f"{what}; give one such as formats.MXFP8()")
    fix = "give the layout of the tensor"
    one = instance(layout, Layout, fix, PlanError)
    if not one.ndim:
        what = f"{label(name)}{layout} has no dimension"
        raise PlanError(f"{what}; numbers alone are not quantised")


def _list_kinds(format: Format) -> tuple[Blocks, ...]:
    """The blocks whose amaxes have to be known of all their positions."""
    if isinstance(format, FP8) and format.tensor_amax is not None:
        # Everybody knows it.
        return ()
    if isinstance(format, NVFP4) and format.tensor_amax is None:
        return format.blocks, WHOLE
    return (format.blocks,)


def _check_held(layout: Layout, blocks: Blocks, name: str) -> None:
    """Raise PlanError for a block of which some is held, and some by nobody."""
    sizes = blocks.positions(layout.shape)
    for d, size in enumerate(sizes):
        lost = _find_lost(layout.dims[d], size)
        if lost is not None:
            what = f"{label(name)}nobody holds position {lost} of dimension {d} under {layout}"
            fix = "give a layout under which ranks together hold all of each block"
            raise PlanError(f"{what}, so the amax of its block of {blocks} is not known; {fix}")


def _find_lost(dim: Dimension, size: int) -> int | None:
    """A position that nobody holds, where somebody holds another of its block."""
    is_held = np.zeros(dim.size, np.bool_)
    for runs in partition(dim).parts:
        for start, stop in list_stretches(runs):
            is_held[start:stop] = True
    block_of = np.arange(dim.size) // size
    count = np.bincount(block_of)
    held = np.bincount(block_of, weights=is_held)
    # A block of which nobody has anything is nobody's business.
    is_torn = (held > 0) & (held < count)
    is_lost = is_torn[block_of] & ~is_held
    if not is_lost.any():
        return None
    return int(is_lost.argmax())


def _place_ranks(
    format: Format, layout: Layout, kinds: Sequence[Blocks]
) -> tuple[dict[int, _Place], int]:
    """Each rank's place, and how many slots there are."""
    shape = layout.shape
    parts = {}
    # In ascending order, so that slots are the same however the layout is spelled.
    for rank in sorted(layout.mesh.ranks):
        held = layout.runs(rank)
        parts[rank] = read_part(held)
    # Ranks that hold the same hold the same slots.
    distinct = list(dict.fromkeys(parts.values()))
    slots = [number_slots(distinct, blocks, shape) for blocks in kinds]
    places = {}
    for part, shares in zip(distinct, join_slots(slots, len(distinct)), strict=True):
        touched = touch(part, format.blocks, shape)
        places[part] = _Place(part, touched.shape, shares)
    by_rank = {rank: places[part] for rank, part in parts.items()}
    size = sum(one.size for one in slots)
    return by_rank, size


def _join(slots: Sequence[Ints]) -> Ints:
    """Slots of several kinds, one after the other."""
    nothing = np.zeros(0, np.int64)
    return np.concatenate([*slots, nothing])
