"""Telling: what optimizers hold of parameters that are DTensors of other ranks' meshes.

1. The first of a mesh's ranks that makes the call tells all others, since everybody has the same layouts: entries of
   the state, and options of the groups. An optimizer may lack the parameters of other meshes, as stages' do.
2. Where every rank is on all meshes, nobody talks.
3. Without a group, ranks of the meshes tell each other, of which there has to be a group: of a mesh of one axis, or
   the default one. Whoever is outside cannot be told.
4. Of what every rank has nobody tells: where ranks have shared out the state of that among them, nothing says so, and
   that they differ is an error (`advise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import SAME, gather_all, is_alone, on_all, share_of
from shardmath_torch.checkpoints.states.index import (
    Entries,
    SavedGroup,
    read_entries,
    read_groups,
    write_entries,
    write_groups,
)
from shardmath_torch.checkpoints.states.modules import Model
from shardmath_torch.checkpoints.states.optimizers import (
    NOWHERE,
    Elsewhere,
    Optimizers,
    describe_optimizers,
    find_groups,
)
from shardmath_torch.groups import compat
from shardmath_torch.groups.compat import Group as ProcessGroup
from shardmath_torch.groups.compat import rank_or_0
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of

__all__ = ["advise", "tell_among_meshes", "tell_names", "tell_state"]


def tell_state(model: Model, optimizer: Optimizers, group: ProcessGroup | None) -> Elsewhere:
    """What other ranks of the group hold of parameters whose mesh lacks one of them.

    Collective over the group where there may be any. Raises CheckpointError on every rank for what
    `describe_optimizers` does.
    """
    ranks = (0,) if is_alone() else compat.ranks_of(compat.group_of(group))
    firsts = _find_firsts(model, ranks)
    return _tell(firsts, partial(_say_state, model, optimizer, firsts), group)


def tell_names(model: Model, optimizer: Optimizers, group: ProcessGroup | None) -> Elsewhere:
    """The same of the names of the parameters that optimizers have, alone."""
    ranks = (0,) if is_alone() else compat.ranks_of(compat.group_of(group))
    firsts = _find_firsts(model, ranks)
    return _tell(firsts, partial(_say_names, model, optimizer, firsts), group)


def tell_among_meshes(model: Model, optimizer: Optimizers, tensors: Iterable[Tensor]) -> Elsewhere:
    """The same as `tell_state` of the ranks that are on a mesh of the module, whose `tensors` these are.

    Raises CheckpointError where they have no group, and on a rank that is not on any of them.
    """
    ranks = sorted({rank for slot in model.slots.values() for rank in slot.layout.mesh.ranks})
    if is_alone() or not ranks:
        return NOWHERE
    if rank_or_0() not in ranks:
        what = f"rank {rank_or_0()} is on no mesh of the module, whose ranks are {shown(ranks)}"
        fix = "give group= of all ranks that call, this one too"
        raise CheckpointError(f"{what}, and is not told what they hold of optimizers; {fix}")
    firsts = _find_firsts(model, ranks)
    if not firsts:
        return NOWHERE
    group = _find_group(ranks, tensors)
    return _tell(firsts, partial(_say_state, model, optimizer, firsts), group)


def _find_group(ranks: Sequence[int], tensors: Iterable[Tensor]) -> ProcessGroup | None:
    """The group of exactly these ranks, None for the default one. Makes none: that is collective over all ranks."""
    absent = sorted(set(range(dist.get_world_size())) - set(ranks))
    if not absent:
        return None
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1:
            continue
        if set(mesh_of(tensor.device_mesh).ranks) == set(ranks):
            return compat.groups_of_axes(tensor.device_mesh)[0]
    what = f"ranks {shown(absent)} are on no mesh of the module, and the others, {shown(list(ranks))}, have"
    fix = (
        "give group=, of the ranks that call: one of these others, or torch.distributed.group.WORLD"
    )
    raise CheckpointError(f"{what} no mesh of one axis in which to tell of their optimizers; {fix}")


def _find_firsts(model: Model, ranks: Sequence[int]) -> dict[str, int | None]:
    """The first rank on the mesh of each tensor that not all have; None where none of the ranks has it."""
    meshes = {slot.layout.mesh for slot in model.slots.values()}
    on_them = {mesh: [rank for rank in ranks if rank in mesh] for mesh in meshes}
    firsts = {}
    for name, slot in model.slots.items():
        on_it = on_them[slot.layout.mesh]
        if len(on_it) < len(ranks):
            firsts[name] = min(on_it, default=None)
    return firsts


def _tell(
    firsts: Mapping[str, int | None],
    say: Callable[[], dict[str, Any]],
    group: ProcessGroup | None,
) -> Elsewhere:
    """What the first ranks say."""
    if is_alone() or not firsts:
        return NOWHERE
    # A name of its own: ranks that read meshes otherwise are not in this step, and are told so at once.
    said = on_all("describe what lies on meshes apart", say, group)
    _, count = share_of(group)
    entries: dict[str, Entries] = {}
    groups: list[SavedGroup] = []
    for one in gather_all("tell what lies on it alone", said, count, group):
        entries |= read_entries(one["entries"])
        groups += read_groups(one["groups"])
    return Elsewhere(entries, tuple(groups))


def _say_state(
    model: Model, optimizer: Optimizers, firsts: Mapping[str, int | None]
) -> dict[str, Any]:
    """Entries and groups, as JSON, of the parameters of whose meshes this rank is the first."""
    held = describe_optimizers(model, optimizer)
    entries = {name: said for name, said in held.entries.items() if _is_told(name, firsts)}
    groups = _keep_told(held.groups or (), firsts)
    return {"entries": write_entries(entries), "groups": write_groups(groups)}


def _say_names(
    model: Model, optimizer: Optimizers, firsts: Mapping[str, int | None]
) -> dict[str, Any]:
    """The same, of names alone."""
    groups = [SavedGroup(tuple(group.parameters), {}) for group in find_groups(model, optimizer)]
    return {"entries": {}, "groups": write_groups(_keep_told(groups, firsts))}


def _keep_told(groups: Iterable[SavedGroup], firsts: Mapping[str, int | None]) -> list[SavedGroup]:
    """The groups with those parameters alone of which this rank tells the others."""
    kept = []
    for group in groups:
        names = tuple(name for name in group.parameters if _is_told(name, firsts))
        if names:
            kept.append(SavedGroup(names, group.options))
    return kept


def _is_told(name: str, firsts: Mapping[str, int | None]) -> bool:
    """Whether this rank tells the others of a parameter."""
    return firsts.get(name) == rank_or_0()


BY_RANK = (
    "where each rank has the state of some parameters, give every rank an optimizer of all of them, and all of their "
    "state before each save, by broadcasts from the rank that has it; or divide the parameters by FSDP2"
)


def advise(what: str) -> str:
    """What helps where ranks describe something otherwise: of state, they may have shared it out."""
    return BY_RANK if what.startswith(("'optim.state.", "the optimizer of ")) else SAME
