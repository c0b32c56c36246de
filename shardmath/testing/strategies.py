"""Strategies: hypothesis draws small values with all the awkward cases.

Uneven sizes, sizes of 0, more ranks than elements, axes of size 1, strides that do not nest, holes, permuted and
overlapping ranks, parts that overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
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
"""Sizes up to which everything may be drawn: all ways for few rows to go round few ranks are among them."""

BLOCKS = (8, 16, 64, 128, 256, 512)
"""What real placements align to: warps, tiles, pages, 128 x 128 scales."""


def lengths(most: int = 4096) -> st.SearchStrategy[int]:
    """Sizes of a dimension up to `most`, 0 included: small ones, and ones at and around multiples of blocks.

    A placement that aligns to blocks only where there are rows enough is right on every small size.
    """
    small = st.integers(0, min(most, SMALL))
    return small if most <= SMALL else st.one_of(small, _around_blocks(most), st.integers(0, most))


@st.composite
def _around_blocks(draw: Draw, most: int) -> int:
    """Some blocks and a row more or less, or any part of a block more."""
    block = draw(st.sampled_from(BLOCKS))
    more = draw(st.sampled_from((0, 1, -1, block // 2)))
    return min(most, block * draw(st.integers(1, 8)) + more)


def parts(most: int = 8) -> st.SearchStrategy[int]:
    """Coordinates on an axis, mostly few."""
    return st.integers(1, most) if most <= 4 else st.one_of(st.integers(1, 4), st.integers(1, most))


@st.composite
def runs(draw: Draw, most: int = 12) -> Runs:
    """Any partial injection: segments of 0..most-1 in any order, with holes."""
    cuts = sorted(draw(st.sets(st.integers(0, most), max_size=6)))
    spans = draw(st.permutations(list(itertools.pairwise(cuts))))
    kept = spans[: draw(st.integers(0, len(spans)))]
    holes = [draw(st.integers(0, 2)) for _ in kept]
    return from_ranges([x for hole, span in zip(holes, kept, strict=True) for x in (hole, span)])


@st.composite
def meshes(draw: Draw, most: int = 12, first: int | None = None) -> Mesh:
    """Up to three axes over ranks in any order, from `first` on (drawn if not given)."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=3).filter(
            lambda s: math.prod(s) <= most
        )
    )
    total = math.prod(sizes)
    start = draw(st.sampled_from([0, 0, 3, 40])) if first is None else first
    ranks = list(range(start, start + total))
    return Mesh(
        dict(zip("abc", sizes, strict=False)),
        ranks=draw(st.one_of(st.just(ranks), st.permutations(ranks))),
    )


@st.composite
def placements(draw: Draw, dim: int, n: int, count: int, overlap: bool = True) -> Placement:
    """A placement of every kind that divides a length n into `count` parts; `overlap` allows a Table."""
    kinds: list[Callable[[], Placement]] = [
        lambda: Shard(dim),
        lambda: Balanced(dim),
        lambda: StridedShard(dim, draw(st.integers(1, 4))),
        lambda: BlockCyclic(dim, draw(st.integers(1, 3))),
        lambda: Ragged(dim, _sizes(draw, n, count)),
        lambda: Packed(dim, _sizes(draw, n, draw(st.integers(1, 3)))),
    ]
    if overlap:
        kinds.append(lambda: Table(dim, _table(draw, n, count)))
    return draw(st.sampled_from(kinds))()


def _sizes(draw: Draw, n: int, count: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, n]))


def _table(draw: Draw, n: int, count: int) -> tuple[Runs, ...]:
    """Parts that cover together: one holds everything, the others anything."""
    whole = draw(st.integers(0, count - 1))
    return tuple(identity(n) if i == whole else _within(draw, n) for i in range(count))


