"""What torch.distributed.checkpoint pickles into `.metadata`, read without running anything that is not listed here.

1. A name outside `ALLOWED` is never looked up. It stands for an `_Unknown`, which holds nothing, as does all that the
   pickle makes of it. Unknown values may be in attributes that Metadata does not declare, where Megatron-Core keeps its
   save plans, and nowhere else. These attributes are dropped.
2. What it gets for a name is made for this reading, a subclass or a function that calls the real one: a pickle may set
   attributes of what it names, and torch's own classes are to stay as they are.
3. None of it opens files, starts processes or imports by name.
4. Time and memory are in proportion to the file's length. So torch's own pickles say what instructions there may be;
   Python's reader keeps its memo in a dict, where C's takes an array as long as the largest number asked for; and
   before anything is hashed or called it is looked at: tuples of tuples that share parts take 2^n steps to hash, and
   what a pickle has once it may use any number of times.
5. Attributes are set of the parts of metadata alone. That can make a key another than was looked at, so what is hashed
   or shown of metadata later, names and types among it, is looked at when all is read.
6. torch takes as many fields of TensorProperties as it has itself: 6 from torch 2.15 on, and 5 before. Read and written
   are the first 5, which every torch takes.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardmath.base.text import message_of
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError

__all__ = ["ALLOWED", "read_metadata", "write_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"

ALLOWED = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    # Where these say that they live in Python 3.13.
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
}
"""(module, name) of all that torch writes there; types of elements, `torch.float32` and so on, beside."""

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT UNICODE"
    " BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3"
    " EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD"
    " PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"
)
"""What pickles of metadata are made of. Not among it: sets, persistent and extended names, instructions of classes."""

_ROOM, _TIMES = 4096, 16
"""Characters of arguments in all: so many, and so many times the file's bytes."""
_MOST = 64
"""Of a tuple that is a key or an argument: dimensions, or parts of a path."""
_FIELDS = 5
"""Of TensorProperties, in every version of torch."""
_MOST_SHOWN = 300
"""Characters of an error of torch's or Python's, which may repeat what stood in the file."""

_Python: Any = pickle._Unpickler
"""Python's own reader, of which type checkers do not know the methods."""


def _list_allowed() -> dict[int, Callable[..., None]]:
    """What Python's own reader does at each of the instructions that there may be."""
    codes = [getattr(pickle, name)[0] for name in _OPCODES.split()]
    return {code: _Python.dispatch[code] for code in codes}


class _Unknown:
    """Stands for something with a name that is not listed, and for all that a pickle makes of it. It holds nothing."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def extend(self, items: object) -> None:
        """Takes what a list would take, and drops it."""

    append = extend

    def __setitem__(self, key: object, value: object) -> None:
        """Takes what a dict would take, and drops it."""


class _Unpickler(_Python):  # type: ignore[misc]
    """Python's reader, of these instructions alone, that looks before it hashes or calls."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = _list_allowed()

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._left = _ROOM + _TIMES * len(text)
        self.knows_all = True

    def find_class(self, module: str, name: str) -> Any:
        self._spend(len(module) + len(name))
        if (module, name) in ALLOWED:
            return _copy(super().find_class(module, name))
        if module == "torch" and "." not in name:
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
        self.knows_all = False
        return _Unknown(module, name)

    def load_reduce(self) -> None:
        if self._drops_top():
            return
        _check_all("calls something with", self.stack[-1], _is_argument)
        self._spend(_measure(self.stack[-1]))
        super().load_reduce()

    def load_newobj(self) -> None:
        if self._drops_top():
            return
        _check_all("makes something of", self.stack[-1:], _is_argument)
        super().load_newobj()

    def load_build(self) -> None:
        if self._drops_top():
            return
        _check_all("sets attributes of", self.stack[-2:-1], _is_part)
        _check_all("sets attributes to", self.stack[-1:], _is_state)
        super().load_build()

    def load_setitem(self) -> None:
        _check_all("has a key", self.stack[-2:-1], _is_key)
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_all("has a key", self.stack[::2], _is_key)
        super().load_setitems()

    def load_dict(self) -> None:
        _check_all("has a key", self.stack[::2], _is_key)
        super().load_dict()

    def _drops_top(self) -> bool:
        """Whether the value below the top is unknown: what it is called with, or gets as state, is then dropped."""
        unknown = isinstance(self.stack[-2], _Unknown)
        if unknown:
            self.stack.pop()
        return unknown

    def _spend(self, length: int) -> None:
        """Raises UnpicklingError where calls have looked at more than the file's length allows."""
        self._left -= length
        if self._left < 0:
            raise pickle.UnpicklingError("it calls the same again and again with something long")

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


