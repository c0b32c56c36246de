"""Relabel: new names for the destination's ranks, so that the most bytes stay where they are.

1. A destination names coordinates by ranks. Which rank has which coordinate is often free; `relabel`
   chooses a permutation of all ranks of the destination, one for all tensors, that maximizes the
   bytes that need not move, of those that rule 4 allows: where nothing is Partial, of all.
2. What source rank s and destination coordinate r have in common is counted by `common`.
3. The best permutation is a linear assignment, solved by scipy in floats; totals are exact integers.
   It is never worse than the ranks as they are, which are kept where nothing is saved; of equal
   permutations one that keeps more ranks is preferred. Ties beyond that are scipy's, so ranks that
   each relabel need one version of it, or one of them relabels for all.
4. Addends: a rank that is owed the sum keeps its own addend. Where Partial axes pass through, only
   ranks of one addend change places. The ranks of a destination that otherwise waits for a reduction
   keep their names: which of them receives is the plan's choice, so what a name saves there is not a
   sum over ranks, and another permutation may save more. The bytes that `plan` receives in all drop
   by exactly `saving`, with Partial as without.

>>> from shardmath.layouts.algebra.mesh import Mesh
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
from typing import TypeAlias, cast, overload

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.layouts.edits import relabeled
from shardmath.layouts.holdings import LayoutOrWindows, label, windows_of
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import Side, describe_form, pair_by_name
from shardmath.plans.reduction import Reduction, find_reduction
from shardmath.plans.relabeling.common import Pair, count_common

__all__ = ["Relabeling", "relabel"]

MOST_BYTES = 1 << 62
"""Most bytes of all tensors: sums of common bytes stay exact in 64 bits."""


@public
@dataclass(frozen=True, slots=True)
class Relabeling:
    """A renumbering (permutation) of a destination's ranks: `pairs` has a pair (old number, new number) for each rank,
    by ascending old number.

    `kept_before` and `kept_after` are the bytes that stay where they are under the old and the new
    numbers.
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
        """A dict from each rank's old number to its new number, as `relabeled` and `Mesh.relabel` take it."""
        return dict(self.pairs)

    @property
    def saving(self) -> int:
        """The number of bytes that a plan saves by using the new numbers."""
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
    def apply(self, dst: Mapping[str, LayoutOrWindows]) -> dict[str, LayoutOrWindows]: ...
    def apply(self, dst: Side) -> Side:
        """Return the destination `dst` (a Layout, windows, or a mapping of either) with its ranks renumbered.

        Raises PlanError for anything else.
        """
        ranks = self.ranks
        if isinstance(dst, Mapping):
            return {name: _rename(name, layouts, ranks) for name, layouts in dst.items()}
        return _rename("", dst, ranks)


def _rename(name: str, layouts: LayoutOrWindows, ranks: Mapping[int, int]) -> LayoutOrWindows:
    """The Layout or the windows of one tensor under the new names."""
    before = windows_of(layouts, name, PlanError)
    windows = [relabeled(layout, ranks) for layout in before]
    if isinstance(layouts, tuple):
        return tuple(windows)
    return windows[0]


def relabel(src: Side, dst: Side) -> Relabeling:
    """Find the renumbering of the ranks of `dst` with which a plan from `src` moves the fewest bytes. If `dst` is
    Partial, a rank is only given the number of a rank that has the same partial value.

    `src` and `dst` are as in `plan`. `saving`, in bytes, is exact. The search takes 16 bytes of memory per pair of
    destination ranks. Raises PlanError if names, shapes, dtypes or reductions differ, and if scipy is needed and not
    installed.
    """
    pairs = _count_pairs(src, dst)
    ranks = _list_ranks(pairs)
    # A pinned pair keeps its ranks' names, so it saves nothing.
    unpinned_pairs = {}
    for pair, count in pairs.items():
        if not _is_pinned(*pair):
            unpinned_pairs[pair] = count
    common = count_common(unpinned_pairs, ranks)
    allowed = _find_allowed(pairs, ranks)
    stay = np.arange(len(ranks))
    new = _assign(common, allowed)
    before = _count_kept(common, stay)
    after = _count_kept(common, new)
    if after <= before:
        new, after = stay, before
    renamed = ranks[new].tolist()
    names = zip(ranks.tolist(), renamed, strict=True)
    return Relabeling(tuple(names), before, after)


def _list_ranks(pairs: Iterable[Pair]) -> Ints:
    """The destination's ranks, ascending."""
    ranks: set[int] = set()
    for _, dst in pairs:
        ranks.update(dst.mesh.ranks)
    return np.array(sorted(ranks), np.int64)


