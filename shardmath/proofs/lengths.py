"""Lengths: a set of lengths of a dimension that is periodic from some length on, and so has an exact description.

>>> halves = Lengths.of([n < 2 or n % 4 in (0, 3) for n in range(20)], settled=4, period=8)
>>> print(halves)
n = 1, and every n with n mod 4 = 0 or 3
>>> 4003 in halves, 4001 in halves
(True, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmath.base.public import public

__all__ = ["Lengths"]


@public
@dataclass(frozen=True, slots=True)
class Lengths:
    """A set of lengths n of a dimension: those in `first`, all below `settled`; and from `settled` on every n whose
    remainder modulo `period` is in `remainders`. Test whether it contains a length with `in`."""

    first: tuple[int, ...]
    settled: int
    period: int
    remainders: tuple[int, ...]

    @classmethod
    def of(cls, members: Sequence[bool], *, settled: int, period: int) -> Lengths:
        """Make the set of which the length n is a member if `members[n]`; from `settled` on membership has this
        `period`. There must be `settled + period` members or more; the description is the shortest."""
        repeated = [bool(members[settled + (n - settled) % period]) for n in range(period)]
        shortest = next(
            short
            for short in range(1, period + 1)
            if period % short == 0 and repeated == repeated[:short] * (period // short)
        )
        while settled and bool(members[settled - 1]) == repeated[(settled - 1) % shortest]:
            settled -= 1
        first = tuple(n for n in range(settled) if members[n])
        remainders = tuple(n for n in range(shortest) if repeated[n])
        return cls(first, settled, shortest, remainders)

    def __contains__(self, n: int) -> bool:
        if n < self.settled:
            return n in self.first
        return n % self.period in self.remainders

    def __str__(self) -> str:
        words = []
        # A length that the rule below names too is not said twice.
        alone = [n for n in self.first if n % self.period not in self.remainders]
        if alone:
            words.append(f"n = {_list(alone)}")
        lost = [
            n
            for n in range(self.settled)
            if n % self.period in self.remainders and n not in self.first
        ]
        if self.remainders:
            rule = "every n"
            if self.period > 1:
                rule = f"every n with n mod {self.period} = {_list(self.remainders)}"
            words.append(rule + (f" but {_list(lost)}" if lost else ""))
        return ", and ".join(words) or "no n"


def _list(numbers: Sequence[int]) -> str:
    """The numbers in words: 1, 2 or 3."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
