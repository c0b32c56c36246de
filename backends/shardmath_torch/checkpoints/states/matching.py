"""Matching: what a module and its optimizers take from a checkpoint, by name.

1. A parameter is found under any of its names. A parameter with several names is saved once, and may be restored into
   separate parameters; the reverse raises, since the checkpoint has several values.
2. A group takes the options that its parameters had, which must be the same for all of them on this rank. If none is on
   this rank, and their options differ, the group keeps its options: no step uses them here. A group without parameters
   takes the options of the one in its place, if as many groups were saved, and the same ones without parameters.
3. State whose sizes are not products of its parameter's, such as one flat history of a group, may depend on all
   parameters of the group: it fits only a group of the same parameters in the same order, in whichever optimizer. The
   same holds for numbers if only one parameter of a group has any.
4. An option that is a list, a tuple or a tensor, with an item (of a tensor: a row) per parameter, such as their names,
   fits only a group of the same parameters in the same order, or one that has an equal option. A tuple or tensor that
   is as long in the optimizer's defaults, such as `betas`, is not counted by parameters, and fits any group. What an
   option holds deeper inside, such as a list in a dict, is not counted, either.
5. State of a parameter of shape () has that shape, whether it is a moment or a number such as a step. It counts as a
   number if other parameters have a number there, and none of another shape has state of its shape there.
6. A number goes into the tensor that an optimizer has in its place. If that tensor would change it by more than
   float32 rounds, that raises.

>>> fit_option("'lr'", torch.tensor(7.0), 0.1)
tensor(0.1000)
>>> fit_option("'lr'", 7.0, 0.1)
0.1
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import (
    Entries,
    Entry,
    Index,
    Like,
    Origin,
    Own,
    SavedGroup,
    Value,
)
from shardmath_torch.checkpoints.states.memory import can_fill
from shardmath_torch.checkpoints.states.modules import Model
from shardmath_torch.checkpoints.states.optimizers import (
    ParameterGroup,
    check_known,
    is_here,
    lay_out_state,
)
from shardmath_torch.checkpoints.states.values import (
    Kinded,
    code_value,
    list_tensors,
    plain_of,
    rebuild,
)

__all__ = [
    "Goal",
    "Unmatched",
    "complain",
    "find_stored",
    "find_unmatched",
    "fit_option",
    "is_same",
    "set_goals",
]


class Unmatched(NamedTuple):
    """Names of tensors and optimizer state without a counterpart: `missing` has names that only the module or its
    optimizers have, and `unexpected` has names that only the checkpoint has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Goal(NamedTuple):
    """A parameter group of an optimizer, with the saved values that a load puts there: the group's options, such as the
    learning rate, and the state of each parameter by name. Options of one origin in `origins` were one object."""

    group: ParameterGroup
    options: dict[str, Any]
    entries: dict[str, Mapping[str, Entry]]
    origins: Mapping[str, Origin]


# Names


def find_stored(model: Model, saved: Index) -> dict[str, str]:
    """Return a dict from a tensor's name in the module (the first, if tied) to its name in the checkpoint; tensors that
    the checkpoint lacks are left out.

    Raises CheckpointError for a parameter of which the checkpoint has several values.
    """
    stored: dict[str, str] = {}
    for first_name, names in model.names.items():
        stored_names = list(
            dict.fromkeys(saved.names[name] for name in names if name in saved.names)
        )
        if len(stored_names) > 1:
            here, there = ", ".join(names), ", ".join(stored_names)
            count = f"{len(stored_names)} in the checkpoint: {there}"
            fix = "untie them before loading, and tie them again if the values are equal"
            raise CheckpointError(f"{here} are one parameter here, but {count}; {fix}")
        if stored_names:
            stored[first_name] = stored_names[0]
    return stored


def find_unmatched(
    model: Model, saved: Index, stored: Mapping[str, str], groups: list[ParameterGroup] | None
) -> Unmatched:
    """Return the names of tensors and optimizer state that only the module or only the checkpoint has. `stored` maps
    names in the module to names in the checkpoint; `groups` has the optimizers' parameter groups, or is None to leave
    out optimizer state."""
    here = {name: name for names in model.names.values() for name in names}
    unmatched = _compare_names("model", here, saved.names)
    if groups is None:
        return unmatched
    trained = {name: stored.get(name) for group in groups for name in group.parameters}
    missing, unexpected = _compare_names("optim.state", trained, saved.options())
    return Unmatched(unmatched.missing + missing, unmatched.unexpected + unexpected)


