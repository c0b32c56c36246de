"""Sources: the tensors of an export and their layouts, from a module, tensors under layouts, or DTensors.

1. A module's tensors are its parameters and persistent buffers, under its own names, or as transformers saves its
   models. A parameter with several names is stored under the first, and the others are tied to it, unless transformers
   would save it in other parts under one of them.
2. A plain tensor among DTensors is the same on all ranks of a mesh, by default the largest of the DTensors', unless it
   says which part it is.
3. Ranks exchange local shapes of DTensors only after all have claimed to export the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.base.arguments import mapping
from shardmath.base.text import shown
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.edits import sliced
from shardmath.layouts.holdings import LayoutOrWindows, Windows, read_windows
from shardmath.layouts.layout import Layout
from shardmath.models.systems.hf import Entry
from shardmath_torch.checkpoints.checkpoint import check_layouts
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.checkpoints.states.memory import check_shaped
from shardmath_torch.checkpoints.states.modules import (
    Model,
    agree_on_model,
    ask_group,
    list_saved_layouts,
)
from shardmath_torch.groups import compat
from shardmath_torch.groups.compat import Group
from shardmath_torch.tensors.conversions.saved import SavedPart, find_parts, record_conversion
from shardmath_torch.tensors.dtensors.dtensor import Ask, from_dtensors, local_of
from shardmath_torch.tensors.dtensors.modules import lift
from shardmath_torch.tensors.parts.checkpointable import from_boxes, is_checkpointable, read_boxes

__all__ = ["ExportSource", "check_source", "describe_source", "lay_out", "list_ranks"]

TIED = "names to names of tensors"


class ExportSource(NamedTuple):
    """Tensors to export, by name: this rank's local tensors, and all ranks' layouts. `tied` maps further names of a
    tensor to the name under which it is stored; `shapes` overrides the layout's shape for tensors that are stored as
    slices of a module's tensor."""

    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Windows]
    tied: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    def entry_of(self, name: str) -> Entry:
        """Return the shape and dtype that the tensor `name` has in the exported files."""
        first = self.layouts[name][0]
        return self.shapes.get(name, first.shape), first.dtype


# Arguments


def check_source(
    tensors: object,
    layouts: Mapping[str, LayoutOrWindows | None] | None,
    tied: object,
    mesh: object,
) -> None:
    """Check arguments of `export`; `tensors` is its argument `source`, a module or a dict of tensors by name. Raises
    CheckpointError for a wrong type, such as a list instead of a tensor, and for a tensor that cannot be exported, such
    as a nested one."""
    if not isinstance(mesh, Mesh | None):
        what = f"mesh= is {shown(mesh)}, not a shardmath.Mesh"
        raise CheckpointError(f"{what}; give mesh=shardmath.Mesh(...), or leave it out")
    if tied is not None:
        _check_tied_names(tied)
    if isinstance(tensors, nn.Module):
        return
    if not isinstance(tensors, Mapping):
        what = f"the model to export is a {type(tensors).__name__}, not a module or a mapping"
        raise CheckpointError(f"{what}; give a torch.nn.Module, or a dict of tensors by name")
    if layouts is not None:
        _check_layouts(layouts)
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = f"the mapping to export has {name!r}: a {type(tensor).__name__}"
            raise CheckpointError(f"{what}; give only names that are str, and tensors")
        check_shaped(name, tensor)


def _check_tied_names(tied: object) -> None:
    """Raise CheckpointError unless `tied` maps names to names."""
    given = mapping(tied, "tied is ", TIED, CheckpointError)
    for name, kept in given.items():
        if not isinstance(name, str) or not isinstance(kept, str):
            what = f"tied= has {shown(name)}: {shown(kept)}, where both must be str"
            raise CheckpointError(f"{what}; give a mapping from {TIED}")