def _within(draw: Draw, n: int) -> Runs:
    a, b, c, d = sorted(draw(st.lists(st.integers(0, n), min_size=4, max_size=4)))
    return from_ranges(
        [(c, d), (a, b)] if draw(st.booleans()) else [(a, b), draw(st.integers(0, 2)), (c, d)]
    )


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
    """A layout that holds everything: any placements, as tuple or mapping, holes, and Partial(op) if op is given."""
    shape = draw(shapes()) if shape is None else shape
    mesh = draw(meshes()) if mesh is None else mesh
    spec: dict[str | tuple[str, ...], Spec] = {}
    stored = {d: _stored(draw, n) for d, n in enumerate(shape) if draw(st.integers(0, 5)) == 0}
    used: set[int] = set()
    as_tuple = draw(st.booleans())
    for name, count in mesh.axes if as_tuple else draw(st.permutations(mesh.axes)):
        kind = draw(st.sampled_from("sssrp" if shape else "rp"))
        if kind == "s":
            d = draw(st.integers(0, len(shape) - 1))
            held = len(stored[d]) if d in stored else shape[d]
            spec[name] = Shard(d) if d in used else draw(placements(d, held, count, overlap))
            used.add(d)
        elif kind == "p" and op:
            spec[name] = Partial(op)
        else:
            spec[name] = Replicate()
    return Layout(
        shape, mesh, tuple(spec.values()) if as_tuple else spec, dtype=dtype, stored=stored
    )


def _stored(draw: Draw, n: int) -> Runs:
    """Every logical position, in pieces in any order with holes between."""
    cut = draw(st.integers(0, n))
    pieces = draw(st.permutations([(0, cut), (cut, n)]))
    return from_ranges([draw(st.integers(0, 2)), pieces[0], draw(st.integers(0, 2)), pieces[1]])


def shapes(most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Global shapes of none to three dimensions."""
    return st.lists(st.integers(0, most), max_size=3).map(tuple)


OPERATIONS = (None, None, None, "sum", "max", "avg")


@st.composite
def pairs(
    draw: Draw, ops: tuple[str | None, ...] = OPERATIONS, count: int = 2, overlap: bool = True
) -> tuple[Layout, ...]:
    """Layouts of one shape on the same, overlapping or disjoint meshes."""
    shape, op = draw(shapes()), draw(st.sampled_from(ops))
    first = draw(meshes(first=0))
    out = []
    for _ in range(count):
        mesh = draw(
            st.one_of(st.just(first), meshes(first=first.size // 2), meshes(first=first.size))
        )
        out.append(draw(layouts(shape, mesh, op=op, overlap=overlap)))
    return tuple(out)


@st.composite
def trees(draw: Draw) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Two mappings name -> Layout with the same names; some names share their layouts."""
    drawn = draw(st.lists(pairs(), min_size=1, max_size=3))
    names = [f"w{i}" for i in range(draw(st.integers(1, 5)))]
    chosen = [drawn[draw(st.integers(0, len(drawn) - 1))] for _ in names]
    return {n: p[0] for n, p in zip(names, chosen, strict=True)}, {
        n: p[1] for n, p in zip(names, chosen, strict=True)
    }


@st.composite
def boxes(draw: Draw, shape: tuple[int, ...]) -> Box:
    """A box inside the shape, empty ones included."""
    spans = (sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape)
    return tuple((lo, hi) for lo, hi in spans)


@st.composite
def tilings(draw: Draw, layout: Layout) -> tuple[Layout, ...]:
    """The layout as windows that share nothing and hold everything: cut in two along every dimension."""
    cuts = [draw(st.integers(0, n)) for n in layout.shape]
    sides = itertools.product(
        *([(0, cut), (cut, n)] for cut, n in zip(cuts, layout.shape, strict=True))
    )
    return tuple(window(layout, tuple(box)) for box in sides)


def register_strategies() -> None:
    """Make st.from_type(Mesh), (Layout) and (Runs) draw from here; importing shardmath.testing does."""
    st.register_type_strategy(Mesh, meshes())
    st.register_type_strategy(Layout, layouts())
    st.register_type_strategy(Runs, runs())
