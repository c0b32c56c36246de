"""Per axis: a layout as one placement per mesh axis, as DTensor writes it, or as axes per dimension, as JAX does.

1. A tuple with strided shards can be read in two ways, "placement" and "order" (see `spelling`); a layout may be what
   a tuple means in one of them alone.
2. Candidates are tried, few and small split factors first, and read back: what is found is what was asked for.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> placements, readings = find_placements(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h"))
>>> print(*placements, *readings)
StridedShard(dim=0, split_factor=2) Shard(dim=0) order
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import get_args

from shardmath.base.errors import PlacementError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts.algebra.cuts import Chunks, FixedBlock
from shardmath.layouts.algebra.dimension import Dimension, Field
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.stages import Digit
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Partial, Replicate, Shard, Spec, StridedShard
from shardmath.layouts.spelling import Reading

__all__ = ["count_candidates", "find_axes", "find_placements"]


@memo()
def find_placements(layout: Layout) -> tuple[tuple[Spec, ...], frozenset[Reading]]:
    """Return placements that give `layout`, one per mesh axis, and the readings in which they do: "placement", "order"
    or both.

    Raises PlacementError, with the reason, if there are none.
    """
    by_axis: dict[str, Spec] = {}
    for name in layout.mesh.shape:
        by_axis[name] = Replicate()
    for name, op in layout.partial:
        by_axis[name] = Partial(op)
    readings: set[Reading] = set(get_args(Reading))
    for d, dim in enumerate(layout.dims):
        if dim.axes:
            factors, readings = _find_factors(layout, d, dim, readings)
            for name, factor in factors.items():
                by_axis[name] = _write_shard(d, factor)
        elif dim.stored is not None:
            raise _inexpressible(layout, d, "it stores padding or less than the dimension")
    return tuple(by_axis.values()), frozenset(readings)


def _find_factors(
    layout: Layout, d: int, dim: Dimension, readings: set[Reading]
) -> tuple[dict[str, int], set[Reading]]:
    """Split factors of the axes that divide a dimension, and the readings in which they give the layout.

    The first factors that do so in most of `readings`. Raises PlacementError if none do.
    """
    best: dict[str, int] = {}
    best_readings: set[Reading] = set()
    for factors in _list_factors(layout.mesh, dim):
        right_readings = {
            reading for reading in readings if _gives_layout(layout, dim, factors, reading)
        }
        if len(right_readings) > len(best_readings):
            best, best_readings = factors, right_readings
        if right_readings == readings:
            break
    if not best_readings:
        raise _inexpressible(layout, d, "no Shard or _StridedShard of its axes cuts it so")
    return best, best_readings


def _gives_layout(
    layout: Layout, dim: Dimension, factors: Mapping[str, int], reading: Reading
) -> bool:
    """Whether shards of these factors, in that reading, divide the dimension as the layout does."""
    # The placements of a tensor that has only this dimension.
    spec: list[Spec] = []
    for name in layout.mesh.shape:
        factor = factors.get(name)
        spec.append(Replicate() if factor is None else _write_shard(0, factor))
    try:
        made = Layout((dim.size,), layout.mesh, tuple(spec), reading=reading)
    except ShardError:
        # No order of splits gives these factors.
        return False
    return holds_same(made.dims[0], dim, layout.mesh)


def _list_factors(mesh: Mesh, dim: Dimension) -> Iterator[dict[str, int]]:
    """Candidate split factors of the axes that divide a dimension: products of digits' sizes, few and small first.

    A digit is one cut of the dimension into parts, of which a rank keeps one, by its coordinate on an axis, or all.
    """
    names = [name for name in mesh.shape if name in dim.axes]
    candidates = itertools.product(_list_products(dim), repeat=len(names))

    def few_and_small(factors: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        strided = sum(factor > 1 for factor in factors)
        return strided, factors

    for factors in sorted(candidates, key=few_and_small):
        yield dict(zip(names, factors, strict=True))


def _list_products(dim: Dimension) -> list[int]:
    """The values that a split factor may have, in ascending order."""
    # A split factor counts parts cut before the axis's own: by other axes, or by digits that ranks keep.
    sizes = [*dim.axes.values(), *_list_local_parts(dim)]
    products: set[int] = set()
    for n in range(len(sizes) + 1):
        products.update(math.prod(some) for some in itertools.combinations(sizes, n))
    return sorted(products)


def count_candidates(layout: Layout) -> int:
    """Return how many placements `find_placements` may have to try for one dimension of `layout`."""
    return max((len(_list_products(dim)) ** len(dim.axes) for dim in layout.dims), default=1)


def _list_local_parts(dim: Dimension) -> list[int]:
    """The numbers of parts of the digits (cuts) that no axis divides: every rank keeps all these parts."""
    parts: list[int] = []
    for field in dim.fields:
        for digit in itertools.chain.from_iterable(field.stages):
            # DTensor splits as torch.chunk does, which blocks of equal lengths may do, too. Other cuts are not tried,
            # nor blocks dealt to several axes: torch's `full_tensor` is wrong for many of those placements.
            cuts = Chunks | FixedBlock if len(dim.axes) == 1 else Chunks
            if not digit.axes and isinstance(digit.cut, cuts):
                parts.append(digit.cut.count(dim.size))
    return parts


def holds_same(a: Dimension, b: Dimension, mesh: Mesh) -> bool:
    """Whether every rank of the mesh holds the same positions of both dimensions."""
    first, second = partition(a), partition(b)
    parts_of_ranks = zip(first.by_rank(mesh).tolist(), second.by_rank(mesh).tolist(), strict=True)
    return all(first.parts[i] == second.parts[j] for i, j in set(parts_of_ranks))


def find_axes(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that divide each dimension, in the order in which JAX's `PartitionSpec` lists them for this
    layout; axes of size 1 are left out.

    JAX cuts a dimension into equal consecutive parts, one per combination of coordinates, the last axis fastest. Raises
    PlacementError, with the reason, if no such order gives the layout, or if it has reductions other than sums.
    """
    others = sorted({op for _, op in layout.partial if op != "sum"})
    if others:
        what = f"JAX cannot express the addends of {layout}: a PartitionSpec has unreduced sums"
        raise PlacementError(f"{what}, but no {', '.join(others)}; reduce them first")
    return tuple(_find_order(layout, d) for d in range(layout.ndim))


