"""Operations: the ways in which addends become one value, as a table.

1. A row has all that differs between operations; no other code compares their names.
2. Addends are folded left, two at a time; an average is a sum that is divided at the end.
3. The identity of a sum is -0.0, because +0.0 would turn -0.0 into +0.0.
4. An operation may not exist for an element type: `refuse` gives the reason, and what to do instead.

>>> OPERATIONS["avg"].fold, OPERATIONS["avg"].divides, OPERATIONS["avg"].refuse("float32")
('sum', True, '')
>>> OPERATIONS["avg"].refuse("int32")
' is not an integer; use sum, or cast to a floating type first'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardmath.base.dtypes import is_bool, is_complex, is_integer

__all__ = ["OPERATIONS", "Operation"]

NO_ARITHMETIC = {
    "float8_e8m0fnu": "it has no zero",
    "float4_e2m1fn_x2": "an element is two packed values",
}
"""Types that can be moved but not reduced, and why."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A reduction such as "sum" or "avg": how it combines two values, and the dtypes that it supports.

    `fold` is the operation on two addends; `divides` whether the result is divided by their number.
    `linear` is whether a move with this reduction has an adjoint. With `one_receives`, any one of the
    destination's addends takes a value and the others stay at the identity; otherwise each must hold
    the value itself. `identity` gives the start of a fold, by element type; it is None for operations
    that start from the first addend. `refuse` gives the reason why an element type has no such
    operation, as the end of a sentence that begins "max of complex64", or "" if it has one.
    """

    name: str
    fold: str
    linear: bool
    divides: bool
    one_receives: bool
    identity: Callable[[str], complex] | None
    refuse: Callable[[str], str]


def _zero(dtype: str) -> complex:
    """The zero that leaves any addend unchanged."""
    if is_integer(dtype):
        return 0
    if dtype.endswith("fnuz"):
        return 0.0  # these types have one zero
    if is_complex(dtype):
        return complex(-0.0, -0.0)
    return -0.0


def _one(dtype: str) -> complex:
    return 1


def _refuse_arithmetic(dtype: str) -> str:
    """Why a type has no sum and no product, as words that follow the operation's name; "" if it has both."""
    if is_bool(dtype):
        return " has no agreed meaning; use max for any, min for all, or cast to an integer type"
    if dtype in NO_ARITHMETIC:
        return f" does not exist: {NO_ARITHMETIC[dtype]}; cast to a floating type first"
    return ""


def _refuse_average(dtype: str) -> str:
    """Why a type has no average."""
    if is_integer(dtype):
        return " is not an integer; use sum, or cast to a floating type first"
    return _refuse_arithmetic(dtype)


def _refuse_order(dtype: str) -> str:
    """Why a type has no maximum and no minimum."""
    if is_complex(dtype):
        return ": complex numbers have no order; reduce real and imaginary parts separately"
    return ""


_ROWS = (
    Operation(
        name="sum",
        fold="sum",
        linear=True,
        divides=False,
        one_receives=True,
        identity=_zero,
        refuse=_refuse_arithmetic,
    ),
    Operation(
        name="avg",
        fold="sum",
        linear=True,
        divides=True,
        one_receives=False,
        identity=_zero,
        refuse=_refuse_average,
    ),
    Operation(
        name="product",
        fold="product",
        linear=False,
        divides=False,
        one_receives=True,
        identity=_one,
        refuse=_refuse_arithmetic,
    ),
    Operation(
        name="max",
        fold="max",
        linear=False,
        divides=False,
        one_receives=False,
        identity=None,
        refuse=_refuse_order,
    ),
    Operation(
        name="min",
        fold="min",
        linear=False,
        divides=False,
        one_receives=False,
        identity=None,
        refuse=_refuse_order,
    ),
)

OPERATIONS = {operation.name: operation for operation in _ROWS}
"""Every operation by its name."""
