"""DTensors as Layouts, and Layouts as DTensors.

1. One tuple of DTensor placements has two readings (`shardmath.Layout`): as splits, which
   `distribute_tensor` stores, and as an order of splits, which FSDP2 stores and `full_tensor` reads.
   If the two differ at a tensor's sizes, the local shapes of all ranks decide: `from_dtensor`
   gathers them from the ranks of its mesh.
2. If all local shapes fit both readings, or neither, that raises; `reading=` decides. Placements of a
   fused weight (`placed`) raise, too, unless the DTensor is known to be that weight.
3. `to_dtensor` uses placements of which one reading is the layout, if there are any. Reading them
   back gives the layout again.
4. Values of local tensors are neither read nor copied.
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

MAKE_ANEW = "make the DTensor with the shape and the placements that its local tensors have"


# DTensor -> Layout


@compat.untraced
def from_dtensor(tensor: DTensor, *, reading: Reading | None = None) -> Layout:
    """Return the layout of a DTensor: the elements that each rank of its mesh holds. If `_StridedShard` placements are
    ambiguous, mesh dimensions split the tensor from left to right with reading="placement", in FSDP2's order with
    "order"; with None, ranks compare local shapes to decide.

    Collective over the ranks of its mesh if its placements have two readings that differ at its
    sizes, unless `reading` ("placement" or "order") is given. Raises LayoutError if a local shape,
    on any rank, is not the layout's, or if all fit both readings; PlacementError for placements
    without a counterpart in shardmath, and for a copy of a fused weight, whose placements do not
    express its layout.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(
            f"from_dtensor got {type(tensor).__name__}, where a DTensor is needed; pass one, or make "
            f"the sm.Layout of a plain tensor yourself"
        )
    return layout_among(tensor, mesh_of(tensor.device_mesh).ranks, reading=reading)


Ask: TypeAlias = Callable[[Mapping[str, Tensor]], Mapping[str, Mapping[int, Any]]]
"""A function that gives, by name and rank, what ranks hold of tensors: of DTensors, the local shapes on their mesh."""


def from_dtensors(tensors: Mapping[str, DTensor], ask: Ask | None = None) -> dict[str, Layout]:
    """Return the layout of each DTensor, by name. If placements can mean two layouts, local shapes decide. `ask` gets a
    dict of such DTensors, and returns the local shapes by name and rank (default: gather them over the mesh).

    There is one gather per mesh. Raises what `from_dtensor` does, naming the tensor, but only after
    all gathers, so that no rank waits.
    """
    candidates = {}
    for name, tensor in tensors.items():
        with _prefix_errors(name):
            candidates[name] = _list_candidates(tensor)
    unsure = {name: tensors[name] for name, layouts in candidates.items() if len(layouts) > 1}
    shapes = (ask or _gather_shapes)(unsure)
    layouts = {}
    for name, tensor in tensors.items():
        with _prefix_errors(name):
            if name in unsure:
                layouts[name] = _decide(tensor, candidates[name], shapes[name])
            else:
                layouts[name] = _check_held(tensor, candidates[name][0])
    return layouts


@contextlib.contextmanager
def _prefix_errors(name: str) -> Iterator[None]:
    """Raise errors with the tensor's name in front."""
    try:
        yield
    except ShardError as error:
        raise type(error)(f"tensor {name!r}: {error}") from error


def _gather_shapes(tensors: Mapping[str, DTensor]) -> dict[str, dict[int, Shape]]:
    """The local shapes on all ranks of each tensor's mesh, by name and rank; one gather per mesh."""
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
    """The layouts that the DTensor's placements may stand for: one, or two that differ."""
    by_reading = readings(tensor)
    layouts = [result for result in by_reading.values() if isinstance(result, Layout)]
    if not layouts:
        raise next(result for result in by_reading.values() if isinstance(result, ShardError))
    alike = all(equivalent(layouts[0], layout) for layout in layouts[1:])
    # Of layouts that hold the same, any one will do.
    return layouts[-1:] if alike else layouts


def layout_among(
    tensor: DTensor,
    ranks: Iterable[int],
    *,
    reading: Reading | None = None,
    meshes: Iterable[DeviceMesh | None] = (),
) -> Layout:
    """Return a DTensor's layout. If its `_StridedShard` placements are ambiguous, `reading` chooses ("placement" or
    "order", as in `from_dtensor`); if it is None, all ranks in `ranks` and in the DTensor's mesh gather their local
    shapes to decide. `meshes` are searched for a process group of all these ranks.

    A rank that is not among these ranks does not take part, and gets the layout of one of the two readings.
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
    """Groups that together reach everyone; on a rank outside, none, after it has helped to make one."""
    if everyone != on_mesh:
        return [group_for(everyone, meshes)]
    if compat.my_rank() not in on_mesh:
        return []
    return compat.groups_of_axes(tensor.device_mesh)


def readings(tensor: DTensor, *, chosen: bool = False) -> dict[Reading, Layout | ShardError]:
    """Return a dict from each way to read the DTensor's `_StridedShard` placements to the resulting layout, or to the
    error: "placement" splits by mesh axes from left to right, "order" in another order of axes, as FSDP2 does. Raises
    PlacementError if the tensor could be a fused weight, such as QKV, with unknown component sizes; pass `chosen=True`
    to skip this check after the user has chosen a way.

    For a fused weight both are the recorded layout.
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


