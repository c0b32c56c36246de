"""Coverage: a rank's own list of tensors against what rows say that it stores.

1. What is counted is the rank's list, its parameters and persistent buffers: bytes that nobody asks for are bytes
   that nobody checks. Each of its cells is written, or padding, or in a tensor that is **own**: named as such,
   since it is not the trainer's.
2. All that does not fit is in one message.

>>> find_faults({(0, "a"): (2, 3)}, {(0, "a"): (3, 2), (0, "b.k_scale"): (1,)}, own=("*.k_scale",))
["'a' is stored as (2, 3), the rank has (3, 2)"]
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
    """The stored tensor, for people: its chunk is said where it is not the first."""
    chunk, name = native
    return f"{name!r} of chunk {chunk}" if chunk else repr(name)


def find_faults(stored: Natives, has: Natives, own: Sequence[str] = ()) -> list[str]:
    """What is wrong between what rows say that a rank stores and what it has."""
    faults = []
    for native, shape in stored.items():
        if native not in has:
            faults.append(
                f"{show_native(native)} {shape} is stored, and the rank has no such tensor"
            )
        elif math.prod(has[native]) != math.prod(shape) or _differ(shape, has[native]):
            faults.append(
                f"{show_native(native)} is stored as {shape}, the rank has {tuple(has[native])}"
            )
    for native in has:
        if native not in stored and not matches(native[1], own):
            faults.append(f"{show_native(native)} is in no row; add one, or name it in own=")
    return faults


def _differ(shape: Sequence[int], has: Sequence[int]) -> bool:
    """Whether the shapes differ but for dimensions of 1, which a view adds or takes away."""
    # A convolution's (C, 1, k) is (C, k) in some versions of an engine: the same cells in the same order.
    return [n for n in shape if n != 1] != [n for n in has if n != 1]


def count_cells(bound: KnownSide, rank: int) -> tuple[int, int]:
    """(cells that the rank stores, those of them that are some tensor's); the others are padding."""
    cells = sum(map(math.prod, bound.natives(rank).values()))
    held = 0
    for name in bound.slots(rank):
        held += math.prod(
            int(np.count_nonzero(own >= 0)) for own in bound.layouts[name].indices(rank)
        )
    return cells, held
