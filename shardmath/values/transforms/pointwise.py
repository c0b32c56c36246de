"""Pointwise: functions of each number, done at the source or at the destination.

1. `Cast` rounds each number to `dtype`, and then converts it to the destination's dtype. So source and destination may
   both be float32, with bfloat16 in between.
2. With `at="source"`, numbers of `dtype` travel. With `at="destination"`, the source's numbers travel, and are rounded
   when they arrive. Both give the same values, bit for bit.
3. A tensor that is Partial at its source is reduced before it is transformed, so only `at="destination"` is possible.

>>> wide, narrow = Form((4,), "float32"), Form((4,), "bfloat16")
>>> [str(*Cast("bfloat16", at=at).components(wide, narrow)) for at in ("source", "destination")]
['data bfloat16', 'data float32']
>>> NegativeExp().finalize((np.array([0.0, 1.0], np.float32),), wide, wide)
array([-1.       , -2.7182817], dtype=float32)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmath.base import dtypes
from shardmath.base.errors import PlanError
from shardmath.values.formats.casting import cast_array, is_float, refuse_cast
from shardmath.values.formats.elements import Array, numpy_type
from shardmath.values.formats.exponential import exp, power_of_two
from shardmath.values.transforms.components import AsHeld, Component, End, Form, read_end

__all__ = ["Cast", "NegativeExp"]


@dataclass(frozen=True, slots=True)
class Cast:
    """A transform that casts numbers to `dtype`, and then to the destination tensor's dtype. The first cast is on the
    sending ranks if `at` is "source", and on the receiving ranks if "destination"; the second is always on the
    receiving ranks.

    Floats may always be rounded, to the nearest, ties to even. `lossy=True` also allows casts of integers to types that
    lack some of them: they keep their low bits, or are rounded to floats; and casts of numbers to bool. `transformed`
    raises PlanError for dtypes that have no cast.
    """

    dtype: str
    at: End = "source"
    lossy: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtypes.canonical(self.dtype))
        read_end(self.at, f"Cast({self.dtype!r})")
        if not isinstance(self.lossy, bool):
            raise PlanError(f"Cast({self.dtype!r}) has lossy={self.lossy!r}; give True or False")

    def path(self, src: Form, dst: Form) -> tuple[str, str, str]:
        """Return the three dtypes through which each number is cast, in order: the source's dtype, this Cast's `dtype`,
        and the destination's dtype."""
        return src.dtype, self.dtype, dst.dtype

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return a tuple of the one component to send: all numbers, in `dtype` if cast at the source, else in the
        source's dtype. Raises PlanError for dtypes that have no cast."""
        first, middle, last = self.path(src, dst)
        for old, new in ((first, middle), (middle, last)):
            why = refuse_cast(old, new, self.lossy)
            if why:
                raise PlanError(f"{self} of {src} to {dst}: cannot cast {old} to {new}: {why}")
        return (Component("data", middle if self.at == "source" else first),)

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags. The first is True if nothing is cast at the source, which sends the tensor unchanged; the
        second is True if nothing is cast at the destination, which keeps the tensor as it arrives."""
        first, middle, last = self.path(src, dst)
        if self.at == "source":
            return AsHeld(first == middle, middle == last)
        return AsHeld(True, first == middle == last)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Return a tuple of the one array to send: `array` cast to `dtype`."""
        return (cast_array(array, src.dtype, self.dtype),)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Return the received array in the destination's dtype, cast to `dtype` first if the source did not do so."""
        (array,) = arrays
        if self.at == "destination":
            array = cast_array(array, src.dtype, self.dtype)
        return cast_array(array, self.dtype, dst.dtype)


@dataclass(frozen=True, slots=True)
class NegativeExp:
    """A transform that computes -exp of each number, rounded to float32 and then to the destination's dtype. `at` is
    the end that computes it, "source" or "destination".

    Engines store A of a state-space model, trainers store A_log. Raises PlanError for tensors that are not floats.
    """

    at: End = "destination"

    def __post_init__(self) -> None:
        read_end(self.at, "NegativeExp")

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return a tuple of the one component to send: -exp of the numbers if computed at the source, else the
        numbers."""
        for form in (src, dst):
            if not is_float(form.dtype):
                what = f"{self} of {src} to {dst}: {form.dtype} has no exp"
                raise PlanError(f"{what}; give tensors of a float dtype")
        return (Component("data", dst.dtype if self.at == "source" else src.dtype),)

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags. The first is True if -exp is not computed at the source, which sends the tensor unchanged;
        the second is True if it is not computed at the destination, which keeps the tensor as it arrives."""
        return AsHeld(self.at == "destination", self.at == "source")

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Return a tuple of the one array to send: -exp of `array`, in the destination's dtype. Called only if `at` is
        "source" (see `as_held`)."""
        return (_negate_exp(array, src.dtype, dst.dtype),)

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Return the destination's array: -exp of the array that was sent. Called only if `at` is "destination" (see
        `as_held`)."""
        (array,) = arrays
        return _negate_exp(array, src.dtype, dst.dtype)


def _negate_exp(array: Array, src: str, dst: str) -> Array:
    """-exp of the elements, computed in float64, and rounded to float32 and then to `dst`."""
    wide = cast_array(array, src, "float64").astype(numpy_type("float64"))
    positive = exp(wide, power_of_two)
    rounded = cast_array(np.negative(positive), "float64", "float32")
    return cast_array(rounded, "float32", dst)
