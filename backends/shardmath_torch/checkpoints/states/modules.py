"""Modules: this rank's memory of what a module holds, with layouts, by name.

1. Nothing is copied: a slot's tensor is the storage of a parameter or a buffer.
2. A parameter with several names has one slot, under the first. Names that `torch.compile` and
   activation checkpointing add are left out.
3. What is plain is the same on all ranks of a mesh, unless it says which part it is; DTensors lie as `layout_of` says.
4. Where placements may stand for two layouts, the local shapes of other ranks tell which. A module's DTensors may be on
   several meshes, each with groups of its own; of these a rank that has failed cannot be heard. So all ranks of the
   group of the call are asked at once.

>>> model = model_of(describe(nn.Linear(3, 2)), mesh=Mesh(world=1))
>>> [(name, str(slot.layout)) for name, slot in model.slots.items()]
[('weight', 'float32[2, 3] n h on world=1'), ('bias', 'float32[2] n on world=1')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath.base.digest import digest
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.files.steps import gather_all, is_alone, on_all, share_of
from shardmath_torch.checkpoints.states.memory import (
    MemorySpot,
    check_shaped,
    find_meetings,
    has_same_bits,
    local_part,
    say_unwritable,
    spot_of,
)
from shardmath_torch.checkpoints.states.values import Extra, pack_extra
from shardmath_torch.groups import compat
from shardmath_torch.groups.compat import Group, rank_or_0, ranks_of
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of
from shardmath_torch.tensors.dtensors.dtensor import Ask, local_of
from shardmath_torch.tensors.dtensors.modules import lay_out
from shardmath_torch.tensors.dtensors.placements import Shape
from shardmath_torch.tensors.parts.checkpointable import (
    LocalRuns,
    is_checkpointable,
    keep_boxes,
    read_boxes,
)

__all__ = [
    "Description",
    "Model",
    "ModuleSlot",
    "agree_on_model",
    "ask_group",
    "check_one_value",
    "check_slots",
    "describe",
    "model_of",
]

_T = TypeVar("_T")

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers put into names, between dots."""


class ModuleSlot(NamedTuple):
    """Memory of this rank, and the layout of the tensor that it is part of."""

    local: Tensor
    layout: Layout


class Description(NamedTuple):
    """A module without layouts: parameters by name, buffers, extra states, all names by first name, first names of
    parameters by id."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    extra: dict[str, Extra]
    names: dict[str, list[str]]
    first: dict[int, str]

    @property
    def claim(self) -> dict[str, str]:
        """What has to be the same on all ranks."""
        tensors = self.parameters | self.buffers
        said = {}
        for name, tensor in tensors.items():
            said[repr(name)] = _describe_tensor(name, tensor)
        said |= {repr(name): "an extra state" for name in self.extra}
        for names in self.names.values():
            if len(names) > 1:
                said |= {f"the first name of {name!r}": repr(names[0]) for name in names}
        said["the order of its tensors"] = digest(list(tensors))[:12]
        return said


def _describe_tensor(name: str, tensor: Tensor) -> str:
    """What has to be the same of it on all ranks."""
    if is_checkpointable(tensor):
        return f"part of {tensor.dtype}{list(read_boxes(name, tensor).shape)}"
    divided = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype}{list(tensor.shape)}{divided}"


class Model(NamedTuple):
    """A module: slots by first name, extra states, all names by first name, first names of parameters by id."""

    slots: dict[str, ModuleSlot]
    extra: dict[str, Extra]
    names: dict[str, list[str]]
    parameters: dict[int, str]


# What a module has


def describe(module: nn.Module) -> Description:
    """What the module has. Talks to nobody. Has FSDP2 take back first what it gathered.

    Raises CheckpointError for a value that is not a module, an extra state that is not bytes, a tensor without a shape,
    and two names that are one without wrappers.
    """
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"the module is {shown(module)}; give a torch.nn.Module")
    kept = _unwrap(module.state_dict(keep_vars=True).items())
    parameters = _unwrap(module.named_parameters(remove_duplicate=False))
    all_buffers = _unwrap(module.named_buffers(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in all_buffers.items() if name in kept}
    tensors = parameters | buffers
    extra = {}
    for name in kept:
        if name not in tensors:
            extra[name] = pack_extra(_find_owner(module, name), name, kept[name])
    for name, tensor in tensors.items():
        check_shaped(name, tensor)
    first, names = _list_names(parameters)
    names |= {name: [name] for name in (*buffers, *extra)}
    return Description(module, parameters, buffers, extra, names, first)


def _list_names(
    parameters: Mapping[str, nn.Parameter],
) -> tuple[dict[int, str], dict[str, list[str]]]:
    """First names of parameters by id, and all names by first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        first_name = first.setdefault(id(parameter), name)
        names.setdefault(first_name, []).append(name)
    return first, names


