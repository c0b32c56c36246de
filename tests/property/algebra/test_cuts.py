"""Cuts against definitions by lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardmath.algebra.cuts import Balanced, Chunks, FixedBlock, Sizes

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
        assert pieces_of(Balanced(k), n) == [
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
