"""Parameters as the rules see them, and the integers that rules pad by.

1. A parameter is a name, a shape, and properties that some rule needs. Rules take parameters in forward order.
2. Padding is computed in integers; Megatron divides floats, which is wrong above 2^53.

>>> Param("w", (64, 96)).numel, pad_to_divisor(65, 64), bucket_end_divisor(3)
(6144, 128, 384)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer, known, listed, text
from shardmath.base.errors import ParamLayoutError
from shardmath.base.moved import former_attributes
from shardmath.base.text import shown

__all__ = [
    "START",
    "Param",
    "bucket_end_divisor",
    "number_alike",
    "pad_bucket_end",
    "pad_param_start",
    "pad_to_divisor",
    "read_bucket_size",
    "read_flag",
    "read_name",
    "read_params",
    "read_positive",
    "round_up",
]

START = 64
"""Parameters start at multiples of this many elements (Megatron-Core `pad_param_start`; its docstring says bytes)."""

NCCL = 128
"""The end of a bucket is a multiple of this and of the number of ranks (Megatron-Core `bucket_end_divisor`)."""

BUSBW = 1 << 16
"""The end of a bucket is also a multiple of this if NCCL is to run at full bus bandwidth."""


def read_positive(value: object, what: str) -> int:
    """Convert `value`, an integer of 1 or more, to an int. For other values, raise ParamLayoutError; its message begins
    with `what`, a noun for the value such as "shards"."""
    number = as_integer(value, what, ParamLayoutError)
    if number < 1:
        raise ParamLayoutError(f"{what} is {number}; give at least 1")
    return number


def read_flag(value: object, what: str) -> bool:
    """Convert `value`, a Python or NumPy bool, to a Python bool. For other values, raise ParamLayoutError; its message
    begins with `what`, the name of the argument."""
    if type(value) is bool:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise ParamLayoutError(f"{what} is {value!r}; give True or False")


def pad_to_divisor(value: int, divisor: int) -> int:
    """The least multiple of `divisor` that is not below `value`.

    Raises ParamLayoutError for a negative value, or a divisor below 1.

    >>> pad_to_divisor(65, 64), pad_to_divisor(2**53 + 1, 64) - 2**53
    (128, 64)
    """
    number = as_integer(value, "the value to pad", ParamLayoutError)
    by = read_positive(divisor, "the divisor")
    if number < 0:
        raise ParamLayoutError(f"the value to pad is {number}; give at least 0")
    return round_up(number, by)


def read_name(name: object) -> str:
    """Return `name`, the name of a parameter, as a plain str. Raises ParamLayoutError unless it is a str."""
    if not isinstance(name, str):
        raise ParamLayoutError(f"the name of a parameter is {shown(name)}; name parameters by str")
    # An instance of a subclass of str becomes a plain str.
    return text(name, "the name of a parameter", ParamLayoutError)


def round_up(value: int, divisor: int) -> int:
    """The least multiple of `divisor` that is not below `value`; unlike `pad_to_divisor`, without checks."""
    return -(-value // divisor) * divisor


def pad_param_start(start: int) -> int:
    """The first position, in elements, from `start` on where Megatron-Core's distributed optimizers may place a
    parameter: a multiple of 64."""
    return pad_to_divisor(start, START)


def bucket_end_divisor(data_parallel_world_size: int, pad_for_high_nccl_busbw: bool = False) -> int:
    """Return a number of elements: Megatron-Core's distributed optimizers pad the end of every bucket to a multiple of
    this number."""
    size = read_positive(data_parallel_world_size, "data_parallel_world_size")
    bandwidth_multiple = (
        BUSBW if read_flag(pad_for_high_nccl_busbw, "pad_for_high_nccl_busbw") else 1
    )
    return math.lcm(size, NCCL, bandwidth_multiple)


def read_bucket_size(bucket_size: object) -> int | None:
    """Return `bucket_size` as an int, or None (one bucket for all parameters) if it is None. Raises ParamLayoutError
    for anything but None and integers of 1 or more."""
    if bucket_size is None:
        return None
    return read_positive(bucket_size, "bucket_size (None is one bucket)")


def pad_bucket_end(
    end: int, data_parallel_world_size: int, pad_for_high_nccl_busbw: bool = False
) -> int:
    """Return the position, in elements, to which Megatron-Core's distributed optimizers pad a bucket whose parameters
    end at `end`.

    It is a multiple of 128 and of the data-parallel size, and of 65536 if `pad_for_high_nccl_busbw`.
    """
    divisor = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    return pad_to_divisor(end, divisor)


@former_attributes(quantised="quantized")
@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a model: its `shape` on this rank (for `model_parallel_state`, the global one), and the properties
    that decide its position in a flat buffer.

    `quantized` is whether its storage is quantized (uint8 in a buffer), or the format: "fp8", "mxfp8", "nvfp4".
    `grad_dtype` is its gradient's dtype, `dtype` if not given. `managed` is whether LayerWise optimizers orthogonalize
    it, by default every matrix that is not a shared embedding; give False for an embedding or output layer.
    `gtp_remat_size` is the number of ranks that hold rows of one matrix that is orthogonalized as a whole.

    Raises ParamLayoutError for a name that is not a str, or an unknown format; LayoutError for an unknown dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    grad_dtype: str | None = None
    quantized: bool | str = False
    shared_embedding: bool = False
    expert_parallel: bool = False
    managed: bool | None = None
    gtp_remat_size: int = 1
    numel: int = field(init=False, repr=False, compare=False)
    """Elements."""

    def __post_init__(self) -> None:
        if type(self.name) is not str:
            object.__setattr__(self, "name", read_name(self.name))
        if not _is_shape(self.shape):
            shape = _read_shape(self.name, self.shape)
            object.__setattr__(self, "shape", shape)
        for name, value in self._read_fields():
            object.__setattr__(self, name, value)
        numel = math.prod(self.shape)
        object.__setattr__(self, "numel", numel)

    def _read_fields(self) -> Iterator[tuple[str, object]]:
        """Canonical values of the fields except name and shape, if they are not canonical already."""
        # A model has thousands of parameters, most of them canonical: checking types is fast.
        if type(self.dtype) is not str or self.dtype not in dtypes.ITEMSIZE:
            yield "dtype", dtypes.canonical(self.dtype)
        if self.grad_dtype is not None:
            yield "grad_dtype", dtypes.canonical(self.grad_dtype)
        if type(self.quantized) is not bool:
            yield "quantized", _read_format(self.name, self.quantized)
        yield from self._read_flags()
        size = self.gtp_remat_size
        if type(size) is not int or size < 1:
            what = f"gtp_remat_size of parameter {self.name!r}"
            yield "gtp_remat_size", read_positive(size, what)

    def _read_flags(self) -> Iterator[tuple[str, bool]]:
        """Canonical values of the fields that are True or False, if they are not canonical already."""
        flags = ["shared_embedding", "expert_parallel"]
        if self.managed is not None:
            flags.append("managed")
        for name in flags:
            value = getattr(self, name)
            if type(value) is not bool:
                what = f"{name} of parameter {self.name!r}"
                yield name, read_flag(value, what)

    @property
    def gradient(self) -> str:
        """The dtype of the parameter's gradient."""
        return self.grad_dtype or self.dtype

    @property
    def is_managed(self) -> bool:
        """Whether a LayerWise optimizer orthogonalizes the parameter."""
        if self.managed is None:
            return len(self.shape) == 2 and not self.shared_embedding
        return self.managed


