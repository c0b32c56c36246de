"""NVFP4: against loops over blocks and ml_dtypes' casts, and what is no usual number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import FormatError
from shardmath.formats import NVFP4
from shardmath.values.formats.floats import E2M1, E4M3, decode, unpack_pairs

F32 = np.float32


def by_loops(x: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Numbers of E2M1, scales and the scale of all; of blocks of so many rows, cast by ml_dtypes."""
    g = np.abs(x).max() / F32(2688)
    data = np.zeros(x.shape, F32)
    scales = np.zeros((-(-x.shape[0] // rows), x.shape[1] // 16), F32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = np.s_[i * rows : (i + 1) * rows, j * 16 : (j + 1) * 16]
            exact = np.abs(x[box]).max() / (F32(6) * g)
            scales[i, j] = exact.clip(0, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32)
            if scales[i, j]:
                scaled = (x[box] / (scales[i, j] * g)).clip(-6, 6)
                data[box] = scaled.astype(ml_dtypes.float4_e2m1fn).astype(F32)
    return data, scales, g


@pytest.mark.parametrize("two_d", [False, True])
@given(seed=st.integers(0, 1 << 30), spread=st.sampled_from([0.1, 1, 4]))
def test_numbers_are_those_of_loops(two_d: bool, seed: int, spread: float) -> None:
    drawn = np.random.default_rng(seed).normal(size=(20, 48))
    x = (drawn * np.exp(spread * drawn)).astype(F32)
    expected = by_loops(x, 16 if two_d else 1)
    one = NVFP4(two_d)
    data, scales, g = one.quantize(x)
    assert data.shape == (20, 24) and scales.shape == one.scale_shape(x.shape) and g.shape == (1, 1)
    np.testing.assert_array_equal(decode(E2M1, unpack_pairs(data)), expected[0])
    np.testing.assert_array_equal(decode(E4M3, scales), expected[1])
    assert g.item() == expected[2]
    full = np.repeat(expected[1], 16, axis=1)
    full = np.repeat(full, 16 if two_d else 1, axis=0)[:20]
    back = one.dequantize(data, scales, g)
    np.testing.assert_array_equal(back, expected[0] * full * expected[2])


@given(seed=st.integers(0, 1 << 30))
def test_what_was_quantized_keeps_its_value_where_scales_are_normal(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(4, 64)).astype(F32)
    data, scales, g = NVFP4().quantize(x)
    assert (decode(E4M3, scales) >= 2.0**-6).all()
    again = NVFP4().quantize(NVFP4().dequantize(data, scales, g))
    for first, second in zip((data, scales, g), again, strict=True):
        np.testing.assert_array_equal(second, first)


def test_of_a_block_with_a_subnormal_scale_numbers_may_change() -> None:
    """A scale of 1.5 steps is rounded to 2, and what is then at most 4.5 becomes 4; its own scale is 1."""
    g = F32(1)
    x = np.zeros((1, 32), F32)
    x[0, 0] = 2688
    x[0, 16] = 6 * 1.5 * 2.0**-9
    data, scales, found = NVFP4().quantize(x)
    assert found == g and scales.tolist() == [[0x7E, 2]]
    once = NVFP4().dequantize(data, scales, found)
    twice = NVFP4().dequantize(*NVFP4().quantize(once))
    assert once[0, 16] == 8 * 2.0**-9 and twice[0, 16] == 6 * 2.0**-9


def test_zero_inf_and_nan() -> None:
    zero = np.zeros((1, 16), F32)
    zero[0, 1] = -0.0
    data, scales, g = NVFP4().quantize(zero)
    assert (data[0, 0], scales.item(), g.item()) == (0x80, 0, 1)
    odd = np.zeros((1, 32), F32)
    odd[0, :3] = np.inf, -np.inf, 448
    odd[0, 16:18] = np.nan, 3
    data, scales, g = NVFP4().quantize(odd)
    assert g.item() == 1 and decode(E4M3, scales).tolist() == [[448, 0.5]]
    back = NVFP4().dequantize(data, scales, g)
    assert back[0, :3].tolist() == [2688, -2688, 448] and back[0, 16:18].tolist() == [3, 3]
    tiny = zero.copy()
    tiny[0, 0] = 2.0**-126
    assert NVFP4().quantize(tiny)[2].item() == 2.0**-126


def test_a_block_that_is_small_beside_the_tensor_is_zero() -> None:
    x = np.zeros((1, 32), F32)
    x[0, 0], x[0, 16], x[0, 17] = 1, 1e-8, -1e-8
    data, scales, _ = NVFP4().quantize(x)
    assert scales[0, 1] == 0 and data[0, 8] == 0x80


def test_parts_need_the_amax_of_all() -> None:
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(F32)
    where = np.s_[1:3, 16:48]
    amax = NVFP4().amax(x)
    with pytest.raises(FormatError, match=r"the part \[1:3, 16:48\] .* give NVFP4 tensor_amax="):
        NVFP4().quantize(x[where], where=where, shape=x.shape)
    known = NVFP4(tensor_amax=float(amax.max()))
    whole = NVFP4().quantize(x)
    part = known.quantize(x[where], where=where, shape=x.shape)
    np.testing.assert_array_equal(part[0], whole[0][1:3, 8:24])
    np.testing.assert_array_equal(part[1], whole[1][known.scale_slice(where, x.shape)])
    np.testing.assert_array_equal(part[2], whole[2])


def test_errors() -> None:
    with pytest.raises(FormatError, match=r"two_d=1\) is not a bool; give True or False"):
        NVFP4(1)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="splits a byte of two numbers"):
        NVFP4().quantize(np.zeros((2, 17), F32))
    with pytest.raises(FormatError, match="2 arrays, not 3; give data, scales, global_scale"):
        NVFP4().dequantize(np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.uint8))
    arrays = np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.uint8), np.zeros(2, F32)
    with pytest.raises(
        FormatError,
        match=(
            r"global_scale has shape \(2,\); give an array "
            r"of one number"
        ),
    ):
        NVFP4().dequantize(*arrays)
