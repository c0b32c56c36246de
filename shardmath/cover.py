"""Cover: whether the source holds what the destination needs, and nothing twice.

1. Windows of one source tensor hold different elements, or a destination would be sent one twice.
2. Every destination rank, or group of addends of which any one receives, gets as many elements of every addend as it
   has cells. Units of one template never meet, so counting is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from shardmath.balance import Batch, Requests
from shardmath.box import Box, first_gap, from_slices
from shardmath.digit import Dimension
from shardmath.errors import PlanError
from shardmath.layout import Layout
from shardmath.mesh import Mesh
from shardmath.overlay import Template, expand
from shardmath.partition import Ints, partition, spans

__all__ = ["by_rank", "check_covered", "check_disjoint", "groups"]


def check_disjoint(name: str, windows: tuple[Layout, ...]) -> None:
    """Source windows hold different elements, or a destination would be sent one twice."""
    for j, b in enumerate(windows):
        for i, a in enumerate(windows[:j]):
            both = [_common(x, y) for x, y in zip(a.dims, b.dims, strict=True)]
            if None not in both:
                raise PlanError(
                    f"tensor {name!r}: source windows {i} and {j} both hold element {tuple(both)}; "
                    f"use layout.window to keep them apart"
                )


def _common(a: Dimension, b: Dimension) -> int | None:
    """The first position that some rank holds under both, or None."""
    (lo, hi), (other_lo, other_hi) = _union(a), _union(b)
    at = np.searchsorted(other_hi, lo, "right")
    inside = at < len(other_lo)
    start = np.maximum(lo[inside], other_lo[at[inside]])
    meet = start[start < np.minimum(hi[inside], other_hi[at[inside]])]
    return int(meet[0]) if len(meet) else None


def _union(dimension: Dimension) -> tuple[Ints, Ints]:
    """Starts and stops of the disjoint ranges that anybody holds, ascending."""
    start, stop, _, _ = spans(partition(dimension).parts)
    reach = np.maximum.accumulate(stop)
    first = np.append(True, start[1:] > reach[:-1])[: len(start)]
    last = np.append(first[1:], True)[: len(start)]
    return start[first], reach[last]


def check_covered(batches: Sequence[Batch], asked: Sequence[Requests]) -> None:
    """Raise PlanError unless every destination gets as many elements, of every addend, as it has cells."""
    got: dict[tuple[str, int], list[int]] = {}
    for b, batch in enumerate(batches):
        got.setdefault((batch.names[0], batch.target), []).append(b)
    for parts in got.values():
        t = batches[parts[0]].template
        group = groups(t)
        have = np.zeros(t.dst.mesh.size, np.int64)
        for b in parts:
            np.add.at(have, group[_positions(t.dst.mesh, asked[b].rank)], asked[b].hi - asked[b].lo)
        short = np.flatnonzero(have[group] != _cells(t.dst) * t.reduction.addends)
        if len(short):
            _missing([batches[b] for b in parts], [asked[b] for b in parts], int(short[0]))


def groups(t: Template) -> Ints:
    """For each position of the destination's mesh, its group of ranks of which one may receive for all."""
    mesh = t.dst.mesh
    return mesh.coordinate(name for name in mesh.shape if name not in t.reduction.chosen)


def _positions(mesh: Mesh, ranks: Ints) -> Ints:
    """The positions of ranks in their mesh."""
    listed = np.array(mesh.ranks, np.int64)
    order = np.argsort(listed)
    return order[np.searchsorted(listed[order], ranks)]


def _cells(layout: Layout) -> Ints:
    """How many of its local cells are the tensor's, by position in the mesh."""
    out = np.ones(layout.mesh.size, np.int64)
    for dim in layout.dims:
        parts = partition(dim)
        out *= np.array([runs.size for runs in parts.parts], np.int64)[parts.by_rank(layout.mesh)]
    return out


def _missing(batches: Sequence[Batch], asked: Sequence[Requests], position: int) -> NoReturn:
    """Raise PlanError for the first element that the rank at this position of the mesh needs and nobody holds."""
    batch, dst = batches[0], batches[0].template.dst
    rank = dst.mesh.ranks[position]
    held = [[(g, g + n) for _, g, n in runs.segments] for runs in dst.runs(rank)]
    boxes: list[Box] = []
    for b, rows in zip(batches, asked, strict=True):
        t, group = b.template, groups(b.template)
        for i in np.flatnonzero(group[_positions(dst.mesh, rows.rank)] == group[position]).tolist():
            boxes += _boxes(t, int(rows.unit[i]))
    at = first_gap(held, boxes)
    what = f"tensor {batch.names[0]!r}: rank {rank} needs element {at} under {dst}"
    raise PlanError(f"{what}, no rank holds it under {batch.template.src}; cover it at the source")


def _boxes(t: Template, unit: int) -> list[Box]:
    """The global boxes of a unit."""
    sender = int(t.holders[t.holder_first[t.unit_class[unit]]])
    pieces = expand(t, unit, sender, 0, int(t.unit_size[unit]))
    return [from_slices(piece.whole) for piece in pieces]


def by_rank(ranks: Ints, load: Ints) -> Iterator[tuple[int, int]]:
    """(rank, exact integer sum of its loads) of all ranks that appear."""
    order = np.argsort(ranks, kind="stable")
    first = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    sums = np.add.reduceat(load[order], first) if len(first) else first
    return zip(ranks[order][first].tolist(), sums.tolist(), strict=True)
