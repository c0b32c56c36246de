"""Shadows: memory next to the destination, into which a move receives before all ranks commit it.

1. A shadow is contiguous and has its destination's local shape, whatever the destination's strides.
   It is made before ranks vote, so that a lack of memory is an objection, and is reused.
2. Only a tensor's own cells are put in place: padding and holes between cells are left as they are.
3. One call of torch puts all shadows in place, so an interrupt comes before it or after it. It may be
   repeated, since it copies the same bytes again.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> shadows = Shadows({"w": Layout((3,), Mesh(tp=2), "(tp n)")}, rank=1)
>>> out = torch.zeros(1)
>>> received = shadows.receive_into({"w": out})
>>> received["w"].fill_(7.0), out
(tensor([7.]), tensor([0.]))
>>> put_in_place(shadows.pair({"w": out}))
>>> out, shadows.nbytes
(tensor([7.]), 4)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from shardmath.layouts.layout import Layout
from shardmath.plans.programs.part import own_boxes
from shardmath_torch.groups import compat, dtypes

__all__ = ["Pair", "Shadows", "put_in_place"]

Tensors: TypeAlias = Mapping[str, Tensor]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A tensor to write, and its new values, of the same shape and type."""


class Shadows:
    """Staging copies (shadows) of a mover's destinations, by name, which receive bytes until they are committed."""

    def __init__(self, layouts: Mapping[str, Layout], rank: int) -> None:
        self._shapes = {key: layout.local_shape(rank) for key, layout in layouts.items()}
        self._boxes = {key: own_boxes(layout.runs(rank)) for key, layout in layouts.items()}
        self._device: torch.device | None = None
        self.tensors: dict[str, Tensor] = {}
        # The last held mapping of destinations, and its pairs.
        self._held_pairs: tuple[Tensors, list[Pair]] | None = None
        self.nbytes = sum(
            math.prod(self._shapes[key]) * layout.itemsize for key, layout in layouts.items()
        )

    def select(self, tensors: Tensors) -> Tensors:
        """Return a dict of the `tensors` that have shadows (staging copies), by key; `tensors` itself if all have
        one."""
        if tensors.keys() <= self._shapes.keys():
            return tensors
        return {key: tensor for key, tensor in tensors.items() if key in self._shapes}

    def receive_into(self, dst: Tensors) -> Tensors:
        """Return the shadows for the tensors `dst`, by key; allocate them if `dst` is on another device than the last
        time, or after `let_go`."""
        devices = {tensor.device for tensor in dst.values()}
        if devices and {self._device} != devices:
            # First release the old shadows, since both may not fit.
            self.let_go()
            self.tensors = {
                key: _make_beside(tensor, self._shapes[key]) for key, tensor in dst.items()
            }
            # A move's tensors are on one device, which is checked before.
            (self._device,) = devices
        return self.tensors

    def let_go(self) -> None:
        """Release the shadows' memory until the next move."""
        self.tensors = {}
        self._held_pairs = None
        self._device = None

    def pair(self, dst: Tensors, held: bool = False) -> list[Pair]:
        """Return a list of (view of a destination, view of its shadow) pairs, the copies to do at the commit for the
        tensors `dst`. If `held`, a later call with the same `dst` returns the same list."""
        if self._held_pairs is not None and self._held_pairs[0] is dst:
            return self._held_pairs[1]
        pairs: list[Pair] = []
        for key, tensor in dst.items():
            destination, shadow = dtypes.words(tensor), dtypes.words(self.tensors[key])
            for box in self._boxes[key]:
                pairs.append((destination[box], shadow[box]))
        # Only for held tensors, since the pairs keep their memory alive.
        self._held_pairs = (dst, pairs) if held else None
        return pairs


def _make_beside(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def put_in_place(pairs: Iterable[Pair]) -> None:
    """Copy the values of all `pairs` (destination, values) into the destinations, by one call of torch."""
    into: list[Tensor] = []
    out_of: list[Tensor] = []
    for destination, values in pairs:
        into.append(destination)
        out_of.append(values)
    if into:
        # Only in inference mode may inference tensors be written.
        with torch.inference_mode():
            compat.copy_each(into, out_of)
