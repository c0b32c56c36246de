"""Placed parameters: what a module remembers of those that tensor parallelism divides, and how its forward sees them.

1. Each module keeps a record of its own parameters, by name, beside them: `fully_shard`, `to_empty`
   and `deepcopy` leave it alone. What is stored is the rank's tensor-parallel part, and under FSDP2
   this rank's chunk of that part.
2. Placements do not say what components a fused weight has, or not beside FSDP2's. So its layout is
   read from the record of the module that has it (`recorded`); a gradient's, too, and that of a
   tensor of the module's state dict, wherever it is loaded. Every other DTensor with the placements
   of such a weight may be a copy of it, and has no known layout (`check_said`).
3. While a module's call runs, its attributes and those of all placed modules are local tensors, by
   way of a differentiable `to_local()`: views of the very memory that FSDP2 gathers into.
   Everywhere else they are the parameters themselves, DTensors with global shapes, for
   initialisation, optimizers and state dicts.
4. What FSDP2 has divided and not yet gathered stays a DTensor everywhere.
5. A module's class becomes a subclass of the same name, so that isinstance, repr, deepcopy and
   pickle go on as before; `type(module) is nn.Linear` does not.
"""

from __future__ import annotations

import copyreg
import functools
import math
import types
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as theirs

from shardmath.base.errors import PlacementError
from shardmath.layouts import placement as ours
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of
from shardmath_torch.tensors.dtensors.styles import Division, Fused

__all__ = [
    "Placed",
    "check_said",
    "components_of",
    "is_placed",
    "label",
    "layout_where",
    "place",
    "placed_in",
    "recorded",
]

RECORD = "_shardmath_placed"
COMPONENTS = "_shardmath_components"
"""The attribute of a fused weight: the axis that divides it, and the sizes of its components. A tuple of text and
numbers, which `torch.load` reads without being told that it may."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What one parameter is: how the axis `axis` divides it, and the ranks over which `amax` reduces."""

    axis: str
    placement: Division
    weight_mesh: DeviceMesh


def label(placement: Division) -> theirs.Placement:
    """The DTensor placement that stands for it: for Packed, which has none, one of the same local shapes.

    That one is strided, so that torch's checkpoints find overlapping boxes and refuse; a Shard
    would be saved, and restored to a mesh of another size with its rows in another order.
    """
    match placement:
        case ours.Replicate():
            return theirs.Replicate()
        case ours.StridedShard():
            return theirs._StridedShard(placement.dim, split_factor=placement.split_factor)
        case ours.Packed():
            # The largest unit of which every component is a multiple, so that local shapes come out right.
            units = sum(placement.sizes) // math.gcd(*placement.sizes)
            return theirs._StridedShard(placement.dim, split_factor=units)
    return theirs.Shard(placement.dim)


# The record


def place(module: nn.Module, record: dict[str, Placed]) -> None:
    """Keep the record of the module's own parameters, and show them as local tensors while a forward runs."""
    setattr(module, RECORD, record)
    module.__class__ = _subclass(type(module))  # type: ignore[arg-type]
    _remember(module)


def is_placed(module: nn.Module) -> bool:
    """Whether the module itself has a record."""
    return RECORD in vars(module)


def _record_of(module: nn.Module) -> dict[str, Placed]:
    """What the module itself remembers of its own parameters, by name."""
    found: dict[str, Placed] = vars(module).get(RECORD, {})
    return found


def placed_in(module: nn.Module) -> dict[str, Placed]:
    """The records of the module and all below it, by the names of `named_parameters`."""
    found: dict[str, Placed] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, placed in _record_of(part).items():
            found[f"{path}.{name}".lstrip(".")] = placed
    return found


