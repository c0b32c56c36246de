"""Elements: arrays of element types that numpy has, and of those that it has not.

1. Elements of a type that numpy lacks are its **words**: uint16 for bfloat16, uint8 for float8.
2. Arrays of such a type from another library, as of ml_dtypes, are seen as words, without a copy.

>>> numpy_type("bfloat16"), numpy_type("float16")
(dtype('uint16'), dtype('float16'))
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.errors import PlanError

__all__ = ["Array", "numpy_type", "read_elements"]

Array: TypeAlias = NDArray[Any]

WORDS = {1: "uint8", 2: "uint16", 4: "uint32"}
"""By bytes; all larger types are numpy's own."""


def numpy_type(name: str) -> np.dtype[Any]:
    """numpy's type of that canonical name, or that of its words."""
    if hasattr(np, name):
        return np.dtype(name)
    return np.dtype(WORDS[ITEMSIZE[name]])


def read_elements(given: object, name: str, what: str) -> Array:
    """The array as `numpy_type` has it, not copied. Raises PlanError, which says `what` it is, for other elements."""
    array = np.asarray(given)
    wanted = numpy_type(name)
    if array.dtype == wanted:
        return array
    # A library's own type has the same name, wherever it comes from.
    if array.dtype.name == name and array.dtype.itemsize == wanted.itemsize:
        return array.view(wanted)
    raise PlanError(f"{what} has dtype {array.dtype}, and is {name}; pass an array of {wanted}")
