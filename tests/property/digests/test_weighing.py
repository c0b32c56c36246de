"""Sums of large arrays, however they lie in memory, are those of Python's integers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Runs, from_ranges, testing
from shardmath.layouts.algebra.runs import identity
from shardmath.values.digests import weighing
from shardmath.values.digests.field import PRIME, weigh_positions
from shardmath.values.digests.pieces import list_pieces, weigh_part
from shardmath.values.digests.weighing import weigh


def define(array: np.ndarray, runs: tuple[Runs, ...]) -> int:
    """The weighted sum, in Python's integers."""
    size = min(2, array.itemsize)
    words = np.ascontiguousarray(array)[..., None].view(f"i{size}").astype(object)
    for d, own in enumerate(runs):
        index = own.indices()
        weights = weigh_positions(0, d, np.maximum(index, 0)).astype(object) * (index >= 0)
        words = words * weights.reshape([-1] + [1] * (words.ndim - d - 1))
    return (
        int((words * weigh_positions(0, -1, np.arange(words.shape[-1])).astype(object)).sum())
        % PRIME
    )


def bits(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    drawn = np.random.default_rng(len(shape)).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(drawn, dtype).reshape(shape)


SHIFTED = from_ranges([(1001, 2500), 3, (10, 700)])
SHAPES = [(), (1,), (3000,), (700, 3), (3, 1400), (5, 7, 11), (37, 41), (2, 700, 2), (1, 600, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "c16"])
def test_every_way_of_lying_in_memory(shape: tuple[int, ...], dtype: str) -> None:
    array = bits(shape, dtype)
    runs = tuple(map(identity, shape))
    expected = define(array, runs)
    lying = [array, array.copy(order="F"), array.copy()[..., None][..., 0]]
    if shape:
        apart = np.zeros((*shape[:-1], shape[-1] * 2 + 1), dtype)[..., 1::2]
        apart[:] = array
        backwards = np.ascontiguousarray(array[::-1])[::-1]
        lying += [apart, backwards]
    for each in lying:
        assert weigh(each, runs) == expected


@pytest.mark.parametrize("trailing", [(), (3,), (300,)], ids=str)
def test_positions_anywhere(trailing: tuple[int, ...]) -> None:
    """Ranges that begin between blocks, holes, and ranges in another order."""
    runs = (SHIFTED, *map(identity, trailing))
    array = bits((len(SHIFTED), *trailing), "u2")
    assert weigh(array, runs) == define(array, runs)
    turned = np.ascontiguousarray(array.T)
    assert weigh(turned, runs[::-1]) == define(turned, runs[::-1])


def test_many_short_ranges() -> None:
    runs = (Runs(tuple((i * 5, i * 7, 5) for i in range(2000))),)
    array = bits((10_000,), "u2")
    assert weigh(array, runs) == define(array, runs)


@given(testing.runs(), testing.runs(), st.sampled_from([1, 2, 4]))
def test_any_runs(rows: Runs, columns: Runs, size: int) -> None:
    array = bits((len(rows), len(columns)), f"u{size}")
    expected = define(array, (rows, columns)) if array.size else 0
    assert weigh(array, (rows, columns)) == expected


@pytest.mark.parametrize("word", [-32768, 32767, -1])
def test_the_largest_words(word: int) -> None:
    """Sums of rows stay exact where every word is the largest there is."""
    array = np.full((64, 1024), word, np.int16)
    runs = identity(64), identity(1024)
    assert weigh(array, runs) == define(array, runs)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the blocks are that an array is cut into."""
    array = bits((6, 40, 70, 5), "u4")
    runs = tuple(map(identity, array.shape))
    expected = weigh(array, runs)
    assert expected == define(array, runs)
    for block, rows in ((300, 1000), (1, 1), (5000, 20_000)):
        monkeypatch.setattr(weighing, "BLOCK", block)
        monkeypatch.setattr(weighing, "ROWS", rows)
        assert weigh(array, runs) == expected


def test_pieces_are_disjoint_and_all_there_is() -> None:
    for own, inner in ((SHIFTED, 1), (SHIFTED, 2), (SHIFTED, 6), (identity(9000), 1)):
        held = np.zeros(len(own), int)
        for (part,) in list_pieces((own,), [0], inner):
            factors = weigh_part(0, 0, part)
            assert np.prod([len(factor) for factor in factors]) == part.size
            held[part.start : part.stop] += 1
        assert held.max() == 1 and (held[own.indices() >= 0] == 1).all()


def test_no_memory_of_the_arrays_size() -> None:
    """64 MB take a few blocks, also where the local array is transposed."""
    array = np.ones((4096, 4096), np.float32).T
    runs = tuple(map(identity, array.shape))
    weigh(array, runs)
    tracemalloc.start()
    weigh(array, runs)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