def _check_layouts(layouts: Mapping[str, LayoutOrWindows | None]) -> None:
    """Raise CheckpointError if a value in `layouts` is not a layout, or is None, for bytes that differ per rank."""
    check_layouts(layouts)
    for name, held in layouts.items():
        if held is None:
            what = (
                f"{name!r} has the layout None, for bytes per rank, which safetensors cannot hold"
            )
            raise CheckpointError(f"{what}; leave it out, or give it a layout if it is a tensor")


def describe_source(
    source: nn.Module | Mapping[str, Tensor],
    layouts: Mapping[str, LayoutOrWindows | None] | None,
) -> dict[str, str]:
    """Return texts that must be equal on all ranks, as a dict: under the key "the source", the kind of `source`, such
    as "a module". If `source` is a dict, the key `repr(name)` of each sharded tensor has its global shape, and for a
    DTensor also its dtype, placements and mesh axes."""
    if isinstance(source, nn.Module):
        return {"the source": "a module"}
    claims = {"the source": "tensors" if layouts is None else "tensors with layouts"}
    for name, tensor in source.items():
        if isinstance(tensor, DTensor):
            claims[repr(name)] = f"a DTensor of {_claim_dtensor(tensor)}"
        elif is_checkpointable(tensor):
            claims[repr(name)] = f"part of {list(read_boxes(name, tensor).shape)}"
    return claims


def _claim_dtensor(tensor: DTensor) -> str:
    """The dtype, shape, placements and mesh axes of a DTensor as text, which must be the same on all ranks."""
    mesh = tensor.device_mesh
    form = f"{tensor.dtype}{list(tensor.shape)} {tensor.placements}"
    return f"{form} on axes {mesh.mesh_dim_names} of {tuple(mesh.mesh.shape)}"


# Layouts


def lay_out(
    source: nn.Module | Mapping[str, Tensor],
    layouts: Mapping[str, LayoutOrWindows | None] | None,
    mesh: Mesh | None,
    group: Group | None,
) -> ExportSource:
    """Return this rank's tensors of `source`, and their layouts on all ranks, as an ExportSource; collective if
    `source` is a module or `layouts` is None. With `mesh`, the caller tells which ranks have equal copies of plain (not
    sharded) tensors."""
    if isinstance(source, nn.Module):
        return _lay_out_module(source, mesh, group)
    if layouts is None:
        # Gathers now what `act`, which must not communicate, asks for.
        ask = ask_group(source, group)
        act = partial(_lay_out_dtensors, source, mesh, group, ask)
        return on_all("lay out its tensors", act, group)
    tensor_layouts = {name: layout for name, layout in layouts.items() if layout is not None}
    return ExportSource(source, read_windows(tensor_layouts, CheckpointError), {}, {})


def _lay_out_module(module: nn.Module, mesh: Mesh | None, group: Group | None) -> ExportSource:
    """Return the tensors of a module with their layouts, once all ranks have described the same module."""
    model = agree_on_model(module, mesh, group)
    return on_all("export its module", partial(_take_model, module, model), group)


def _take_model(module: nn.Module, model: Model) -> ExportSource:
    """The parameters and buffers of a module as the source of an export. Raises CheckpointError for extra states."""
    if model.extra:
        name = next(iter(model.extra))
        what = (
            f"the module has the extra state {name!r}, but a model's safetensors hold only tensors"
        )
        fix = "call state_of, and export its tensors and layouts without extra states"
        raise CheckpointError(f"{what}; {fix}")
    tied: dict[str, str] = {}
    for first, names in model.names.items():
        tied |= dict.fromkeys(names[1:], first)
    rank = compat.rank_or_0()
    layouts = list_saved_layouts(model)
    # For a DTensor on a mesh without this rank, the module has an empty tensor, which is not a part of it.
    tensors = {name: slot.local for name, slot in model.slots.items() if rank in layouts[name].mesh}
    shapes = {name: (layout.shape, layout.dtype) for name, layout in layouts.items()}
    # transformers would save a tied name's tensor under other names, which are then tied.
    shapes |= {name: shapes[first] for name, first in tied.items()}
    recorded = record_conversion(module, shapes)
    parts = [] if recorded is None else find_parts(recorded)
    return _split_parts(tensors, layouts, tied, parts)