def _find_order(layout: Layout, d: int) -> tuple[str, ...]:
    """The order of mesh axes along which JAX would divide the dimension as it is divided."""
    dim = layout.dims[d]
    what = f"JAX cannot express dimension {d} of {layout}"
    parts = math.prod(dim.axes.values())
    if dim.stored is not None:
        raise PlacementError(f"{what}: it has no padding; pad the array itself")
    if dim.size % parts:
        uneven = f"{dim.size} positions do not divide evenly into {parts} parts"
        raise PlacementError(f"{what}: {uneven}; pad the array to {-(-dim.size // parts) * parts}")
    for axes in itertools.permutations(dim.axes):
        sizes = tuple(dim.axes[name] for name in axes)
        digit = Digit(Chunks(math.prod(sizes)), axes, sizes)
        if not axes or holds_same(
            Dimension(dim.size, (Field(dim.size, ((digit,),)),)), dim, layout.mesh
        ):
            return axes
    raise PlacementError(
        f"{what}: its parts are not consecutive; plan a move to a layout in which they are"
    )


def _write_shard(d: int, factor: int) -> Spec:
    """The shard of dimension d with that split factor; a plain one for 1."""
    if factor == 1:
        return Shard(d)
    return StridedShard(d, factor)


def _inexpressible(layout: Layout, d: int, why: str) -> PlacementError:
    fix = "keep the local tensor with its Layout, or move it to a layout of Shard"
    return PlacementError(f"DTensor cannot express dimension {d} of {layout}: {why}; {fix}")
