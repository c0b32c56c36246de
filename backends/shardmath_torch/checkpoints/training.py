"""Training: all that a module and its optimizer need to go on, saved, and restored under any parallelism.

1. `state_of` gives this rank's tensors, which are the storage itself, and everybody's layouts, by flat name. A layout
   of None is for bytes. All ranks have the same names and layouts.

       model.<name>               a parameter, a persistent buffer, or a module's extra state (bytes)
       optim.state.<name>.<key>   a tensor of the optimizer's state
       training                   JSON (bytes): options of parameter groups, values that are no tensors, all names

2. Layouts are those of `layout_of`, also where a rank's part is empty; `holdings` has the rules.
3. Restoring writes into the memory that is there, so that FSDP2, captured graphs and the optimizer go on with it. State
   that the optimizer has not yet is made like its parameter: no step is taken, and no gradient needed. State that the
   checkpoint has not is dropped, as by `Optimizer.load_state_dict`. Where groups share a tensor, such as a learning
   rate, and are to have several values, each gets a tensor of its own.
4. Several names of one parameter are saved once. They may be restored into parameters of their own; the other way round
   is an error, since the checkpoint has several values.
5. Bytes are each rank's own: a rank that the checkpoint does not know gets those of the lowest that it knows.
6. Not saved: random states, schedules (but the learning rates are), positions in data. Of DistributedDataParallel, give
   `.module`; pipeline stages, whose ranks have different names, save with a group and a path each.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.algebra.mesh import Mesh
from shardmath.layouts.edits import cast as _of_dtype
from shardmath.layouts.layout import Layout
from shardmath_torch import compat
from shardmath_torch.checkpoints.checkpoint import check_names, load, on_all, save
from shardmath_torch.checkpoints.holdings import (
    KINDS,
    Extra,
    Lies,
    Model,
    Optimizers,
    ParameterGroup,
    as_bytes,
    decoded,
    description,
    groups_of,
    layout_by,
    lies,
    local_part,
    model_of,
    optimizer_of,
    unwritable,
)
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.stored import Checkpoint
from shardmath_torch.compat import Group
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.files.json_text import shown
from shardmath_torch.files.places import CheckpointError
from shardmath_torch.files.weights import Progress

__all__ = ["Optimizers", "Unmatched", "load_state", "load_weights", "save_state", "state_of"]

INDEX = "training"
"""The name of the JSON."""


def state_of(
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    mesh: Mesh | None = None,
    group: Group | None = None,
) -> tuple[dict[str, Tensor], dict[str, Layout | None]]:
    """This rank's tensors, and the layouts of all ranks, by flat name: what `save` takes.

    What is no DTensor is the same on `mesh`: by default the largest of the DTensors', or the ranks of the group. It has
    to be given where DTensors of some ranks are on other meshes than those of others, as under tensor parallelism with
    DistributedDataParallel. Parameters that FSDP2 has gathered are given back to it first. Collective where `layout_of`
    is.

    Raises CheckpointError for an extra state that is not bytes, an optimizer's value that neither JSON nor a layout can
    say, an optimizer's parameter that is not the module's, and a module on the meta device; LayoutError as `layout_of`.
    """
    return _state(model_of(description(module), mesh=mesh, group=group), optimizer)[:2]


class _State(NamedTuple):
    """What is saved: this rank's tensors, everybody's layouts, and where torch's own tools nest each; by flat name."""

    tensors: dict[str, Tensor]
    layouts: dict[str, Layout | None]
    paths: dict[str, tuple[str, ...]]


def _state(model: Model, optimizer: Optimizers) -> _State:
    state, about = optimizer_of(model, optimizer)
    slots = {f"model.{name}": slot for name, slot in model.slots.items()}
    slots |= {f"optim.state.{name}": slot for name, slot in state.items()}
    index = {
        "names": {name: first for first, names in model.names.items() for name in names},
        "extra": {name: extra.kind for name, extra in model.extra.items()},
    }
    blobs = {f"model.{name}": extra.packed for name, extra in model.extra.items()}
    blobs[INDEX] = torch.frombuffer(
        bytearray(json.dumps(index | about).encode()), dtype=torch.uint8
    )
    tensors = {name: slot.local for name, slot in slots.items()}
    paths: dict[str, tuple[str, ...]] = {
        f"model.{name}": ("model", name) for name in (*model.slots, *model.extra)
    }
    keys = [
        (name, key)
        for name, held in about["state"].items()
        for key in held
        if f"{name}.{key}" in state
    ]
    paths |= {f"optim.state.{name}.{key}": ("optim", "state", name, key) for name, key in keys}
    layouts = {name: slot.layout for name, slot in slots.items()} | dict.fromkeys(blobs)
    return _State(tensors | blobs, layouts, paths)


