"""Families: one dimension of a layout at every length, and how many lengths decide about it.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> halves = read_family(Layout((8,), Mesh(tp=2), "(tp n)").dims[0])
>>> halves.growth, halves.at(5).size
(Growth(period=2, settled=2), 5)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.arrays import Ints
from shardmath.base.errors import LayoutError, PlacementError
from shardmath.base.text import plural
from shardmath.layouts.algebra.cuts import FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.dimension import Dimension, Field, cells
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.algebra.stages import Stage, is_counted
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Table
from shardmath.layouts.unparse import free_name
from shardmath.proofs.sizes.settling import Growth, grow
from shardmath.proofs.sizes.verdict import Decided

__all__ = [
    "MOST_PAIRS",
    "MOST_PARTS",
    "MOST_PIECES",
    "TESTED",
    "Family",
    "common_size",
    "count_lengths",
    "list_blocks",
    "pair_dimensions",
    "read_family",
]

MOST_PARTS = 1 << 16
"""The most parts that are computed one by one to decide about a dimension, over all lengths; seconds of computing."""

MOST_PIECES = 1 << 22
"""The most pieces that are computed as arrays."""

MOST_PAIRS = 1 << 26
"""The most pairs of pieces that are compared as arrays."""

TESTED = 256
"""The lengths of a dimension that are tested if no number of lengths is known to decide."""


class Family(NamedTuple):
    """A dimension at every length, or at its only one: `size`.

    `growth` is None if no number of lengths decides, for the reason `why`; with a growth, `why` is what it relies on.
    """

    dim: Dimension
    size: int | None
    growth: Growth | None
    why: str = ""

    def at(self, n: int) -> Dimension:
        """Return the dimension divided in the same way, with length `n`."""
        if self.size is not None:
            return self.dim
        return Dimension(n, (Field(n, self.stages),))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the dimension's only field."""
        return self.dim.fields[0].stages

    @property
    def coordinates(self) -> int:
        """The number of combinations of coordinates on the mesh axes that divide the dimension."""
        return math.prod(self.dim.axes.values())

    @property
    def pieces(self) -> int:
        """The number of pieces that all coordinates together have, if the cuts are counted."""
        return grow(self.stages).period

    @property
    def is_counted(self) -> bool:
        """Whether `divide_lengths` gives what ranks hold."""
        return self.size is None and all(map(is_counted, self.stages))

    @property
    def is_custom(self) -> bool:
        """Whether a custom placement divides the dimension, alone or with other cuts."""
        cuts = [digit.cut for stage in self.stages for digit in stage]
        return self.size is None and any(isinstance(cut, UserCut) for cut in cuts)


def read_family(dim: Dimension) -> Family:
    """Return `dim` as a Family: the dimension at every length, and what is known of how it grows."""
    if _has_one_size(dim):
        return Family(dim, dim.size, None)
    (only,) = dim.fields
    cuts = [digit.cut for stage in only.stages for digit in stage]
    rules = [cut for cut in cuts if isinstance(cut, UserCut)]
    if not rules:
        return Family(dim, None, _grow_with_blocks(only.stages))
    if len(cuts) == 1:
        return _read_rule(dim, rules[0])
    return Family(dim, None, None, f"{rules[0].by!r} is combined with other cuts")


def _has_one_size(dim: Dimension) -> bool:
    """Whether padding, listed sizes or a table fix the length of the dimension."""
    if dim.stored is not None or len(dim.fields) > 1:
        return True
    cuts = [digit.cut for stage in dim.fields[0].stages for digit in stage]
    return any(
        isinstance(cut, Sizes) or (isinstance(cut, UserCut) and isinstance(cut.by, Table))
        for cut in cuts
    )


def _grow_with_blocks(stages: tuple[Stage, ...]) -> Growth:
    """The growth of stages, some of which may end in blocks.

    Blocks of a shorter piece are those of a longer one, cut off. So a piece of twice the first block of a stage, which
    is the largest, shows all of them.
    """
    counted = []
    period = 1
    for stage in stages:
        blocks = [digit.cut.size for digit in stage if isinstance(digit.cut, FixedBlock)]
        counted.append(tuple(digit for digit in stage if not isinstance(digit.cut, FixedBlock)))
        period *= math.lcm(*blocks)
    growth = grow(counted)
    return Growth(growth.period * period, growth.settled)


SEEN = 5
"""The number of periods over which a declared period is compared with what a placement does."""