def _count_pairs(src: Side, dst: Side) -> Counter[Pair]:
    """How many tensors have each pair of a source and a destination window."""
    src_by_name, dst_by_name = pair_by_name(src, dst)
    pairs: Counter[Pair] = Counter()
    total = 0
    for name, source in src_by_name.items():
        sources = windows_of(source, name, PlanError)
        targets = windows_of(dst_by_name[name], name, PlanError)
        for a, b in itertools.product(sources, targets):
            _check_alike(name, a, b)
            pairs[a, b] += 1
            total += math.prod(a.shape) * a.itemsize
    if total > MOST_BYTES:
        raise PlanError(
            f"the tensors have {total} bytes, which is more than {MOST_BYTES}; "
            f"relabel fewer tensors at once"
        )
    return pairs


def _check_alike(name: str, a: Layout, b: Layout) -> None:
    """Raise PlanError unless both windows hold one tensor."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise PlanError(
            f"{label(name)} is {describe_form(a)} at the source and {describe_form(b)} at the "
            f"destination; give both sides one shape and dtype"
        )


def _find_allowed(pairs: Iterable[Pair], ranks: Ints) -> Bools | None:
    """Whether each old rank (column) may get each new name (row); None if all may get any name.

    A rank keeps its coordinates on the axes that `_find_bound` returns. `ranks` are all old ranks, ascending.
    """
    groupings: dict[bytes, Ints] = {}
    for a, b in pairs:
        axes = _find_bound(a, b)
        if not axes:
            continue
        # Ranks outside this mesh are a group too: they cannot take names inside it.
        group = np.full(len(ranks), -1)
        place = np.searchsorted(ranks, b.mesh.ranks)
        group[place] = b.mesh.coordinate(axes)
        key = group.tobytes()
        groupings[key] = group
    if not groupings:
        return None
    # Ranks that are in the same group of every grouping get one number.
    distinct = list(groupings.values())
    together = np.stack(distinct)
    _, number = np.unique(together, axis=1, return_inverse=True)
    number = number.reshape(-1)
    return np.equal.outer(number, number)


def _find_bound(a: Layout, b: Layout) -> tuple[str, ...]:
    """The destination axes on which a rank must keep its coordinate: all if pinned, else those that pass through."""
    if _is_pinned(a, b):
        return tuple(b.mesh.shape)
    return _find_passing(find_reduction(a, b))


def _find_passing(rule: Reduction) -> tuple[str, ...]:
    """The destination's axes along which addends pass through."""
    return tuple(name for _, axes in rule.matched for name in axes)


def _is_pinned(a: Layout, b: Layout) -> bool:
    """Whether the bytes that a rank receives depend on other ranks' names, since the plan chooses who receives."""
    rule = find_reduction(a, b)
    # Without Partial axes, each rank receives what it needs, whatever the other ranks are called.
    if not (rule.folded or rule.matched or rule.chosen):
        return False
    passing_axes = _find_passing(rule)
    unmatched_axes = [name for name, _ in b.partial if name not in passing_axes]
    return any(b.mesh.axis_size(name) > 1 for name in unmatched_axes)


def _assign(common: Ints, allowed: Bools | None) -> Ints:
    """The new place of each old place.

    The places are the best permutation if all weights are below 2**53. Larger weights are rounded as floats,
    and the permutation may keep fewer bytes than the best, by as many as rounding changes. In any case it is
    a permutation of allowed names.
    """
    count = len(common)
    stay = np.arange(count)
    gains = common if allowed is None else np.where(allowed, common, 0)
    # No permutation keeps more than each old place's best name does by itself.
    most = gains.max(axis=0, initial=0)
    bound = sum(most.tolist())
    if _count_kept(common, stay) == bound:
        return stay
    # In units of their greatest common divisor, more sums are exact in floats.
    sizes = np.unique(common)
    unit = np.gcd.reduce(sizes)
    units = (common // unit).astype(np.float64)
    # Of equal permutations the one that keeps more ranks, which weigh less than a unit together.
    weight = units * (count + 1)
    weight[stay, stay] += 1
    if allowed is not None:
        weight[~allowed] = -np.inf
    solve = _load_solver()
    new, old = solve(weight, maximize=True)
    return new[np.argsort(old)]


_Solver: TypeAlias = Callable[..., tuple[Ints, Ints]]


def _load_solver() -> _Solver:
    """scipy's linear assignment, which the core does without until it is needed."""
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ModuleNotFoundError as error:
        # A scipy that is there may lack something itself.
        if error.name not in ("scipy", "scipy.optimize"):
            raise
        raise PlanError(
            "relabel solves a linear assignment with scipy, which is not installed; "
            "run pip install 'shardmath[relabel]'"
        ) from None
    return cast(_Solver, optimize.linear_sum_assignment)


def _count_kept(common: Ints, new: Ints) -> int:
    """Bytes in place where old place i becomes new[i]; an exact sum."""
    old = np.arange(len(new))
    kept = common[new, old]
    return sum(kept.tolist())
