"""Relabel: which destination rank becomes which, so that the most bytes stay where they are.

1. A destination names coordinates by ranks. Which rank has which coordinate is often free; `relabel` chooses a
   permutation of all ranks of the destination, one for all tensors, that maximises the bytes that need not move, of
   those that rule 4 allows: where nothing is Partial, of all.
2. What source rank s and destination coordinate r have in common is a product over dimensions of how many positions
   their parts share, from one small table a dimension; windows and tensors add up. No loop is over rank pairs.
3. The best permutation is a linear assignment, solved by scipy in floats; totals are exact integers. It is never worse
   than the ranks as they are, which are kept where nothing is saved; of equal permutations one that keeps more ranks is
   preferred. Ties beyond that are scipy's, so ranks that each relabel need one version of it, or one of them relabels
   for all.
4. Addends: a rank that is owed the sum keeps its own addend. Where Partial axes pass through, only ranks of one addend
   change places. The ranks of a destination that otherwise waits for a reduction keep their names: which of them
   receives is the plan's choice, so what a name saves there is no sum over ranks, and another permutation may save
   more. The bytes that `plan` receives in all drop by exactly `saving`, with Partial as without.

>>> from shardmath.algebra.mesh import Mesh
>>> src = Layout((8,), Mesh(dp=4), "(dp n)")
>>> dst = Layout((8,), Mesh(dp=2, tp=2), "(tp dp n)")
>>> from shardmath.plans.plan import plan
>>> found = relabel(src, dst)
>>> print(found)
2 of 4 ranks renamed, 16 B more kept in place (16 -> 32 B)
>>> found.ranks, sum(plan(src, found.apply(dst)).received_bytes().values())
({0: 0, 1: 2, 2: 1, 3: 3}, 0)
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast, overload

import numpy as np
from numpy.typing import NDArray

from shardmath.algebra.partition import Partition, partition, spans
from shardmath.base.arrays import Ints, ranges
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.layouts.layout import Layout, relabelled
from shardmath.plans.groups import Side, Windows, named
from shardmath.plans.reduction import reduction

__all__ = ["Relabelling", "overlap_table", "relabel"]

Bools: TypeAlias = NDArray[np.bool_]
Pair: TypeAlias = tuple[Layout, Layout]
MOST_BYTES = 1 << 62
"""Of all tensors; sums of what they have in common stay exact in 64 bits."""


@public
@dataclass(frozen=True, slots=True)
class Relabelling:
    """New names for the ranks of a destination: `pairs` (old, new), ascending, are a permutation of them.

    `kept_before` and `kept_after` are the bytes that stay where they are under the old and the new names.
    """

    pairs: tuple[tuple[int, int], ...]
    kept_before: int
    kept_after: int

    def __str__(self) -> str:
        moved = sum(old != new for old, new in self.pairs)
        kept = f"{self.kept_before} -> {self.kept_after} B"
        return f"{moved} of {len(self.pairs)} ranks renamed, {self.saving} B more kept in place ({kept})"

    @property
    def ranks(self) -> dict[int, int]:
        """Old -> new rank, what `relabelled` and `Mesh.relabel` take."""
        return dict(self.pairs)

    @property
    def saving(self) -> int:
        """Bytes that a plan need not move any more."""
        return self.kept_after - self.kept_before

    @overload
    def apply(self, dst: Layout) -> Layout: ...
    @overload
    def apply(self, dst: tuple[Layout, ...]) -> tuple[Layout, ...]: ...
    @overload
    def apply(self, dst: Mapping[str, Layout]) -> dict[str, Layout]: ...
    @overload
    def apply(self, dst: Mapping[str, tuple[Layout, ...]]) -> dict[str, tuple[Layout, ...]]: ...
    @overload
    def apply(self, dst: Mapping[str, Windows]) -> dict[str, Windows]: ...
    def apply(self, dst: Side) -> Side:
        """The destination under the new names: a Layout, windows, or a mapping of either.

        Raises PlanError for anything else.
        """
        ranks = self.ranks
        if isinstance(dst, Mapping):
            return {name: _renamed(name, held, ranks) for name, held in dst.items()}
        return _renamed("", dst, ranks)


def _renamed(name: str, held: Windows, ranks: Mapping[int, int]) -> Windows:
    windows = tuple(relabelled(layout, ranks) for layout in _windows(name, held))
    return windows if isinstance(held, tuple) else windows[0]


def relabel(src: Side, dst: Side) -> Relabelling:
    """The permutation of the destination's ranks under which `plan(src, dst)` has the fewest bytes to move.

    Where the destination is Partial: of the permutations that leave its addends where they are (rule 4). `saving` is
    exact in either case. `src` and `dst` are what `plan` takes. Takes 16 bytes for each pair of destination ranks.
    Raises PlanError where names, shapes or dtypes differ, where reductions do, and where scipy is needed and not
    installed.
    """
    pairs = _pairs(src, dst)
    ranks = np.array(sorted({rank for _, b in pairs for rank in b.mesh.ranks}), np.int64)
    common = np.zeros((len(ranks), len(ranks)), np.int64)
    for rows, columns, table in _tables(pairs, ranks):
        _add(common, rows, columns, table)
    new = _assigned(common, _allowed(pairs, ranks))
    stay = np.arange(len(ranks))
    before, after = _kept(common, stay), _kept(common, new)
    if after <= before:
        new, after = stay, before
    return Relabelling(tuple(zip(ranks.tolist(), ranks[new].tolist(), strict=True)), before, after)


def _windows(name: str, held: object) -> tuple[Layout, ...]:
    windows = held if isinstance(held, tuple) else (held,)
    if not windows or not all(isinstance(layout, Layout) for layout in windows):
        raise PlanError(f"tensor {name!r} is {held!r}; give a Layout or a tuple of Layouts")
    return windows


def _pairs(src: Side, dst: Side) -> Counter[Pair]:
    """How many tensors have each pair of a source and a destination window."""
    here, there = named(src, dst)
    out: Counter[Pair] = Counter()
    total = 0
    for name, held in here.items():
        for a in _windows(name, held):
            for b in _windows(name, there[name]):
                _check_alike(name, a, b)
                out[a, b] += 1
                total += math.prod(a.shape) * a.itemsize
    if total > MOST_BYTES:
        raise PlanError(
            f"the tensors have {total} bytes, which is more than {MOST_BYTES}; relabel fewer at once"
        )
    return out


def _check_alike(name: str, a: Layout, b: Layout) -> None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (a, b))
        raise PlanError(
            f"tensor {name!r}: {here} here, {there} there; both sides hold one tensor of one shape and dtype"
        )


class _Classes(NamedTuple):
    """Ranks of a layout: their places among the destination's ranks, their classes, and the parts of each class.

    A class is a part of every dimension. Classes are numbered by their first ranks, which says nothing of parts.
    """

    place: Ints
    number: Ints
    parts: Ints


def _tables(pairs: Counter[Pair], ranks: Ints) -> Iterator[tuple[_Classes, _Classes, Ints]]:
    """Source ranks, destination ranks and the bytes that their classes have in common; equal classes are added up."""
    place = np.full(
        1 + max((max(layout.mesh.ranks) for pair in pairs for layout in pair), default=0), -1
    )
    place[ranks] = np.arange(len(ranks))
    classes = {layout: _classes(layout, place) for pair in pairs for layout in pair}
    out: dict[tuple[bytes, ...], tuple[_Classes, _Classes, Ints]] = {}
    for (a, b), count in pairs.items():
        rows, columns = classes[a], classes[b]
        if len(rows.place) and not _pinned(a, b):
            table = _in_common(a, b, rows.parts, columns.parts) * (count * a.itemsize)
            rows, columns, table = _expanded(rows, columns, table)
            key = tuple(x.tobytes() for side in (rows, columns) for x in (side.place, side.number))
            out[key] = rows, columns, table + out[key][2] if key in out else table
    return iter(out.values())


def _expanded(rows: _Classes, columns: _Classes, table: Ints) -> tuple[_Classes, _Classes, Ints]:
    """The same with a class a rank on the side of more classes: more tables are of the same classes, and none larger
    than all ranks by the fewer classes."""
    if table.shape[0] < table.shape[1]:
        return (
            rows,
            columns._replace(number=np.arange(len(columns.place))),
            table.take(columns.number, axis=1),
        )
    return (
        rows._replace(number=np.arange(len(rows.place))),
        columns,
        table.take(rows.number, axis=0),
    )


def _add(common: Ints, rows: _Classes, columns: _Classes, table: Ints) -> None:
    """Add what classes have in common to what ranks have; ranks that lie together are a view, five times as fast."""
    block = table.take(rows.number, axis=0).take(columns.number, axis=1)
    (a, b), (c, d) = ((int(side.place[0]), int(side.place[-1]) + 1) for side in (rows, columns))
    if block.shape == (b - a, d - c):
        common[a:b, c:d] += block
    else:
        common[np.ix_(rows.place, columns.place)] += block


def _classes(layout: Layout, place: Ints) -> _Classes:
    """`place` is the place of each rank, -1 for ranks that the destination does not have."""
    at = place[np.array(layout.mesh.ranks, np.int64)]
    order = np.argsort(at)[int((at < 0).sum()) :]
    parts, code = np.zeros((len(order), layout.ndim), np.int64), np.zeros(len(order), np.int64)
    for d, dim in enumerate(layout.dims):
        if len(partition(dim).parts) > 1:
            parts[:, d] = partition(dim).by_rank(layout.mesh)[order]
            code = code * len(partition(dim).parts) + parts[:, d]
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    return _Classes(at[order], np.argsort(by_first)[number], parts[first[by_first]])


def _in_common(a: Layout, b: Layout, rows: Ints, columns: Ints) -> Ints:
    """Elements that classes of `a` and classes of `b`, given by their parts, have in common."""
    out = np.ones((len(rows), len(columns)), np.int64)
    for d, (x, y) in enumerate(zip(a.dims, b.dims, strict=True)):
        out *= overlap_table(partition(x), partition(y))[rows[:, d, None], columns[:, d]]
    return out


def overlap_table(source: Partition, target: Partition) -> Ints:
    """How many positions each source part and each destination part share: int64 (source parts, destination parts)."""
    if len(source.parts) == 1 and source.parts == target.parts:
        return np.array([[source.parts[0].size]], np.int64)
    start, stop, _, p = spans(source.parts)
    begin, end, _, q = spans(target.parts)
    cuts = np.unique(np.concatenate((start, stop, begin, end)))
    atom, span = ranges(np.searchsorted(cuts, start), np.searchsorted(cuts, stop))
    order = np.argsort(atom, kind="stable")
    atom, part = atom[order], p[span[order]]
    other, its = ranges(np.searchsorted(cuts, begin), np.searchsorted(cuts, end))
    at, of = ranges(np.searchsorted(atom, other, "left"), np.searchsorted(atom, other, "right"))
    out = np.zeros((len(source.parts), len(target.parts)), np.int64)
    np.add.at(out, (part[at], q[its[of]]), np.diff(cuts)[atom[at]])
    return out


def _allowed(pairs: Iterable[Pair], ranks: Ints) -> Bools | None:
    """Which new name (row) each old one (column) may get; None for any. No rank leaves a group of `_bound`."""
    groups: dict[bytes, Ints] = {}
    for a, b in pairs:
        axes = _bound(a, b)
        if axes:
            group = np.full(len(ranks), -1)
            group[np.searchsorted(ranks, np.array(b.mesh.ranks))] = b.mesh.coordinate(axes)
            groups[group.tobytes()] = group
    if not groups:
        return None
    _, number = np.unique(np.stack(list(groups.values())), axis=1, return_inverse=True)
    return np.equal.outer(number.reshape(-1), number.reshape(-1))


def _bound(a: Layout, b: Layout) -> tuple[str, ...]:
    """The destination axes on which a rank has to keep its coordinate: those that pass through, all where pinned."""
    if _pinned(a, b):
        return tuple(b.mesh.shape)
    return tuple(name for _, axes in reduction(a, b).matched for name in axes)


def _pinned(a: Layout, b: Layout) -> bool:
    """Whether what a rank receives depends on the names of others: a reduction is left to be chosen, or could match."""
    rule = reduction(a, b)
    through = {name for _, axes in rule.matched for name in axes}
    left = any(name not in through and b.mesh.axis_size(name) > 1 for name, _ in b.partial)
    return left and bool(rule.folded or rule.matched or rule.chosen)


def _assigned(common: Ints, allowed: Bools | None) -> Ints:
    """The new place of each old one; exact where the weights are below 2**53, which rounding cannot make infeasible."""
    stay = np.arange(len(common))
    free = common if allowed is None else np.where(allowed, common, 0)
    if not len(common) or _kept(common, stay) == sum(free.max(axis=0).tolist()):
        return stay
    unit = int(np.gcd.reduce(np.unique(common)))
    weight = (common // unit).astype(np.float64) * (len(common) + 1)
    weight[stay, stay] += 1
    if allowed is not None:
        weight[~allowed] = -np.inf
    new, old = _solver()(weight, maximize=True)
    return new[np.argsort(old)]


def _solver() -> Callable[..., tuple[Ints, Ints]]:
    try:
        return cast(
            Callable[..., tuple[Ints, Ints]],
            importlib.import_module("scipy.optimize").linear_sum_assignment,
        )
    except ModuleNotFoundError:
        raise PlanError(
            "relabel solves a linear assignment with scipy, which is not installed; pip install 'shardmath[relabel]'"
        ) from None


def _kept(common: Ints, new: Ints) -> int:
    """Bytes in place where old place i becomes new[i]; an exact sum."""
    return sum(common[new, np.arange(len(new))].tolist())
