"""Boxes: the boxes of many parts at once, in arrays, as their sources and their destinations see them.

1. A box is one box of a unit, or whole rows of one box: what a part has of it. Parts begin and end at boxes, or at rows
   of a box, as `snap` gives them.
2. All tensors get as many dimensions as the largest has: dimensions of one position are put in front.
3. The overlays of all templates are laid end to end, so that one look into an array serves all parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import (
    Bools,
    Ints,
    Offsets,
    distinct,
    join,
    lengths,
    number_alike,
    ranges,
)
from shardmath.base.memo import memo
from shardmath.base.operations import OPERATIONS
from shardmath.layouts.algebra.box import Box
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.overlay import Overlay, Parts, overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.layouts.algebra.runs import identity
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.stretch_parts import Stretches, StretchParts
from shardmath.plans.template import Template
from shardmath.plans.units import check_count

__all__ = ["OPS", "PartBoxes", "list_boxes", "list_global_boxes"]

OPS = ("copy", *dict.fromkeys(operation.fold for operation in OPERATIONS.values()))
"""The operations that put a box into its receiver's tensor."""


class PartBoxes(NamedTuple):
    """By box, in the order of kinds: the number of its kind, the dimensions of its tensor, its addend, the place of its
    operation in OPS, and its bytes. And by dimension and box: its size, its first position in the tensor, in the
    sender's local tensor and in the receiver's, and the shapes of these two.

    Dimensions that a tensor lacks, which are in front, have size 1.
    """

    kind: Ints
    ndim: Ints
    addend: Ints
    op: Ints
    nbytes: Ints
    size: Ints
    tensor: Ints
    src: Ints
    src_shape: Ints
    dst: Ints
    dst_shape: Ints


def list_boxes(
    demands: Demands,
    batches: Sequence[Batch],
    given: Stretches,
    parts: StretchParts,
    relayed: Bools,
) -> tuple[PartBoxes, Ints]:
    """List the boxes of `parts`, which are parts of the byte ranges `given` in `demands`, for one of their tensors.
    Many parts of a model have equal boxes: return the boxes of each kind of part once, and an array with the kind of
    each part. Where `relayed` is true, a range is sent from the sender's destination tensors, where it arrived before.

    Raises MeshError if a rank is not in the mesh of its side.
    """
    numbers, which = distinct(demands.batch[parts.row])
    used = [batches[i] for i in numbers.tolist()]
    number_of: dict[Template, int] = {}
    template = [number_of.setdefault(batch.template, len(number_of)) for batch in used]
    sources = [batch.src for batch in used]
    targets = [batch.dst for batch in used]
    is_relayed = relayed[parts.stretch].astype(np.int64)
    # The sender of a relayed part is a rank of the destination, whose meshes follow the source's.
    sending = which + len(used) * is_relayed
    places = _Places(
        template=np.array(template, np.int64)[which],
        unit=demands.unit[parts.row],
        sender=_look_up([*sources, *targets], sending, given.sender[parts.stretch]),
        receiver=_look_up(targets, which, given.receiver[parts.stretch]),
        lo=parts.lo,
        hi=parts.hi,
        relayed=is_relayed,
    )
    first_of_kind, kind = number_alike(places)
    kinds = _Places(*(column[first_of_kind] for column in places))
    return _list_boxes(_lay_out(tuple(number_of)), kinds), kind


def list_global_boxes(
    t: Template, unit: Ints, sender: Ints, receiver: Ints, lo: Ints, hi: Ints
) -> list[tuple[int, Box]]:
    """List the boxes of the tensor of which elements `lo` to `hi` - 1 of units consist, each with its addend. The units
    go from the positions `sender` to the positions `receiver`."""
    zero = np.zeros_like(unit)
    boxes = _list_boxes(_lay_out((t,)), _Places(zero, unit, sender, receiver, lo, hi, zero))
    ends = np.stack((boxes.tensor, boxes.tensor + boxes.size), axis=-1)
    found = [tuple(map(tuple, box)) for box in ends.swapaxes(0, 1).tolist()]
    return list(zip(boxes.addend.tolist(), found, strict=True))