def _unwrap(named: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    """By names without wrappers. Raises CheckpointError where two become one."""
    unwrapped: dict[str, _T] = {}
    for name, value in named:
        stripped = _strip_wrappers(name)
        if stripped in unwrapped:
            what = f"without {' and '.join(WRAPPERS)}, several names are {stripped!r}"
            raise CheckpointError(f"{what}; name modules otherwise")
        unwrapped[stripped] = value
    return unwrapped


def _strip_wrappers(name: str) -> str:
    parts = name.split(".")
    return ".".join(part for part in parts if part not in WRAPPERS)


def _find_owner(module: nn.Module, name: str) -> nn.Module:
    """The part of the module whose extra state has that name. Raises CheckpointError where the name is not of one."""
    path, _, last = name.rpartition(".")
    parts: list[tuple[str, nn.Module]] = list(module.named_modules())
    for part_path, part in parts:
        is_owner = last == "_extra_state" and _strip_wrappers(part_path) == path
        if is_owner and not _is_wrapper(part):
            return part
    what = f"{name!r} of the state dict is not a parameter, a buffer or an extra state"
    raise CheckpointError(f"{what}; remove its hook")


def _is_wrapper(module: nn.Module) -> bool:
    return not module._modules.keys().isdisjoint(WRAPPERS)


# Where it lies


def agree_on_model(module: nn.Module, mesh: Mesh | None, group: Group | None) -> Model:
    """The module with its layouts, about which ranks talk only when all have described the same."""
    described = on_all(
        "describe its module", lambda: describe(module), group, claim=lambda found: found.claim
    )
    ask = ask_group(described.parameters | described.buffers, group)
    return on_all(
        "lay out its module", lambda: model_of(described, mesh=mesh, group=group, ask=ask), group
    )


def model_of(
    described: Description,
    *,
    mesh: Mesh | None = None,
    group: Group | None = None,
    ask: Ask | None = None,
) -> Model:
    """Its parameters, persistent buffers and extra states. Collective where `layout_of` is, unless `ask` knows.

    What is plain is replicated on `mesh`, by default the largest of the DTensors', or the ranks of the group.

    Raises CheckpointError for what is plain on a rank that the mesh lacks.
    """
    module, parameters, buffers, extra, names, first = described
    mesh = mesh or _mesh_of_group(module, group)
    laid_out = lay_out(module, mesh, _rename(ask, _strip_wrappers))
    layouts = {_strip_wrappers(name): layout for name, layout in laid_out.items()}
    layouts |= _lay_out_buffers(buffers, layouts.values(), mesh, ask)
    tensors = parameters | buffers
    _check_on_mesh(tensors, layouts)
    slots = {}
    for name in names:
        if name in tensors:
            slots[name] = ModuleSlot(local_part(name, tensors[name]), layouts[name])
    return Model(slots, extra, names, first)


def _mesh_of_group(module: nn.Module, group: Group | None) -> Mesh | None:
    """The ranks of the group, if the module does not say where it is."""
    if group is None or any(isinstance(p, DTensor) for p in module.parameters()):
        return None
    ranks = ranks_of(group)
    return Mesh(world=len(ranks), ranks=ranks)


def _lay_out_buffers(
    buffers: dict[str, Tensor], others: Iterable[Layout], mesh: Mesh | None, ask: Ask | None
) -> dict[str, Layout]:
    """As if they were parameters, on the mesh of those."""
    meshes = (layout.mesh for layout in others)
    mesh = mesh or max(meshes, key=lambda mesh: mesh.size, default=None)
    listed = nn.ParameterList()
    for buffer in buffers.values():
        parameter = nn.Parameter(buffer.detach(), requires_grad=False)
        keep_boxes(buffer, parameter)
        listed.append(parameter)
    own_names = list(buffers)
    layouts = lay_out(listed, mesh, _rename(ask, lambda place: own_names[int(place)]))
    return dict(zip(buffers, layouts.values(), strict=True))


def _check_on_mesh(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    rank = rank_or_0()
    for name, tensor in tensors.items():
        mesh = layouts[name].mesh
        if rank not in mesh and not isinstance(tensor, DTensor):
            what = f"rank {rank} has {name!r} in its module, and is not on the mesh {mesh}"
            fix = "give a mesh of all ranks that have the module, or a group of those on the mesh"
            raise CheckpointError(f"{what}, ranks {list(mesh.ranks[:8])}; {fix}")


# How DTensors lie


def ask_group(tensors: Mapping[str, Tensor], group: Group | None) -> Ask | None:
    """The local shapes of these DTensors, and the boxes of checkpointable tensors, on all ranks of the group, gathered
    now; None where there are neither.

    All ranks are known to have both under the same names. Raises CheckpointError where one is gone.
    """
    mine: dict[str, Shape | LocalRuns] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mine[name] = tuple(local_of(tensor).shape)
        elif is_checkpointable(tensor):
            mine[name] = read_boxes(name, tensor)
    if not mine or is_alone():
        return None
    _, count = share_of(group)
    said = gather_all("find out how its tensors lie", mine, count, group)
    ranks = ranks_of(compat.group_of(group))
    held: dict[int, dict[str, Any]] = dict(zip(ranks, said, strict=True))

    def ask(unsure: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
        return {name: _find_held(name, tensor, held) for name, tensor in unsure.items()}

    return ask


def _find_held(name: str, tensor: Tensor, held: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    """What ranks said of a tensor, those of a DTensor's mesh or all. Raises CheckpointError if the group lacks one."""
    found = {}
    ranks = mesh_of(tensor.device_mesh).ranks if isinstance(tensor, DTensor) else held
    for rank in ranks:
        if rank not in held:
            what = f"tensor {name!r} is on rank {rank} too, the group has {sorted(held)[:8]}"
            raise CheckpointError(f"{what}; give a group of all ranks that hold it")
        found[rank] = held[rank][name]
    return found


def _rename(ask: Ask | None, spell: Callable[[str], str]) -> Ask | None:
    """The same, asked about tensors under other names, which `spell` turns into its own."""
    if ask is None:
        return None

    def asked(unsure: Mapping[str, Tensor]) -> dict[str, Mapping[int, Any]]:
        own = {spell(name): tensor for name, tensor in unsure.items()}
        answers = ask(own)
        return {name: answers[spell(name)] for name in unsure}

    return asked


# Whether it can be filled


def check_slots(model: Model) -> None:
    """Raises CheckpointError for memory that cannot take what is stored, before any does.

    Slots that are one tensor take one value (`check_one_value`); parts of one buffer that do not meet are apart.
    """
    names: dict[MemorySpot | None, str] = {}
    for name, slot in model.slots.items():
        why = say_unwritable(slot.local)
        if why:
            raise CheckpointError(
                f"{name!r} {why}; give the module a tensor with memory of its own, such as a clone"
            )
        names.setdefault(spot_of(slot.local), name)
    for one, other in find_meetings(slot.local for slot in model.slots.values()):
        what = f"{names[one]!r} and {names[other]!r} have a part of their memory in common"
        fix = "give each a tensor with memory of its own, such as a clone"
        raise CheckpointError(f"{what}, and are stored apart; {fix}")


def check_one_value(model: Model, found: Mapping[str, Tensor], prefix: str = "") -> None:
    """Raises CheckpointError where slots are one tensor, and several values of it were found, by prefix and name."""
    firsts: dict[MemorySpot, str] = {}
    for name, slot in model.slots.items():
        spot = spot_of(slot.local)
        if spot is None or prefix + name not in found:
            continue
        first = firsts.setdefault(spot, name)
        if first == name:
            continue
        values = [found[prefix + one].to(spot.dtype) for one in (first, name)]
        if not has_same_bits(*values):
            what = f"{first!r} and {name!r} are one tensor here, and differ in the checkpoint"
            raise CheckpointError(f"{what}; load them apart, and tie them when they are equal")
