"""Relabel: which destination rank becomes which, so that the most bytes stay where they are.

1. A destination names coordinates by ranks. Which rank has which coordinate is often free; `relabel`
   chooses a permutation of all ranks of the destination, one for all tensors, that maximises the
   bytes that need not move, of those that rule 4 allows: where nothing is Partial, of all.
2. What source rank s and destination coordinate r have in common is a product over dimensions of how
   many positions their parts share, from one small table a dimension; windows and tensors add up. No
   loop is over rank pairs.
3. The best permutation is a linear assignment, solved by scipy in floats; totals are exact integers.
   It is never worse than the ranks as they are, which are kept where nothing is saved; of equal
   permutations one that keeps more ranks is preferred. Ties beyond that are scipy's, so ranks that
   each relabel need one version of it, or one of them relabels for all.
4. Addends: a rank that is owed the sum keeps its own addend. Where Partial axes pass through, only
   ranks of one addend change places. The ranks of a destination that otherwise waits for a reduction
   keep their names: which of them receives is the plan's choice, so what a name saves there is not a
   sum over ranks, and another permutation may save more. The bytes that `plan` receives in all drop
   by exactly `saving`, with Partial as without.

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
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast, overload

import numpy as np

from shardmath.algebra.overlay import overlap_table
from shardmath.algebra.partition import partition
from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.layouts.edits import relabelled
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import Side, Windows, named
from shardmath.plans.reduction import reduction

__all__ = ["Relabelling", "relabel"]

Pair: TypeAlias = tuple[Layout, Layout]
"""A source and a destination window of one tensor."""

MOST_BYTES = 1 << 62
"""Of all tensors; sums of what they have in common stay exact in 64 bits."""


@public
@dataclass(frozen=True, slots=True)
class Relabelling:
    """New names for the ranks of a destination: `pairs` (old, new), ascending, are a permutation of
    them.

    `kept_before` and `kept_after` are the bytes that stay where they are under the old and the new
    names.
    """

    pairs: tuple[tuple[int, int], ...]
    kept_before: int
    kept_after: int

    def __str__(self) -> str:
        moved = sum(old != new for old, new in self.pairs)
        renamed = f"{moved} of {len(self.pairs)} ranks renamed"
        kept = f"{self.kept_before} -> {self.kept_after} B"
        return f"{renamed}, {self.saving} B more kept in place ({kept})"

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
            return {name: _rename(name, held, ranks) for name, held in dst.items()}
        return _rename("", dst, ranks)


def _rename(name: str, held: Windows, ranks: Mapping[int, int]) -> Windows:
    """One tensor's windows under the new names."""
    windows = tuple(relabelled(layout, ranks) for layout in _list_windows(name, held))
    return windows if isinstance(held, tuple) else windows[0]


def relabel(src: Side, dst: Side) -> Relabelling:
    """The permutation of the destination's ranks under which `plan(src, dst)` has the fewest bytes
    to move.

    Where the destination is Partial: of the permutations that leave its addends where they are (rule
    4). `saving` is exact in either case. `src` and `dst` are what `plan` takes. Takes 16 bytes for
    each pair of destination ranks. Raises PlanError where names, shapes or dtypes differ, where
    reductions do, and where scipy is needed and not installed.
    """
    pairs = _count_pairs(src, dst)
    ranks = _list_ranks(pairs)
    common = np.zeros((len(ranks), len(ranks)), np.int64)
    for shared in _compare(pairs, ranks):
        _add(common, shared)
    stay = np.arange(len(ranks))
    new = _assign(common, _find_allowed(pairs, ranks))
    before = _count_kept(common, stay)
    after = _count_kept(common, new)
    if after <= before:
        new, after = stay, before
    renamed = ranks[new].tolist()
    names = zip(ranks.tolist(), renamed, strict=True)
    return Relabelling(tuple(names), before, after)


def _list_ranks(pairs: Iterable[Pair]) -> Ints:
    """The destination's ranks, ascending."""
    ranks: set[int] = set()
    for _, dst in pairs:
        ranks.update(dst.mesh.ranks)
    return np.array(sorted(ranks), np.int64)


def _list_windows(name: str, held: object) -> tuple[Layout, ...]:
    """One tensor's windows as a tuple."""
    windows = held if isinstance(held, tuple) else (held,)
    if not windows or not all(isinstance(layout, Layout) for layout in windows):
        raise PlanError(f"tensor {name!r} is {held!r}; give a Layout or a tuple of Layouts")
    return windows


