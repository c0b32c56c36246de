"""DTensors as Layouts, and Layouts as DTensors.

1. One tuple of DTensor placements has two readings (`shardmath.Layout`): as splits, which is what
   `distribute_tensor` stores, and as an order of splits, which is what FSDP2 stores and
   `full_tensor` reads. Where sizes make them differ, the local shapes of all ranks say which one a
   DTensor has: `from_dtensor` asks the ranks of its mesh.
2. Where even all shapes fit both, or none, that is an error; `reading=` says it outright. So it is
   where a fused weight has such placements (`placed`), unless this is that weight.
3. `to_dtensor` takes placements of which one reading is the layout, if there are any. Reading them
   back gives the layout again.
4. Local tensors are not looked into and not copied.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardmath.base.errors import LayoutError, ShardError
from shardmath.layouts.algebra.mesh import strides
from shardmath.layouts.holdings import equivalent
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.compat import local_of
from shardmath_torch.tensors.dtensors.devicemesh import device_mesh_of, group_for, mesh_of
from shardmath_torch.tensors.dtensors.placed import check_said, recorded
from shardmath_torch.tensors.dtensors.placements import (
    Reading,
    Shape,
    layout_in_order,
    layout_of_placements,
    placements_of,
)

__all__ = [
    "Ask",
    "from_dtensor",
    "from_dtensors",
    "layout_among",
    "local_of",
    "readings",
    "to_dtensor",
]

_T = TypeVar("_T")


# DTensor -> Layout


def from_dtensor(tensor: DTensor, *, reading: Reading | None = None) -> Layout:
    """The layout of a DTensor: which elements each rank of its mesh really holds.

    Collective over the ranks of its mesh where its placements have two readings that differ at its
    sizes, unless `reading` ("placement" or "order") is given. Raises LayoutError where the local
    shape, here or on another rank, is not the layout's, or fits both readings; PlacementError for
    placements that have no counterpart in shardmath, and for a copy of a fused weight, whose
    placements do not say how it lies.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(
            f"{type(tensor).__name__} is not a DTensor; a plain tensor's layout is for you to say"
        )
    return layout_among(tensor, mesh_of(tensor.device_mesh).ranks, reading=reading)


Ask: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Mapping[int, Any]]]
"""Gives what ranks have of tensors, by name and rank: of DTensors the local shapes on all ranks of the mesh."""


def from_dtensors(tensors: Mapping[str, DTensor], ask: Ask | None = None) -> dict[str, Layout]:
    """The same of many, by name, asking all ranks of a mesh once; unless `ask` knows already.

    Raises what `from_dtensor` does, naming the tensor; only when everybody was asked, so that
    nobody waits.
    """
    candidates = {}
    for name, tensor in tensors.items():
        with _naming(name):
            candidates[name] = _list_candidates(tensor)
    unsure = {name: tensors[name] for name, found in candidates.items() if len(found) > 1}
    shapes = (ask or _gather_shapes)(unsure)
    layouts = {}
    for name, tensor in tensors.items():
        with _naming(name):
            if name in unsure:
                layouts[name] = _decide(tensor, candidates[name], shapes[name])
            else:
                layouts[name] = _check_held(tensor, candidates[name][0])
    return layouts


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors that say of which tensor they are."""
    try:
        yield
    except ShardError as error:
        raise type(error)(f"tensor {name!r}: {error}") from error


def _gather_shapes(tensors: Mapping[str, DTensor]) -> dict[str, dict[int, Shape]]:
    """The local shapes on all ranks of each tensor's mesh, by name and rank; one question per mesh."""
    by_mesh: dict[DeviceMesh, dict[str, Shape]] = {}
    for name, tensor in tensors.items():
        by_mesh.setdefault(tensor.device_mesh, {})[name] = tuple(local_of(tensor).shape)
    shapes: dict[str, dict[int, Shape]] = {name: {} for name in tensors}
    for mesh, mine in by_mesh.items():
        for rank, theirs in _gather_along(mine, compat.groups_of_axes(mesh)).items():
            for name in mine:
                shapes[name][rank] = theirs[name]
    return shapes


