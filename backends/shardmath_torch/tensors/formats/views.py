"""Views: other libraries' quantized tensors as formats and plain tensors of the same memory.

1. Tensors are recognized by their attributes, so that neither TransformerEngine nor torchao is imported.
2. Padding of scales is left out, and transposed data are viewed in the tensor's orientation. Parts of
   TransformerEngine's blockwise tensors have two dimensions, as its scales do, even if a tensor has more.
3. TransformerEngine's tensors have two copies, made independently. The rowwise one is used, or the columnwise one if
   the other was dropped, or on request.
4. A tensor does not record the rule of its scales. The format has TransformerEngine's rule or torchao's default,
   "floor", which matters only if numbers are quantized again.

>>> sendable(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))
tensor([1., 1.], dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.errors import FormatError
from shardmath.base.text import shown
from shardmath.values.formats.format import Format
from shardmath.values.formats.fp8 import FP8, FP8Blocks
from shardmath.values.formats.mxfp8 import MXFP8
from shardmath_torch.groups import compat
from shardmath_torch.tensors.formats.quantizing import dequantize

__all__ = ["Quantized", "quantized_parts", "sendable"]

Reader: TypeAlias = Callable[[Any, bool | None], "Quantized"]

TILE = 128
"""The length of a block in TransformerEngine's blockwise tensors."""
SHORT = ("float8", "float4")
"""Prefixes of the names of dtypes without arithmetic."""


class Quantized(NamedTuple):
    """A quantized tensor's format, and its data and scales by name, as plain tensors that share its memory."""

    format: Format
    parts: dict[str, Tensor]


def quantized_parts(tensor: object, *, columnwise: bool | None = None) -> Quantized:
    """Return a Quantized: the Format of a TransformerEngine or torchao tensor, and a dict of its data and scales as
    plain tensors. A tensor can have two copies, quantized by rows and by columns: `columnwise` is False for rows, True
    for columns, and None for rows if there are any, else columns.

    TransformerEngine's `MXFP8Tensor`, `Float8Tensor` and `Float8BlockwiseQTensor`, torchao's `MXTensor` (MXFP8) and
    `Float8Tensor`. Raises FormatError for other tensors, for a copy that is not there, and for swizzled scales, which
    are no view of scales.
    """
    reader = _find_reader(tensor)
    if reader is None:
        what = f"{type(tensor).__name__} is not a quantized tensor of TransformerEngine or torchao"
        fix = "pass its data and scales as plain tensors to smt.dequantize, with a format of sm.formats"
        raise FormatError(f"{what} that is known here; {fix}")
    return reader(tensor, columnwise)


