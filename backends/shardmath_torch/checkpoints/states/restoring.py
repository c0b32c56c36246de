"""Restoring: write values into existing memory, so that FSDP2, captured graphs and the optimizer stay valid.

1. A value is written into the memory of the present tensor only if no other restored tensor, and no gradient, shares a
   cell of it; else a new tensor is made. Parameters and buffers of the module always keep their memory. Options that
   are one tensor, such as a learning rate of several groups, keep it if all take the same value.
2. State that the optimizer lacks is made like its parameter: without a step or a gradient. State that the checkpoint
   lacks is dropped, as by `Optimizer.load_state_dict`.
3. An optimizer's defaults, which later groups begin with, stay as they are.
4. State of a DTensor on a mesh without this rank is dropped, as in a fresh optimizer: if a parameter has no such state,
   a step begins it.
5. Options are checked before anything is restored (`plan_options`). A module's own set_extra_state, and hooks of
   load_state_dict, may raise, and are called last: as in `load_state_dict`, they find all restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import Index, Like, Origin, Own, Value
from shardmath_torch.checkpoints.states.matching import Goal, Unmatched, is_same
from shardmath_torch.checkpoints.states.memory import (
    MemorySpot,
    can_fill,
    fill,
    find_crowded,
    find_meetings,
    has_same_bits,
    local_part,
    spot_of,
    spots_of,
)
from shardmath_torch.checkpoints.states.modules import Model, call_load_hooks
from shardmath_torch.checkpoints.states.optimizers import (
    UNVALUED,
    is_here,
    is_placed_like,
    lay_out_state,
)
from shardmath_torch.checkpoints.states.values import (
    KINDS,
    Extra,
    can_change,
    check_depth,
    list_tensors,
    move_tensors,
    rebuild,
)
from shardmath_torch.checkpoints.states.wrappers import list_inner
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.parts.checkpointable import is_part

__all__ = [
    "Free",
    "ReadJob",
    "OptionsPlan",
    "call_hooks",
    "check_fillable",
    "find_free",
    "list_module_jobs",
    "list_state_jobs",
    "plan_options",
    "restore",
]


class ReadJob(NamedTuple):
    """A read from a checkpoint: the tensor's name in the module or optimizer (`here`) and in the checkpoint (`there`),
    its layout (None for bytes), and a function (`put`) that writes the loaded tensor into the module or optimizer."""

    here: str
    there: str
    layout: Layout | None
    put: Callable[[Tensor], object]


# Which memory is free


class Free(NamedTuple):
    """The memory that loading an optimizer is allowed to overwrite, since no other tensor shares it: memory of state
    tensors, and of tensors among the options, such as learning rates.

    Several options may be one tensor.
    """

    states: frozenset[MemorySpot]
    options: frozenset[MemorySpot]


def find_free(model: Model, goals: Sequence[Goal]) -> Free:
    """Return the memory of optimizer state tensors, and of tensors in options such as learning rates, that loaded
    values can overwrite. Memory that another tensor of `model` or `goals` (the parameter groups to restore) uses, or a
    gradient, is left out.

    A tensor that several options share is allowed.
    """
    states = _list_states(goals)
    options = _list_options(goals)
    kept = [*(slot.local for slot in model.slots.values()), *_list_gradients(goals)]
    crowded = find_crowded([*kept, *states, *options])
    taken = crowded.union(spots_of(kept))
    of_states = Counter(spots_of(states))
    of_options = set(spots_of(options))
    # One tensor as state of several parameters may get a different value for each.
    once = {spot for spot, count in of_states.items() if count == 1}
    free_states = once - of_options - taken
    free_options = of_options - of_states.keys() - taken
    return Free(frozenset(free_states), frozenset(free_options))


def _list_states(goals: Iterable[Goal]) -> list[Tensor]:
    """The tensors in the optimizers' state of parameters."""
    found = []
    for goal in goals:
        for _, _, state in goal.group.states():
            found += _only_tensors(state.values())
    return found


def _list_gradients(goals: Iterable[Goal]) -> list[Tensor]:
    """The gradients of the optimizers' parameters, which a load leaves as they are."""
    parameters = [weight for goal in goals for weight in goal.group.parameters.values()]
    return _only_tensors(weight.grad for weight in parameters)


