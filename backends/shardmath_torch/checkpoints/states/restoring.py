"""Restoring: values into the memory that is there, so that FSDP2, captured graphs and the optimizer go on with it.

1. A value is restored into memory that is there only if nothing else that is restored has a cell of
   it; else it is made anew. Parameters and buffers of the module keep theirs. Options that are one
   tensor, such as a learning rate of several groups, keep it if they take one value.
2. State that the optimizer has not yet is made like its parameter: no step is taken, and no gradient
   needed. State that the checkpoint has not is dropped, as by `Optimizer.load_state_dict`.
3. What later groups of an optimizer begin with, its defaults, stays as it is.
4. State of a DTensor of other ranks' mesh is dropped, as a fresh optimizer has none: what takes a step looks there
   whether it is to begin.
5. What may fail of options is done before anything is restored (`plan_options`), and what may fail of a module's own
   set_extra_state after all else: as by `load_state_dict`, a module finds its weights there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import Index, Like, Own, Value
from shardmath_torch.checkpoints.states.matching import Goal
from shardmath_torch.checkpoints.states.memory import (
    MemorySpot,
    can_fill,
    fill,
    find_crowded,
    has_same_bits,
    local_part,
    spot_of,
    spots_of,
)
from shardmath_torch.checkpoints.states.modules import Model
from shardmath_torch.checkpoints.states.optimizers import UNVALUED, is_here, lay_out_state
from shardmath_torch.checkpoints.states.values import (
    KINDS,
    Extra,
    check_depth,
    move_tensors,
    rebuild,
)
from shardmath_torch.checkpoints.states.wrappers import list_inner
from shardmath_torch.groups.dtypes import dtype_of

__all__ = [
    "Free",
    "ReadJob",
    "OptionsPlan",
    "check_fillable",
    "find_free",
    "list_module_jobs",
    "list_state_jobs",
    "plan_options",
    "restore",
]


class ReadJob(NamedTuple):
    """One thing to read: its flat name here and in the checkpoint, its layout, and what puts it where it belongs."""

    here: str
    there: str
    layout: Layout | None
    put: Callable[[Tensor], object]


# Which memory is free


class Free(NamedTuple):
    """Where optimizers' tensors lie that have their cells to themselves; options, also if several are one tensor."""

    states: frozenset[MemorySpot]
    options: frozenset[MemorySpot]


def find_free(model: Model, goals: Sequence[Goal]) -> Free:
    """Which tensors of the optimizers may keep their memory."""
    states = _list_states(goals)
    options = _list_options(goals)
    slots = [slot.local for slot in model.slots.values()]
    crowded = find_crowded([*slots, *states, *options])
    taken = crowded.union(spots_of(slots))
    of_states = Counter(spots_of(states))
    of_options = set(spots_of(options))
    once = {spot for spot, count in of_states.items() if count == 1}
    free_states = once - of_options - taken
    free_options = of_options - of_states.keys() - taken
    return Free(frozenset(free_states), frozenset(free_options))


def _list_states(goals: Iterable[Goal]) -> list[Tensor]:
    """The tensors that optimizers hold as state."""
    found = []
    for goal in goals:
        for _, _, held in goal.group.states():
            found += _keep_tensors(held.values())
    return found


def _list_options(goals: Iterable[Goal]) -> list[Tensor]:
    """The tensors that groups have as options, in tuples and lists too."""
    found = []
    for goal in goals:
        for key, value in goal.group.options.items():
            if key not in UNVALUED:
                found += [held for held, _ in _pair_tensors(_word_option(key), value, None)]
    return found


def _word_option(key: str) -> str:
    return f"{key!r} of a parameter group"


def _pair_tensors(
    what: str, held: object, value: object, depth: int = 0
) -> Iterator[tuple[Tensor, object]]:
    """Each tensor of an option, in tuples and lists too, and what the value has in its place, None for nothing.

    Raises CheckpointError, which says `what` it is, for an option that contains itself.
    """
    check_depth(what, depth)
    if isinstance(held, Tensor):
        yield held, value
    elif isinstance(held, tuple | list):
        has_place = isinstance(value, tuple | list) and len(value) == len(held)
        values = value if has_place else [None] * len(held)
        for one, other in zip(held, cast(Sequence[object], values), strict=True):
            yield from _pair_tensors(what, one, other, depth + 1)


