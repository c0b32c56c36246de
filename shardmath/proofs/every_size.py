"""Every size: laws of layouts, decided for all sizes of their dimensions by finitely many.

A layout is an example: each of its dimensions may have any length n. What ranks hold is a product over dimensions, so
each dimension is decided alone, by the code that plans and moves use (`cells`, `cut_lengths`), at lengths 0, 1, 2, ...
How many of them decide for all is computed from the cuts (`settling`); the first that breaks the law is the smallest
counterexample. A dimension whose text or table gives sizes has one length, and is decided there.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(dp=4, tp=2)
>>> fsdp = Layout((8, 4), mesh, "(tp dp n) h")
>>> print(prove(fsdp))
proved for every n and h: ranks hold each element once, up to copies; 42 lengths of n decide
>>> print(prove_equivalent(fsdp, Layout((8, 4), mesh, "(2 dp n | tp n) h")))
false at n = 9: rank 6 holds nothing under the first layout, and [8:9] under the second
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmath.base.arguments import as_integer, instance
from shardmath.base.arrays import Ints
from shardmath.base.errors import LayoutError, PlacementError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.algebra.cuts import FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, divide_lengths
from shardmath.layouts.algebra.partition import list_spans
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.algebra.stages import Stage, is_counted
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Table
from shardmath.layouts.unparse import free_name
from shardmath.proofs.settling import Growth, grow

__all__ = [
    "MOST_CELLS",
    "Counterexample",
    "Decided",
    "Family",
    "Verdict",
    "prove",
    "prove_equivalent",
    "read_family",
]

MOST_CELLS = 1 << 21
"""The most parts of ranks, over all lengths, that one dimension is decided by; seconds of computing."""

TESTED = 256
"""The lengths of a dimension that are tested if no number of lengths is known to decide."""


class Decided(NamedTuple):
    """How one dimension was decided: `lengths` is the number of lengths 0, 1, 2, ... at which the law was checked.

    `how` is "every" if these decide for all lengths, "tested" if they do not, for the reason `why`, and "one" if the
    dimension can only have the length `lengths`. If `why` is not empty and `how` is "every", the proof relies on it.
    """

    name: str
    how: str
    lengths: int
    why: str = ""


class Counterexample(NamedTuple):
    """The smallest length `size` of the dimension `name` at which a law does not hold, and what happens there.

    `rank` is the rank that `text` is about, None if it is about all.
    """

    name: str
    size: int
    text: str
    rank: int | None = None


@public
@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of `prove` or `prove_equivalent`; it is true in an `if` only if the law is proved.

    `law` is the law in words, `dims` says by dimension how it was decided, and `counterexample` is None if no length
    was found at which the law does not hold.
    """

    law: str
    dims: tuple[Decided, ...]
    counterexample: Counterexample | None = None

    @property
    def proved(self) -> bool:
        """Whether the law holds for all sizes. If it is neither proved nor false, it was only tested."""
        return self.counterexample is None and all(dim.how != "tested" for dim in self.dims)

    def __bool__(self) -> bool:
        return self.proved

    def __str__(self) -> str:
        found = self.counterexample
        if found is not None:
            at = f"false at {found.name} = {found.size}" if found.name else "false at every size"
            return f"{at}: {found.text}"
        every = [dim.name for dim in self.dims if dim.how != "one"]
        fixed = [f"{dim.name} = {dim.lengths}" for dim in self.dims if dim.how == "one"]
        sizes = f"every {_list_words(every)}" if every else ""
        scope = " and ".join(filter(None, (sizes, _list_words(fixed))))
        divided = [
            dim for dim in self.dims if dim.how == "every" and dim.lengths > _UNDIVIDED.deciding
        ]
        counts = [f"{dim.lengths} lengths of {dim.name}" for dim in divided]
        tested = [f"{dim.name} < {dim.lengths}" for dim in self.dims if dim.how == "tested"]
        reasons = [dim.why for dim in self.dims if dim.why]
        if tested:
            return f"not proved, but tested for {_list_words(tested)}: {self.law}; {'; '.join(reasons)}"
        notes = [f"{_list_words(counts)} decide"] if counts else []
        notes += [f"if {reason}" for reason in reasons]
        return "; ".join([f"proved for {scope or 'a scalar'}: {self.law}", *notes])


