"""torch's element types: names, words on the wire, and which arithmetic they have.

1. Data moves as **words**, unsigned or signed integers of the element's size: every type moves, bit
   by bit, also those that have no arithmetic (float8, float4).
2. Arithmetic is torch's, in the tensor's own type. Whether torch has it is asked of torch, not of a
   list, because it differs between versions; unsigned integers borrow the signed type of their size
   for sum and product, which are the same bits.
3. An element's result does not depend on where it lies in memory.

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
    "words",
]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""The type in which elements of so many bytes are copied (complex128 is copied bit by bit, too)."""

NUMPY_WORDS = {1: "|u1", 2: "=i2", 4: "=i4", 8: "=i8", 16: "=c16"}
"""Numpy's names of these types."""

COPIED = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, *WORDS.values()))
"""Types that torch copies bit by bit, NaN with its payload. Of bool it makes 0 and 1, and some it does not copy."""

FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

BORROWED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Two's complement: sum and product of these have the bits of the signed type's."""


def dtype_of(name: str) -> torch.dtype:
    """torch's type of that canonical name. Raises LayoutError if this torch has none (bcomplex32 before 2.14)."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"torch {torch.__version__} has no type {name}; install a later one")
    return found


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one row: the same memory, in steps of one element.

    `reshape(-1)` keeps the stride of a dimension of one element, whatever it is, and then bytes cannot be viewed.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def words(tensor: Tensor) -> Tensor:
    """The same memory, detached, as words of the element's size."""
    return tensor.detach().view(WORDS[tensor.element_size()])


class Seen:
    """Memory of a tensor as numpy is told of it, and the tensor, so that it stays; `kind` is of its elements."""

    def __init__(self, tensor: Tensor, kind: str) -> None:
        self._tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": kind,
        }


def see_words(tensor: Tensor) -> NDArray[Any]:
    """The words of a tensor on the CPU as an array of the same memory, to be read.

    `Tensor.numpy` would do, but that nobody can resize the tensor's storage ever after, as FSDP does.
    """
    kind = NUMPY_WORDS[tensor.element_size()]
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), kind)
    return np.asarray(Seen(tensor, kind))


def fold(op: str, into: Tensor, piece: Tensor) -> None:
    """into = op(into, piece), in their own type; without a temporary but for complex products."""
    if op in ("sum", "product") and into.dtype in BORROWED:
        signed = BORROWED[into.dtype]
        into = into.view(signed)
        piece = piece.view(signed)
    if op == "product" and into.is_complex():
        _multiply_by_parts(torch.view_as_real(into), torch.view_as_real(piece))
    else:
        FOLDS[op](into, piece, out=into)


def _multiply_by_parts(a: Tensor, b: Tensor) -> None:
    """Complex a = a b; torch's own kernel rounds otherwise in vectors than at their ends, so that bits would depend on
    how a tensor is cut (torch 2.13 on AVX: 452 of 1003 products differ)."""
    x, y = a.unbind(-1)
    u, v = b.unbind(-1)
    real = x * u - y * v
    imaginary = x * v + y * u
    # Only now: both parts are made of both.
    x.copy_(real)
    y.copy_(imaginary)


def fill(cells: Tensor, value: complex) -> None:
    """Every one of the cells becomes `value`."""
    cells.fill_(value)


def divide(cells: Tensor, by: int) -> None:
    """Every one of the cells is divided by `by`, in its own type."""
    torch.div(cells, by, out=cells)


@memo()
def missing(name: str, op: str) -> bool:
    """Whether torch has no such operation on elements of the named type; `op` is a reduction, "fill" or "divide"."""
    # Made of bytes, since there are types of which torch makes no zeros.
    memory = torch.zeros(dtypes.itemsize(name), dtype=torch.uint8, device="cpu")
    one = memory.view(dtype_of(name))
    try:
        _try(op, one)
    except (RuntimeError, TypeError):
        return True
    return False


def _try(op: str, one: Tensor) -> None:
    """Carry the operation out on one element."""
    if op == "fill":
        fill(one, 1)
    elif op == "divide":
        divide(one, 2)
    else:
        fold(op, one, one.clone())