def _choose(by_reading: Mapping[Reading, Layout | ShardError], reading: Reading) -> Layout:
    """The layout in the given reading. Raises LayoutError for an unknown reading, or the reading's own error."""
    if reading not in get_args(Reading):
        raise LayoutError(f"reading={reading!r} is unknown; pass 'placement' or 'order'")
    layout = by_reading.get(reading)
    if layout is None:
        readings = ", ".join(map(repr, by_reading))
        raise LayoutError(
            f"reading={reading!r} is given, but the DTensor's shard order allows only {readings}; "
            f"leave reading= out"
        )
    if isinstance(layout, ShardError):
        raise layout
    return layout


def _check_held(tensor: DTensor, layout: Layout) -> Layout:
    """The layout, checked against this rank's local shape. Raises LayoutError for another shape."""
    rank = compat.my_rank()
    if rank not in layout.mesh:
        return layout
    held, expected = tuple(local_of(tensor).shape), layout.local_shape(rank)
    if held != expected:
        what = (
            f"rank {rank} holds a local tensor of shape {held}, but {layout} has {expected} there"
        )
        raise LayoutError(f"{what}; {MAKE_ANEW}")
    return layout


def _decide(tensor: DTensor, candidates: list[Layout], shapes: Mapping[int, Shape]) -> Layout:
    """The layout that all local shapes fit. Raises LayoutError if they fit several, or none."""
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
        what = f"{placed} can mean two layouts, {texts}, and all local shapes fit both"
        fix = "pass reading='placement' (as distribute_tensor stores) or 'order' (as FSDP2 stores)"
        raise LayoutError(f"{what}; {fix}")
    reasons = []
    for layout, rank in misfits:
        expected = layout.local_shape(rank)
        reasons.append(f"rank {rank} holds {shapes[rank]}, but {layout.text} has {expected} there")
    raise LayoutError(f"{placed}: {'; '.join(reasons)}; {MAKE_ANEW}")


def _find_misfit(layout: Layout, shapes: Mapping[int, Shape]) -> int | None:
    """The first rank whose local shape is not the layout's; None if all fit."""
    for rank in layout.mesh.ranks:
        if shapes[rank] != layout.local_shape(rank):
            return rank
    return None


ASKED = "find out how a DTensor lies"


def _gather_along(mine: _T, groups: Sequence[dist.ProcessGroup | None]) -> dict[int, _T]:
    """Every rank's value, by rank, gathered group by group: the groups of a mesh's axes reach all its ranks."""
    # After the first axis each rank has the values along it; each further gather joins those of whole axes.
    gathered = [(compat.my_rank(), mine)]
    for group in groups:
        gathered = list(itertools.chain.from_iterable(gather(gathered, group, ASKED)))
    return dict(gathered)


# Layout -> DTensor


@compat.untraced
def to_dtensor(
    local: Tensor,
    layout: Layout,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor with the layout `layout` from this rank's `local` tensor, on `device_mesh` and with the
    `placements` if these are given; gradients flow through.

    Without `device_mesh`, one is made from the layout's mesh; the first time, that is collective over
    the default group. Without `placements`, `placements_of` gives them. Raises LayoutError for a
    local shape or dtype that is not the layout's, or for another mesh; PlacementError, with the
    reason, if no placements of DTensor stand for the layout.
    """
    placements = placements_of(layout) if placements is None else tuple(placements)
    if device_mesh is None:
        device_mesh = device_mesh_of(layout.mesh, local.device.type)
    mesh = mesh_of(device_mesh)
    if mesh.array().tolist() != layout.mesh.array().tolist():
        what = f"the layout is on {layout.mesh}, but device_mesh= is {mesh}"
        raise LayoutError(f"{what}; pass a DeviceMesh of the layout's ranks, in their order")
    _check_local(local, layout)
    is_outside = compat.my_rank() not in layout.mesh
    if is_outside and not layout.shape:
        # Else the DTensor would get the shape of the empty local tensor.
        local = compat.shape_of_scalar(local)
    dtensor = DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=strides(layout.shape),
    )
    if is_outside:
        compat.hold_nothing(dtensor)
    return dtensor


def _check_local(local: Tensor, layout: Layout) -> None:
    """Raise LayoutError unless the tensor has the layout's dtype, and its local shape on this rank."""
    rank = compat.my_rank()
    dtype = str(local.dtype).removeprefix("torch.")
    if dtype != layout.dtype:
        raise LayoutError(
            f"the local tensor is {dtype}, but the layout is {layout}; cast the tensor to "
            f"{layout.dtype}, or make the layout with dtype={dtype!r}"
        )
    if rank not in layout.mesh:
        return
    given, expected = tuple(local.shape), layout.local_shape(rank)
    if given != expected:
        what = f"rank {rank} passes a tensor of shape {given}, but {layout} has {expected} there"
        raise LayoutError(f"{what}; pass this rank's local tensor")
