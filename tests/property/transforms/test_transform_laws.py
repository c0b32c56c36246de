"""Every transform keeps the laws on random cuts; one that looks beyond its block is found out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from shardmath import testing
from shardmath.transforms import Cast, Component, Custom, NegativeExp


def split(array):
    """Halves of float32: their bits' lower and upper words."""
    words = np.ascontiguousarray(array).view(np.uint32)
    return words.astype(np.uint16), (words >> 16).astype(np.uint16)


def join(arrays):
    low, high = (x.astype(np.uint32) for x in arrays)
    return (low | high << 16).view(np.float32)


def count_blocks(array):
    """The largest of each block of 4 along the last dimension, and what is there."""
    short = -array.shape[-1] % 4
    padded = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, short)])
    return array, padded.reshape(*padded.shape[:-1], -1, 4).max(-1)


def scale(arrays):
    data, largest = arrays
    return data + np.repeat(largest, 4, axis=-1)[..., : data.shape[-1]]


def pack_nibbles(array):
    return ((array[..., ::2] & 15) | (array[..., 1::2] & 15) << 4,)


CASES = {
    "source": (Cast("bfloat16"), (5, 6), "float32", "bfloat16"),
    "destination": (Cast("bfloat16", at="destination"), (5, 6), "float32", "bfloat16"),
    "there and back": (Cast("float16"), (7,), "float32", "float64"),
    "integers": (Cast("int32", lossy=True), (3, 4), "int64", "int8"),
    "scalar": (Cast("float16"), (), "float64", "float16"),
    "exp": (NegativeExp(), (9,), "bfloat16", "float32"),
    "exp at source": (NegativeExp(at="source"), (9,), "float32", "bfloat16"),
    "two": (
        Custom("s", (Component("low", "uint16"), Component("high", "bfloat16")), split, join),
        (4, 5),
        "float32",
        "float32",
    ),
    "blocks": (
        Custom(
            "b", (Component("data", "uint8"), Component("most", "uint8", (4,))), count_blocks, scale
        ),
        (3, 22),
        "uint8",
        "uint8",
    ),
    "nibbles": (
        Custom("n", (Component("data", "uint8", (2,), (1,)),), pack_nibbles),
        (3, 12),
        "uint8",
        "uint8",
        (3, 6),
    ),
}


FEW = settings(max_examples=settings.default.max_examples * 2 // 5)
"""A case is a plan and its simulation on up to 12 ranks, and there are ten kinds of them."""
FOUND = settings(phases=[Phase.generate])
"""Whether something fails, not the smallest of what does."""


@pytest.mark.parametrize("case", CASES)
def test_transforms_keep_the_laws(case: str) -> None:
    @FEW
    @given(testing.transform_cases(*CASES[case]))
    def check(drawn) -> None:
        testing.check_transform(*drawn)

    with np.errstate(all="ignore"):
        check()


BROKEN = {
    "looks at neighbors": lambda a: (a - a.mean(dtype=a.dtype),),
    "reverses": lambda a: (a[::-1].copy(),),
    "counts": lambda a: (a + len(a),),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_looks_beyond_its_block_is_found(how: str) -> None:
    bad = Custom(how, (Component("data", "uint8"),), at_source=BROKEN[how])

    @FOUND
    @given(testing.transform_cases(bad, (8,), "uint8", "uint8"))
    def check(drawn) -> None:
        testing.check_transform(*drawn)

    with pytest.raises(AssertionError):
        check()


def test_blocks_that_are_too_wide_are_found() -> None:
    """A function of 4 positions that says it is one of 2."""
    bad = Custom("w", (Component("data", "uint8"), Component("most", "uint8", (2,))), count_blocks)

    @FOUND
    @given(testing.transform_cases(bad, (8,), "uint8", "uint8"))
    def check(drawn) -> None:
        testing.check_transform(*drawn)

    with pytest.raises((AssertionError, ValueError)):
        check()
