"""Index: what `save_state` saves of a state besides its tensors, as a checked value and as JSON.

1. It has the module's names, each with the stored name of its tensor; kinds of extra states; parameter groups with
   their options; and an entry for each item of a parameter's state.
2. A tensor of the state is `Like` its parameter, or has its `Own` shape; else it is a `Value`.
3. Entries of one `origin`, and options of one, are one object (`sharing`), of which each has the value.
4. JSON that was not written here raises when it is read.

>>> index = Index({"w": "w"}, {}, (SavedGroup(("w",), {"lr": 0.5}),), {"w": {"step": Value(3)}})
>>> read_index("folder", write_index(index)) == index
True
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from shardmath.base.dtypes import ITEMSIZE
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.saving import as_tensor
from shardmath_torch.checkpoints.states.values import KINDS, as_bytes, code_value, decode_value

__all__ = [
    "INDEX",
    "Entries",
    "Entry",
    "SavedGroup",
    "Index",
    "Like",
    "Origin",
    "Own",
    "Value",
    "check_key",
    "read_entries",
    "read_groups",
    "read_index",
    "write_entries",
    "write_groups",
    "write_index",
]

INDEX = "training"
"""The name of the JSON in a checkpoint."""


Origin: TypeAlias = tuple[str, ...]
"""Empty for state or an option that is an object by itself; else what names the object (`sharing`)."""


@dataclass(frozen=True, slots=True)
class Like:
    """An index entry for an optimizer's state tensor that has the shape and layout of its parameter. Its own `dtype`
    can differ from the parameter's."""

    dtype: str
    origin: Origin = ()


@dataclass(frozen=True, slots=True)
class Own:
    """An index entry for an optimizer's state tensor with its own shape and dtype, which every rank holds whole and
    equal."""

    dtype: str
    shape: tuple[int, ...]
    origin: Origin = ()


@dataclass(frozen=True, slots=True)
class Value:
    """An index entry: an item of an optimizer's state that is not a tensor, and is stored as JSON."""

    value: object
    origin: Origin = ()


Entry: TypeAlias = Like | Own | Value
Entries: TypeAlias = Mapping[str, Entry]


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A saved optimizer's parameter group: the names of its parameters, options such as the learning rate, and the
    origins of options that are one object.

    If ranks reported different options for parts of a group, each part is a SavedGroup, and `whole` has the names of
    all parameters of the group; () if they are `parameters`.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, object]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    whole: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all parameters of the group of which this may be a part, in its order."""
        return self.whole or self.parameters

    def keep(self, names: tuple[str, ...]) -> SavedGroup:
        """Return the part of this group that has the parameters `names`."""
        return replace(self, parameters=names, whole=() if names == self.members else self.members)


@dataclass(frozen=True, slots=True)
class Index:
    """The content of a saved training state except the tensors' elements. `names` maps the module's tensors to their
    names in the checkpoint; `extra` maps extra states to their types, such as "bytes"; `state` maps each parameter to
    its optimizer state: a dict of plain values and descriptions of tensors."""

    names: Mapping[str, str]
    extra: Mapping[str, str]
    groups: tuple[SavedGroup, ...] | None
    state: Mapping[str, Entries]

    def options(self) -> dict[str, Mapping[str, object]]:
        """Return a dict from each parameter's name to the options of its parameter group, such as the learning rate."""
        found: dict[str, Mapping[str, object]] = {}
        for group in self.groups or ():
            found |= dict.fromkeys(group.parameters, group.options)
        return found

    def members(self) -> dict[str, SavedGroup]:
        """Return a dict from each parameter's name to its parameter group."""
        found: dict[str, SavedGroup] = {}
        for group in self.groups or ():
            found |= dict.fromkeys(group.parameters, group)
        return found


# To JSON


def write_index(index: Index) -> Tensor:
    """Return `index` as JSON in a tensor of bytes. Raises CheckpointError, which names the value, if some value in
    `index` cannot be written as JSON."""
    groups = None
    if index.groups is not None:
        groups = write_groups(index.groups)
    state = write_entries(index.state)
    coded = {"names": index.names, "extra": index.extra, "groups": groups, "state": state}
    return as_tensor(INDEX, json.dumps(coded).encode())


def write_groups(groups: Iterable[SavedGroup]) -> list[dict[str, Any]]:
    """Return `groups` as lists and dicts that can be written as JSON. Raises CheckpointError, which names the option,
    if some option of a group cannot be written as JSON."""
    return [_write_group(group) for group in groups]


def _write_group(group: SavedGroup) -> dict[str, Any]:
    options = {}
    for key, value in group.options.items():
        check_key(key, "a parameter group")
        # The optimizer that takes the options has Enums and namedtuples of the same classes (`Kinded`).
        options[key] = code_value(value, f"{key!r} of a parameter group", kinded=True)
    written: dict[str, Any] = {"parameters": list(group.parameters), "options": options}
    if group.origins:
        written["origins"] = {key: list(origin) for key, origin in group.origins.items()}
    if group.whole:
        written["whole"] = list(group.whole)
    return written


