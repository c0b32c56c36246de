"""Sharing: state that is one object under several keys, such as one step of all parameters, and such options of groups.

1. The entry of such state names its origin: the first parameter that has it, and the key there; or the key alone if
   only one parameter has it. For options a group is named by its first parameter.
2. Tensors of one spot (`memory`) are one object, such as a tensor and what its `detach` returns.
3. Tensors that share only a part of their memory, or view it with another shape, would be loaded as separate tensors,
   of which later steps change only one. So would tensors that share memory with a tensor of the module or an option, or
   with a tensor in a list, tuple or dict. They raise, and so does a list or dict that is state and an option.

>>> import torch
>>> step, moment = torch.zeros(()), torch.zeros(2)
>>> states = {"a": {"step": step, "m": moment, "n": moment.detach()}, "b": {"step": step}}
>>> for item, origin in find_origins(states).items():
...     print(item, origin)
('a', 'step') ('a', 'step')
('b', 'step') ('a', 'step')
('a', 'm') ('m',)
('a', 'n') ('m',)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import Entries, Origin
from shardmath_torch.checkpoints.states.memory import MemorySpot, find_meetings, spot_of
from shardmath_torch.checkpoints.states.values import list_tensors

__all__ = ["check_apart", "check_options_apart", "find_origins", "mark_shared"]

_Item: TypeAlias = tuple[str, str]
"""A parameter's name, and a key of its state."""

_Found: TypeAlias = dict[MemorySpot | None, tuple[str, Tensor]]
"""Tensors by spot, with words for each."""


def mark_shared(entries: dict[str, Entries], states: Mapping[str, Mapping[Any, Any]]) -> None:
    """Mark optimizer state items whose values in `states` are the same object: set `origin` of their descriptions in
    `entries` to a tuple that names the first such item. Both arguments map parameter name -> key of the item -> value
    or description."""
    for (name, key), origin in find_origins(states).items():
        marked = replace(entries[name][key], origin=origin)
        entries[name] = {**entries[name], key: marked}


def find_origins(states: Mapping[str, Mapping[Any, Any]]) -> dict[_Item, Origin]:
    """Find optimizer state values that are one object under several keys in `states` (parameter name -> key -> value),
    and return a dict from each such (name, key) to the first one. If all are of the same parameter, the first is given
    as (key,)."""
    # Kept, since a mapping may make its values at each access: no other value may get the id of one.
    kept = {name: dict(state) for name, state in states.items()}
    items_by_identity: dict[object, list[_Item]] = {}
    for name, state in kept.items():
        for key, value in state.items():
            if isinstance(value, Tensor | list | dict):
                items_by_identity.setdefault(_identify(value), []).append((name, key))
    origins: dict[_Item, Origin] = {}
    for items in items_by_identity.values():
        if len(items) > 1:
            owners = {name for name, _ in items}
            origins |= dict.fromkeys(items, items[0] if len(owners) > 1 else items[0][1:])
    return origins


def _identify(value: object) -> object:
    """A key that is equal for one object, and for tensors of one spot."""
    spot = spot_of(value) if isinstance(value, Tensor) else None
    # A DTensor is not the same state as its local tensor, which has the same spot.
    return id(value) if spot is None else (spot, isinstance(value, DTensor))


def check_apart(
    others: Iterable[tuple[str, Tensor]], states: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Raise CheckpointError if a tensor of the optimizer's `states` shares memory with one of `others` (the other saved
    tensors), or with another tensor of `states`; two state items may be one tensor, though.

    `others` are tensors outside of the state, with words for each; `states` maps a parameter's name to its state.
    """
    outside = {spot_of(tensor): (what, tensor) for what, tensor in others}
    found = _find_apart(outside, states)
    for spot, other in find_meetings(tensor for _, tensor in found.values()):
        if spot not in outside or other not in outside:
            raise _explain_shared(found[spot][0], found[other][0])


def check_options_apart(
    options: Iterable[tuple[str, object]], states: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Raise CheckpointError if a list or dict of the optimizer's `states` is one of the `options`, which have words for
    each; `states` maps a parameter's name to its state."""
    options_by_id = {id(option): what for what, option in options if _is_container(option)}
    for name, state in states.items():
        for key, value in state.items():
            if _is_container(value) and id(value) in options_by_id:
                kind = type(value).__name__
                what = f"{key!r} of {name!r} and {options_by_id[id(value)]} are one {kind}"
                why = "but would be loaded as separate ones"
                raise CheckpointError(f"optimizer state: {what}, {why}; keep it in one place")


def _is_container(value: object) -> bool:
    return isinstance(value, list | dict)


def _find_apart(outside: _Found, states: Mapping[str, Mapping[Any, Any]]) -> _Found:
    """The tensors `outside`, and the state's tensors, by spot. Raises CheckpointError if one of the state is `outside`,
    or if one inside an item is in the state again."""
    found = dict(outside)
    # Spots of which a second tensor would be loaded as a separate tensor: only two items may be one tensor.
    unshareable = set(outside)
    for what, tensor, is_item in _list_tensors(states):
        spot = spot_of(tensor)
        if spot is None:
            continue
        if spot in unshareable or (spot in found and not is_item):
            raise _explain_shared(what, found[spot][0])
        found.setdefault(spot, (what, tensor))
        if not is_item:
            unshareable.add(spot)
    return found


def _list_tensors(states: Mapping[str, Mapping[Any, Any]]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (words for the item, tensor, whether the tensor is the item rather than inside it) for all tensors in items
    of the state; an item of several keys is searched once."""
    searched: dict[int, object] = {}
    for name, state in states.items():
        for key, value in state.items():
            what = f"{key!r} of {name!r}"
            if isinstance(value, Tensor):
                yield what, value, True
            elif isinstance(value, list | tuple | dict) and id(value) not in searched:
                searched[id(value)] = value
                for tensor in list_tensors(value):
                    yield what, tensor, False


def _explain_shared(one: str, other: str) -> CheckpointError:
    """The error of two tensors that share memory."""
    return CheckpointError(
        f"optimizer state: {one} and {other} are views of the same memory, but would be loaded as separate tensors; "
        f"keep one of them, and view it in each step, or replace one by a clone"
    )
