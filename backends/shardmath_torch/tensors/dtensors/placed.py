"""Placed parameters: a module's record of how tensor parallelism divides them, and what its forward sees.

1. Each module has a record of its parameters, by name, in an attribute that `fully_shard`,
   `to_empty` and `deepcopy` do not change. The memory holds the rank's tensor-parallel part, and
   under FSDP2 this rank's chunk of that part.
2. Placements do not express the components of a fused weight, or not together with FSDP2's. So its
   layout is read from the record of its module (`recorded`), and so are the layouts of its gradient
   and of its entry in the module's state dict, even after that is loaded elsewhere. Every other
   DTensor with the placements of such a weight may be a copy of it: its layout is not known
   (`check_said`).
3. While a placed module's call runs, parameters as attributes of all placed modules are local
   tensors, from a differentiable `to_local()`: views of the memory that FSDP2 gathers into.
   Otherwise they are the parameters themselves, DTensors with global shapes, for initialization,
   optimizers and state dicts.
4. A parameter that FSDP2 has sharded and not yet gathered is always a DTensor.
5. A module's class becomes a subclass of the same name, so isinstance, repr, deepcopy and pickle
   work as before; `type(module) is nn.Linear` does not.
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
"""The attribute of a fused weight: the axis that divides it, and the sizes of its components, as a tuple of text and
numbers, which `torch.load` accepts by default."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A record of how `set_device_mesh` places a parameter over mesh axis `axis`: `placement` is a Shard, StridedShard,
    Packed (a fused weight, each component sharded separately) or Replicate.

    `weight_mesh` has the ranks over which `amax` reduces.
    """

    axis: str
    placement: Division
    weight_mesh: DeviceMesh


def label(placement: Division) -> theirs.Placement:
    """Return torch's placement for `placement`, a shardmath placement that divides or replicates a tensor. For Packed
    (a fused weight, each component sharded separately), which torch lacks, this is a _StridedShard with the same local
    shapes.

    It is strided so that torch's checkpoints find overlapping boxes and raise; a Shard would be
    saved, and restored on a mesh of another size with its rows in another order.
    """
    match placement:
        case ours.Replicate():
            return theirs.Replicate()
        case ours.StridedShard():
            return compat.StridedShard(placement.dim, split_factor=placement.split_factor)
        case ours.Packed():
            # The unit is the largest that divides every component, so that local shapes come out right.
            units = sum(placement.sizes) // math.gcd(*placement.sizes)
            return compat.StridedShard(placement.dim, split_factor=units)
    return theirs.Shard(placement.dim)


# The record


def place(module: nn.Module, record: dict[str, Placed]) -> None:
    """Store in the module a `record` of how its direct parameters are divided, and change its class so that they are
    local tensors during a forward.
    """
    setattr(module, RECORD, record)
    module.__class__ = _subclass(type(module))  # type: ignore[arg-type]
    _remember(module)


def is_placed(module: nn.Module) -> bool:
    """Whether `place` has recorded how this module's own parameters are divided."""
    return RECORD in vars(module)


def _record_of(module: nn.Module) -> dict[str, Placed]:
    """The module's record of its direct parameters, by name."""
    found: dict[str, Placed] = vars(module).get(RECORD, {})
    return found


def placed_in(module: nn.Module) -> dict[str, Placed]:
    """Return a dict from name to Placed for the parameters of `module`: how `set_device_mesh` has divided or replicated
    each.
    """
    found: dict[str, Placed] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, placed in _record_of(part).items():
            found[f"{path}.{name}".lstrip(".")] = placed
    return found


