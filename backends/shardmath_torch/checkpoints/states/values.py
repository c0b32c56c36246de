"""Values: optimizers' options and state as JSON and back, and modules' extra states as bytes.

1. A value is a number, text, None, a tensor, a dtype of torch, a number of numpy, or a list, tuple or dict by text of
   values. Its type is exactly one of these: a subclass would come back as its base.
2. Tuples, dicts, tensors, dtypes and numbers of numpy become JSON objects of one key, which gives the kind; a caller's
   dict is nested in one, so its keys are never mistaken for kinds.
3. Numbers may be NaN and infinite, in Python's spelling. A value that would not come back unchanged raises an error
   that names it. An Enum or a namedtuple comes back only if the optimizer that takes it holds one of the same class in
   its place (`Kinded`): a fresh optimizer holds options, but no state.
4. What a module's `get_extra_state` gives comes back as the same kind, except that bytearray and memoryview come back
   as bytes. A checkpoint keeps the bytes, and a word for the kind.

>>> coded = code_value((0.5, {"tensor": None}), "'betas'")
>>> coded
{'tuple': [0.5, {'dict': {'tensor': None}}]}
>>> decode_value(coded)
(0.5, {'tensor': None})
>>> decode_value(code_value(np.float32(0.5), "'lr'"))
np.float32(0.5)
>>> given = pack_extra(nn.Module(), "_extra_state", io.BytesIO(b"abc"))
>>> given.kind, KINDS[given.kind].restore(given.packed).read()
('file', b'abc')
"""

from __future__ import annotations

import io
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.saving import as_tensor
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.moves.exchange.memory import missing_memory, plain

__all__ = [
    "KINDS",
    "Extra",
    "Kinded",
    "as_bytes",
    "can_change",
    "check_depth",
    "code_value",
    "decode_value",
    "list_tensors",
    "move_tensors",
    "pack_extra",
    "plain_of",
    "rebuild",
]

MOST_DEPTH = 64
"""How deep values may be nested; Python's JSON ends in a RecursionError at some hundreds."""

CODABLE = "use numbers, text, lists, tuples, dicts by text, tensors, and dtypes of torch"

