"""Quantizing: tensors as data and scales and back, bit for bit as the formats of `shardmath.formats` define.

1. Tensors of bfloat16, float16 and float32 are quantized, strided ones too; the arithmetic is float32.
2. `out` are buffers to write into, of bytes, or of the dtypes that the bytes stand for.
3. A tensor is read once if its blocks are small. It is read twice if a block is larger than a cache, and for NVFP4,
   whose scales depend on the largest magnitude of the whole tensor.
4. All arguments are checked before anything is written.

>>> from shardmath import formats
>>> data, scales = quantize(formats.MXFP8(), torch.full((1, 32), 450, dtype=torch.bfloat16))
>>> data[0, :2], scales
(tensor([118, 118], dtype=torch.uint8), tensor([[128]], dtype=torch.uint8))
>>> dequantize(formats.MXFP8(), (data, scales), torch.bfloat16)[0, :2]
tensor([448., 448.], dtype=torch.bfloat16)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmath.base.errors import FormatError
from shardmath.base.text import plural, shown
from shardmath.values.formats.format import Format, Part
from shardmath.values.formats.fp8 import FP8
from shardmath.values.formats.nvfp4 import NVFP4
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats.casting import cast_into
from shardmath_torch.tensors.formats.rounding import make_table, read_into, round_into
from shardmath_torch.tensors.formats.scaling import ScaleRule, find_rule, make_global_scale
from shardmath_torch.tensors.formats.slabs import Slab, choose_most, cut_slabs, fits

__all__ = ["amax_of", "dequantize", "quantize"]

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def amax_of(format: Format, tensor: Tensor) -> Tensor:
    """Return each block's largest magnitude in float32, shaped like the scales; NaN counts as `format.nan_magnitude`.

    If ranks hold parts of blocks, pass the maximum of these over ranks to `quantize`. Raises FormatError.
    """
    _check_format(format)
    values = _read_tensor(tensor, "the tensor")
    shape = tuple(values.shape)
    largest = torch.zeros(format.scale_shape(shape), dtype=torch.float32, device=values.device)
    for slab, (magnitudes,) in _SlabLoop(format, shape, values.device, 1):
        torch.abs(magnitudes.copy_(slab.take(values)), out=magnitudes)
        shared = slab.take_shared(largest)
        # A block may be cut into several slabs: take the maximum over them.
        torch.maximum(shared, slab.amax(magnitudes, format.nan_magnitude), out=shared)
    return largest


def quantize(
    format: Format,
    tensor: Tensor,
    out: Sequence[Tensor] | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Quantize `tensor` to `format`, and return a tuple of its data, its scales and, for NVFP4, a global scale. If
    `tensor` has only parts of blocks, `amax` has the largest magnitude in each whole block.

    The data have the tensor's shape; NVFP4 stores two numbers per byte of the last dimension. `out` are the tensors to
    write to and return, in that order: of bytes, or of the dtype that the part's `kind` names. `amax` is float32, and
    shaped as the scales; the tensor's first position is assumed to begin a block. Raises FormatError.
    """
    _check_format(format)
    values = _read_tensor(tensor, "the tensor")
    shape = tuple(values.shape)
    format.check_shape(shape)
    parts = _make_parts(format, values) if out is None else tuple(out)
    stored = _read_parts(format, parts, shape, values.device, "out")
    # None if the kernel measures them, slab by slab; never None for NVFP4.
    amaxes = _choose_amaxes(format, values, amax)
    # NVFP4 has a third part, the global scale.
    data, scales, *others = stored
    g = None
    if isinstance(format, NVFP4):
        assert amaxes is not None
        g = make_global_scale(format, amaxes)
        others[0].copy_(g)
    rule = find_rule(format, g)
    if amaxes is not None:
        scales.copy_(rule.make_scales(amaxes))
    kernel = _Kernel(format, rule, values, data, scales)
    kernel.run(measured=amaxes is not None)
    return parts


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The quantizing of a tensor into data and scales, slab by slab."""

    format: Format
    rule: ScaleRule
    values: Tensor
    data: Tensor
    scales: Tensor

    def run(self, measured: bool) -> None:
        """Quantize the tensor, one slice of it at a time. If `measured`, use the scales that `self.scales` already
        holds; otherwise compute these scales, too.
        """
        shape = tuple(self.values.shape)
        work = _SlabLoop(self.format, shape, self.values.device, count=2)
        for slab, (numbers, magnitudes) in work:
            numbers.copy_(slab.take(self.values))
            shared = slab.take_shared(self.scales)
            if not measured:
                torch.abs(numbers, out=magnitudes)
                amaxes = slab.amax(magnitudes, self.format.nan_magnitude)
                shared.copy_(self.rule.make_scales(amaxes))
            scaled = self.rule.scale_down(numbers, shared)
            round_into(self.format.element, scaled, slab.take(self.data, self.format.per_element))


class _SlabLoop:
    """An iteration over a tensor's slabs, with temporary memory that stays in the cache."""

    def __init__(
        self, format: Format, shape: tuple[int, ...], device: torch.device, count: int
    ) -> None:
        """Allocate `count` temporary tensors, each large enough for any slab."""
        most = choose_most(device)
        self._slabs = cut_slabs(format.blocks, shape, most)
        size = min(most, math.prod(shape))
        self._rows = [torch.empty(size, dtype=torch.float32, device=device) for _ in range(count)]

    def __iter__(self) -> Iterator[tuple[Slab, list[Tensor]]]:
        """Each slab, and `count` contiguous tensors of its shape, split into blocks."""
        for slab in self._slabs:
            size = math.prod(slab.sizes)
            yield slab, [slab.split(row[:size].view(slab.sizes)) for row in self._rows]


