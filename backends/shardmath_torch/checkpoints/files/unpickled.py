"""Unpickled: torch.distributed.checkpoint's `.metadata`, unpickled without running anything but an allow-list.

1. A name outside `ALLOWED` is never looked up. It becomes an `_Unknown`, which holds nothing, and so does everything
   that the pickle makes of it. Unknown values are accepted only in attributes that Metadata does not declare, where
   Megatron-Core stores its save plans. These attributes are dropped.
2. An allowed name gives a substitute made for this reading, a subclass or a function that calls the real one: a pickle
   may set attributes of what it names, and torch's classes must not change.
3. Nothing allowed opens files, starts processes or imports by name.
4. Time and memory are proportional to the file's length. So only the opcodes of torch's own pickles are accepted;
   Python's unpickler is used, whose memo is a dict, while C's allocates an array as long as the largest index; and
   everything is checked before it is hashed or called: nested tuples that share parts take 2^n steps to hash, and a
   pickle may use one value any number of times.
5. Attributes are set only of parts of metadata. That can change a key after it was checked, so whatever of the metadata
   is hashed or shown later, such as names and dtypes, is checked again at the end.
6. torch accepts exactly as many fields of TensorProperties as it has: 6 from torch 2.15 on, and 5 before. Only the
   first 5, which every torch has, are read and written.
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
    # The module of these classes in Python 3.13.
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "PurePosixPath"),
}
"""(module, name) of everything that torch writes there, besides dtypes such as `torch.float32`."""

_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT UNICODE"
    " BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3"
    " EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD"
    " PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"
)
"""The opcodes in pickles of metadata. Not among them: sets, persistent and extension ids, old-style classes."""

_ROOM, _TIMES = 4096, 16
"""The most characters of arguments in all calls: _ROOM + _TIMES * the file's bytes."""
_MOST = 64
"""The most items of a tuple that is a key or an argument: dimensions, or parts of a path."""
_FIELDS = 5
"""How many fields TensorProperties has in every version of torch."""
_MOST_SHOWN = 300
"""How many characters to show of an error by torch or Python, which may repeat the file's content."""

_Python: Any = pickle._Unpickler
"""Python's own unpickler, whose methods type checkers do not know."""


def _list_allowed() -> dict[int, Callable[..., None]]:
    """The methods of Python's own unpickler for the allowed opcodes."""
    codes = [getattr(pickle, name)[0] for name in _OPCODES.split()]
    return {code: _Python.dispatch[code] for code in codes}


class _Unknown:
    """Stands for an object with a name that is not allowed, and for all that a pickle makes of it. It holds nothing."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def extend(self, items: object) -> None:
        """Ignore `items`, which a pickle appends to an object whose class is not allowed."""

    append = extend

    def __setitem__(self, key: object, value: object) -> None:
        """Drop an item that a dict would take."""


class _Unpickler(_Python):  # type: ignore[misc]
    """Python's unpickler, restricted to the allowed opcodes, which checks values before it hashes or calls them.

    The last values on `stack` are an opcode's operands: a callable or class and its arguments (REDUCE, NEWOBJ), an
    object and its state (BUILD), a key and a value (SETITEM).
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = _list_allowed()

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._characters_left = _ROOM + _TIMES * len(text)
        # Whether the pickle has named nothing outside of ALLOWED so far.
        self.knows_all = True

    def find_class(self, module: str, name: str) -> Any:
        self._spend_work(len(module) + len(name))
        if (module, name) in ALLOWED:
            return _make_substitute(super().find_class(module, name))
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
        self._spend_work(_measure(self.stack[-1]))
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
        """Whether the value below the top is unknown; if so, drop the top, its arguments or state."""
        unknown = isinstance(self.stack[-2], _Unknown)
        if unknown:
            self.stack.pop()
        return unknown

    def _spend_work(self, length: int) -> None:
        """Count characters of arguments. Raises UnpicklingError for more than the file's length allows."""
        self._characters_left -= length
        if self._characters_left < 0:
            most = f"{_TIMES} characters per byte of the file"
            what = f"its calls have more arguments than {most}, which torch never writes"
            raise pickle.UnpicklingError(what)

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


def _check_all(does: str, values: Iterable[object], allowed: Callable[[object], bool]) -> None:
    """Raise UnpicklingError for a value that is not allowed; `does` is what the pickle does with it."""
    for value in values:
        if not allowed(value):
            what = f"it {does} {shown(value)}, which torch's metadata never has"
            raise pickle.UnpicklingError(what)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | torch.dtype)


def _is_argument(value: object) -> bool:
    """A plain value, or a flat tuple of them."""
    if isinstance(value, tuple):
        return len(value) <= _MOST and all(map(_is_plain, value))
    return _is_plain(value)


