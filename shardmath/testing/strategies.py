"""Strategies: small values drawn by hypothesis, with all the awkward cases.

Uneven sizes, sizes of 0, more ranks than elements, axes of size 1, strides that do not nest, holes,
permuted and overlapping ranks, parts that overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hypothesis.strategies as st
from hypothesis import assume

from shardmath.layouts.algebra.box import Box
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, from_ranges, identity
from shardmath.layouts.edits import window
from shardmath.layouts.layout import Layout, intern
from shardmath.layouts.placement import (
    Balanced,
    BlockCyclic,
    Packed,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    Table,
)
from shardmath.plans.reduction import find_reduction

__all__ = [
    "boxes",
    "copies",
    "layouts",
    "lengths",
    "meshes",
    "pairs",
    "parts",
    "placements",
    "runs",
    "shapes",
    "tilings",
    "trees",
]

Draw: TypeAlias = st.DrawFn


SMALL = 13
"""The largest size that is drawn evenly: few rows on few ranks occur in all ways."""

BLOCKS = (8, 16, 64, 128, 256, 512)
"""Sizes that real placements align to: warps, tiles, pages, 128 x 128 scales."""


def lengths(most: int = 4096) -> st.SearchStrategy[int]:
    """A hypothesis strategy for the length of a dimension, 0 to `most`: often small, or near a multiple of a power of
    two such as 128.

    A placement that aligns to blocks only if there are enough rows is right on every small size.
    """
    small = st.integers(0, min(most, SMALL))
    if most <= SMALL:
        return small
    return st.one_of(small, _around_blocks(most), st.integers(0, most))


@st.composite
def _around_blocks(draw: Draw, most: int) -> int:
    """A multiple of a block, a row more or less, or half a block more."""
    block = draw(st.sampled_from(BLOCKS))
    half = block // 2
    rests = st.sampled_from((0, 1, -1, half))
    rest = draw(rests)
    count = draw(st.integers(1, 8))
    n = block * count + rest
    return min(most, n)


def parts(most: int = 8) -> st.SearchStrategy[int]:
    """A hypothesis strategy for the number of parts into which a mesh axis divides a dimension, 1 to `most`; up to 4
    are drawn most often."""
    if most <= 4:
        return st.integers(1, most)
    few = st.integers(1, 4)
    return st.one_of(few, st.integers(1, most))


_axis_sizes = st.sampled_from([1, 2, 2, 3, 4])
_first_ranks = st.sampled_from([0, 0, 3, 40])
_holes = st.integers(0, 2)
_one_in_six = st.integers(0, 5).map(lambda drawn: drawn == 0)
_split_factors = st.integers(1, 4)
_block_sizes = st.integers(1, 3)


@st.composite
def runs(draw: Draw, most: int = 12) -> Runs:
    """A hypothesis strategy for Runs, positions of a dimension in the order in which a rank holds them: ranges below
    `most` in any order, some preceded by holes (local positions without an element)."""
    positions = st.integers(0, most)
    any_cuts = st.sets(positions, max_size=6)
    cuts = sorted(draw(any_cuts))
    spans = list(itertools.pairwise(cuts))
    order = draw(st.permutations(spans))
    counts = st.integers(0, len(spans))
    count = draw(counts)
    ranges: list[tuple[int, int] | int] = []
    for span in order[:count]:
        hole = draw(_holes)
        ranges += [hole, span]
    return from_ranges(ranges)


@st.composite
def meshes(draw: Draw, most: int = 12, first: int | None = None) -> Mesh:
    """A hypothesis strategy for meshes with up to three axes and at most `most` ranks. Ranks are consecutive numbers
    from `first` (random if None), and are sometimes shuffled."""
    any_sizes = st.lists(_axis_sizes, max_size=3)
    few_ranks = any_sizes.filter(lambda sizes: math.prod(sizes) <= most)
    sizes = draw(few_ranks)
    if first is None:
        first = draw(_first_ranks)
    stop = first + math.prod(sizes)
    ascending = list(range(first, stop))
    shuffled = st.permutations(ascending)
    ranks = draw(st.just(ascending) | shuffled)
    axes = dict(zip("abc", sizes, strict=False))
    return Mesh(axes, ranks=ranks)


@st.composite
def placements(draw: Draw, dim: int, n: int, count: int, overlap: bool = True) -> Placement:
    """A hypothesis strategy for placements that divide dimension `dim` of length `n` into `count` parts, which may
    overlap if `overlap`."""
    kinds: list[Callable[[], Placement]] = [
        lambda: Shard(dim),
        lambda: Balanced(dim),
        lambda: StridedShard(dim, draw(_split_factors)),
        lambda: BlockCyclic(dim, draw(_block_sizes)),
        lambda: Ragged(dim, _draw_sizes(draw, n, count)),
        lambda: _draw_packed(draw, dim, n),
    ]
    if overlap:
        kinds.append(lambda: _draw_table(draw, dim, n, count))
    make = draw(st.sampled_from(kinds))
    return make()


def _draw_packed(draw: Draw, dim: int, n: int) -> Packed:
    """One to three parts one after the other."""
    count = draw(st.integers(1, 3))
    sizes = _draw_sizes(draw, n, count)
    return Packed(dim, sizes)


def _draw_sizes(draw: Draw, n: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` parts that add up to n."""
    inner = count - 1
    positions = st.integers(0, n)
    cuts = draw(st.lists(positions, min_size=inner, max_size=inner))
    sizes = []
    start = 0
    for stop in (*sorted(cuts), n):
        sizes.append(stop - start)
        start = stop
    return tuple(sizes)


