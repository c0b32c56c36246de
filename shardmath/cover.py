"""Cover: whether the source holds what the destination needs, and nothing twice.

1. Windows of one source tensor hold different elements, or a destination would be sent one twice.
2. Every destination rank, or group of addends of which any one receives, gets as many elements of every addend as it
   has cells. Units of one template never meet, so counting is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from shardmath.balance import Batch, Requests
from shardmath.box import Box, first_gap
from shardmath.digit import Dimension
from shardmath.errors import PlanError
from shardmath.layout import Layout
from shardmath.overlay import Ints, Template, expand, partition

__all__ = ["by_rank", "check_covered", "check_disjoint"]


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
    held = [sorted((g, g + n) for runs in partition(x).parts for _, g, n in runs.segments) for x in (a, b)]
    meet = (max(p, r) for p, q in held[0] for r, s in held[1] if max(p, r) < min(q, s))
    return min(meet, default=None)


def check_covered(batches: tuple[Batch, ...], asked: list[Requests]) -> None:
    """Raise PlanError unless every destination gets as many elements, of every addend, as it has cells."""
    got: dict[tuple[str, int], list[int]] = {}
    for b, batch in enumerate(batches):
        got.setdefault((batch.names[0], batch.target), []).append(b)
    for parts in got.values():
        t = batches[parts[0]].template
        group = _groups(t)
        have = dict.fromkeys(group.values(), 0)
        for b in parts:
            for rank, n in by_rank(asked[b].rank, asked[b].hi - asked[b].lo):
                have[group[rank]] += n
        for rank in t.dst.mesh.ranks:
            need = math.prod(runs.size for runs in t.dst.runs(rank)) * t.reduction.addends
            if have[group[rank]] != need:
                _missing([batches[b] for b in parts], [asked[b] for b in parts], rank)


def _groups(t: Template) -> dict[int, int]:
    """The destination ranks by what one of them may receive for all."""
    mesh = t.dst.mesh
    at = mesh.coordinate(name for name in mesh.shape if name not in t.reduction.chosen)
    return dict(zip(mesh.ranks, at.tolist(), strict=True))


def _missing(batches: list[Batch], asked: list[Requests], rank: int) -> None:
    batch, dst = batches[0], batches[0].template.dst
    held = [[(g, g + n) for _, g, n in runs.segments] for runs in dst.runs(rank)]
    boxes: list[Box] = []
    for b, rows in zip(batches, asked, strict=True):
        t, group = b.template, _groups(b.template)
        for u, r in zip(rows.unit.tolist(), rows.rank.tolist(), strict=True):
            if group[r] == group[rank]:
                sender = int(t.holders[t.holder_first[t.unit_class[u]]])
                boxes += [
                    tuple((s.start, s.stop) for s in piece.whole)
                    for piece in expand(t, u, sender, 0, int(t.unit_size[u]))
                ]
    at = first_gap(held, boxes)
    raise PlanError(
        f"tensor {batch.names[0]!r}: rank {rank} needs element {at} under {dst}, no rank holds it under "
        f"{batch.template.src}; cover it at the source"
    )


def by_rank(ranks: Ints, load: Ints) -> Iterator[tuple[int, int]]:
    """(rank, exact integer sum of its loads) of all ranks that appear."""
    order = np.argsort(ranks, kind="stable")
    first = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    sums = np.add.reduceat(load[order], first) if len(first) else first
    return zip(ranks[order][first].tolist(), sums.tolist(), strict=True)
