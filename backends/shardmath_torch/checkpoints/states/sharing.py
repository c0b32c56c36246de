"""Sharing: state that is one object under several keys, such as one step of all parameters, and such options of groups.

1. The entry of such state names its origin: the first parameter that has it, and the key there; or the key alone if
   only one parameter has it. For options a group is named by its first parameter.
2. Tensors of one spot (`memory`) are one object, such as a tensor and what its `detach` returns.
3. Tensors that share only a part of their memory, or view it with another shape, would be loaded as separate tensors,
   of which later steps change only one. So would tensors that share memory with a tensor of the module or an option, or
   with a tensor in a list, tuple or dict. They raise, and so does a list, tuple or dict that is state and an option.
4. A tensor in a list, tuple or dict that is an option raises, too, if it is in another place of the options again.
   Tensors of the module in options do not: `restoring` leaves them there.
5. A tuple is one object only if something inside it can be changed: else it makes no difference.

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

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import Entries, Origin
from shardmath_torch.checkpoints.states.memory import MemorySpot, find_meetings, spot_of
from shardmath_torch.checkpoints.states.values import can_change, list_tensors

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
            if can_change(value):
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
    module: Iterable[tuple[str, Tensor]],
    options: Iterable[tuple[str, object]],
    states: Mapping[str, Mapping[Any, Any]],
) -> None:
    """Raise CheckpointError if a tensor of the optimizer's `states` shares memory with another saved tensor, or one
    inside an option is in the options again; two state items, or two options, may be one tensor, though.

    The tensors of the `module` and the `options` have words for each; `states` maps a parameter's name to its state.
    """
    of_module = {spot_of(tensor): (what, tensor) for what, tensor in module}
    of_options = _find_apart({}, options, allowed=of_module)
    outside = {**of_options, **of_module}
    found = {**outside, **_find_apart(outside, _list_items(states))}
    for spot, other in find_meetings(tensor for _, tensor in found.values()):
        if spot not in outside or other not in outside:
            raise _explain_shared(found[spot][0], found[other][0])


def check_options_apart(
    options: Iterable[tuple[str, object]], states: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Raise CheckpointError if a list, tuple or dict of the optimizer's `states` that can be changed is one of the
    `options`, which have words for each; `states` maps a parameter's name to its state."""
    options_by_id = {id(option): what for what, option in options if _is_container(option)}
    for what, value in _list_items(states):
        if _is_container(value) and id(value) in options_by_id:
            kind = type(value).__name__
            said = f"{what} and {options_by_id[id(value)]} are one {kind}"
            why = "but would be loaded as separate ones"
            raise CheckpointError(f"optimizer state: {said}, {why}; keep it in one place")


def _is_container(value: object) -> bool:
    """Whether the value is a list, tuple or dict that can be changed."""
    return isinstance(value, list | tuple | dict) and can_change(value)


def _list_items(states: Mapping[str, Mapping[Any, Any]]) -> Iterator[tuple[str, object]]:
    """Yield the items of the state, with words for each."""
    for name, state in states.items():
        for key, value in state.items():
            yield f"{key!r} of {name!r}", value


def _find_apart(
    taken: _Found,
    items: Iterable[tuple[str, object]],
    *,
    allowed: Collection[MemorySpot | None] = (),
) -> _Found:
    """The tensors of the items (options, or state) by spot, without those at spots that are `allowed` anywhere. Raises
    CheckpointError if one is `taken`, or if one inside an item is in the items again."""
    found: _Found = {}
    # Spots of which a second tensor would be loaded as a separate tensor: only two items may be one tensor.
    unshareable = set(taken)
    for what, tensor, is_item in _list_tensors(items):
        spot = spot_of(tensor)
        if spot is None or spot in allowed:
            continue
        if spot in unshareable or (spot in found and not is_item):
            first = found.get(spot) or taken[spot]
            raise _explain_shared(what, first[0])
        found.setdefault(spot, (what, tensor))
        if not is_item:
            unshareable.add(spot)
    return found


def _list_tensors(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (words for the item, tensor, whether the tensor is the item rather than inside it) for all tensors in the
    items; an item of several keys is searched once."""
    searched: dict[int, object] = {}
    for what, value in items:
        if isinstance(value, Tensor):
            yield what, value, True
        elif isinstance(value, list | tuple | dict) and id(value) not in searched:
            searched[id(value)] = value
            for tensor in list_tensors(value):
                yield what, tensor, False


def _explain_shared(one: str, other: str) -> CheckpointError:
    """The error of two tensors that share memory."""
    places = f"tensors in several places of {one}" if one == other else f"{one} and {other}"
    return CheckpointError(
        f"optimizer state: {places} are views of the same memory, but would be loaded as separate tensors; "
        f"keep one of them, and view it in each step, or replace one by a clone"
    )