def _count_pairs(src: Side, dst: Side) -> Counter[Pair]:
    """How many tensors have each pair of a source and a destination window."""
    here, there = named(src, dst)
    pairs: Counter[Pair] = Counter()
    total = 0
    for name, held in here.items():
        for a in _list_windows(name, held):
            for b in _list_windows(name, there[name]):
                _check_alike(name, a, b)
                pairs[a, b] += 1
                total += math.prod(a.shape) * a.itemsize
    if total > MOST_BYTES:
        raise PlanError(
            f"the tensors have {total} bytes, which is more than {MOST_BYTES}; "
            f"relabel fewer at once"
        )
    return pairs


def _check_alike(name: str, a: Layout, b: Layout) -> None:
    """Both windows hold one tensor."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (a, b))
        raise PlanError(
            f"tensor {name!r}: {here} here, {there} there; "
            f"both sides hold one tensor of one shape and dtype"
        )


class _Classes(NamedTuple):
    """Ranks of a layout: their places among the destination's ranks, their classes, and the parts of
    each class.

    A class is a part of every dimension. Classes are numbered by their first ranks, which says
    nothing of parts.
    """

    place: Ints
    number: Ints
    parts: Ints


class _Shared(NamedTuple):
    """Source ranks, destination ranks and the bytes that their classes have in common: (source
    classes, destination classes)."""

    rows: _Classes
    columns: _Classes
    table: Ints

    @property
    def key(self) -> tuple[bytes, ...]:
        """Ranks and their classes, as something that can be looked up."""
        columns = *self.rows[:2], *self.columns[:2]
        return tuple(column.tobytes() for column in columns)


def _compare(pairs: Counter[Pair], ranks: Ints) -> Iterable[_Shared]:
    """What the windows of each pair have in common; pairs of equal classes are added up."""
    layouts = set(itertools.chain.from_iterable(pairs))
    place = _place_ranks(layouts, ranks)
    classes = {layout: _classify(layout, place) for layout in layouts}
    out: dict[tuple[bytes, ...], _Shared] = {}
    for (a, b), count in pairs.items():
        rows = classes[a]
        columns = classes[b]
        if not len(rows.place) or _is_pinned(a, b):
            continue
        elements = _count_common(a, b, rows.parts, columns.parts)
        nbytes = elements * (count * a.itemsize)
        shared = _widen(_Shared(rows, columns, nbytes))
        key = shared.key
        if key in out:
            nbytes = shared.table + out[key].table
            shared = shared._replace(table=nbytes)
        out[key] = shared
    return out.values()


def _place_ranks(layouts: Iterable[Layout], ranks: Ints) -> Ints:
    """The place of each rank of the layouts among these, -1 for others."""
    last = max((max(layout.mesh.ranks) for layout in layouts), default=0)
    place = np.full(1 + last, -1)
    place[ranks] = np.arange(len(ranks))
    return place


def _widen(shared: _Shared) -> _Shared:
    """The same with a class a rank on the side of more classes: more tables are of the same classes,
    and none larger than all ranks by the fewer classes."""
    rows, columns, table = shared
    if table.shape[0] < table.shape[1]:
        table = table.take(columns.number, axis=1)
        return _Shared(rows, _set_apart(columns), table)
    table = table.take(rows.number, axis=0)
    return _Shared(_set_apart(rows), columns, table)


def _set_apart(classes: _Classes) -> _Classes:
    """Every rank in a class of its own."""
    return classes._replace(number=np.arange(len(classes.place)))


def _add(common: Ints, shared: _Shared) -> None:
    """Add what classes have in common to what ranks have."""
    rows, columns, table = shared
    block = table.take(rows.number, axis=0)
    block = block.take(columns.number, axis=1)
    row_span = _span(rows.place)
    column_span = _span(columns.place)
    into = common[row_span, column_span]
    # Ranks that lie together are a view, five times as fast.
    if block.shape == into.shape:
        into += block
    else:
        common[np.ix_(rows.place, columns.place)] += block


def _span(place: Ints) -> slice:
    """From the first of ascending places to the last."""
    return slice(int(place[0]), int(place[-1]) + 1)


def _classify(layout: Layout, place: Ints) -> _Classes:
    """The layout's ranks that the destination has; `place` is the place of each, -1 for others."""
    ranks = np.array(layout.mesh.ranks, np.int64)
    at = place[ranks]
    absent = int((at < 0).sum())
    order = np.argsort(at)[absent:]
    shape = len(order), layout.ndim
    parts = np.zeros(shape, np.int64)
    # A number of mixed radix, of which each dimension has one digit, tells classes apart.
    code = np.zeros(len(order), np.int64)
    for d, dim in enumerate(layout.dims):
        divided = partition(dim)
        if len(divided.parts) > 1:
            part = divided.by_rank(layout.mesh)[order]
            parts[:, d] = part
            code = code * len(divided.parts) + part
    _, first, number = np.unique(code, return_index=True, return_inverse=True)

    by_first = np.argsort(first)
    renumbered = np.argsort(by_first)[number]
    return _Classes(at[order], renumbered, parts[first[by_first]])