def _list_words(words: list[str]) -> str:
    """The words as a list in a sentence: a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def prove(layout: Layout, dst: Layout | None = None) -> Verdict:
    """Decide for all sizes whether ranks hold each element of a tensor once under `layout`, up to copies along mesh
    axes that do not divide it. With `dst`, decide whether a move from `layout` to `dst` brings each element that the
    destination holds to it exactly once. If both hold all elements, a move back restores the source.

    The sizes of the layouts are examples; dimensions with padding, listed sizes or a table keep theirs. A custom
    placement is proved if it declares `period(parts)`, and tested otherwise, as docs/every-size.md says. Raises
    LayoutError for other values, and if a dimension can have no size that both layouts allow.
    """
    instance(layout, Layout, "prove is about layouts", LayoutError)
    sides: tuple[Layout, ...] = (layout,)
    if dst is None:
        law = "ranks hold each element once, up to copies"
    else:
        instance(dst, Layout, "prove is about layouts", LayoutError)
        sides = (layout, dst)
        law = "each element that the destination holds arrives exactly once"
    dims = []
    for name, families in _pair_dimensions(sides):
        size = _common_size(name, families)
        if size is None:
            decided, found = _decide_whole(name, families)
        else:
            decided, found = Decided(name, "one", size), _find_missing(name, size, families)
        dims.append(decided)
        if found is not None:
            return Verdict(law, tuple(dims), found)
    return Verdict(law, tuple(dims))


def prove_equivalent(a: Layout, b: Layout) -> Verdict:
    """Decide whether `a` and `b` give every rank the same elements in the same order, for all sizes of the tensor;
    `sm.equivalent` decides it for the sizes of the layouts.

    Sizes are examples, as in `prove`. Raises LayoutError for other values, and if a dimension can have no size that
    both layouts allow.
    """
    for layout in (a, b):
        instance(layout, Layout, "prove_equivalent compares two layouts", LayoutError)
    law = "both layouts give every rank the same elements in the same order"
    dims = []
    found = _find_other_ranks(a, b)
    for name, families in _pair_dimensions((a, b)):
        if found is not None:
            break
        decided, found = _decide_equal(name, families, _pair_cells(a, b, families))
        dims.append(decided)
    return Verdict(law, tuple(dims), found)


# Families: a dimension at every length


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


_UNDIVIDED = grow(())


def read_family(dim: Dimension) -> Family:
    """Return `dim` as a Family: the dimension at every length, and what is known of how it grows."""
    digits = [digit for f in dim.fields for stage in f.stages for digit in stage]
    cuts = [digit.cut for digit in digits]
    tables = [cut for cut in cuts if isinstance(cut, UserCut) and isinstance(cut.by, Table)]
    has_sizes = tables or any(isinstance(cut, Sizes) for cut in cuts)
    if dim.stored is not None or len(dim.fields) > 1 or has_sizes:
        return Family(dim, dim.size, None)
    (only,) = dim.fields
    rules = [cut for cut in cuts if isinstance(cut, UserCut)]
    if len(digits) == 1 and rules:
        return _read_rule(dim, rules[0])
    if rules:
        why = f"{rules[0].by!r} is combined with other cuts"
        return Family(dim, None, None, why)
    return Family(dim, None, _grow_with_blocks(only.stages))


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
    declared = getattr(cut.by, "period", None)
    if not callable(declared):
        return Family(dim, None, None, f"{cut.by!r} declares no period(parts)")
    what = f"period({cut.parts}) of {cut.by!r}"
    period = as_integer(declared(cut.parts), what, PlacementError)
    if period < 1:
        raise PlacementError(f"{what} is {period}; return a number of positions, 1 or more")
    family = Family(dim, None, Growth(period, period), f"borders of {cut.by!r} move linearly")
    if SEEN * period * cut.parts > MOST_CELLS:
        return family._replace(growth=None, why=f"{what} is {period}, too many positions to try")
    for remainder in range(period):
        if not _is_linear(family, remainder):
            why = f"borders of {cut.by!r} do not move linearly by its period of {period}"
            return family._replace(growth=None, why=why)
    note = f"as they do for n < {SEEN * period}"
    return family._replace(why=f"{family.why} with its period of {period}, {note}")


def _is_linear(family: Family, remainder: int) -> bool:
    """Whether from the second period on all borders of parts, at lengths of this remainder, grow linearly, and none
    of the ranges shrinks."""
    assert family.growth is not None, "the declared period"
    rows = []
    for number in range(1, SEEN):
        try:
            held = cells(family.at(remainder + number * family.growth.period))
        except PlacementError:
            return True  # the law does not hold there, which is found before
        rows.append([np.array(runs.segments, np.int64).reshape(-1, 3) for runs in held])
    for segments in zip(*rows, strict=True):
        if len({len(part) for part in segments}) > 1:
            return False
        steps = np.diff(np.stack(segments), axis=0)
        if (steps != steps[0]).any() or (steps[..., 2] < 0).any():
            return False
    return True


def _pair_dimensions(layouts: tuple[Layout, ...]) -> Iterator[tuple[str, list[Family]]]:
    """Each dimension's name, and its families in all layouts."""
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