def dequantize(
    format: Format,
    parts: Sequence[Tensor],
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return the tensor of numbers that `parts` (data and scales, quantized to `format`) stand for, computed in float32
    and rounded to `dtype`.

    `parts` are as `quantize` gives them, of bytes or of the dtypes that the parts' `kind` name, strided ones too. `out`
    is the tensor to write to, which is returned. Every NaN of bfloat16 and float16 has the same bits. Raises
    FormatError.
    """
    _check_format(format)
    given = tuple(parts)
    shape = _find_shape(format, given)
    data, scales, *others = _read_parts(format, given, shape, given[0].device, "parts")
    if out is None:
        out = _make_out(shape, dtype, data.device)
    written = _read_out(out, shape, dtype, data.device)
    global_scale = others[0].reshape(()) if others else None
    rule = find_rule(format, global_scale)
    table = make_table(format.element, data.device)
    # One temporary tensor, for the numbers of a slab.
    for slab, (numbers,) in _SlabLoop(format, shape, data.device, 1):
        read_into(table, slab.take(data, format.per_element), numbers)
        rule.scale_up(numbers, slab.take_shared(scales))
        cast_into(numbers, "float32", DTYPES[dtype], slab.take(written))
    return out


# Arguments


def _check_format(format: object) -> None:
    """Raise FormatError for a value that is not a format."""
    if not isinstance(format, Format):
        fix = "pass one of sm.formats, such as sm.formats.MXFP8()"
        raise FormatError(f"format is {shown(format)}, which is not a format; {fix}")


def _read_tensor(given: object, what: str) -> Tensor:
    """The tensor, detached. Raises FormatError for a value without numbers to be quantized."""
    if not isinstance(given, Tensor):
        raise FormatError(f"{what} is {shown(given)}, which is not a tensor; pass a torch.Tensor")
    # A subclass may override the operations used here.
    if type(given) not in (Tensor, torch.nn.Parameter):
        fix = "pass smt.sendable(tensor), or a DTensor's to_local()"
        raise FormatError(f"{what} is a {type(given).__name__}, not a plain tensor; {fix}")
    if given.dtype not in DTYPES:
        known = ", ".join(DTYPES.values())
        raise FormatError(
            f"{what} has dtype {given.dtype}, which is not one of {known}; cast it to one of these"
        )
    if not given.ndim:
        raise FormatError(
            f"{what} has shape (), where at least one dimension is needed; pass reshape(1) of it"
        )
    if given.is_meta:
        raise FormatError(
            f"{what} is on the meta device and has no values; move it by to_empty() and fill it first"
        )
    return given.detach()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _show(value: object) -> str:
    return _describe(value) if isinstance(value, Tensor) else shown(value)


def _make_parts(format: Format, values: Tensor) -> tuple[Tensor, ...]:
    """Empty tensors for the format's parts of a tensor."""
    return tuple(
        torch.empty(
            part.blocks.count(tuple(values.shape)), dtype=dtype_of(part.dtype), device=values.device
        )
        for part in format.parts
    )


def _read_parts(
    format: Format,
    given: tuple[Tensor, ...],
    shape: tuple[int, ...],
    device: torch.device,
    what: str,
) -> list[Tensor]:
    """The tensors of the parts, viewed in their stored dtypes. Raises FormatError for tensors that do not fit."""
    if len(given) != len(format.parts):
        names = ", ".join(part.name for part in format.parts)
        raise FormatError(
            f"{what}= has {plural(given, 'tensor')}, but {format.name} has {len(format.parts)}: "
            f"{names}; pass these, in this order"
        )
    return [
        _read_part(part, tensor, shape, device, what)
        for part, tensor in zip(format.parts, given, strict=True)
    ]


def _read_part(
    part: Part, given: Tensor, shape: tuple[int, ...], device: torch.device, what: str
) -> Tensor:
    """The tensor of one part, viewed in its stored dtype. Raises FormatError for one that does not fit."""
    expected = part.blocks.count(shape)
    # As stored, such as uint8, and as what the bytes stand for, such as float8.
    dtypes = {part.dtype: dtype_of(part.dtype), part.kind: dtype_of(part.kind)}
    if not isinstance(given, Tensor):
        raise FormatError(
            f"{what}= has {shown(given)} as {part.name}, which is not a tensor; pass a torch.Tensor"
        )
    fits_here = tuple(given.shape) == expected and given.device == device
    if not fits_here or given.dtype not in dtypes.values():
        fix = f"pass {' or '.join(dtypes)} {expected} on {device}"
        raise FormatError(f"{what}= has {_describe(given)} as {part.name}; {fix}")
    return given.detach().view(dtype_of(part.dtype))


def _make_out(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor for the numbers. Raises FormatError for a dtype that is not supported."""
    if dtype not in DTYPES:
        known = ", ".join(DTYPES.values())
        raise FormatError(
            f"dtype={shown(dtype)} is not one of {known}, to which quantized tensors can be "
            f"dequantized; pass dtype=torch.float32, and cast the result"
        )
    return torch.empty(shape, dtype=dtype, device=device)


def _read_out(
    given: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The tensor to write to, detached. Raises FormatError for one that does not fit."""
    out = _read_tensor(given, "out")
    if out.dtype != dtype or tuple(out.shape) != shape or out.device != device:
        raise FormatError(
            f"out= is {_describe(out)}, where {dtype} {shape} on {device} is needed; pass such a "
            f"tensor, or leave out= away"
        )
    return out


def _find_shape(format: Format, given: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The shape of the numbers that the data stand for."""
    if not given or not isinstance(given[0], Tensor) or not given[0].ndim:
        names = ", ".join(part.name for part in format.parts)
        first = _show(given[0]) if given else "nothing"
        what = f"parts= begins with {first}, where {format.name} needs data with dimensions"
        raise FormatError(f"{what}; pass the tensors {names}, in this order")
    *outer, last = given[0].shape
    return (*outer, last * format.per_element)


def _choose_amaxes(format: Format, values: Tensor, given: Tensor | None) -> Tensor | None:
    """The amaxes of all blocks, if they are known or needed before the first slab; None if slabs measure theirs."""
    shape = tuple(values.shape)
    scale_shape = format.scale_shape(shape)
    if given is not None:
        return _read_amax(given, scale_shape, values.device)
    if isinstance(format, FP8) and format.tensor_amax is not None:
        return torch.full(
            scale_shape, format.tensor_amax, dtype=torch.float32, device=values.device
        )
    has_whole_blocks = values.numel() > 0 and fits(format.blocks, shape, choose_most(values.device))
    # All scales of NVFP4 depend on the largest of all amaxes.
    if has_whole_blocks and not isinstance(format, NVFP4):
        return None
    return amax_of(format, values)


def _read_amax(given: object, count: tuple[int, ...], device: torch.device) -> Tensor:
    """The given amaxes. Raises FormatError unless there is one for each block."""
    fix = f"pass one float32 maximum per block: float32 {count} on {device}"
    if not isinstance(given, Tensor):
        raise FormatError(f"amax= is {shown(given)}, which is not a tensor; {fix}")
    if given.dtype != torch.float32 or tuple(given.shape) != count or given.device != device:
        raise FormatError(f"amax= is {_describe(given)}; {fix}")
    return given.detach()