def _draw_table(draw: Draw, dim: int, n: int, count: int) -> Table:
    """A Table of parts that cover the length: one part holds all of it, the others any positions."""
    full = draw(st.integers(0, count - 1))
    parts = []
    for i in range(count):
        part = identity(n) if i == full else _draw_part(draw, n)
        parts.append(part)
    return Table(dim, tuple(parts))


def _draw_part(draw: Draw, n: int) -> Runs:
    """Two ranges of 0..n-1 in any order, with a hole between."""
    positions = st.integers(0, n)
    four = st.lists(positions, min_size=4, max_size=4)
    a, b, c, d = sorted(draw(four))
    lower = (a, b)
    upper = (c, d)
    swapped = draw(st.booleans())
    if swapped:
        return from_ranges([upper, lower])
    hole = draw(_holes)
    return from_ranges([lower, hole, upper])


@st.composite
def layouts(
    draw: Draw,
    shape: tuple[int, ...] | None = None,
    mesh: Mesh | None = None,
    *,
    op: str | None = None,
    dtype: str = "float64",
    overlap: bool = True,
) -> Layout:
    """A hypothesis strategy for layouts of `dtype` that put every element on some rank; `shape` and `mesh` are drawn if
    None. Some axes may be Partial by `op`, if given; parts overlap only if `overlap`.

    Some layouts have holes (local positions without an element).
    """
    if shape is None:
        shape = draw(shapes())
    if mesh is None:
        mesh = draw(meshes())
    held = list(shape)
    stored = {}
    for d, n in enumerate(shape):
        with_holes = draw(_one_in_six)
        if with_holes:
            positions = _draw_stored(draw, n)
            stored[d] = positions
            held[d] = len(positions)
    # A spec is a tuple in the order of the mesh's axes, or a dict in any order.
    as_tuple = draw(st.booleans())
    axes = mesh.axes if as_tuple else draw(st.permutations(mesh.axes))
    spec = _draw_spec(draw, axes, held, op, overlap)
    given = tuple(spec.values()) if as_tuple else spec
    return Layout(shape, mesh, given, dtype=dtype, stored=stored)


def _draw_spec(
    draw: Draw,
    axes: Sequence[tuple[str, int]],
    held: list[int],
    op: str | None,
    overlap: bool,
) -> dict[str | tuple[str, ...], Spec]:
    """A placement for each axis; `held` are the stored positions of each dimension."""
    # Shard (three times as often), Replicate, Partial; a scalar cannot be sharded.
    kinds = st.sampled_from("sssrp" if held else "rp")
    spec: dict[str | tuple[str, ...], Spec] = {}
    used: set[int] = set()
    for name, count in axes:
        kind = draw(kinds)
        spec[name] = Replicate()
        if kind == "s":
            spec[name] = _draw_shard(draw, held, count, used, overlap)
        elif kind == "p" and op:
            spec[name] = Partial(op)
    return spec


def _draw_shard(
    draw: Draw, held: list[int], count: int, used: set[int], overlap: bool
) -> Placement:
    """A placement of any dimension over an axis of size `count`. `held` has the stored length of each dimension;
    dimensions in `used`, which other axes divide already, get only Shard."""
    last = len(held) - 1
    d = draw(st.integers(0, last))
    if d in used:
        return Shard(d)
    used.add(d)
    any_kind = placements(d, held[d], count, overlap)
    placement: Placement = draw(any_kind)
    return placement


