"""Results of pure functions, kept while there is room.

1. `memo` keeps what a pure function of hashable values returned, as `functools.lru_cache` does: nothing but time
   depends on what is kept.
2. What all such functions keep together is bounded by memory. An entry is weighed when it is made, its arguments with
   it: arrays by their bytes, long sequences by a sample. Weights lean to the high side, since what entries of two
   functions share is counted for both.
3. When together they weigh more than MOST_BYTES, those that weigh most are emptied until half of that is free.

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
from typing import TypeVar

import numpy as np

__all__ = ["clear_caches", "memo", "weight"]

MOST_BYTES = 512 << 20
"""Of all that is kept, by weight."""

SAMPLED = 5
"""Elements of a longer sequence that are weighed."""

SMALL, SKIPPED = 4096, 15
"""After an entry of less than so many bytes, so many more are taken to weigh the same: weighing takes microseconds."""

MOST_SEEN = 4096
"""Objects of which a function remembers that they are weighed."""

_R = TypeVar("_R")
_Wrapper = functools._lru_cache_wrapper


class _Account:
    """What one function keeps, by weight."""

    def __init__(self) -> None:
        self.cache: _Wrapper[object] | None = None
        self.nbytes = 0
        self._seen: set[int] = set()
        self._last, self._skip = 0, 0

    def add(self, arguments: tuple[object, ...], result: object) -> None:
        """One more entry; from time to time, and whenever one is large, room is made for it."""
        if self._skip:
            self._skip -= 1
            self.nbytes += self._last
            return
        self._last = _weighed(arguments, self._seen) + _weighed(result, set())
        self._skip = SKIPPED if self._last < SMALL else 0
        if len(self._seen) > MOST_SEEN:
            self._seen = set()
        self.nbytes += self._last
        _make_room()

    def empty(self) -> None:
        """Nothing is kept any longer."""
        assert self.cache is not None, "an account is listed with its cache"
        self.cache.cache_clear()
        self.nbytes, self._skip, self._seen = 0, 0, set()


_accounts: list[_Account] = []


def memo(most: int = 4096) -> Callable[[Callable[..., _R]], _Wrapper[_R]]:
    """A decorator that keeps the function's latest results, at most so many; arguments are positional and hashable."""

    def keep(function: Callable[..., _R]) -> _Wrapper[_R]:
        account = _Account()

        @functools.wraps(function)
        def made(*arguments: object) -> _R:
            result = function(*arguments)
            account.add(arguments, result)
            return result

        kept = functools.lru_cache(maxsize=most)(made)
        account.cache = kept  # type: ignore[assignment]
        _accounts.append(account)
        return kept

    return keep


def clear_caches() -> None:
    """Forget all results that are kept to save time: of this process, in the core and in its backends.

    Values that nobody else holds end with them. Nothing has to be cleared for results to be right, and what ranks made
    together (process groups, compiled moves) is not forgotten, since one rank alone cannot.
    """
    for account in _accounts:
        account.empty()


def _make_room() -> None:
    total = sum(account.nbytes for account in _accounts)
    if total <= MOST_BYTES:
        return
    for account in sorted(_accounts, key=lambda account: -account.nbytes):
        if total <= MOST_BYTES // 2:
            return
        total -= account.nbytes
        account.empty()


def weight(value: object) -> int:
    """About how many bytes the value takes, with all that it refers to; what it refers to twice counts once."""
    return _weighed(value, set())


def _weighed(value: object, seen: set[int]) -> int:
    if isinstance(value, np.ndarray):
        return 112 + value.nbytes
    if isinstance(value, tuple | list | set | frozenset):
        return sys.getsizeof(value) + _weighed_items(value, seen)
    if isinstance(value, dict):
        return sys.getsizeof(value) + _weighed_items(value, seen) + _weighed_items(value.values(), seen)
    names = _fields(type(value))
    if not names:
        return sys.getsizeof(value)
    if id(value) in seen:
        return 0
    seen.add(id(value))
    return 48 + 8 * len(names) + sum(_weighed(getattr(value, name), seen) for name in names)


def _weighed_items(items: Collection[object], seen: set[int]) -> int:
    n = len(items)
    if n <= SAMPLED:
        return sum(_weighed(item, seen) for item in items)
    some = sum(_weighed(item, seen) for item in islice(items, 0, None, -(-n // SAMPLED)))
    return some * n // SAMPLED


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass; of other classes none."""
    return tuple(getattr(kind, "__dataclass_fields__", ()))