FORMATS = ("fp8", "mxfp8", "nvfp4")
"""The quantized formats that Megatron's buffers know."""


def _is_shape(shape: object) -> bool:
    """Whether the value is a tuple of Python's integers, none of them negative."""
    if type(shape) is not tuple or not set(map(type, shape)) <= {int}:
        return False
    return min(shape, default=0) >= 0


def _read_shape(name: str, shape: object) -> tuple[int, ...]:
    """The sizes as ints; a single number is one size. Raises ParamLayoutError."""
    items: tuple[object, ...] = (shape,)
    if isinstance(shape, Sequence | np.ndarray) and not isinstance(shape, str | bytes):
        items = listed(shape, f"sizes of parameter {name!r}", ParamLayoutError)
    what = f"a size of parameter {name!r}"
    sizes = tuple(as_integer(n, what, ParamLayoutError) for n in items)
    if min(sizes, default=0) < 0:
        raise ParamLayoutError(f"parameter {name!r} has shape {sizes}; give sizes of 0 or more")
    return sizes


def _read_format(name: str, quantized: object) -> bool | str:
    """The value of `quantized`, which is not Python's bool: numpy's bool as Python's, or the name of a format. Raises
    ParamLayoutError for anything else."""
    if isinstance(quantized, np.bool_):
        return bool(quantized)
    kind = known(quantized, FORMATS)
    if kind is None:
        choices = ", ".join(map(repr, (False, True, *FORMATS)))
        raise ParamLayoutError(
            f"parameter {name!r}: quantized={shown(quantized)} is not a format; give one of {choices}"
        )
    return kind


def read_params(params: Iterable[Param]) -> tuple[Param, ...]:
    """Return `params` as a tuple. Raises ParamLayoutError for anything that is not a Param, and for a repeated name."""
    if isinstance(params, Param) or not isinstance(params, Iterable):
        fix = "pass a list of buffers.Param in forward order"
        raise ParamLayoutError(f"params is {shown(params)}; {fix}")
    out = listed(params, "parameters", ParamLayoutError)
    names: set[str] = set()
    for param in out:
        if not isinstance(param, Param):
            raise ParamLayoutError(
                f"{shown(param)} is not a parameter; give buffers.Param(name, shape)"
            )
        if param.name in names:
            raise ParamLayoutError(
                f"parameter {param.name!r} is given twice; give it once, even if it is tied"
            )
        names.add(param.name)
    return out


def number_alike(keys: Iterable[object]) -> list[int]:
    """For each item of `keys`, the number of equal items before it."""
    counts: dict[object, int] = {}
    numbers = []
    for key in keys:
        number = counts.get(key, 0)
        numbers.append(number)
        counts[key] = number + 1
    return numbers
