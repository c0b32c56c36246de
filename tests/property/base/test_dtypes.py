"""Names of element types, their sizes, and near misses."""

import numpy as np
import pytest

from shardmath import LayoutError
from shardmath.base import dtypes


class Fake:
    """Prints as torch's dtypes do."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("given", "name", "size"),
    [
        ("float32", "float32", 4),
        ("torch.bfloat16", "bfloat16", 2),
        (Fake("torch.float8_e4m3fn"), "float8_e4m3fn", 1),
        (np.dtype("int8"), "int8", 1),
        (np.float64, "float64", 8),
        (np.bool_, "bool", 1),
        (float, "float64", 8),
        ("half", "float16", 2),
        ("double", "float64", 8),
        (int, "int64", 8),
        ("torch.complex128", "complex128", 16),
        ("float4_e2m1fn_x2", "float4_e2m1fn_x2", 1),
    ],
)
def test_canonical(given: object, name: str, size: int) -> None:
    assert dtypes.canonical(given) == name
    assert dtypes.itemsize(given) == size


@pytest.mark.parametrize("name", [n for n in dtypes.ITEMSIZE if hasattr(np, n)])
def test_sizes_are_numpys(name: str) -> None:
    assert dtypes.ITEMSIZE[name] == np.dtype(name).itemsize


def test_sizes_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    shared = [name for name in dtypes.ITEMSIZE if hasattr(torch, name)]
    assert len(shared) > 15
    for name in shared:
        assert dtypes.canonical(getattr(torch, name)) == name
        assert dtypes.ITEMSIZE[name] == getattr(torch, name).itemsize


def test_kinds() -> None:
    assert {name for name in dtypes.ITEMSIZE if dtypes.is_integer(name)} == {
        f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
    }
    assert [name for name in dtypes.ITEMSIZE if dtypes.is_bool(name)] == ["bool"]
    halves = {"complex32", "bcomplex32"}
    assert {n for n in dtypes.ITEMSIZE if dtypes.is_complex(n)} == {
        *halves,
        "complex64",
        "complex128",
    }


def test_errors(fails) -> None:
    fails(
        lambda: dtypes.canonical("torch.bfloat61"),
        LayoutError,
        "unknown dtype 'torch.bfloat61'; did you mean 'bfloat16'?",
    )
    fails(
        lambda: dtypes.itemsize("zzz"),
        LayoutError,
        f"unknown dtype 'zzz'; use one of {', '.join(dtypes.ITEMSIZE)}",
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("float8", "float8_e4m3fn"),
        ("float8_e4m3", "float8_e4m3fn"),
        ("float4", "float4_e2m1fn_x2"),
        ("flaot32", "float32"),
    ],
)
def test_the_nearest_name_is_one_of_that_size(name: str, near: str) -> None:
    """float8 was taken for float64."""
    with pytest.raises(LayoutError, match=f"did you mean '{near}'") as caught:
        dtypes.canonical(name)
    assert "float64" not in str(caught.value)
