"""Divided: DTensors given as what a rank stores, compared with the plan, of which they may say the contrary.

1. A DTensor whose ranks hold summands (Partial) is refused.
2. Where all of the stored tensor is one logical tensor of the DTensor's global shape, both say which elements the rank
   has, and have to agree. A fused tensor, or one that another program has divided before, is compared by its local
   shape alone.
3. Nobody is asked: of two readings of placements, that one is right which agrees.
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
    """What is wrong with DTensors among the natives, by what layouts and slots say of local tensors."""
    whole = _find_whole(stored, slots)
    faults = []
    for native, tensor in natives.items():
        if native not in stored or not isinstance(tensor, DTensor):
            continue
        placements = tuple(tensor.placements)
        if any(one.is_partial() for one in placements):
            placed = f"a DTensor of {placements}, of which ranks hold summands"
            faults.append(f"{show_native(native)} is {placed}; redistribute it before")
        elif native in whole:
            local = whole[native]
            faults += _compare(native, tensor, layouts[local], slots[local], rank)
    return faults


def _find_whole(
    stored: Mapping[Native, tuple[int, ...]], slots: Mapping[str, Slot]
) -> dict[Native, str]:
    """The local tensor that is all of a stored one."""
    found = {}
    for name, slot in slots.items():
        native = slot.chunk, slot.native
        if _is_all(slot, stored[native]):
            found[native] = name
    return found


def _is_all(slot: Slot, shape: tuple[int, ...]) -> bool:
    """Whether a slot has every cell of a tensor of this shape."""
    for cut, size in zip(slot.cut, shape, strict=True):
        if isinstance(cut, int):
            return False
        if cut.indices(size) != (0, size, 1):
            return False
    return True


def _compare(native: Native, tensor: DTensor, layout: Layout, slot: Slot, rank: int) -> list[str]:
    """What is wrong where the DTensor has other elements on the rank than the layout: nothing, or one fault."""
    shape = tuple(layout.shape[i] for i in slot.order)
    if tuple(tensor.shape) != shape:
        return []
    fits = _list_fitting(tensor, rank)
    held = layout.indices(rank)
    wanted = [held[i] for i in slot.order]
    if not fits or any(_has_same(one, wanted, rank) for one in fits):
        return []
    what = f"{show_native(native)} is a DTensor that lies as {fits[-1]}, and is planned as {layout}"
    return [
        f"{what}: rank {rank} has other elements; plan with layout_of of it, or redistribute it"
    ]


def _list_fitting(tensor: DTensor, rank: int) -> list[Layout]:
    """The layouts that the placements may stand for, as far as the rank's local shape says."""
    try:
        found = list(readings(tensor).values())
    except ShardError:  # placements that are not known
        return []
    local = tuple(local_of(tensor).shape)
    layouts = [one for one in found if isinstance(one, Layout) and rank in one.mesh]
    return [one for one in layouts if one.local_shape(rank) == local]


def _has_same(layout: Layout, wanted: list[NDArray[np.int64]], rank: int) -> bool:
    """Whether the rank has these elements."""
    held = layout.indices(rank)
    return all(map(np.array_equal, held, wanted))
