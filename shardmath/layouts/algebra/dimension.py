"""Digits: every way of dividing one dimension is a sequence of cuts and keepers.

1. A **digit** is a cut and its keeper, and a **stage** a sequence of digits (see `stages`).
2. A **field** is a number of stored positions with its stages; a **dimension** is its fields one
   after the other, seen through `stored`, the Runs from stored to logical positions.

Placements, text, DTensor's shard order and the grammar are all made of these.

>>> from shardmath.layouts.algebra.cuts import Chunks
>>> from shardmath.layouts.algebra.stages import Digit
>>> strided = (Digit(Chunks(2)), Digit(Chunks(2), ("tp",), (2,)))
>>> print(Dimension(8, (Field(8, (strided,)),)).runs({"tp": 1}))
[2:4 6:8]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlacementError
from shardmath.base.memo import memo
from shardmath.layouts.algebra.cuts import Sizes, UserCut
from shardmath.layouts.algebra.runs import Runs, compose, concat, identity
from shardmath.layouts.algebra.stages import (
    Coords,
    Stage,
    canonical_stages,
    check_stage,
    cut_lengths,
    list_coordinates,
    stage_axes,
    stage_cells,
    stage_runs,
)

__all__ = ["Dimension", "Field", "cells", "divide_lengths", "divided", "lengths_at"]


@dataclass(frozen=True, slots=True)
class Field:
    """All positions of one dimension, or a range of them, and the cuts (`stages`, one after another) that divide these
    positions among ranks. `size` is the number of positions, including padding.

    Positions are in the order in which the dimension is stored.

    Raises PlacementError if a cut of given sizes, or a user's rule, meets a piece that it does
    not fit.
    """

    size: int
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        for s, stage in enumerate(self.stages):
            if any(isinstance(digit.cut, Sizes | UserCut) for digit in stage):
                for length in lengths_at(self, s):
                    check_stage(stage, length)

    def runs(self, coords: Coords) -> Runs:
        """Return the positions, out of 0..size-1, that the rank at mesh coordinates `coords` keeps, as Runs."""
        if not self.stages:
            return identity(self.size)
        first, *rest = self.stages
        kept = stage_runs(first, self.size, coords)
        for stage in rest:
            part = stage_runs(stage, len(kept), coords)
            kept = compose(part, kept)
        return kept


def divided(size: int, stages: Iterable[Stage]) -> Field:
    """Return the Field that divides `size` positions by `stages` (cuts, one after another). The stages are simplified:
    cuts without effect are left out, and stages are merged where possible.

    Raises PlacementError if a cut of given sizes, or a user's rule, meets a piece that it does
    not fit.
    """
    given = Field(size, tuple(stages))  # checks what canonical stages may leave out
    return Field(size, canonical_stages(given.stages))


def lengths_at(f: Field, stage: int) -> set[int]:
    """Return the set of lengths of the parts that the Field `f` has after some of its stages (cuts, one after another).
    `stage` is the number of stages applied."""
    return {len(runs) for runs in _field_cells(f.size, f.stages[:stage])}


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a layout: its `size` in the tensor, and how positions are divided among ranks. If the dimension
    is stored with padding or in another order, `stored` maps positions in storage to positions in the tensor.

    `stored` is the Runs from stored to logical positions, None for the identity; `fields` cover the
    stored positions one after the other. Raises PlacementError if sizes do not fit.
    """

    size: int
    fields: tuple[Field, ...]
    stored: Runs | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        if self.stored == identity(self.size):
            object.__setattr__(self, "stored", None)
        object.__setattr__(self, "_hash", hash((self.size, self.fields, self.stored)))

    def _check(self) -> None:
        """Raise PlacementError if the sizes of fields and stored positions do not fit."""
        sizes = [f.size for f in self.fields]
        if sum(sizes) != self.stored_size:
            what = f"fields of sizes {sizes} add up to {sum(sizes)}"
            fix = f"make them add up to {self.stored_size}"
            raise PlacementError(f"{what}, but {self.stored_size} positions are stored; {fix}")
        if self.stored is not None and self.stored.extent > self.size:
            what = f"stored positions {self.stored} reach {self.stored.extent - 1}"
            fix = f"store only positions below {self.size}"
            raise PlacementError(f"{what} of a dimension of {self.size}; {fix}")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Dimension, (self.size, self.fields, self.stored)

    @property
    def stored_size(self) -> int:
        """The number of positions that are stored, including padding (holes), which holds no element of the tensor."""
        return self.size if self.stored is None else len(self.stored)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes that divide this dimension, as a dict from name to size, in the order in which the dimension is
        cut along them."""
        out: dict[str, int] = {}
        for f in self.fields:
            for stage in f.stages:
                out.update(stage_axes(stage))
        return out

    def runs(self, coords: Coords) -> Runs:
        """Return, for the rank at `coords`, the position in the tensor of each of its local positions, as Runs."""
        kept = self._stored_runs(coords)
        if self.stored is None:
            return kept
        return compose(kept, self.stored)

    def _stored_runs(self, coords: Coords) -> Runs:
        """Local to stored positions: what the rank keeps of each field, after the fields before it."""
        if len(self.fields) == 1:
            return self.fields[0].runs(coords)
        parts = []
        field_start = 0
        for f in self.fields:
            kept = f.runs(coords)
            moved = [(lo, g + field_start, n) for lo, g, n in kept.segments]
            parts.append(Runs.canonical(tuple(moved), len(kept)))
            field_start += f.size
        return concat(parts)


@memo()
def cells(dimension: Dimension) -> tuple[Runs, ...]:
    """Return the tensor positions that ranks hold in this dimension: one Runs (ranges of positions) for each
    combination of coordinates on the mesh axes that divide `dimension`. Combinations are in row-major order."""
    if len(dimension.fields) != 1:
        return tuple(map(dimension.runs, list_coordinates(dimension.axes)))
    (only,) = dimension.fields
    held = _field_cells(only.size, only.stages)
    stored = dimension.stored
    if stored is None:
        return tuple(held)
    return tuple(compose(runs, stored) for runs in held)


def _field_cells(size: int, stages: tuple[Stage, ...]) -> list[Runs]:
    """The Runs at every coordinate of the stages' axes, row-major.

    A stage is divided once for each length that reaches it, not once for each coordinate.
    """
    if not stages:
        return stage_cells((), size)
    first, *rest = stages
    held = stage_cells(first, size)
    for stage in rest:
        lengths = {len(runs) for runs in held}
        parts = {n: stage_cells(stage, n) for n in lengths}
        held = [compose(part, runs) for runs in held for part in parts[len(runs)]]
    return held


def divide_lengths(stages: Iterable[Stage], lengths: Ints) -> tuple[Ints, Ints]:
    """Return the starts and the sizes of the pieces that ranks hold of each of `lengths` after `stages`, as two arrays
    of shape (lengths, coordinates, pieces). Coordinates on the mesh axes of the stages are in row-major order; pieces
    are in the order in which a rank holds them, and may be empty.

    `Field.runs` returns the same for one rank and one length. The stages must be counted (`is_counted`).
    """
    sizes = lengths[:, None, None]
    starts = np.zeros_like(sizes)
    for stage in stages:
        n, coordinates, pieces = sizes.shape
        stops = sizes.cumsum(2)
        # Each part of what a rank holds, against each piece that the rank has of the whole.
        begin, size = cut_lengths(stage, stops[:, :, -1].ravel())
        parts, ranges = size.shape[1:]
        begin, size = (held.reshape(n, coordinates, parts, ranges, 1) for held in (begin, size))
        piece = (slice(None), slice(None), None, None)
        local = (stops - sizes)[piece]
        low = np.maximum(begin, local)
        high = np.minimum(begin + size, stops[piece])
        shape = n, coordinates * parts, ranges * pieces
        starts = (starts[piece] + low - local).reshape(shape)
        sizes = np.maximum(high - low, 0).reshape(shape)
    return starts, sizes