def sendable(param: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return a parameter as a plain tensor without autograd: dequantized to `dtype` if it is quantized, and only the
    local part if it is a DTensor.

    Recognized quantized tensors are dequantized to `dtype`, by default the dtype that they report. Other tensors share
    memory with the result, and `dtype` is ignored. Plain float8 tensors, which mean nothing without their scales, are
    returned as bytes (uint8). Raises FormatError for other wrappers of tensors.
    """
    if isinstance(param, DTensor):
        return sendable(compat.local_of(param), dtype)
    if _find_reader(param) is not None and not _is_swizzled(param):
        return _read(param, dtype)
    dequantizer = _find_dequantizer(param)
    if dequantizer is not None:
        result_dtype = dtype or getattr(param, "dtype", None) or torch.float32
        return dequantizer().detach().to(result_dtype)
    if not isinstance(param, Tensor):
        raise FormatError(f"{shown(param)} is not a tensor; pass a torch.Tensor or Parameter")
    # Assigned to a name, since mypy would narrow the type by the call.
    is_wrapper: bool = compat.is_traceable_wrapper_subclass(param)
    if is_wrapper:
        what = (
            f"{type(param).__name__} wraps other tensors, and has no dequantize() to read them by"
        )
        raise FormatError(f"{what}; pass the tensors that it wraps, one by one")
    plain = param.detach().as_subclass(Tensor)
    is_short = str(plain.dtype).removeprefix("torch.").startswith(SHORT)
    return plain.view(torch.uint8) if is_short else plain


def _find_dequantizer(param: object) -> Callable[[], Tensor] | None:
    """A tensor's own dequantizing method: for scales that are swizzled, or divide, as in torchao's training tensors."""
    for name in ("to_original_precision", "dequantize"):
        method = getattr(type(param), name, None)
        # Every tensor has a `dequantize`, for torch's old quantized dtypes.
        if method is not None and method is not getattr(Tensor, name, None):
            found: Callable[[], Tensor] = getattr(param, name)
            return found
    return None


def _read(param: Any, dtype: torch.dtype | None) -> Tensor:
    """The numbers of a quantized tensor."""
    format, parts = quantized_parts(param)
    result_dtype = dtype or getattr(param, "dtype", None) or torch.float32
    numbers = dequantize(format, tuple(parts.values()), result_dtype)
    shape = param.shape if isinstance(param, Tensor) else numbers.shape
    return numbers.reshape(shape)


def _find_reader(tensor: object) -> Reader | None:
    """The function in READERS that reads this kind of tensor; None for other tensors."""
    for names, reader in READERS:
        if all(hasattr(tensor, name) for name in names):
            return reader
    return None


def _is_swizzled(tensor: object) -> bool:
    """Whether scales are swizzled: stored in tiles, as tensor cores read them."""
    names = ("is_swizzled_scales", "_with_gemm_swizzled_scales")
    return any(getattr(tensor, name, False) is True for name in names)


def _make_quantized(format: Format, data: Tensor, scales: Tensor) -> Quantized:
    """The format and parts, in the parts' stored dtypes. Raises FormatError for scales of another shape."""
    expected = format.scale_shape(tuple(data.shape))
    if tuple(scales.shape) != expected:
        what = f"{format.name}: scales have shape {tuple(scales.shape)}"
        raise FormatError(
            f"{what}, but data of shape {tuple(data.shape)} need {expected}; pass the whole "
            f"quantized tensor, not a slice of it"
        )
    # Scales of one byte are viewed as bytes; float32 scales stay float32.
    plain_scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
    return Quantized(format, {"data": data.view(torch.uint8), "scales": plain_scales})


def _name_element(dtype: object) -> str:
    """ "e4m3" or "e5m2", from a dtype of torch or TransformerEngine. Raises FormatError for another dtype."""
    name = str(dtype).lower()
    for element in ("e4m3", "e5m2"):
        # AMD's fnuz types have another exponent bias.
        if element in name and "fnuz" not in name:
            return element
    raise FormatError(
        f"the data are {shown(dtype)}, where FP8 e4m3 or e5m2 is needed; pass a tensor of one of these"
    )


def _strip_padding(scales: Tensor, sizes: Sequence[int]) -> Tensor:
    """The scales without padding: the first `sizes[d]` in each dimension d. Raises FormatError if there are fewer."""
    for d, n in enumerate(sizes):
        if scales.shape[d] < n:
            what = f"scales have shape {tuple(scales.shape)}, but the data need at least {tuple(sizes)}"
            raise FormatError(f"{what}; pass the whole quantized tensor, not a slice of it")
        scales = scales.narrow(d, 0, n)
    return scales


# TransformerEngine


def _choose_copy(tensor: Any, columnwise: bool | None) -> tuple[Tensor, Tensor, bool]:
    """Data and scales of one copy, detached, and whether it is the columnwise one."""
    if columnwise is None:
        columnwise = tensor._rowwise_data is None
    way = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{way}_data")
    scales = getattr(tensor, f"_{way}_scale_inv")
    if data is None or scales is None:
        fix = f"pass columnwise={not columnwise}, or keep both copies by its update_usage()"
        raise FormatError(f"the {type(tensor).__name__} has no {way} data and scales; {fix}")
    if _is_swizzled(tensor):
        what = f"the {type(tensor).__name__} stores its scales swizzled (in tiles for tensor cores)"
        raise FormatError(f"{what}; unswizzle them first, or use smt.sendable(tensor)")
    return data.detach(), scales.detach(), columnwise


def _read_engine_mx(tensor: Any, columnwise: bool | None) -> Quantized:
    """Read a MXFP8Tensor: neither copy is transposed, and scales are padded."""
    data, scales, is_columnwise = _choose_copy(tensor, columnwise)
    element = _name_element(tensor._fp8_dtype)
    format = MXFP8(element, axis=-2 if is_columnwise else -1)
    matrix = data.flatten(0, -2)
    return _make_quantized(
        format, matrix, _strip_padding(scales, format.scale_shape(tuple(matrix.shape)))
    )


def _read_engine_blocks(tensor: Any, columnwise: bool | None) -> Quantized:
    """Read a Float8BlockwiseQTensor: the columnwise copy is transposed, and so are scales of 1 x 128."""
    data, scales, is_columnwise = _choose_copy(tensor, columnwise)
    # The columnwise copy has the last dimension first. The others are flattened into one.
    matrix = data.flatten(1) if is_columnwise else data.flatten(0, -2)
    rows, columns = matrix.shape
    tiles_across = -(-columns // TILE)
    if tensor._is_2D_scaled:
        block = TILE, TILE
        block_scales = _strip_padding(scales, (-(-rows // TILE), tiles_across))
    else:
        block = 1, TILE
        block_scales = _strip_padding(scales, (tiles_across, rows)).t()
    if is_columnwise:
        block = block[::-1]
        matrix = matrix.t()
        block_scales = block_scales.t()
    quantizer = getattr(tensor, "_quantizer", None)
    has_power_scales = bool(getattr(quantizer, "force_pow_2_scales", True))
    format = FP8Blocks(block, has_power_scales, _name_element(tensor._fp8_dtype))
    return _make_quantized(format, matrix, block_scales)


def _read_engine_tensor(tensor: Any, columnwise: bool | None) -> Quantized:
    """Read TransformerEngine's Float8Tensor: one scale, and perhaps a transposed copy of the same bytes."""
    data = tensor._data
    if columnwise or (columnwise is None and data is None):
        data = getattr(tensor, "_transpose", None)
        if data is None or getattr(tensor, "_transpose_invalid", False):
            what = f"the {type(tensor).__name__} has no columnwise (transposed) data"
            raise FormatError(f"{what}; pass columnwise=False to read the rowwise data")
        data = data.movedim(0, -1)
    if data is None:
        what = f"the {type(tensor).__name__} has no rowwise data"
        raise FormatError(f"{what}; pass columnwise=True to read the columnwise (transposed) data")
    format = FP8(data=_name_element(tensor._fp8_dtype))
    scale = tensor._scale_inv.detach().reshape((1,) * data.ndim)
    return _make_quantized(format, data.detach(), scale)


# torchao


def _read_ao_mx(tensor: Any, columnwise: bool | None) -> Quantized:
    """Read an MXTensor of MXFP8: blocks lie along its last dimension, or along the one before if it was transposed. It
    has one copy, so `columnwise` is not used."""
    element = _name_element(tensor.elem_dtype)
    if tensor.block_size != 32 or _is_swizzled(tensor):
        what = f"the MXTensor has blocks of {tensor.block_size} numbers"
        swizzled = " and swizzled scales" if _is_swizzled(tensor) else ""
        raise FormatError(
            f"{what}{swizzled}, where blocks of 32 with scales in plain order are needed; quantize "
            f"it with block_size=32, not swizzled"
        )
    data = tensor.qdata.detach()
    is_transposed = data.ndim > 1 and data.stride(-2) < data.stride(-1)
    format = MXFP8(element, "floor", -2 if is_transposed else -1)
    return _make_quantized(format, data, tensor.scale.detach())


def _read_ao_float8(tensor: Any, columnwise: bool | None) -> Quantized:
    """Read torchao's Float8Tensor: a scale per block, of any size in each dimension."""
    data = tensor.qdata.detach()
    element = _name_element(data.dtype)
    scale = tensor.scale.detach()
    shape = tuple(data.shape)
    # A slice keeps the block size of the tensor that it was taken from.
    block = tuple(map(min, tensor.block_size, shape))
    if block == shape or scale.numel() == 1:
        return _make_quantized(FP8(data=element), data, scale.reshape((1,) * data.ndim))
    whole_row = (1,) * (len(shape) - 1) + shape[-1:]
    if block == whole_row:
        return _make_quantized(FP8("channel", data=element), data, scale)
    return _make_quantized(FP8Blocks(block, data=element), data, scale)


READERS: list[tuple[tuple[str, ...], Reader]] = [
    (("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype", "_is_2D_scaled"), _read_engine_blocks),
    (("_rowwise_data", "_rowwise_scale_inv", "_fp8_dtype"), _read_engine_mx),
    (("_data", "_scale_inv", "_fp8_dtype"), _read_engine_tensor),
    (("qdata", "scale", "elem_dtype", "block_size"), _read_ao_mx),
    (("qdata", "scale", "block_size", "mm_config"), _read_ao_float8),
]
"""Attributes that identify a kind of tensors, and its reader; the first entry that matches counts."""