def _check_all(does: str, values: Iterable[object], allowed: Callable[[object], bool]) -> None:
    """Raises UnpicklingError, which says what the pickle does with it, for a value that is not allowed."""
    for value in values:
        if not allowed(value):
            raise pickle.UnpicklingError(f"it {does} {shown(value)}, which no metadata has")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | torch.dtype)


def _is_argument(value: object) -> bool:
    """A plain value, or a flat tuple of them."""
    if isinstance(value, tuple):
        return len(value) <= _MOST and all(map(_is_plain, value))
    return _is_plain(value)


def _measure(value: object) -> int:
    """How long it takes to look at all of an argument."""
    if isinstance(value, tuple):
        return sum(map(_measure, value))
    return len(value) if isinstance(value, str) else 1


def _is_state(value: object) -> bool:
    """Whether it is as much as parts of metadata have as attributes."""
    # A dict of attributes, or a pair of one and of what slots hold.
    each = value if isinstance(value, tuple) else (value,)
    attributes = [part for part in each[:_MOST] if isinstance(part, dict)]
    return len(each) <= _MOST and all(len(part) <= _MOST for part in attributes)


def _is_key(value: object) -> bool:
    """Whether it is what metadata have as a key: a plain value, a flat tuple of them, or an index of them."""
    if isinstance(value, MetadataIndex):
        return isinstance(value.fqn, str) and _is_argument(value.offset) and _is_plain(value.index)
    return _is_argument(value)


def _is_part(value: object) -> bool:
    """Whether it was made for this reading: classes, and members of enumerations, are there for everybody."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _check_metadata(found: Metadata) -> None:
    """Raises UnpicklingError for what no metadata has among what is hashed, compared or shown of them later."""
    _check_all("has a key", found.storage_data or (), _is_key)
    parts = found.state_dict_metadata
    _check_all("has a name", parts, lambda name: isinstance(name, str))
    tensors = [part for part in parts.values() if isinstance(part, TensorStorageMetadata)]
    types = [part.properties.dtype for part in tensors]
    _check_all("has a type", types, lambda dtype: isinstance(dtype, torch.dtype))


def _check_known(found: object) -> None:
    """Raises UnpicklingError if anything in it is unknown, with the name."""
    left = [found]
    # By identity: a pickle may refer to one value any number of times.
    seen: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, _Unknown):
            raise pickle.UnpicklingError(f"it names {shown(f'{value.module}.{value.name}')}")
        if id(value) not in seen:
            seen.add(id(value))
            left += _list_parts(value)


def _list_parts(value: object) -> Iterable[object]:
    """What a value made by a pickle consists of."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if _is_part(value) else ()


def _drop_undeclared(found: Metadata) -> None:
    """Removes the attributes that Metadata does not declare."""
    declared = {field.name for field in dataclasses.fields(Metadata)}
    for name in vars(found).keys() - declared:
        delattr(found, name)


def _copy(found: Any) -> Any:
    """Something that does the same."""
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        own = {"__setstate__": _set_fields} if "__setstate__" in vars(found) else {}
        return type(found.__name__, (found,), own)
    # Not the function or class itself, whose attributes a pickle could set for everybody.
    return lambda *args: found(*args)


def _set_fields(self: Any, state: tuple[object, ...]) -> None:
    """Sets those fields of TensorProperties that every torch has."""
    super(type(self), self).__setstate__(state[:_FIELDS])


def read_metadata(text: bytes, where: object) -> Metadata:
    """The metadata of a checkpoint of torch; its parts are equal to nothing that torch makes.

    Raises CheckpointError for anything else, naming the file `where`.
    """
    try:
        reader = _Unpickler(text)
        found = reader.load()
        if isinstance(found, Metadata):
            _drop_undeclared(found)
            _check_metadata(found)
        if not reader.knows_all:
            _check_known(found)
    except Exception as error:
        why = message_of(error)[:_MOST_SHOWN]
        what = f"{where} is not metadata of torch.distributed.checkpoint: {why}"
        fix = "nothing else is unpickled: save again, or convert it where you trust it"
        raise CheckpointError(f"{what}; {fix}") from error
    if not isinstance(found, Metadata):
        holds = f"{where} holds a {type(found).__name__}"
        what = f"{holds}, not the Metadata of torch.distributed.checkpoint"
        raise CheckpointError(f"{what}; give the folder of a checkpoint")
    return found


class _Pickler(pickle.Pickler):
    """Writes those fields of TensorProperties that every torch reads."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, TensorProperties):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        make, arguments, state = reduced[:3]
        return make, arguments, state[:_FIELDS]


def write_metadata(metadata: Metadata) -> bytes:
    """The pickle of it that every version of torch reads."""
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()
