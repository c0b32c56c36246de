"""Patterns: values of each element type by their bits, so varied that only a copy keeps them all.

1. A type of up to 16 bits has all of its values, a larger one 65,536: all upper 16 bits, with random lower bits. One in
   16 integers is small.
2. Elements are compared by their words, complex numbers by the words of both parts.
3. torch's random generators are not used, and all tensors are on the CPU.

>>> holds(torch.float32, torch.bfloat16), holds(torch.bfloat16, torch.float32)
(True, False)
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base.memo import memo
from shardmath_torch.groups.dtypes import WORDS

__all__ = [
    "Words",
    "as_tensor",
    "as_words",
    "cast",
    "holds",
    "is_finite",
    "is_nan",
    "list_finite",
    "list_infinite",
    "list_nan",
    "order",
    "real",
    "repeat",
    "word_of",
]

Words: TypeAlias = NDArray[Any]
"""Elements of a type, as integers of the same size."""

MOST = 1 << 16
"""The most values of one type."""
QUIET = {torch.float32: 1 << 22, torch.float64: 1 << 51}
"""The bit of a quiet NaN; a NaN without it changes when it is read."""


def real(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the real and imaginary parts of a complex `dtype`; any other dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def as_words(tensor: Tensor) -> Tensor:
    """Return the bits of the tensor's elements as integers; a complex number is two, along a last dimension."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(WORDS[plain.element_size()])


def as_tensor(words: Words, dtype: torch.dtype) -> Tensor:
    """Return an array of words (the bits of elements, as integers) as a tensor of `dtype`."""
    return torch.from_numpy(words).view(dtype)


def cast(words: Words, dtype: torch.dtype, to: torch.dtype) -> Words:
    """Cast elements, given by their bits (`words`), from `dtype` to `to` as torch does; return the results' bits."""
    if dtype == to:
        return words
    cast_words: Words = as_words(as_tensor(words, dtype).to(to)).numpy()
    return cast_words


def repeat(byte: int, dtype: torch.dtype) -> int:
    """Return the bits, as an integer, of an element of `dtype` whose bytes are all `byte`. For a complex dtype these
    are the bits of the real part; for bool, the lowest bit of `byte`.
    """
    if dtype == torch.bool:
        return byte % 2
    size = real(dtype).itemsize
    # Words of one byte are unsigned, longer ones signed (WORDS).
    return int.from_bytes(bytes([byte] * size), "little", signed=size > 1)


def word_of(value: float, dtype: torch.dtype) -> int | None:
    """Return the bits, as an integer, of `value` cast to `dtype` (if complex, to the dtype of its parts); None if torch
    lacks the cast. If `value` is NaN and `dtype` is an integer dtype, -1 is cast instead.
    """
    part = real(dtype)
    if value != value and not part.is_floating_point:
        value = -1
    try:
        word: int = as_words(torch.tensor([value]).to(part)).item()  # type: ignore[assignment]
    except (RuntimeError, TypeError):
        return None
    return word


@memo()
def list_finite(dtype: torch.dtype) -> Words:
    """Return an array of the bits of a real dtype's finite values, ascending by value. These are all finite values if
    the dtype has up to 16 bits, and a selection if it has more.
    """
    words = _list_all(dtype)
    values = _value(words, dtype)
    order = np.argsort(values, kind="stable")
    finite: Words = words[order[np.isfinite(values[order])]]
    return finite


@memo()
def list_nan(dtype: torch.dtype) -> Words:
    """Return an array of the bits of a real dtype's NaN values. These are all NaN if the dtype has up to 16 bits, and a
    selection of quiet ones if it has more.
    """
    words = _list_all(dtype)
    return words[is_nan(words, dtype)] | QUIET.get(dtype, 0)


@memo()
def list_infinite(dtype: torch.dtype) -> Words:
    """Return the infinities of a real dtype, as an array of their bits."""
    words = _list_all(dtype)
    infinite: Words = words[np.isinf(_value(words, dtype))]
    return infinite


def is_finite(words: Words, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Return a mask of which elements of a real dtype, given by their bits (`words`), are finite."""
    return np.isfinite(_value(words, dtype))


def is_nan(words: Words, dtype: torch.dtype) -> NDArray[np.bool_]:
    """Return a mask of which elements of a real dtype, given by their bits (`words`), are NaN."""
    return np.isnan(_value(words, dtype))


def order(words: Words, dtype: torch.dtype) -> NDArray[np.intp]:
    """Return the indices that sort elements of `dtype`, given by their bits (`words`), by magnitude."""
    sizes = np.abs(_value(words, dtype))
    return np.argsort(sizes, kind="stable")


@memo()
def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the dtype `wide` represents exactly the finite values of the dtype `narrow`. If `narrow` has up to 16
    bits, all of its values are compared, else the selection that `list_finite` returns.
    """
    if wide == narrow:
        return True
    if narrow.is_complex and not wide.is_complex:
        return False
    to, part = real(wide), real(narrow)
    words = list_finite(part)
    try:
        forth = cast(words, part, to)
        back = cast(forth, to, part)
    except (RuntimeError, TypeError):
        # A type without casts.
        return False
    # Bits that return are not enough: -1 becomes 255 as uint8, and -1 again.
    is_equal = np.array_equal(_value(forth, to), _value(words, part))
    return is_equal and np.array_equal(back, words)


def _list_all(dtype: torch.dtype) -> Words:
    """The words of a type that is not complex: all, or a selection of MOST."""
    size = dtype.itemsize
    if dtype == torch.bool:
        return np.arange(2, dtype=np.uint8)
    upper = np.arange(min(MOST, 1 << 8 * size))
    if size <= 2:
        return upper.astype(f"u{size}").view(np.uint8 if size == 1 else np.int16)
    bits = 8 * size - 16
    lower = np.random.default_rng(size).integers(0, 1 << bits, len(upper))
    # Zeros, powers of two and infinities have no lower bits.
    lower[upper % 16 == 0] = 0
    words = (upper.astype(np.uint64) << np.uint64(bits)) | lower.astype(np.uint64)
    if not dtype.is_floating_point:
        # Some small integers: large ones are all infinite in types of few bits.
        words[upper % 16 == 1] = 1 + upper[: len(upper) // 16]
    return words.astype(f"u{size}").view(f"i{size}")


def _value(words: Words, dtype: torch.dtype) -> NDArray[np.float64]:
    """The words as float64 numbers; for types that torch does not cast, the words themselves."""
    try:
        return as_tensor(words, dtype).to(torch.float64).numpy()
    except (RuntimeError, TypeError):
        return words.astype(np.float64)
