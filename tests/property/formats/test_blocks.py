"""Blocks and slices: of everything numpy takes in brackets, against what numpy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import FormatError
from shardmath.formats import FP8, MXFP8, NVFP4, Blocks, FP8Blocks

SHAPE = (5, 12, 9)
KINDS = [
    Blocks(()),
    Blocks((4,)),
    Blocks((4, 1)),
    Blocks((3, 4)),
    Blocks((2, 1, 4)),
    Blocks((None,)),
    Blocks((), others=None),
    Blocks((None, 4)),
]

ends = st.none() | st.integers(-15, 15)
items = (
    st.integers(-12, 11)
    | st.builds(slice, ends, ends)
    | st.builds(slice, ends, ends, st.sampled_from([1, 2, 4, -1, -3]))
    | st.none()
    | st.just(...)
)
indices = items | st.lists(items, max_size=5).map(tuple)


def number_blocks(blocks: Blocks, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The number of its block at each position, and the numbers as scales have them; by loops."""
    sizes = blocks.positions(shape)
    scales = np.arange(np.prod(blocks.count(shape))).reshape(blocks.count(shape))
    per_position = np.zeros(shape, int)
    for at in np.ndindex(*shape):
        per_position[at] = scales[tuple(i // n for i, n in zip(at, sizes, strict=True))]
    return per_position, scales


def is_whole(taken: np.ndarray, all_of: np.ndarray) -> bool:
    """Whether each block is taken with all its positions or with none."""
    inside, count = np.unique(taken, return_counts=True)
    return bool((count == np.bincount(all_of.ravel())[inside]).all())


@pytest.mark.parametrize("blocks", KINDS, ids=str)
@given(index=indices)
@example(index=np.s_[4:, 8:, 8])  # a position that is a block of its own
@example(index=np.s_[5:5, 3:3])
@example(index=np.s_[::-1, ..., None])
def test_scales_of_a_slice_are_a_slice_of_the_scales(blocks: Blocks, index: Any) -> None:
    per_position, scales = number_blocks(blocks, SHAPE)
    try:
        taken = per_position[index]
    except IndexError:
        with pytest.raises(FormatError):
            blocks.scale_slice(index, SHAPE)
        return
    try:
        found = blocks.scale_slice(index, SHAPE)
    except FormatError:
        # Only what cuts a block, or goes through one with a step; where another dimension is empty, nobody can see.
        assert not taken.size or not is_legal(blocks, index)
        return
    of_scales = scales[found]
    assert of_scales.ndim == taken.ndim
    if taken.size:
        assert None in blocks.per_dimension(3) or is_whole(taken, per_position)
        spread = of_scales
        for d, (n, k) in enumerate(zip(taken.shape, of_scales.shape, strict=True)):
            if n != k:
                changes = np.flatnonzero(np.diff(blocks_along(taken, d), prepend=-1))
                spread = np.repeat(spread, np.diff(changes, append=n), axis=d)
        np.testing.assert_array_equal(spread, taken)


def blocks_along(numbers: np.ndarray, d: int) -> np.ndarray:
    """The numbers along one dimension, at the first position of the others."""
    return np.moveaxis(numbers, d, 0).reshape(numbers.shape[d], -1)[:, 0]


def is_legal(blocks: Blocks, index: Any) -> bool:
    """Whether each dimension is taken in consecutive whole blocks, by its definition."""
    for positions, size in zip(np.indices(SHAPE), blocks.per_dimension(3), strict=True):
        if size in (1, None):
            continue
        taken = positions[index]
        distinct = np.unique(taken)
        descends = any((np.diff(taken, axis=axis) < 0).any() for axis in range(taken.ndim))
        if descends or (np.diff(distinct) != 1).any():
            return False
        in_block = np.unique(distinct // size, return_counts=True)
        full = np.bincount(np.arange(positions.max() + 1) // size)
        if (in_block[1] != full[in_block[0]]).any():
            return False
    return True


@pytest.mark.parametrize("blocks", KINDS, ids=str)
@given(index=indices)
def test_slices_of_scales_go_back_and_forth(blocks: Blocks, index: Any) -> None:
    per_position, scales = number_blocks(blocks, SHAPE)
    try:
        of_scales = scales[index]
        of_data = blocks.data_slice(index, SHAPE)
    except (IndexError, FormatError):
        return
    assert set(np.unique(per_position[of_data])) == set(np.unique(of_scales))
    if not of_scales.size:
        return
    back = scales[blocks.scale_slice(of_data, SHAPE)]
    np.testing.assert_array_equal(back.ravel(), of_scales.ravel())


def test_each_way_to_write_an_index() -> None:
    rows = MXFP8()
    shape = (256, 128)
    whole = (slice(0, 256, 1), slice(0, 4, 1))
    assert rows.scale_slice(..., shape) == rows.scale_slice((), shape) == whole
    assert rows.scale_slice(np.s_[-64:, -32:], shape) == (slice(192, 256, 1), slice(3, 4, 1))
    assert rows.scale_slice(3, shape) == (3, slice(0, 4, 1))
    assert rows.scale_slice(np.s_[-1, None, ..., 32:96], shape) == (255, None, slice(1, 3, 1))
    assert rows.scale_slice(np.s_[::2], shape) == (slice(0, 256, 2), slice(0, 4, 1))
    assert rows.scale_slice(np.s_[::-1], shape)[0] == slice(255, None, -1)
    assert rows.scale_slice(np.s_[:, 500:], shape)[1] == slice(4, 4, 1)
    assert rows.data_slice(np.s_[:, 1], shape)[1] == slice(32, 64, 1)
    assert FP8Blocks().scale_slice(np.s_[128:], (576, 7168))[0] == slice(1, 5, 1)
    assert FP8Blocks().data_slice(np.s_[4:], (576, 7168))[0] == slice(512, 576, 1)
    assert FP8().scale_slice(np.s_[3:5, 7], (6, 8)) == (slice(0, 1, 1), 0)
    assert FP8("channel").scale_slice(np.s_[3:5, 7:], (6, 8)) == (slice(3, 5, 1), slice(0, 1, 1))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            np.s_[:, 40:],
            (
                "tensor 'w': slice 40:128 of dimension 1 (128 positions) cuts a block of 32; "
                "use 32 or 64 instead of 40"
            ),
        ),
        (np.s_[:, :100], (
                             "slice 0:100 of dimension 1 (128 positions) cuts a block of 32; "
                             "use 96 or 128"
                         )),
        (np.s_[:, 3], "slice 3:4 of dimension 1 (128 positions) cuts a block of 32"),
        (np.s_[:, ::2], (
                            "slice 0:128:2 of dimension 1 (128 positions) has step 2 inside "
                            "blocks of 32"
                        )),
        (np.s_[:, ::-1], (
                             "slice 127::-1 of dimension 1 (128 positions) has step -1 "
                             "inside blocks"
                         )),
        (np.s_[0, 0, 0], (
                             "has too many items for shape (256, 128); give at most one per "
                             "dimension, and ... once"
                         )),
        (np.s_[..., ...], (
                              "has too many items for shape (256, 128); give at most one per "
                              "dimension, and ... once"
                          )),
        (256, (
                  "tensor 'w': dimension 0 has 256 positions, and none at 256; give an index "
                  "from -256 to 255"
              )),
        (True, "dimension 0: an index is True; give an integer"),
        (np.s_[1.5:], (
                          "slice(1.5, None, None) is not a slice; give a slice of integers, "
                          "with a step other than 0"
                      )),
        (np.s_[::0], "is not a slice; give a slice of integers, with a step other than 0"),
        (np.arange(3), "dimension 0: an index is array([0, 1, 2]); give an integer"),
        ("a", "dimension 0: an index is 'a'; give an integer"),
    ],
)  # fmt: skip
def test_what_is_refused(index: Any, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        MXFP8().scale_slice(index, (256, 128), "w")
    assert message in str(caught.value)


def test_steps_over_scales_are_refused() -> None:
    with pytest.raises(
        FormatError,
        match=(
            "slice 0:4:2 of the scales of dimension 1 has "
            "step 2 over blocks of 32; give a slice with "
            "step 1"
        ),
    ):
        MXFP8().data_slice(np.s_[:, ::2], (256, 128))


def test_legal_cuts() -> None:
    assert MXFP8().legal_cuts((2, 70)) == ((0, 1, 2), (0, 32, 64, 70))
    assert MXFP8(axis=-2).legal_cuts((70, 2)) == ((0, 32, 64, 70), (0, 1, 2))
    assert FP8Blocks().legal_cuts((576, 200))[0] == (0, 128, 256, 384, 512, 576)
    assert FP8().legal_cuts((3, 4)) == ((0, 3), (0, 4))
    assert NVFP4(two_d=True).legal_cuts((40, 32)) == ((0, 16, 32, 40), (0, 16, 32))
    assert MXFP8().padded_scale_shape((576, 7168)) == (640, 224)
    assert MXFP8().padded_scale_shape((2, 576, 100)) == (2, 640, 4)
    assert NVFP4().padded_scale_shape((5, 7168)) == (128, 448)


@given(rows=st.integers(0, 300), columns=st.integers(0, 10))
def test_padding_round_trips(rows: int, columns: int) -> None:
    scales = np.random.default_rng(0).integers(1, 255, (rows, columns), np.uint8)
    one = MXFP8()
    shape = (rows, 32 * columns)
    padded = one.pad_scales(scales)
    assert padded.shape == one.padded_scale_shape(shape)
    assert int(padded.sum()) == int(scales.sum())
    np.testing.assert_array_equal(one.unpad_scales(padded, shape), scales)


def test_other_padding_is_refused() -> None:
    with pytest.raises(FormatError, match=r"padded has shape \(2, 4\), but a tensor"):
        MXFP8().unpad_scales(np.zeros((2, 4), np.uint8), (2, 128))
