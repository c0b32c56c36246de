"""Reduction: the reduction that Partial axes ask of a move from one layout to another.

Partial is one more dimension, whose coordinate is the addend. So one law covers copies and
reductions: *each destination replica receives each source addend of each element exactly once.*

1. At the source, Replicate means that any one holder sends, and Partial that all contribute; at the
   destination, Replicate means that all receive, and Partial (sum, product) that any one receives
   while the others stay at the operation's identity.
2. Axes that are Partial with the same operation and the same ranks on both sides pass through.
3. The meaning: start at the identity (max, min: at the first addend) and fold left in mesh order. avg
   is sum with a divisor. For a destination that is Partial avg, max or min all ranks receive, as for
   Replicate: equal addends reduce to their value.
4. What differs between operations is a row of `base.operations`.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(dp=2, tp=2)
>>> find_reduction(Layout((4,), mesh, "n {sum: dp}"), Layout((4,), mesh, "(dp n)")).folded
('dp',)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.errors import PlanError
from shardmath.base.operations import OPERATIONS
from shardmath.layouts.layout import Layout

__all__ = ["Reduction", "check_arithmetic", "find_reduction", "identity_of"]

Axes: TypeAlias = tuple[str, ...]
"""Axes of one mesh, flattened into one coordinate if there are several."""


Matched: TypeAlias = tuple[Axes, Axes]
"""Axes of the source and of the destination along which addends pass through."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A rule that turns addends (partial values) along a source's Partial axes into a destination's values or addends.

    Along `matched` (source axes, destination axes), flattened, addends pass through; `folded` source axes
    hold the addends that are reduced; of destination ranks that differ only on `chosen` axes one
    receives, and all of them start at `fill`.
    """

    op: str | None = None
    matched: tuple[Matched, ...] = ()
    folded: Axes = ()
    chosen: Axes = ()
    addends: int = 1
    divisor: int = 1
    fill: complex | None = None

    def op_of(self, addend: int) -> str:
        """Return the operation that puts partial value number `addend` into the result: "copy" or a fold such as "sum".

        The first addend is copied unless the result starts at `fill`; without other addends it always is.
        """
        if self.op is None or self.addends == 1:
            return "copy"
        if addend == 0 and self.fill is None:
            return "copy"
        return OPERATIONS[self.op].fold

    def by_ranks(self, src: Layout, dst: Layout) -> tuple[object, ...]:
        """Return a dict key for this reduction from `src` to `dst`. Keys are equal if the operation is the same and its
        partial values lie on the same ranks, whatever the names and order of mesh axes."""
        if not (self.matched or self.folded or self.chosen):
            return ()
        folded = _list_coordinates(src.mesh.ranks_along(self.folded))
        chosen = _list_coordinates(dst.mesh.ranks_along(self.chosen))
        matched = []
        # The destination has the same ranks along its matched axes.
        for src_axes, _ in self.matched:
            groups = src.mesh.ranks_along(src_axes)
            ascending = tuple(map(sorted, groups))
            matched.append(ascending)
        # Lists of ranks cannot be in a key, but their text can.
        return self.op, self.addends, folded, chosen, repr(sorted(matched))


def _list_coordinates(groups: Iterable[frozenset[int]]) -> tuple[tuple[int, int], ...]:
    """(rank, number of its group), by rank."""
    return tuple(sorted((rank, i) for i, ranks in enumerate(groups) for rank in ranks))


def find_reduction(src: Layout, dst: Layout) -> Reduction:
    """Find the Reduction that a move from `src` to `dst` needs, from the Partial axes of both.

    Raises PlanError if the operations of both sides differ, or if the dtype does not have the operation.
    """
    if not src.partial and not dst.partial:
        return Reduction()
    matched = _match(src, dst)
    folded, dst_unmatched = _find_unmatched(src, dst, matched)
    op = src.op if folded else dst.op
    if op is None:
        return Reduction(matched=matched)
    operation = OPERATIONS[op]
    chosen = dst_unmatched if operation.one_receives else ()
    if not folded and not chosen:
        return Reduction(op, matched)
    check_arithmetic(op, src.dtype)
    sizes = map(src.mesh.axis_size, folded)
    addends = math.prod(sizes)
    return Reduction(
        op=op,
        matched=matched,
        folded=folded,
        chosen=chosen,
        addends=addends,
        divisor=addends if operation.divides else 1,
        fill=identity_of(op, src.dtype) if chosen else None,
    )


def _find_unmatched(src: Layout, dst: Layout, matched: tuple[Matched, ...]) -> tuple[Axes, Axes]:
    """The source's and the destination's addend axes that do not pass through."""
    folded = _without(src.addend_axes, [axes for axes, _ in matched])
    dst_unmatched = _without(dst.addend_axes, [axes for _, axes in matched])
    if folded and dst_unmatched and src.op != dst.op:
        raise PlanError(
            f"cannot turn Partial({src.op!r}) into Partial({dst.op!r}): {src} to {dst}; "
            f"plan to Replicate first, and from there to Partial"
        )
    return folded, dst_unmatched


def _without(axes: Axes, others: list[Axes]) -> Axes:
    """The axes that are in none of the others."""
    through = {name for other in others for name in other}
    return tuple(name for name in axes if name not in through)


def _match(src: Layout, dst: Layout) -> tuple[Matched, ...]:
    """Pairs of Partial axes, flattened, along which source and destination have the same ranks at
    every coordinate.

    All axes of both sides together are one pair if possible; otherwise single axes are compared.
    """
    src_axes = src.addend_axes
    dst_axes = dst.addend_axes
    if src.op != dst.op or not src_axes or not dst_axes:
        return ()
    if src.mesh.ranks_along(src_axes) == dst.mesh.ranks_along(dst_axes):
        return ((src_axes, dst_axes),)
    by_ranks = {dst.mesh.ranks_along((name,)): name for name in dst_axes}
    pairs = []
    for name in src_axes:
        ranks = src.mesh.ranks_along((name,))
        other = by_ranks.get(ranks)
        if other is not None:
            pairs.append(((name,), (other,)))
    return tuple(pairs)


def check_arithmetic(op: str, dtype: str) -> None:
    """Raise PlanError if the reduction `op`, such as "sum", has no meaning for `dtype`, a dtype's name such as
    "float32"."""
    why = OPERATIONS[op].refuse(dtype)
    if why:
        raise PlanError(f"{op} of {dtype}{why}")


def identity_of(op: str, dtype: str) -> complex:
    """Return the value from which a reduction by `op` starts, such as 1 for "product". `op` must not be "max" or "min",
    which start from their first partial value."""
    identity = OPERATIONS[op].identity
    assert identity is not None, f"{op} starts from its first addend"
    return identity(dtype)
