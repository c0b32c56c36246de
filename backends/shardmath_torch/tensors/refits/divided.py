"""Divided: comparison of a rank's DTensors with the plan, which their placements may contradict.

1. A DTensor whose ranks hold summands (Partial) is an error.
2. If the whole stored tensor is one logical tensor of the DTensor's global shape, the plan and the placements must
   agree on the rank's elements. Only the local shape is compared for a fused tensor, or one that another program has
   divided before.
3. Ranks do not communicate: of two readings of placements, the one that agrees with the plan counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmath.base.errors import ShardError
from shardmath.layouts.layout import Layout
from shardmath.models.refits.coverage import Native, show_native
from shardmath.models.storage.stored import Slot
from shardmath_torch.tensors.dtensors.dtensor import local_of, readings

__all__ = ["find_contradictions"]


def find_contradictions(
    stored: Mapping[Native, tuple[int, ...]],
    slots: Mapping[str, Slot],
    layouts: Mapping[str, Layout],
    natives: Mapping[Native, Tensor],
    rank: int,
) -> list[str]:
    """Return an error for each DTensor in `natives`, the tensors that `rank` stores, that is Partial, or whose
    placements give `rank` other elements than planned. `layouts` and `slots` map a checkpoint tensor's name to its
    planned layout, and to its place in a stored tensor. `stored` maps each stored tensor to its local shape.

    Elements are compared only for a DTensor that is one whole logical tensor, has the planned shape, and has placements
    that tell its elements.
    """
    divided = {
        native: tensor
        for native, tensor in natives.items()
        if isinstance(tensor, DTensor) and native in stored
    }
    if not divided:
        return []
    name_by_native = _find_whole(stored, slots)
    faults = []
    for native, tensor in divided.items():
        placements = tuple(tensor.placements)
        if any(placement.is_partial() for placement in placements):
            placed = f"a DTensor with placements {placements}, of which a rank holds a partial sum"
            fix = "redistribute it to Shard or Replicate first"
            faults.append(f"{show_native(native)} is {placed}; {fix}")
        elif native in name_by_native:
            name = name_by_native[native]
            faults += _compare(native, tensor, layouts[name], slots[name], rank)
    return faults


def _find_whole(
    stored: Mapping[Native, tuple[int, ...]], slots: Mapping[str, Slot]
) -> dict[Native, str]:
    """The name of the planned tensor that fills a whole stored one, by stored tensor."""
    whole = {}
    for name, slot in slots.items():
        native = slot.chunk, slot.native
        if _is_whole(slot, stored[native]):
            whole[native] = name
    return whole


def _is_whole(slot: Slot, shape: tuple[int, ...]) -> bool:
    """Whether a slot has every cell of a tensor of this shape."""
    for cut, size in zip(slot.cut, shape, strict=True):
        if isinstance(cut, int) or cut.indices(size) != (0, size, 1):
            return False
    return True


def _compare(native: Native, tensor: DTensor, layout: Layout, slot: Slot, rank: int) -> list[str]:
    """The error if the DTensor has other elements on the rank than the layout, as a list; [] if it agrees."""
    # The stored tensor may have the layout's dimensions in another order.
    shape = tuple(layout.shape[i] for i in slot.order)
    if tuple(tensor.shape) != shape:
        return []
    fitting = _list_fitting(tensor, rank)
    planned = layout.indices(rank)
    expected = [planned[i] for i in slot.order]
    if not fitting or any(_has_elements(reading, expected, rank) for reading in fitting):
        return []
    what = f"{show_native(native)} is a DTensor with the layout {fitting[-1]}, but the plan has {layout}"
    return [
        f"{what}, with other elements on rank {rank}; plan the refit with the DTensor's layout, "
        f"or redistribute the DTensor"
    ]


def _list_fitting(tensor: DTensor, rank: int) -> list[Layout]:
    """The readings of the placements as layouts that fit the rank's local shape."""
    try:
        candidates = list(readings(tensor).values())
    except ShardError:  # unknown placements
        return []
    local = tuple(local_of(tensor).shape)
    layouts = [each for each in candidates if isinstance(each, Layout) and rank in each.mesh]
    return [layout for layout in layouts if layout.local_shape(rank) == local]


def _has_elements(layout: Layout, wanted: list[NDArray[np.int64]], rank: int) -> bool:
    """Whether the rank has these elements, by dimension, under the layout."""
    indices = layout.indices(rank)
    return all(map(np.array_equal, indices, wanted))