def _list_candidates(tensor: DTensor) -> list[Layout]:
    """The layouts that the DTensor's placements may stand for, one of those that are alike."""
    found = readings(tensor)
    layouts = [one for one in found.values() if isinstance(one, Layout)]
    if not layouts:
        raise next(one for one in found.values() if isinstance(one, ShardError))
    alike = all(equivalent(layouts[0], layout) for layout in layouts[1:])
    return layouts[-1:] if alike else layouts


def layout_among(
    tensor: DTensor,
    ranks: Iterable[int],
    *,
    reading: Reading | None = None,
    meshes: Iterable[DeviceMesh | None] = (),
) -> Layout:
    """The same, collective over `ranks`, some of which may be outside the DTensor's mesh, where it has to ask.

    One of `meshes` may have the group of all of them. A rank outside asks nobody, and gets one of
    the two readings.
    """
    if reading is not None:
        return _check_held(tensor, _choose(readings(tensor, chosen=True), reading))
    candidates = _list_candidates(tensor)
    first = candidates[0]
    if len(candidates) == 1:
        return _check_held(tensor, first)
    on_mesh = set(first.mesh.ranks)
    everyone = {*ranks, *on_mesh}
    groups = _find_groups(tensor, on_mesh, everyone, meshes)
    if compat.my_rank() not in everyone:
        return first
    shapes = _gather_along(tuple(local_of(tensor).shape), groups)
    return _decide(tensor, candidates, shapes)


def _find_groups(
    tensor: DTensor,
    on_mesh: set[int],
    everyone: set[int],
    meshes: Iterable[DeviceMesh | None],
) -> Sequence[dist.ProcessGroup | None]:
    """Groups that together reach everyone.

    A rank outside may have to make one with them, and has no others.
    """
    if everyone != on_mesh:
        return [group_for(everyone, meshes)]
    if compat.my_rank() not in on_mesh:
        return []
    return compat.groups_of_axes(tensor.device_mesh)


def readings(tensor: DTensor, *, chosen: bool = False) -> dict[Reading, Layout | ShardError]:
    """The layouts that the DTensor's placements may stand for, and why one of them stands for none.

    Of a fused weight both are what was recorded of it. Raises PlacementError for one with the
    placements of such a weight, of which nothing is recorded, unless the caller has `chosen` one.
    """
    layout = recorded(tensor)
    if layout is not None:
        return dict.fromkeys(get_args(Reading), layout)
    spec = compat.spec_of(tensor)
    mesh = mesh_of(tensor.device_mesh)
    if not chosen:
        check_said(mesh, spec.placements)
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if spec.order is not None:
        return {"order": layout_in_order(shape, mesh, spec.placements, dtype, spec.order)}
    return {
        reading: layout_of_placements(shape, mesh, spec.placements, dtype, reading)
        for reading in spec.readings
    }


def _choose(found: Mapping[Reading, Layout | ShardError], reading: Reading) -> Layout:
    """The layout in the reading asked for.

    Raises LayoutError where there is none such, or why it stands for none.
    """
    if reading not in get_args(Reading):
        raise LayoutError(f"reading={reading!r} is not a reading; use 'placement' or 'order'")
    layout = found.get(reading)
    if layout is None:
        known = ", ".join(map(repr, found))
        raise LayoutError(f"the DTensor is read by {known}, not {reading!r}; leave reading= out")
    if isinstance(layout, ShardError):
        raise layout
    return layout


