"""What happens to the cells of a local tensor before and after pieces arrive."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardmath.programs.part import CellWork
from shardmath_torch import dtypes

__all__ = ["divide", "fill"]


def fill(work: CellWork, tensors: Mapping[str, Tensor]) -> None:
    """Give the cells the work's value."""
    tensor = tensors[work.key].detach()
    for box in work.boxes:
        dtypes.fill(tensor[box], work.value)


def divide(work: CellWork, tensors: Mapping[str, Tensor]) -> None:
    """Divide the cells by the work's value."""
    tensor = tensors[work.key].detach()
    # Values of all work are complex, and divisors are counts of addends.
    divisor = int(work.value.real)
    for box in work.boxes:
        dtypes.divide(tensor[box], divisor)
