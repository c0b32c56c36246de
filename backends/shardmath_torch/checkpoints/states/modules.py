"""Modules: this rank's memory of what a module holds, with layouts, by name.

1. Nothing is copied: a slot's tensor is the storage of a parameter or a buffer.
2. A parameter with several names has one slot, under the first. Parts of names that `torch.compile` and activation
   checkpointing add are removed.
3. A plain tensor is the same on all ranks of a mesh, unless it says which part it is; DTensors have the layout that
   `layout_of` gives.
4. A buffer that ranks hold whole is saved from one of them: unlike parameters, buffers often differ between ranks.
5. If placements may stand for two layouts, the local shapes of other ranks decide. A module's DTensors may be on
   several meshes with separate groups, in which a failed rank would not be noticed. So local shapes are gathered once,
   over the group of the call.

>>> model = model_of(describe(nn.Linear(3, 2)), mesh=Mesh(world=1))
>>> [(name, str(slot.layout)) for name, slot in model.slots.items()]
[('weight', 'float32[2, 3] n h on world=1'), ('bias', 'float32[2] n on world=1')]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from shardmath_torch.tensors.conversions.unwrapped import WRAPPERS, is_wrapper, strip_wrappers
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
    "call_load_hooks",
    "check_one_value",
    "check_slots",
    "describe",
    "list_saved_layouts",
    "model_of",
]

_T = TypeVar("_T")

FSDP1 = "_fsdp_wrapped_module"
"""The name of the module inside a unit of FSDP1."""


class ModuleSlot(NamedTuple):
    """This rank's local tensor of a module's parameter or buffer, and the layout of the whole tensor."""

    local: Tensor
    layout: Layout


class Description(NamedTuple):
    """A module before its layouts are known: its parameters, persistent buffers and extra states by name, and all names
    of each (a shared parameter has several).

    `names` has all names by the first one, `first` the first name of each parameter by id.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    extra: dict[str, Extra]
    names: dict[str, list[str]]
    first: dict[int, str]

    @property
    def claim(self) -> dict[str, str]:
        """The facts about the module that must be equal on all ranks, as a dict of texts, such as a tensor's name ->
        its dtype and shape."""
        tensors = self.parameters | self.buffers
        claims = {}
        for name, tensor in tensors.items():
            claims[repr(name)] = _claim_tensor(name, tensor)
        claims |= {repr(name): "an extra state" for name in self.extra}
        for names in self.names.values():
            if len(names) > 1:
                claims |= {f"the first name of {name!r}": repr(names[0]) for name in names}
        claims["the order of its tensors"] = digest(list(tensors))[:12]
        return claims


def _claim_tensor(name: str, tensor: Tensor) -> str:
    """The dtype, shape and placements of a tensor as text, which must be the same on all ranks."""
    if is_checkpointable(tensor):
        return f"part of {tensor.dtype}{list(read_boxes(name, tensor).shape)}"
    placements = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype}{list(tensor.shape)}{placements}"


class Model(NamedTuple):
    """A module with layouts: its local tensors with their layouts, its extra states, and all names of each (a shared
    parameter has several).

    `slots`, `extra` and `names` are by first name; `parameters` has the first name of each parameter by id.
    """

    slots: dict[str, ModuleSlot]
    extra: dict[str, Extra]
    names: dict[str, list[str]]
    parameters: dict[int, str]


# Describing a module