def _check_held(tensor: DTensor, layout: Layout) -> Layout:
    """The layout, if this rank's shape is as it says; else raises LayoutError."""
    rank = compat.my_rank()
    if rank not in layout.mesh:
        return layout
    held, expected = tuple(local_of(tensor).shape), layout.local_shape(rank)
    if held != expected:
        what = f"rank {rank} holds {held}, {layout} has {expected} there"
        fix = "the DTensor was made with another shape or other placements"
        raise LayoutError(f"{what}; {fix}")
    return layout


def _decide(tensor: DTensor, candidates: list[Layout], shapes: Mapping[int, Shape]) -> Layout:
    """The one of the layouts that all shapes fit. Raises LayoutError where several do, or none."""
    fits = []
    misfits = []
    for layout in candidates:
        rank = _find_misfit(layout, shapes)
        if rank is None:
            fits.append(layout)
        else:
            misfits.append((layout, rank))
    if len(fits) == 1:
        return fits[0]
    placed = f"{tuple(tensor.placements)} of shape {tuple(tensor.shape)}"
    if fits:
        texts = " and ".join(layout.text for layout in candidates)
        what = f"{placed} has two readings, {texts}; all local shapes fit both"
        fix = "pass reading='placement' (distribute_tensor) or 'order' (FSDP2)"
        raise LayoutError(f"{what}: {fix}")
    reasons = []
    for layout, rank in misfits:
        expected = layout.local_shape(rank)
        reasons.append(f"rank {rank} holds {shapes[rank]}, {layout.text} has {expected}")
    fix = "the DTensor was made with another shape or other placements"
    raise LayoutError(f"{placed}: {'; '.join(reasons)}; {fix}")


def _find_misfit(layout: Layout, shapes: Mapping[int, Shape]) -> int | None:
    """The first rank that holds another shape than the layout says."""
    for rank in layout.mesh.ranks:
        if shapes[rank] != layout.local_shape(rank):
            return rank
    return None


ASKED = "find out how a DTensor lies"


def _gather_along(mine: _T, groups: Sequence[dist.ProcessGroup | None]) -> dict[int, _T]:
    """What every rank gives, gathered in one group after the other: those of a mesh's axes reach all of its ranks."""
    found = [(compat.my_rank(), mine)]
    for group in groups:
        found = list(itertools.chain.from_iterable(gather(found, group, ASKED)))
    return dict(found)


# Layout -> DTensor


def to_dtensor(
    local: Tensor,
    layout: Layout,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of that layout, made of this rank's `local` tensor, through which gradients flow.

    Without `device_mesh`, one is made from the layout's mesh; the first time, that is collective over
    the default group. Without `placements`, they are those of `placements_of`. Raises LayoutError for a
    local shape or dtype that is not the layout's, or for another mesh; PlacementError where no
    placements of DTensor stand for the layout, saying why.
    """
    placements = placements_of(layout) if placements is None else tuple(placements)
    if device_mesh is None:
        device_mesh = device_mesh_of(layout.mesh, local.device.type)
    mesh = mesh_of(device_mesh)
    if mesh.array().tolist() != layout.mesh.array().tolist():
        raise LayoutError(f"the layout is on {layout.mesh}, device_mesh= is {mesh}; pass one mesh")
    _check_local(local, layout)
    is_outside = compat.my_rank() not in layout.mesh
    if is_outside and not layout.shape:
        local = compat.shape_of_scalar(local)
    made = DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=strides(layout.shape),
    )
    if is_outside:
        compat.hold_nothing(made)
    return made


def _check_local(local: Tensor, layout: Layout) -> None:
    """Raise LayoutError unless the tensor is what the layout has on this rank."""
    rank = compat.my_rank()
    dtype = str(local.dtype).removeprefix("torch.")
    if dtype != layout.dtype:
        raise LayoutError(f"the local tensor is {dtype}, the layout {layout}; cast one of them")
    if rank not in layout.mesh:
        return
    given, expected = tuple(local.shape), layout.local_shape(rank)
    if given != expected:
        raise LayoutError(f"rank {rank} gives {given}, {layout} has {expected} there")
