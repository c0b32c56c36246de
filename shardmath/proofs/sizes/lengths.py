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
        flags = list(map(bool, members))
        repeated = [flags[settled + (n - settled) % period] for n in range(period)]
        period = _shorten(repeated)
        while settled and flags[settled - 1] == repeated[(settled - 1) % period]:
            settled -= 1
        first = _indices(flags[:settled])
        return cls(first, settled, period, _indices(repeated[:period]))

    def __contains__(self, n: int) -> bool:
        if n < self.settled:
            return n in self.first
        return n % self.period in self.remainders

    def __str__(self) -> str:
        # Below `settled`, what the rule about remainders says of a length may be wrong, in both directions.
        ruled = {n for n in range(self.settled) if n % self.period in self.remainders}
        added = sorted({*self.first} - ruled)
        lost = sorted(ruled - {*self.first})
        words = [f"n = {_list(added)}"] if added else []
        if self.remainders:
            words.append(self._word_rule() + (f" but {_list(lost)}" if lost else ""))
        return ", and ".join(words) or "no n"

    def _word_rule(self) -> str:
        if self.period == 1:
            return "every n"
        return f"every n with n mod {self.period} = {_list(self.remainders)}"


def _indices(flags: Sequence[bool]) -> tuple[int, ...]:
    """The indices of the flags that are set."""
    return tuple(n for n, flag in enumerate(flags) if flag)


def _shorten(flags: list[bool]) -> int:
    """The shortest period of flags that repeat."""
    count = len(flags)
    divisors = (n for n in range(1, count + 1) if count % n == 0)
    return next(n for n in divisors if flags == flags[:n] * (count // n))


def _list(numbers: Sequence[int]) -> str:
    """The numbers in words: 1, 2 or 3."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
