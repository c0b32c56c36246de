"""Casting: numbers cast between dtypes, bit for bit as `shardmath.values.formats.casting` does.

>>> halves = torch.empty(3, dtype=torch.bfloat16)
>>> cast_into(torch.tensor([1.00390625, 1.01171875, float("nan")]), "float32", "bfloat16", halves)
>>> halves.view(torch.int16)
tensor([16256, 16258, 32704], dtype=torch.int16)
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmath.values.formats.casting import NAN, SHORT, is_float
from shardmath.values.formats.exponential import exp
from shardmath_torch.groups.dtypes import dtype_of, words

__all__ = ["cast", "cast_into", "may_have_nan", "negative_exp_into"]


def cast_into(values: Tensor, src: str, dst: str, out: Tensor) -> None:
    """Cast the elements `values` of dtype `src` to dtype `dst`, into `out`."""
    if src == dst:
        words(out).copy_(words(values))
        return
    # torch has a separate cast for each pair of dtypes, and not all round by way of float32.
    source = values.float() if dst in SHORT else values
    out.copy_(source)
    # Both have NaN at the same places, and torch compares wide elements faster than narrow ones.
    wider = max(values, out, key=Tensor.element_size)
    if is_float(src) and is_float(dst) and may_have_nan(wider):
        # torch's own bits of NaN differ between the middle of a tensor and its end.
        words(out).masked_fill_(out.isnan(), NAN[dst])


def may_have_nan(values: Tensor) -> bool:
    """Whether `values` might have NaN. On a CPU they are checked; on other devices the answer is always True, since a
    check would make the host wait for the device.
    """
    if values.device.type != "cpu":
        return True  # checking would wait for the device
    return bool(values.numel()) and bool(values.amax().isnan())


def cast(values: Tensor, src: str, dst: str) -> Tensor:
    """Return the values cast to dtype `dst`, as a new tensor; if the dtypes are equal, the tensor itself."""
    if src == dst:
        return values
    out = torch.empty(values.shape, dtype=dtype_of(dst), device=values.device)
    cast_into(values, src, dst, out)
    return out


def negative_exp_into(values: Tensor, src: str, dst: str, out: Tensor) -> None:
    """Write -exp of `values`, of dtype `src`, to `out`, rounded to float32 and then to `dst`."""
    positive = exp(cast(values, src, "float64"), _power_of_two)
    rounded = cast(positive.neg(), "float64", "float32")
    cast_into(rounded, "float32", dst, out)


def _power_of_two(k: Tensor) -> Tensor:
    """2^k of integers in float64, made from the exponent's bits."""
    # The exponent's field is above the 52 bits of the fraction, and 1023 in it stands for 0.
    exponents = k.to(torch.int64) + 1023
    return (exponents << 52).view(torch.float64)
