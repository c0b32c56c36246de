"""Training: a module and its optimizer, saved, and restored under any parallelism.

1. `state_of` gives this rank's tensors, which are views of the storage, and the layouts of all ranks, by flat name. A
   layout of None is for bytes. All ranks have the same layouts.

       model.<name>               a parameter, a persistent buffer, or a module's extra state (bytes)
       optim.state.<name>.<key>   a tensor of the optimizer's state
       training                   JSON (bytes): options of parameter groups, values that are not tensors, all names

2. Layouts are `layout_of`'s, even if a rank's part is empty; `modules` and `optimizers` have the rules. A rank that is
   not on a DTensor's mesh has its layout and no tensor, and the same holds for the optimizer's state of it.
3. `matching` matches names, and `restoring` writes into the existing memory.
4. Bytes differ per rank: a rank that saved none gets the bytes of the lowest rank that did.
5. Not saved: random states, schedules (learning rates are saved), positions in data. Give DistributedDataParallel's
   `.module`; pipeline stages, whose ranks have different names, save with a group and a path each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import describe_form
from shardmath_torch.checkpoints.checkpoint import load, save
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.states.index import INDEX, Index, read_index, write_index
from shardmath_torch.checkpoints.states.matching import (
    Goal,
    Unmatched,
    complain,
    find_stored,
    find_unmatched,
    set_goals,
)
from shardmath_torch.checkpoints.states.modules import (
    Model,
    agree_on_model,
    check_one_value,
    check_slots,
    describe,
    list_saved_layouts,
    model_of,
)
from shardmath_torch.checkpoints.states.optimizers import (
    NOWHERE,
    Elsewhere,
    Optimizers,
    OptimizerState,
    describe_optimizers,
    find_all_groups,
    hold,
    name_trained,
)
from shardmath_torch.checkpoints.states.restoring import (
    OptionsPlan,
    ReadJob,
    call_hooks,
    check_fillable,
    find_free,
    list_module_jobs,
    list_state_jobs,
    plan_options,
    restore,
)
from shardmath_torch.checkpoints.states.telling import (
    advise,
    tell_among_meshes,
    tell_names,
    tell_state,
)
from shardmath_torch.checkpoints.stored import Checkpoint
from shardmath_torch.groups.agreement.gather import shared
from shardmath_torch.groups.compat import Group, rank_or_0, untraced
from shardmath_torch.moves.observing.bars import Progress

__all__ = ["Optimizers", "Unmatched", "load_state", "save_state", "state_of"]


# Saving


@untraced
def state_of(
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    mesh: Mesh | None = None,
    group: Group | None = None,
) -> tuple[dict[str, Tensor], dict[str, Layout | None]]:
    """Return a module's and its optimizer's state as two dicts by name, as `save` takes them: this rank's tensors, and
    the layouts of all ranks' tensors (None for bytes). Plain tensors count as replicated on `mesh`.

    Tensors that are not DTensors, and do not say which part they are (`checkpointable`), are assumed the same on all
    ranks of `mesh`, by default the largest mesh of the DTensors, or the ranks of the group. Give `mesh` if some ranks
    have DTensors on other meshes than other ranks, as under tensor parallelism with DistributedDataParallel.
    Parameters that FSDP2 has gathered are resharded first.
    Collective if `layout_of` is; and over the group, if an optimizer is given and some rank of the group is not on the
    mesh of some parameter. Without a group, that is over the union of the DTensors' meshes, which must be all ranks, or
    the ranks of a mesh of one axis.

    A parameter's state and options come from the ranks on its mesh; optimizers of other ranks may lack the parameter.

    Raises CheckpointError for an extra state that is not bytes, an optimizer's value that neither JSON nor a layout can
    express, an optimizer's parameter that is not the module's or is in two groups, optimizer state that is not a
    parameter's, is kept in another optimizer, or shares a part of its memory with other state, a module on the meta
    device, and if a group has to be given; LayoutError as `layout_of`.
    """
    # An iterator of optimizers becomes a tuple, as they are gone through more than once.
    optimizer = hold(optimizer)
    described = describe(module)
    model = model_of(described, mesh=mesh, group=group)
    elsewhere = NOWHERE
    if optimizer is not None and group is None:
        tensors = described.parameters | described.buffers
        elsewhere = tell_among_meshes(model, optimizer, tensors.values())
    elif optimizer is not None:
        elsewhere = tell_state(model, optimizer, group)
    layouts = {name: slot.layout for name, slot in model.slots.items()}
    state = _gather_state(model, optimizer, elsewhere, layouts)
    return state.tensors, state.layouts


class _State(NamedTuple):
    """The training state to save, by name: this rank's tensors, all ranks' layouts, and paths for torch's own tools.

    `trained` has the names of the optimizers' parameters; it is None without an optimizer.
    """

    trained: tuple[str, ...] | None
    tensors: dict[str, Tensor]
    layouts: dict[str, Layout | None]
    paths: dict[str, tuple[str, ...]]

    def add(self, path: tuple[str, ...], tensor: Tensor, layout: Layout | None) -> None:
        """Add `tensor` with its layout (None if it holds bytes) under the keys `path`, which joined with dots are the
        tensor's name.

        A DTensor on a mesh without this rank, for which it has an empty tensor, adds only a layout.
        """
        name = ".".join(path)
        if layout is None or rank_or_0() in layout.mesh:
            self.tensors[name] = tensor
        self.layouts[name] = layout
        self.paths[name] = path


def _gather_state(
    model: Model, optimizer: Optimizers, elsewhere: Elsewhere, layouts: Mapping[str, Layout]
) -> _State:
    """Collect what is saved of the module, under `layouts` by name, and its optimizers; `elsewhere` is what other ranks
    report of theirs."""
    optimizer_state = describe_optimizers(model, optimizer, elsewhere)
    state = _State(optimizer_state.trained, {}, {}, {})
    for name, slot in model.slots.items():
        state.add(("model", name), slot.local, layouts[name])
    for (name, key), slot in optimizer_state.slots.items():
        state.add(("optim", "state", name, key), *slot)
    for name, extra in model.extra.items():
        state.add(("model", name), extra.packed, None)
    index = _make_index(model, optimizer_state)
    state.add((INDEX,), write_index(index), None)
    return state


def _make_index(model: Model, state: OptimizerState) -> Index:
    """The index of the state: names, kinds of extra states, groups and entries."""
    # A tensor is saved under its first name.
    saved_names: dict[str, str] = {}
    for first, names in model.names.items():
        saved_names |= dict.fromkeys(names, first)
    kinds = {name: extra.kind for name, extra in model.extra.items()}
    return Index(saved_names, kinds, state.groups, state.entries)


@untraced
def save_state(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    mesh: Mesh | None = None,
    group: Group | None = None,
    progress: Progress | None = None,
) -> None:
    """Save a module's and its optimizer's state as a checkpoint at `path`, which `load_state` restores under any
    parallelism. Collective over `group`; plain tensors count as replicated on `mesh`.

    This is `save` of `state_of`, except that buffers which are not DTensors are saved from the lowest rank that has
    them: ranks may have different values there. By default the group is all ranks, and the mesh is as in `state_of`.

    Each rank's optimizer may have the parameters of all meshes of the module, or only of the rank's mesh, as under
    pipeline stages on separate meshes. A parameter's options come from the ranks that hold it.

    Raises CheckpointError on every rank if `state_of` or `save` raises on one, or if modules differ between ranks.
    """
    optimizer = hold(optimizer)
    with shared(group):
        model = agree_on_model(module, mesh, group)
        elsewhere = tell_state(model, optimizer, group)
        gather = partial(_gather_state, model, optimizer, elsewhere, list_saved_layouts(model))
        state = on_all("describe its state", gather, group, claim=_claim_state, fix=advise)
        save(path, state.tensors, state.layouts, paths=state.paths, group=group, progress=progress)


def _claim_state(state: _State) -> dict[str, str]:
    """Facts about the state that must be the same on all ranks: layouts, and which parameters have an optimizer."""
    claims = _claim_trained(state.trained)
    for name, layout in state.layouts.items():
        claims[repr(name)] = "bytes" if layout is None else describe_form(layout)
    return claims


def _claim_trained(trained: Iterable[str] | None) -> dict[str, str]:
    """Which parameters have an optimizer, as claims that ranks compare."""
    if trained is None:
        return {"the optimizer": "None"}
    by_parameter = {f"the optimizer of {name!r}": "given" for name in trained}
    return {"the optimizer": "given", **by_parameter}


# Restoring


class _Restoration(NamedTuple):
    """The steps of a load, planned once names are matched: tensors to read, and options to set."""

    unmatched: Unmatched
    goals: list[Goal]
    jobs: list[ReadJob]
    options: OptionsPlan
    trained: tuple[str, ...] | None
    """The names of the optimizers' parameters; None without an optimizer."""


