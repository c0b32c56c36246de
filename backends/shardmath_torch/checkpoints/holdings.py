"""What a module and its optimizers hold: this rank's memory, with layouts, by name.

1. Nothing is copied: a slot's tensor is the storage of a parameter, a buffer, or a tensor of an optimizer's state.
2. A parameter with several names has one slot, under the first. Names that `torch.compile` and activation checkpointing
   add are left out.
3. State of its parameter's shape, as a moment is, lies as its parameter does; scalars, and all other state of plain
   parameters, are replicated. Of other state of DTensors it is not known what a rank holds: that is an error.
4. What an optimizer has that is no tensor is JSON: numbers, text, None, lists, tuples, dicts; and so are tensors among
   the options of a group, such as a learning rate.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardmath.algebra.mesh import Mesh
from shardmath.base.digest import digest
from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.given import plural
from shardmath.layouts.edits import cast as _of_dtype
from shardmath.layouts.layout import Layout
from shardmath_torch.checkpoints.saving import as_tensor
from shardmath_torch.compat import Group, rank_or_0, ranks_of
from shardmath_torch.dtensors.dtensor import local_of
from shardmath_torch.dtensors.modules import layout_of
from shardmath_torch.dtypes import dtype_of
from shardmath_torch.exchange.apart import overlaps_itself
from shardmath_torch.exchange.memory import missing_memory, plain
from shardmath_torch.files.json_text import shown
from shardmath_torch.files.places import CheckpointError

__all__ = [
    "KINDS",
    "Description",
    "Extra",
    "Lies",
    "Model",
    "Optimizers",
    "ParameterGroup",
    "Slot",
    "as_bytes",
    "check_shaped",
    "coded",
    "decoded",
    "description",
    "groups_of",
    "layout_by",
    "lies",
    "local_part",
    "model_of",
    "optimizer_of",
    "unwritable",
]

_T = TypeVar("_T")
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
"""One, several that share the parameters out, or none."""


class Slot(NamedTuple):
    """Memory of this rank, and the tensor that it is part of."""

    local: Tensor
    layout: Layout


def local_part(name: str, tensor: Tensor) -> Tensor:
    """The memory of a tensor. Raises CheckpointError where it has none."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device and has no memory; call the module's to_empty() first"
        )
    return local


Lies: TypeAlias = tuple[torch.device, int]
"""Where memory begins."""


def lies(tensor: Tensor) -> Lies:
    """Where the tensor's memory begins: the same for two that are one."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.device, local.data_ptr()


def unwritable(local: Tensor) -> str:
    """Why values cannot be put into the memory: "" where they can; words that follow its name otherwise."""
    if local.layout != torch.strided:
        return f"is stored as {local.layout}"
    if local.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode, outside of which nothing is written to it"
    if plain(local).__class__ is Tensor and missing_memory(local):
        return missing_memory(local)
    if overlaps_itself(local):
        shape, strides = tuple(local.shape), local.stride()
        return f"has shape {shape} and strides {strides}, several elements in one cell"
    return ""


# Extra states


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a 1-d tensor of uint8."""
    return tensor.cpu().numpy().tobytes()


class Kind(NamedTuple):
    """What an extra state may be: the types, and what is made of a tensor of bytes again."""

    types: tuple[type, ...]
    restored: Callable[[Tensor], object]


KINDS = {
    "tensor": Kind((Tensor,), Tensor.clone),
    "file": Kind((io.BytesIO,), lambda data: io.BytesIO(as_bytes(data))),
    "bytes": Kind((bytes, bytearray, memoryview), as_bytes),
    "none": Kind((type(None),), lambda data: None),
}
"""By the word that the checkpoint keeps."""


class Extra(NamedTuple):
    """What a module's get_extra_state gave, as bytes, and which of KINDS it is."""

    module: nn.Module
    kind: str
    packed: Tensor


def _extra(module: nn.Module, name: str, value: object) -> Extra:
    path, _, last = name.rpartition(".")
    if last != "_extra_state":
        raise CheckpointError(
            f"{name!r} of the state dict is no parameter, buffer or extra state; remove its hook"
        )
    kind = next((word for word, kind in KINDS.items() if isinstance(value, kind.types)), None)
    if kind is None or (
        isinstance(value, Tensor) and (value.dtype != torch.uint8 or value.ndim != 1)
    ):
        what = f"extra state {name!r} is of type {type(value).__name__}"
        raise CheckpointError(f"{what}; return bytes, a BytesIO, or a 1-d tensor of uint8")
    owner = next(
        part for at, part in module.named_modules() if _plain(at) == path and not _wraps(part)
    )
    return Extra(owner, kind, as_tensor(name, b"" if value is None else value))