def write_entries(state: Mapping[str, Entries]) -> dict[str, Any]:
    """Return `state` (each parameter's optimizer state, by parameter name) as dicts and lists that JSON can hold.
    Raises CheckpointError if JSON cannot hold a value."""
    return {name: _write_parameter(name, entries) for name, entries in state.items()}


def check_key(key: object, of: str) -> None:
    """Raise CheckpointError unless `key`, a key of a dict, is exactly a str: loading would turn an instance of a
    subclass into a plain str. In the message, `of` names the dict, such as "a parameter group"."""
    if type(key) is not str:
        what = f"{of} has the key {shown(key)}, of type {type(key).__name__}"
        raise CheckpointError(f"{what}; use text as keys, of exactly the type str")


def _write_parameter(name: str, entries: Entries) -> dict[str, Any]:
    written = {}
    for key, entry in entries.items():
        written[key] = _write_entry(entry, f"{key!r} of {name!r}")
        if entry.origin:
            written[key]["origin"] = list(entry.origin)
    return written


def _write_entry(entry: Entry, what: str) -> dict[str, Any]:
    match entry:
        case Like():
            return {"like": entry.dtype}
        case Own():
            return {"own": [entry.dtype, list(entry.shape)]}
        case Value():
            return {"value": code_value(entry.value, what)}


# From JSON


def read_index(path: object, data: Tensor) -> Index:
    """Parse the index in the JSON bytes `data`. Raises CheckpointError, with `path`, if save_state did not write
    them."""
    try:
        return _decode_index(json.loads(as_bytes(data)))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{path}: {INDEX!r} was not written by save_state ({error})"
        fix = "save again with save_state, or read tensors with shardmath_torch.load"
        raise CheckpointError(f"{what}; {fix}") from error


def _decode_index(coded: object) -> Index:
    """The index in this JSON. Raises ValueError, KeyError or TypeError for other JSON."""
    parts = _check_object(coded)
    if parts.keys() != {"names", "extra", "groups", "state"}:
        what = f"its parts are {shown(sorted(parts))}"
        raise ValueError(f"{what}, not names, extra, groups and state")
    names = _check_object(parts["names"])
    _check_texts(names.values())
    extra = _check_object(parts["extra"])
    for kind in extra.values():
        if kind not in KINDS:
            what = f"{shown(kind)} is not a kind of extra state"
            raise ValueError(f"{what}, which are {', '.join(KINDS)}")
    groups = None
    if parts["groups"] is not None:
        groups = read_groups(parts["groups"])
    return Index(names, extra, groups, read_entries(parts["state"]))


def read_groups(coded: object) -> tuple[SavedGroup, ...]:
    """Return parameter groups, decoded from JSON values that `write_groups` made. Raises ValueError, KeyError or
    TypeError for other JSON."""
    return tuple(map(_read_group, _check_list(coded)))


def _read_group(coded: object) -> SavedGroup:
    group = _check_object(coded)
    parameters = tuple(_check_list(group["parameters"]))
    _check_texts(parameters)
    options = _check_object(group["options"])
    decode = partial(decode_value, kinded=True)
    # Checkpoints from before groups had origins, and parts of groups the whole, are read, too.
    origins = _check_object(group.get("origins", {}))
    whole = tuple(_check_list(group.get("whole", [])))
    _check_texts(whole)
    return SavedGroup(
        parameters,
        {key: decode(value) for key, value in options.items()},
        {key: _read_origin(origin) for key, origin in origins.items()},
        whole,
    )


def _read_origin(coded: object) -> Origin:
    origin = tuple(_check_list(coded))
    _check_texts(origin)
    return origin


def read_entries(coded: object) -> dict[str, Entries]:
    """Return the optimizer state of each parameter, by parameter name, decoded from JSON values that `write_entries`
    made. Raises ValueError, KeyError or TypeError for other JSON."""
    state = _check_object(coded)
    return {name: _read_parameter(entries) for name, entries in state.items()}


def _read_parameter(coded: object) -> Entries:
    entries = _check_object(coded)
    return {key: _read_entry(entry) for key, entry in entries.items()}


def _read_entry(coded: object) -> Entry:
    # Checkpoints from before entries had origins are read, too.
    origin = _read_origin(_check_object(coded).get("origin", []))
    match coded:
        case {"like": str(dtype)} if dtype in ITEMSIZE:
            return Like(dtype, origin)
        case {"own": [str(dtype), [*sizes]]} if dtype in ITEMSIZE and all(map(_is_size, sizes)):
            return Own(dtype, tuple(sizes), origin)
        case {"value": value}:
            return Value(decode_value(value), origin)
    what = f"{shown(coded)} does not describe an item of an optimizer's state"
    raise ValueError(f"{what}, by like, own or value")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_object(coded: object) -> dict[str, Any]:
    if not isinstance(coded, dict):
        raise ValueError(f"{shown(coded)} is not a JSON object")
    return coded


def _check_list(coded: object) -> list[Any]:
    if not isinstance(coded, list):
        raise ValueError(f"{shown(coded)} is not a JSON list")
    return coded


def _check_texts(coded: Any) -> None:
    for name in coded:
        if not isinstance(name, str):
            raise ValueError(f"{shown(name)} is not a name, which must be text")