def layout_where(parameter: object, axis: str, division: Division) -> Layout | None:
    """Return the layout of the DTensor `parameter` if `division` describes its placement on mesh axis `axis`, else
    None. Placements on other axes can replicate the parameter or shard it further.

    None also for a plain tensor, and for a partial sum.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = mesh_of(parameter.device_mesh)
    by_axis = dict(zip(mesh.shape, parameter.placements, strict=True))
    if by_axis.pop(axis, None) != label(division):
        return None
    spec: dict[str, ours.Spec] = {axis: division}
    for other, placement in by_axis.items():
        match placement:
            case theirs.Shard() | compat.StridedShard():
                spec[other] = ours.Shard(placement.dim)
            case theirs.Partial():  # a gradient before it is summed
                return None
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Layout(tuple(parameter.shape), mesh, spec, dtype=dtype)


def components_of(division: Division, n: int) -> tuple[int, ...]:
    """Return the sizes of a dimension's components, such as q, k and v, each of which `division` divides among ranks
    separately. `n` is the length of the dimension.
    """
    match division:
        case ours.Packed():
            return division.sizes
        case ours.StridedShard():
            return (n // division.split_factor,) * division.split_factor
    return (n,)


# Fused weights

_placed_modules: WeakSet[nn.Module] = WeakSet()
"""Modules with a record. Not parameters: `to_empty` swaps those, and torch cannot swap tensors with weak references."""

_labels: dict[tuple[str, int], bool] = {}
"""The (axis, split factor) of each `_StridedShard` that labels a fused weight: whether the label is right if no other
axis divides the dimension. They stay when the modules are gone, since copies of weights may be left."""


def recorded(tensor: DTensor) -> Layout | None:
    """Return the layout of a fused weight divided by `set_device_mesh`, or of its gradient; None for other tensors."""
    if COMPONENTS not in vars(tensor) and _misleads(mesh_of(tensor.device_mesh), tensor.placements):
        # It may be a parameter that was made since its module was marked, as by `to_empty`.
        for module in list(_placed_modules):
            _mark_parameters(module)
    axis, sizes = vars(tensor).get(COMPONENTS, ("", ()))
    if not sizes or tensor.shape[0] != sum(sizes):
        return None
    return layout_where(tensor, axis, Fused(sizes).placement(sum(sizes)))


def check_said(mesh: Mesh, placements: Iterable[theirs.Placement]) -> None:
    """Raise PlacementError if `placements` look like those that `set_device_mesh` gives to fused weights, such as QKV,
    and so do not determine a layout.
    """
    given = tuple(placements)
    if _misleads(mesh, given):
        what = f"{given} on {mesh} are placements of a fused weight, which do not say how its parts are divided"
        fix = "move its local tensor with layout=layout_of(module)[name] and device_mesh="
        raise PlacementError(f"{what}; {fix}, or pass reading= if it is not a fused weight")


def _misleads(mesh: Mesh, placements: Iterable[theirs.Placement]) -> bool:
    """Whether the placements may belong to a fused weight whose layout they do not say."""
    if not _labels:
        return False
    by_axis = dict(zip(mesh.shape, placements, strict=False))
    divided = [p.dim for p in by_axis.values() if isinstance(p, theirs.Shard | compat.StridedShard)]
    for axis, p in by_axis.items():
        if not isinstance(p, compat.StridedShard):
            continue
        # Whether the label is right if no other axis divides the dimension; None if it labels no fused weight.
        is_right_alone = _labels.get((axis, int(p.split_factor)))
        is_of_fused = is_right_alone is not None
        if is_of_fused and not (is_right_alone and divided.count(p.dim) == 1):
            return True
    return False


def _remember(module: nn.Module) -> None:
    """Register a placed module, and for each label of its fused weights whether it is right."""
    for placed in _record_of(module).values():
        placement = label(placed.placement)
        if isinstance(placement, compat.StridedShard):
            key = placed.axis, int(placement.split_factor)
            # The label is a StridedShard: right for one, but not for Packed, whose components differ in size.
            is_right = isinstance(placed.placement, ours.StridedShard)
            _labels[key] = _labels.get(key, True) and is_right
    _placed_modules.add(module)
    _mark_parameters(module)


def _mark_parameters(module: nn.Module) -> None:
    """Mark the module's present parameters, which `fully_shard`, `to_empty` and others may have made since."""
    for name, placed in _record_of(module).items():
        parameter = module._parameters.get(name)
        _mark(parameter, placed)
        if parameter is not None and parameter.is_leaf:
            _mark(parameter.grad, placed)


def _mark(tensor: object, placed: Placed) -> None:
    """Set a fused weight's components from the record; a tensor that has some keeps them, even in another module."""
    fused = isinstance(placed.placement, ours.StridedShard | ours.Packed)
    if fused and isinstance(tensor, DTensor) and tensor.ndim:
        sizes = components_of(placed.placement, tensor.shape[0])
        vars(tensor).setdefault(COMPONENTS, (placed.axis, sizes))


def _check_same_components(name: str, given: object, placed: Placed) -> None:
    """Raise PlacementError if a tensor to be loaded has other components than the record."""
    if not isinstance(given, DTensor) or COMPONENTS not in vars(given):
        return
    _, sizes = vars(given)[COMPONENTS]
    expected = components_of(placed.placement, sum(sizes))
    if sizes != expected:
        fix = "call set_device_mesh with the same styles, or move the weight by smt.redistribute"
        what = f"the loaded {name!r} has components {sizes}, but the module's has {expected}"
        raise PlacementError(f"{what}; {fix}")


def _check_same_placements(name: str, given: object, held: object) -> None:
    """Raise PlacementError if torch would redistribute from or to the placements of a fused weight."""
    if not isinstance(given, DTensor) or not isinstance(held, DTensor):
        return
    if given.placements == held.placements:
        return
    if any(_misleads(mesh_of(each.device_mesh), each.placements) for each in (given, held)):
        what = f"the loaded {name!r} has placements {given.placements}, but the module's has {held.placements}"
        why = "and torch would mix up the rows of this fused weight"
        raise PlacementError(f"{what}, {why}; move it by smt.redistribute, or use smt.load_weights")


# The class


_calls: ContextVar[bool] = ContextVar("_calls", default=False)
"""Whether a placed module's call is running."""


def _in_forward() -> bool:
    """Whether a forward is running, or recomputed in a backward by activation checkpointing."""
    return _calls.get() or compat.in_backward()


class _LocalInForward(nn.Module):
    """A mixin before a module's class that makes its placed parameters local tensors while a forward runs."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not isinstance(found, DTensor) or name not in vars(self).get(RECORD, ()):
            return found
        # On a mesh of two axes it is a parameter that FSDP2 has sharded and not gathered.
        if not _in_forward() or found.device_mesh.ndim != 1:
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
            # Placements may be equal although components differ, and then torch would copy one into the other.
            given = state_dict.get(prefix + name)
            _check_same_components(prefix + name, given, placed)
            _check_same_placements(prefix + name, given, self._parameters.get(name))
        super()._load_from_state_dict(state_dict, prefix, *more)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _remember(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Below 2, pickle makes objects by another function than `__newobj__`.
        reduced = super().__reduce_ex__(max(protocol, 2))
        original = vars(type(self)).get("_original")
        if original is None or not isinstance(reduced, tuple):
            return reduced
        make, arguments, *state = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        # The subclass cannot be imported; the original class can, and the subclass is made again from it.
        return _revive, (original, *arguments[1:]), *state


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of the same name with the mixin."""
    attributes = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_original": cls,
    }
    bases = (_LocalInForward, cls)
    return types.new_class(cls.__name__, bases, exec_body=lambda body: body.update(attributes))


def _revive(cls: type[nn.Module], *args: Any) -> nn.Module:
    """An instance without state, for copy and pickle, which store this function by name."""
    return cls.__new__(_subclass(cls), *args)  # type: ignore[arg-type]
