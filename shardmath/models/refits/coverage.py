"""Coverage: comparison of a rank's own tensors with the tensors that its side's rows store there.

1. The rank's list, its parameters and persistent buffers, is compared as a whole, so that no tensor is overlooked. Each
   of its cells is written, or padding, or in an **own** tensor: one that is named as not being the trainer's.
2. Everything that does not fit is in one message.

>>> find_faults({(0, "a"): (2, 3)}, {(0, "a"): (3, 2), (0, "b.k_scale"): (1,)}, own=("*.k_scale",))
["the side stores 'a' as (2, 3), the rank has (3, 2); pass a tensor of shape (2, 3), or correct the row"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from shardmath.models.storage.names import matches
from shardmath.models.storage.stored import KnownSide

__all__ = ["Native", "count_cells", "find_faults", "show_native"]

Native: TypeAlias = tuple[int, str]
"""Chunk (virtual stage) and name of a stored tensor."""
Natives: TypeAlias = Mapping[Native, tuple[int, ...]]


def show_native(native: Native) -> str:
    """The name of a stored tensor for messages, followed by its chunk (virtual stage) unless that is 0."""
    chunk, name = native
    return f"{name!r} of chunk {chunk}" if chunk else repr(name)


def find_faults(stored: Natives, has: Natives, own: Sequence[str] = ()) -> list[str]:
    """Return an error text for each tensor that is in only one of `stored` (expected shapes) and `has` (a rank's
    shapes), or has different shapes in them. Tensors only in `has` that match a glob in `own` are not errors.

    Shapes that differ only in dimensions of 1 count as equal.
    """
    faults = []
    for native, shape in stored.items():
        if native not in has:
            faults.append(
                f"the side stores {show_native(native)} as {shape}, and the rank has no such tensor; "
                f"pass it too, or correct the row"
            )
        elif has[native] != shape and _differ(shape, has[native]):
            faults.append(
                f"the side stores {show_native(native)} as {shape}, the rank has "
                f"{tuple(has[native])}; pass a tensor of shape {shape}, or correct the row"
            )
    for native in has:
        if native not in stored and not matches(native[1], own):
            what = f"the rank has {show_native(native)}, which no row of the side stores"
            faults.append(f"{what}; add a row for it, or name it in own=")
    return faults


def _differ(shape: Sequence[int], has: Sequence[int]) -> bool:
    """Whether the shapes differ, apart from dimensions of 1, which a view adds or removes."""
    # A convolution's (C, 1, k) is (C, k) in some versions of an engine: the same cells in the same order.
    return [n for n in shape if n != 1] != [n for n in has if n != 1]


def count_cells(bound: KnownSide, rank: int) -> tuple[int, int]:
    """Return two counts of positions in tensors of `rank`: all, and those with an element of a logical tensor."""
    cells = sum(map(math.prod, bound.natives(rank).values()))
    held_cells = 0
    for name in bound.slots(rank):
        by_dim = bound.layouts[name].indices(rank)
        held_cells += math.prod(int(np.count_nonzero(positions >= 0)) for positions in by_dim)
    return cells, held_cells
