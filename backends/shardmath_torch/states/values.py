"""Values: what is not a tensor: options and state of optimizers as JSON and back, extra states of modules as bytes.

1. A value is a number, text, None, a tensor, or a list, tuple or dict by text of values.
2. Tuples, dicts and tensors are objects of one key, which says what they are; a caller's dict is
   inside of one, so its own keys are never taken for that.
3. Numbers may be NaN and infinite, in Python's spelling. What would not come back is an error that
   names the value.
4. Whatever a module's `get_extra_state` gives comes back as the same kind, but for bytearray and memoryview, which come
   back as bytes. A checkpoint keeps the bytes, and a word that says what they were.

>>> coded = code_value((0.5, {"tensor": None}), "'betas'")
>>> coded
{'tuple': [0.5, {'dict': {'tensor': None}}]}
>>> decode_value(coded)
(0.5, {'tensor': None})
>>> given = pack_extra(nn.Module(), "_extra_state", io.BytesIO(b"abc"))
>>> given.kind, KINDS[given.kind].restore(given.packed).read()
('file', b'abc')
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.text import shown
from shardmath_torch.checkpoints.saving import as_tensor
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.exchange.memory import missing_memory, plain
from shardmath_torch.files.places import CheckpointError

__all__ = ["KINDS", "Extra", "as_bytes", "code_value", "decode_value", "pack_extra", "rebuild"]

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
        tensor = torch.tensor(items, dtype=dtype_of(dtype), device="cpu")
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


# Extra states


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a 1-d tensor of uint8."""
    array = tensor.cpu().numpy()
    return array.tobytes()


class Kind(NamedTuple):
    """What an extra state may be: the types, and what makes one of a tensor of bytes again."""

    types: tuple[type, ...]
    restore: Callable[[Tensor], object]


KINDS = {
    "tensor": Kind((Tensor,), Tensor.clone),
    "file": Kind((io.BytesIO,), lambda data: io.BytesIO(as_bytes(data))),
    "bytes": Kind((bytes, bytearray, memoryview), as_bytes),
    "none": Kind((type(None),), lambda data: None),
}
"""By the word that the checkpoint keeps."""


class Extra(NamedTuple):
    """What a module's get_extra_state gave, as bytes, and which of KINDS it is."""

    module: nn.Module
    kind: str
    packed: Tensor


def pack_extra(module: nn.Module, name: str, value: object) -> Extra:
    """The module's extra state of that name. Raises CheckpointError for a value that is not bytes."""
    kind = _kind_of(value)
    if kind is None:
        what = f"extra state {name!r} is of type {type(value).__name__}"
        raise CheckpointError(f"{what}; return bytes, a BytesIO, or a 1-d tensor of uint8")
    return Extra(module, kind, as_tensor(name, b"" if value is None else value))


def _kind_of(value: object) -> str | None:
    """The word for a value, None for one that is not bytes."""
    if isinstance(value, Tensor) and (value.dtype != torch.uint8 or value.ndim != 1):
        return None
    for word, kind in KINDS.items():
        if isinstance(value, kind.types):
            return word
    return None