@untraced
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
    """Restore a module and its optimizer in place from what `save_state` wrote, even under another parallelism;
    `verify` compares checksums. If `strict`, a name that only the module or only the checkpoint has raises
    CheckpointError; otherwise such names are skipped and returned.

    The optimizer may be fresh. Its groups take the options of the groups that their parameters were in. Parameters may
    be grouped otherwise than before, if all of a group that are on this rank had the same options. Without an
    optimizer, only the module is restored.

    Collective over the group. Raises CheckpointError on every rank for names that only one side has (with
    `strict=False` they are skipped and returned), for parameters and buffers that partly share memory, and for whatever
    `state_of`, `load` and `matching` do not allow. After an error nothing is restored, unless a module's
    set_extra_state or a load_state_dict hook raised: these are called last, set_extra_state of a module before its
    submodules', with all weights restored. Then only the extra states of that module and later ones on that rank are
    missing.
    `mesh` is as in `state_of`, `progress` and `verify` as in `load`.
    """
    optimizer = hold(optimizer)  # an iterator of optimizers could be read only once
    # In inference mode an optimizer's state would be made of inference tensors, which no step can write.
    with shared(group), torch.inference_mode(False), torch.no_grad():
        checkpoint = on_all("find what save_state wrote", partial(_open_state, path), group)
        index = load(checkpoint, {INDEX: None}, group=group, verify=verify)[INDEX]
        model = agree_on_model(module, mesh, group)
        elsewhere = tell_names(model, optimizer, group)
        match = partial(_match_state, path, index, model, optimizer, elsewhere, strict)
        matched = on_all("match its state", match, group, claim=_claim_match)
        layouts = {job.here: job.layout for job in matched.jobs}
        names = {job.here: job.there for job in matched.jobs}
        loaded = load(
            checkpoint, layouts, names=names, group=group, progress=progress, verify=verify
        )
        compare = partial(check_one_value, model, loaded, "model.")
        on_all("compare what it has found", compare, group)
        fill = partial(_fill, module, model, matched, loaded)
        on_all("restore its state", fill, group)
        return matched.unmatched


