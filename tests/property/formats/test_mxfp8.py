"""MXFP8: recorded blocks, every bfloat16 amax against integers, and what happens to what is no usual number."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardmath import FormatError
from shardmath.formats import MXFP8
from shardmath.values.formats.floats import E4M3, E5M2, Float, decode, decode_e8m0
from shardmath.values.formats.mxfp8 import round_down, round_up

VECTORS = Path(__file__).parents[2] / "vectors" / "mxfp8_blocks.json"
RULES = {"rceil": "te_rceil", "floor": "ocp_floor"}
AMAXES = np.arange(0x7F80, dtype=np.uint32) << 16
"""Every finite bfloat16 that is not negative, as float32's bits."""
ELEMENTS = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda kind: kind.name)
FORMATS = [MXFP8(data, rounding) for data in ("e4m3", "e5m2") for rounding in RULES]
EACH = pytest.mark.parametrize("one", FORMATS, ids=str)


def read_block(words: list[str]) -> np.ndarray:
    """One row of bfloat16 as float32."""
    return (np.array([int(word, 16) for word in words], np.uint32) << 16).view(np.float32)[None]


@pytest.mark.parametrize("rounding", RULES)
def test_every_recorded_block(rounding: str) -> None:
    cases = json.loads(VECTORS.read_text())["cases"]
    seen = 0
    for case in cases:
        recorded = case[RULES[rounding]]
        if recorded is None:
            assert not case["finite"]
            continue
        data, scales = MXFP8(rounding=rounding).quantize(read_block(case["bf16"]))
        assert scales.tolist() == [[recorded["scale"]]], case["id"]
        assert data.tobytes().hex() == recorded["data"], case["id"]
        seen += 1
    assert (len(cases), seen) == (113, 113 if rounding == "rceil" else 107)


def ceil_log2(number: Fraction) -> int:
    """The least exponent of a power of two that is not below a positive number."""
    exponent = number.numerator.bit_length() - number.denominator.bit_length() - 1
    while Fraction(2) ** exponent < number:
        exponent += 1
    return exponent


def by_integers(bits: int, element: Float, rounding: str) -> int:
    """The byte by the rule's definition, in exact arithmetic."""
    amax = Fraction(float(np.uint32(bits).view(np.float32)))
    if not amax:
        return 0
    if rounding == "rceil":
        exponent = ceil_log2(amax / Fraction(element.most))
    else:
        exponent = -ceil_log2(1 / amax) - element.exponent
    return max(0, exponent + 127)


@ELEMENTS
@pytest.mark.parametrize("rounding", RULES)
def test_every_bfloat16_amax(element: Float, rounding: str) -> None:
    assert len(AMAXES) == 32_640
    rule = round_up if rounding == "rceil" else round_down
    found = rule(element, AMAXES.view(np.float32))
    expected = [by_integers(int(bits), element, rounding) for bits in AMAXES]
    assert found.tolist() == expected
    if element is E4M3:
        assert max(expected) == (247 if rounding == "rceil" else 246)
        assert not found[: 0x0461 if rounding == "rceil" else 0].any()


@EACH
def test_data_are_the_nearest_of_the_scaled_numbers(one: MXFP8) -> None:
    """Brute force over all codes, in fractions."""
    drawn = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    x = drawn * np.array([[1], [1e-38], [1e30], [1e-41]], np.float32)
    data, scales = one.quantize(x)
    numbers = [
        Fraction(float(v))
        for v in decode(one.element, np.arange(one.element.largest + 1, dtype=np.uint8))
    ]
    for row, byte, codes in zip(x, scales[:, 0], data, strict=True):
        for value, code in zip(row, codes, strict=True):
            scaled = Fraction(float(abs(value))) * Fraction(2) ** (127 - int(byte))
            distance = [abs(scaled - number) for number in numbers]
            nearest = [c for c, far in enumerate(distance) if far == min(distance)]
            best = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
            assert (code & 0x7F, code >> 7) == (best, int(np.signbit(value)))


def row_of(*values: float) -> np.ndarray:
    """A block that begins with these; the others are 0."""
    out = np.zeros((1, 32), np.float32)
    out[0, : len(values)] = values
    return out


def test_zero_blocks_have_byte_0_and_signs() -> None:
    for one in FORMATS:
        data, scales = one.quantize(row_of(0.0, -0.0))
        assert scales.item() == 0 and data[0, :2].tolist() == [0, 0x80]
        back = one.dequantize(data, scales)
        assert not back.any() and np.signbit(back[0, 1])


def test_subnormal_blocks_keep_multiples() -> None:
    tiny = row_of(2.0**-133, 2.0**-149)
    for rounding in RULES:
        data, scales = MXFP8(rounding=rounding).quantize(tiny)
        # 2^-133 is 2^-6 times 2^-127; 2^-149 is far below half the least multiple.
        assert scales.item() == 0 and data[0, :2].tolist() == [0x08, 0]


