"""Placements: the laws of every placement, by name.

A law is a function with a one-line docstring that asserts; one law, one cause of failure. It takes
a placement, the length `n` that it divides, and the number of parts, `count`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.layouts.algebra.cuts import UserCut
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Placement, check_protocol
from shardmath.plans.plan import plan
from shardmath.proofs.verify import verify
from shardmath.testing.oracle import distribute, run

__all__ = ["PLACEMENT_LAWS", "check_placement"]


def _require(holds: bool, placement: Placement, n: int, count: int, what: str) -> None:
    """Raise an AssertionError that names the case, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{placement}.split({n}, {count}): {what}")


def _require_none(positions: Ints, placement: Placement, n: int, count: int, holders: str) -> None:
    """Raise an AssertionError that names the first of these positions, if any, and what holds it."""
    if len(positions):
        what = f"position {positions[0]} is in {holders}"
        _require(False, placement, n, count, what)


def _list_positions(placement: Placement, n: int, count: int) -> Ints:
    """The positions of all parts, ascending, holes left out."""
    indices = [np.zeros(0, np.int64)]
    for part in placement.split(n, count):
        indices.append(part.indices())
    index = np.concatenate(indices)
    held = index[index >= 0]
    return np.sort(held)


def in_bounds(placement: Placement, n: int, count: int) -> None:
    """Check that `placement.split(n, count)` returns `count` valid parts (Runs), with indices inside a dimension of
    length `n`."""
    UserCut(placement, count).split(n)


def disjoint(placement: Placement, n: int, count: int) -> None:
    """Check that no position is in two parts, unless the placement says that its parts overlap."""
    if getattr(placement, "overlaps", False):
        return
    ascending = _list_positions(placement, n, count)
    later = ascending[1:]
    repeats = later == ascending[:-1]
    holders = "two parts; give it to one, or set overlaps = True"
    _require_none(later[repeats], placement, n, count, holders)


def covering(placement: Placement, n: int, count: int) -> None:
    """Check that every position is in some part."""
    held = _list_positions(placement, n, count)
    lost = np.setdiff1d(np.arange(n), held)
    _require_none(lost, placement, n, count, "no part; give it to one")


def hashable(placement: Placement, n: int, count: int) -> None:
    """Check that a pickled copy of the placement is equal, has an equal hash, and divides in the same way."""
    copied = _copy(placement, n, count)
    same = copied == placement and hash(copied) == hash(placement)
    _require(same, placement, n, count, "a copy is not equal to it; make it a frozen dataclass")
    parts = placement.split(n, count)
    splits_alike = copied.split(n, count) == parts
    what = "a copy of the placement splits differently; compute parts only from n and parts"
    _require(splits_alike, placement, n, count, what)


def _copy(placement: Placement, n: int, count: int) -> Placement:
    """The placement, pickled and unpickled."""
    try:
        pickled = pickle.dumps(placement)
        copied: Placement = pickle.loads(pickled)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"{placement}.split({n}, {count}): it cannot be pickled: {error}"
        raise AssertionError(f"{what}; define its class in a module") from error
    return copied


def composes(placement: Placement, n: int, count: int) -> None:
    """Check that a layout that shards a dimension of length `n` over `count` ranks by `placement` gives rank r exactly
    part r of `placement.split(n, count)`."""
    layout = _divide(placement, n, count)
    parts = placement.split(n, count)
    for rank, part in enumerate(parts):
        (held,) = layout.runs(rank)
        _require(held == part, placement, n, count, "a layout of it holds other positions")


def _divide(placement: Placement, n: int, count: int) -> Layout:
    """A tensor of one dimension divided by the placement."""
    mesh = Mesh(a=count)
    shape = (n,)
    at_zero = placement if placement.dim in (0, -1) else _OnDimensionZero(placement)
    spec = {"a": at_zero}
    return Layout(shape, mesh, spec)


@dataclass(frozen=True)
class _OnDimensionZero:
    """A placement seen on dimension 0."""

    of: Placement
    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return self.of.split(n, parts)


def moves(placement: Placement, n: int, count: int) -> None:
    """Check moves of a tensor of length `n` between two layouts: divided into `count` parts by `placement`, and whole
    on each rank. `verify` must accept the plan in each direction, and each element must arrive where its layout
    says."""
    split = _divide(placement, n, count)
    gathered = Layout((n,), split.mesh, "n")
    _require_kept(placement, n, count, split, gathered)
    _require_kept(placement, n, count, gathered, split)


def _require_kept(placement: Placement, n: int, count: int, src: Layout, dst: Layout) -> None:
    """Raise AssertionError unless a plan is proved, and gives every rank the positions of its layout."""
    planned = plan(src, dst)
    verify(planned)
    positions = [np.arange(n, dtype=float)]
    out = run(planned, distribute(src, positions))
    expected = distribute(dst, positions)
    what = f"moving {src.text} to {dst.text} changes values"
    for rank, array in expected.items():
        kept = np.array_equal(out[rank], array)
        _require(kept, placement, n, count, what)


PLACEMENT_LAWS = (in_bounds, disjoint, covering, hashable, composes, moves)
"""The laws that every placement keeps, a tuple of functions law(placement, n, parts) that raise an error if one is
broken; `check_placement` calls all."""


def check_placement(placement: Placement, n: int, parts: int) -> None:
    """Check that a custom placement obeys all laws in PLACEMENT_LAWS. For example, the `parts` parts into which it
    divides length `n` must not overlap, and must together cover all positions.

    Raises PlacementError if no Layout can be made of it, AssertionError if it breaks another law.
    """
    check_protocol(placement)
    for law in PLACEMENT_LAWS:
        law(placement, n, parts)
