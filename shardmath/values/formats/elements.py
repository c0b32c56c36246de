"""Elements: arrays of element types that numpy has, and of those that it has not.

1. Elements of a type that numpy lacks are its **words**: uint16 for bfloat16, uint8 for float8.
2. Arrays of such a type from another library, as of ml_dtypes, are seen as words, without a copy.
3. Bytes are in this machine's order. Types of another order have the same names, and are refused.

>>> numpy_type("bfloat16"), numpy_type("float16")
(dtype('uint16'), dtype('float16'))
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.errors import PlanError

__all__ = ["Array", "describe_type", "numpy_type", "read_elements"]

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
    is_alike = array.dtype.name == name and array.dtype.itemsize == wanted.itemsize
    if is_alike and array.dtype.isnative:
        return array.view(wanted)
    fault = describe_type(array, f", and is {name}; pass an array of {wanted}")
    raise PlanError(f"{what} {fault}")


def describe_type(array: Array, otherwise: str) -> str:
    """The type of an array that is refused: for its byte order, and how to mend that, or as `otherwise` says."""
    if array.dtype.isnative:
        return f"has dtype {array.dtype}{otherwise}"
    fix = "pass x.astype(x.dtype.newbyteorder('='))"
    return f"has dtype {array.dtype}, of another byte order; {fix}"
