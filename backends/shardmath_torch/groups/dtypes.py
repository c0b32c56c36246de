"""Dtypes: torch's element types, by name, as words on the wire, and with the arithmetic they have.

1. Data moves as **words**, unsigned or signed integers of the element's size: every type moves, bit
   by bit, even types without arithmetic (float8, float4).
2. Arithmetic is torch's, in the tensor's own type. Support is found by trying, since it differs
   between versions. Unsigned integers use the signed type of their size for sum and product, which
   gives the same bits.
3. An element's result does not depend on its position in memory.

>>> missing("float32", "sum"), missing("float8_e4m3fn", "sum")
(False, True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base import dtypes
from shardmath.base.errors import LayoutError
from shardmath.base.memo import memo

__all__ = [
    "COPIED",
    "Seen",
    "divide",
    "dtype_of",
    "fill",
    "flat",
    "fold",
    "missing",
    "see_words",
    "view_bytes",
    "words",
]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The word type by element size in bytes (complex128 is copied bit by bit, too)."""

NUMPY_WORDS = {1: "|u1", 2: "=i2", 4: "=i4", 8: "=i8", 16: "=c16"}
"""NumPy's names of the word types."""

COPIED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, *WORDS.values()))
"""Types that torch copies bit by bit, NaN with its payload. It turns bools into 0 and 1, and cannot copy some types."""

FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

BORROWED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed types for unsigned ones: in two's complement, sum and product have the same bits."""


def dtype_of(name: str) -> torch.dtype:
    """Return the torch.dtype called `name`, such as "bfloat16". Raises LayoutError if torch lacks it (bcomplex32 before
    2.14)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        what = f"torch {torch.__version__} has no dtype {name}"
        raise LayoutError(f"{what}; install a later torch, or use another dtype")
    return dtype


def flat(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as one dimension of stride 1.

    `reshape(-1)` keeps any stride of a dimension of one element, and then bytes cannot be viewed.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's elements as a uint8 tensor of one dimension: a detached view, or a copy if they are not
    contiguous."""
    return flat(tensor.detach().contiguous()).view(torch.uint8)


def words(tensor: Tensor) -> Tensor:
    """Return a detached view of the tensor's bits as words: integers of the element's size, or complex128 for elements
    of 16 bytes."""
    return tensor.detach().view(WORDS[tensor.element_size()])


class Seen:
    """A read-only NumPy view of all elements of a torch tensor, which keeps the tensor alive. `kind` is the NumPy type
    of the view's elements, as text; it has the size of the tensor's elements."""

    def __init__(self, tensor: Tensor, kind: str) -> None:
        self._tensor = tensor
        size = tensor.element_size()
        # NumPy's array interface; True stands for read-only.
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": kind,
        }


def see_words(tensor: Tensor) -> NDArray[Any]:
    """Return the bits of a tensor on the CPU as a NumPy array of the same shape, on the same memory; do not write to
    it. An element of the array is an integer of the tensor element's size, or complex128 for 16 bytes.

    Not `Tensor.numpy`, after which the tensor's storage can never be resized, as FSDP does.
    """
    kind = NUMPY_WORDS[tensor.element_size()]
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), kind)
    return np.asarray(Seen(tensor, kind))


def fold(op: str, into: Tensor, piece: Tensor) -> None:
    """Set `into` to the reduction of `into` and `piece` by `op`, such as "sum", computed in their dtype. For "avg" they
    are added, and not divided."""
    if op in ("sum", "product") and into.dtype in BORROWED:
        signed = BORROWED[into.dtype]
        into = into.view(signed)
        piece = piece.view(signed)
    if op == "product" and into.is_complex():
        _multiply_by_parts(torch.view_as_real(into), torch.view_as_real(piece))
    else:
        FOLDS[op](into, piece, out=into)


def _multiply_by_parts(into: Tensor, factor: Tensor) -> None:
    """Set into = into * factor, both complex as pairs of reals.

    Torch's kernel rounds differently in vectors and at their ends, so bits would depend on how a tensor is cut (torch
    2.13 on AVX: 452 of 1003 products differ).
    """
    into_real, into_imaginary = into.unbind(-1)
    real, imaginary = factor.unbind(-1)
    product_real = into_real * real - into_imaginary * imaginary
    product_imaginary = into_real * imaginary + into_imaginary * real
    # Only now: each product needs both old parts.
    into_real.copy_(product_real)
    into_imaginary.copy_(product_imaginary)


def fill(cells: Tensor, value: complex) -> None:
    """Set all elements of the tensor `cells` to `value`."""
    cells.fill_(value)


def divide(cells: Tensor, by: int) -> None:
    """Divide all elements of the tensor `cells` by `by`, in the tensor's dtype."""
    torch.div(cells, by, out=cells)


@memo()
def missing(name: str, op: str) -> bool:
    """Whether torch cannot do the operation `op` on tensors of the dtype `name`. `op` is "fill", "divide", or the name
    of a reduction such as "sum"."""
    # Viewed from bytes, since torch cannot make zeros of some types.
    memory = torch.zeros(dtypes.itemsize(name), dtype=torch.uint8, device="cpu")
    element = memory.view(dtype_of(name))
    try:
        _try(op, element)
    except (RuntimeError, TypeError):
        return True
    return False


def _try(op: str, element: Tensor) -> None:
    """Carry the operation out on one element."""
    if op == "fill":
        fill(element, 1)
    elif op == "divide":
        divide(element, 2)
    else:
        fold(op, element, element.clone())
