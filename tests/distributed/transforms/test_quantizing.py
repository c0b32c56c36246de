"""Quantized moves over gloo are what formats say, bit for bit: all formats, at all ends, on these and other ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

import shardmath as sm
from shardmath import formats
from shardmath.transforms import Dequantize, Quantize, Requantize
from tests.distributed.pool import Pool
from tests.distributed.tasks.transforms import Moved
from tests.distributed.transforms.test_compile import Wanted, check, make

pytestmark = pytest.mark.long

SHAPE = (64, 256)
AMAX = 3.0

FORMATS: list[formats.Format] = [
    formats.MXFP8(),
    formats.MXFP8(rounding="floor", axis=-2),
    formats.MXFP8(data="e5m2"),
    formats.FP8Blocks((16, 32)),
    formats.FP8Blocks((1, 64), power_of_two=True),
    formats.FP8("channel"),
    formats.FP8(tensor_amax=AMAX),
    formats.NVFP4(tensor_amax=AMAX),
    formats.NVFP4(two_d=True, tensor_amax=AMAX),
]
RANKS = [(0, 1, 2, 3), (2, 0, 3, 1), (4, 5, 6, 7), (1, 4, 6, 3)]
TEXTS = ["(tp n) k", "n (tp k)", "(dp n) (tp k)", "(tp n) (dp k)", "n k", "(dp tp n) k", "(n tp) k"]
SUFFIXES = ("_scale", "_scale_2")


def hold(format: formats.Format | None, whole: sm.Layout) -> dict[str, sm.Layout]:
    """The tensor, or its parts. Raises FormatError where ranks cut blocks."""
    if format is None:
        return {"w": whole}
    names = ("w", *(f"w{suffix}" for suffix in SUFFIXES))
    return dict(zip(names, format.layouts(whole), strict=False))


def draw(rng: random.Random, dtype: str) -> sm.Layout:
    mesh = sm.Mesh(dp=2, tp=2, ranks=rng.choice(RANKS))
    return sm.Layout(SHAPE, mesh, rng.choice(TEXTS), dtype=dtype)


def list_rules(format: formats.Format, seed: int) -> Iterator[tuple[Any, Any, Any]]:
    """Each rule, and the formats at its two ends."""
    suffixes = SUFFIXES[: len(format.parts) - 1]
    for at in ("source", "destination"):
        wire = ("bfloat16", "float32", "float16")[seed % 3]
        yield Quantize(format, at, suffixes, wire), None, format  # type: ignore[arg-type]
        yield Dequantize(format, at, suffixes), format, None  # type: ignore[arg-type]
        other = FORMATS[(FORMATS.index(format) + 1) % 5]
        if not isinstance(format, formats.NVFP4) and other != format:
            named = suffixes, SUFFIXES[:1]
            yield Requantize(format, other, at, named), format, other  # type: ignore[arg-type]
    yield None, format, format


def make_case(rule: Any, here: Any, there: Any, seed: int) -> tuple[Moved, Wanted] | None:
    """A tensor between two random layouts; None where these cut blocks."""
    rng = random.Random(seed)
    dtype = rng.choice(["float32", "bfloat16"])
    try:
        src, dst = (hold(one, draw(rng, dtype)) for one in (here, there))
        options = {"commit": "all"} if seed % 4 == 0 else {}
        return make(src, dst, {"w": rule} if rule else {}, seed, options=options)
    except (sm.FormatError, sm.PlanError) as error:
        if "cuts a block of" in str(error) or "divides dimension" in str(error):
            return None
        raise


def list_cases(format: formats.Format, count: int) -> list[tuple[Moved, Wanted]]:
    """So many cases of each rule."""
    cases = []
    for seed in range(count):
        for number, (rule, here, there) in enumerate(list_rules(format, seed)):
            drawn = (
                make_case(rule, here, there, 1000 * n + 7 * seed + number)
                for n in itertools.count()
            )
            cases.append(next(case for case in drawn if case is not None))
    return cases


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_all_ends_of_all_formats(pool: Pool, format: formats.Format, count: int) -> None:
    check(pool, list_cases(format, count))


def test_a_rank_without_rows_has_the_scale_of_all(pool: Pool) -> None:
    """At the source it may be the one that sends it; at the destination it is read from it later."""
    cases = []
    both = sm.Mesh(tp=2)
    for format in (formats.FP8(tensor_amax=AMAX), formats.NVFP4(tensor_amax=AMAX)):
        suffixes = SUFFIXES[: len(format.parts) - 1]
        for dtype, text in itertools.product(("bfloat16", "float32"), ("n k", "(tp n) k")):
            src = {"w": sm.Layout((1, 64), both, "(tp n) k", dtype=dtype)}
            dst = hold(format, sm.Layout((1, 64), both, text, dtype=dtype))
            for at in ("source", "destination"):
                rule = Quantize(format, at, suffixes)  # type: ignore[arg-type]
                cases.append(make(src, dst, {"w": rule}))
    check(pool, cases)