def _keep_tensors(values: Iterable[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _keeps_memory(held: Tensor, free: frozenset[MemorySpot]) -> bool:
    """Whether values go where the tensor lies."""
    if not can_fill(held):
        return False
    local = local_part("what is held", held)
    return not local.numel() or spot_of(held) in free  # without elements there is nothing to share


def check_fillable(goals: Iterable[Goal]) -> None:
    """Raise CheckpointError for an optimizer whose state takes no values, before any is restored."""
    for goal in goals:
        optimizer = goal.group.optimizer
        held = [optimizer.state, *(values for _, _, values in goal.group.states() if values)]
        for one in held:
            if not isinstance(one, MutableMapping):
                what = f"{type(optimizer).__name__} has state in a {type(one).__name__}"
                raise CheckpointError(f"{what}, into which nothing is put; give a dict there")


# Jobs


def list_module_jobs(model: Model, saved: Index, stored: Mapping[str, str]) -> Iterator[ReadJob]:
    """What to read for the module's slots and extra states."""
    for name, kept in stored.items():
        here = f"model.{name}"
        there = f"model.{kept}"
        if name in model.slots:
            slot = model.slots[name]
            yield ReadJob(here, there, slot.layout, partial(fill, slot.local))
        else:
            put = partial(_set_extra, model.extra[name], saved.extra[kept])
            yield ReadJob(here, there, None, put)


def _set_extra(extra: Extra, kind: str, data: Tensor) -> None:
    value = KINDS[kind].restore(data)
    extra.module.set_extra_state(value)


def list_state_jobs(
    goals: Sequence[Goal], model: Model, stored: Mapping[str, str], free: Free
) -> Iterator[ReadJob]:
    """What to read for the optimizers' tensors."""
    for goal in goals:
        for name, entries in goal.entries.items():
            for key, entry in entries.items():
                if isinstance(entry, Value):
                    continue
                here = f"optim.state.{name}.{key}"
                there = f"optim.state.{stored[name]}.{key}"
                layout = lay_out_state(entry, model.slots[name].layout)
                put = partial(_put_state, goal, name, key, entry, free)
                yield ReadJob(here, there, layout, put)


def _put_state(
    goal: Goal, name: str, key: str, entry: Like | Own, free: Free, data: Tensor
) -> None:
    """Put a value into the optimizer's tensor, or into a new one where it has none that fits and is its own."""
    parameter = goal.group.parameters[name]
    # A wrapper's state may be a plain dict, in which nothing is begun by asking.
    state = goal.group.optimizer.state.setdefault(parameter, {})
    device = _device_of_state(goal, parameter, key, entry)
    held = state.get(key)
    if not _fits(held, parameter, entry, device) or not _keeps_memory(held, free.states):
        held = _make_state(parameter, entry, device)
        state[key] = held
    local = local_part(f"{name}.{key}", held)
    fill(local, data)


def _device_of_state(goal: Goal, parameter: Tensor, key: str, entry: Like | Own) -> torch.device:
    """Steps are counted on the CPU, unless by the device (torch 2.13: _process_value_according_to_param_policy)."""
    options = goal.group.options | goal.options
    by_device = options.get("capturable") or options.get("fused")
    if isinstance(entry, Own) and key == "step" and not by_device:
        return torch.device("cpu")
    return parameter.device


def _fits(
    held: object, parameter: Tensor, entry: Like | Own, device: torch.device
) -> TypeGuard[Tensor]:
    """Whether the optimizer has a tensor of that type, shape and device, divided as it is to be."""
    if not isinstance(held, Tensor) or held.is_nested:
        return False
    divided = isinstance(entry, Like) and isinstance(parameter, DTensor)
    if isinstance(held, DTensor) != divided:
        return False
    shape = parameter.shape if isinstance(entry, Like) else entry.shape
    same_type = held.dtype == dtype_of(entry.dtype)
    return same_type and tuple(held.shape) == tuple(shape) and held.device == device


def _make_state(parameter: Tensor, entry: Like | Own, device: torch.device) -> Tensor:
    dtype = dtype_of(entry.dtype)
    if isinstance(entry, Like):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=dtype, device=device)


# Options


class OptionsPlan(NamedTuple):
    """What groups and defaults are to have.

    `values` are (options or defaults, key, value), `copies` tensors that keep their memory, and what goes there.
    """

    values: list[tuple[dict[str, Any], str, object]]
    copies: list[tuple[Tensor, Tensor]]


def plan_options(goals: Sequence[Goal], free: Free) -> OptionsPlan:
    """Options that are tensors keep their memory, unless groups share it and are to have several values."""
    filled = free.options & _find_agreed(goals)
    kept = [held for held in _list_options(goals) if spot_of(held) in filled]
    with torch.no_grad():
        plan = OptionsPlan(_keep_defaults(goals, kept), [])
    for goal in goals:
        options = goal.group.options
        for key, value in goal.options.items():
            placed = _place_option(options.get(key), value, filled, plan.copies)
            plan.values.append((options, key, placed))
    return plan


def _place_option(
    held: object, value: object, filled: frozenset[MemorySpot], copies: list[tuple[Tensor, Tensor]]
) -> object:
    """The value; in place of its tensors, in tuples and lists too, those that are there and take it."""
    if isinstance(value, Tensor) and _takes_values(held, filled):
        copies.append((local_part("an option", held), value))
        return held
    if not isinstance(held, tuple | list) or not isinstance(value, tuple | list):
        return value
    if len(held) != len(value):
        return value
    place = partial(_place_option, filled=filled, copies=copies)
    return rebuild(value, map(place, held, value))


def _find_agreed(goals: Sequence[Goal]) -> set[MemorySpot | None]:
    """The spots of options that are to have one value, in however many groups."""
    wanted: dict[MemorySpot | None, list[object]] = {}
    for goal in goals:
        for key, option in goal.group.options.items():
            if key in UNVALUED:
                continue
            wished = goal.options.get(key, option)
            for held, value in _pair_tensors(_word_option(key), option, wished):
                wanted.setdefault(spot_of(held), []).append(value)
    return {spot for spot, values in wanted.items() if _is_one_value(values)}


def _is_one_value(values: Sequence[object]) -> bool:
    """Whether all are tensors that are equal bit by bit."""
    first = values[0]
    for value in values:
        if not isinstance(value, Tensor) or not isinstance(first, Tensor):
            return False
        if not has_same_bits(value, first):
            return False
    return True


def _takes_values(held: object, filled: frozenset[MemorySpot]) -> TypeGuard[Tensor]:
    """Whether an option is a tensor, whole on this rank, that keeps its memory."""
    if not isinstance(held, Tensor):
        return False
    if isinstance(held, DTensor) and not all(one.is_replicate() for one in held.placements):
        return False
    return _keeps_memory(held, filled)


def _keep_defaults(
    goals: Sequence[Goal], filled: Sequence[Tensor]
) -> list[tuple[dict[str, Any], str, object]]:
    """The defaults of optimizers, with copies of what they have of memory that is filled."""
    kept: list[tuple[dict[str, Any], str, object]] = []
    spots = set(spots_of(filled))
    for defaults in _list_defaults(goals):
        own = []
        for key, value in defaults.items():
            what = f"{key!r} of an optimizer's defaults"
            own += [held for held, _ in _pair_tensors(what, value, None)]
        touched = spots | find_crowded([*own, *filled])
        for key, value in defaults.items():
            kept.append((defaults, key, _clone_touched(value, touched)))
    return kept


def _list_defaults(goals: Iterable[Goal]) -> Iterator[dict[str, Any]]:
    """The defaults of optimizers and of those that they wrap, each once; a wrapper may have none."""
    found: dict[int, dict[str, Any]] = {}
    for goal in goals:
        optimizer = goal.group.optimizer
        for one in (optimizer, *(inner.optimizer for inner in list_inner(optimizer))):
            defaults = getattr(one, "defaults", {})
            found[id(defaults)] = defaults
    yield from found.values()


def _clone_touched(value: object, touched: set[MemorySpot]) -> object:
    """The value, with tensors of its own in place of those that are touched."""
    if isinstance(value, Tensor):
        return value.clone() if spot_of(value) in touched else value
    if isinstance(value, tuple | list):
        cloned = [_clone_touched(one, touched) for one in value]
        is_same = all(one is other for one, other in zip(cloned, value, strict=True))
        return value if is_same else rebuild(value, cloned)
    return value


# Restoring


def restore(
    model: Model,
    jobs: Sequence[ReadJob],
    goals: Sequence[Goal],
    options: OptionsPlan,
    found: Mapping[str, Tensor],
) -> None:
    """Put what was found where it belongs, extra states last: a module may look at its weights, and may raise."""
    there = [job for job in jobs if job.here in found]  # not so for a DTensor of other ranks' mesh
    with torch.no_grad():
        for job in there:
            if job.layout is not None:
                job.put(found[job.here])
        for held, value in options.copies:
            fill(held, value)
        for of, key, placed in options.values:
            of[key] = placed
        for goal in goals:
            _finish_state(model, goal)
        for job in there:
            if job.layout is None:
                job.put(found[job.here])


def _finish_state(model: Model, goal: Goal) -> None:
    """Set what is not a tensor of the state, and drop state that the checkpoint has not."""
    for name, entries in goal.entries.items():
        parameter = goal.group.parameters[name]
        states = goal.group.optimizer.state
        held = states.pop(parameter, {})
        kept = {}
        if is_here(model, name):
            for key, entry in entries.items():
                if isinstance(entry, Value):
                    # JSON has no devices: where torch's own load_state_dict puts tensors in lists.
                    kept[key] = move_tensors(entry.value, parameter.device)
                else:
                    kept[key] = held[key]
        if kept:
            states[parameter] = kept