def _look_up(meshes: Sequence[Mesh], which: Ints, ranks: Ints) -> Ints:
    """The position of each rank in mesh number `which`."""
    # (mesh, rank) as one number, so that each pair is looked up once.
    radix = 1 + int(ranks.max(initial=0))
    pairs, pair = distinct(which * radix + ranks)
    numbers, members = np.divmod(pairs, radix)
    positions = []
    for number, rank in zip(numbers.tolist(), members.tolist(), strict=True):
        positions.append(meshes[number].position(rank))
    return np.array(positions, np.int64)[pair]


class _Places(NamedTuple):
    """By part: elements `lo` to `hi` - 1 of unit number `unit` of template number `template` go from position `sender`
    of a mesh to position `receiver` of another. `relayed` is 1 if the sender is at the destination, else 0."""

    template: Ints
    unit: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints
    relayed: Ints


def _list_boxes(laid: _Laid, places: _Places) -> PartBoxes:
    """The boxes of these parts."""
    # Many parts are of the same unit, whose boxes are listed once.
    radix = 1 + int(places.unit.max(initial=0))
    codes, unit_of_part = distinct(places.template * radix + places.unit)
    units = _list_units(laid, *np.divmod(codes, radix))
    lo = units.begin[unit_of_part] + places.lo
    hi = units.begin[unit_of_part] + places.hi
    first = np.searchsorted(units.end, lo, "right")
    last = np.searchsorted(units.end, hi, "left")
    box, part = ranges(first, last + 1)

    row = units.row[:, box]
    find = partial(_find_columns, laid, places.template, units.pair[:, unit_of_part])
    is_relayed = places.relayed > 0
    is_any = np.ones_like(is_relayed)
    src, src_shape = laid.src.look_up(row, find(places.sender, True, ~is_relayed)[:, part])
    dst, dst_shape = laid.dst.look_up(row, find(places.receiver, False, is_any)[:, part])
    some = np.flatnonzero(is_relayed[part])
    if len(some):
        columns = find(places.sender, False, is_relayed)[:, part[some]]
        src[:, some], src_shape[:, some] = laid.dst.look_up(row[:, some], columns)
    tensor = laid.start[row]
    size = laid.size[row]
    begin = units.end[box] - size.prod(axis=0)
    skipped = np.maximum(lo[part] - begin, 0)
    taken = np.minimum(hi[part], units.end[box]) - begin - skipped
    _cut_boxes(size, (src, dst, tensor), skipped, taken)

    # Hidden dimensions are addends, the first of them the folded ones, and not the tensor's.
    template = places.template[part]
    addend = tensor[laid.addends[template], np.arange(len(part))] * laid.folds[template]
    is_hidden = laid.is_hidden[:, template]
    for table, value in ((src, 0), (dst, 0), (tensor, 0), (src_shape, 1), (dst_shape, 1)):
        table[is_hidden] = value
    tables = size, tensor, src, src_shape, dst, dst_shape
    ndim = np.array([t.src.ndim for t in laid.templates], np.int64)
    itemsize = np.array([t.src.itemsize for t in laid.templates], np.int64)
    beyond = len(size) - int(ndim.max(initial=0))
    return PartBoxes(
        part,
        ndim[template],
        addend,
        _number_operations(laid.templates, template, addend) * (1 - places.relayed[part]),
        size.prod(axis=0) * itemsize[template],
        *(table[beyond:] for table in tables),
    )


def _number_operations(templates: Sequence[Template], template: Ints, addend: Ints) -> Ints:
    """The place of each box's operation in OPS."""
    # All addends but the first are put into the result alike.
    ops = [[OPS.index(t.reduction.op_of(i)) for t in templates] for i in (0, 1)]
    return np.array(ops, np.int64)[np.minimum(addend, 1), template]


