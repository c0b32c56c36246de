"""Beside torchao, a second implementation: its bytes where blocks are finite and not tiny, and what differs else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx
from torchao.prototype.mx_formats.utils import to_blocked
from torchao.quantization.granularity import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

import shardmath_torch as smt
from shardmath import FormatError
from shardmath.formats import FP8, MXFP8, Format, FP8Blocks, swizzle

MODES = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EACH = pytest.mark.parametrize(
    "one", [MXFP8(data, rounding) for data in ELEMENTS for rounding in MODES], ids=str
)


def theirs(one: MXFP8, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of torchao, as bytes."""
    scales, data = to_mx(tensor, ELEMENTS[one.data], 32, MODES[one.rounding])
    return data.view(torch.uint8), scales.view(torch.uint8)


def draw(count: int) -> torch.Tensor:
    """Blocks of bfloat16 without NaN and Inf, whose amaxes are all of its exponents; in each some of its extremes."""
    torch.manual_seed(0)
    exponents = torch.randint(-130, 128, (count, 1))
    values = torch.ldexp(torch.rand(count, 32) * 2 - 1, exponents).bfloat16()
    extremes = torch.tensor([0.0, -0.0, 1e-40, -(2.0**-126), 2.0**-133]).bfloat16()
    at = torch.rand(count, 32) < 0.05
    values[at] = extremes[torch.randint(0, 5, (int(at.sum()),))]
    return values


@EACH
def test_bytes_are_torchaos(one: MXFP8) -> None:
    tensor = draw(1 << 13)
    # Every amax of bfloat16, too, in a block with others beside it.
    patterns = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    each = patterns[:, None] * torch.linspace(-1, 1, 32)
    tensor = torch.cat([tensor, each.bfloat16()])
    data, scales = smt.quantize(one, tensor)
    their_data, their_scales = theirs(one, tensor)
    assert torch.equal(scales, their_scales)
    is_usual = scales[:, 0] > 0
    assert is_usual.sum() > 30_000
    assert torch.equal(data[is_usual], their_data[is_usual])


@EACH
def test_tiny_blocks_are_multiples_of_another_scale_there(one: MXFP8) -> None:
    """torchao 0.18 does not scale them by 2^127: it takes 1, or the smallest normal number, for the scale of byte 0."""
    tensor = torch.full((1, 32), 2.0**-130, dtype=torch.bfloat16)
    data, scales = smt.quantize(one, tensor)
    their_data, their_scales = theirs(one, tensor)
    assert scales.item() == their_scales.item() == 0
    assert torch.equal(smt.dequantize(one, (data, scales), torch.bfloat16), tensor)
    wrong = smt.dequantize(one, (their_data, their_scales), torch.bfloat16)
    assert (wrong[0, 0] / 2.0**-131).item() == (1 if one.rounding == "floor" else 0)


@EACH
def test_blocks_with_nan_and_infinities_differ_as_is_known(one: MXFP8) -> None:
    tensor = torch.ones(2, 32, dtype=torch.bfloat16)
    tensor[0, 3] = torch.nan
    tensor[1, 3] = torch.inf
    data, scales = smt.quantize(one, tensor)
    their_data, their_scales = theirs(one, tensor)
    nan = their_data[0].view(ELEMENTS[one.data]).isnan()
    ours = data[0].view(ELEMENTS[one.data]).isnan()
    assert their_scales[0].item() == 255
    if one.rounding == "floor":
        # Later versions have NaN for all data, as here, and the byte of NaN for Inf, too.
        assert scales.flatten().tolist() == [255, 255]
        assert ours.all() and nan.nonzero().tolist() == [[3]]
        assert their_scales[1].item() == (247 if one.data == "e4m3" else 240)
        return
    # There NaN makes the byte of the block NaN, and all data; here it does not count.
    assert nan.all() and ours.nonzero().tolist() == [[3]] and scales[0].item() < 128
    # The byte of a block with Inf is the same.
    assert scales[1].item() == their_scales[1].item()
    assert torch.equal(data[1], their_data[1])


@EACH
@pytest.mark.parametrize("turned", [False, True])
def test_mx_tensors_are_seen_as_they_are(one: MXFP8, turned: bool) -> None:
    tensor = draw(256).view(64, 128)
    made = MXTensor.to_mx(tensor, ELEMENTS[one.data], 32, MODES[one.rounding])
    if turned:
        made = made.t()
    format, parts = smt.quantized_parts(made)
    assert format == MXFP8(one.data, "floor", -2 if turned else -1)
    assert parts["data"].data_ptr() == made.qdata.data_ptr()
    assert parts["scales"].data_ptr() == made.scale.data_ptr()
    assert parts["data"].dtype == parts["scales"].dtype == torch.uint8
    # torchao computes 2^-127 of the byte 0 as a power, and that is right.
    assert torch.equal(smt.sendable(made), made.dequantize())
    assert smt.sendable(torch.nn.Parameter(made, False)).dtype == torch.bfloat16


def test_swizzled_scales_are_no_view_and_yet_sendable() -> None:
    tensor = torch.randn(256, 256, dtype=torch.bfloat16)
    plain = MXTensor.to_mx(tensor, torch.float8_e4m3fn)
    made = MXTensor.to_mx(tensor, torch.float8_e4m3fn, is_swizzled_scales=True)
    with pytest.raises(FormatError, match="swizzled"):
        smt.quantized_parts(made)
    assert torch.equal(smt.sendable(made), smt.sendable(plain))
    scales = plain.scale.view(torch.uint8)
    blocked = to_blocked(scales).flatten()
    assert blocked.tolist() == swizzle(scales.numpy()).tolist()


def test_what_torchao_trains_with_dequantizes_itself() -> None:
    """Its scales are to be divided by, so that there is no view."""
    tensor = torch.randn(16, 16, dtype=torch.bfloat16)
    made = hp_tensor_to_float8_dynamic(tensor, torch.float8_e4m3fn, LinearMMConfig())
    assert torch.equal(smt.sendable(made), made.to_original_precision())
    with pytest.raises(FormatError, match="is not a quantized tensor of TransformerEngine"):
        smt.quantized_parts(made)


FLOAT8: dict[str, tuple[Any, Format]] = {
    "tensor": (PerTensor(), FP8()),
    "row": (PerRow(), FP8("channel")),
    "tile": (PerBlock([128, 128]), FP8Blocks()),
    "group": (PerBlock([1, 128]), FP8Blocks((1, 128))),
}


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_tensors_have_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    granularity, expected = FLOAT8[name]
    torch.manual_seed(0)
    tensor = torch.randn(256, 384).to(dtype)
    made = Float8Tensor.from_hp(tensor, granularity=granularity)
    format, parts = smt.quantized_parts(made)
    assert format == expected
    assert parts["data"].data_ptr() == made.qdata.data_ptr()
    assert torch.equal(smt.sendable(made), made.dequantize())
    if dtype == torch.float32:
        data, scales = smt.quantize(format, tensor)
        assert torch.equal(scales, parts["scales"])
        assert torch.equal(data, parts["data"])
