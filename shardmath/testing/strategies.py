"""Strategies: hypothesis draws small values with all the awkward cases.

Uneven sizes, sizes of 0, more ranks than elements, axes of size 1, strides that do not nest, holes,
permuted and overlapping ranks, parts that overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import hypothesis.strategies as st

from shardmath.algebra.box import Box
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs, from_ranges, identity
from shardmath.layouts.edits import window
from shardmath.layouts.layout import Layout
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

__all__ = [
    "boxes",
    "layouts",
    "lengths",
    "meshes",
    "pairs",
    "parts",
    "placements",
    "register_strategies",
    "runs",
    "shapes",
    "tilings",
    "trees",
]

Draw: TypeAlias = st.DrawFn


SMALL = 13
"""Sizes up to which everything may be drawn: all ways to deal few rows to few ranks are there."""

BLOCKS = (8, 16, 64, 128, 256, 512)
"""What real placements align to: warps, tiles, pages, 128 x 128 scales."""


def lengths(most: int = 4096) -> st.SearchStrategy[int]:
    """Sizes of a dimension up to `most`, 0 included: small ones, and ones around multiples of blocks.

    A placement that aligns to blocks only where there are rows enough is right on every small size.
    """
    small = st.integers(0, min(most, SMALL))
    if most <= SMALL:
        return small
    return st.one_of(small, _around_blocks(most), st.integers(0, most))


@st.composite
def _around_blocks(draw: Draw, most: int) -> int:
    """Some blocks and a row more or less, or any part of a block more."""
    block = draw(st.sampled_from(BLOCKS))
    more = draw(st.sampled_from((0, 1, -1, block // 2)))
    count = draw(st.integers(1, 8))
    return min(most, block * count + more)


def parts(most: int = 8) -> st.SearchStrategy[int]:
    """Coordinates on an axis, mostly few."""
    if most <= 4:
        return st.integers(1, most)
    return st.one_of(st.integers(1, 4), st.integers(1, most))


@st.composite
def runs(draw: Draw, most: int = 12) -> Runs:
    """Any partial injection: segments of 0..most-1 in any order, with holes."""
    cuts = sorted(draw(st.sets(st.integers(0, most), max_size=6)))
    spans = draw(st.permutations(list(itertools.pairwise(cuts))))
    kept = spans[: draw(st.integers(0, len(spans)))]
    ranges: list[tuple[int, int] | int] = []
    for span in kept:
        hole = draw(st.integers(0, 2))
        ranges += [hole, span]
    return from_ranges(ranges)


@st.composite
def meshes(draw: Draw, most: int = 12, first: int | None = None) -> Mesh:
    """Up to three axes over ranks in any order, from `first` on (drawn if not given)."""
    any_sizes = st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=3)
    sizes = draw(any_sizes.filter(lambda drawn: math.prod(drawn) <= most))
    total = math.prod(sizes)
    start = draw(st.sampled_from([0, 0, 3, 40])) if first is None else first
    ranks = list(range(start, start + total))
    order = draw(st.one_of(st.just(ranks), st.permutations(ranks)))
    return Mesh(dict(zip("abc", sizes, strict=False)), ranks=order)


@st.composite
def placements(draw: Draw, dim: int, n: int, count: int, overlap: bool = True) -> Placement:
    """A placement of any kind that divides a length n into `count` parts; a Table with `overlap`."""
    kinds: list[Callable[[], Placement]] = [
        lambda: Shard(dim),
        lambda: Balanced(dim),
        lambda: StridedShard(dim, draw(st.integers(1, 4))),
        lambda: BlockCyclic(dim, draw(st.integers(1, 3))),
        lambda: Ragged(dim, _draw_sizes(draw, n, count)),
        lambda: Packed(dim, _draw_sizes(draw, n, draw(st.integers(1, 3)))),
    ]
    if overlap:
        kinds.append(lambda: Table(dim, _draw_table(draw, n, count)))
    make = draw(st.sampled_from(kinds))
    return make()


def _draw_sizes(draw: Draw, n: int, count: int) -> tuple[int, ...]:
    """Sizes of `count` parts that add up to n."""
    cuts = draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1))
    borders = [0, *sorted(cuts), n]
    return tuple(stop - start for start, stop in itertools.pairwise(borders))


def _draw_table(draw: Draw, n: int, count: int) -> tuple[Runs, ...]:
    """Parts that cover together: one holds everything, the others anything."""
    whole = draw(st.integers(0, count - 1))
    return tuple(identity(n) if i == whole else _draw_part(draw, n) for i in range(count))


def _draw_part(draw: Draw, n: int) -> Runs:
    """Two ranges of 0..n-1 in any order, with a hole between."""
    four = st.lists(st.integers(0, n), min_size=4, max_size=4)
    a, b, c, d = sorted(draw(four))
    if draw(st.booleans()):
        return from_ranges([(c, d), (a, b)])
    return from_ranges([(a, b), draw(st.integers(0, 2)), (c, d)])


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
    """A layout that holds everything: any placements, as tuple or mapping, and holes.

    Some axes are Partial(op) if op is given.
    """
    if shape is None:
        shape = draw(shapes())
    if mesh is None:
        mesh = draw(meshes())
    held = list(shape)
    stored = {}
    for d, n in enumerate(shape):
        if draw(st.integers(0, 5)) == 0:
            stored[d] = _draw_stored(draw, n)
            held[d] = len(stored[d])
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
    """A placement of any dimension; `used` ones, which others divide already, only by Shard."""
    d = draw(st.integers(0, len(held) - 1))
    if d in used:
        return Shard(d)
    used.add(d)
    placement: Placement = draw(placements(d, held[d], count, overlap))
    return placement


def _draw_stored(draw: Draw, n: int) -> Runs:
    """Every logical position, in pieces in any order with holes between."""
    cut = draw(st.integers(0, n))
    first, second = draw(st.permutations([(0, cut), (cut, n)]))
    holes = st.integers(0, 2)
    return from_ranges([draw(holes), first, draw(holes), second])


def shapes(most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Global shapes of none to three dimensions."""
    return st.lists(st.integers(0, most), max_size=3).map(tuple)


