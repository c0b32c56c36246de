"""FP8 with float32 scales: against loops over blocks and ml_dtypes' casts, and what is no usual number."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardmath import FormatError
from shardmath.formats import FP8, Format, FP8Blocks

LEAST = Fraction(2) ** -126
FORMATS = [
    FP8Blocks((2, 3)),
    FP8Blocks((2, 3), power_of_two=True),
    FP8Blocks((1, 4), data="e5m2"),
    FP8Blocks((4,), power_of_two=True, data="e5m2"),
    FP8("tensor"),
    FP8("tensor", power_of_two=True),
    FP8("channel"),
    FP8("channel", power_of_two=True),
]
EACH = pytest.mark.parametrize("one", FORMATS, ids=str)
PEERS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def nearest(value: Fraction) -> np.float32:
    """The float32 nearest to a fraction: by way of float64, whose last bit is set where it was rounded to odd."""
    near = float(value)
    rest = value - Fraction(near)
    bits = np.float64(near).view(np.int64)
    if rest and not bits & 1:
        near = np.nextafter(near, np.inf if rest > 0 else -np.inf)
    return np.float32(near)


def scale_by_fractions(amax: float, most: float, power_of_two: bool) -> np.float32:
    """The scale by its definition."""
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    exact = Fraction(float(amax)) / Fraction(most)
    if not power_of_two:
        return max(nearest(exact), np.float32(2**-126))
    # 448 / amax as float32, its fraction cut off.
    inverse = min(nearest(1 / exact) if exact > LEAST else np.float32(2**126), np.float32(2**126))
    power = np.exp2(np.floor(np.log2(np.float64(inverse))))
    return np.float32(1 / power)


def by_loops(one: Format, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Data and scales, block by block, cast by ml_dtypes."""
    blocks = one.blocks.positions(x.shape)
    count = one.scale_shape(x.shape)
    data = np.zeros(x.shape, np.uint8)
    scales = np.zeros(count, np.float32)
    most = one.element.most
    for at in itertools.product(*map(range, count)):
        box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, blocks, strict=True))
        numbers = np.abs(x[box][~np.isnan(x[box])])
        scales[at] = scale_by_fractions(numbers.max(initial=0), most, one.power_of_two)
        with np.errstate(all="ignore"):
            scaled = (x[box] / scales[at]).clip(-most, most).astype(PEERS[one.data])
        data[box] = np.where(np.isnan(x[box]), 0x7F, scaled.view(np.uint8))
    return data, scales


bits = hnp.arrays(np.uint32, (5, 7), elements=st.integers(0, 0xFFFF_FFFF))
normal = st.integers(0, 1 << 30).map(
    lambda seed: np.random.default_rng(seed).normal(size=(5, 7)).astype(np.float32)
)
arrays = bits.map(lambda words: words.view(np.float32)) | normal


@EACH
@given(x=arrays)
def test_numbers_are_those_of_loops(one: Format, x: np.ndarray) -> None:
    expected = by_loops(one, x)
    data, scales = one.quantize(x)
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(data, expected[0])
    assert scales.dtype == np.float32 and data.dtype == np.uint8


def is_usual(x: np.ndarray) -> bool:
    """Whether no number is NaN, infinite, or so small or large that scales have no more bits."""
    sizes = np.abs(x)
    return bool(((sizes == 0) | ((sizes > 1e-30) & (sizes < 1e38))).all())


@EACH
@given(x=arrays)
def test_what_was_quantized_keeps_its_value(one: Format, x: np.ndarray) -> None:
    """dequantize(quantize(x)) is a projection."""
    if not is_usual(x):
        return
    y = one.dequantize(*one.quantize(x))
    np.testing.assert_array_equal(one.dequantize(*one.quantize(y)), y)


@pytest.mark.parametrize("most", [448, 57344, 2688])
def test_every_scale_comes_back_from_the_largest_number(most: int) -> None:
    """Why that is so with free scales: (amax / most) most / most is amax / most in float32, of every significand."""
    significands = np.arange(1 << 23, dtype=np.uint32)
    amax = (significands | 0x3F80_0000).view(np.float32)
    scales = amax / np.float32(most)
    again = scales * np.float32(most) / np.float32(most)
    assert (again == scales).all()


