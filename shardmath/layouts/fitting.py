"""Fitting: the dimension that people would write, found from what each coordinate holds.

1. Parts are tried, in this order: undivided, chunks over the axes in any order, balanced, consecutive parts of
   given sizes, round robin. If none of them fits, the dimension is a Table.
2. What a rank holds is **trimmed** first: positions at equal distances become a view with an offset and a step,
   without the holes before, between and after them.
3. `from_holdings` finds the mesh too: parts that are held in every combination, equally often, are one layout;
   any others are windows, each of them such a layout.

>>> from shardmath.layouts.algebra.runs import from_ranges
>>> trim(from_ranges([3, (4, 5), 1, (5, 6), 1, (6, 7), 1]))
(Trim(offset=3, step=2, length=3), Runs(((0, 4, 3),), 3))
>>> dimension = fit(8, {"dp": 1, "tp": 2}, [from_ranges([(0, 4)]), from_ranges([(4, 8)])])
>>> dimension.axes
{'tp': 2}
>>> held = {rank: (from_ranges([(2 * at, 2 * at + 2)]),) for at, rank in enumerate((7, 5, 6))}
>>> print(from_holdings((6,), held), from_holdings((6,), held).mesh.ranks)
float32[6] (d0 n) on d0=3 (7, 5, 6)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import LayoutError, PlacementError
from shardmath.base.text import plural, shown
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, divided
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, Segment
from shardmath.layouts.layout import Layout, intern
from shardmath.layouts.placement import (
    Balanced,
    BlockCyclic,
    Placement,
    Ragged,
    Shard,
    Table,
    stage_of,
)

__all__ = ["Trim", "fit", "from_holdings", "trim"]

MOST_AXES = 4
"""The most axes of which all orders are tried."""


class Trim(NamedTuple):
    """A strided view of one dimension of a stored tensor: its offset, step and length."""

    offset: int
    step: int
    length: int

    @property
    def span(self) -> slice:
        """The slice that selects the view."""
        return slice(self.offset, self.offset + self.length * self.step, self.step)


def trim(runs: Runs) -> tuple[Trim, Runs]:
    """Return the slice of the local dimension that `runs` describes, without padding at both ends, and a map from the
    slice's positions to global positions. The slice's step is above 1 only if equal amounts of padding separate all
    neighboring elements."""
    segments = runs.segments
    if not segments:
        return Trim(0, 1, 0), Runs((), 0)
    offset, _, _ = segments[0]
    # Alternating rows of two components are one strided view per component, not a run per row.
    step = _find_step(runs)
    if step > 1:
        return Trim(offset, step, len(segments)), _remove_holes(segments)
    last, _, last_length = segments[-1]
    length = last + last_length - offset
    moved = [(lo - offset, g, n) for lo, g, n in segments]
    return Trim(offset, 1, length), Runs(moved, length)


def _remove_holes(segments: Iterable[Segment]) -> Runs:
    """The Runs of single positions without the holes between them."""
    positions = [g for _, g, _ in segments]
    dense = [(i, g, 1) for i, g in enumerate(positions)]
    return Runs(dense)


def _find_step(runs: Runs) -> int:
    """The distance between single positions if it is always the same; 1 for any other segments."""
    segments = runs.segments
    if len(segments) < 2 or any(n != 1 for _, _, n in segments):
        return 1
    starts = [lo for lo, _, _ in segments]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    return steps.pop() if len(steps) == 1 else 1


def fit(n: int, axes: Mapping[str, int], held: Sequence[Runs]) -> Dimension:
    """Find a Dimension (how mesh axes divide `n` positions) in which ranks hold given positions. The list `held` has
    the positions for each combination of coordinates on `axes`, in row-major order."""
    used, parts = _drop_axes(dict(axes), list(held))
    if not used:
        # All ranks hold the same positions, without any cut.
        (runs,) = parts
        return Dimension(n, (Field(len(runs)),), runs)
    for dimension in _list_candidates(n, used, parts):
        # `cells` lists coordinates in the order in which the axes cut the dimension.
        in_order = list(dimension.axes) == list(used)
        candidate_parts = list(cells(dimension)) if in_order else _list_parts(dimension, used)
        if candidate_parts == parts:
            return dimension
    # No rule that people would write fits: list what each rank holds.
    table = Table(0, tuple(parts))
    return _divide_flattened(n, table, used)


def _drop_axes(axes: dict[str, int], held: list[Runs]) -> tuple[dict[str, int], list[Runs]]:
    """The axes along which parts differ, and the parts of their coordinates."""
    for name in list(axes):
        first = _select_first(axes, name, held)
        # An axis along which all hold the same divides nothing: it replicates.
        repeated = _repeat(axes, name, first)
        if repeated == held:
            held = first
            del axes[name]
    return axes, held


def _select_first(axes: Mapping[str, int], name: str, held: list[Runs]) -> list[Runs]:
    """What coordinate 0 of the axis holds, at every coordinate of the others."""
    inner = _count_inside(axes, name)
    starts = range(0, len(held), axes[name] * inner)
    return [held[start + i] for start in starts for i in range(inner)]


def _repeat(axes: Mapping[str, int], name: str, first: list[Runs]) -> list[Runs]:
    """The parts of coordinate 0 repeated at every coordinate of the axis."""
    inner = _count_inside(axes, name)
    repeated: list[Runs] = []
    for start in range(0, len(first), inner):
        repeated += first[start : start + inner] * axes[name]
    return repeated


def _count_inside(axes: Mapping[str, int], name: str) -> int:
    """The number of coordinates of all axes that are faster than this one."""
    names = list(axes)
    faster = names[names.index(name) + 1 :]
    return math.prod(axes[axis] for axis in faster)


def _list_candidates(n: int, axes: dict[str, int], parts: list[Runs]) -> Iterator[Dimension]:
    """Dimensions that people would write, each on all these axes."""
    # If axes do not divide evenly, the order in which they cut matters: (tp dp n) is not (dp tp n).
    if len(axes) <= MOST_AXES:
        shards = [stage_of(Shard(0), (axis,), (size,)) for axis, size in axes.items()]
        for stages in itertools.permutations(shards):
            field = divided(n, stages)
            yield Dimension(n, (field,))
    yield _divide_flattened(n, Balanced(0), axes)
    sizes = tuple(runs.size for runs in parts)
    if sum(sizes) == n:
        yield _divide_flattened(n, Ragged(0, sizes), axes)
    yield _divide_flattened(n, BlockCyclic(0), axes)


def _divide_flattened(n: int, placement: Placement, axes: Mapping[str, int]) -> Dimension:
    """The dimension that the placement divides over the axes, flattened."""
    sizes = tuple(axes.values())
    stage = stage_of(placement, tuple(axes), sizes)
    field = divided(n, [stage])
    return Dimension(n, (field,))


def _list_parts(dimension: Dimension, axes: Mapping[str, int]) -> list[Runs]:
    """What each coordinate of these axes holds, last fastest; nothing if the dimension rejects one."""
    parts = []
    for point in itertools.product(*map(range, axes.values())):
        coords = dict(zip(axes, point, strict=True))
        try:
            parts.append(dimension.runs(coords))
        except PlacementError:
            return []
    return parts


# The inverse of `Layout.runs`

Parts: TypeAlias = tuple[Runs, ...]
"""The Runs that a rank holds, one per dimension."""


def from_holdings(
    shape: Sequence[int], held: Mapping[int, Sequence[Runs]], *, dtype: str = "float32"
) -> Layout | tuple[Layout, ...]:
    """Return the layout of a tensor of which each rank holds `held[rank]`: one Runs (ranges of positions) per
    dimension. If no single layout can describe all ranks, return a tuple of layouts, each for different ranks.

    The law: `equivalent(from_holdings(x.shape, {rank: x.runs(rank) for rank in x.mesh.ranks}), x)` for a layout x
    without Partial. Raises LayoutError without ranks, for another number of dimensions, and for Runs outside the shape.
    """
    written = listed(shape, "sizes", LayoutError)
    sizes = tuple(as_integer(n, "a size", LayoutError) for n in written)
    if not held:
        raise LayoutError(
            f"held is {shown(held)}; give at least one rank: {{rank: [one Runs per dimension]}}"
        )
    parts = {rank: _check_parts(sizes, rank, runs) for rank, runs in held.items()}
    finder = _Finder(sizes, dtypes.canonical(dtype))
    windows = finder.find(parts)
    return windows[0] if len(windows) == 1 else tuple(windows)


def _check_parts(sizes: tuple[int, ...], rank: int, runs: Sequence[Runs]) -> Parts:
    """The Runs that the rank holds. Raises LayoutError unless they are inside the shape."""
    parts = tuple(runs)
    if len(parts) != len(sizes):
        raise LayoutError(
            f"rank {rank} has {len(parts)} Runs, but shape {sizes} has {plural(sizes, 'dimension')}; "
            f"give one Runs per dimension"
        )
    for dim_runs, n in zip(parts, sizes, strict=True):
        if dim_runs.extent > n:
            raise LayoutError(
                f"rank {rank} holds {dim_runs} of a dimension of {n}; give positions below {n}"
            )
    return parts


class _Finder:
    """Finds the windows of what ranks hold, once per group of ranks."""

    def __init__(self, sizes: tuple[int, ...], dtype: str) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.known: dict[frozenset[int], list[Layout]] = {}

    def find(self, held: dict[int, Parts]) -> list[Layout]:
        """Return layouts in which each rank holds the positions in `held`: one layout for all ranks if there is such a
        layout, otherwise several, each for different ranks."""
        # Grouping by one dimension and then by another makes the same groups as the other order.
        ranks = frozenset(held)
        windows = self.known.get(ranks)
        if windows is None:
            whole = self._find_layout(held)
            windows = self._find_windows(held) if whole is None else [whole]
            self.known[ranks] = windows
        return windows

    def _find_windows(self, held: dict[int, Parts]) -> list[Layout]:
        """The fewest windows that grouping the ranks by their part of one dimension gives."""
        best: list[Layout] = []
        for d in range(len(self.sizes)):
            groups = _group_by_part(held, d)
            if len(groups) == 1:
                continue
            windows: list[Layout] = []
            for group in groups:
                windows += self.find(group)
            if not best or len(windows) < len(best):
                best = windows
        return best

    def _find_layout(self, held: dict[int, Parts]) -> Layout | None:
        """The one layout of what is held; None unless parts are held in every combination, equally often."""
        by_dimension = zip(*held.values(), strict=True)
        parts_by_dim = [_repeat_parts(Counter(parts)) for parts in by_dimension]
        count = math.prod(map(len, parts_by_dim))
        # Checked before combinations are made: with many dimensions they may be far more than ranks.
        if len(held) % count:
            return None
        copies = len(held) // count
        combinations = list(itertools.product(*parts_by_dim))
        if Counter(combinations * copies) != Counter(held.values()):
            return None
        ranks = _order_ranks(combinations, held, copies)
        return self._make_layout(parts_by_dim, copies, ranks)

    def _make_layout(
        self, parts_by_dim: Sequence[list[Runs]], copies: int, ranks: list[int]
    ) -> Layout:
        """The layout over one mesh axis per divided dimension, and one of copies."""
        axes: dict[str, int] = {}
        dims = []
        for d, parts in enumerate(parts_by_dim):
            axis = f"d{d}"
            axes[axis] = len(parts)
            dim = fit(self.sizes[d], {axis: len(parts)}, parts)
            dims.append(dim)
        axes["copy"] = copies
        divided_by = {axis: n for axis, n in axes.items() if n > 1}
        mesh = Mesh(divided_by, ranks=ranks)
        return intern(self.sizes, self.dtype, mesh, tuple(dims), ())


def _group_by_part(held: Mapping[int, Parts], d: int) -> Collection[dict[int, Parts]]:
    """Groups of ranks that hold the same part of dimension d."""
    groups: dict[Runs, dict[int, Parts]] = {}
    for rank, parts in held.items():
        group = groups.setdefault(parts[d], {})
        group[rank] = parts
    return groups.values()


def _repeat_parts(counts: Counter[Runs]) -> list[Runs]:
    """The parts of a dimension by first position; a part that is held twice as often is listed twice."""
    unit = math.gcd(*counts.values())
    order = sorted(counts, key=_first_position)
    return [part for part in order for _ in range(counts[part] // unit)]


def _first_position(runs: Runs) -> tuple[float, tuple[object, ...]]:
    """A sort key: the first position of the part. Empty parts are last, as the last ceil-chunks are."""
    positions = [g for _, g, _ in runs.segments]
    first = min(positions, default=math.inf)
    return first, runs.segments


def _order_ranks(combinations: list[Parts], held: Mapping[int, Parts], copies: int) -> list[int]:
    """The ranks in the order of the mesh: by combination, with the copies of each combination together."""
    ranks_of: dict[Parts, list[int]] = {}
    for rank, parts in held.items():
        ranks_of.setdefault(parts, []).append(rank)
    ranks = []
    for parts in combinations:
        ranks += ranks_of[parts][:copies]
        del ranks_of[parts][:copies]
    return ranks
