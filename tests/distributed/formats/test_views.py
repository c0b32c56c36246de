"""Tensors with the attributes of TransformerEngine's, which needs CUDA; and tensors of no format."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import shardmath_torch as smt
from shardmath import FormatError
from shardmath.formats import FP8, MXFP8, Format, FP8Blocks

SHAPE = (96, 160)


class DType(Enum):
    """As `transformer_engine_torch.DType` names its types."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Like(torch.Tensor):
    """A tensor that claims a dtype and a shape and has attributes, as TransformerEngine's classes are made."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], **_: Any) -> Like:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)

    def __init__(self, _: tuple[int, ...], **attributes: Any) -> None:
        self.__dict__ |= attributes

    def __torch_dispatch__(self, *_: Any) -> Any:
        raise AssertionError("nothing is asked of a quantized tensor but its attributes")


class MXFP8Tensor(Like):
    pass


class Float8Tensor(Like):
    pass


class Float8BlockwiseQTensor(Like):
    pass


def pad(scales: torch.Tensor, *multiples: int) -> torch.Tensor:
    """The scales in a larger tensor, whose other elements are no scales."""
    sizes = [n + -n % m for n, m in zip(scales.shape, multiples, strict=True)]
    padded = torch.full(sizes, 99, dtype=scales.dtype)
    padded[tuple(map(slice, scales.shape))] = scales
    return padded


def draw(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * torch.randn(shape[-1]).exp2()).bfloat16()


def make_mx(tensor: torch.Tensor, element: str = "e4m3") -> MXFP8Tensor:
    """Both copies, as `pytorch/tensor/mxfp8_tensor.py` allocates them."""
    flat = tensor.flatten(0, -2)
    data, scales = smt.quantize(MXFP8(element), flat)
    other_data, other_scales = smt.quantize(MXFP8(element, axis=-2), flat)
    return MXFP8Tensor(
        tuple(tensor.shape),
        _rowwise_data=data.view(tensor.shape),
        _rowwise_scale_inv=pad(scales, 128, 4),
        _columnwise_data=other_data.view(tensor.shape),
        _columnwise_scale_inv=pad(other_scales, 4, 128),
        _fp8_dtype=DType[f"kFloat8{element.upper()}"],
        _with_gemm_swizzled_scales=False,
    )


def make_blocks(tensor: torch.Tensor, two_d: bool, power: bool = True) -> Float8BlockwiseQTensor:
    """As `float8_blockwise_tensor.py` has them: transposed columnwise data, and transposed scales of 1 x 128."""
    flat = tensor.flatten(0, -2)
    block = (128, 128) if two_d else (1, 128)
    data, scales = smt.quantize(FP8Blocks(block, power), flat)
    other_data, other_scales = smt.quantize(FP8Blocks(block, power), flat.t())
    if not two_d:
        scales = scales.t()
        other_scales = other_scales.t()
    return Float8BlockwiseQTensor(
        tuple(tensor.shape),
        _rowwise_data=data.view(tensor.shape),
        _rowwise_scale_inv=pad(scales, 1, 4),
        _columnwise_data=other_data.view(tensor.shape[-1], *tensor.shape[:-1]),
        _columnwise_scale_inv=pad(other_scales, 1, 4),
        _fp8_dtype=DType.kFloat8E4M3,
        _is_2D_scaled=two_d,
        _quantizer=SimpleNamespace(force_pow_2_scales=power),
    )


def check(made: Any, columnwise: bool, expected: Format, tensor: torch.Tensor) -> None:
    """Its format is that, and its parts read as the tensor would if it were quantized to the format."""
    format, parts = smt.quantized_parts(made, columnwise=columnwise)
    assert format == expected
    flat = tensor.flatten(0, -2)
    assert list(parts) == ["data", "scales"]
    for found, wanted in zip(parts.values(), smt.quantize(expected, flat), strict=True):
        assert torch.equal(found, wanted)
    way = "columnwise" if columnwise else "rowwise"
    assert parts["data"].data_ptr() == getattr(made, f"_{way}_data").data_ptr()
    assert parts["scales"].data_ptr() == getattr(made, f"_{way}_scale_inv").data_ptr()


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [SHAPE, (2, 32, 64)], ids=str)
def test_mxfp8_has_two_copies(element: str, shape: tuple[int, ...]) -> None:
    tensor = draw(*shape)
    made = make_mx(tensor, element)
    check(made, False, MXFP8(element), tensor)
    check(made, True, MXFP8(element, axis=-2), tensor)
    numbers = smt.sendable(made)
    assert numbers.shape == shape and numbers.dtype == torch.bfloat16
    format, parts = smt.quantized_parts(made)
    wanted = smt.dequantize(format, tuple(parts.values()), torch.float32)
    assert torch.equal(smt.sendable(made, torch.float32), wanted.view(shape))
    # The copy that is left is taken, and one that is not left is told of.
    made._rowwise_data = None
    assert smt.quantized_parts(made).format == MXFP8(element, axis=-2)
    assert (smt.sendable(made) - tensor).abs().max() < tensor.abs().max() / 8
    with pytest.raises(FormatError, match="no rowwise data"):
        smt.quantized_parts(made, columnwise=False)


@pytest.mark.parametrize("two_d", [True, False], ids=["128 x 128", "1 x 128"])
@pytest.mark.parametrize("shape", [(200, 300), (256, 128), (2, 150, 260)], ids=str)
@pytest.mark.parametrize("power", [True, False])
def test_blocks_have_a_transposed_copy(two_d: bool, shape: tuple[int, ...], power: bool) -> None:
    tensor = draw(*shape)
    made = make_blocks(tensor, two_d, power)
    block = (128, 128) if two_d else (1, 128)
    check(made, False, FP8Blocks(block, power), tensor)
    check(made, True, FP8Blocks(block[::-1], power), tensor)
    rows = smt.sendable(made)
    made._rowwise_data = None
    columns = smt.sendable(made)
    assert rows.shape == columns.shape == shape
    # Tiles are the same whichever way they lie, and rows are not columns.
    assert torch.equal(rows, columns) == two_d


def test_one_scale_for_all_and_a_transposed_copy() -> None:
    tensor = draw(2, 3, 64)
    data, scale = smt.quantize(FP8(data="e5m2"), tensor)
    made = Float8Tensor(
        (2, 3, 64),
        _data=data,
        _scale_inv=scale.view(1),
        _fp8_dtype=DType.kFloat8E5M2,
        _transpose=None,
        _transpose_invalid=True,
    )
    format, parts = smt.quantized_parts(made)
    assert format == FP8(data="e5m2")
    assert [parts[name].data_ptr() for name in parts] == [data.data_ptr(), scale.data_ptr()]
    numbers = smt.sendable(made)
    assert torch.equal(numbers, smt.dequantize(format, (data, scale), torch.bfloat16))
    with pytest.raises(FormatError, match="no columnwise"):
        smt.quantized_parts(made, columnwise=True)
    made._transpose = data.movedim(-1, 0).contiguous()
    made._transpose_invalid = False
    made._data = None
    assert torch.equal(smt.sendable(made), numbers)
    with pytest.raises(FormatError, match="no rowwise data"):
        smt.quantized_parts(made, columnwise=False)


def test_storages_without_a_tensor_are_read() -> None:
    """TransformerEngine's internal tensors are no torch.Tensor, and claim no dtype."""
    made = make_mx(draw(*SHAPE))
    bare = SimpleNamespace(**made.__dict__)
    assert smt.sendable(bare).dtype == torch.float32
    assert torch.equal(smt.sendable(bare, torch.bfloat16), smt.sendable(made))