def _common_size(name: str, families: list[Family]) -> int | None:
    """The only length that the families have in common; None if they have all."""
    sizes = {family.size for family in families if family.size is not None}
    if len(sizes) > 1:
        one, other = sorted(sizes)
        what = f"dimension {name} can only be {one} in one layout and {other} in the other"
        raise LayoutError(f"{what}; give layouts of one tensor")
    return next(iter(sizes), None)


# Laws


def _decide_whole(name: str, families: list[Family]) -> tuple[Decided, Counterexample | None]:
    """Decide whether under each family, at every length, ranks hold each element once."""
    decided = [Decided(name, "every", _UNDIVIDED.deciding)]
    found = []
    for family in families:
        for layer in _split_layers(family):
            one, counterexample = _decide_layer(name, layer)
            decided.append(one)
            if counterexample is not None:
                found.append(counterexample)
    # The weakest answer, and of these the one with the most lengths.
    weakest = max(decided, key=lambda one: (one.how == "tested", bool(one.why), one.lengths))
    return weakest, min(found, key=lambda one: one.size, default=None)


def _split_layers(family: Family) -> Iterator[Family]:
    """The stages of a family, each as a family of its own, and blocks apart from the cuts before them.

    Every layer divides what the ones before it leave: if each divides all lengths without loss, so do all together.
    """
    if family.why:
        yield family
        return
    for stage in family.stages:
        for _, digits in itertools.groupby(stage, lambda digit: isinstance(digit.cut, FixedBlock)):
            yield read_family(Dimension(0, (Field(0, (tuple(digits),)),)))


def _decide_layer(name: str, family: Family) -> tuple[Decided, Counterexample | None]:
    """Decide whether at every length ranks hold each element once."""
    decided = _count_lengths(name, family.growth, family.coordinates, family.why)
    sizes: Iterable[int] = range(decided.lengths)
    if family.is_counted:
        sizes = _list_untiled(family, decided.lengths)
    for n in sizes:
        found = _find_missing(name, n, [family])
        if found is not None:
            return decided, found
    return decided, None


