"""Quantising: what Quantise, Dequantise and Requantise do, on tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmath.values.formats.format import Format
from shardmath.values.transforms.components import Form
from shardmath.values.transforms.quantising import Dequantise, Quantise, Requantise
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats.casting import cast, cast_into
from shardmath_torch.tensors.formats.quantising import dequantise, quantise

__all__ = ["dequantise_into", "prepare_numbers", "quantise_arrived", "requantise_into"]

_Values = Sequence[Tensor]

FEW = 1 << 20
"""Numbers that are rounded at a time."""

READ = ("bfloat16", "float16", "float32")
"""The types that are quantised as they are."""


def prepare_numbers(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Numbers, rounded; and quantised, where that is done at the source."""
    assert isinstance(t, Quantise)
    if t.at == "destination":
        cast_into(values[0], src.dtype, t.wire, out[0])
        return
    if src.dtype == t.wire:
        _quantise_into(t, values[0], out)
        return
    # Some rows at a time, so that rounded numbers take little memory.
    for some, parts in _cut_rows(t.format, values[0], out):
        rounded = cast(some, src.dtype, t.wire)
        _quantise_into(t, rounded, parts)


def _cut_rows(
    format: Format, values: Tensor, out: _Values
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Whole blocks of rows, and their data and scales; all at once where they share a scale that is yet to be found."""
    sizes = [part.blocks.per_dimension(values.ndim)[0] for part in format.parts]
    is_known = getattr(format, "tensor_amax", None) is not None
    if None in sizes and not is_known:
        yield values, tuple(out)
        return
    step = math.lcm(*(size or 1 for size in sizes))
    row = max(1, values[:1].numel())
    rows = step * max(1, FEW // (row * step))
    # Once where there are no rows, for what all share.
    for first in range(0, max(1, len(values)), rows):
        past = min(len(values), first + rows)
        parts = []
        for one, size in zip(out, sizes, strict=True):
            # What all share stays whole.
            here = slice(None) if size is None else slice(first // size, -(-past // size))
            parts.append(one[here])
        yield values[first:past], tuple(parts)


def quantise_arrived(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Numbers that have come, quantised."""
    assert isinstance(t, Quantise)
    _quantise_into(t, values[0], out)


def _quantise_into(t: Quantise, numbers: Tensor, out: _Values) -> None:
    if t.wire not in READ:
        numbers = cast(numbers, t.wire, "float32")
    quantise(t.format, numbers, out)


def dequantise_into(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Data and scales as numbers, at either end; every NaN has the same bits, whatever the processor makes."""
    assert isinstance(t, Dequantise)
    if dst.dtype in READ:
        numbers = dequantise(t.format, values, dtype_of(dst.dtype), out[0])
        if dst.dtype == "float32":
            # Of narrower types it is so already.
            numbers.masked_fill_(numbers.isnan(), torch.nan)
        return
    numbers = dequantise(t.format, values, torch.float32)
    cast_into(numbers, "float32", dst.dtype, out[0])


def requantise_into(t: object, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Data and scales as those of another format, at either end."""
    assert isinstance(t, Requantise)
    numbers = dequantise(t.old, values, torch.float32)
    quantise(t.new, numbers, out)
