"""Moves: the boxes that the ranks of a source and a destination hold, by class.

Ranks that hold the same before and the same after are one **class**. An operation that fits one of them
fits all, so operations are looked for among classes, which are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.plans.collectives.kinds import Buffer, CollectiveSide, Members
from shardmath.plans.collectives.spans import NOTHING, Holding, spans_of

__all__ = ["Groups", "Move", "compare_ranks"]

_T = TypeVar("_T")
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """The boxes of elements that ranks hold before and after a move, by class: ranks with equal boxes before, and equal
    boxes after, are in one class.

    `number` is the class of each rank.
    """

    before: CollectiveSide
    after: CollectiveSide
    number: Mapping[int, int]

    def members(self, groups: Groups) -> dict[tuple[int, ...], Members]:
        """Return a dict from each group in `groups`, a tuple of ranks, to the class numbers of these ranks, in the same
        order. Ranks of one class hold the same elements before the move, and the same after it."""
        return {group: tuple(self.number[rank] for rank in group) for group in groups}


_Parts: TypeAlias = list[tuple[Runs, ...]]
"""The distinct parts of each dimension of a layout."""


def compare_ranks(src: Layout, dst: Layout) -> Move:
    """Group ranks that hold the same in `src`, and the same in `dst`, into classes; return their boxes as a Move."""
    parts_before, by_rank_before = _list_parts(src)
    parts_after, by_rank_after = _list_parts(dst)
    # By the part numbers before and after; classes are numbered as they come.
    classes: dict[tuple[Members | None, Members | None], int] = {}
    class_of_rank: dict[int, int] = {}
    for rank in sorted({*src.mesh.ranks, *dst.mesh.ranks}):
        part_numbers = by_rank_before.get(rank), by_rank_after.get(rank)
        class_of_rank[rank] = classes.setdefault(part_numbers, len(classes))
    before = _make_side(parts_before, [numbers for numbers, _ in classes])
    after = _make_side(parts_after, [numbers for _, numbers in classes])
    return Move(before, after, class_of_rank)


def _list_parts(layout: Layout) -> tuple[_Parts, dict[int, Members]]:
    """The parts of each dimension, and the number of the one that each rank holds."""
    mesh = layout.mesh
    partitions = [partition(dim) for dim in layout.dims]
    parts = [each.parts for each in partitions]
    columns = [each.by_rank(mesh) for each in partitions]
    # Without dimensions there are no columns, and still one row per rank.
    table = np.array(columns, np.int64)
    rows = table.reshape(-1, mesh.size).T.tolist()
    numbers = map(tuple, rows)
    by_rank = dict(zip(mesh.ranks, numbers, strict=True))
    return parts, by_rank


def _make_side(parts: _Parts, classes: Iterable[Members | None]) -> CollectiveSide:
    """The boxes and buffers of classes, each given by the number of its part in each dimension.

    None stands for ranks outside the mesh.
    """
    spans = [[spans_of(runs) for runs in each] for each in parts]
    side = CollectiveSide([], [])
    for numbers in classes:
        box: Holding = NOTHING
        buffer: Buffer | None = None
        if numbers is not None:
            box = _pick(spans, numbers)
            buffer = _pick(parts, numbers)
        side.held.append(box if all(box) else NOTHING)
        side.buffers.append(buffer)
    return side


def _pick(options: Iterable[Sequence[_T]], numbers: Members) -> tuple[_T, ...]:
    """The option with the given number, for each dimension."""
    picked = []
    for each, number in zip(options, numbers, strict=True):
        picked.append(each[number])
    return tuple(picked)