def save_state(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """`save` of `state_of`, with its `progress`. Collective over the group, by default all ranks.

    Raises CheckpointError on every rank for what either raises on one, and where modules differ.
    """
    model = _model(module, mesh, group)
    state = on_all("describe its state", lambda: _state(model, optimizer), group)
    save(path, state.tensors, state.layouts, paths=state.paths, group=group, progress=progress)


def _model(module: nn.Module, mesh: Mesh | None, group: Group | None) -> Model:
    """The module with its layouts, about which ranks talk only when all have described the same."""
    described = on_all(
        "describe its module", lambda: description(module), group, claim=lambda d: d.claim
    )
    return on_all("lay out its module", lambda: model_of(described, mesh=mesh, group=group), group)


class Unmatched(NamedTuple):
    """Names that the checkpoint lacks, and names that only the checkpoint has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_state(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
    verify: bool = True,
) -> Unmatched:
    """Restore in place what `save_state` saved of a module with the same names, whatever divides either.

    The optimizer may be fresh. Its groups take the options of the groups that their parameters were in; they may be
    other groups, if those agree. Without an optimizer, only the module is restored.

    Collective over the group. Raises CheckpointError on every rank for names that only one side has, unless not
    `strict`, when these are left alone and returned; and for what `state_of`, `load` and rule 4 do not allow. Then
    nothing was restored, unless a module's set_extra_state raised: these come first. `mesh` is as in
    `state_of`, `progress` and `verify` as in `load`.
    """
    kept = on_all("find what save_state wrote", lambda: _of_state(path), group)
    index = load(kept, {INDEX: None}, group=group, verify=verify)[INDEX]
    model = _model(module, mesh, group)

    def matched() -> tuple[Unmatched, list[_Restored], list[_Job]]:
        _check_writable(model)
        saved = _read(path, index)
        groups = list(groups_of(model, optimizer))
        there = _there(model, saved)
        unmatched = _unmatched(model, saved, there, groups if optimizer is not None else None)
        if strict and any(unmatched):
            raise CheckpointError(_complaint(path, unmatched))
        plans = [
            _Restored(each, _options(each, saved, there), _entries(each, saved, there))
            for each in groups
        ]
        jobs = [*_of_model(model, saved, there), *_of_groups(plans, model, there, _shared(groups))]
        return unmatched, plans, jobs

    unmatched, plans, jobs = on_all("match its state", matched, group)
    layouts, names = {job.here: job.layout for job in jobs}, {job.here: job.there for job in jobs}
    found = load(kept, layouts, names=names, group=group, progress=progress, verify=verify)
    on_all("restore its state", lambda: _restore(jobs, plans, found), group)
    return unmatched


def load_weights(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    names: Mapping[str, str] | None = None,
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
    verify: bool = True,
) -> None:
    """Fills the module's parameters and persistent buffers, in place, from any checkpoint that `load` reads.

    `names` says, as {name in the module: stored name}, what is stored under another name. A parameter with several
    names is found under any of them. Values are cast to the module's types. Collective over the group; raises
    CheckpointError on every rank for what is missing or has another shape. `mesh` is as in `state_of`, `progress` and
    `verify` as in `load`.
    """
    model, renamed = _model(module, mesh, group), names or {}

    def ready() -> tuple[Checkpoint, dict[str, Layout], dict[str, str]]:
        _check_writable(model)
        check_names(names)
        found = open_checkpoint(path)
        stored = {name: _stored(found, name, model.names[name], renamed) for name in model.slots}
        layouts = {
            name: _of_dtype(slot.layout, found[stored[name]].dtype)
            for name, slot in model.slots.items()
        }
        return found, layouts, stored

    found, layouts, stored = on_all(
        "match its weights", ready, group, claim=lambda done: done[0].digest
    )
    tensors = load(found, layouts, names=stored, group=group, progress=progress, verify=verify)
    on_all("fill the module", lambda: _fill(model, tensors), group)


def _fill(model: Model, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, slot in model.slots.items():
            if name in tensors:  # not so for a DTensor of other ranks' mesh
                slot.local.copy_(tensors[name])


def _check_writable(model: Model) -> None:
    """Raises CheckpointError for memory that cannot take what is stored, before any does."""
    for name, slot in model.slots.items():
        why = unwritable(slot.local)
        if why:
            raise CheckpointError(
                f"{name!r} {why}; give the module a tensor with memory of its own, such as a clone"
            )


def _stored(found: Checkpoint, first: str, names: list[str], renamed: Mapping[str, str]) -> str:
    """The stored name of a parameter: what is said of one of its names, or the first of them that is there."""
    said = [renamed[name] for name in names if name in renamed]
    return next((name for name in [*said, *names] if name in found), said[0] if said else first)


def _of_state(path: str | os.PathLike[str]) -> Checkpoint:
    found = open_checkpoint(path)
    if INDEX not in found:
        raise CheckpointError(
            f"{path} is nothing that save_state wrote; fill the module's weights with load_weights"
        )
    return found


def _restore(jobs: list[_Job], plans: list[_Restored], found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for job in sorted(jobs, key=lambda job: job.layout is not None):
            if job.here in found:  # not so for a DTensor of other ranks' mesh
                job.put(found[job.here])
        _set_options(plans)
        for plan in plans:
            _finish(plan)


# What is where


class _Kept(NamedTuple):
    """The JSON: all names of the module and those that they are kept under, kinds of extra states, groups, state."""

    names: dict[str, str]
    extra: dict[str, str]
    groups: list[dict[str, Any]] | None
    state: dict[str, dict[str, dict[str, Any]]]

    def options(self) -> dict[str, dict[str, Any]]:
        """The options of each parameter's group."""
        return {
            name: group["options"] for group in self.groups or () for name in group["parameters"]
        }


def _read(path: object, index: Tensor) -> _Kept:
    try:
        found = _Kept(**json.loads(as_bytes(index)))
        if (
            not isinstance(found.names, dict)
            or not isinstance(found.extra, dict)
            or not isinstance(found.state, dict)
        ):
            raise TypeError("its parts are no objects")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        what = f"{path}: {INDEX!r} is nothing that save_state wrote ({error})"
        raise CheckpointError(
            f"{what}; read tensors of other checkpoints with shardmath_torch.load"
        ) from error


def _there(model: Model, saved: _Kept) -> dict[str, str]:
    """The name under which the checkpoint keeps what it has of the module, by the name here."""
    out: dict[str, str] = {}
    for first, names in model.names.items():
        kept = list(dict.fromkeys(saved.names[name] for name in names if name in saved.names))
        if len(kept) > 1:
            what = f"{', '.join(names)} are one parameter here, and {len(kept)} in the checkpoint: {', '.join(kept)}"
            raise CheckpointError(f"{what}; load them apart, and tie them when they are equal")
        out |= dict.fromkeys([first] * len(kept), *kept)
    return out


def _unmatched(
    model: Model, saved: _Kept, there: dict[str, str], groups: list[ParameterGroup] | None
) -> Unmatched:
    here = {name: None for names in model.names.values() for name in names}
    missing = [f"model.{name}" for name in here if name not in saved.names]
    unexpected = [f"model.{name}" for name in saved.names if name not in here]
    if groups is not None:
        mine, theirs = [name for group in groups for name in group.parameters], saved.options()
        missing += [f"optim.state.{name}" for name in mine if there.get(name) not in theirs]
        unexpected += [
            f"optim.state.{name}" for name in theirs if name not in {there.get(n) for n in mine}
        ]
    return Unmatched(tuple(missing), tuple(unexpected))


def _complaint(path: object, unmatched: Unmatched) -> str:
    said = ("the checkpoint lacks {}", "only the checkpoint has {}")
    shown = [
        text.format(_some(names)) for text, names in zip(said, unmatched, strict=True) if names
    ]
    return f"{path}: {'; '.join(shown)}; pass strict=False to restore what both have"


def _some(names: tuple[str, ...], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _options(group: ParameterGroup, saved: _Kept, there: dict[str, str]) -> dict[str, Any]:
    """The options that the group's parameters had: the same for all of them."""
    by_name = saved.options()
    found = {name: by_name[there[name]] for name in group.parameters if there.get(name) in by_name}
    first = next(iter(found), "")
    for name, options in found.items():
        other = found[first]
        differ = sorted(
            key for key in {*options, *other} if repr(options.get(key)) != repr(other.get(key))
        )
        if differ:
            what = f"{first} and {name} are in one group of the optimizer here, and differ in {', '.join(differ)} there"
            raise CheckpointError(f"{what}; give them groups of their own")
    held = group.options
    return {
        key: _as_held(f"{key!r} of the group of {first}", held.get(key), decoded(value))
        for key, value in found.get(first, {}).items()
    }


def _as_held(what: str, held: object, value: object) -> object:
    """The value, as a tensor of the same kind where the optimizer has one.

    Raises CheckpointError where that would change it; float32 takes a number as `torch.tensor` makes one of it.
    """
    if not isinstance(held, Tensor) or not isinstance(value, int | float | Tensor):
        return value
    number = isinstance(value, float) and held.dtype == torch.float32
    given = value if isinstance(value, Tensor) else torch.tensor(value, dtype=_type_of(value))
    if _is_strange(held):
        return given
    made = given.to(held.dtype)
    rounded = number and math.isclose(float(made), float(given), rel_tol=2**-23)
    if made.numel() != held.numel() or not (rounded or _same(made, given)):
        here = f"a tensor of {held.dtype}{list(held.shape)}"
        said = f"{what} is {shown(given.tolist())} in the checkpoint and {here} here"
        fix = "make the optimizer with a number, or a tensor of the type and shape that was saved"
        raise CheckpointError(f"{said}, which cannot hold it; {fix}")
    return made.reshape(held.shape).to(held.device)


def _type_of(number: float) -> torch.dtype:
    return torch.float64 if isinstance(number, float) else torch.int64


def _same(made: Tensor, given: Tensor) -> bool:
    """Whether the values are still what they were; NaN is NaN."""
    back = made.to(given.dtype)
    if given.is_floating_point():
        back, given = back.double(), given.double()
    both = (made != made) & (given != given)
    return bool(((back == given) | both).all())


def _entries(
    group: ParameterGroup, saved: _Kept, there: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """What is said of the state of each of the group's parameters that the checkpoint knows."""
    names = [name for name in group.parameters if there.get(name) in saved.state]
    return {name: saved.state[there[name]] for name in names}


# Jobs


class _Job(NamedTuple):
    """One thing to read: its flat name here and in the checkpoint, its layout, and where to put it."""

    here: str
    there: str
    layout: Layout | None
    put: Callable[[Tensor], object]


class _Restored(NamedTuple):
    """A group, and what it is to have: its options, and what is said of the state of its parameters."""

    group: ParameterGroup
    options: dict[str, Any]
    entries: dict[str, dict[str, Any]]


def _of_model(model: Model, saved: _Kept, there: dict[str, str]) -> Iterator[_Job]:
    for here, kept in there.items():
        slot = model.slots.get(here)
        put = (
            slot.local.copy_ if slot is not None else _setter(model.extra[here], saved.extra[kept])
        )
        yield _Job(f"model.{here}", f"model.{kept}", slot.layout if slot is not None else None, put)


def _setter(extra: Extra, kind: str) -> Callable[[Tensor], object]:
    return lambda data: extra.module.set_extra_state(KINDS[kind].restored(data))


def _shared(groups: list[ParameterGroup]) -> set[Lies]:
    """Memory of the optimizers' state that several parameters have."""
    states = (g.optimizer.state.get(p, {}) for g in groups for p in g.parameters.values())
    held = [value for state in states for value in state.values()]
    plain = [t for t in held if isinstance(t, Tensor) and not _is_strange(t) and t.numel()]
    count = Counter(map(lies, plain))
    return {at for at, several in count.items() if several > 1}


def _is_strange(held: Tensor) -> bool:
    """Whether values cannot be put where the tensor lies; what restoring makes anew."""
    if held.is_nested or held.is_meta:
        return True
    local = compat.local_of(held).detach() if isinstance(held, DTensor) else held
    return local.is_meta or bool(unwritable(local))


def _of_groups(
    plans: list[_Restored], model: Model, there: dict[str, str], shared: set[Lies]
) -> Iterator[_Job]:
    for plan, (name, entries) in ((one, each) for one in plans for each in one.entries.items()):
        for key, entry in entries.items():
            if "value" not in entry:
                layout = layout_by(entry, model.slots[name].layout)
                here, kept = (f"optim.state.{n}.{key}" for n in (name, there[name]))
                yield _Job(here, kept, layout, _filler(plan, name, key, entry, shared))


def _filler(
    plan: _Restored, name: str, key: str, entry: dict[str, Any], shared: set[Lies]
) -> Callable[[Tensor], object]:
    """Puts a value into the optimizer's tensor, or into a new one where it has none that fits and is its own."""

    def put(data: Tensor) -> None:
        parameter = plan.group.parameters[name]
        state = plan.group.optimizer.state[parameter]
        held, device = state.get(key), _device(plan, parameter, key, entry)
        if not _fits(held, parameter, entry, device) or lies(held) in shared:
            state[key] = _made(parameter, entry, device)
        local_part(name, state[key]).copy_(data)

    return put


def _device(plan: _Restored, parameter: Tensor, key: str, entry: dict[str, Any]) -> torch.device:
    """Steps are counted on the CPU, unless by the device (torch 2.13: _process_value_according_to_param_policy)."""
    options = plan.group.options | plan.options
    host = (
        "own" in entry
        and key == "step"
        and not options.get("capturable")
        and not options.get("fused")
    )
    return torch.device("cpu") if host else parameter.device


def _fits(
    held: object, parameter: Tensor, entry: dict[str, Any], device: torch.device
) -> TypeGuard[Tensor]:
    dtype, shape = entry.get("own", (entry.get("like"), parameter.shape))
    divided = "like" in entry and isinstance(parameter, DTensor)
    if not isinstance(held, Tensor) or isinstance(held, DTensor) != divided:
        return False
    if _is_strange(held):
        return False
    return (held.dtype, tuple(held.shape), held.device) == (dtype_of(dtype), tuple(shape), device)


def _made(parameter: Tensor, entry: dict[str, Any], device: torch.device) -> Tensor:
    if "like" in entry:
        return torch.zeros_like(parameter, dtype=dtype_of(entry["like"]), requires_grad=False)
    dtype, shape = entry["own"]
    return torch.zeros(shape, dtype=dtype_of(dtype), device=device)


def _set_options(plans: list[_Restored]) -> None:
    """Options that are tensors keep their memory, unless groups share it and are to have several values."""
    wanted: dict[Lies, list[object]] = {}
    for plan in plans:
        for key, held in plan.group.options.items():
            if isinstance(held, Tensor) and not _is_strange(held):
                wanted.setdefault(lies(held), []).append(plan.options.get(key, held))
    alone = {at for at, values in wanted.items() if _all_equal(values)}
    _keep_defaults(plans, alone)
    for plan in plans:
        for key, value in plan.options.items():
            held = plan.group.options.get(key)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and _stays(held, alone):
                held.copy_(value)
            else:
                plan.group.options[key] = value


def _stays(held: Tensor, alone: set[Lies]) -> bool:
    """Whether an option keeps its memory."""
    return not _is_strange(held) and lies(held) in alone


def _all_equal(values: list[object]) -> bool:
    first = values[0]
    return isinstance(first, Tensor) and all(
        isinstance(value, Tensor) and value.equal(first) for value in values
    )


def _keep_defaults(plans: list[_Restored], written: set[Lies]) -> None:
    """What later groups of an optimizer begin with stays: a tensor of it that a group has, too, is copied."""
    for optimizer in {id(plan.group.optimizer): plan.group.optimizer for plan in plans}.values():
        for key, value in optimizer.defaults.items():
            if isinstance(value, Tensor) and lies(value) in written:
                optimizer.defaults[key] = value.clone()


def _finish(plan: _Restored) -> None:
    """Sets what is no tensor of the state, and drops state that the checkpoint has not."""
    for name, entries in plan.entries.items():
        parameter = plan.group.parameters[name]
        held = plan.group.optimizer.state.pop(parameter, {})
        kept = {
            key: decoded(entry["value"]) if "value" in entry else held[key]
            for key, entry in entries.items()
        }
        if kept:
            plan.group.optimizer.state[parameter] = kept