def _measure(value: object) -> int:
    """The length of an argument, which is how long it takes to hash or copy it."""
    if isinstance(value, tuple):
        return sum(map(_measure, value))
    return len(value) if isinstance(value, str) else 1


def _is_state(value: object) -> bool:
    """Whether the state that a pickle gives an object has at most as many attributes as parts of metadata have."""
    # A state is a dict of attributes, or a pair of that and a dict of slots.
    parts = value if isinstance(value, tuple) else (value,)
    attributes = [part for part in parts[:_MOST] if isinstance(part, dict)]
    return len(parts) <= _MOST and all(len(part) <= _MOST for part in attributes)


def _is_key(value: object) -> bool:
    """Whether metadata may have such a key: a plain value, a flat tuple of them, or a MetadataIndex of them."""
    if isinstance(value, MetadataIndex):
        return isinstance(value.fqn, str) and _is_argument(value.offset) and _is_plain(value.index)
    return _is_argument(value)


def _is_part(value: object) -> bool:
    """Whether a value was made in this reading: classes and enum members are shared with the rest of the program."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _check_metadata(metadata: Metadata) -> None:
    """Raise UnpicklingError if a key, name or dtype, which are hashed, compared or shown later, is of a wrong type."""
    _check_all("has a key", metadata.storage_data or (), _is_key)
    parts = metadata.state_dict_metadata
    _check_all("has a name", parts, lambda name: isinstance(name, str))
    tensors = [part for part in parts.values() if isinstance(part, TensorStorageMetadata)]
    dtypes = [part.properties.dtype for part in tensors]
    _check_all("has a type", dtypes, lambda dtype: isinstance(dtype, torch.dtype))


def _check_known(unpickled: object) -> None:
    """Raise UnpicklingError, with the name, if anything in the value is unknown."""
    unvisited = [unpickled]
    # By identity: a pickle may refer to one value any number of times.
    visited: set[int] = set()
    while unvisited:
        value = unvisited.pop()
        if isinstance(value, _Unknown):
            name = shown(f"{value.module}.{value.name}")
            raise pickle.UnpicklingError(f"it names {name}, which torch's metadata never has")
        if id(value) not in visited:
            visited.add(id(value))
            unvisited += _list_items(value)


def _list_items(value: object) -> Iterable[object]:
    """The values that a value made by a pickle consists of."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if _is_part(value) else ()


def _drop_undeclared(metadata: Metadata) -> None:
    """Remove the attributes that Metadata does not declare."""
    declared = {field.name for field in dataclasses.fields(Metadata)}
    for name in vars(metadata).keys() - declared:
        delattr(metadata, name)


def _make_substitute(real: Any) -> Any:
    """A subclass or function with the same behavior, whose attributes a pickle may set."""
    if isinstance(real, type) and dataclasses.is_dataclass(real):
        # Only TensorProperties has the method, which does not take the fields of another torch version.
        methods = {"__setstate__": _set_fields} if "__setstate__" in vars(real) else {}
        return type(real.__name__, (real,), methods)
    # Not the function or class itself, whose attributes a pickle could set for the whole program.
    return lambda *args: real(*args)


def _set_fields(self: Any, state: tuple[object, ...]) -> None:
    """Set the fields of TensorProperties that every torch has."""
    super(type(self), self).__setstate__(state[:_FIELDS])


def read_metadata(text: bytes, where: object) -> Metadata:
    """Return the Metadata of a torch checkpoint, unpickled from `text`, the content of the file `where`. Raises
    CheckpointError, naming the file, if `text` needs a class outside an allow-list, or is not such Metadata.

    Allowed classes are replaced by substitutes, so objects do not equal objects of torch's own classes.
    """
    try:
        reader = _Unpickler(text)
        unpickled = reader.load()
        if isinstance(unpickled, Metadata):
            _drop_undeclared(unpickled)
            _check_metadata(unpickled)
        if not reader.knows_all:
            _check_known(unpickled)
    except Exception as error:
        why = message_of(error)[:_MOST_SHOWN]
        what = f"{where} is not metadata of torch.distributed.checkpoint: {why}"
        fix = (
            "nothing else is unpickled: save it again with torch, or unpickle it where you trust it"
        )
        raise CheckpointError(f"{what}; {fix}") from error
    if not isinstance(unpickled, Metadata):
        holds = f"{where} holds a {type(unpickled).__name__}"
        what = f"{holds}, not the Metadata of torch.distributed.checkpoint"
        raise CheckpointError(f"{what}; give the folder of a checkpoint that torch saved")
    return unpickled


class _Pickler(pickle.Pickler):
    """A pickler that writes only the fields of TensorProperties that every torch reads."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, TensorProperties):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        make, arguments, state = reduced[:3]
        return make, arguments, state[:_FIELDS]


def write_metadata(metadata: Metadata) -> bytes:
    """Return a pickle of torch's `metadata`, with only those properties of tensors that every version of torch
    reads."""
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()