def _count_lengths(name: str, growth: Growth | None, cells: int, why: str) -> Decided:
    """How many lengths to check if each has this number of parts: as many as decide, or fewer for a reason."""
    most = max(1, MOST_CELLS // cells)
    if growth is None:
        return Decided(name, "tested", min(TESTED, most), why)
    if growth.deciding > most:
        why = f"{growth.deciding} lengths would decide, more than can be tried"
        return Decided(name, "tested", most, why)
    return Decided(name, "every", growth.deciding, why)


AT_ONCE = 1 << 20
"""The pieces of ranks that are held in memory at once."""


def _list_blocks(lengths: int, cells: int) -> Iterator[Ints]:
    """All lengths below `lengths`, in arrays that are not too long for lengths of so many pieces."""
    step = max(1, AT_ONCE // cells)
    for first in range(0, lengths, step):
        yield np.arange(first, min(lengths, first + step))


def _list_untiled(family: Family, lengths: int) -> Iterator[int]:
    """The lengths at which the pieces of all ranks do not lie end to end."""
    for tried in _list_blocks(lengths, family.pieces):
        starts, sizes = (
            held.reshape(len(tried), -1) for held in divide_lengths(family.stages, tried)
        )
        # By start; an empty piece stands before one that begins where it lies.
        order = np.argsort(2 * starts + (sizes > 0), axis=1, kind="stable")
        starts = np.take_along_axis(starts, order, 1)
        stops = starts + np.take_along_axis(sizes, order, 1)
        ends = np.stack((starts[:, 0], tried - stops[:, -1]))
        tiled = (starts[:, 1:] == stops[:, :-1]).all(1) & ~ends.any(0)
        yield from tried[~tiled].tolist()


def _find_missing(name: str, n: int, families: list[Family]) -> Counterexample | None:
    """At length `n`, the first element that the last family holds (if there is one family: of all elements) and the
    first family does not; or the reason for which there is no such layout."""
    try:
        held, *others = (cells(family.at(n)) for family in families)
    except PlacementError as error:
        return Counterexample(name, n, str(error))
    starts, stops = _join_spans(held)
    begin, end = _join_spans(others[0]) if others else (np.array([0]), np.array([n]))
    # The joined range at or before each wanted one, and how far it reaches.
    before = starts.searchsorted(begin, "right")
    reach = np.append(0, stops)[before]
    reached = np.maximum(reach, begin)
    missing = reached[reached < end]
    if not len(missing):
        return None
    return Counterexample(name, n, f"no rank holds element {missing[0]}")


def _join_spans(held: tuple[Runs, ...]) -> tuple[Ints, Ints]:
    """The starts and stops of the ranges that some part holds, joined where they touch or overlap."""
    starts, stops, _, _ = list_spans(held)
    reach = np.maximum.accumulate(stops)
    apart = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
    last = np.append(apart[1:], True)[: len(starts)]
    return starts[apart], reach[last]


# Equal parts


class _Pairs(NamedTuple):
    """Which parts of two families are held by one rank: distinct pairs of numbers, and the first such rank."""

    ranks: Ints
    first: Ints
    second: Ints


def _pair_cells(a: Layout, b: Layout, families: list[Family]) -> _Pairs:
    """The pairs of parts that the ranks of both layouts hold."""
    ranks = np.sort(a.mesh.ranks)
    numbers = []
    for layout, family in zip((a, b), families, strict=True):
        position = np.argsort(layout.mesh.ranks)
        numbers.append(layout.mesh.coordinate(family.dim.axes)[position])
    _, chosen = np.unique(np.stack(numbers), axis=1, return_index=True)
    chosen.sort()
    first, second = (number[chosen] for number in numbers)
    return _Pairs(ranks[chosen], first, second)


def _find_other_ranks(a: Layout, b: Layout) -> Counterexample | None:
    """A difference between two layouts that no size changes."""
    if a.dtype != b.dtype:
        return Counterexample("", 0, f"the layouts are of {a.dtype} and of {b.dtype}")
    only = sorted(set(a.mesh.ranks) ^ set(b.mesh.ranks))
    if only:
        return Counterexample("", 0, f"rank {only[0]} is in one of the meshes alone", only[0])
    for rank in sorted(a.mesh.ranks):
        one, other = (_describe_addend(layout, rank) for layout in (a, b))
        if one != other:
            text = f"rank {rank} holds {one} under the first layout, and {other} under the second"
            return Counterexample("", 0, text, rank)
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


def _decide_equal(
    name: str, families: list[Family], pairs: _Pairs
) -> tuple[Decided, Counterexample | None]:
    """Decide whether at every length both families give each rank the same part."""
    size = _common_size(name, families)
    if size is not None:
        return Decided(name, "one", size), _find_other(name, size, families, pairs)
    one, other = families
    growth, why = None, one.why or other.why
    if one.growth is not None and other.growth is not None:
        growth = one.growth.join(other.growth)
        if _has_blocks(one) or _has_blocks(other):
            growth, why = _join_blocks(one, other, growth)
    decided = _count_lengths(name, growth, one.coordinates + other.coordinates, why)
    sizes: Iterable[int] = range(decided.lengths)
    if one.is_counted and other.is_counted:
        sizes = _list_unequal(families, pairs, decided.lengths)
    for n in sizes:
        found = _find_other(name, n, families, pairs)
        if found is not None:
            return decided, found
    return decided, None


def _has_blocks(family: Family) -> bool:
    return any(isinstance(digit.cut, FixedBlock) for stage in family.stages for digit in stage)


def _join_blocks(one: Family, other: Family, growth: Growth) -> tuple[Growth | None, str]:
    """The growth of two families with blocks, if they divide pieces that are the same at every length."""
    heads = []
    for family in (one, other):
        if len(family.stages) != 1 or family.why:
            return None, "blocks are combined with other cuts"
        (stage,) = family.stages
        head = tuple(
            itertools.takewhile(lambda digit: not isinstance(digit.cut, FixedBlock), stage)
        )
        if not all(isinstance(digit.cut, FixedBlock) for digit in stage[len(head) :]):
            return None, "blocks are divided further by cuts into parts"
        heads.append(head)
    if heads[0] != heads[1]:
        return None, "blocks divide pieces of which nobody knows that they are the same"
    return growth, ""


def _list_unequal(families: list[Family], pairs: _Pairs, lengths: int) -> Iterator[int]:
    """The lengths at which some rank holds other elements, or the same in another order."""
    one, other = families
    for tried in _list_blocks(lengths, one.pieces * other.pieces):
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


def _find_other(name: str, n: int, families: list[Family], pairs: _Pairs) -> Counterexample | None:
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