class _OverlayEnd(NamedTuple):
    """One end of an overlay: the source with its keys, or the destination with its goals; fields as in an Overlay."""

    held: Partition
    sets: Parts
    set_of_pair: Ints
    start: Ints


def _end_of(over: Overlay, at_source: bool) -> _OverlayEnd:
    """The source of an overlay, or its destination."""
    if at_source:
        return _OverlayEnd(over.source, over.keys, over.pair_key, over.src)
    return _OverlayEnd(over.target, over.goals, over.pair_goal, over.dst)


class _LaidEnd(NamedTuple):
    """One end of overlays, end to end. By row of an overlay, and part of its key or goal: the row's first position in
    the part, and the part's length; row r has these from place `first[r]` on."""

    ends: list[_OverlayEnd]
    start: Ints
    length: Ints
    first: Ints

    def look_up(self, row: Ints, column: Ints) -> tuple[Ints, Ints]:
        """Return the first position of each row in the part at index `column` of its key or goal, and the part's
        length."""
        place = self.first[row] + column
        return self.start[place], self.length[place]


class _Laid(NamedTuple):
    """The overlays of templates, end to end, the arrays of each as in an Overlay.

    `number` is the number of the overlay, by dimension and template, and `pair` that of the overlay's first pair.
    `first` has an item more for each overlay than it has pairs. `is_hidden` says, by dimension and template, whether a
    dimension is one of addends, `addends` which one is the first, and `folds` whether they are folded.
    """

    templates: Sequence[Template]
    number: Ints
    pair: Ints
    first: Ints
    start: Ints
    size: Ints
    src: _LaidEnd
    dst: _LaidEnd
    is_hidden: Bools
    addends: Ints
    folds: Bools


@memo()
def _lay_out(templates: tuple[Template, ...]) -> _Laid:
    """The overlays of templates, end to end."""
    # One dimension at least, so that there always is a first one to look at.
    ndim = max([1, *(len(t.overlays) for t in templates)])
    number_of = {_trivial(): 0}
    number = np.zeros((ndim, len(templates)), np.int64)
    is_hidden = np.zeros((ndim, len(templates)), bool)
    for i, t in enumerate(templates):
        front = ndim - len(t.overlays)
        number[front:, i] = [number_of.setdefault(over, len(number_of)) for over in t.overlays]
        is_hidden[front : front + t.hidden, i] = True
    overlays = list(number_of)
    rows = Offsets.of_counts(lengths(over.start for over in overlays))
    pairs = Offsets.of_counts(lengths(over.first for over in overlays))
    first = np.concatenate([over.first for over in overlays])
    return _Laid(
        templates=templates,
        number=number,
        pair=pairs.first[number],
        first=first + pairs.spread(rows.first[:-1]),
        start=np.concatenate([over.start for over in overlays]),
        size=np.concatenate([over.size for over in overlays]),
        src=_lay_end(overlays, True),
        dst=_lay_end(overlays, False),
        is_hidden=is_hidden,
        addends=is_hidden.argmax(axis=0),
        folds=np.array([bool(t.reduction.folded) for t in templates], bool),
    )


@memo()
def _trivial() -> Overlay:
    """The overlay of a dimension of one position, which all ranks hold."""
    whole = Partition((), (identity(1),), np.zeros(1, np.int64))
    return overlay(whole, whole)


def _lay_end(overlays: Sequence[Overlay], at_source: bool) -> _LaidEnd:
    """One end of the overlays."""
    ends = [_end_of(over, at_source) for over in overlays]
    starts = [end.start for end in ends]
    width = np.array([table.shape[1] for table in starts], np.int64)
    width_of_row = width.repeat(lengths(starts))
    return _LaidEnd(
        ends=ends,
        start=np.concatenate([table.ravel() for table in starts]),
        length=np.concatenate([_measure_parts(over, at_source) for over in overlays]),
        first=np.cumsum(width_of_row) - width_of_row,
    )