def _draw_stored(draw: Draw, n: int) -> Runs:
    """All logical positions, as two pieces in either order with holes before and between."""
    cut = draw(st.integers(0, n))
    halves = [(0, cut), (cut, n)]
    first, second = draw(st.permutations(halves))
    holes_before = draw(_holes)
    holes_between = draw(_holes)
    return from_ranges([holes_before, first, holes_between, second])


def shapes(most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """A hypothesis strategy for global shapes of zero to three dimensions, each of length 0 to `most`."""
    sizes = st.integers(0, most)
    listed = st.lists(sizes, max_size=3)
    return listed.map(tuple)


OPERATIONS = (None, None, None, "sum", "max", "avg")


@st.composite
def pairs(
    draw: Draw, ops: tuple[str | None, ...] = OPERATIONS, count: int = 2, overlap: bool = True
) -> tuple[Layout, ...]:
    """A hypothesis strategy for tuples of `count` layouts of one shape, on equal, overlapping or disjoint meshes. Some
    axes can be Partial by an operation drawn from `ops`; if None is drawn, no axis is Partial. Shards of an axis
    overlap only if `overlap` is True."""
    shape = draw(shapes())
    op = draw(st.sampled_from(ops))
    first = draw(meshes(first=0))
    same = st.just(first)
    overlapping = meshes(first=first.size // 2)
    disjoint = meshes(first=first.size)
    out = []
    for _ in range(count):
        mesh = draw(same | overlapping | disjoint)
        layout = draw(layouts(shape, mesh, op=op, overlap=overlap))
        out.append(layout)
    return tuple(out)


@st.composite
def copies(draw: Draw) -> tuple[Layout, Layout, tuple[int, ...]]:
    """A hypothesis strategy for tuples (source layout, destination layout, ranks that leave the job). The destination
    has two or more copies of the tensor on disjoint sets of ranks; the leaving ranks are all ranks of one or more
    copies, but never of all copies.

    Both layouts have one shape. No rank of those copies is in the source layout, and the other ranks still reduce in
    the same way.
    """
    src, original = draw(pairs())
    count = draw(st.integers(2, 4))
    mesh = draw(_copied(src.mesh, original.mesh, count))
    drawn = draw(st.sets(st.integers(1, count - 1), min_size=1))
    leaving: list[int] = []
    for number in sorted(drawn):
        leaving += mesh.select(copy=number).ranks
    if draw(st.booleans()):
        order = [*original.mesh.shape, "copy"]
        mesh = mesh.transpose(order)
    dst = intern(original.shape, original.dtype, mesh, original.dims, original.partial)
    # Otherwise ranks that stay could hold exactly the addends of the source, and pass them on unreduced.
    assume(find_reduction(src, original) == find_reduction(src, dst))
    return src, dst, tuple(leaving)


@st.composite
def _copied(draw: Draw, src: Mesh, original: Mesh, count: int) -> Mesh:
    """The mesh `original` along with further copies of it, whose ranks neither mesh has."""
    first = 1 + max(*src.ranks, *original.ranks)
    more = (count - 1) * original.size
    ranks = range(first, first + more)
    others = draw(st.permutations(ranks))
    axes = {"copy": count, **original.shape}
    return Mesh(axes, ranks=[*original.ranks, *others])


@st.composite
def trees(draw: Draw) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """A hypothesis strategy for two dicts from the same tensor names to layouts, source and destination; several names
    may have the same layouts."""
    drawn = draw(st.lists(pairs(), min_size=1, max_size=3))
    count = draw(st.integers(1, 5))
    src = {}
    dst = {}
    for i in range(count):
        name = f"w{i}"
        src[name], dst[name] = draw(st.sampled_from(drawn))
    return src, dst


@st.composite
def boxes(draw: Draw, shape: tuple[int, ...]) -> Box:
    """A hypothesis strategy for boxes inside a tensor of this `shape`: tuples of one (start, stop) per dimension. A box
    can be empty."""
    box = []
    for n in shape:
        positions = st.integers(0, n)
        a = draw(positions)
        b = draw(positions)
        box.append((min(a, b), max(a, b)))
    return tuple(box)


@st.composite
def tilings(draw: Draw, layout: Layout) -> tuple[Layout, ...]:
    """A hypothesis strategy that cuts the tensor of `layout` in two along every dimension, and gives one layout for
    each resulting box. Each layout has the local shapes of `layout`, with holes (positions without an element) in place
    of elements outside its box."""
    sides = []
    for n in layout.shape:
        cut = draw(st.integers(0, n))
        halves = [(0, cut), (cut, n)]
        sides.append(halves)
    tiles = itertools.product(*sides)
    return tuple(window(layout, box) for box in tiles)