def _list_options(goals: Iterable[Goal]) -> list[Tensor]:
    """The tensors among the groups' options, in tuples and lists too."""
    found = []
    for goal in goals:
        for key, value in goal.group.options.items():
            if key not in UNVALUED:
                pairs = _zip_tensors(_name_option(key), value, None)  # None: with no new values
                found += [held for held, _ in pairs]
    return found


def _name_option(key: str) -> str:
    return f"{key!r} of a parameter group"


def _zip_tensors(
    what: str, held: object, value: object, depth: int = 0
) -> Iterator[tuple[Tensor, object]]:
    """Pair each tensor of an option, in tuples and lists too, with the value's part in its place, or None.

    Raises CheckpointError, naming the option as `what`, for an option that contains itself.
    """
    check_depth(what, depth)
    if isinstance(held, Tensor):
        yield held, value
    elif isinstance(held, tuple | list):
        has_place = isinstance(value, tuple | list) and len(value) == len(held)
        values = value if has_place else [None] * len(held)
        for item, value_item in zip(held, cast(Sequence[object], values), strict=True):
            yield from _zip_tensors(what, item, value_item, depth + 1)


def _only_tensors(values: Iterable[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _keeps_memory(held: Tensor, free: frozenset[MemorySpot]) -> bool:
    """Whether the tensor's memory can be filled and is free: values are written into it."""
    if not can_fill(held):
        return False
    local = local_part("what is held", held)
    return not local.numel() or spot_of(held) in free  # without elements there is nothing to share


def check_fillable(goals: Iterable[Goal]) -> None:
    """Raise CheckpointError if an optimizer's state, or the nonempty state of one of its parameters, is not a mutable
    mapping, so that nothing could be restored into it. `goals` are the parameter groups to restore."""
    for goal in goals:
        optimizer = goal.group.optimizer
        held = [optimizer.state, *(values for _, _, values in goal.group.states() if values)]
        for state in held:
            if not isinstance(state, MutableMapping):
                what = f"{type(optimizer).__name__} has state in a {type(state).__name__}"
                raise CheckpointError(f"{what}, not in a mutable mapping; keep it in a dict")


# Jobs


def list_module_jobs(model: Model, saved: Index, stored: Mapping[str, str]) -> Iterator[ReadJob]:
    """Yield the reads (`ReadJob`) that restore the module: one for each tensor and extra state in `stored` (name in the
    module -> name in the checkpoint). `saved`, the checkpoint's index, tells the type of each extra state, such as a
    tensor or bytes."""
    for name, stored_name in stored.items():
        here = f"model.{name}"
        there = f"model.{stored_name}"
        if name in model.slots:
            slot = model.slots[name]
            yield ReadJob(here, there, slot.layout, partial(fill, slot.local))
        else:
            put = partial(_set_extra, model.extra[name], saved.extra[stored_name])
            yield ReadJob(here, there, None, put)


def _set_extra(extra: Extra, kind: str, data: Tensor) -> None:
    value = KINDS[kind].restore(data)
    extra.module.set_extra_state(value)


def list_state_jobs(
    goals: Sequence[Goal], model: Model, stored: Mapping[str, str], free: Free
) -> Iterator[ReadJob]:
    """Yield a read (`ReadJob`) for each saved state tensor of the parameter groups in `goals`; loaded values may
    overwrite the memory in `free`. `stored` maps parameters' names here to their names in the checkpoint."""
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
    """Write the value `data` into the optimizer's tensor, or into a new one if there is no tensor that fits and whose
    memory is `free` to be overwritten."""
    parameter = goal.group.parameters[name]
    # A wrapper's state may be a plain dict, which does not create entries on access.
    state = goal.group.optimizer.state.setdefault(parameter, {})
    device = _device_of_state(goal, parameter, key, entry)
    held = state.get(key)
    if not _fits(held, parameter, entry, device) or not _keeps_memory(held, free.states):
        held = _make_state(parameter, entry, device)
        state[key] = held
    local = local_part(f"{name}.{key}", held)
    fill(local, data)


def _device_of_state(goal: Goal, parameter: Tensor, key: str, entry: Like | Own) -> torch.device:
    """The device of a state tensor: its parameter's, but the CPU for steps, unless the optimizer is capturable or fused
    (torch 2.13: _process_value_according_to_param_policy)."""
    options = goal.group.options | goal.options
    by_device = options.get("capturable") or options.get("fused")
    if isinstance(entry, Own) and key == "step" and not by_device:
        return torch.device("cpu")
    return parameter.device


def _fits(
    held: object, parameter: Tensor, entry: Like | Own, device: torch.device
) -> TypeGuard[Tensor]:
    """Whether what the optimizer holds is a tensor of the right dtype, shape, placements, part and device."""
    if not isinstance(held, Tensor) or held.is_nested:
        return False
    if isinstance(entry, Like):
        is_placed = is_placed_like(held, parameter)
    else:
        is_plain = not isinstance(held, DTensor) and not is_part(held)
        is_placed = is_plain and tuple(held.shape) == entry.shape
    return is_placed and held.dtype == dtype_of(entry.dtype) and held.device == device


def _make_state(parameter: Tensor, entry: Like | Own, device: torch.device) -> Tensor:
    """A tensor of zeros to be filled: laid out as its parameter, or of the shape in the entry."""
    dtype = dtype_of(entry.dtype)
    if isinstance(entry, Like):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.shape, dtype=dtype, device=device)


# Options


class OptionsPlan(NamedTuple):
    """The changes that restore the options of parameter groups, such as learning rates: options to set to a new value,
    and tensors among the options to fill with a new value.

    `values` are (options or defaults, key, value), `copies` are tensors that keep their memory, each with its value.
    """

    values: list[tuple[dict[str, Any], str, object]]
    copies: list[tuple[Tensor, Tensor]]


def plan_options(goals: Sequence[Goal], free: Free) -> OptionsPlan:
    """Return the assignments and copies that restore the options of parameter groups; each of `goals` has a group and
    its options' new values. A tensor among the options is overwritten if its memory is in `free` and all groups that
    share it get the same value; any other option is assigned. Options that were one object are one again, except
    tensors that are overwritten."""
    # The spots of options that keep their memory, and are filled with the new value.
    filled = free.options & _find_agreed(goals)
    kept_tensors = [held for held in _list_options(goals) if spot_of(held) in filled]
    with torch.no_grad():
        plan = OptionsPlan(_copy_defaults(goals, kept_tensors), [])
    shared = _find_shared(goals)
    placed_once: dict[int, object] = {}
    placed_options = []
    for i, goal in enumerate(goals):
        for key, value in goal.options.items():
            held = goal.group.options.get(key)
            count = len(plan.copies)
            placed = _place_option(held, value, filled, plan.copies)
            keeps_memory = len(plan.copies) > count
            # A list, tuple or dict of several groups stays one object.
            if id(held) in shared:
                placed = placed_once.setdefault(id(held), placed)
            origin = goal.origins.get(key, ())
            # An origin of one key is of one group, of which several may have been made.
            owner = ("", str(i), *origin) if len(origin) == 1 else origin
            placed_options.append(
                _PlacedOption(goal.group.options, key, value, placed, keeps_memory, owner)
            )
    plan.values.extend(_join_options(placed_options))
    return plan


class _PlacedOption(NamedTuple):
    """An option to restore: its `value` in the checkpoint, the object `placed` that is assigned, and whether this
    object is or contains a tensor of the optimizer, which keeps its memory. Options of one `origin`, unless it is
    empty, were one object."""

    options: dict[str, Any]
    key: str
    value: object
    placed: object
    keeps_memory: bool
    origin: Origin


def _join_options(
    placed: Sequence[_PlacedOption],
) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Yield the assignments of the options. Options of one origin and one value get one object."""
    firsts: dict[Origin, _PlacedOption] = {}
    # First those that keep memory: only the others can be exchanged.
    for each in sorted(placed, key=lambda each: not each.keeps_memory):
        firsts.setdefault(each.origin, each)
    for each in placed:
        first = firsts[each.origin]
        may_join = bool(each.origin) and first is not each and not each.keeps_memory
        is_one = may_join and is_same(first.value, each.value)
        yield each.options, each.key, first.placed if is_one else each.placed


def _find_shared(goals: Iterable[Goal]) -> set[int]:
    """The ids of lists, tuples and dicts that are options under several keys, all of which get the same value."""
    wanted: dict[int, list[object]] = {}
    for goal in goals:
        for key, value in goal.options.items():
            held = goal.group.options.get(key)
            if isinstance(held, list | tuple | dict) and can_change(held):
                wanted.setdefault(id(held), []).append(value)
    shared = set()
    for identity, (first, *others) in wanted.items():
        if others and all(is_same(first, other) for other in others):
            shared.add(identity)
    return shared


def _place_option(
    held: object, value: object, filled: frozenset[MemorySpot], copies: list[tuple[Tensor, Tensor]]
) -> object:
    """The value, with its tensors, in tuples and lists too, replaced by held tensors that keep their memory: those at
    the spots `filled`. Adds (held tensor, tensor to fill it with) for each of these to `copies`."""
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
    """The spots of options that get the same value in all groups that share them."""
    wanted: dict[MemorySpot | None, list[object]] = {}
    for goal in goals:
        for key, option in goal.group.options.items():
            if key in UNVALUED:
                continue
            new_option = goal.options.get(key, option)
            for held, value in _zip_tensors(_name_option(key), option, new_option):
                wanted.setdefault(spot_of(held), []).append(value)
    return {spot for spot, values in wanted.items() if _is_one_value(values)}


def _is_one_value(values: Sequence[object]) -> bool:
    """Whether all values are tensors, equal bit by bit."""
    first = values[0]
    for value in values:
        if not isinstance(value, Tensor) or not isinstance(first, Tensor):
            return False
        if not has_same_bits(value, first):
            return False
    return True


def _takes_values(held: object, filled: frozenset[MemorySpot]) -> TypeGuard[Tensor]:
    """Whether an option is a tensor, whole on this rank, whose memory is filled."""
    if not isinstance(held, Tensor):
        return False
    if isinstance(held, DTensor) and not all(where.is_replicate() for where in held.placements):
        return False
    return _keeps_memory(held, filled)


def _copy_defaults(
    goals: Sequence[Goal], filled_tensors: Sequence[Tensor]
) -> list[tuple[dict[str, Any], str, object]]:
    """Assignments (dict, key, value) that keep the values of optimizers' defaults: a default in memory that is filled,
    or that overlaps such memory, is replaced by a copy."""
    assignments: list[tuple[dict[str, Any], str, object]] = []
    filled_spots = set(spots_of(filled_tensors))
    for defaults in _list_defaults(goals):
        tensors = []
        for key, value in defaults.items():
            what = f"{key!r} of an optimizer's defaults"
            tensors += [tensor for tensor, _ in _zip_tensors(what, value, None)]
        touched = filled_spots | find_crowded([*tensors, *filled_tensors])
        for key, value in defaults.items():
            assignments.append((defaults, key, _clone_touched(value, touched)))
    return assignments


def _list_defaults(goals: Iterable[Goal]) -> Iterator[dict[str, Any]]:
    """The defaults of optimizers and of the optimizers that they wrap, each dict once; a wrapper may have none."""
    found: dict[int, dict[str, Any]] = {}
    for goal in goals:
        optimizer = goal.group.optimizer
        for each in (optimizer, *(inner.optimizer for inner in list_inner(optimizer))):
            defaults = getattr(each, "defaults", {})
            found[id(defaults)] = defaults
    yield from found.values()


def _clone_touched(value: object, touched: set[MemorySpot]) -> object:
    """The value, with the tensors at these spots, in tuples and lists too, replaced by clones."""
    if isinstance(value, Tensor):
        return value.clone() if spot_of(value) in touched else value
    if isinstance(value, tuple | list):
        cloned = [_clone_touched(item, touched) for item in value]
        is_same = all(new is item for new, item in zip(cloned, value, strict=True))
        return value if is_same else rebuild(value, cloned)
    return value


# Restoring


def restore(
    model: Model,
    jobs: Sequence[ReadJob],
    goals: Sequence[Goal],
    options: OptionsPlan,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the loaded `tensors` where `jobs` tell, restore the parameter groups in `goals` with the planned `options`,
    and drop optimizer state that the checkpoint lacks. The modules' `set_extra_state` methods are called last, since
    they can read the restored tensors."""
    # A DTensor on a mesh without this rank is not loaded here.
    loaded = [job for job in jobs if job.here in tensors]
    with torch.no_grad():
        for job in loaded:
            # Without a layout: an extra state.
            if job.layout is not None:
                job.put(tensors[job.here])
        for current, value in options.copies:
            fill(current, value)
        _set_options(model, options)
        for goal in goals:
            _finish_state(model, goal)
        _share_state(model, goals)
        for job in loaded:
            if job.layout is None:
                job.put(tensors[job.here])


def _set_options(model: Model, options: OptionsPlan) -> None:
    """Assign the options. A tensor of the module in an option, or a view of one, stays there if it has the option's
    value by now."""
    slots = spots_of(slot.local for slot in model.slots.values())
    held_tensors = []
    for target, key, _ in options.values:
        held_tensors += list_tensors(target.get(key))
    # The module's spots, and the spots of held tensors that overlap them.
    module_spots = set(slots)
    for pair in find_meetings([*(slot.local for slot in model.slots.values()), *held_tensors]):
        if not module_spots.isdisjoint(pair):
            module_spots.update(pair)
    for target, key, placed in options.values:
        target[key] = _keep_equal(target.get(key), placed, frozenset(module_spots))


def _keep_equal(held: object, placed: object, spots: frozenset[MemorySpot]) -> object:
    """The value, with its tensors, also in tuples, lists and dicts, replaced by held tensors that are equal and at
    these spots."""
    if isinstance(held, Tensor) and isinstance(placed, Tensor):
        is_kept = spot_of(held) in spots and has_same_bits(local_part("an option", held), placed)
        return held if is_kept else placed
    # Lists and dicts are changed in place: several groups may have them.
    if isinstance(held, dict) and isinstance(placed, dict):
        for key, value in placed.items():
            placed[key] = _keep_equal(held.get(key), value, spots)
    if isinstance(held, tuple | list) and isinstance(placed, tuple | list):
        return _keep_items(held, placed, spots)
    return placed


def _keep_items(
    held: Sequence[object],
    placed: tuple[object, ...] | list[object],
    spots: frozenset[MemorySpot],
) -> object:
    """The tuple or list, with its tensors replaced by equal held ones."""
    # The held sequence may be shorter, which leaves None for it, or longer, which is cut off.
    items = [_keep_equal(*pair, spots) for pair in zip_longest(held, placed)][: len(placed)]
    if isinstance(placed, tuple):
        # A tuple of several groups stays one object if nothing in it is replaced.
        is_same_tuple = all(new is item for new, item in zip(items, placed, strict=True))
        return placed if is_same_tuple else rebuild(placed, items)
    placed[:] = items
    return placed


def _finish_state(model: Model, goal: Goal) -> None:
    """Set the state's values that are not tensors, and drop state that the checkpoint lacks."""
    for name, entries in goal.entries.items():
        parameter = goal.group.parameters[name]
        states = goal.group.optimizer.state
        old_state = states.pop(parameter, {})
        new_state = {}
        if is_here(model, name):
            for key, entry in entries.items():
                if isinstance(entry, Value):
                    # JSON has no devices; torch's own load_state_dict moves tensors in lists here, too.
                    new_state[key] = move_tensors(entry.value, parameter.device)
                else:
                    new_state[key] = old_state[key]
        if new_state:
            states[parameter] = new_state


def _share_state(model: Model, goals: Iterable[Goal]) -> None:
    """Make state of one origin one object again.

    An origin of one key belongs to one parameter: two parameters here do not share its object, even if both are loaded
    from the same parameter of the checkpoint.
    """
    firsts: dict[tuple[str, Origin], object] = {}
    for goal in goals:
        for name, entries in goal.entries.items():
            state = goal.group.optimizer.state.get(goal.group.parameters[name], {})
            for key, entry in entries.items():
                if entry.origin and is_here(model, name):
                    owner = name if len(entry.origin) == 1 else ""
                    state[key] = firsts.setdefault((owner, entry.origin), state[key])


def call_hooks(module: nn.Module, goals: Iterable[Goal], unmatched: Unmatched) -> None:
    """Call the hooks that torch calls after `load_state_dict`: first the hooks of the module and its submodules, then,
    once for each optimizer in `goals` (the restored parameter groups), the optimizer's. The modules' hooks get the
    missing and the unexpected names in `unmatched`."""
    kind = "model."
    missing, unexpected = (
        [name.removeprefix(kind) for name in names if name.startswith(kind)] for names in unmatched
    )
    call_load_hooks(module, missing, unexpected)
    optimizers = {id(goal.group.optimizer): goal.group.optimizer for goal in goals}
    for optimizer in optimizers.values():
        hooks = getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {})
        for hook in list(hooks.values()):
            hook(optimizer)