@memo()
def _measure_parts(over: Overlay, at_source: bool) -> Ints:
    """By row of an overlay, the lengths of the parts of its key or goal, as many as the largest has, end to end."""
    end = _end_of(over, at_source)
    members = Offsets.of_counts(lengths(end.sets))
    owner = members.owners()
    table = np.zeros((len(end.sets), end.start.shape[1]), np.int64)
    index = np.arange(len(owner)) - members.first[owner]
    by_part = np.array([part.length for part in end.held.parts], np.int64)
    table[owner, index] = by_part[join(end.sets)]
    set_of_row = Offsets(over.first).spread(end.set_of_pair)
    return table[set_of_row].ravel()


class _Units(NamedTuple):
    """By dimension and unit: its pair, among those of all overlays. By unit: the elements of the units before it. By
    dimension and box, unit after unit: its row. By box: the elements before its end."""

    pair: Ints
    begin: Ints
    row: Ints
    end: Ints


def _list_units(laid: _Laid, template: Ints, unit: Ints) -> _Units:
    """The boxes of these units."""
    pair = laid.pair[:, template]
    for i, some in _group(template):
        own = laid.templates[i].unit_pairs[unit[some]].T
        pair[len(pair) - len(own) :, some] += own
    first = laid.first[pair]
    rows = laid.first[pair + 1] - first
    count = rows.prod(axis=0)
    for i in np.flatnonzero(count > 1).tolist():
        check_count(laid.templates[template[i]], int(count[i]))
    rest, unit_of_box = ranges(np.zeros_like(count), count)
    row = first[:, unit_of_box]
    # The number of a box in its unit has a digit for each dimension; the last one is fastest.
    for d in reversed(range(len(row))):
        rest, digit = np.divmod(rest, rows[d, unit_of_box])
        row[d] += digit
    end = np.cumsum(laid.size[row].prod(axis=0))
    begin = np.append(0, end)[np.cumsum(count) - count]
    return _Units(pair, begin, row, end)


def _group(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Each distinct number, and where it is."""
    order = np.argsort(numbers, kind="stable")
    groups = Offsets.of_sorted(numbers[order])
    for begin, end in itertools.pairwise(groups.first.tolist()):
        yield int(numbers[order[begin]]), order[begin:end]


def _find_columns(
    laid: _Laid, template: Ints, pair: Ints, position: Ints, source: bool, is_asked: Bools
) -> Ints:
    """By dimension and part, the index in the pair's key, or in its goal, of the part that a position holds; 0 for
    parts that are not asked for."""
    columns = np.zeros_like(pair)
    ends = (laid.src if source else laid.dst).ends
    # A key or a goal has one part unless shards overlap.
    is_wide = [end.start.shape[1] > 1 for end in ends]
    if not any(is_wide):
        return columns
    for i, some in _group(template):
        mesh = (laid.templates[i].src if source else laid.templates[i].dst).mesh
        some = some[is_asked[some]]
        for d, number in enumerate(laid.number[:, i].tolist()):
            if is_wide[number]:
                end = ends[number]
                own = end.set_of_pair[pair[d, some] - laid.pair[d, i]]
                part = end.held.by_rank(mesh)[position[some]]
                # The parts of a set ascend, so all sets end to end do.
                members = Offsets.of_counts(lengths(end.sets))
                most = len(end.held.parts)
                codes = members.owners() * most + join(end.sets)
                columns[d, some] = np.searchsorted(codes, own * most + part) - members.first[own]
    return columns


def _cut_boxes(size: Ints, starts: tuple[Ints, ...], skipped: Ints, taken: Ints) -> None:
    """Reduce each box to `taken` elements behind the first `skipped`, which are whole rows."""
    elements = size.prod(axis=0)
    some = np.flatnonzero(taken != elements)
    if not len(some):
        return
    # The rows of a box are its slices along the first dimension that is longer than 1.
    d = np.argmax(size[:, some] > 1, axis=0)
    row = elements[some] // size[d, some]
    for table in starts:
        table[d, some] += skipped[some] // row
    size[d, some] = taken[some] // row
