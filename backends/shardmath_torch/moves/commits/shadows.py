"""Shadows: memory beside the destination, in which a move receives what all ranks put in place, or none.

1. A shadow has the local shape of what it stands for, and lies row by row, whatever strides that
   has. It is made before ranks vote, so that a lack of memory is an objection, and is used again.
2. Only a tensor's own cells are put in place: padding, and what others have in its holes, is left.
3. All that is put in place goes in one call of torch, between two signals: an interrupt comes before
   it or after it. It may be repeated, as it copies the same again.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shardmath.layouts.layout import Layout
from shardmath.plans.programs.part import own_boxes
from shardmath_torch.groups import dtypes

__all__ = ["Pair", "Shadows", "put_in_place"]

Tensors: TypeAlias = Mapping[str, Tensor]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""What is written, and what is to be there: of one shape and type."""


class Shadows:
    """Those of one mover on this rank: `tensors`, by local buffer key, and the bytes that they take."""

    def __init__(self, layouts: Mapping[str, Layout], rank: int) -> None:
        self._shapes = {key: layout.local_shape(rank) for key, layout in layouts.items()}
        self._boxes = {key: own_boxes(layout.runs(rank)) for key, layout in layouts.items()}
        self._device: torch.device | None = None
        self.tensors: dict[str, Tensor] = {}
        self._paired: tuple[Tensors, list[Pair]] | None = None
        self.nbytes = sum(
            math.prod(self._shapes[key]) * layout.itemsize for key, layout in layouts.items()
        )

    def select(self, tensors: Tensors) -> Tensors:
        """Those of the tensors that have shadows; the mapping itself where all have."""
        if tensors.keys() <= self._shapes.keys():
            return tensors
        return {key: tensor for key, tensor in tensors.items() if key in self._shapes}

    def receive_into(self, dst: Tensors) -> Tensors:
        """The shadows of these tensors, made where there are none on their device. Raises what torch raises."""
        devices = {tensor.device for tensor in dst.values()}
        if devices and {self._device} != devices:
            # Before these are made: both need not fit.
            self.let_go()
            made = {key: _make_beside(tensor, self._shapes[key]) for key, tensor in dst.items()}
            self.tensors = made
            (self._device,) = devices
        return self.tensors

    def let_go(self) -> None:
        """Give the memory back, until something is to be received."""
        self.tensors = {}
        self._paired = None
        self._device = None

    def pair(self, dst: Tensors, held: bool = False) -> list[Pair]:
        """Every box of the tensors' own cells, and of their shadows; of a `held` mapping they are kept."""
        if self._paired is not None and self._paired[0] is dst:
            return self._paired[1]
        pairs: list[Pair] = []
        for key, tensor in dst.items():
            here, there = dtypes.words(tensor), dtypes.words(self.tensors[key])
            for box in self._boxes[key]:
                pairs.append((here[box], there[box]))
        # Others are not kept, since that would keep their memory.
        self._paired = (dst, pairs) if held else None
        return pairs


def _make_beside(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def put_in_place(pairs: Iterable[Pair]) -> None:
    """Write all of them, in one call."""
    into: Sequence[Tensor]
    out_of: Sequence[Tensor]
    into, out_of = [], []
    for here, there in pairs:
        into.append(here)
        out_of.append(there)
    if into:
        # In inference mode inference tensors, too, may be written.
        with torch.inference_mode():
            torch._foreach_copy_(into, out_of)