def layout_where(parameter: object, axis: str, division: Division) -> Layout | None:
    """The layout of a placed parameter: tensor parallelism first, then in mesh order what has divided its parts since.

    None for what is not the placed parameter any more: a plain tensor, or a DTensor of other
    placements.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = mesh_of(parameter.device_mesh)
    on = dict(zip(mesh.shape, parameter.placements, strict=True))
    if on.pop(axis, None) != label(division):
        return None
    spec: dict[str, ours.Spec] = {axis: division}
    for other, placement in on.items():
        match placement:
            case theirs.Shard() | theirs._StridedShard():
                spec[other] = ours.Shard(placement.dim)
            case theirs.Partial():  # a gradient before it is summed
                return None
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Layout(tuple(parameter.shape), mesh, spec, dtype=dtype)


def components_of(division: Division, n: int) -> tuple[int, ...]:
    """Sizes of what is divided for itself of a dimension of length n."""
    match division:
        case ours.Packed():
            return division.sizes
        case ours.StridedShard():
            return (n // division.split_factor,) * division.split_factor
    return (n,)


# Fused weights

_placed_modules: WeakSet[nn.Module] = WeakSet()
"""Modules with a record. Not parameters: `to_empty` swaps them, and torch swaps nothing that has weak references."""

_labels: dict[tuple[str, int], bool] = {}
"""Labels of fused weights so far, by axis and split factor: whether they say all where nothing else divides it. They
stay when the modules have gone, since copies of weights may be left."""


def recorded(tensor: DTensor) -> Layout | None:
    """The layout of a fused weight that a module has, of its gradient, and of what its state dict has; else None."""
    if COMPONENTS not in vars(tensor) and _misleads(mesh_of(tensor.device_mesh), tensor.placements):
        for module in list(_placed_modules):
            _mark_parameters(module)
    axis, sizes = vars(tensor).get(COMPONENTS, ("", ()))
    if not sizes or tensor.shape[0] != sum(sizes):
        return None
    return layout_where(tensor, axis, Fused(sizes).placement(sum(sizes)))


def check_said(mesh: Mesh, placements: Iterable[theirs.Placement]) -> None:
    """Raise PlacementError for placements by which fused weights are labelled, of which they do not say all."""
    given = tuple(placements)
    if _misleads(mesh, given):
        what = f"{given} are those of a fused weight, whose components no placements say"
        fix = "take layout_of(module), and move the local tensor with layout= and device_mesh="
        raise PlacementError(f"{what}; {fix}; or pass reading= if it is no part of such a weight")


def _misleads(mesh: Mesh, placements: Iterable[theirs.Placement]) -> bool:
    """Whether they are those of a fused weight, and something else is meant by them."""
    on = dict(zip(mesh.shape, placements, strict=False))
    dims = [p.dim for p in on.values() if isinstance(p, theirs.Shard | theirs._StridedShard)]
    for axis, p in on.items():
        if isinstance(p, theirs._StridedShard) and (axis, int(p.split_factor)) in _labels:
            says_all = _labels[axis, int(p.split_factor)] and dims.count(p.dim) == 1
            if not says_all:
                return True
    return False


def _remember(module: nn.Module) -> None:
    """Finds the module again by its parameters, and their copies by their labels."""
    for placed in _record_of(module).values():
        mark = label(placed.placement)
        if isinstance(mark, theirs._StridedShard):
            key = placed.axis, int(mark.split_factor)
            equal = isinstance(placed.placement, ours.StridedShard)
            _labels[key] = _labels.get(key, True) and equal
    _placed_modules.add(module)
    _mark_parameters(module)


def _mark_parameters(module: nn.Module) -> None:
    """Give the components to what the module has now, which `fully_shard`, `to_empty` and others have made since."""
    for name, placed in _record_of(module).items():
        parameter = module._parameters.get(name)
        _mark(parameter, placed)
        if parameter is not None and parameter.is_leaf:
            _mark(parameter.grad, placed)


def _mark(tensor: object, placed: Placed) -> None:
    """Give it the components that the record has, if there are any; what has others keeps them, in whatever module."""
    fused = isinstance(placed.placement, ours.StridedShard | ours.Packed)
    if fused and isinstance(tensor, DTensor) and tensor.ndim:
        sizes = components_of(placed.placement, tensor.shape[0])
        vars(tensor).setdefault(COMPONENTS, (placed.axis, sizes))


def _check_same_components(name: str, given: object, placed: Placed) -> None:
    """Raise PlacementError where what is to be loaded says that it has other components than the record."""
    if not isinstance(given, DTensor) or COMPONENTS not in vars(given):
        return
    _, sizes = vars(given)[COMPONENTS]
    own = components_of(placed.placement, sum(sizes))
    if sizes != own:
        fix = "load into a module of the same styles, or move it by layout_of of both modules"
        raise PlacementError(f"{name!r} has components {sizes}, the module's are {own}; {fix}")


def _check_same_placements(name: str, given: object, own: object) -> None:
    """Raise PlacementError where torch would redistribute from or to the placements of a fused weight."""
    if not isinstance(given, DTensor) or not isinstance(own, DTensor):
        return
    if given.placements == own.placements:
        return
    if any(_misleads(mesh_of(one.device_mesh), one.placements) for one in (given, own)):
        what = f"{name!r} has placements {given.placements}, the module's are {own.placements}"
        why = "of a fused weight, by which torch would take other rows"
        raise PlacementError(f"{what}, {why}; move it there by smt.redistribute, or load_weights")


# The class


_calls: ContextVar[bool] = ContextVar("_calls", default=False)
"""Whether the call of a placed module runs."""


def _is_computing() -> bool:
    """Whether a forward runs, for the first time or, under activation checkpointing, again in a backward."""
    return _calls.get() or compat.in_backward()


class _Showing(nn.Module):
    """Before a module's class, makes its placed parameters local tensors while a forward runs."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not isinstance(found, DTensor) or name not in vars(self).get(RECORD, ()):
            return found
        # On a mesh of two axes it is what FSDP2 has divided and not gathered.
        if not _is_computing() or found.device_mesh.ndim != 1:
            return found
        return found.to_local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _calls.set(True)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _calls.reset(before)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, placed in _record_of(self).items():
            _mark(destination.get(prefix + name), placed)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        for name, placed in _record_of(self).items():
            # torch would copy one into the other, as their placements may be the same.
            given = state_dict.get(prefix + name)
            _check_same_components(prefix + name, given, placed)
            _check_same_placements(prefix + name, given, self._parameters.get(name))
        super()._load_from_state_dict(state_dict, prefix, *more)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _remember(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(max(protocol, 2))
        shown = vars(type(self)).get("_shown")
        if shown is None or not isinstance(reduced, tuple):
            return reduced
        make, arguments, *state = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        # The subclass cannot be imported, the module's own class can: it is remade from that.
        return _revived, (shown, *arguments[1:]), *state


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of the same name that shows local tensors."""
    same = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_shown": cls,
    }
    bases = (_Showing, cls)
    return types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(same))


def _revived(cls: type[nn.Module], *args: Any) -> nn.Module:
    """An instance without state, for copy and pickle, which has this function by its name."""
    return cls.__new__(_subclass(cls), *args)  # type: ignore[arg-type]
