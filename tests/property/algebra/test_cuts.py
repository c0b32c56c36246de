"""Cuts against definitions by lists."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from shardmath.base.memo import clear_caches
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.runs import Runs

LENGTHS = range(13)


def torch_chunk(n: int, k: int) -> list[list[int]]:
    step = -(-n // k)
    return [[i for i in range(n) if step and i // step == r] for r in range(k)]


def blocks(n: int, b: int) -> list[list[int]]:
    return [list(range(i, min(i + b, n))) for i in range(0, n, b)]


def pieces_of(cut, n: int) -> list[list[int]]:
    return [list(range(o, o + k)) for o, k in (cut.part(n, i) for i in range(cut.count(n)))]


@pytest.mark.parametrize("n", LENGTHS)
def test_cuts_are_their_definitions(n: int) -> None:
    for k in range(1, 6):
        assert pieces_of(Chunks(k), n) == torch_chunk(n, k)
        assert pieces_of(BalancedChunks(k), n) == [
            part.tolist() for part in np.array_split(np.arange(n), k)
        ]
        assert pieces_of(FixedBlock(k), n) == blocks(n, k)
        assert all(
            FixedBlock(k).part(n, i) == (n, 0)
            for i in range(FixedBlock(k).count(n), FixedBlock(k).count(n) + 3)
        )
    for first, second in itertools.combinations_with_replacement(range(n + 1), 2):
        sizes = (first, second - first, n - second)
        assert pieces_of(Sizes(sizes), n) == [
            part.tolist() for part in np.split(np.arange(n), [first, second])
        ]


CALLS: list[int] = []


@dataclass(frozen=True)
class Halves:
    """A user's way of splitting that records for which lengths it is asked."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        CALLS.append(n)
        return Runs([(0, 0, n // 2)]), Runs([(0, n // 2, n - n // 2)])


def test_a_user_cut_does_not_grow() -> None:
    """What was split is kept outside the value: it was pickled with the value, one entry per length."""
    clear_caches()
    CALLS.clear()
    cut = UserCut(Halves(), 2)
    size = len(pickle.dumps(cut))
    for n in (*range(100), *range(100)):
        assert [part.size for part in cut.split(n)] == [n // 2, n - n // 2]
    assert list(range(100)) == CALLS
    assert len(pickle.dumps(cut)) == size
    assert pickle.loads(pickle.dumps(cut)) == cut
    clear_caches()
    cut.split(3)
    assert CALLS[-1] == 3
    assert len(CALLS) == 101


def test_cuts_of_one_number_differ_by_kind() -> None:
    assert Chunks(3) != BalancedChunks(3)
    for cut in (Chunks(3), BalancedChunks(3)):
        assert pickle.loads(pickle.dumps(cut)) == cut
        assert repr(cut) == f"{type(cut).__name__}(parts=3)"