# Modules

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What wrappers put into names, between dots."""


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
    def claim(self) -> str:
        """What has to be the same on all ranks."""
        tensors = {
            name: (str(t.dtype), tuple(t.shape))
            for name, t in (self.parameters | self.buffers).items()
        }
        divided = [
            (name, str(p.placements))
            for name, p in self.parameters.items()
            if isinstance(p, DTensor)
        ]
        return f"a module of {plural(self.names, 'name')}, {digest((tensors, divided, sorted(self.extra)))[:12]}"


class Model(NamedTuple):
    """A module: slots by first name, extra states, all names by first name, first names of parameters by id."""

    slots: dict[str, Slot]
    extra: dict[str, Extra]
    names: dict[str, list[str]]
    parameters: dict[int, str]


def description(module: nn.Module) -> Description:
    """What the module has. Talks to nobody. Has FSDP2 take back first what it gathered.

    Raises CheckpointError for what is no module, an extra state that is not bytes, a tensor without a shape, and two
    names that are one without wrappers.
    """
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"the module is {shown(module)}; give a torch.nn.Module")
    kept = _unwrapped(dict(module.state_dict(keep_vars=True)))
    parameters = _unwrapped(dict(module.named_parameters(remove_duplicate=False)))
    buffers = {
        n: b
        for n, b in _unwrapped(dict(module.named_buffers(remove_duplicate=False))).items()
        if n in kept
    }
    extra = {
        n: _extra(module, n, value)
        for n, value in kept.items()
        if n not in parameters and n not in buffers
    }
    for name, tensor in (parameters | buffers).items():
        check_shaped(name, tensor)
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, p in parameters.items():
        names.setdefault(first.setdefault(id(p), name), []).append(name)
    names |= {name: [name] for name in (*buffers, *extra)}
    return Description(module, parameters, buffers, extra, names, first)


def check_shaped(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError for a type that no layout has, and a nested tensor: its parts have shapes, it has none."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        what = f"{name!r} is {dtype}, a type that layouts do not have"
        raise CheckpointError(f"{what}; give plain numbers, such as its int_repr() or dequantize()")
    if tensor.is_nested:
        what = f"{name!r} is a nested tensor, of {plural(tensor.size(0), 'part')} and no one shape"
        raise CheckpointError(f"{what}; save its parts under names of their own, from unbind()")


def _unwrapped(named: dict[str, _T]) -> dict[str, _T]:
    """By names without wrappers. Raises CheckpointError where two become one."""
    out = {_plain(name): value for name, value in named.items()}
    if len(out) < len(named):
        twice = next(plain for plain, count in Counter(map(_plain, named)).items() if count > 1)
        raise CheckpointError(
            f"without {' and '.join(WRAPPERS)}, several names are {twice!r}; name modules otherwise"
        )
    return out


def model_of(
    described: Description, *, mesh: Mesh | None = None, group: Group | None = None
) -> Model:
    """Its parameters, persistent buffers and extra states. Collective where `layout_of` is.

    What is plain is replicated on `mesh`, by default the largest of the DTensors', or the ranks of the group.

    Raises CheckpointError for what is plain on a rank that the mesh lacks.
    """
    module, parameters, buffers, extra, names, first = described
    mesh = mesh or _mesh(module, group)
    layouts = {_plain(name): layout for name, layout in layout_of(module, mesh=mesh).items()}
    layouts |= _layouts_of_buffers(buffers, layouts.values(), mesh)
    tensors = parameters | buffers
    _check_here(tensors, layouts)
    slots = {
        name: Slot(local_part(name, tensors[name]), layouts[name])
        for name in names
        if name in tensors
    }
    return Model(slots, extra, names, first)


def _check_here(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> None:
    rank = rank_or_0()
    for name, tensor in tensors.items():
        mesh = layouts[name].mesh
        if rank not in mesh and not isinstance(tensor, DTensor):
            what = f"rank {rank} has {name!r} in its module, and is not on the mesh {mesh}"
            fix = "give a mesh of all ranks that have the module, or a group of those on the mesh"
            raise CheckpointError(f"{what}, ranks {list(mesh.ranks[:8])}; {fix}")


def _wraps(module: nn.Module) -> bool:
    return any(wrapper in module._modules for wrapper in WRAPPERS)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _mesh(module: nn.Module, group: Group | None) -> Mesh | None:
    """The ranks of the group, if the module does not say where it is."""
    if group is None or any(isinstance(p, DTensor) for p in module.parameters()):
        return None
    ranks = ranks_of(group)
    return Mesh(world=len(ranks), ranks=ranks)


def _layouts_of_buffers(
    buffers: dict[str, Tensor], others: Iterable[Layout], mesh: Mesh | None
) -> dict[str, Layout]:
    """As if they were parameters, on the mesh of those."""
    mesh = mesh or max((layout.mesh for layout in others), key=lambda mesh: mesh.size, default=None)
    listed = nn.ParameterList(
        [nn.Parameter(buffer.detach(), requires_grad=False) for buffer in buffers.values()]
    )
    return dict(zip(buffers, layout_of(listed, mesh=mesh).values(), strict=True))


# Optimizers

UNVALUED = ("params", "param_names")
"""Keys of a group that say which parameters it has."""


class ParameterGroup(NamedTuple):
    """A parameter group of an optimizer, and its parameters by first name."""

    optimizer: Optimizer
    options: dict[str, Any]
    parameters: dict[str, Tensor]


def groups_of(model: Model, optimizer: Optimizers) -> Iterator[ParameterGroup]:
    """All groups of all optimizers.

    Raises CheckpointError for what is no optimizer, and for a parameter that is not the module's.
    """
    for each in _optimizers(optimizer):
        for options in each.param_groups:
            yield ParameterGroup(each, options, {_name(model, p): p for p in options["params"]})


def _optimizers(given: object) -> tuple[Optimizer, ...]:
    each = () if given is None else (given,) if isinstance(given, Optimizer) else given
    if not isinstance(each, Iterable):
        raise CheckpointError(f"the optimizer is {shown(given)}; give one, several, or None")
    found = tuple(each)
    odd = [one for one in found if not isinstance(one, Optimizer)]
    if odd:
        what = f"an optimizer is {shown(odd[0])}, none of torch.optim"
        raise CheckpointError(f"{what}; give a torch.optim.Optimizer, several, or None")
    return found


def _name(model: Model, parameter: Tensor) -> str:
    if id(parameter) not in model.parameters:
        what = f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of the module's"
        raise CheckpointError(
            f"{what}; make the optimizer last, after fully_shard, of module.parameters()"
        )
    return model.parameters[id(parameter)]


def optimizer_of(model: Model, optimizer: Optimizers) -> tuple[dict[str, Slot], dict[str, Any]]:
    """Slots of the optimizers' tensors by `<parameter>.<key>`, and as JSON, what else there is, and what lies how."""
    slots: dict[str, Slot] = {}
    groups: list[dict[str, Any]] = []
    state: dict[str, dict[str, Any]] = {}
    for group in groups_of(model, optimizer):
        options = {
            k: coded(v, f"{k!r} of a parameter group")
            for k, v in group.options.items()
            if k not in UNVALUED
        }
        groups.append({"parameters": list(group.parameters), "options": options})
        for name, p in group.parameters.items():
            held = _by_text(name, group.optimizer.state.get(p, {}))
            state[name] = {
                key: _entry(f"{key!r} of {name!r}", value, p) for key, value in held.items()
            }
            layout = model.slots[name].layout
            slots |= {
                f"{name}.{key}": Slot(local_part(name, value), layout_by(state[name][key], layout))
                for key, value in held.items()
                if isinstance(value, Tensor)
            }
    return slots, {"groups": None if optimizer is None else groups, "state": state}


