"""Arranging: the orders in which kernels want the cells of a whole stored tensor, once its weights are loaded.

1. A row's structure says how components lie before the tensor is arranged; the row's function names the arrangement,
   as in `w2_weight = blocks(experts.{e}.down_proj.weight)`. The shape stays the same.
2. `blocks`: in each 32 rows, row 4 i + j goes to row 8 j + i; then blocks of 64 columns lie one after the other, each
   with all rows.
3. `paired_blocks` first lets the rows of both halves alternate, beginning with the first half.
4. Another function of a row, such as `neg_exp`, computes each element, and moves none.

Source: FlashInfer 0.6, `fused_moe/core.py`; vLLM 0.33.0, `flashinfer_utils.py`.

>>> import numpy as np
>>> arrange("paired_blocks", np.arange(32).reshape(1, 32, 1).repeat(64, 2))[0, :10, 0].tolist()
[0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from shardmath.base.arguments import known
from shardmath.base.errors import StoreError

__all__ = ["ARRANGEMENTS", "arrange"]

ARRANGEMENTS = ("blocks", "paired_blocks")
"""The names of the arrangements."""
ROWS, STEP = 32, 4
DIMENSIONS = 3
"""Of a stack of matrices."""
COLUMNS = 64
"""128 bytes of bfloat16."""


def arrange(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return the cells of `array`, a stack of matrices, in the order that the arrangement `name` gives them.

    Raises StoreError for an unknown name, for an array that is not a stack of matrices, and if 32 does not divide the
    number of rows, or 64 the number of columns.
    """
    if known(name, ARRANGEMENTS) is None:
        listed = ", ".join(ARRANGEMENTS)
        raise StoreError(f"{name!r} is not an arrangement; use one of {listed}")
    if array.ndim != DIMENSIONS:
        what = f"{name}(...) arranges a stack of matrices, and the stored tensor is {array.shape}"
        raise StoreError(f"{what}; stack tensors along an index, as in e (tp n) h")
    count, rows, columns = array.shape
    if rows % ROWS or columns % COLUMNS:
        what = f"{name}(...) arranges {rows} x {columns} cells in blocks of {ROWS} x {COLUMNS}"
        raise StoreError(f"{what}; choose sizes that these divide")
    if name == "paired_blocks":
        halves = array.reshape(count, 2, rows // 2, columns)
        array = halves.swapaxes(1, 2).reshape(array.shape)
    steps = array.reshape(count, rows // ROWS, ROWS // STEP, STEP, columns)
    shuffled = steps.swapaxes(2, 3).reshape(count, rows, columns // COLUMNS, COLUMNS)
    return shuffled.swapaxes(1, 2).reshape(array.shape)
