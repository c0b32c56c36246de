"""Which types hold which, and that numbers are drawn in the order and of the size that runs need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardmath.base.dtypes import ITEMSIZE
from shardmath_torch.tensors.probes.drawing import TypedElements, list_runs
from shardmath_torch.tensors.probes.patterns import as_tensor, holds, list_finite

NAMES = [name for name in ITEMSIZE if name != "float4_e2m1fn_x2" and hasattr(torch, name)]
"""bcomplex32 is there from torch 2.14 on."""


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float8_e4m3fn", "float16"),
        ("float8_e8m0fnu", "bfloat16"),
        ("int32", "float64"),
        ("int8", "bfloat16"),
        ("uint8", "int16"),
        ("bool", "int8"),
        ("float32", "complex64"),
    ],
)
def test_types_that_hold_others(narrow: str, wide: str) -> None:
    assert holds(getattr(torch, wide), getattr(torch, narrow))
    assert not holds(getattr(torch, narrow), getattr(torch, wide))


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("bfloat16", "float16"),
        ("float16", "bfloat16"),
        ("float8_e5m2", "float8_e4m3fn"),
        ("int32", "float32"),
        ("int64", "float64"),
        ("int8", "uint8"),
        ("uint64", "int64"),
        ("float8_e8m0fnu", "float16"),
        ("complex64", "float64"),
        ("float4_e2m1fn_x2", "float32"),
    ],
)
def test_types_that_do_not(narrow: str, wide: str) -> None:
    """-1 goes through 255 and back, and is not the same there."""
    assert not holds(getattr(torch, wide), getattr(torch, narrow))


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int64", "int8", "bool"])
def test_a_mirrored_run_reverses_the_order(name: str) -> None:
    """So that no largest or smallest of several is one of them in both."""
    dtype = getattr(torch, name)
    kind = TypedElements(0, dtype, {"w": (50,)}, (dtype,))
    drawn, mirrored = (
        kind.make("w", run).double().numpy()
        for run in list_runs([kind])
        if run.way in ("drawn", "mirrored") and run.seed == kind.digits + 1
    )
    assert np.array_equal(
        np.sign(np.subtract.outer(drawn, drawn)), -np.sign(np.subtract.outer(mirrored, mirrored))
    )


@pytest.mark.parametrize("name", NAMES)
def test_numbers_ascend(name: str) -> None:
    dtype = getattr(torch, name)
    if dtype.is_complex:
        dtype = dtype.to_real()
    values = as_tensor(list_finite(dtype), dtype).double()
    assert values.isfinite().all()
    assert (values.diff() >= 0).all()


@pytest.mark.parametrize("name", ["int32", "uint32", "int64", "uint64"])
def test_integers_are_listed_once_and_many_fit_types_of_few_bits(name: str) -> None:
    words = list_finite(getattr(torch, name))
    assert len(set(words.tolist())) == len(words)
    assert (np.abs(words.astype(np.float64)) < 2048).sum() > 1000