def test_what_others_write_is_seen() -> None:
    """Parts are views: what is quantized into them is what the tensor holds."""
    made = make_mx(draw(*SHAPE))
    other = draw(*SHAPE) * 3
    format, parts = smt.quantized_parts(made)
    smt.quantize(format, other, out=tuple(parts.values()))
    wanted = smt.dequantize(format, smt.quantize(format, other), torch.bfloat16)
    assert torch.equal(smt.sendable(made), wanted)
    # Padding stays.
    assert (made._rowwise_scale_inv[96:] == 99).all()


def test_tensors_of_no_format_are_unwrapped() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    plain = smt.sendable(weight)
    assert type(plain) is torch.Tensor and not plain.requires_grad
    assert plain.data_ptr() == weight.data_ptr()
    steps = torch.arange(4.0)[::2]
    assert smt.sendable(steps).stride() == (2,)
    for name in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        bits = torch.arange(256, dtype=torch.uint8)
        found = smt.sendable(bits.view(getattr(torch, name)))
        assert found.dtype == torch.uint8 and found.data_ptr() == bits.data_ptr()


def swizzled() -> Any:
    made = make_mx(draw(*SHAPE))
    made._with_gemm_swizzled_scales = True
    return made


def truncated() -> Any:
    made = make_mx(draw(*SHAPE))
    made._rowwise_scale_inv = made._rowwise_scale_inv[:4]
    return made


def unknown_type() -> Any:
    made = make_mx(draw(*SHAPE))
    made._fp8_dtype = torch.float8_e4m3fnuz
    return made


BAD: dict[str, tuple[Any, str]] = {
    "swizzled": (swizzled, "swizzled .*; unswizzle them"),
    "cut": (truncated, r"scales have shape \(4, 8\), but the data need at least \(96, 5\)"),
    "type": (unknown_type, "where FP8 e4m3 or e5m2 is needed"),
    "plain": (lambda: torch.ones(2), "Tensor is not a quantized tensor of TransformerEngine"),
    "none": (lambda: None, "NoneType is not a quantized tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_seen_is_told(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(FormatError, match=message):
        smt.quantized_parts(make())


def test_what_cannot_be_sent_is_told() -> None:
    with pytest.raises(FormatError, match=r"not a tensor; pass a torch\.Tensor"):
        smt.sendable([1.0])
    with pytest.raises(FormatError, match="TwoTensor wraps other tensors"):
        smt.sendable(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(FormatError, match="a TwoTensor, not a plain tensor; pass smt"):
        smt.quantize(FP8(), TwoTensor(torch.ones(2), torch.ones(2)))
