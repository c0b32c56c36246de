"""Names of element types and their sizes in bytes; the core needs nothing else of them.

1. Names are numpy's and torch's: `float32`, `bfloat16`, `float8_e4m3fn`.
2. Dtypes and scalar types of either are accepted: `torch.float32`, `numpy.dtype("int8")`,
   `np.float64`, `float`.
3. Only `is_integer` and `is_bool` matter beyond the size: an average of integers is an error.

>>> canonical("torch.bfloat16"), itemsize("bfloat16")
('bfloat16', 2)
"""

from __future__ import annotations

from shardmath.base.errors import LayoutError
from shardmath.base.text import shown

__all__ = ["ITEMSIZE", "canonical", "is_bool", "is_complex", "is_integer", "itemsize"]

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "bcomplex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes per element, by name (torch 2.15 and numpy 2; a `_x2` element is a byte of two values)."""

_PLAIN = {name: name for name in ITEMSIZE}
"""By name, the name as a plain str, also for a name of a subclass of str."""

PYTHON: dict[object, str] = {float: "float64", int: "int64", bool: "bool", complex: "complex128"}
"""Python's own types, as numpy reads them."""

ALIASES = {"half": "float16", "double": "float64", "bool_": "bool"}
"""Other names, the same in numpy and torch."""

AMBIGUOUS = {"float": "float32 or float64", "int": "int32 or int64"}
"""Names that numpy and torch read differently."""


def canonical(dtype: object) -> str:
    """The canonical name, such as "float32", of `dtype`: a name, a torch or numpy dtype, or a Python or numpy type.

    Raises LayoutError if it is not a type that shardmath knows.
    """
    if isinstance(dtype, type) and dtype in PYTHON:
        return PYTHON[dtype]
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    module, _, name = text.rpartition(".")
    name = ALIASES.get(name, name)
    if name in AMBIGUOUS:
        what = f"dtype {text!r} is one size in numpy and another in torch"
        raise LayoutError(f"{what}; write {AMBIGUOUS[name]}")
    if name not in ITEMSIZE or module not in ("", "torch", "numpy", "np"):
        raise LayoutError(f"unknown dtype {shown(text)}; {_suggest(name)}")
    # Not `name`, which may be of a subclass of str.
    return _PLAIN[name]


MOST = 32
"""The number of characters of a name that are compared with the known ones."""


def _suggest(name: str) -> str:
    """The names that may have been meant by an unknown name, as the end of a message."""
    from difflib import get_close_matches  # 3 ms that only a mistake should cost

    longer = [known for known in ITEMSIZE if name and known.startswith(f"{name}_")]
    near = longer or get_close_matches(name[:MOST], ITEMSIZE, n=1)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"use one of {', '.join(ITEMSIZE)}"


def itemsize(dtype: object) -> int:
    """The number of bytes that one element of `dtype` takes."""
    return ITEMSIZE[canonical(dtype)]


def is_integer(dtype: str) -> bool:
    """Whether the dtype with the canonical name `dtype` is an integer type."""
    return dtype.startswith(("int", "uint"))


def is_bool(dtype: str) -> bool:
    """Whether the dtype with the canonical name `dtype` is the boolean type."""
    return dtype == "bool"


def is_complex(dtype: str) -> bool:
    """Whether the dtype with the canonical name `dtype` is complex."""
    return "complex" in dtype
