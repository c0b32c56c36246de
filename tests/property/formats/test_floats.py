"""Floats of few bits: against ml_dtypes, against torch, and against every midpoint between two neighbors."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from shardmath.values.formats.floats import (
    E2M1,
    E4M3,
    E5M2,
    Float,
    decode,
    decode_e8m0,
    encode,
    pack_pairs,
    unpack_pairs,
)

PEERS = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
}
KINDS = pytest.mark.parametrize("kind", PEERS, ids=lambda kind: kind.name)


def many_floats() -> np.ndarray:
    """Every bfloat16, its float32 neighbors, and float32 drawn by their bits."""
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    return np.concatenate((words, words + 1, words - np.uint32(1), drawn)).view(np.float32)


@KINDS
def test_codes_are_the_numbers_of_ml_dtypes(kind: Float) -> None:
    codes = np.arange(1 << kind.bits, dtype=np.uint8)
    expected = codes.view(PEERS[kind]).astype(np.float32)
    np.testing.assert_array_equal(decode(kind, codes), expected)
    np.testing.assert_array_equal(np.signbit(decode(kind, codes)), np.signbit(expected))


@KINDS
def test_rounding_is_that_of_ml_dtypes_where_nothing_saturates(kind: Float) -> None:
    values = many_floats()
    numbers = values[~np.isnan(values)]
    # ml_dtypes makes NaN and infinities of what is too large.
    inside = np.clip(numbers, -kind.most, kind.most).astype(PEERS[kind]).view(np.uint8)
    np.testing.assert_array_equal(encode(kind, numbers), inside)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)]
)
def test_rounding_is_that_of_torch_where_nothing_saturates(kind: Float, dtype: torch.dtype) -> None:
    values = many_floats()
    numbers = torch.from_numpy(values[~np.isnan(values)])
    inside = numbers.clamp(-kind.most, kind.most).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(encode(kind, numbers.numpy()), inside)


@KINDS
def test_ties_go_to_the_even_code(kind: Float) -> None:
    finite = decode(kind, np.arange(kind.largest + 1, dtype=np.uint8))
    for code in range(kind.largest):
        middle = (Fraction(float(finite[code])) + Fraction(float(finite[code + 1]))) / 2
        at = np.float32(float(middle))
        assert Fraction(float(at)) == middle, "a float32 has the middle of two numbers of few bits"
        around = np.array([np.nextafter(at, 0), at, np.nextafter(at, np.inf)], np.float32)
        assert encode(kind, around).tolist() == [code, code + code % 2, code + 1]
        sign = 1 << (kind.bits - 1)
        assert encode(kind, -around).tolist() == [
            sign + c for c in (code, code + code % 2, code + 1)
        ]


@KINDS
def test_what_is_too_large_and_what_is_no_number(kind: Float) -> None:
    large = np.array([kind.most * 1.01, 3e38, np.inf, -np.inf], np.float32)
    sign = 1 << (kind.bits - 1)
    most = kind.largest
    assert encode(kind, large).tolist() == [most, most, most, most + sign]
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    assert encode(kind, nans).tolist() == [kind.nan] * 3
    assert encode(kind, np.array([0.0, -0.0], np.float32)).tolist() == [0, sign]


def test_e8m0_is_that_of_ml_dtypes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decode_e8m0(codes), expected)
    assert [Fraction(float(x)) for x in decode_e8m0(codes)[:255]] == [
        Fraction(2) ** (b - 127) for b in range(255)
    ]


def test_pairs_are_those_of_torch() -> None:
    codes = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
    packed = pack_pairs(codes)
    assert packed.shape == (2, 8) and packed[0, 0] == 0x10, "the first number is in the low bits"
    np.testing.assert_array_equal(unpack_pairs(packed), codes)


def test_arrays_without_elements_and_with_strides() -> None:
    assert encode(E4M3, np.zeros((0, 3), np.float32)).shape == (0, 3)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(encode(E4M3, values.T[::2]), encode(E4M3, values).T[::2])
    assert encode(E4M3, np.float32([[3]])[0, 0:1]).tolist() == [0x44]