NUMBERS = (
    *("bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
)
"""Types of numpy whose numbers Python's numbers hold exactly."""


class Kinded(NamedTuple):
    """A stand-in for an Enum member or namedtuple that was read from a checkpoint: only the class's name and the plain
    value or tuple are stored there, not the class."""

    kind: str
    plain: object


def plain_of(value: object) -> object:
    """Return the value of an Enum member, or the plain tuple of a namedtuple; any other `value` is returned
    unchanged."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return tuple(value)
    return value


def check_depth(what: str, depth: int) -> None:
    """Raise CheckpointError if the value called `what` is nested in more than MOST_DEPTH other values; `depth` is their
    number. A value that contains itself is rejected, too, since its depth grows without end."""
    if depth > MOST_DEPTH:
        fault = f"{what} is nested more than {MOST_DEPTH} deep, or contains itself"
        raise CheckpointError(f"{fault}; replace it by a flatter value")


def code_value(value: object, what: str, *, kinded: bool = False, depth: int = 0) -> Any:
    """Return `value`, such as an optimizer's option, in a form that JSON can store; Enums and namedtuples can be stored
    only if `kinded` is True. `what` names the value in errors, and `depth` counts the values that it is nested in.

    Pass `kinded` if whatever takes the value holds Enums or namedtuples in the same places. Raises CheckpointError if
    JSON cannot express the value.
    """
    check_depth(what, depth)
    if _is_plain(value):
        return value
    code = partial(code_value, what=what, kinded=kinded, depth=depth + 1)
    match value:
        case Kinded():
            return {"kinded": [value.kind, code(value.plain)]}
        case Tensor():
            return {"tensor": _code_tensor(value, what)}
        case torch.dtype() if _name_dtype(value) in ITEMSIZE:
            return {"dtype": _name_dtype(value)}
        case np.generic() if value.dtype.name in NUMBERS:
            return {"numpy": [value.dtype.name, value.item()]}
        case list() | tuple() | dict() if type(value) in (list, tuple, dict):
            return _code_parts(value, what, code)
    plain_value = plain_of(value)
    if kinded and plain_value is not value:
        return {"kinded": [type(value).__qualname__, code(plain_value)]}
    raise CheckpointError(_explain_uncodable(value, what))


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _code_parts(
    value: list[Any] | tuple[Any, ...] | dict[Any, Any], what: str, code: Callable[[object], Any]
) -> Any:
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise CheckpointError(_explain_uncodable(value, what))
        return {"dict": {key: code(item) for key, item in value.items()}}
    items = [code(item) for item in value]
    return items if isinstance(value, list) else {"tuple": items}


def _explain_uncodable(value: object, what: str) -> str:
    """The error message for a value that would be loaded as another type, or that JSON cannot hold."""
    kind = type(value)
    for base in (int, float, str, list, tuple, dict):
        if isinstance(value, base) and kind is not base:
            fault = (
                f"{what} is {shown(value)}, a {kind.__qualname__}, but would be loaded as a plain"
            )
            return f"{fault} {base.__name__}; {CODABLE}, of exactly these types"
    return f"{what} is {shown(value)}, which JSON cannot store; {CODABLE}"


def _is_plain(value: object) -> bool:
    """Whether JSON holds the value unchanged."""
    if isinstance(value, int) and type(value) is int:
        return _is_printable(value)
    return value is None or type(value) in (bool, float, str)


def _is_printable(number: int) -> bool:
    """Whether Python prints the number: it raises for more than 4300 digits, or the limit that was set."""
    try:
        int.__repr__(number)
    except ValueError:
        return False
    return True


def _code_tensor(tensor: Tensor, what: str) -> list[Any]:
    """The dtype of a tensor and its elements as nested lists; also its shape, if it has no elements."""
    unreadable = _explain_unreadable(tensor)
    if unreadable:
        raise CheckpointError(f"{what} {unreadable}; replace it by a plain tensor with memory")
    dtype = _name_dtype(tensor.dtype)
    items = plain(tensor).detach().tolist()
    if tensor.numel():
        return [dtype, items]
    return [dtype, items, list(tensor.shape)]


def _explain_unreadable(tensor: Tensor) -> str:
    """Why the elements cannot be listed, as words that follow the tensor's name; "" if they can."""
    if isinstance(tensor, DTensor):
        return "is a DTensor, of which ranks hold parts"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout != torch.strided:
        return f"is stored as {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    dtype = _name_dtype(tensor.dtype)
    # torch does not list elements of less than a byte
    if tensor.is_complex() or dtype not in ITEMSIZE or dtype.startswith("float4"):
        return f"is a tensor of {dtype}, which JSON cannot store"
    return missing_memory(plain(tensor))


def decode_value(coded: object, *, kinded: bool = False) -> Any:
    """Return the value that `code_value` turned into `coded`; with `kinded`, an Enum or namedtuple comes back as a
    `Kinded`. Raises ValueError for other JSON."""
    decode = partial(decode_value, kinded=kinded)
    match coded:
        case _ if _is_plain(coded):
            return coded
        case list():
            return [decode(item) for item in coded]
        case {"tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"dict": dict(items)}:
            return {key: decode(item) for key, item in items.items()}
        case {"dtype": str(name)} if name in ITEMSIZE:
            return dtype_of(name)
        case {"kinded": [str(kind), plain]} if kinded:
            return Kinded(kind, decode(plain))
    return _decode_array(coded)


def _decode_array(coded: object) -> object:
    """A tensor, or a number of numpy. Raises ValueError for JSON that is neither."""
    match coded:
        case {"numpy": [str(dtype), bool() | int() | float() as number]} if dtype in NUMBERS:
            return _decode_number(dtype, number)
        case {"tensor": [str(dtype), list() | int() | float() as items]} if dtype in ITEMSIZE:
            return _decode_tensor(dtype, items)
        case {"tensor": [str(dtype), list(), list(shape)]} if dtype in ITEMSIZE:
            return _decode_tensor(dtype, [], shape)
    what = "not a value that save_state writes"
    raise ValueError(f"{shown(coded)} is {what}; save it again")


def _decode_tensor(dtype: str, items: object, shape: list[Any] | None = None) -> Tensor:
    """The tensor of these elements, in that shape if given, else in the shape of their lists."""
    try:
        tensor = torch.tensor(items, dtype=dtype_of(dtype), device="cpu")
        return tensor if shape is None else tensor.reshape(shape)
    except (TypeError, RuntimeError, OverflowError) as error:
        what = f"{shown(items)} are not elements of a tensor of {dtype}: {error}"
        raise ValueError(f"{what}; save it again") from error


def _decode_number(dtype: str, number: float) -> object:
    try:
        return np.dtype(dtype).type(number)
    except (OverflowError, ValueError) as error:
        what = f"{shown(number)} is not a number of {dtype}: {error}"
        raise ValueError(f"{what}; save it again") from error


def rebuild(like: object, items: object) -> Any:
    """Return a list, tuple, namedtuple or Enum member of the same class as `like`, made of `items` (for an Enum, its
    value). Raises whatever the class raises for such items."""
    kind: Any = type(like)
    # the class of a namedtuple takes its items one by one
    make = getattr(kind, "_make", kind)
    return make(items)


def can_change(value: object) -> bool:
    """Whether `value` can be changed in place: a tensor, a list, a dict, or a tuple that has one of these inside."""
    unvisited = [value]
    while unvisited:
        part = unvisited.pop()
        if isinstance(part, Tensor | list | dict):
            return True
        if isinstance(part, tuple):
            unvisited += part
    return False


def list_tensors(value: object) -> list[Tensor]:
    """Return the tensors in `value`, at any depth of lists, tuples and dicts."""
    tensors = []
    visited: dict[int, object] = {}
    unvisited = [value]
    while unvisited:
        part = unvisited.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif id(part) not in visited and isinstance(part, list | tuple | dict):
            visited[id(part)] = part
            unvisited += part.values() if isinstance(part, dict) else part
    return tensors


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors moved to `device`, at any depth of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move_tensors(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return rebuild(value, (move_tensors(item, device) for item in value))
    return value


# Extra states


def as_bytes(tensor: Tensor) -> bytes:
    """Return the content of a 1-d tensor of uint8 as bytes."""
    array = tensor.cpu().numpy()
    return array.tobytes()


class StateKind(NamedTuple):
    """A kind of extra state that a module may have: its Python types, and the function that restores it from bytes."""

    types: tuple[type, ...]
    restore: Callable[[Tensor], object]


KINDS = {
    "tensor": StateKind((Tensor,), Tensor.clone),
    "file": StateKind((io.BytesIO,), lambda data: io.BytesIO(as_bytes(data))),
    "bytes": StateKind((bytes, bytearray, memoryview), as_bytes),
    "none": StateKind((type(None),), lambda data: None),
}
"""Kinds of extra states by the word that the checkpoint keeps."""


class Extra(NamedTuple):
    """A module's extra state as bytes, with the type to which loading converts the bytes back: `kind` is "tensor",
    "file" (BytesIO), "bytes" or "none"."""

    module: nn.Module
    kind: str
    packed: Tensor


def pack_extra(module: nn.Module, name: str, value: object) -> Extra:
    """Return the extra state `value` of `module` as bytes, with its kind. Raises CheckpointError, which names `name`,
    if `value` is not bytes, a BytesIO, a 1-d tensor of uint8, or None."""
    kind = _kind_of(value)
    if kind is None:
        what = f"extra state {name!r} is of type {type(value).__name__}, but must be bytes"
        fix = "return bytes, a BytesIO, or a 1-d tensor of uint8 from get_extra_state"
        raise CheckpointError(f"{what}; {fix}")
    return Extra(module, kind, as_tensor(name, b"" if value is None else value))


def _kind_of(value: object) -> str | None:
    """The kind of an extra state, a key of KINDS; None for a value that is not bytes."""
    if isinstance(value, Tensor) and (value.dtype != torch.uint8 or value.ndim != 1):
        return None
    if isinstance(value, Tensor):  # of any subclass, as only its bytes matter
        return "tensor"
    for word, kind in KINDS.items():
        # Exactly these types: a subclass would come back as its base.
        if type(value) in kind.types:
            return word
    return None
