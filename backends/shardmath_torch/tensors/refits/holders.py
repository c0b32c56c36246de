"""Holders: the mappings and modules that hold each tensor, so that a replaced tensor is noticed before a move.

1. A tensor in other memory is noticed under a tensor's name in the given mapping, and in the modules that held the
   tensor: `dict(model.named_parameters())` does not change when `load_state_dict(assign=True)` or `setattr` gives the
   module another parameter. All live modules are searched. Another object in the same memory counts as the same tensor.
2. A tensor that has left all of its modules is noticed too: a parametrization such as `weight_norm` holds it under
   another name, and computes the weight from it. It may leave the given mapping, and some of its modules, as when tied
   weights are untied.
3. Replaced parameters are not noticed in modules frozen by `gc.freeze()`, in modules of which views were given (slices,
   a state dict), and in modules that replaced others, unless the modules are given (`find_owners`, `find_removed`). The
   holders of a view are then the holders of the tensors whose memory it shares.
4. FSDP2 puts gathered parameters in place of its shards during a forward, and on its root also after it. The shards are
   trained and moved into (`gathered`), so gathered parameters do not count as replacements.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress, starmap
from typing import NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from shardmath.base.errors import ExchangeError
from shardmath.base.text import word_error
from shardmath.models.refits.coverage import show_native
from shardmath_torch.moves.exchange.memory import missing_memory, plain
from shardmath_torch.moves.exchange.overlaps import find_meeting_sides, shares_memory
from shardmath_torch.tensors import fsdp
from shardmath_torch.tensors.refits.views import Given, Natives, describe, list_chunks, to_local

__all__ = [
    "Watched",
    "describe_safely",
    "find_fault",
    "find_owners",
    "find_removed",
    "find_replaced",
    "watch",
]

_MemoryLayout: TypeAlias = tuple[object, ...]


class _HeldAt(NamedTuple):
    """A place that held `tensor`, with this layout in memory: `look(key)` returns the tensor that is there now."""

    look: Callable[[str], object]
    key: str
    tensor: Tensor
    memory_layout: _MemoryLayout = ()
    holder: dict[str, Tensor] | None = None
    """The module's dict of parameters or buffers; None for a given mapping."""
    keeper: object = None
    """FSDP2's object for the parameter; None without FSDP2."""


class Watched(NamedTuple):
    """A tensor that later moves read or write, and the modules and mappings that hold it (`places`). Before a move,
    these are checked for another tensor in its place.
    """

    name: str
    tensor: Tensor
    memory_layout: _MemoryLayout
    places: list[_HeldAt]


def watch(side: str, given: Given | None, natives: Natives) -> list[Watched]:
    """Record each tensor in `natives`, a dict of this rank's tensors, so that a later check can tell if it was
    replaced: its memory layout, and the entries of `given` that hold it. `given` is the caller's dict of tensors by
    name, or a list of such dicts; `side`, such as "source", begins the tensor's name in errors.
    """
    watched = {
        native: Watched(f"{side} {show_native(native)}", tensor, describe(tensor), [])
        for native, tensor in natives.items()
    }
    for chunk, named in enumerate(list_chunks(given)):
        for key, tensor in named.items():
            # A mapping may make a new tensor at each access, which is not watched there.
            each = watched.get((chunk, key))
            if each is not None and named.get(key) is tensor:
                each.places.append(_HeldAt(named.get, key, tensor, each.memory_layout))
    return list(watched.values())