OPERATIONS = (None, None, None, "sum", "max", "avg")


@st.composite
def pairs(
    draw: Draw, ops: tuple[str | None, ...] = OPERATIONS, count: int = 2, overlap: bool = True
) -> tuple[Layout, ...]:
    """Layouts of one shape on the same, overlapping or disjoint meshes."""
    shape = draw(shapes())
    op = draw(st.sampled_from(ops))
    first = draw(meshes(first=0))
    overlapping = meshes(first=first.size // 2)
    disjoint = meshes(first=first.size)
    out = []
    for _ in range(count):
        mesh = draw(st.one_of(st.just(first), overlapping, disjoint))
        out.append(draw(layouts(shape, mesh, op=op, overlap=overlap)))
    return tuple(out)


@st.composite
def trees(draw: Draw) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Two mappings name -> Layout with the same names; some names share their layouts."""
    drawn = draw(st.lists(pairs(), min_size=1, max_size=3))
    src = {}
    dst = {}
    for i in range(draw(st.integers(1, 5))):
        pair = drawn[draw(st.integers(0, len(drawn) - 1))]
        src[f"w{i}"], dst[f"w{i}"] = pair
    return src, dst


@st.composite
def boxes(draw: Draw, shape: tuple[int, ...]) -> Box:
    """A box inside the shape, empty ones included."""
    box = []
    for n in shape:
        ends = draw(st.integers(0, n)), draw(st.integers(0, n))
        box.append((min(ends), max(ends)))
    return tuple(box)


@st.composite
def tilings(draw: Draw, layout: Layout) -> tuple[Layout, ...]:
    """The layout as windows that share nothing and hold everything: cut in two along every dimension."""
    sides = []
    for n in layout.shape:
        cut = draw(st.integers(0, n))
        sides.append([(0, cut), (cut, n)])
    return tuple(window(layout, box) for box in itertools.product(*sides))


def register_strategies() -> None:
    """Make st.from_type(Mesh), (Layout) and (Runs) draw from here; importing shardmath.testing does."""
    st.register_type_strategy(Mesh, meshes())
    st.register_type_strategy(Layout, layouts())
    st.register_type_strategy(Runs, runs())
