"""Placed parameters: what a module remembers of those that tensor parallelism divides, and how its forward sees them.

1. Each module keeps a record of its own parameters, by name, beside them: `fully_shard`, `to_empty`
   and `deepcopy` leave it alone. What is stored is the rank's tensor-parallel part, and under FSDP2
   this rank's chunk of that part; FSDP2's own placements do not say so of components, and are not
   asked.
2. While a module's call runs, its attributes and those of all placed modules are local tensors, by
   way of a differentiable `to_local()`: views of the very memory that FSDP2 gathers into.
   Everywhere else they are the parameters themselves, DTensors with global shapes, for
   initialisation, optimizers and state dicts.
3. What FSDP2 has divided and not yet gathered stays a DTensor everywhere.
4. A module's class becomes a subclass of the same name, so that isinstance, repr, deepcopy and
   pickle go on as before; `type(module) is nn.Linear` does not.
"""

from __future__ import annotations

import copyreg
import functools
import math
import types
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as theirs

from shardmath.base.errors import LayoutError
from shardmath.layouts import placement as ours
from shardmath.layouts.layout import Layout
from shardmath_torch import compat
from shardmath_torch.dtensors.devicemesh import mesh_of
from shardmath_torch.dtensors.styles import Division

__all__ = ["Placed", "check_held", "is_placed", "label", "layout_where", "place", "placed_in"]

RECORD = "_shardmath_placed"


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
            return compat.EqualComponents(placement.dim, split_factor=placement.split_factor)
        case ours.Packed():
            # The largest unit of which every component is a multiple, so that local shapes come out right.
            units = sum(placement.sizes) // math.gcd(*placement.sizes)
            return compat.Components(placement.dim, split_factor=units)
    return theirs.Shard(placement.dim)


# The record


def place(module: nn.Module, record: dict[str, Placed]) -> None:
    """Keep the record of the module's own parameters, and show them as local tensors while a forward runs."""
    setattr(module, RECORD, record)
    module.__class__ = _subclass(type(module))  # type: ignore[arg-type]


def is_placed(module: nn.Module) -> bool:
    """Whether the module itself has a record."""
    return RECORD in vars(module)


def placed_in(module: nn.Module) -> dict[str, Placed]:
    """The records of the module and all below it, by the names of `named_parameters`."""
    found: dict[str, Placed] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        own: dict[str, Placed] = vars(part).get(RECORD, {})
        for name, placed in own.items():
            found[f"{path}.{name}".lstrip(".")] = placed
    return found


def layout_where(parameter: object, placed: Placed) -> Layout | None:
    """The layout of a placed parameter: tensor parallelism first, then in mesh order what has divided its parts since.

    None for what is not the placed parameter any more: a plain tensor, or a DTensor of other
    placements.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = mesh_of(parameter.device_mesh)
    on = dict(zip(mesh.shape, parameter.placements, strict=True))
    if on.pop(placed.axis, None) != label(placed.placement):
        return None
    spec: dict[str, ours.Spec] = {placed.axis: placed.placement}
    for axis, placement in on.items():
        if isinstance(placement, theirs.Shard | theirs._StridedShard):
            spec[axis] = ours.Shard(placement.dim)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Layout(tuple(parameter.shape), mesh, spec, dtype=dtype)


def check_held(name: str, parameter: Tensor, layout: Layout) -> None:
    """Raise LayoutError unless this rank's local tensor has the layout's shape."""
    assert isinstance(parameter, DTensor)
    rank = compat.my_rank()
    held, expected = tuple(compat.local_of(parameter).shape), layout.local_shape(rank)
    if held != expected:
        what = f"tensor {name!r}: rank {rank} holds {held}, {layout} has {expected} there"
        raise LayoutError(f"{what}; the parameter was changed after set_device_mesh")


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
