"""Holders: where each tensor was found, so that another one in its place is noticed before a move.

1. Of a tensor given by name, another one in other memory is noticed under that name in the mapping that was given, and
   in the place of the very tensor in modules: `dict(model.named_parameters())` stays as it is when
   `load_state_dict(assign=True)` or `setattr` gives the module another parameter. Modules are found among all that are
   alive. Another object in the same memory is no other tensor.
2. A tensor that is in none of its modules any longer is noticed too: a parametrization, as `weight_norm`, has it under
   another name, and makes what is used of it. Entries may be missing in the mapping that was given, and in some of the
   modules that had a tensor, as where weights were tied.
3. Not noticed are other parameters in modules frozen by `gc.freeze()`, in modules of which views were given (slices, a
   state dict), and in modules that came into the place of others, unless it is said which modules are meant
   (`find_removed`).
4. FSDP2 has gathered parameters in the place of its shards during a forward, and on its root also after it. The shards
   are what is trained, and what is moved into (`gathered`), so these are no others.

>>> import torch
>>> module = torch.nn.Linear(2, 2)
>>> (watched,) = watch("source", {"weight": module.weight}, {(0, "weight"): module.weight})
>>> find_owners([watched])
>>> find_replaced([watched])
>>> module.weight = torch.nn.Parameter(torch.zeros(2, 2))
>>> find_replaced([watched])
"source 'weight'"
>>> del module.weight
>>> find_removed([watched])
"source 'weight'"
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from shardmath.base.errors import ExchangeError
from shardmath.base.text import word_error
from shardmath.models.refits.coverage import show_native
from shardmath_torch.tensors import fsdp
from shardmath_torch.tensors.refits.views import Given, Natives, describe, list_chunks

__all__ = ["Watched", "find_fault", "find_owners", "find_removed", "find_replaced", "watch"]

_Lay: TypeAlias = tuple[object, ...]


class _Place(NamedTuple):
    """Where a tensor was found: what gives the one under a key now."""

    look: Callable[[str], object]
    key: str
    holder: dict[str, Tensor] | None = None
    """The module's own parameters or buffers; None in a mapping that was given."""
    keeper: object = None
    """What FSDP2 keeps of the tensor; None without."""


class Watched(NamedTuple):
    """A tensor as it was given, what it is called, how it lay in memory, and where it was found."""

    name: str
    tensor: Tensor
    lay: _Lay
    places: list[_Place]


def watch(side: str, given: Given | None, natives: Natives) -> list[Watched]:
    """These tensors of those that were given, to be looked at before every move."""
    watched = {
        native: Watched(f"{side} {show_native(native)}", tensor, describe(tensor), [])
        for native, tensor in natives.items()
    }
    for chunk, named in enumerate(list_chunks(given)):
        for key, tensor in named.items():
            # A mapping may also make its tensors when it is asked.
            if (chunk, key) in watched and named.get(key) is tensor:
                watched[chunk, key].places.append(_Place(named.get, key))
    return list(watched.values())


def find_owners(watched: Iterable[Watched], modules: Iterable[nn.Module] | None = None) -> None:
    """Add the places of these very tensors in modules: these with all in them, or all that are alive."""
    by_id: dict[int, list[Watched]] = {}
    for one in watched:
        by_id.setdefault(id(one.tensor), []).append(one)
    if not by_id:
        return
    keepers = _find_keepers()
    among = _list_modules() if modules is None else _list_parts(modules)
    for holder in _list_holders(among):
        # A list at once: other threads may make modules meanwhile.
        for key, tensor in list(dict.items(holder)):
            for one in by_id.get(id(tensor), []):
                one.places.append(_Place(holder.get, key, holder, keepers.get(id(tensor))))