def describe(module: nn.Module) -> Description:
    """Return the parameters, persistent buffers and extra states of `module` by name, without communication. The call
    makes FSDP2 reshard any parameters that it has gathered.

    Raises CheckpointError for a value that is not a module, a module under FSDP1, an extra state that is not bytes, a
    tensor without a shape, and two names that are equal without wrappers' parts.
    """
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"the module is {shown(module)}, not a torch.nn.Module; give one")
    _check_not_flat(module)
    state = _unwrap(module.state_dict(keep_vars=True).items())
    parameters = _unwrap(module.named_parameters(remove_duplicate=False))
    all_buffers = _unwrap(module.named_buffers(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in all_buffers.items() if name in state}
    tensors = parameters | buffers
    extra = {}
    for name in state:
        if name not in tensors:
            extra[name] = pack_extra(_find_owner(module, name), name, state[name])
    for name, tensor in tensors.items():
        check_shaped(name, tensor)
    first_by_id, names_by_first = _list_names(parameters)
    names_by_first |= {name: [name] for name in (*buffers, *extra)}
    return Description(module, parameters, buffers, extra, names_by_first, first_by_id)


def _check_not_flat(module: nn.Module) -> None:
    """Raise CheckpointError for a module under FSDP1."""
    # Inside a unit, names do not show that parameters are parts.
    is_unit = any(FSDP1 in name.split(".") for name, _ in module.named_modules())
    if is_unit or compat.find_flattened(module):
        raise CheckpointError(
            "the module is under FSDP1 (FullyShardedDataParallel), which joins parameters and shards them together; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard)"
        )


def _list_names(
    parameters: Mapping[str, nn.Parameter],
) -> tuple[dict[int, str], dict[str, list[str]]]:
    """The first name of each parameter by id, and all its names by the first."""
    first_names: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        first_name = first_names.setdefault(id(parameter), name)
        names.setdefault(first_name, []).append(name)
    return first_names, names


def _unwrap(named: Iterable[tuple[str, _T]]) -> dict[str, _T]:
    """The values by names without wrappers' parts. Raises CheckpointError if two names become one."""
    unwrapped: dict[str, _T] = {}
    for name, value in named:
        stripped = strip_wrappers(name)
        if stripped in unwrapped:
            what = f"{name!r} and another tensor of the module are both {stripped!r}"
            without = f"without {' and '.join(WRAPPERS)}, which are left out of saved names"
            raise CheckpointError(f"{what} {without}; rename one of the modules")
        unwrapped[stripped] = value
    return unwrapped


def _find_owner(module: nn.Module, name: str) -> nn.Module:
    """The submodule whose extra state has that name. Raises CheckpointError if there is none."""
    path, _, last = name.rpartition(".")
    if last == "_extra_state":
        # A module with several names has an extra state under each.
        parts: Iterable[tuple[str, nn.Module]] = module.named_modules(remove_duplicate=False)
        for part_path, part in parts:
            # Stripped of wrappers, a wrapper and the module inside it have the same path. The module is meant.
            if strip_wrappers(part_path) == path and not is_wrapper(part):
                return part
    what = (
        f"the module's state dict has {name!r}, not a parameter, a buffer or an extra state of it"
    )
    raise CheckpointError(f"{what}; remove the state_dict hook that adds it")


# Layouts


def agree_on_model(module: nn.Module, mesh: Mesh | None, group: Group | None) -> Model:
    """Return a Model of `module` (this rank's tensors with their layouts), after all ranks compared their modules;
    plain tensors count as replicated on `mesh`. Collective over `group`; raises CheckpointError if modules differ."""
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
    """Return the parameters and buffers in `described`, each as this rank's part with its layout; plain tensors count
    as replicated on `mesh`. The function `ask` takes sharded tensors by name, and returns each rank's part of each
    tensor: local shapes of DTensors, index ranges of CheckpointableTensors.

    The default of `mesh` is the DTensors' largest mesh, or the ranks of `group`. Without `ask` the call is collective
    if `layout_of` is.

    Raises CheckpointError for a plain tensor on a rank that is not on the mesh.
    """
    module, parameters, buffers, extra, names, first_names = described
    mesh = mesh or _mesh_of_group(module, group)
    # `lay_out` names parameters as the module does, `described` without the wrappers' parts of names.
    laid_out = lay_out(module, mesh, _ask_renamed(ask, strip_wrappers))
    layouts = {strip_wrappers(name): layout for name, layout in laid_out.items()}
    layouts |= _lay_out_buffers(buffers, layouts.values(), mesh, ask)
    tensors = parameters | buffers
    _check_on_mesh(tensors, layouts)
    slots = {}
    for name in names:
        if name in tensors:
            slots[name] = ModuleSlot(local_part(name, tensors[name]), layouts[name])
    return Model(slots, extra, names, first_names)


def _mesh_of_group(module: nn.Module, group: Group | None) -> Mesh | None:
    """The mesh of the group's ranks; None without a group, or if the module's DTensors give a mesh."""
    if group is None or any(isinstance(p, DTensor) for p in module.parameters()):
        return None
    ranks = ranks_of(group)
    return Mesh(world=len(ranks), ranks=ranks)


def _lay_out_buffers(
    buffers: dict[str, Tensor], others: Iterable[Layout], mesh: Mesh | None, ask: Ask | None
) -> dict[str, Layout]:
    """Lay out buffers as parameters are, on the parameters' mesh."""
    meshes = (layout.mesh for layout in others)
    mesh = mesh or max(meshes, key=lambda mesh: mesh.size, default=None)
    # `lay_out` takes a module: one with the buffers as parameters, which it names "0", "1", and so on.
    listed = nn.ParameterList()
    for buffer in buffers.values():
        parameter = nn.Parameter(buffer.detach(), requires_grad=False)
        keep_boxes(buffer, parameter)
        listed.append(parameter)
    buffer_names = list(buffers)
    layouts = lay_out(listed, mesh, _ask_renamed(ask, lambda number: buffer_names[int(number)]))
    return dict(zip(buffers, layouts.values(), strict=True))


def _check_on_mesh(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    rank = rank_or_0()
    for name, tensor in tensors.items():
        mesh = layouts[name].mesh
        if rank not in mesh and not isinstance(tensor, DTensor):
            what = f"rank {rank} has {name!r} in its module, but is not on the mesh {mesh}"
            fix = "give mesh= of all ranks that have the module, or group= of only the mesh's ranks"
            raise CheckpointError(f"{what}, ranks {list(mesh.ranks[:8])}; {fix}")


def list_saved_layouts(model: Model) -> dict[str, Layout]:
    """Return the layouts under which the tensors of `model` are saved, by name: their own, but of a buffer that ranks
    hold whole, one on the lowest of these ranks alone.

    Ranks may have different values in such buffers, as in BatchNorm's, and a save writes parts of several copies.
    """
    parameters = set(model.parameters.values())
    layouts = {}
    for name, (_, layout) in model.slots.items():
        # Equal layouts are one object.
        whole = Layout(layout.shape, layout.mesh, {}, dtype=layout.dtype)
        if name not in parameters and layout is whole:
            lowest = Mesh(ranks=[min(layout.mesh.ranks)])
            layout = Layout(layout.shape, lowest, {}, dtype=layout.dtype)
        layouts[name] = layout
    return layouts


# Asking other ranks


def ask_group(tensors: Mapping[str, Tensor], group: Group | None) -> Ask | None:
    """Gather from all ranks which part of each of `tensors` they hold. Returns a function that takes tensors by name
    and returns each rank's part of each tensor, or None if there is nothing to gather.

    Given tensors by name, the function returns name -> rank -> part: a DTensor's local shape, or the index ranges of a
    checkpointable tensor. There is nothing to gather if `tensors` has neither. All ranks must have such tensors under
    the same names. Raises CheckpointError if a rank is lost.
    """
    own_parts: dict[str, Shape | LocalRuns] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            own_parts[name] = tuple(local_of(tensor).shape)
        elif is_checkpointable(tensor):
            own_parts[name] = read_boxes(name, tensor)
    if not own_parts or is_alone():
        return None
    _, count = share_of(group)
    gathered = gather_all("find out how its tensors lie", own_parts, count, group)
    ranks = ranks_of(compat.group_of(group))
    parts_by_rank: dict[int, dict[str, Any]] = dict(zip(ranks, gathered, strict=True))

    def ask(unsure: Mapping[str, Tensor]) -> dict[str, dict[int, Any]]:
        return {name: _find_held(name, tensor, parts_by_rank) for name, tensor in unsure.items()}

    return ask


def _find_held(
    name: str, tensor: Tensor, parts_by_rank: Mapping[int, Mapping[str, Any]]
) -> dict[int, Any]:
    """The part that each rank of a DTensor's mesh, or every rank, holds. Raises CheckpointError if the group lacks
    one."""
    parts = {}
    ranks = mesh_of(tensor.device_mesh).ranks if isinstance(tensor, DTensor) else parts_by_rank
    for rank in ranks:
        if rank not in parts_by_rank:
            has = f"the group has only ranks {sorted(parts_by_rank)[:8]}"
            what = f"the mesh of tensor {name!r} has rank {rank}, but {has}"
            raise CheckpointError(f"{what}; give group= of all ranks that hold the tensor")
        parts[rank] = parts_by_rank[rank][name]
    return parts


def _ask_renamed(ask: Ask | None, spell: Callable[[str], str]) -> Ask | None:
    """An `ask` that takes tensors under other names: `spell` turns each into the name that `ask` knows."""
    if ask is None:
        return None

    def asked(unsure: Mapping[str, Tensor]) -> dict[str, Mapping[int, Any]]:
        answers = ask({spell(name): tensor for name, tensor in unsure.items()})
        return {name: answers[spell(name)] for name in unsure}

    return asked


# Whether slots can be filled


def check_slots(model: Model) -> None:
    """Raise CheckpointError if a tensor of `model` cannot be written to, or if two tensors that differ in address,
    shape, strides or dtype share memory.

    Slots that are one tensor are allowed, and take one value (`check_one_value`); disjoint views of a buffer are, too.
    """
    names: dict[MemorySpot | None, str] = {}
    for name, slot in model.slots.items():
        why = say_unwritable(slot.local)
        if why:
            raise CheckpointError(
                f"{name!r} {why}; give the module a tensor with its own memory, such as a clone"
            )
        names.setdefault(spot_of(slot.local), name)
    for spot, other in find_meetings(slot.local for slot in model.slots.values()):
        what = f"{names[spot]!r} and {names[other]!r} have a part of their memory in common"
        fix = "give each a tensor with its own memory, such as a clone"
        raise CheckpointError(f"{what}, so loading one would overwrite the other; {fix}")


def check_one_value(model: Model, found: Mapping[str, Tensor], prefix: str = "") -> None:
    """Raise CheckpointError if two names in `model` stand for the same memory, but have different values in `found`, a
    dict of the loaded tensors by `prefix` + name."""
    firsts: dict[MemorySpot, str] = {}
    for name, slot in model.slots.items():
        spot = spot_of(slot.local)
        # No memory, as of an empty tensor, is shared with nothing.
        if spot is None or prefix + name not in found:
            continue
        # Two parameters of one memory are two slots, unlike one parameter of two names.
        first = firsts.setdefault(spot, name)
        if first == name:
            continue
        values = [found[prefix + each].to(spot.dtype) for each in (first, name)]
        if not has_same_bits(*values):
            what = f"{first!r} and {name!r} are one tensor here, but differ in the checkpoint"
            fix = "untie them before loading, and tie them again if their values are equal"
            raise CheckpointError(f"{what}; {fix}")


# Hooks


def call_load_hooks(
    module: nn.Module, missing: Iterable[str] = (), unexpected: Iterable[str] = ()
) -> None:
    """Call the hooks that torch calls after a module's `load_state_dict`, as it does: on each submodule before the
    module that has it. The hooks get the names that only the module (`missing`) or only the checkpoint has."""
    keys = compat.IncompatibleKeys(list(missing), list(unexpected))
    for part in _list_inner_first(module, seen=set()):
        for hook in list(part._load_state_dict_post_hooks.values()):
            hook(part, keys)


def _list_inner_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """The module and its submodules, each once and after its own submodules."""
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _list_inner_first(child, seen)
    yield module
