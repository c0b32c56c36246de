"""Elements: numpy arrays of all dtypes, including those that numpy lacks.

1. Elements of a dtype that numpy lacks are represented as **words**: uint16 for bfloat16, uint8 for float8.
2. Arrays of such a dtype from another library, such as ml_dtypes, are viewed as words, without a copy.
3. Bytes are in this machine's order. Arrays of another byte order raise PlanError.

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
"""By bytes; numpy has all larger dtypes."""


def numpy_type(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of arrays of dtype `name`: an integer dtype for its bits if numpy lacks `name`."""
    if hasattr(np, name):
        return np.dtype(name)
    return np.dtype(WORDS[ITEMSIZE[name]])


def read_elements(given: object, name: str, what: str) -> Array:
    """Return `given`, an array of elements of the dtype `name`, as a numpy array, without conversion; if numpy lacks
    that dtype, the result is a view as integers with the same bits. Raises PlanError, whose message begins with `what`,
    if `given` has another dtype."""
    array = np.asarray(given)
    wanted = numpy_type(name)
    if array.dtype == wanted:
        return array
    # Every library gives its dtype the same name.
    has_same_words = array.dtype.name == name and array.dtype.itemsize == wanted.itemsize
    if has_same_words and array.dtype.isnative:
        return array.view(wanted)
    bits = "" if wanted.name == name else f", the bits of {name}"
    fault = describe_type(array, f", not {name}; pass an array of {wanted}{bits}")
    raise PlanError(f"{what} {fault}")


def describe_type(array: Array, otherwise: str) -> str:
    """Return the end of an error message about the dtype of `array`: "has dtype ..." and then the text `otherwise`. If
    the byte order is not native, the advice to convert `array` to native order takes the place of `otherwise`."""
    if array.dtype.isnative:
        return f"has dtype {array.dtype}{otherwise}"
    fix = "pass x.astype(x.dtype.newbyteorder('='))"
    return f"has dtype {array.dtype}, of another byte order; {fix}"