def _list_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These and all in them."""
    return [part for module in modules for part in module.modules()]


def _list_modules() -> list[nn.Module]:
    """All that are alive."""
    # By type, of which there are few, and by its id: a metaclass may hash as it likes. Objects are not asked with
    # isinstance: proxies do anything for their __class__.
    kinds: dict[int, bool] = {}
    modules = []
    for one in gc.get_objects():
        kind = kinds.get(id(type(one)))
        if kind is None:
            kind = kinds[id(type(one))] = issubclass(type(one), nn.Module)
        if kind:
            modules.append(one)
    return modules


def _find_keepers() -> dict[int, object]:
    """What FSDP2 keeps of parameters, by the id of each shard."""
    keepers = {}
    for group in fsdp.list_fsdp_groups():
        for keeper in fsdp.list_keepers(group):
            keepers[id(keeper.sharded_param)] = keeper
    return keepers


def _list_holders(modules: Iterable[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Their own parameters and buffers. Those of scripted modules are left out, which make tensors when asked."""
    for module in modules:
        for kind in ("_parameters", "_buffers"):
            holder = vars(module).get(kind)
            if isinstance(holder, dict):
                yield holder


def _find_moved(watched: Iterable[Watched]) -> str | None:
    """The name of a tensor that lies otherwise in memory; None where all lie as they did."""
    for one in watched:
        try:
            is_there = describe(one.tensor) == one.lay
        except RuntimeError:
            # What has no storage any longer cannot say where it is.
            is_there = False
        if not is_there:
            return one.name
    return None


def find_replaced(watched: Iterable[Watched]) -> str | None:
    """The name of a tensor in whose place one in other memory is; None without.

    Raises ExchangeError where a mapping that was given fails to say.
    """
    for one in watched:
        if any(_is_replaced(one, place) for place in one.places):
            return one.name
    return None


def find_removed(
    watched: Iterable[Watched], modules: Iterable[nn.Module] | None = None
) -> str | None:
    """The name of a tensor in whose place nothing is in any of the modules that had it; None without.

    A module that had it counts as long as it is one of `modules`, or in one; by default as long as it is alive.
    """
    held = None if modules is None else {id(one) for one in _list_holders(_list_parts(modules))}
    for one in watched:
        places = [place for place in one.places if place.holder is not None]
        if places and all(_is_gone(place, held) for place in places):
            return one.name
    return None


def _is_gone(place: _Place, held: set[int] | None) -> bool:
    """Whether nothing is there, or the module is none of those whose holders these are, by id."""
    return place.look(place.key) is None or (held is not None and id(place.holder) not in held)


def _is_replaced(one: Watched, place: _Place) -> bool:
    try:
        now = place.look(place.key)
    # Mappings of others raise what they like.
    except Exception as error:
        what = word_error(error)
        raise ExchangeError(
            f"the mapping that has {one.name} raises {what}; prepare again on all ranks"
        ) from error
    if now is one.tensor or not isinstance(now, Tensor):
        return False
    if fsdp.has_gathered(place.keeper, one.tensor, now):
        return False
    return _lay_of(now) != one.lay


def _lay_of(tensor: Tensor) -> _Lay | None:
    """How a tensor lies; None for one of which nobody knows."""
    try:
        return describe(tensor)
    # Tensors of others without a storage, not yet made, or of classes that raise what they like.
    except Exception:
        return None


def find_fault(watched: list[Watched], modules: Iterable[nn.Module] | None = None) -> str:
    """What is no longer as it was, in `modules` as `find_removed` has them; "" for nothing."""
    moved = _find_moved(watched)
    if moved is not None:
        return (
            f"{moved} lies otherwise in memory than when prepare() was called; "
            f"call it again on all ranks"
        )
    replaced = find_replaced(watched)
    if replaced is not None:
        return (
            f"in the place of {replaced} is another tensor than when prepare() was called; "
            f"prepare again on all ranks"
        )
    removed = find_removed(watched, modules)
    if removed is not None:
        return (
            f"{removed} is no longer where its module had it when prepare() was called: it or its module was "
            f"deleted or replaced, or it has another name, as under weight_norm; prepare again on all ranks, "
            f"with what is to move"
        )
    return ""