def _count_common(a: Layout, b: Layout, rows: Ints, columns: Ints) -> Ints:
    """Elements that classes of `a` and classes of `b`, given by their parts, have in common."""
    count = np.ones((len(rows), len(columns)), np.int64)
    for d in range(a.ndim):
        here = partition(a.dims[d])
        there = partition(b.dims[d])
        row = rows[:, d, None]
        column = columns[:, d]
        count *= overlap_table(here, there)[row, column]
    return count


def _find_allowed(pairs: Iterable[Pair], ranks: Ints) -> Bools | None:
    """Which new name (row) each old one (column) may get; None for any. No rank leaves a group of
    `_find_bound`."""
    groups: dict[bytes, Ints] = {}
    for a, b in pairs:
        axes = _find_bound(a, b)
        if axes:
            group = np.full(len(ranks), -1)
            place = np.searchsorted(ranks, np.array(b.mesh.ranks))
            group[place] = b.mesh.coordinate(axes)
            groups[group.tobytes()] = group
    if not groups:
        return None
    # Ranks that are in the same group of every grouping get one number.
    together = np.stack(list(groups.values()))
    _, number = np.unique(together, axis=1, return_inverse=True)
    number = number.reshape(-1)
    return np.equal.outer(number, number)


def _find_bound(a: Layout, b: Layout) -> tuple[str, ...]:
    """The destination axes on which a rank has to keep its coordinate: those that pass through, all
    where pinned."""
    if _is_pinned(a, b):
        return tuple(b.mesh.shape)
    return tuple(name for _, axes in reduction(a, b).matched for name in axes)


def _is_pinned(a: Layout, b: Layout) -> bool:
    """Whether what a rank receives depends on the names of others: a reduction is left to be chosen,
    or could match."""
    rule = reduction(a, b)
    if not (rule.folded or rule.matched or rule.chosen):
        return False
    through: set[str] = set()
    for _, axes in rule.matched:
        through.update(axes)
    left = [name for name, _ in b.partial if name not in through]
    return any(b.mesh.axis_size(name) > 1 for name in left)


def _assign(common: Ints, allowed: Bools | None) -> Ints:
    """The new place of each old one.

    The best one where the weights are below 2**53. Beyond, floats round what two ranks have in
    common, and the best permutation may be missed by as much; another one is allowed all the same.
    """
    count = len(common)
    stay = np.arange(count)
    free = common if allowed is None else np.where(allowed, common, 0)
    if not count or _count_kept(common, stay) == sum(free.max(axis=0).tolist()):
        return stay
    unit = int(np.gcd.reduce(np.unique(common)))
    # Of equal permutations the one that keeps more ranks, which weigh less than a unit together.
    weight = (common // unit).astype(np.float64) * (count + 1)
    weight[stay, stay] += 1
    if allowed is not None:
        weight[~allowed] = -np.inf
    new, old = _load_solver()(weight, maximize=True)
    return new[np.argsort(old)]


_Solver: TypeAlias = Callable[..., tuple[Ints, Ints]]


def _load_solver() -> _Solver:
    """scipy's linear assignment, which the core does without until it is needed."""
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ModuleNotFoundError:
        raise PlanError(
            "relabel solves a linear assignment with scipy, which is not installed; "
            "pip install 'shardmath[relabel]'"
        ) from None
    return cast(_Solver, optimize.linear_sum_assignment)


def _count_kept(common: Ints, new: Ints) -> int:
    """Bytes in place where old place i becomes new[i]; an exact sum."""
    return sum(common[new, np.arange(len(new))].tolist())
