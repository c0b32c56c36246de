"""Equal: whether two layouts give each rank the same elements of a dimension, at every length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlacementError
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, FixedBlock
from shardmath.layouts.algebra.dimension import cells, divide_lengths
from shardmath.layouts.algebra.stages import Digit
from shardmath.layouts.layout import Layout
from shardmath.proofs.sizes.family import (
    MOST_PAIRS,
    MOST_PARTS,
    Family,
    common_size,
    count_lengths,
    list_blocks,
)
from shardmath.proofs.sizes.settling import Growth
from shardmath.proofs.sizes.verdict import Counterexample, Decided
from shardmath.proofs.sizes.whole import doubt_losses

__all__ = ["decide_equal", "find_other_ranks", "pair_cells"]


class Compared(NamedTuple):
    """The parts that are compared: the distinct pairs of a part of each family, by number, that one rank holds, and the
    first such rank."""

    ranks: Ints
    first: Ints
    second: Ints


def pair_cells(a: Layout, b: Layout, families: list[Family]) -> Compared:
    """Return the pairs of parts, one of each of the `families`, that a rank of both `a` and `b` holds."""
    ranks = np.sort(a.mesh.ranks)
    numbers = []
    for layout, family in zip((a, b), families, strict=True):
        position = np.argsort(layout.mesh.ranks)
        numbers.append(layout.mesh.coordinate(family.dim.axes)[position])
    _, chosen = np.unique(np.stack(numbers), axis=1, return_index=True)
    chosen.sort()
    first, second = (number[chosen] for number in numbers)
    return Compared(ranks[chosen], first, second)


def find_other_ranks(a: Layout, b: Layout) -> Counterexample | None:
    """Return a difference between `a` and `b` that no size changes, such as another dtype, other ranks or addends; None
    if there is none."""
    if a.dtype != b.dtype:
        return Counterexample("", None, f"the layouts are of {a.dtype} and of {b.dtype}")
    only = sorted(set(a.mesh.ranks) ^ set(b.mesh.ranks))
    if only:
        return Counterexample("", None, f"rank {only[0]} is in only one of the meshes", only[0])
    for rank in sorted(a.mesh.ranks):
        one, other = (_describe_addend(layout, rank) for layout in (a, b))
        if one != other:
            text = f"rank {rank} holds {one} under the first layout, and {other} under the second"
            return Counterexample("", None, text, rank)
    return None


def _describe_addend(layout: Layout, rank: int) -> str:
    """Which addend the rank holds, in words."""
    coords = layout.mesh.coords(rank)
    axes = layout.addend_axes
    if not axes:
        return "whole values"
    number = 0
    for axis in axes:
        number = number * layout.mesh.axis_size(axis) + coords[axis]
    return f"addend {number} of a {layout.op}"


def decide_equal(
    name: str, families: list[Family], pairs: Compared
) -> tuple[Decided, Counterexample | None]:
    """Decide whether at every length both `families` of the dimension `name` give each rank the same part; `pairs` are
    the parts to compare. Return how it was decided, and the smallest counterexample or None."""
    size = common_size(name, families)
    if size is not None:
        return Decided(name, "one", size), _find_other(name, size, families, pairs)
    one, other = families
    # Built-in cuts divide every length; of custom placements, whether they do is checked below.
    if one.stages == other.stages and not one.is_custom and (pairs.first == pairs.second).all():
        return Decided(name, "every", 0), None
    growth, why = _join_growth(one, other)
    if one.is_counted and other.is_counted:
        cost = _count_pairs(families, pairs)
        decided = count_lengths(name, growth, cost, MOST_PAIRS, why)
        sizes: Iterable[int] = _list_unequal(families, pairs, decided.lengths)
    else:
        cost = one.coordinates + other.coordinates
        decided = count_lengths(name, growth, cost, MOST_PARTS, why)
        sizes = range(decided.lengths)
    for n in sizes:
        found = _find_other(name, n, families, pairs)
        if found is not None:
            return decided, found
    return doubt_losses(decided, {"the first layout": one, "the second layout": other}), None


def _count_pairs(families: list[Family], pairs: Compared) -> int:
    """The pieces of both families, and the pairs of pieces of one rank that are compared, at one length."""
    compared = len(pairs.ranks)
    for family in families:
        compared *= family.pieces // family.coordinates
    return compared + sum(family.pieces for family in families)


def _join_growth(one: Family, other: Family) -> tuple[Growth | None, str]:
    """The growth of both families, and on what it relies; or None, and the reasons for which there is none."""
    if one.growth is None or other.growth is None:
        reasons = [family.why for family in (one, other) if family.growth is None]
        return None, "; ".join(dict.fromkeys(reasons))
    growth = one.growth.join(other.growth)
    if _has_blocks(one) or _has_blocks(other):
        return _join_blocks(one, other, growth)
    relied = dict.fromkeys(family.why for family in (one, other) if family.why)
    return growth, " and ".join(relied)


def _has_blocks(family: Family) -> bool:
    return any(isinstance(digit.cut, FixedBlock) for stage in family.stages for digit in stage)


def _join_blocks(one: Family, other: Family, growth: Growth) -> tuple[Growth | None, str]:
    """The growth of two families with blocks, if they divide pieces that are the same at every length."""
    heads = []
    for family in (one, other):
        if len(family.stages) > 1 or family.why:
            return None, "blocks are combined with other cuts"
        digits = [digit for stage in family.stages for digit in stage if not _keeps_whole(digit)]
        head = list(
            itertools.takewhile(lambda digit: not isinstance(digit.cut, FixedBlock), digits)
        )
        if not all(isinstance(digit.cut, FixedBlock) for digit in digits[len(head) :]):
            return None, "blocks are divided further by cuts into parts"
        heads.append(head)
    if heads[0] != heads[1]:
        return None, "blocks divide pieces of which nobody knows that they are the same"
    return growth, ""


def _keeps_whole(digit: Digit) -> bool:
    """Whether the digit cuts pieces into one part, as an axis of one rank does."""
    return isinstance(digit.cut, Chunks | BalancedChunks) and digit.cut.parts == 1


def _list_unequal(families: list[Family], pairs: Compared, lengths: int) -> Iterator[int]:
    """The lengths at which some rank holds other elements, or the same in another order."""
    for tried in list_blocks(lengths, _count_pairs(families, pairs)):
        held = []
        for family, number in zip(families, (pairs.first, pairs.second), strict=True):
            starts, sizes = divide_lengths(family.stages, tried)
            starts, sizes = starts[:, number], sizes[:, number]
            stops = sizes.cumsum(2)
            held.append((starts, stops - sizes, stops))
        (start, low, high), (begin, bottom, top) = held
        same = high[..., -1] == top[..., -1]
        # Where a piece of one side and a piece of the other have a position in common, they agree about its element.
        begin, bottom, top = begin[..., None, :], bottom[..., None, :], top[..., None, :]
        start, low, high = start[..., None], low[..., None], high[..., None]
        meet = np.maximum(low, bottom) < np.minimum(high, top)
        agree = start - low == begin - bottom
        same &= (agree | ~meet).all((2, 3))
        yield from tried[~same.all(1)].tolist()


def _find_other(
    name: str, n: int, families: list[Family], pairs: Compared
) -> Counterexample | None:
    """The first rank that holds something else under the other family at length `n`."""
    try:
        one, other = (cells(family.at(n)) for family in families)
    except PlacementError as error:
        return Counterexample(name, n, str(error))
    for rank, i, j in zip(*(numbers.tolist() for numbers in pairs), strict=True):
        if one[i] != other[j]:
            first, second = (str(runs) if runs.size else "nothing" for runs in (one[i], other[j]))
            text = (
                f"rank {rank} holds {first} under the first layout, and {second} under the second"
            )
            return Counterexample(name, n, text, rank)
    return None