def _compare_names(
    kind: str, here: Mapping[str, str | None], there: Mapping[str, object]
) -> Unmatched:
    """The names that only one side has, with `kind` as prefix; `here` maps each name to its name in `there`."""
    reached = set(here.values())
    missing = [f"{kind}.{name}" for name, there_name in here.items() if there_name not in there]
    unexpected = [f"{kind}.{name}" for name in there if name not in reached]
    return Unmatched(tuple(missing), tuple(unexpected))


def complain(path: object, unmatched: Unmatched) -> str:
    """Return the error message about `unmatched` names: it lists the first few that only the module has, and the first
    few that only the checkpoint at `path` has."""
    faults = []
    if unmatched.missing:
        faults.append(f"the checkpoint lacks {_list_some(unmatched.missing)}")
    if unmatched.unexpected:
        faults.append(f"only the checkpoint has {_list_some(unmatched.unexpected)}")
    return f"{path}: {'; '.join(faults)}; pass strict=False to restore what both have"


def _list_some(names: tuple[str, ...], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Options and state


def set_goals(
    model: Model, groups: Sequence[ParameterGroup], saved: Index, stored: Mapping[str, str]
) -> list[Goal]:
    """Return a list with a Goal for each of an optimizer's parameter `groups`: the group, and the saved options and
    state to restore into it. `stored` maps parameters' names in the module to names in the checkpoint.

    Raises CheckpointError if a group's parameters on this rank had different options, for state whose placement is not
    known, and for state that may depend on other parameters of the group.
    """
    numbers = _find_numbers(model, saved, stored)
    goals = [_set_goal(model, group, saved, stored, numbers) for group in groups]
    _check_placed_alike(model, goals)
    saved_groups = saved.groups or ()
    # Groups without parameters have no names to match, only their places.
    if _list_empty(groups) == _list_empty(saved_groups) and len(groups) == len(saved_groups):
        for i in _list_empty(groups):
            options = _fit_options(f"group {i}", groups[i], saved_groups[i].options)
            goals[i] = goals[i]._replace(options=options)
    return goals


def _check_placed_alike(model: Model, goals: Iterable[Goal]) -> None:
    """Raise CheckpointError if state that was one tensor of several parameters would be placed differently here."""
    firsts: dict[Origin, tuple[str, object]] = {}
    for goal in goals:
        for name, entries in goal.entries.items():
            for key, entry in entries.items():
                # An origin of one key is of one parameter only.
                if len(entry.origin) < 2 or not isinstance(entry, Like):
                    continue
                placed = lay_out_state(entry, model.slots[name].layout)
                first, other = firsts.setdefault(entry.origin, (name, placed))
                if other != placed:
                    what = f"{key!r} is one tensor of {first!r} and {name!r} in the checkpoint"
                    why = f"and would be placed as {other} and as {placed} here"
                    raise CheckpointError(f"{what}, {why}; place the two parameters alike")


def _list_empty(groups: Sequence[ParameterGroup | SavedGroup]) -> list[int]:
    """The positions of parameter groups without parameters."""
    return [i for i, group in enumerate(groups) if not group.parameters]


def _find_numbers(model: Model, saved: Index, stored: Mapping[str, str]) -> set[str]:
    """The keys under which parameters have numbers in their state, such as "step"."""
    # If all parameters have the shape (), their state does not show it.
    numbers, moments = {"step"}, set()
    for name, stored_name in stored.items():
        for key, entry in saved.state.get(stored_name, {}).items():
            if isinstance(entry, Own) and entry.shape == ():
                numbers.add(key)
            elif isinstance(entry, Like) and model.slots[name].layout.shape:
                moments.add(key)
    return numbers - moments


def _set_goal(
    model: Model,
    group: ParameterGroup,
    saved: Index,
    stored: Mapping[str, str],
    numbers: Collection[str],
) -> Goal:
    """The options and state to restore into one group, matched by the names of its parameters. `numbers` are the keys
    of the state's numbers."""
    entries = {}
    for name, parameter in group.parameters.items():
        stored_name = stored.get(name)
        if stored_name is not None and stored_name in saved.state:
            entries[name] = _copy_values(saved.state[stored_name])
            if not parameter.shape:
                entries[name] = _tell_numbers(entries[name], numbers)
            for key, entry in entries[name].items():
                check_known(entry, parameter, name, key)
    _check_order(model, group, saved, stored)
    if group.is_stand_in:
        return Goal(group, {}, entries, {})
    options, origins = _match_options(model, group, saved, stored)
    return Goal(group, options, entries, origins)


def _tell_numbers(entries: Mapping[str, Entry], numbers: Collection[str]) -> dict[str, Entry]:
    """The state of a parameter of shape (), in which numbers are not like the parameter: a DTensor's step, for example,
    is a plain tensor."""
    told = dict(entries)
    for key, entry in entries.items():
        if isinstance(entry, Like) and key in numbers:
            told[key] = Own(entry.dtype, (), entry.origin)
    return told


def _check_order(
    model: Model, group: ParameterGroup, saved: Index, stored: Mapping[str, str]
) -> None:
    """Raise CheckpointError for state of a whole group, if the group here has other parameters or another order."""
    group_of = saved.members()
    here = tuple(stored.get(name) for name in group.parameters)
    for name in group.parameters:
        stored_name = stored.get(name)
        if stored_name not in group_of or group_of[stored_name].members == here:
            continue
        shape, saved_group = model.slots[name].layout.shape, group_of[stored_name].members
        why = _explain_shared(saved.state, stored_name, shape, saved_group)
        if why:
            there = f"{_list_some(saved_group)} in the checkpoint"
            present = _list_some(tuple(group.parameters))
            what = f"optimizer state of {name!r} may depend on its whole group, as {why}; the group has {there}"
            fix = "make the optimizer of the same parameters in the same order, or load without it"
            raise CheckpointError(f"{what}, but {present} here; {fix}")


def _explain_shared(
    state: Mapping[str, Entries], name: str, shape: tuple[int, ...], group: tuple[str, ...]
) -> str:
    """Why a parameter's state may belong to its whole group, as a clause; "" if it belongs to the parameter."""
    entries = state.get(name, {})
    # The sizes of the parameter's own state: an optimizer may merge some of its dimensions, or reduce over some.
    products = _list_products(shape)
    has_tensors = False
    for key, entry in entries.items():
        for state_shape in _list_shapes(entry, shape):
            if not products.issuperset(state_shape):
                return f"its {key!r} has shape {state_shape}, and its parameter shape {shape}"
            has_tensors |= state_shape != ()
    others = [other for other in group if state.get(other)]
    if has_tensors or others != [name]:
        return ""
    return f"its {next(iter(entries))!r} is a number, and no other parameter of the group has state"


def _list_products(sizes: Iterable[int]) -> set[int]:
    """The products of all subsets of the sizes, 1 among them."""
    found = {1}
    for size in sizes:
        found |= {size * other for other in found}
    return found


def _list_shapes(entry: Entry, parameter: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the tensors in an entry, given the shape of its parameter."""
    match entry:
        case Like():
            return [parameter or (1,)]
        case Own(shape=shape):
            return [shape]
        case Value(value=value):
            return [tuple(tensor.shape) for tensor in list_tensors(value)]


def _copy_values(entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """The entries with copies of their values: several parameters here may have been one."""
    copied = dict(entries)
    for key, entry in entries.items():
        if isinstance(entry, Value):
            copied[key] = replace(entry, value=copy.deepcopy(entry.value))
    return copied


def _match_options(
    model: Model, group: ParameterGroup, saved: Index, stored: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, Origin]]:
    """The options that the group's parameters had, which must be the same for all that are on this rank, and their
    origins. If none is, the options of the others, or {} if these differ or are not saved. `stored` maps parameters to
    stored names."""
    saved_options = _find_options(group, saved, stored)
    local_names = [name for name in group.parameters if is_here(model, name)]
    here = {name: saved_options[name] for name in local_names if name in saved_options}
    if here:
        _check_same_options(here)
    elif not saved_options or _find_different(saved_options):
        return {}, {}
    first_name, options = next(iter((here or saved_options).items()))
    saved_group = saved.members()[stored[first_name]]
    # No step uses options here of parameters that are on other meshes.
    if here:
        _check_lists(group, options, saved_group.members, stored)
    return _fit_options(f"the group of {first_name}", group, options), saved_group.origins


def _find_options(
    group: ParameterGroup, saved: Index, stored: Mapping[str, str]
) -> dict[str, Mapping[str, object]]:
    """The saved options of each of the group's parameters that has any; `stored` maps parameters to stored names."""
    by_name = saved.options()
    found = {}
    for name in group.parameters:
        stored_name = stored.get(name)
        if stored_name in by_name:
            found[name] = by_name[stored_name]
    return found


def _fit_options(
    which: str, group: ParameterGroup, options: Mapping[str, object]
) -> dict[str, Any]:
    """Saved options in the form of those that the group has; errors say `which` group it is."""
    matched = {}
    for key, value in options.items():
        # A copy: several groups here may have been one.
        copied = copy.deepcopy(value)
        matched[key] = fit_option(f"{key!r} of {which}", group.options.get(key), copied)
    return matched


def _check_lists(
    group: ParameterGroup,
    options: Mapping[str, object],
    members: tuple[str, ...],
    stored: Mapping[str, str],
) -> None:
    """Raise CheckpointError if an option may have an item for each of the saved parameters `members`, of which the
    group does not consist, and the group has another value there. `stored` maps parameters to stored names."""
    if tuple(map(stored.get, group.parameters)) == members:
        return
    for key, value in options.items():
        held = group.options.get(key)
        if _count_items(value) != len(members) or len(members) < 2:
            continue
        # A default is for groups of any size. A list may be longer by now than it was as a default.
        default = getattr(group.optimizer, "defaults", {}).get(key)
        if not isinstance(value, list) and _count_items(default) == len(members):
            continue
        is_comparable = _count_items(held) is not None
        if not is_comparable or not is_same(held, value):
            saved, present = _list_some(members), _list_some(tuple(group.parameters))
            what = f"option {key!r} is {shown(value)} in the checkpoint, maybe an item for each of {saved}"
            fix = f"group the parameters as they were, or give the group {key}={shown(value)} if it fits"
            raise CheckpointError(f"{what}, but the group has {present} here; {fix}")


def _count_items(option: object) -> int | None:
    """The number of items of a list, a tuple, or the first dimension of a tensor; None for other options, also
    DTensors."""
    if isinstance(option, Kinded):
        return None
    if isinstance(option, Tensor):
        is_countable = option.ndim > 0 and not isinstance(option, DTensor)
    else:
        is_countable = isinstance(option, list | tuple)
    return len(cast(Sequence[object], option)) if is_countable else None


def _check_same_options(options_by_name: Mapping[str, Mapping[str, object]]) -> None:
    """Raise CheckpointError if these parameters of one group had different options."""
    different = _find_different(options_by_name)
    if different is not None:
        first_name, name, keys = different
        pairs = [(key, options_by_name[first_name], options_by_name[name]) for key in keys]
        differ = [f"{key} ({shown(a.get(key))} and {shown(b.get(key))})" for key, a, b in pairs]
        what = f"{first_name} and {name} are in one group of the optimizer here"
        why = f"but differ in {', '.join(differ)} in the checkpoint"
        raise CheckpointError(f"{what}, {why}; put them into separate groups")


def _find_different(
    options_by_name: Mapping[str, Mapping[str, object]],
) -> tuple[str, str, list[str]] | None:
    """The first parameter, another that had other options, and the keys that differ; None if all had the same."""
    first_name, options = next(iter(options_by_name.items()))
    for name, other in options_by_name.items():
        if other is options:  # true if the group has not changed
            continue
        keys = sorted({*options, *other})
        differ = [key for key in keys if not is_same(options.get(key), other.get(key))]
        if differ:
            return first_name, name, differ
    return None


def is_same(one: object, other: object) -> bool:
    """Return whether two options are equal in value and type (1 and 1.0 are not); NaN equals NaN, and the order of a
    dict's keys is ignored."""
    coded = [code_value(value, "an option", kinded=True) for value in (one, other)]
    texts = [json.dumps(value, sort_keys=True) for value in coded]
    return texts[0] == texts[1]


def fit_option(what: str, held: object, value: object) -> object:
    """Convert the saved option `value` to the type of `held`, the same option in the optimizer now, and return it: a
    tensor, for example, gets the dtype of `held`. `what` is the option's name in error messages.

    Tensors get the dtype, shape and device of `held`, Enums and namedtuples its class, in tuples, lists and dicts too.

    Raises CheckpointError if that would change the value; rounding a Python float to float32 is allowed.
    """
    match value:
        case Kinded():
            return _fit_kinded(what, held, value)
        case tuple() | list():
            return _fit_items(what, held, value)
        case dict():
            held_items = held if isinstance(held, dict) else {}
            return {key: fit_option(what, held_items.get(key), one) for key, one in value.items()}
        case int() | float() | Tensor() | np.generic() if isinstance(held, Tensor):
            scalar = value.item() if isinstance(value, np.generic) else value
            return _fit_tensor(what, held, scalar)
    return value


def _fit_items(what: str, held: object, value: tuple[object, ...] | list[object]) -> object:
    """The tuple or list, each item fitted to the held item at its place; a namedtuple if one of this length is held."""
    is_as_long = isinstance(held, tuple | list) and len(held) == len(value)
    held_items = held if is_as_long else [None] * len(value)
    fitted = map(partial(fit_option, what), cast(Sequence[object], held_items), value)
    is_named = is_as_long and isinstance(value, tuple) and hasattr(held, "_make")
    return rebuild(held if is_named else value, fitted)


def _fit_kinded(what: str, held: object, value: Kinded) -> object:
    """The value as an Enum or namedtuple of the held value's class. Raises CheckpointError if the class has another
    name."""
    held_kind = type(held).__qualname__
    plain = plain_of(held)
    is_plain = plain is held  # neither an Enum nor a namedtuple
    if is_plain or held_kind != value.kind:
        said = f"{what} is a {value.kind} of {shown(value.plain)} in the checkpoint"
        fix = f"make the optimizer with a {value.kind}"
        raise CheckpointError(f"{said}, but {shown(held)} here, which is not one; {fix}")
    fitted = fit_option(what, plain, value.plain)
    try:
        return rebuild(held, fitted)
    except (TypeError, ValueError) as error:
        said = f"{what} is a {value.kind} of {shown(value.plain)} in the checkpoint"
        why = f"which the class {held_kind} here does not take: {error}"
        fix = "define the class as it was when the optimizer was saved"
        raise CheckpointError(f"{said}, {why}; {fix}") from error


def _fit_tensor(what: str, held: Tensor, value: int | float | Tensor) -> Tensor:
    """The value as a tensor like the held one. Raises CheckpointError if that would change the value."""
    given = _as_tensor(value)
    if given is None:
        raise _make_error(what, held, value)
    if not can_fill(held):
        # A tensor that steps could not update is replaced by the saved one as it is.
        return given
    fitted = given.to(held.dtype)
    if fitted.numel() != held.numel():
        raise _make_error(what, held, given.tolist())
    # A number such as lr=0.1 is rounded to float32, as the optimizer rounds it; a saved tensor must stay as it is.
    is_number = isinstance(value, float)
    if not _is_unchanged(fitted, given) and not (is_number and _is_nearest(fitted, given)):
        raise _make_error(what, held, given.tolist())
    return fitted.reshape(held.shape).to(held.device)


def _is_nearest(fitted: Tensor, given: Tensor) -> bool:
    """Whether a number is another one rounded to float32."""
    if fitted.dtype != torch.float32:
        return False
    return math.isclose(float(fitted), float(given), rel_tol=2**-23)


def _make_error(what: str, held: Tensor, value: object) -> CheckpointError:
    here = f"a tensor of {held.dtype}{list(held.shape)}"
    said = f"{what} is {shown(value)} in the checkpoint, but {here} here"
    fix = "make the optimizer with a number, or a tensor of the type and shape that was saved"
    return CheckpointError(f"{said}, which cannot hold it; {fix}")


def _as_tensor(value: int | float | Tensor) -> Tensor | None:
    """The value as a tensor that holds it exactly; None for an int of more than 64 bits."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64, device="cpu")
    if -(2**63) <= value < 2**63:
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    return None


def _is_unchanged(fitted: Tensor, given: Tensor) -> bool:
    """Whether the fitted values equal the given ones; NaN equals NaN."""
    back = fitted.to(given.dtype)
    if given.is_floating_point():  # not all small types can be compared
        back = back.double()
        given = given.double()
    are_nan = (fitted != fitted) & (given != given)
    same = (back == given) | are_nan
    return bool(same.all())