def test_nan_stays_and_does_not_count() -> None:
    for one in FORMATS:
        if one.rounding == "floor":
            continue
        data, scales = one.quantize(row_of(np.nan, 2.0))
        alone = one.quantize(row_of(0.0, 2.0))
        assert scales == alone[1] and data[0, 0] == 0x7F and data[0, 1] == alone[0][0, 1]
        assert np.isnan(one.dequantize(data, scales)[0, 0])
        nothing = one.quantize(np.full((1, 32), np.nan, np.float32))
        assert nothing[1].item() == 0 and (nothing[0] == 0x7F).all()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_infinities_saturate_and_come_back(element: str) -> None:
    one = MXFP8(element)
    data, scales = one.quantize(row_of(np.inf, -np.inf, 1.0))
    most = one.element.largest
    assert scales.item() == 254 and data[0, :2].tolist() == [most, most + 0x80]
    assert one.dequantize(data, scales)[0, :3].tolist() == [np.inf, -np.inf, 0.0]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_by_floor_a_block_that_is_not_finite_is_nan(element: str, value: float) -> None:
    """And only that block, even where the rank that has the value is another."""
    one = MXFP8(element, "floor")
    x = np.concatenate([row_of(value, 2.0), row_of(2.0)], axis=1)
    data, scales = one.quantize(x)
    assert scales.tolist() == [[255, one.quantize(row_of(2.0))[1].item()]]
    assert (data[0, :32] & 0x7F == one.element.nan).all()
    assert np.isnan(one.dequantize(data, scales)[0, :32]).all()
    amax = one.amax(x)
    cut = one.quantize(x[:, 8:], amax=amax, where=np.s_[:, 8:], shape=(1, 64))
    np.testing.assert_array_equal(cut[0], data[:, 8:])


def test_the_largest_numbers_overflow_by_rceil_alone() -> None:
    largest = np.array([0x7F7F0000], np.uint32).view(np.float32).item()
    data, scales = MXFP8().quantize(row_of(largest))
    assert (scales.item(), data[0, 0]) == (247, 0x78)
    assert MXFP8().dequantize(data, scales)[0, 0] == np.inf
    floor = MXFP8(rounding="floor")
    assert np.isfinite(floor.dequantize(*floor.quantize(row_of(largest)))).all()


blocks = hnp.arrays(
    np.uint32, (1, 32), elements=st.integers(0, 0xFFFF_FFFF), fill=st.integers(0, 0xFFFF_FFFF)
).map(lambda bits: bits.view(np.float32))


@EACH
@given(x=blocks)
@example(x=row_of(450, 1, -3, 224))  # byte 128 first, 127 afterwards: other bytes, the same numbers
def test_what_was_quantized_keeps_its_value(one: MXFP8, x: np.ndarray) -> None:
    """dequantize(quantize(x)) is a projection, wherever it does not overflow float32."""
    y = one.dequantize(*one.quantize(x))
    if np.isinf(y).any():
        return
    data, scales = one.quantize(y)
    np.testing.assert_array_equal(one.dequantize(data, scales), y)
    if one.rounding == "floor":
        first = one.quantize(x)
        np.testing.assert_array_equal(data, first[0])
        np.testing.assert_array_equal(scales, first[1])


def test_by_rceil_bytes_may_change() -> None:
    x = row_of(450, 1)
    first = MXFP8().quantize(x)
    again = MXFP8().quantize(MXFP8().dequantize(*first))
    assert (first[1].item(), first[0][0, 0]) == (128, 0x76)
    assert (again[1].item(), again[0][0, 0]) == (127, 0x7E)


def test_columns_are_rows_of_the_transposed() -> None:
    x = np.random.default_rng(2).normal(size=(64, 6)).astype(np.float32)
    data, scales = MXFP8(axis=-2).quantize(x)
    other = MXFP8().quantize(np.ascontiguousarray(x.T))
    np.testing.assert_array_equal(data, other[0].T)
    np.testing.assert_array_equal(scales, other[1].T)
    assert scales.shape == (2, 6) and MXFP8(axis=-2).padded_scale_shape((64, 6)) == (4, 128)


def test_scales_that_are_nan() -> None:
    data = np.zeros((1, 32), np.uint8)
    assert np.isnan(MXFP8().dequantize(data, np.full((1, 1), 255, np.uint8))).all()
    assert decode_e8m0(np.uint8([0]))[0] == 2.0**-127


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP8("e2m1"), "MXFP8(data='e2m1') is not known; use 'e4m3' or 'e5m2'"),
        (lambda: MXFP8(rounding="even"), "use 'rceil' or 'floor'"),
        (lambda: MXFP8(axis=0), "MXFP8 has axis 0; give -1 for blocks along the last dimension"),
        (lambda: MXFP8(axis=1.5), "the axis of MXFP8 is 1.5; give an integer"),
        (lambda: MXFP8(axis=-2).scale_shape((64,)), (
                                                        "blocks of 32 x 1 have 2 dimensions, "
                                                        "but the tensor has 1"
                                                    )),
        (lambda: MXFP8().quantize(np.zeros((2, 32))), "x has dtype float64; pass an array of float32"),
        (
            lambda: MXFP8().quantize(np.zeros((2, 32), ">f4")),
            "x has dtype >f4, of another byte order; pass x.astype(x.dtype.newbyteorder('='))",
        ),
        (lambda: MXFP8().dequantize(np.zeros(32, np.uint8)), (
                                                                 "1 array, not 2; give data, "
                                                                 "scales"
                                                             )),
        (
            lambda: MXFP8().dequantize(np.zeros((2, 64), np.uint8), np.zeros((2, 4), np.uint8)),
            "scales have shape (2, 4), but the data have (2, 2) blocks",
        ),
    ],
)  # fmt: skip
def test_errors(make: object, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)