def _read_rule(dim: Dimension, cut: UserCut) -> Family:
    """A dimension that one custom placement divides. Its declared period counts if the placement keeps to it."""
    by = cut.by
    if getattr(by, "overlaps", False):
        return Family(dim, None, None, f"parts of {by!r} may overlap")
    period = _read_period(cut)
    if period is None:
        return Family(dim, None, None, f"{by!r} declares no period(parts)")
    if SEEN * period * cut.parts > MOST_PARTS:
        why = f"{by!r} has a period of {period}, too long to try {SEEN} periods"
        return Family(dim, None, None, why)
    # The first period may be different; the law is checked in all that are seen.
    growth = Growth(period, (SEEN - 2) * period)
    family = Family(dim, None, growth)
    for remainder in range(period):
        doubt = _doubt_period(family, cut, range(remainder + period, SEEN * period, period))
        if doubt:
            return Family(dim, None, None, doubt)
    seen = f"as they do from n = {period} to {SEEN * period - 1}"
    return family._replace(
        why=f"ranges of {by!r} move linearly with its period of {period}, {seen}"
    )


def _read_period(cut: UserCut) -> int | None:
    """The period that a custom placement declares; None if it declares none."""
    declare = getattr(cut.by, "period", None)
    if not callable(declare):
        return None
    call = f"period({cut.parts}) of {cut.by!r}"
    try:
        declared = declare(cut.parts)
    except Exception as error:
        raise PlacementError(f"{call} raised {error!r}; return a number of positions") from error
    period = as_integer(declared, call, PlacementError)
    if period < 1:
        raise PlacementError(f"{call} is {period}; return a number of positions, 1 or more")
    return period


def _doubt_period(family: Family, cut: UserCut, lengths: range) -> str:
    """Why ranges of a custom placement do not move linearly at these lengths, one declared period apart; empty if they
    do, no range shrinks, and ranges keep their order."""
    try:
        held = [cells(family.at(n)) for n in lengths]
    except PlacementError:
        return ""  # the law is checked at the same lengths, and does not hold here
    for n, parts in zip(lengths, held, strict=True):
        for number, (first, other) in enumerate(zip(held[0], parts, strict=True)):
            if len(first.segments) != len(other.segments):
                what = f"part {number} of {cut.by!r} has {plural(first.segments, 'range')}"
                seen = f"at n = {lengths[0]}, and {len(other.segments)} at n = {n}"
                return f"{what} {seen}, although it declares a period of {lengths.step}"
    rows = list(map(_list_segments, held))
    steps = np.diff(np.stack(rows), axis=0)
    orders = {tuple(np.argsort(row[:, 1], kind="stable")) for row in rows}
    shrinks = (steps[..., 2] < 0).any()
    if len(orders) == 1 and not shrinks and (steps == steps[0]).all():
        return ""
    return f"ranges of {cut.by!r} do not move linearly with its period of {lengths.step}"


def _list_segments(parts: tuple[Runs, ...]) -> Ints:
    """(local start, global start, length, length of the part) of all segments of all parts, and of an empty one at the
    end of each part."""
    rows = []
    for runs in parts:
        for local, start, n in (*runs.segments, (len(runs), 0, 0)):
            rows.append((local, start, n, len(runs)))
    return np.array(rows, np.int64)


def pair_dimensions(layouts: Sequence[Layout]) -> Iterator[tuple[str, list[Family]]]:
    """Yield the name of each dimension, and its families in all `layouts`. Raises LayoutError if they have different
    numbers of dimensions."""
    counts = {layout.ndim for layout in layouts}
    if len(counts) > 1:
        what = " and ".join(plural(layout.shape, "dimension") for layout in layouts)
        raise LayoutError(f"the layouts are of {what}; give layouts of one tensor")
    axes = {name for layout in layouts for name in layout.mesh.shape}
    for d in range(layouts[0].ndim):
        name = free_name(d)
        while name in axes:
            name += "_"
        yield name, [read_family(layout.dims[d]) for layout in layouts]


def common_size(name: str, families: list[Family]) -> int | None:
    """Return the only length that the `families` of the dimension `name` have in common, None if they have all. Raises
    LayoutError if they have none."""
    sizes = {family.size for family in families if family.size is not None}
    if len(sizes) > 1:
        one, other = sorted(sizes)
        what = f"dimension {name} can only be {one} in one layout and {other} in the other"
        raise LayoutError(f"{what}; give layouts of one tensor")
    return next(iter(sizes), None)


def count_lengths(name: str, growth: Growth | None, cost: int, most: int, why: str) -> Decided:
    """Return how many lengths of the dimension `name` to check: as many as decide by `growth`, unless these are more
    than `most` divided by `cost`, the cost of one length. `why` is the reason if `growth` is None, or what it relies
    on."""
    affordable = max(1, most // cost)
    if growth is None:
        return Decided(name, "tested", min(TESTED, affordable), why)
    if growth.deciding > affordable:
        why = f"{growth.deciding} lengths of {name} would decide, more than can be tried"
        return Decided(name, "tested", affordable, why)
    return Decided(name, "every", growth.deciding, why)


AT_ONCE = 1 << 20
"""The pieces that are held in memory at once."""


def list_blocks(lengths: int, cost: int) -> Iterator[Ints]:
    """Yield all lengths below `lengths`, in arrays that are not too long if each length has `cost` pieces."""
    step = max(1, AT_ONCE // cost)
    for first in range(0, lengths, step):
        yield np.arange(first, min(lengths, first + step))