def find_owners(watched: Iterable[Watched], modules: Iterable[nn.Module] | None = None) -> None:
    """Add to each record in `watched` the modules that hold its tensor, among `modules` and their submodules (default:
    all live modules). If none of `modules` holds the tensor, add those that hold another tensor on the same memory,
    such as its base.
    """
    by_id: dict[int, list[Watched]] = {}
    for each in watched:
        by_id.setdefault(id(each.tensor), []).append(each)
    if not by_id:
        return
    searched = _list_modules() if modules is None else _list_submodules(modules)
    if not searched:
        return
    # With FSDP2's object for a parameter, later checks know gathered parameters from replacements.
    keepers = _find_keepers()
    unowned = dict(by_id)
    for held_at in _list_places(searched):
        for each in by_id.get(id(held_at.tensor), []):
            layout = each.memory_layout
            keeper = keepers.get(id(each.tensor))
            each.places.append(held_at._replace(memory_layout=layout, keeper=keeper))
            unowned.pop(id(each.tensor), None)
    # To look for shared memory takes much longer than to look for the tensors themselves.
    if modules is not None and unowned:
        _find_owners_of_views([*chain.from_iterable(unowned.values())], searched, keepers)


def _find_owners_of_views(
    views: Iterable[Watched], modules: Iterable[nn.Module], keepers: Mapping[int, object]
) -> None:
    """Add to the record of each view the places of the modules' tensors that share memory with the view."""
    by_number = {str(number): each for number, each in enumerate(views)}
    view_parts = _find_memory({number: each.tensor for number, each in by_number.items()})
    places = {str(number): place for number, place in enumerate(_list_places(modules))}
    held_parts = _find_memory({number: place.tensor for number, place in places.items()})
    for place_key, view_key in find_meeting_sides(held_parts, view_parts):
        if shares_memory(held_parts[place_key], view_parts[view_key]):
            tensor = places[place_key].tensor
            layout, keeper = describe(tensor), keepers.get(id(tensor))
            place = places[place_key]._replace(memory_layout=layout, keeper=keeper)
            by_number[view_key].places.append(place)


def _find_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rank's own parts of those tensors that have memory."""
    parts = {}
    for key, tensor in tensors.items():
        if describe_safely(tensor) is not None:
            local = plain(to_local(tensor))
            if not missing_memory(local):
                parts[key] = local
    return parts


def _list_places(modules: Iterable[nn.Module]) -> Iterator[_HeldAt]:
    """The places of all parameters and buffers of these modules."""
    for holder in _list_holders(modules):
        # A copy, since other threads may change modules meanwhile.
        for key, tensor in list(dict.items(holder)):
            yield _HeldAt(holder.get, key, tensor, holder=holder)


def _list_submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules and all of their submodules."""
    return [part for module in modules for part in module.modules()]


def _list_modules() -> list[nn.Module]:
    """All live modules. The search takes one call into C, in which no other thread runs.

    Otherwise the list of all objects would hold tuples that other threads are making, and CPython raises SystemError in
    a thread whose `tuple(...)` ends while anything else holds that tuple.
    """
    # By id, since a metaclass may define its own hash. isinstance is avoided: it reads __class__, for which proxies may
    # run any code.
    kinds = _list_kinds()
    objects: list[object] = []
    # Yields nothing, as `extend` returns None, but fills `objects` when it is asked for its first item.
    fill: Iterator[None] = filter(None, map(objects.extend, starmap(gc.get_objects, [()])))
    is_module = map(kinds.__contains__, map(id, map(type, objects)))
    # The iterator is made beforehand: to make one could start a garbage collection, whose finalizers let threads run.
    modules = compress(chain(fill, iter(objects)), is_module)
    clear: Iterator[None] = filter(None, map(list.clear, [objects]))
    return cast(list[nn.Module], list(chain(modules, clear)))


def _list_kinds() -> dict[int, type]:
    """The class of modules and all of its subclasses, by id."""
    kinds: dict[int, type] = {}
    new: list[type] = [nn.Module]
    while new:
        kind = new.pop()
        if id(kind) not in kinds:
            kinds[id(kind)] = kind
            new += type.__subclasses__(kind)
    return kinds


def _find_keepers() -> dict[int, object]:
    """FSDP2's objects for parameters, by the id of each shard."""
    keepers = {}
    for group in fsdp.list_fsdp_groups():
        for keeper in fsdp.list_keepers(group):
            keepers[id(keeper.sharded_param)] = keeper
    return keepers


