"""Quantizing: Quantize, Dequantize and Requantize applied to tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmath.values.formats.format import Format
from shardmath.values.transforms.components import Form
from shardmath.values.transforms.quantizing import Dequantize, Quantize, Requantize
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats.casting import cast, cast_into
from shardmath_torch.tensors.formats.quantizing import dequantize, quantize

__all__ = ["dequantize_into", "prepare_numbers", "quantize_arrived", "requantize_into"]

_Values = Sequence[Tensor]

MOST_NUMBERS = 1 << 20
"""About how many numbers are rounded at a time."""

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes that are quantized without a cast."""


def prepare_numbers(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Round `values` to the dtype `t.wire`, then quantize them if the transform `t` (a Quantize) does so at the source,
    and write the result into `out` for sending. `src` has the dtype of `values`; `dst` is not used.
    """
    assert isinstance(t, Quantize)
    if t.at == "destination":
        cast_into(values[0], src.dtype, t.wire, out[0])
        return
    if src.dtype == t.wire:
        _quantize_into(t, values[0], out)
        return
    # Some rows at a time, so that rounded numbers take little memory.
    for some_rows, parts in _cut_rows(t.format, values[0], out):
        rounded = cast(some_rows, src.dtype, t.wire)
        _quantize_into(t, rounded, parts)


def _cut_rows(
    format: Format, values: Tensor, out: _Values
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Cut rows into whole blocks, with their data and scales; not at all, if all rows share a scale yet to be found."""
    rows_per_block = [part.blocks.per_dimension(values.ndim)[0] for part in format.parts]
    is_known = getattr(format, "tensor_amax", None) is not None
    if None in rows_per_block and not is_known:
        yield values, tuple(out)
        return
    # Rows are cut where all parts have whole blocks.
    row_multiple = math.lcm(*(size or 1 for size in rows_per_block))
    row_size = max(1, values[:1].numel())
    rows_at_once = row_multiple * max(1, MOST_NUMBERS // (row_size * row_multiple))
    # Once even without rows, for parts that all rows share.
    for first in range(0, max(1, len(values)), rows_at_once):
        stop = min(len(values), first + rows_at_once)
        parts = []
        for part, size in zip(out, rows_per_block, strict=True):
            # A part that all rows share stays whole.
            rows_of_part = slice(None) if size is None else slice(first // size, -(-stop // size))
            parts.append(part[rows_of_part])
        yield values[first:stop], tuple(parts)


def quantize_arrived(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Quantize `values`, which have arrived at the destination, into `out`, as the transform `t` (a Quantize) says.
    `src` and `dst` are not used.
    """
    assert isinstance(t, Quantize)
    _quantize_into(t, values[0], out)


def _quantize_into(t: Quantize, numbers: Tensor, out: _Values) -> None:
    if t.wire not in DTYPES:
        numbers = cast(numbers, t.wire, "float32")
    quantize(t.format, numbers, out)


def dequantize_into(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Dequantize `values` (data and scales) to the dtype of `dst` and write them into `out`; `src` is not used. The
    transform `t` is a Dequantize. All NaN get the same bits, so that results are equal on all devices.
    """
    assert isinstance(t, Dequantize)
    if dst.dtype in DTYPES:
        numbers = dequantize(t.format, values, dtype_of(dst.dtype), out[0])
        if dst.dtype == "float32":
            # In narrower dtypes all NaN have the same bits already.
            numbers.masked_fill_(numbers.isnan(), torch.nan)
        return
    numbers = dequantize(t.format, values, torch.float32)
    cast_into(numbers, "float32", dst.dtype, out[0])


def requantize_into(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Convert quantized `values` (data and scales) from format `t.old` to format `t.new`, and write the results into
    `out`. `t` is the Requantize transform to apply; `src` and `dst` are not used.
    """
    assert isinstance(t, Requantize)
    numbers = dequantize(t.old, values, torch.float32)
    quantize(t.new, numbers, out)
