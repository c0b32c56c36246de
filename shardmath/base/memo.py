"""Memo: results of pure functions, cached while there is room.

1. `memo` caches the results of a pure function of hashable values, as `functools.lru_cache` does:
   only time depends on the caches.
2. The memory of all caches together is bounded. An entry is weighed when it is made: arrays by their
   bytes, long sequences by a sample. Weights are rather too high, since objects that two entries share
   are counted for both; of arguments only plain data is weighed, since objects are mostly part of some
   result.
3. When all caches would weigh more than MOST_BYTES, all are emptied: entries of one function refer, as
   arguments, to results of another, so that emptying some caches would free little.

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
from typing import Protocol, TypeVar

import numpy as np

__all__ = ["Cache", "add_cache", "clear_caches", "memo", "weight"]

MOST_BYTES = 512 << 20
"""The most that all caches may weigh together."""

SAMPLED = 3
"""The number of elements of a longer sequence that are weighed."""

SHARE = 1 / 200
"""The share of the time of making entries that may be spent on weighing them.

An entry for which no time is left counts as much as the last one weighed.
"""

_R = TypeVar("_R")
_Wrapper = functools._lru_cache_wrapper


class _Account:
    """The weight of one function's cache; `total` is the weight of all caches."""

    total = 0

    def __init__(self) -> None:
        self.cache: _Wrapper[object] | None = None
        self.nbytes = 0
        self._last_nbytes = 0
        self._allowed_s = 1e-9  # seconds for weighing: the first entry is weighed

    def add(self, arguments: tuple[object, ...], result: object, seconds: float) -> None:
        """Add the estimated bytes of a cached call's `arguments` and `result` to the total of all caches. `seconds`,
        the duration of the call, limits the time for estimating; if no time is left, the last estimate is used again.

        If the total would exceed the limit, all caches are emptied first.
        """
        self._allowed_s += seconds * SHARE
        if self._allowed_s > 0:
            start = perf_counter()
            # Arguments without their objects, which are mostly part of some result.
            self._last_nbytes = _weigh(arguments, None) + _weigh(result, set())
            self._allowed_s -= perf_counter() - start
        if _Account.total + self._last_nbytes > MOST_BYTES:
            clear_caches()
        self.nbytes += self._last_nbytes
        _Account.total += self._last_nbytes

    def empty(self) -> None:
        """Empty the cache of the function that this object accounts for, and subtract the cache's bytes from the total
        of all caches."""
        assert self.cache is not None, "an account is listed with its cache"
        self.cache.cache_clear()
        _Account.total -= self.nbytes
        self.nbytes = 0


class Cache(Protocol):
    """A cache that `clear_caches` empties."""

    def empty(self) -> None:
        """Drop all that is kept."""
        ...


_accounts: list[_Account] = []
_others: list[Cache] = []


def add_cache(cache: Cache) -> None:
    """Let `clear_caches` also empty `cache`, which must take little memory."""
    _others.append(cache)


def memo(most: int = 4096) -> Callable[[Callable[..., _R]], _Wrapper[_R]]:
    """Return a decorator that caches results of a pure function. `most` limits the number of cached results; the least
    recently used are dropped.

    All such caches are emptied before they take more than about 512 MiB. Arguments are positional and hashable.
    """

    def decorate(function: Callable[..., _R]) -> _Wrapper[_R]:
        account = _Account()

        @functools.wraps(function)
        def timed(*arguments: object) -> _R:
            start = perf_counter()
            result = function(*arguments)
            account.add(arguments, result, perf_counter() - start)
            return result

        cached = functools.lru_cache(maxsize=most)(timed)
        account.cache = cached
        _accounts.append(account)
        return cached

    return decorate


def clear_caches() -> None:
    """Empty all caches of function results that shardmath and its backends keep in this process.

    Caches only save time: results are the same without them. Process groups and compiled moves, which
    ranks made together, are kept, since a single rank cannot drop them.
    """
    for cache in (*_accounts, *_others):
        cache.empty()


def weight(value: object) -> int:
    """Estimate the bytes that `value` takes in memory, including the items of containers and the fields of dataclasses
    at every level of nesting.

    A dataclass object counts once. Of a container with more than three items, at most three are weighed.
    """
    return _weigh(value, set())


def _weigh(value: object, seen: set[int] | None) -> int:
    """The weight without objects whose ids are in `seen`, or without any objects if it is None."""
    if isinstance(value, np.ndarray):
        return 112 + value.nbytes  # the bytes of an array's object, and of its elements
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
    """The weight of all items; for more than SAMPLED items, estimated from a sample."""
    n = len(items)
    if n <= SAMPLED:
        return sum(_weigh(item, seen) for item in items)
    step = -(-n // SAMPLED)
    sample = islice(items, 0, None, step)
    sample_weight = sum(_weigh(item, seen) for item in sample)
    n_sampled = -(-n // step)
    return sample_weight * n // n_sampled
