"""Values: options of optimizers, and values of their state, as JSON and back.

1. A value is a number, text, None, a tensor, or a list, tuple or dict by text of values.
2. Tuples, dicts and tensors are objects of one key, which says what they are; a caller's dict is
   inside of one, so its own keys are never taken for that.
3. Numbers may be NaN and infinite, in Python's spelling. What would not come back is an error that
   names the value.

>>> coded = code_value((0.5, {"tensor": None}), "'betas'")
>>> coded
{'tuple': [0.5, {'dict': {'tensor': None}}]}
>>> decode_value(coded)
(0.5, {'tensor': None})
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.text import shown
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.exchange.memory import missing_memory, plain
from shardmath_torch.files.places import CheckpointError

__all__ = ["code_value", "decode_value", "rebuild"]

MOST_DEPTH = 64
"""Values inside of values; Python's JSON ends in a RecursionError at some hundreds."""

UNSAID = "use numbers, text, lists and tensors"


def code_value(value: object, what: str, depth: int = 0) -> Any:
    """The value as JSON. Raises CheckpointError for a value that JSON cannot say, and says `what` it is."""
    if depth > MOST_DEPTH:
        raise CheckpointError(
            f"{what} is nested more than {MOST_DEPTH} deep; give a value that is flatter"
        )
    if _is_plain(value):
        return value
    code = partial(code_value, what=what, depth=depth + 1)
    match value:
        case Tensor():
            return {"tensor": _code_tensor(value, what)}
        case list():
            return [code(item) for item in value]
        case tuple():
            return {"tuple": [code(item) for item in value]}
        case dict() if _has_text_keys(value):
            return {"dict": {key: code(item) for key, item in value.items()}}
    raise CheckpointError(f"{what} is {shown(value)}, which JSON cannot say; {UNSAID}")


def _has_text_keys(value: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _is_plain(value: object) -> bool:
    """Whether JSON says the value as it is."""
    if isinstance(value, int):
        return _has_digits(value)
    return value is None or isinstance(value, float | str)


def _has_digits(number: int) -> bool:
    """Whether Python writes and reads the number: it refuses more than 4300 digits, or what it was told."""
    try:
        int.__repr__(number)
    except ValueError:
        return False
    return True


def _code_tensor(tensor: Tensor, what: str) -> list[Any]:
    """The type and the nested lists of elements; the shape too where no list has it."""
    unreadable = _say_unreadable(tensor)
    if unreadable:
        raise CheckpointError(f"{what} {unreadable}; give a plain tensor on memory that is there")
    dtype = str(tensor.dtype).removeprefix("torch.")
    items = plain(tensor).detach().tolist()
    if tensor.numel():
        return [dtype, items]
    return [dtype, items, list(tensor.shape)]


def _say_unreadable(tensor: Tensor) -> str:
    """Why the elements cannot be listed: "" where they can; words that follow its name otherwise."""
    if isinstance(tensor, DTensor):
        return "is a DTensor, of which ranks hold parts"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout != torch.strided:
        return f"is stored as {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    dtype = str(tensor.dtype).removeprefix("torch.")
    # torch lists no elements of types of less than a byte
    if tensor.is_complex() or dtype not in ITEMSIZE or dtype.startswith("float4"):
        return f"is a tensor of {dtype}, which JSON cannot say"
    return missing_memory(plain(tensor))


def decode_value(coded: object) -> Any:
    """What was coded. Raises ValueError for JSON that is not a coded value."""
    match coded:
        case _ if _is_plain(coded):
            return coded
        case list():
            return [decode_value(item) for item in coded]
        case {"tuple": list(items)}:
            return tuple(decode_value(item) for item in items)
        case {"dict": dict(items)}:
            return {key: decode_value(item) for key, item in items.items()}
        case {"tensor": [str(dtype), list() | int() | float() as items]} if dtype in ITEMSIZE:
            return _decode_tensor(dtype, items)
        case {"tensor": [str(dtype), list(), list(shape)]} if dtype in ITEMSIZE:
            return _decode_tensor(dtype, [], shape)
    raise ValueError(f"{shown(coded)} is not a coded value")


def _decode_tensor(dtype: str, items: object, shape: list[Any] | None = None) -> Tensor:
    """The tensor of these elements, in the shape of their lists if not in another."""
    try:
        tensor = torch.tensor(items, dtype=dtype_of(dtype))
        return tensor if shape is None else tensor.reshape(shape)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{shown(items)} are not elements of {dtype}: {error}") from error


def rebuild(
    like: tuple[object, ...] | list[object], items: Iterable[object]
) -> tuple[object, ...] | list[object]:
    """Another tuple or list of that kind. Whatever its class raises where it takes no items so."""
    kind: Any = type(like)
    # the class of a namedtuple takes its items one by one
    make = getattr(kind, "_make", kind)
    rebuilt: tuple[object, ...] | list[object] = make(list(items))
    return rebuilt
