"""Reduction: what Partial asks of a move from one layout to another.

Partial is one more dimension, whose coordinate is the addend. So one law covers copies and reductions:
*each destination replica receives each source addend of each element exactly once.*

1. As a source, Replicate means that any one holder sends and Partial that all contribute; as a destination, Replicate
   means that all receive and Partial (sum, product) that any one does, the others staying at the operation's identity.
2. Axes that are Partial with the same operation and the same ranks on both sides pass through.
3. The meaning: start at the identity (max, min: at the first addend) and fold left in mesh order. avg is sum with a
   divisor. To Partial avg, max and min everybody receives, as to Replicate, since the value itself is right there.
4. The identity of sum is -0.0, because +0.0 would turn -0.0 into +0.0.

>>> from shardmath.algebra.mesh import Mesh
>>> mesh = Mesh(dp=2, tp=2)
>>> reduction(Layout((4,), mesh, "n {sum: dp}"), Layout((4,), mesh, "(dp n)")).folded
('dp',)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardmath.algebra.mesh import Mesh
from shardmath.base.dtypes import is_bool, is_integer
from shardmath.base.errors import PlanError
from shardmath.layouts.layout import Layout

__all__ = ["Reduction", "check_arithmetic", "identity_of", "ranks_along", "reduction"]


NO_ARITHMETIC = {
    "float8_e8m0fnu": "it has no zero",
    "float4_e2m1fn_x2": "an element is two packed values",
}
"""Types that only move."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """`matched` (source axes, destination axes), flattened, pass through; `folded` source axes hold the addends that
    are reduced; of the destination ranks that differ only on `chosen` axes one receives, and they start at `fill`."""

    op: str | None = None
    matched: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    folded: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    addends: int = 1
    divisor: int = 1
    fill: complex | None = None

    def op_of(self, addend: int) -> str:
        """The operation with which the given addend enters: the first one is a copy where nothing is filled in."""
        return (
            "copy"
            if self.addends == 1 or (addend == 0 and self.fill is None)
            else str(self.op).replace("avg", "sum")
        )

    def by_ranks(self, src: Layout, dst: Layout) -> tuple[object, ...]:
        """The same in terms of ranks, which does not depend on how the axes are named or flattened."""
        if not (self.matched or self.folded or self.chosen):
            return ()
        folded = sorted(zip(src.mesh.ranks, src.mesh.coordinate(self.folded).tolist(), strict=True))
        chosen = sorted(zip(dst.mesh.ranks, dst.mesh.coordinate(self.chosen).tolist(), strict=True))
        matched = sorted(
            tuple(map(sorted, ranks_along(src.mesh, axes))) for axes, _ in self.matched
        )
        return self.op, self.addends, tuple(folded), tuple(chosen), repr(matched)


def reduction(src: Layout, dst: Layout) -> Reduction:
    """What the Partial axes of both sides mean for moving `src` to `dst`.

    Raises PlanError for two different operations, and for arithmetic that the dtype does not have.
    """
    if not src.partial and not dst.partial:
        return Reduction()
    matched = _matched(src, dst)
    through = [{name for pair in matched for name in pair[side]} for side in (0, 1)]
    folded = tuple(name for name in _addend_axes(src) if name not in through[0])
    left = tuple(name for name in _addend_axes(dst) if name not in through[1])
    if folded and left and src.op != dst.op:
        raise PlanError(
            f"cannot turn Partial({src.op!r}) into Partial({dst.op!r}): {src} to {dst}; reduce to Replicate first"
        )
    op = src.op if folded else dst.op
    chosen = left if op in ("sum", "product") else ()
    if folded or chosen:
        check_arithmetic(str(op), src.dtype)
    addends = math.prod(src.mesh.axis_size(name) for name in folded)
    fill = identity_of(str(op), src.dtype) if chosen else None
    return Reduction(op, matched, folded, chosen, addends, addends if op == "avg" else 1, fill)


def _addend_axes(layout: Layout) -> tuple[str, ...]:
    """The Partial axes that have more than one addend."""
    return tuple(name for name, _ in layout.partial if layout.mesh.axis_size(name) > 1)


def _matched(src: Layout, dst: Layout) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Pairs of Partial axes, flattened, along which source and destination have the same ranks at every coordinate.

    All axes of both sides are one pair where that is so, however spelled; otherwise axis is compared with axis.
    """
    here, there = _addend_axes(src), _addend_axes(dst)
    if src.op != dst.op or not here or not there:
        return ()
    if ranks_along(src.mesh, here) == ranks_along(dst.mesh, there):
        return ((here, there),)
    found = {ranks_along(dst.mesh, (name,)): name for name in there}
    pairs = ((name, found.get(ranks_along(src.mesh, (name,)))) for name in here)
    return tuple(((a,), (b,)) for a, b in pairs if b is not None)


def ranks_along(mesh: Mesh, axes: tuple[str, ...]) -> tuple[frozenset[int], ...]:
    """The ranks at each coordinate of the flattened axes."""
    at, ranks = mesh.coordinate(axes), np.array(mesh.ranks)
    return tuple(
        frozenset(ranks[at == i].tolist()) for i in range(math.prod(map(mesh.axis_size, axes)))
    )


def check_arithmetic(op: str, dtype: str) -> None:
    """Raise PlanError where the reduction has no meaning for the canonical dtype."""
    if op == "avg" and is_integer(dtype):
        raise PlanError(
            f"avg of {dtype} is not an integer; use sum, or cast to a floating type first"
        )
    if is_bool(dtype) and op in ("sum", "avg", "product"):
        raise PlanError(
            f"{op} of bool has no agreed meaning; use max for any, min for all, or cast to an integer type"
        )
    if dtype in NO_ARITHMETIC and op in ("sum", "avg", "product"):
        raise PlanError(
            f"{op} of {dtype} does not exist: {NO_ARITHMETIC[dtype]}; cast to a floating type first"
        )
    if dtype.startswith("complex") and op in ("max", "min"):
        raise PlanError(
            f"{op} of {dtype}: complex numbers have no order; reduce real and imaginary parts apart"
        )


def identity_of(op: str, dtype: str) -> complex:
    """What sum or product starts from."""
    if op == "product":
        return 1
    if is_integer(dtype):
        return 0
    if dtype.endswith("fnuz"):
        return 0.0
    return complex(-0.0, -0.0) if dtype.startswith("complex") else -0.0
