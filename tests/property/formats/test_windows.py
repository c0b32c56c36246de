"""Windows: quantizing a slice is slicing what is quantized where no block is cut, and elsewhere by way of amaxes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import FormatError
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.windows import make_window

SHAPE = (48, 64)
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(axis=-2, rounding="floor"),
    MXFP8("e5m2"),
    FP8Blocks((8, 32)),
    FP8Blocks((5, 24), power_of_two=True),
    FP8Blocks((1, 16)),
    FP8(),
    FP8("channel"),
    NVFP4(tensor_amax=1000),
    NVFP4(two_d=True, tensor_amax=1000),
]
EACH = pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)


def data_of(one: Format, data: np.ndarray, where: tuple[slice, ...]) -> np.ndarray:
    """The data of a box; two numbers of NVFP4 are one byte."""
    rows, columns = where
    if isinstance(one, NVFP4):
        columns = slice(columns.start // 2, columns.stop // 2)
    return data[rows, columns]


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


def boxes() -> st.SearchStrategy[tuple[slice, ...]]:
    """Boxes with something in them, whose columns are even because of NVFP4."""
    rows = st.tuples(st.integers(0, 47), st.integers(1, 48)).filter(lambda ab: ab[0] < ab[1])
    columns = st.tuples(st.integers(0, 31), st.integers(1, 32)).filter(lambda ab: ab[0] < ab[1])
    return st.tuples(rows, columns).map(
        lambda box: (slice(*box[0]), slice(2 * box[1][0], 2 * box[1][1]))
    )


@EACH
@given(where=boxes(), seed=st.integers(0, 1000))
def test_quantize_commutes_with_slicing_exactly_where_cuts_are_legal(
    one: Format, where: tuple[slice, ...], seed: int
) -> None:
    x = draw(seed)
    cut = one.straddles(where, SHAPE)
    legal = one.legal_cuts(SHAPE)
    ends = [{span.start, span.stop} <= set(cuts) for span, cuts in zip(where, legal, strict=True)]
    assert all(ends) == (not cut.any())
    cover = one.cover(where, SHAPE)
    if not cut.any():
        assert_commutes(one, x, where)
        return
    # The counterexample: something large in the same block, outside.
    at = find_outside(one, where, cut)
    x[at] = 900
    whole = one.quantize(x)
    part = one.quantize(x[where])
    same_shape = part[1].shape == whole[1][cover].shape
    assert not same_shape or not np.array_equal(part[1], whole[1][cover])


def assert_commutes(one: Format, x: np.ndarray, where: tuple[slice, ...]) -> None:
    whole = one.quantize(x)
    part = one.quantize(x[where])
    np.testing.assert_array_equal(part[0], data_of(one, whole[0], where))
    np.testing.assert_array_equal(part[1], whole[1][one.scale_slice(where, x.shape)])


def find_outside(one: Format, where: tuple[slice, ...], cut: np.ndarray) -> tuple[int, ...]:
    """A position outside the box, in a block that it cuts."""
    block = np.argwhere(cut)[0] + [span.start for span in one.cover(where, SHAPE)]
    span = one.data_slice(tuple(int(i) for i in block), SHAPE)
    ranges = [range(s.start, s.stop) if isinstance(s, slice) else (s,) for s in span]
    for at in itertools.product(*ranges):
        if not all(s.start <= i < s.stop for i, s in zip(at, where, strict=True)):
            return at
    raise AssertionError("a block that is cut has positions outside")


def cut_at(positions: list[int], n: int) -> list[slice]:
    """The parts between these cuts."""
    ends = sorted({0, n, *positions})
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


@EACH
@given(
    rows=st.lists(st.integers(0, 48), max_size=3),
    columns=st.lists(st.integers(0, 32), max_size=3),
    seed=st.integers(0, 1000),
)
def test_amaxes_of_parts_give_what_the_whole_gives(
    one: Format, rows: list[int], columns: list[int], seed: int
) -> None:
    x = draw(seed)
    x[seed % 48, seed % 64] = 500
    whole = one.quantize(x)
    parts = list(itertools.product(cut_at(rows, 48), cut_at([2 * c for c in columns], 64)))
    # What an all-reduce by MAX would do, of those alone that a cut goes through.
    largest = np.zeros(one.scale_shape(SHAPE), np.float32)
    for where in parts:
        cover = one.cover(where, SHAPE)
        cut = one.straddles(where, SHAPE)
        own = one.amax(x[where], where, SHAPE)
        largest[cover] = np.maximum(largest[cover], np.where(cut, own, 0))
    for where in parts:
        cover = one.cover(where, SHAPE)
        cut = one.straddles(where, SHAPE)
        own = one.amax(x[where], where, SHAPE)
        amax = np.where(cut, largest[cover], own)
        found = one.quantize(x[where], amax=amax, where=where, shape=SHAPE)
        np.testing.assert_array_equal(found[0], data_of(one, whole[0], where))
        np.testing.assert_array_equal(found[1], whole[1][cover])
        back = one.dequantize(*found, where=where, shape=SHAPE)
        np.testing.assert_array_equal(back, one.dequantize(*whole)[where])


@pytest.mark.parametrize("block", [None, 1, 2, 4])
def test_numbers_are_spread_over_the_box_even_if_it_is_empty(block: int | None) -> None:
    for n in range(4):
        for start, stop in itertools.combinations_with_replacement(range(n + 1), 2):
            window = make_window(Blocks((block,)), slice(start, stop), (n,))
            assert window.spread(np.zeros(window.count)).shape == window.sizes == (stop - start,)


@given(start=st.integers(0, 48 * 64 - 1), size=st.integers(1, 48 * 64), seed=st.integers(0, 99))
def test_flat_ranges_are_at_most_three_boxes(start: int, size: int, seed: int) -> None:
    """As distributed optimizers cut: a range of the tensor in a row, rows in between whole."""
    one = FP8Blocks((8, 32))
    x = draw(seed)
    data, _ = one.quantize(x)
    stop = min(start + size, x.size)
    amax = one.amax(x)
    found = []
    for where in split_flat(start, stop, 64):
        cover = one.cover(where, SHAPE)
        found.append(one.quantize(x[where], amax=amax[cover], where=where, shape=SHAPE)[0].ravel())
    assert len(found) <= 3
    np.testing.assert_array_equal(np.concatenate(found), data.ravel()[start:stop])


def split_flat(start: int, stop: int, width: int) -> list[tuple[slice, slice]]:
    """The boxes of a range of positions row by row: the rest of a row, rows, and the begin of one."""
    first, last = -(-start // width), stop // width
    if first > last:
        row = start // width
        return [(slice(row, row + 1), slice(start % width, stop - row * width))]
    boxes = []
    if start % width:
        boxes.append((slice(first - 1, first), slice(start % width, width)))
    if first < last:
        boxes.append((slice(first, last), slice(0, width)))
    if stop % width:
        boxes.append((slice(last, last + 1), slice(0, stop % width)))
    return boxes


@EACH
def test_dequantized_slices_are_slices(one: Format) -> None:
    x = draw(0)
    whole = one.quantize(x)
    full = one.dequantize(*whole)
    where = np.s_[16:32, 32:64]
    scales = whole[1][one.cover(where, SHAPE)]
    rest = whole[2:]
    part = one.dequantize(data_of(one, whole[0], where), scales, *rest, where=where, shape=SHAPE)
    np.testing.assert_array_equal(part, full[where])


@pytest.mark.parametrize("one", [FP8(), FP8("channel"), MXFP8()], ids=str)
def test_a_part_of_nothing(one: Format) -> None:
    where = np.s_[5:5, 32:]
    x = np.zeros((0, 32), np.float32)
    amax = one.amax(x, where, SHAPE)
    spans = one.cover(where, SHAPE)
    assert amax.shape == tuple(span.stop - span.start for span in spans) and not amax.any()
    data, scales = one.quantize(x, amax=amax, where=where, shape=SHAPE)
    assert data.shape == (0, 32) and scales.shape == amax.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: MXFP8().quantize(x[:, :40], where=np.s_[:, :40], shape=SHAPE),
            (
                "the part [0:48, 0:40] of a tensor of shape (48, 64) cuts blocks of 32, "
                "first block (0, 1) of those it touches; give amax=, the maximum over ranks "
                "of what the method `amax` returns"
            ),
        ),
        (lambda x: MXFP8().quantize(x, where=np.s_[:, :32]), (
                                                                 "give the shape= of the "
                                                                 "whole tensor"
                                                             )),
        (
            lambda x: MXFP8().quantize(x, where=np.s_[:, :32], shape=SHAPE),
            (
                "the part [0:48, 0:32] of a tensor of shape (48, 64) has shape (48, 32), but "
                "the array has (48, 64)"
            ),
        ),
        (lambda x: MXFP8().amax(x[::2], np.s_[::2], SHAPE), (
                                                                "is not a box; give one "
                                                                "slice with step"
                                                            )),
        (lambda x: MXFP8().amax(x[3], 3, SHAPE), "is not a box; give one slice with step"),
        (
            lambda x: MXFP8().quantize(x, amax=np.zeros((48, 3), np.float32)),
            (
                "amax has shape (48, 3), but the part touches (48, 2) blocks; give one amax "
                "per block"
            ),
        ),
    ],
)  # fmt: skip
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        call(draw(0))
    assert message in str(caught.value)