def row_of(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_zero_inf_nan_and_tiny_blocks(power_of_two: bool) -> None:
    one = FP8Blocks((1, 4), power_of_two)
    data, scales = one.quantize(row_of(0, -0.0, np.nan, 0))
    assert scales.item() == 1 and data.tolist() == [[0, 0x80, 0x7F, 0]]
    data, scales = one.quantize(row_of(np.inf, -np.inf, 1, 1000))
    assert scales.item() == 1 and data.tolist() == [[0x7E, 0xFE, 0x38, 0x7E]]
    data, scales = one.quantize(row_of(2.0**-126, -(2.0**-135), 0, 2.0**-149))
    assert scales.item() == 2.0**-126 and data.tolist() == [[0x38, 0x81, 0, 0]]


def test_an_amax_that_all_know() -> None:
    one = FP8(tensor_amax=896)
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    whole = one.quantize(x)
    part = one.quantize(x[1:3, :5], where=np.s_[1:3, :5], shape=(4, 8))
    assert whole[1].tolist() == [[2]] == part[1].tolist()
    np.testing.assert_array_equal(part[0], whole[0][1:3, :5])
    assert FP8(tensor_amax=0).quantize(x)[1].tolist() == [[1]]


def test_shapes_of_scales() -> None:
    assert FP8().scale_shape((3, 4, 5)) == (1, 1, 1) and FP8().scale_shape(()) == ()
    assert FP8("channel").scale_shape((3, 4, 5)) == (3, 4, 1)
    assert FP8Blocks().scale_shape((576, 7168)) == (5, 56)
    data, scales = FP8().quantize(np.zeros((0, 4), np.float32))
    assert data.shape == (0, 4) and scales.tolist() == [[1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP8Blocks(()), (
                                    "FP8Blocks(()) has a tile without a size; give sizes "
                                    "such as (128, 128)"
                                )),
        (lambda: FP8Blocks((0, 128)), (
                                          "a size of a block is 0, but must be at least 1; "
                                          "give 1 or more"
                                      )),
        (lambda: FP8Blocks((None, 128)), (
                                             "128)) has a tile without a size; give sizes "
                                             "such as (128, 128)"
                                         )),
        (lambda: FP8Blocks("12"), "the sizes of a block are '12'; give a tuple"),
        (lambda: FP8Blocks(power_of_two="yes"), "FP8Blocks(power_of_two='yes') is not a bool"),
        (lambda: FP8("row"), "FP8(per='row') is not known; use 'tensor' or 'channel'"),
        (lambda: FP8("channel", tensor_amax=1), (
                                                    "each channel has its own amax; leave "
                                                    "tensor_amax out"
                                                )),
        (lambda: FP8(tensor_amax=float("nan")), (
                                                    "tensor_amax=nan is not a magnitude in "
                                                    "float32; give a finite number >= 0"
                                                )),
        (lambda: FP8(tensor_amax=1e39), (
                                            "tensor_amax=1e+39 is not a magnitude in "
                                            "float32; give a finite number >= 0"
                                        )),
        (lambda: FP8(tensor_amax="1"), (
                                           "tensor_amax='1' is not a magnitude in float32; "
                                           "give a finite number >= 0"
                                       )),
        (lambda: FP8().quantize(np.float32(3)), (
                                                    "x has no dimension, and single numbers "
                                                    "cannot be quantized"
                                                )),
        (lambda: FP8Blocks().scale_shape((5,)), (
                                                    "blocks of 128 x 128 have 2 dimensions, "
                                                    "but the tensor has 1"
                                                )),
        (lambda: FP8Blocks().scale_shape((-1, 5)), (
                                                       "shape (-1, 5) has a size of -1; give "
                                                       "sizes of 0 or more"
                                                   )),
    ],
)  # fmt: skip
def test_errors(make: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)
