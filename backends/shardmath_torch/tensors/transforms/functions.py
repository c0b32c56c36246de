"""Functions: what transforms do, on tensors.

1. Those of ours have a row each in `PREPARE` and `FINALIZE`, and write what they make into tensors that are there.
2. Another transform may have functions of tensors beside those of arrays, as `Custom(on_tensors=...)` has; where it has
   none, its functions of arrays are called, on the CPU. What they make is looked at before it is kept.
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
from shardmath.values.transforms.quantising import Dequantise, Quantise, Requantise
from shardmath_torch.groups.dtypes import dtype_of, see_words, words
from shardmath_torch.tensors.formats.casting import cast, cast_into, negative_exp_into
from shardmath_torch.tensors.transforms.quantising import (
    dequantise_into,
    prepare_numbers,
    quantise_arrived,
    requantise_into,
)

__all__ = ["check_made", "describe", "finalize", "keep", "prepare"]

_Values: TypeAlias = Sequence[Tensor]
"""A tensor for each component."""
_Making: TypeAlias = Callable[[Transform, Form, Form, _Values, _Values], None]
"""What a transform makes: of a tensor and its companions its components, or the other way round."""


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


PREPARE: dict[type, _Making] = {
    Cast: _prepare_cast,
    NegativeExp: _make_exp,
    Quantise: prepare_numbers,
    Dequantise: dequantise_into,
    Requantise: requantise_into,
}
FINALIZE: dict[type, _Making] = {
    Cast: _finalize_cast,
    NegativeExp: _make_exp,
    Quantise: quantise_arrived,
    Dequantise: dequantise_into,
    Requantise: requantise_into,
}


def prepare(transform: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """The components of some blocks of what the source holds, into `out`. Raises what the transform does."""
    into = PREPARE.get(type(transform))
    if into is not None:
        into(transform, src, dst, values, out)
        return
    own = _find_own(transform, 0)
    made: object
    if own is not None:
        made = own(_unwrap(values))
    else:
        arrays = [_see_array(one, dtypes.canonical(one.dtype)) for one in values]
        made = transform.prepare(_unwrap(arrays), src, dst)
        made = _to_tensors(made, out, f"{transform} makes")
    keep(made, out, f"{transform} makes", "at the source")


def finalize(transform: Transform, src: Form, dst: Form, values: _Values, out: _Values) -> None:
    """The blocks of what the destination holds that these parts of components stand for, into `out`."""
    into = FINALIZE.get(type(transform))
    if into is not None:
        into(transform, src, dst, values, out)
        return
    own = _find_own(transform, 1)
    made: object
    if own is not None:
        made = own(tuple(values))
    else:
        arrays = tuple(_to_array(one, dtypes.canonical(one.dtype)) for one in values)
        array = transform.finalize(arrays, src, dst)
        made = _to_tensors(array if len(out) > 1 else [array], out, f"{transform} makes")
    keep(made, out, f"{transform} makes", "at the destination")


def _unwrap(values: Sequence[Any]) -> Any:
    """A tensor, or a tuple of it and its companions where it has some."""
    return values[0] if len(values) == 1 else tuple(values)


def keep(made: object, out: Sequence[Tensor], who: str, where: str) -> None:
    """Copy what was made into the tensors that it is for. Raises ExchangeError unless it is as they are."""
    tensors = made if isinstance(made, list | tuple) else [made]
    check_made(tensors, [describe(one) for one in out], who, where)
    for one, there in zip(tensors, out, strict=True):
        words(there).copy_(words(one))


def check_made(made: Sequence[object], wanted: Sequence[str], who: str, where: str) -> None:
    """Raise ExchangeError for another number of tensors, or for one of another shape or dtype."""
    if len(made) != len(wanted):
        what = f"{who} {plural(made, 'tensor')} {where}"
        raise ExchangeError(f"{what} for {plural(wanted, 'component')}; make one for each")
    for one, expected in zip(made, wanted, strict=True):
        found = describe(one)
        if found != expected:
            raise ExchangeError(f"{who} {found} {where}, and {expected} travels; make that")


def describe(tensor: object) -> str:
    """The dtype and shape of a tensor; the type of what is none."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return f"{dtypes.canonical(tensor.dtype)}{list(tensor.shape)}"


def _to_array(tensor: Tensor, dtype: str) -> Array:
    """The tensor's elements as numpy has them."""
    # torch gives numpy only types that numpy has, hence by way of words.
    array: Array = words(tensor.cpu().contiguous()).numpy()
    return array.view(numpy_type(dtype))


def _see_array(tensor: Tensor, dtype: str) -> Array:
    """The same, of memory that may be the caller's: to be read."""
    array: Array = see_words(tensor.cpu().contiguous())
    return array.view(numpy_type(dtype))


def _find_own(transform: Transform, end: int) -> Callable[..., object] | None:
    """The transform's function of tensors at the source, 0, or the destination, 1."""
    own: OnTensors = getattr(transform, "on_tensors", (None, None))
    return own[end]


def _to_tensors(arrays: Any, out: _Values, who: str) -> list[Tensor]:
    """Such arrays as tensors like those of `out`. Raises ExchangeError for another number of them."""
    if len(arrays) != len(out):
        what = f"{who} {plural(arrays, 'array')} for {plural(out, 'component')}"
        raise ExchangeError(f"{what}; make one for each")
    pairs = zip(arrays, out, strict=True)
    return [_to_tensor(array, dtypes.canonical(there.dtype), who) for array, there in pairs]


def _to_tensor(array: object, dtype: str, who: str) -> Tensor:
    """Such an array as a tensor."""
    elements = read_elements(array, dtype, f"what {who}")
    # numpy makes a dimension of none where it makes arrays contiguous, so bytes go as one row.
    row = elements.flatten().view(np.uint8)
    tensor = torch.from_numpy(row).view(dtype_of(dtype))
    return tensor.reshape(elements.shape)