def _open_state(path: str | os.PathLike[str]) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    if INDEX not in checkpoint:
        what = f"{path} was not written by save_state: it has no {INDEX!r}"
        raise CheckpointError(f"{what}; fill the module's weights with load_weights")
    return checkpoint


def _match_state(
    path: object,
    index: Tensor,
    model: Model,
    optimizer: Optimizers,
    elsewhere: Elsewhere,
    strict: bool,
) -> _Restoration:
    """Plan the restoration. Raises CheckpointError for every error that can be found before data are read."""
    check_slots(model)
    saved = read_index(path, index)
    groups = find_all_groups(model, optimizer, elsewhere)
    stored = find_stored(model, saved)
    unmatched = find_unmatched(model, saved, stored, None if optimizer is None else groups)
    if strict and any(unmatched):
        raise CheckpointError(complain(path, unmatched))
    goals = set_goals(model, groups, saved, stored)
    check_fillable(goals)
    free_memory = find_free(model, goals)
    jobs = [
        *list_module_jobs(model, saved, stored),
        *list_state_jobs(goals, model, stored, free_memory),
    ]
    trained = None if optimizer is None else name_trained(groups)
    return _Restoration(unmatched, goals, jobs, plan_options(goals, free_memory), trained)


def _fill(
    module: nn.Module, model: Model, matched: _Restoration, loaded: Mapping[str, Tensor]
) -> None:
    """Restore the module and its optimizers, and call the hooks of both."""
    restore(model, matched.jobs, matched.goals, matched.options, loaded)
    call_hooks(module, matched.goals, matched.unmatched)


def _claim_match(matched: _Restoration) -> dict[str, str]:
    """Facts about a load that must be the same on all ranks: stored names, and names that only one side has."""
    claims = _claim_trained(matched.trained)
    for job in matched.jobs:
        claims[f"the source of {job.here!r}"] = repr(job.there)
    for name in matched.unmatched.missing:
        claims[f"the place of {name!r} in the checkpoint"] = "nowhere"
    for name in matched.unmatched.unexpected:
        claims[f"the place of {name!r} in what is restored"] = "nowhere"
    return claims
