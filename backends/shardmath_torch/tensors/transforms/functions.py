"""Functions: transforms applied to tensors.

1. shardmath's transforms have a row each in `PREPARE` and `FINALIZE`, and write into given tensors.
2. Other transforms may have functions of tensors in addition to functions of arrays, such as `Custom(on_tensors=...)`;
   else their functions of arrays are called, on the CPU. Results are checked before they are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.base import dtypes
from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural
from shardmath.values.formats.elements import Array, numpy_type, read_elements
from shardmath.values.transforms.components import Form, Transform
from shardmath.values.transforms.custom import OnTensors
from shardmath.values.transforms.pointwise import Cast, NegativeExp
from shardmath.values.transforms.quantizing import Dequantize, Quantize, Requantize
from shardmath_torch.groups.dtypes import dtype_of, see_words, words
from shardmath_torch.tensors.formats.casting import cast, cast_into, negative_exp_into
from shardmath_torch.tensors.transforms.quantizing import (
    dequantize_into,
    prepare_numbers,
    quantize_arrived,
    requantize_into,
)

__all__ = ["check_made", "describe", "finalize", "keep", "prepare"]

_Values: TypeAlias = Sequence[Tensor]
"""A tensor for each component."""
_Function: TypeAlias = Callable[[Transform, Form, Form, _Values, _Values], None]
"""A function that makes components from a tensor and its companions, or these from components, in given tensors."""


def _prepare_cast(t: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    assert isinstance(t, Cast)
    cast_into(values[0], src.dtype, t.dtype, out[0])


def _finalize_cast(t: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    assert isinstance(t, Cast)
    arrived = values[0]
    if t.at == "destination":
        arrived = cast(arrived, src.dtype, t.dtype)
    cast_into(arrived, t.dtype, dst.dtype, out[0])


def _make_exp(t: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    negative_exp_into(values[0], src.dtype, dst.dtype, out[0])


PREPARE: dict[type, _Function] = {
    Cast: _prepare_cast,
    NegativeExp: _make_exp,
    Quantize: prepare_numbers,
    Dequantize: dequantize_into,
    Requantize: requantize_into,
}
FINALIZE: dict[type, _Function] = {
    Cast: _finalize_cast,
    NegativeExp: _make_exp,
    Quantize: quantize_arrived,
    Dequantize: dequantize_into,
    Requantize: requantize_into,
}


def prepare(transform: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Apply `transform` at the source: compute the tensors to send from `values`, into `out`; `src` and `dst` are a
    tensor's shape and dtype at both ends. Raises any error of the transform.
    """
    compute = PREPARE.get(type(transform))
    if compute is not None:
        compute(transform, src, dst, values, out)
        return
    on_tensors = _find_on_tensors(transform, 0)
    results: object
    if on_tensors is not None:
        results = on_tensors(_unwrap(values))
    else:
        arrays = [_see_array(value, dtypes.canonical(value.dtype)) for value in values]
        results = transform.prepare(_unwrap(arrays), src, dst)
        results = _to_tensors(results, out, f"{transform} makes")
    keep(results, out, f"{transform} makes", "at the source")


def finalize(transform: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """Apply `transform` at the destination: compute the tensors to store from the received `values`, into `out`; `src`
    and `dst` are a tensor's shape and dtype at both ends.

    Raises what the transform raises.
    """
    compute = FINALIZE.get(type(transform))
    if compute is not None:
        compute(transform, src, dst, values, out)
        return
    on_tensors = _find_on_tensors(transform, end=1)
    results: object
    if on_tensors is not None:
        results = on_tensors(tuple(values))
    else:
        arrays = tuple(_to_array(value, dtypes.canonical(value.dtype)) for value in values)
        array = transform.finalize(arrays, src, dst)
        results = _to_tensors(array if len(out) > 1 else [array], out, f"{transform} makes")
    keep(results, out, f"{transform} makes", "at the destination")


def _unwrap(values: Sequence[Any]) -> Any:
    """A tensor, or a tuple of it and its companions if it has some."""
    return values[0] if len(values) == 1 else tuple(values)


def keep(results: object, out: Sequence[Tensor], maker: str, side: str) -> None:
    """Copy `results`, one tensor or several that a transform made, into the tensors `out`. Raises ExchangeError if
    number, shapes or dtypes differ; its text begins with `maker`, such as "Cast makes", and has `side`, such as "at the
    source".
    """
    tensors = results if isinstance(results, list | tuple) else [results]
    check_made(tensors, list(map(describe, out)), maker, side)
    for tensor, target in zip(tensors, out, strict=True):
        words(target).copy_(words(tensor))


def check_made(tensors: Sequence[object], wanted: Sequence[str], maker: str, side: str) -> None:
    """Raise ExchangeError unless each of `tensors` has the dtype and shape at the same index of `wanted`, given as
    text, such as "float32[4, 3]". The error begins with `maker`, such as "Cast makes", and has `side`, such as "at the
    source".
    """
    if len(tensors) != len(wanted):
        what = f"{maker} {plural(tensors, 'tensor')} {side}, not {len(wanted)}"
        raise ExchangeError(f"{what}: {', '.join(wanted)}; return one for each")
    for one, expected in zip(tensors, wanted, strict=True):
        actual = describe(one)
        if actual != expected:
            raise ExchangeError(
                f"{maker} {actual} {side}, where {expected} is needed; return that shape and dtype"
            )


def describe(tensor: object) -> str:
    """Return the dtype and shape of a tensor as text, such as float32[4, 3]; the type's name for any other value."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{dtypes.canonical(tensor.dtype)}{list(tensor.shape)}"


def _to_array(tensor: Tensor, dtype: str) -> Array:
    """The tensor's elements as a numpy array."""
    # as words, since torch converts only dtypes that numpy has
    array: Array = words(tensor.cpu().contiguous()).numpy()
    return array.view(numpy_type(dtype))


def _see_array(tensor: Tensor, dtype: str) -> Array:
    """The tensor's elements as a read-only numpy array: the memory may be the caller's."""
    array: Array = see_words(tensor.cpu().contiguous())
    return array.view(numpy_type(dtype))


def _find_on_tensors(transform: Transform, end: int) -> Callable[..., object] | None:
    """The transform's function of tensors at the source, 0, or the destination, 1."""
    on_tensors: OnTensors = getattr(transform, "on_tensors", (None, None))
    return on_tensors[end]


def _to_tensors(arrays: Any, out: _Values, who: str) -> list[Tensor]:
    """The arrays as tensors with the dtypes of `out`. Raises ExchangeError for another number of them, in a text that
    begins with `who`, such as "Cast makes"."""
    if len(arrays) != len(out):
        wanted = ", ".join(map(describe, out))
        what = f"{who} {plural(arrays, 'array')}, not {len(out)}"
        raise ExchangeError(f"{what}: {wanted}; return one for each")
    pairs = zip(arrays, out, strict=True)
    return [_to_tensor(array, dtypes.canonical(target.dtype), who) for array, target in pairs]


def _to_tensor(array: object, dtype: str, who: str) -> Tensor:
    """The array as a tensor of that dtype."""
    elements = read_elements(array, dtype, f"what {who}")
    # flattened, since numpy's contiguous copy of a 0-d array has a dimension
    row = elements.flatten().view(np.uint8)
    tensor = torch.from_numpy(row).view(dtype_of(dtype))
    return tensor.reshape(elements.shape)