def _split_parts(
    tensors: dict[str, Tensor],
    layouts: dict[str, Layout],
    tied: dict[str, str],
    parts: Sequence[SavedPart],
) -> ExportSource:
    """The tensors to export: `parts`, of which a tensor that is saved whole is one, or without parts the module's
    tensors."""
    if not parts:
        return ExportSource(tensors, read_windows(layouts, CheckpointError), tied, {})
    parts, tied = _tie_parts(parts, tied)
    # A part's local tensor is the whole's, with holes around the part.
    local = {part.name: tensors[part.tensor] for part in parts if part.tensor in tensors}
    part_layouts = {part.name: sliced(layouts[part.tensor], part.box) for part in parts}
    shapes = {part.name: part.shape for part in parts}
    return ExportSource(local, read_windows(part_layouts, CheckpointError), tied, shapes)


def _tie_parts(
    parts: Sequence[SavedPart], tied: Mapping[str, str]
) -> tuple[list[SavedPart], dict[str, str]]:
    """The parts to store, and the names of tied tensors' parts with the names under which these are stored."""
    stored = [part for part in parts if part.tensor not in tied]
    names = {(part.tensor, part.box, part.shape): part.name for part in stored}
    tied_parts = {}
    for part in parts:
        if part.tensor in tied:
            first = tied[part.tensor]
            # Under the other name transformers may save other parts, which are stored, too.
            name = names.setdefault((first, part.box, part.shape), part.name)
            if name == part.name:
                stored.append(part._replace(tensor=first))
            else:
                tied_parts[part.name] = name
    return stored, tied_parts


def _lay_out_dtensors(
    tensors: Mapping[str, Tensor], mesh: Mesh | None, group: Group | None, ask: Ask | None
) -> ExportSource:
    """Return DTensors, and plain tensors that are the same on all ranks of `mesh`, with their layouts."""
    divided = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
    layouts = from_dtensors(divided, ask) | from_boxes(tensors, ask)
    plain_mesh = mesh or _find_mesh(layouts, group)
    # As in a module, a DTensor on a part of the mesh is lifted to all of it, replicated over the parts.
    layouts = {name: lift(layout, plain_mesh) for name, layout in layouts.items()}
    local: dict[str, Tensor] = {}
    rank = compat.rank_or_0()
    for name, tensor in tensors.items():
        if name not in layouts:
            layouts[name] = _lay_out_plain(name, tensor, plain_mesh)
        if rank in layouts[name].mesh:  # else the local tensor is empty
            local[name] = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return ExportSource(local, read_windows(layouts, CheckpointError), {}, {})


def _lay_out_plain(name: str, tensor: Tensor, mesh: Mesh) -> Layout:
    """The replicated layout of a plain tensor on the mesh. Raises CheckpointError if this rank is not on it."""
    rank = compat.rank_or_0()
    if rank not in mesh:
        what = f"rank {rank} has {name!r}, but is not on the mesh {mesh}"
        fix = "give mesh= of all ranks that have it, or group= of only the mesh's ranks"
        raise CheckpointError(f"{what}; {fix}")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Layout(tuple(tensor.shape), mesh, {}, dtype=dtype)


def _find_mesh(layouts: Mapping[str, Layout], group: Group | None) -> Mesh:
    """The largest mesh of the layouts; without layouts, a mesh of all ranks of the group."""
    meshes = [layout.mesh for layout in layouts.values()]
    if meshes:
        return max(meshes, key=lambda mesh: mesh.size)
    ranks = list_ranks(group)
    return Mesh(world=len(ranks), ranks=ranks)


def list_ranks(group: Group | None) -> tuple[int, ...]:
    if not dist.is_initialized():
        return (0,)
    return compat.ranks_of(compat.group_of(group))
