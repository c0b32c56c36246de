"""Results of pure functions, kept while there is room.

1. `memo` keeps what a pure function of hashable values returned, as `functools.lru_cache` does:
   nothing but time depends on what is kept.
2. What all such functions keep together is bounded by memory. An entry is weighed when it is made:
   arrays by their bytes, long sequences by a sample. Weights lean to the high side, since what two
   entries share is counted for both; of arguments only plain data is weighed, since objects are
   mostly part of some result.
3. When together they would weigh more than MOST_BYTES, all are emptied: the entries of one function
   hold, as arguments, what another made, so that emptying some would end little.

>>> @memo()
... def squares(n):
...     return [i * i for i in range(n)]
>>> squares(3) is squares(3)
True
>>> clear_caches()
>>> squares.cache_info().currsize
0
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from itertools import islice
from time import perf_counter
from typing import TypeVar

import numpy as np

__all__ = ["clear_caches", "memo", "weight"]

MOST_BYTES = 512 << 20
"""Of all that is kept, by weight."""

SAMPLED = 3
"""Elements of a longer sequence that are weighed."""

SHARE = 1 / 200
"""Of the time in which entries are made that goes into weighing them.

Those for which there is no time are taken to weigh as the last did.
"""

_R = TypeVar("_R")
_Wrapper = functools._lru_cache_wrapper


class _Account:
    """What one function keeps, by weight; `total` is that of all."""

    total = 0

    def __init__(self) -> None:
        self.cache: _Wrapper[object] | None = None
        self.nbytes = 0
        self._last = 0
        self._allowed = 1e-9  # seconds for weighing: the first entry is weighed

    def add(self, arguments: tuple[object, ...], result: object, seconds: float) -> None:
        """One more entry, made in so many seconds, which are few where it is small."""
        self._allowed += seconds * SHARE
        if self._allowed > 0:
            start = perf_counter()
            self._last = _weigh(arguments, None) + _weigh(result, set())
            self._allowed -= perf_counter() - start
        if _Account.total + self._last > MOST_BYTES:
            clear_caches()
        self.nbytes += self._last
        _Account.total += self._last

    def empty(self) -> None:
        """Nothing is kept any longer."""
        assert self.cache is not None, "an account is listed with its cache"
        self.cache.cache_clear()
        _Account.total -= self.nbytes
        self.nbytes = 0


_accounts: list[_Account] = []


def memo(most: int = 4096) -> Callable[[Callable[..., _R]], _Wrapper[_R]]:
    """A decorator that keeps the function's latest results, at most so many.

    Arguments are positional and hashable.
    """

    def keep(function: Callable[..., _R]) -> _Wrapper[_R]:
        account = _Account()

        @functools.wraps(function)
        def made(*arguments: object) -> _R:
            start = perf_counter()
            result = function(*arguments)
            account.add(arguments, result, perf_counter() - start)
            return result

        kept = functools.lru_cache(maxsize=most)(made)
        account.cache = kept
        _accounts.append(account)
        return kept

    return keep


def clear_caches() -> None:
    """Empty the caches of this process, those of the core and of its backends.

    They only save time: results are the same without them. Process groups and compiled moves, which
    ranks made together, are kept, since one rank alone cannot drop them.
    """
    for account in _accounts:
        account.empty()


def weight(value: object) -> int:
    """About how many bytes the value takes, with all that it refers to, each counted once."""
    return _weigh(value, set())


def _weigh(value: object, seen: set[int] | None) -> int:
    """The weight without objects of which `seen` has the id, or without any where it is None."""
    if isinstance(value, np.ndarray):
        return 112 + value.nbytes
    if isinstance(value, tuple | list | set | frozenset):
        return sys.getsizeof(value) + _weigh_items(value, seen)
    if isinstance(value, dict):
        entries = _weigh_items(value, seen) + _weigh_items(value.values(), seen)
        return sys.getsizeof(value) + entries
    names = getattr(value, "__dataclass_fields__", ())
    if not names:
        return sys.getsizeof(value)
    if seen is None or id(value) in seen:
        return 0
    seen.add(id(value))
    fields = sum(_weigh(getattr(value, name), seen) for name in names)
    return 48 + 8 * len(names) + fields  # an object with slots


def _weigh_items(items: Collection[object], seen: set[int] | None) -> int:
    """The weight of all items; of more than SAMPLED, as many times that of a sample."""
    n = len(items)
    if n <= SAMPLED:
        return sum(_weigh(item, seen) for item in items)
    step = -(-n // SAMPLED)
    sample = islice(items, 0, None, step)
    some = sum(_weigh(item, seen) for item in sample)
    sampled = -(-n // step)
    return some * n // sampled