def _by_text(name: str, held: Mapping[Any, Any]) -> dict[str, Any]:
    odd = next((key for key in held if not isinstance(key, str)), None)
    if odd is not None:
        raise CheckpointError(
            f"the optimizer's state of {name!r} has the key {odd!r}; keys are text"
        )
    return dict(held)


def _entry(what: str, value: object, parameter: Tensor) -> dict[str, Any]:
    """What is said of a value of a parameter's state: it is `like` the parameter, of its `own` shape, or a `value`."""
    if not isinstance(value, Tensor):
        return {"value": coded(value, what)}
    dtype = str(value.dtype).removeprefix("torch.")
    if _alike(value, parameter):
        return {"like": dtype}
    if isinstance(value, DTensor) or (value.ndim and isinstance(parameter, DTensor)):
        what = f"{what} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}, or other placements"
        raise CheckpointError(
            f"{what}; where it lies is known only of scalars and of state like the parameter"
        )
    return {"own": [dtype, list(value.shape)]}


def _alike(value: Tensor, parameter: Tensor) -> bool:
    if isinstance(value, DTensor) and isinstance(parameter, DTensor):
        lies = [(x.shape, x.device_mesh, x.placements) for x in (value, parameter)]
        return lies[0] == lies[1]
    return value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(
        parameter, DTensor
    )


def layout_by(entry: dict[str, Any], parameter: Layout) -> Layout:
    """The layout of a tensor of the state of a parameter that has this one."""
    if "like" in entry:
        return _of_dtype(parameter, entry["like"])
    dtype, shape = entry["own"]
    return Layout(tuple(shape), parameter.mesh, {}, dtype=dtype)


# Values


def coded(value: object, what: str) -> Any:
    """The value as JSON. Raises CheckpointError where it is none, saying what it is."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [coded(x, what) for x in value]
        case tuple():
            return {"tuple": [coded(x, what) for x in value]}
        case Tensor() if not value.is_complex():
            return {"tensor": [str(value.dtype).removeprefix("torch."), value.tolist()]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: coded(x, what) for key, x in value.items()}}
    raise CheckpointError(
        f"{what} is {value!r}, which JSON cannot say; use numbers, text, lists and tensors"
    )


def decoded(value: Any) -> Any:
    """What was coded."""
    match value:
        case {"tuple": items}:
            return tuple(map(decoded, items))
        case {"tensor": [dtype, items]}:
            return torch.tensor(items, dtype=dtype_of(dtype))
        case {"dict": items}:
            return {key: decoded(x) for key, x in items.items()}
        case list():
            return list(map(decoded, value))
    return value
