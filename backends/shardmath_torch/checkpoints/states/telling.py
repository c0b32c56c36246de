"""Telling: reports to all ranks on what optimizers hold for parameters that not every rank holds.

1. All ranks need the same layouts, but an optimizer may lack the parameters of other meshes, as pipeline stages' do. So
   the first rank of each mesh, among those that call, reports entries of the state and options of the groups to all.
2. If every rank is on all meshes, nothing is sent.
3. Without a group, the ranks of the meshes report to each other, and need a group: the group of a mesh of one axis, or
   the default group. Ranks outside it get no report.
4. Parameters that every rank holds are not reported. If ranks have divided their state among them, ranks describe
   different states, which raises (`advise`).
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
    """Gather and return reports on parameters that only some ranks of `group` hold: descriptions (entries) of their
    optimizer state, and their parameter groups. The first rank that holds a parameter reports it.

    Collective over the group if there are such parameters. Raises CheckpointError on every rank for what
    `describe_optimizers` does.
    """
    ranks = (0,) if is_alone() else compat.ranks_of(compat.group_of(group))
    firsts = _find_firsts(model, ranks)
    return _gather_reports(firsts, partial(_report_state, model, optimizer, firsts), group)


def tell_names(model: Model, optimizer: Optimizers, group: ProcessGroup | None) -> Elsewhere:
    """Gather from all ranks the names of the optimizers' parameters that some ranks of `group` lack, and return an
    Elsewhere with only these names, by parameter group. The first rank that holds a parameter sends its name."""
    ranks = (0,) if is_alone() else compat.ranks_of(compat.group_of(group))
    firsts = _find_firsts(model, ranks)
    return _gather_reports(firsts, partial(_report_names, model, optimizer, firsts), group)


def tell_among_meshes(model: Model, optimizer: Optimizers, tensors: Iterable[Tensor]) -> Elsewhere:
    """Gather and return reports on optimizer state as `tell_state` does, but among the ranks on the meshes of `model`.
    Unless these are all ranks, their process group is taken from a DTensor in `tensors`, whose one-dimensional mesh has
    just these ranks.

    Raises CheckpointError if these ranks have no group, and on a rank that is on no mesh.
    """
    ranks = sorted({rank for slot in model.slots.values() for rank in slot.layout.mesh.ranks})
    if is_alone() or not ranks:
        return NOWHERE
    if rank_or_0() not in ranks:
        what = f"rank {rank_or_0()} is not on a mesh of the module, whose ranks are {shown(ranks)}"
        fix = "give group= of all ranks that call, this one too"
        raise CheckpointError(f"{what}, so it cannot know their optimizer state; {fix}")
    firsts = _find_firsts(model, ranks)
    if not firsts:
        return NOWHERE
    group = _find_group(ranks, tensors)
    return _gather_reports(firsts, partial(_report_state, model, optimizer, firsts), group)


def _find_group(ranks: Sequence[int], tensors: Iterable[Tensor]) -> ProcessGroup | None:
    """An existing group of exactly these ranks, None for the default one; making one is collective over all ranks."""
    absent = sorted(set(range(dist.get_world_size())) - set(ranks))
    if not absent:
        return None
    for tensor in tensors:
        if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1:
            continue
        if set(mesh_of(tensor.device_mesh).ranks) == set(ranks):
            return compat.groups_of_axes(tensor.device_mesh)[0]
    what = (
        f"ranks {shown(absent)} are not on a mesh of the module, and no mesh of one axis has just"
    )
    why = f"the others, {shown(list(ranks))}, on which to exchange their optimizer state"
    fix = "give group= of the ranks that call: of these others, or torch.distributed.group.WORLD"
    raise CheckpointError(f"{what} {why}; {fix}")


def _find_firsts(model: Model, ranks: Sequence[int]) -> dict[str, int | None]:
    """The first rank that holds each tensor that not all of `ranks` hold, by name; None if none of them does."""
    meshes = {slot.layout.mesh for slot in model.slots.values()}
    ranks_by_mesh = {mesh: [rank for rank in ranks if rank in mesh] for mesh in meshes}
    firsts = {}
    for name, slot in model.slots.items():
        holders = ranks_by_mesh[slot.layout.mesh]
        if len(holders) < len(ranks):
            firsts[name] = min(holders, default=None)
    return firsts


def _gather_reports(
    firsts: Mapping[str, int | None],
    make_report: Callable[[], dict[str, Any]],
    group: ProcessGroup | None,
) -> Elsewhere:
    """Gather the reports of all ranks in the group, and join them; without tensors in `firsts`, which not all ranks
    hold, there is nothing to report."""
    if is_alone() or not firsts:
        return NOWHERE
    # A separate step name: a rank that found other meshes is in another step, which raises at once.
    report = on_all("describe what lies on separate meshes", make_report, group)
    _, group_size = share_of(group)
    reports = gather_all("report what lies only on it", report, group_size, group)
    return on_all("read what lies on separate meshes", partial(_join_reports, reports), group)


def _join_reports(reports: Iterable[Mapping[str, Any]]) -> Elsewhere:
    """All ranks' reports as one."""
    entries: dict[str, Entries] = {}
    groups: list[SavedGroup] = []
    for each in reports:
        entries |= read_entries(each["entries"])
        groups += read_groups(each["groups"])
    return Elsewhere(entries, tuple(groups))


def _report_state(
    model: Model, optimizer: Optimizers, firsts: Mapping[str, int | None]
) -> dict[str, Any]:
    """The state entries and groups, as JSON, of the parameters that this rank reports to others."""
    state = describe_optimizers(model, optimizer)
    entries = {name: each for name, each in state.entries.items() if _is_reporter(name, firsts)}
    groups = _keep_reported(state.groups or (), firsts)
    return {"entries": write_entries(entries), "groups": write_groups(groups)}


def _report_names(
    model: Model, optimizer: Optimizers, firsts: Mapping[str, int | None]
) -> dict[str, Any]:
    """Groups, as JSON, with the names of the parameters that this rank reports, and no options. `firsts` has the rank
    that reports each parameter."""
    groups = [SavedGroup(tuple(group.parameters), {}) for group in find_groups(model, optimizer)]
    return {"entries": {}, "groups": write_groups(_keep_reported(groups, firsts))}


def _keep_reported(
    groups: Iterable[SavedGroup], firsts: Mapping[str, int | None]
) -> list[SavedGroup]:
    """The groups, reduced to the parameters that this rank reports; `firsts` has the first rank that holds each."""
    kept = []
    for group in groups:
        names = tuple(name for name in group.parameters if _is_reporter(name, firsts))
        if names:
            kept.append(group.keep(names))
    return kept


def _is_reporter(name: str, firsts: Mapping[str, int | None]) -> bool:
    """Whether this rank reports the parameter to the others."""
    return firsts.get(name) == rank_or_0()


BY_RANK = (
    "if each rank has the state of some parameters, give every rank an optimizer of all of them, and all of their "
    "state before each save, by broadcasts from the rank that has it; or divide the parameters by FSDP2"
)


def advise(what: str) -> str:
    """Return advice to end an error about values (described by `what`) that differ among ranks: to pass the same
    arguments on all ranks. If `what` begins with "the optimizer of " or "'optim.state.", the advice is to give every
    rank the full optimizer state, or to use FSDP2."""
    return BY_RANK if what.startswith(("'optim.state.", "the optimizer of ")) else SAME
