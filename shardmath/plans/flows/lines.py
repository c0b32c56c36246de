"""Lines: bytes that any of their holders may send, checked, and grouped by their sets of holders.

Lines with the same holders are one line of all their bytes.

>>> groups = group_lines([6, 4, 1], [(0, 1), (1, 2), (0, 1)])
>>> groups
{(0, 1): {0: 6, 2: 1}, (1, 2): {1: 4}}
>>> sum_groups(groups)
{(0, 1): 7, (1, 2): 4}
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TypeAlias

from shardmath.base.errors import PlanError

__all__ = ["Holders", "group_lines", "list_shared", "sum_groups"]

Holders: TypeAlias = tuple[int, ...]
"""The ranks, ascending, that have a line."""


def group_lines(
    lengths: Sequence[int], holders: Sequence[Holders]
) -> dict[Holders, dict[int, int]]:
    """Group lines of bytes by the ranks that hold them: for each set in `holders`, sorted, line number -> bytes."""
    if len(lengths) != len(holders):
        what = f"there are {len(lengths)} lengths and {len(holders)} sets of holders"
        raise PlanError(f"{what}; give one length and one set per line")
    groups: dict[Holders, dict[int, int]] = {}
    pairs = zip(holders, lengths, strict=True)
    for line, (held, length) in enumerate(pairs):
        if length < 0:
            raise PlanError(f"lengths[{line}] is {length} bytes; give lengths of 0 or more")
        lines = groups.setdefault(held, {})
        lines[line] = operator.index(length)
    for held, lines in groups.items():
        if not _is_ascending(held):
            first = next(iter(lines))
            _raise_unordered(first, held)
    return {held: groups[held] for held in sorted(groups)}


def _is_ascending(held: Holders) -> bool:
    """Whether there are holders, each after the one before."""
    # map, because this looks at every set of holders: three times as fast as a comprehension.
    return bool(held) and all(map(operator.lt, held, held[1:]))


def sum_groups(groups: dict[Holders, dict[int, int]]) -> dict[Holders, int]:
    """For each set of holders, the total bytes of its lines."""
    return {held: sum(lines.values()) for held, lines in groups.items()}


def _raise_unordered(line: int, held: Holders) -> None:
    """Raise PlanError for holders that are empty or not ascending."""
    for a, b in itertools.pairwise(held):
        if a >= b:
            what = f"holders[{line}] has rank {b} after rank {a}"
            raise PlanError(f"{what}; give ascending ranks: tuple(sorted(set(...)))")
    raise PlanError(
        f"holders[{line}] is empty; give a rank that holds the bytes, or leave them out"
    )


def list_shared(total: dict[Holders, int]) -> list[Holders]:
    """Return the sets of several holders whose lines have any bytes; their places in the list number shared lines."""
    shared = []
    for held, nbytes in total.items():
        if nbytes and len(held) > 1:
            shared.append(held)
    return shared
