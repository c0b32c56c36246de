"""Optimizers: what optimizers hold on this rank for the parameters of a module, with layouts.

1. State of its parameter's shape, such as a moment, is placed as its parameter; scalars, and all other state of plain
   parameters, are replicated. The placement of other state of DTensors, and of plain parameters that say which part
   they are, is not known and raises. Tensors in lists, tuples and dicts raise in these cases, too, and so does state of
   a plain parameter that would become state of a DTensor. State that says it is another part than its parameter
   raises, and so does an option that says it is a part.
2. Anything in the state but tensors is a value (`values`), and so are tensors among the options of a group, such as a
   learning rate.
3. A parameter has one optimizer and one group: of two states it would not be clear which one to restore.
4. State belongs to a parameter. State under other keys, or for a tensor in none of the optimizer's groups, has no name
   in a checkpoint and raises. An inner optimizer with its own state raises, too, and so do entries of a state dict
   other than the state of parameters and their groups.
5. State of a DTensor on a mesh without this rank is described by the ranks on that mesh (`telling`), whatever this
   rank's optimizer holds, and so are its options, parameter by parameter: a group whose parameters' ranks report
   different options is saved as several. Such parameters may be in no group here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardmath.layouts.edits import cast
from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.states.index import (
    Entries,
    Entry,
    Like,
    Origin,
    Own,
    SavedGroup,
    Value,
    check_key,
)
from shardmath_torch.checkpoints.states.memory import check_shaped, local_part
from shardmath_torch.checkpoints.states.modules import Model, ModuleSlot
from shardmath_torch.checkpoints.states.sharing import (
    check_apart,
    check_options_apart,
    find_origins,
    mark_shared,
)
from shardmath_torch.checkpoints.states.values import list_tensors
from shardmath_torch.checkpoints.states.wrappers import check_keeps_own
from shardmath_torch.groups.compat import rank_or_0
from shardmath_torch.tensors.parts.checkpointable import (
    is_checkpointable,
    is_part,
    is_same_part,
    show_attributes,
)

__all__ = [
    "NOWHERE",
    "UNVALUED",
    "Elsewhere",
    "OptimizerState",
    "Optimizers",
    "ParameterGroup",
    "check_known",
    "describe_optimizers",
    "find_all_groups",
    "find_groups",
    "hold",
    "is_placed_like",
    "is_here",
    "lay_out_state",
    "name_trained",
]

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
"""One, several that divide the parameters among them, or none."""

UNVALUED = ("params", "param_names")
"""Keys of a group that list its parameters, and so are not options."""


class ParameterGroup(NamedTuple):
    """A parameter group of an optimizer: its options, such as the learning rate, and its parameters by name in the
    module. A parameter that the module has under several names is listed under the first.

    A stand-in is for parameters that only other ranks' optimizers have. It has no options.
    """

    optimizer: Optimizer
    options: dict[str, Any]
    parameters: dict[str, Tensor]
    is_stand_in: bool = False

    def states(self) -> Iterator[tuple[str, Tensor, Mapping[Any, Any]]]:
        """Yield each parameter of the group as (name, parameter, the optimizer's state of the parameter)."""
        states = self.optimizer.state
        for name, parameter in self.parameters.items():
            yield name, parameter, states.get(parameter, {})


class OptimizerState(NamedTuple):
    """The state of optimizers as it is saved: the state tensors with their layouts, the dtype and shape (or the plain
    value) of each state item, and the parameter groups."""

    slots: dict[tuple[str, str], ModuleSlot]
    groups: tuple[SavedGroup, ...] | None
    entries: dict[str, Entries]

    @property
    def trained(self) -> tuple[str, ...] | None:
        """The names of all parameters that the optimizers have, group after group; None without an optimizer."""
        return None if self.groups is None else name_trained(self.groups)


class Elsewhere(NamedTuple):
    """Information, collected from all ranks, on parameters that only some ranks hold: the dtype and shape (or the plain
    value) of each item of their optimizer state, and their parameter groups."""

    entries: Mapping[str, Entries]
    groups: tuple[SavedGroup, ...]

    def members(self) -> dict[str, SavedGroup]:
        """Return a dict from parameter name to the parameter's group. The keys are the parameters that some ranks hold
        and others lack."""
        found: dict[str, SavedGroup] = {}
        for group in self.groups:
            found |= dict.fromkeys(group.parameters, group)
        return found


NOWHERE = Elsewhere({}, ())


# Groups


def find_groups(model: Model, optimizer: Optimizers) -> list[ParameterGroup]:
    """Return the parameter groups of all optimizers in `optimizer`, with parameters by their names in `model`.

    Raises CheckpointError for a value that is not an optimizer, a parameter that is not the module's or is in two
    groups, state that is not a parameter's, state in an inner optimizer, other entries of a state dict, and an option
    that says it is a part of a larger tensor.
    """
    groups = []
    grouped: set[str] = set()
    given = _list_optimizers(optimizer)
    for each in given:
        check_keeps_own(each, given)
        for options in each.param_groups:
            parameters = {_name_of(model, parameter): parameter for parameter in options["params"]}
            twice = sorted(grouped & parameters.keys())
            if twice:
                what = f"{twice[0]!r} is in two parameter groups of the optimizers"
                raise CheckpointError(f"{what}; put each parameter into one group of one optimizer")
            grouped |= parameters.keys()
            for key, value in options.items():
                if key not in UNVALUED:
                    _check_whole(list_tensors(value), f"option {key!r} of a parameter group")
            groups.append(ParameterGroup(each, options, parameters))
        _check_state(model, each)
    return groups


def find_all_groups(
    model: Model, optimizer: Optimizers, elsewhere: Elsewhere
) -> list[ParameterGroup]:
    """Return a list of the parameter groups of this rank's optimizers, then of groups for parameters that, by the
    reports in `elsewhere`, only other ranks' optimizers have.

    The latter have empty state.

    Leaves out parameters on this rank: if an optimizer on a parameter's mesh lacks it, ranks find that by comparing.
    """
    groups = find_groups(model, optimizer)
    known = set(name_trained(groups))
    for group in elsewhere.groups:
        absent_names = [
            name for name in group.parameters if name not in known and not is_here(model, name)
        ]
        parameters = {name: model.slots[name].local for name in absent_names}
        if parameters:
            # Stands for another rank's optimizer: only its state, which is empty, is read.
            stand_in = Optimizer(list(parameters.values()), {})
            groups.append(ParameterGroup(stand_in, {}, parameters, is_stand_in=True))
    return groups


def hold(given: Optimizers) -> Optimizers:
    """Return `given`, or a tuple of its optimizers if it is an iterator, so that it can be iterated more than once."""
    return tuple(given) if isinstance(given, Iterator) else given


def _list_optimizers(given: object) -> tuple[Optimizer, ...]:
    if given is None:
        return ()
    if isinstance(given, Optimizer):
        return (given,)
    if not isinstance(given, Iterable):
        what = f"the optimizer is {shown(given)}, not a torch.optim.Optimizer or several"
        raise CheckpointError(f"{what}; give one, a list of them, or None")
    found = tuple(given)
    for each in found:
        if not isinstance(each, Optimizer):
            what = f"one of the optimizers is {shown(each)}, not a torch.optim.Optimizer"
            raise CheckpointError(f"{what}; give one, a list of them, or None")
    return found


def _name_of(model: Model, parameter: Tensor) -> str:
    if id(parameter) not in model.parameters:
        shape = "none yet" if is_lazy(parameter) else tuple(parameter.shape)
        what = f"the optimizer has a parameter of shape {shape} that is not the module's"
        raise CheckpointError(
            f"{what}; make the optimizer last, after fully_shard, of module.parameters()"
        )
    return model.parameters[id(parameter)]


def name_trained(groups: Iterable[SavedGroup | ParameterGroup]) -> tuple[str, ...]:
    """Return the names of the parameters of all `groups`, group after group."""
    return tuple(name for group in groups for name in group.parameters)


# State


def _check_state(model: Model, optimizer: Optimizer) -> None:
    """Raise CheckpointError unless all state is a dict for a parameter of the optimizer's groups."""
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, state in optimizer.state.items():
        # Looking up a missing key in a defaultdict leaves an empty dict.
        if isinstance(state, Mapping) and not state:
            continue
        if id(key) not in grouped:
            raise CheckpointError(_explain_stray(model, key))
        if not isinstance(state, Mapping):
            what = f"the optimizer's state of {_name_of(model, key)!r} is {shown(state)}"
            raise CheckpointError(f"{what}, not a dict; keep its values in a dict by name")


def _explain_stray(model: Model, key: object) -> str:
    """The message of an error about state under a key that is not a parameter of the optimizer's groups."""
    if not isinstance(key, Tensor):
        what = f"the optimizer's state has the key {shown(key)}, which is not a parameter of its groups"
        fix = "keep it in a parameter's state, or as an option of a group in param_groups"
        return f"{what}; {fix}"
    name = model.parameters.get(id(key))
    tensor = f"of shape {tuple(key.shape)}" if name is None else repr(name)
    what = f"the optimizer has state of a tensor {tensor} that is in none of its groups"
    return f"{what}; delete it from optimizer.state, or put the parameter into a group"


def is_here(model: Model, name: str) -> bool:
    """Whether this rank is on the mesh of the layout that the parameter `name` has in `model`."""
    return rank_or_0() in model.slots[name].layout.mesh


def describe_optimizers(
    model: Model, optimizer: Optimizers, elsewhere: Elsewhere = NOWHERE
) -> OptimizerState:
    """Return the state of `optimizer` (one or several) for the parameters of `model`: tensors with layouts, the dtype
    and shape (or plain value) of each state item, and parameter groups. `elsewhere` has the other ranks' reports on
    parameters that this rank lacks.

    State of parameters that are not on this rank has empty tensors here.

    Raises CheckpointError for what `find_groups` and `check_apart` do, and for state whose placement is not known.
    """
    slots: dict[tuple[str, str], ModuleSlot] = {}
    groups: list[SavedGroup] = []
    entries: dict[str, Entries] = {}
    local: dict[str, Mapping[Any, Any]] = {}
    reported = elsewhere.members()
    all_groups = find_all_groups(model, optimizer, elsewhere)
    for own in _list_local(all_groups):
        groups += _split_by_options(model, own, reported)
    for group in all_groups:
        for name, parameter, state in group.states():
            layout = model.slots[name].layout
            if is_here(model, name):
                local[name] = state
                entries[name] = _describe_state(state, parameter, name)
                slots |= _list_slots(name, state, entries[name], layout)
            else:
                entries[name] = elsewhere.entries.get(name, {})
                slots |= _list_empty(name, entries[name], layout)
    of_module = [(f"{name!r} of the module", slot.local) for name, slot in model.slots.items()]
    options = list(_list_options(all_groups))
    check_apart(of_module, options, local)
    check_options_apart(options, local)
    mark_shared(entries, local)
    return OptimizerState(slots, None if optimizer is None else tuple(groups), entries)


def _list_options(groups: Iterable[ParameterGroup]) -> Iterator[tuple[str, object]]:
    """Yield the options of the groups, with words for each."""
    for group in groups:
        for key, value in group.options.items():
            if key not in UNVALUED:
                yield f"the option {key!r}", value


def _list_local(groups: Sequence[ParameterGroup]) -> list[SavedGroup]:
    """The groups as this rank has them, with the origins of options that are one object."""
    options = [{k: v for k, v in group.options.items() if k not in UNVALUED} for group in groups]
    firsts = [next(iter(group.parameters), None) for group in groups]
    origins: dict[str | None, dict[str, Origin]] = {}
    # Groups without parameters have no name. No step uses their options.
    named = {name: held for name, held in zip(firsts, options, strict=True) if name is not None}
    for (name, key), origin in find_origins(named).items():
        origins.setdefault(name, {})[key] = origin
    return [
        SavedGroup(tuple(group.parameters), held, origins.get(name, {}))
        for group, held, name in zip(groups, options, firsts, strict=True)
    ]


def _split_by_options(
    model: Model, local: SavedGroup, reported: Mapping[str, SavedGroup]
) -> list[SavedGroup]:
    """The groups to save for one group: split if ranks report different options for its parameters."""
    # Both by the id of the group: parameters that were reported in one group have the same.
    names_by_group: dict[int, list[str]] = {}
    groups: dict[int, SavedGroup] = {}
    for name in local.parameters:
        chosen = local if is_here(model, name) else reported.get(name, local)
        groups[id(chosen)] = chosen
        names_by_group.setdefault(id(chosen), []).append(name)
    if not names_by_group:
        return [local]
    return [groups[key].keep(tuple(names)) for key, names in names_by_group.items()]


def _list_slots(
    name: str, held: Mapping[str, Any], entries: Mapping[str, Entry], parameter: Layout
) -> dict[tuple[str, str], ModuleSlot]:
    """The local tensors and layouts of a parameter's state, by the parameter's name and key."""
    slots = {}
    for key, entry in entries.items():
        if not isinstance(entry, Value):
            local = local_part(f"{name}.{key}", held[key])
            slots[name, key] = ModuleSlot(local, lay_out_state(entry, parameter))
    return slots


def _list_empty(
    name: str, entries: Entries, parameter: Layout
) -> dict[tuple[str, str], ModuleSlot]:
    """Slots, with empty tensors, of state that only other ranks hold, given the parameter's layout."""
    slots = {}
    for key, entry in entries.items():
        if not isinstance(entry, Value):
            slots[name, key] = ModuleSlot(torch.empty(0), lay_out_state(entry, parameter))
    return slots


def _describe_state(held: Mapping[Any, Any], parameter: Tensor, name: str) -> dict[str, Entry]:
    """An entry for each item of a parameter's state."""
    entries = {}
    for key, value in held.items():
        check_key(key, f"the optimizer's state of {name!r}")
        entries[key] = _describe_value(value, parameter, name, key)
    return entries


def _describe_value(value: object, parameter: Tensor, name: str, key: str) -> Entry:
    """The entry of an item of a parameter's state."""
    if not isinstance(value, Tensor):
        check_known(Value(value), parameter, name, key)
        _check_whole(list_tensors(value), f"a tensor in state {key!r} of {name!r}")
        return Value(value)
    check_shaped(f"{name}.{key}", value)
    dtype = str(value.dtype).removeprefix("torch.")
    if is_placed_like(value, parameter):
        return Like(dtype)
    _check_whole([value], f"state {key!r} of {name!r}")
    entry = Own(dtype, tuple(value.shape))
    if isinstance(value, DTensor):
        raise CheckpointError(_explain_unknown(entry, parameter, name, key))
    check_known(entry, parameter, name, key)
    return entry


def _check_whole(tensors: Iterable[Tensor], what: str) -> None:
    """Raise CheckpointError if a tensor says by its attributes that it is a part of a larger one. `what` names it."""
    for tensor in tensors:
        if is_part(tensor):
            said = f"{what} says by its attributes which part of a larger tensor it is"
            why = "and only state of the same shape and part as its parameter is saved as a part"
            fix = "divide the parameter alike, or keep the whole value without the attributes"
            raise CheckpointError(f"{said}, {show_attributes(tensor)}, {why}; {fix}")


def check_known(entry: Entry, parameter: Tensor, name: str, key: str) -> None:
    """Raise CheckpointError if `entry`, an optimizer state item of a sharded `parameter`, has a tensor that is neither
    a scalar nor placed like the parameter. The error names the parameter by `name` and the item by `key`, such as
    "exp_avg".

    How ranks divide such a tensor is not known. A sharded parameter is a DTensor or torch CheckpointableTensor.
    """
    match entry:
        case Own(shape=shape):
            is_known = not shape
        case Value(value=value):
            is_known = not any(tensor.ndim for tensor in list_tensors(value))
        case Like():
            return
    is_part = isinstance(parameter, DTensor) or is_checkpointable(parameter)
    if is_part and not is_known:
        raise CheckpointError(_explain_unknown(entry, parameter, name, key))


def _explain_unknown(entry: Own | Value, parameter: Tensor, name: str, key: str) -> str:
    """The message of an error about state whose placement is not known."""
    known = "how other state is divided among ranks is not known"
    if isinstance(entry, Value):
        what = f"{key!r} of {name!r}, which is a DTensor, has tensors in a {type(entry.value).__name__}"
        return f"{what}; keep each under its own key, as a DTensor like the parameter, as {known}"
    shapes = f"shape {entry.shape}, its parameter {tuple(parameter.shape)}"
    fix = "keep a scalar, or a tensor placed like the parameter"
    return f"state {key!r} of {name!r} has {shapes}, or other placements; {fix}, as {known}"


def is_placed_like(value: Tensor, parameter: Tensor) -> bool:
    """Whether an optimizer's `value` has the shape of its `parameter`, and, if that is a DTensor, its mesh and
    placements. A plain value with the attributes of a part must be the same part."""
    if value.shape != parameter.shape:
        return False
    if not isinstance(value, DTensor) and not isinstance(parameter, DTensor):
        return is_same_part(value, parameter)
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return False
    same_mesh = value.device_mesh == parameter.device_mesh
    return same_mesh and value.placements == parameter.placements


def lay_out_state(entry: Like | Own, parameter: Layout) -> Layout:
    """Return the layout of the state tensor that `entry` describes, given the layout of its parameter."""
    if isinstance(entry, Like):
        return cast(parameter, entry.dtype)
    return Layout(entry.shape, parameter.mesh, {}, dtype=entry.dtype)