def _list_holders(modules: Iterable[nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The modules' dicts of parameters and buffers, except scripted modules', which make tensors at each access."""
    for module in modules:
        for kind in ("_parameters", "_buffers"):
            holder = vars(module).get(kind)
            if isinstance(holder, dict):
                yield holder


def _find_moved(watched: Iterable[Watched]) -> str | None:
    """The name of a tensor whose layout in memory has changed; None if none has."""
    for each in watched:
        try:
            is_same = describe(each.tensor) == each.memory_layout
        except RuntimeError:
            # The tensor has lost its storage.
            is_same = False
        if not is_same:
            return each.name
    return None


def find_replaced(watched: Iterable[Watched]) -> str | None:
    """Find a tensor in whose place a module or mapping now has another tensor, which differs in memory, shape, strides
    or dtype. Return the name of the original, or None if none was replaced.

    Parameters that FSDP2 has gathered do not count. Raises ExchangeError if a given mapping raises.
    """
    for each in watched:
        if any(_is_replaced(each, place) for place in each.places):
            return each.name
    return None


def find_removed(
    watched: Iterable[Watched], modules: Iterable[nn.Module] | None = None
) -> str | None:
    """Return the name of a tensor in `watched` that a module held earlier and no module holds now; None if there is no
    such tensor. Only `modules` and their submodules are searched; by default, all live modules.
    """
    holder_ids = None
    if modules is not None:
        holder_ids = {id(holder) for holder in _list_holders(_list_submodules(modules))}
    for each in watched:
        places = [place for place in each.places if place.holder is not None]
        if places and all(_is_gone(place, holder_ids) for place in places):
            return each.name
    return None


def _is_gone(place: _HeldAt, holder_ids: set[int] | None) -> bool:
    """Whether the place is empty, or its dict has none of these ids; None allows any dict."""
    is_empty = place.look(place.key) is None
    return is_empty or (holder_ids is not None and id(place.holder) not in holder_ids)


def _is_replaced(watched: Watched, place: _HeldAt) -> bool:
    """Whether the place holds a tensor in other memory now, or of another shape, strides or dtype.

    A parameter that FSDP2 has gathered does not count. Raises ExchangeError if the mapping raises.
    """
    try:
        now = place.look(place.key)
    # A given mapping may raise anything.
    except Exception as error:
        what = word_error(error)
        raise ExchangeError(
            f"the mapping passed to prepare() raised {what} for {watched.name} when it was read again; "
            f"pass a dict to prepare() on all ranks"
        ) from error
    if now is watched.tensor or not isinstance(now, Tensor):
        return False
    if fsdp.has_gathered(place.keeper, place.tensor, now):
        return False
    return describe_safely(now) != place.memory_layout


def describe_safely(tensor: object) -> _MemoryLayout | None:
    """Return the layout of a tensor in memory, as `describe`; None for a value that is not a tensor, and for a tensor
    that cannot be described, as one without storage."""
    if not isinstance(tensor, Tensor):
        return None
    try:
        return describe(tensor)
    # A tensor without storage, a lazy one, or one of a class that may raise anything.
    except Exception:
        return None


def find_fault(watched: list[Watched], modules: Iterable[nn.Module] | None = None) -> str:
    """Return an error text if one of the `watched` tensors was moved in memory, replaced, or removed from its modules
    since the call of `watch`, else "". A tensor is removed if neither `modules` (default: all live modules) nor their
    submodules have it.
    """
    moved = _find_moved(watched)
    if moved is not None:
        return (
            f"{moved} lies elsewhere in memory than when prepare() was called, or has another shape or dtype; "
            f"call prepare() again on all ranks"
        )
    replaced = find_replaced(watched)
    if replaced is not None:
        return (
            f"{replaced} is another tensor than when prepare() was called; "
            f"call prepare() again on all ranks"
        )
    removed = find_removed(watched, modules)
    if removed is not None:
        return (
            f"{removed} is no longer where its module had it when prepare() was called: it or its module was "
            f"deleted or replaced, or it has another name, as under weight_norm; call prepare() again on all ranks, "
            f"with the tensors to move"
        )
    return ""
