"""Numbering: a loader run on tensors of element numbers, and what each cell then has.

1. Each element of all logical tensors has a number. A tensor of few bits cannot hold it, so the loader runs once for
   each of its digits, which every type holds exactly, and once more for a digit that the others imply.
2. A cell that has 0 after every run was not written. One whose digits are no element's number was computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base.errors import StoreError
from shardmath.recordings.numbers import find_pieces
from shardmath.recordings.pieces import Piece
from shardmath.storage.stored import Shapes
from shardmath_torch.dtypes import dtype_of

__all__ = ["Numbering"]

_Flat: TypeAlias = NDArray[np.int64]

MOST = {"float8_e4m3fn": 16, "float8_e4m3fnuz": 16, "float8_e5m2": 8, "float8_e5m2fnuz": 8}
"""Up to which all integers are exact, for types of which that is less than int8's."""
USUAL = 127
NONE = ("bool", "float8_e8m0fnu", "float4_e2m1fn_x2")
"""Types that hold no digit."""


class Numbering:
    """The numbers of the elements of these logical tensors, in digits that these types hold exactly.

    Raises StoreError for a type that holds none.
    """

    def __init__(self, shapes: Shapes, dtypes: Mapping[str, str]) -> None:
        for name, dtype in dtypes.items():
            if dtype in NONE:
                raise StoreError(
                    f"{name!r} is {dtype}, which holds no element number; load it by views alone"
                )
        self.shapes = shapes
        sizes = [math.prod(shape) for shape, _ in shapes.values()]
        self.starts = [0, *itertools.accumulate(sizes)]
        self.base = min((MOST.get(dtype, USUAL) for dtype in dtypes.values()), default=USUAL)
        self.digits = 1
        while self.base**self.digits < self.starts[-1]:
            self.digits += 1

    @property
    def runs(self) -> range:
        """One for each digit, and the check."""
        return range(self.digits + 1)

    def make(self, name: str, run: int) -> Tensor:
        """The logical tensor of a run."""
        shape, dtype = self.shapes[name]
        place = list(self.shapes).index(name)
        numbers = torch.arange(self.starts[place], self.starts[place + 1], device="cpu")
        values = self._digit(numbers, run) + 1
        return values.reshape(shape).to(dtype_of(dtype))

    def _digit(self, numbers: Tensor, run: int) -> Tensor:
        """The digit of each number that a run has."""
        digit = numbers.div(self.base**run, rounding_mode="floor")
        if run == self.digits:
            # Not 0 for the element 0, so that a cell filled with ones is not taken for it.
            digit = numbers * 31 + numbers // 8191 * 17 + 5
        return digit.remainder(self.base)

    def read(self, runs: list[Tensor]) -> list[Piece]:
        """The pieces in a target, of what it had after each run. Raises StoreError where a cell was computed."""
        flat = [run.detach().cpu().to(torch.float64).flatten() for run in runs]
        values = torch.stack(flat)
        written = (values != 0).any(dim=0)
        numbers, right = self._join(values - 1)
        wrong = (written & ~right).nonzero()
        if len(wrong):
            raise StoreError(f"cell {int(wrong[0])} has no element of a logical tensor")
        cells = written.nonzero().flatten()
        return self._divide(cells.numpy(), numbers[cells].numpy())

    def _join(self, digits: Tensor) -> tuple[Tensor, Tensor]:
        """The number of these digits, and whether they are those of an element."""
        whole = digits.nan_to_num(0, 0, 0).clamp(0, self.base - 1).long()
        numbers = torch.zeros_like(whole[0])
        for run in range(self.digits):
            numbers += whole[run] * self.base**run
        right = (digits == whole).all(dim=0)
        right &= numbers < self.starts[-1]
        right &= self._digit(numbers, self.digits) == whole[-1]
        return numbers, right

    def _divide(self, cells: _Flat, numbers: _Flat) -> list[Piece]:
        """The pieces of each logical tensor."""
        tensors = np.searchsorted(self.starts, numbers, side="right") - 1
        order = np.argsort(tensors, kind="stable")
        found, counts = np.unique(tensors, return_counts=True)
        ends = np.cumsum(counts)
        names = list(self.shapes)
        pieces: list[Piece] = []
        for tensor, own in zip(found.tolist(), np.split(order, ends[:-1]), strict=False):
            elements = numbers[own] - self.starts[tensor]
            pieces += find_pieces(names[tensor], cells[own], elements)
        return pieces
