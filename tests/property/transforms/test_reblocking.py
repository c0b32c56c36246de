"""What a finer grain costs: numbers that are quantized already, quantized once more with scales of smaller tiles.

1. With the scales of the larger tiles, repeated, nothing. All of this is of finite numbers.
2. With scales that are powers of two, on both sides, nothing: a finer scale is a power of two and no larger, so data
   are shifted towards larger numbers, where they have no fewer bits.
3. Otherwise each number is rounded once more, by 4/77 of it at most (E4M3; 3/35 of E5M2), or where it becomes subnormal
   by half a step of those; and the finer tile that has its large tile's largest number loses nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.formats import FP8, MXFP8, Format, FP8Blocks
from shardmath.transforms import Requantize

SHAPE = (16, 64)
COARSE = (8, 32)
FINER = [(4, 32), (8, 16), (1, 32), (2, 4)]
EACH = pytest.mark.parametrize("tile", FINER, ids=str)
KINDS = pytest.mark.parametrize("data", ["e4m3", "e5m2"])
WORST = {"e4m3": 4 / 77, "e5m2": 3 / 35}
"""By how much of it a number changes at most: `test_the_worst_pair_of_numbers`."""
HALF_STEP = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
"""Half of the smallest number, of what a scale is 1 for."""
FLOAT32 = 2.0**-22
"""Four roundings of float32: of numbers before, of the scale, of the quotient and of the product."""


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """Rows of many magnitudes, so that finer tiles differ; some numbers are zeros."""
    seed = draw(st.integers(0, 1 << 30))
    spread = draw(st.sampled_from([0, 2, 6, 20]))
    random = np.random.default_rng(seed)
    powers = random.integers(-spread, spread + 1, SHAPE)
    values = np.ldexp(random.standard_normal(SHAPE), powers).astype(np.float32)
    values[random.random(SHAPE) < 0.05] = 0
    return values


def read(one: Format, values: np.ndarray) -> np.ndarray:
    """What numbers are once they are quantized."""
    return one.dequantize(*one.quantize(values))


def repeat(scales: np.ndarray, by: tuple[int, int]) -> np.ndarray:
    """The scales of tiles, for each of the finer ones inside."""
    return scales.repeat(by[0], axis=0).repeat(by[1], axis=1)


def list_tops(values: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """The largest magnitude of the tile that each number is in."""
    return repeat(FP8Blocks(tile).amax(values), tile)


@EACH
@KINDS
@given(values=numbers())
def test_repeated_scales_cost_nothing(tile: tuple[int, int], data: str, values: np.ndarray) -> None:
    old, new = FP8Blocks(COARSE, data=data), FP8Blocks(tile, data=data)
    codes, scales = old.quantize(values)
    finer = repeat(scales, (COARSE[0] // tile[0], COARSE[1] // tile[1]))
    assert finer.shape == new.scale_shape(SHAPE)
    np.testing.assert_array_equal(new.dequantize(codes, finer), old.dequantize(codes, scales))


@EACH
@KINDS
@given(values=numbers())
@example(values=np.full(SHAPE, 2.0**-126, np.float32))  # no scale is smaller
@example(values=np.full(SHAPE, 1e38, np.float32))
@example(values=np.ldexp(np.float32(1), -(np.arange(1024) % 140)).reshape(SHAPE))
def test_powers_of_two_cost_nothing(tile: tuple[int, int], data: str, values: np.ndarray) -> None:
    old = FP8Blocks(COARSE, power_of_two=True, data=data)
    known = read(old, values)
    np.testing.assert_array_equal(read(FP8Blocks(tile, power_of_two=True, data=data), known), known)


@KINDS
@given(values=numbers())
def test_so_do_blocks_of_mxfp8_by_rceil(data: str, values: np.ndarray) -> None:
    known = read(FP8Blocks(COARSE, power_of_two=True, data=data), values)
    np.testing.assert_array_equal(read(MXFP8(data), known), known)


def test_by_floor_they_saturate() -> None:
    """Of 240 and 1, 480 after the scale of `floor`: 448 is the largest number."""
    values = np.full((1, 64), 448, np.float32)
    values[0, 32:] = 240
    known = read(FP8Blocks((1, 64), power_of_two=True), values)
    np.testing.assert_array_equal(known, values)
    assert read(MXFP8(rounding="floor"), known)[0, 32:].tolist() == [224] * 32


OLD = [FP8Blocks(COARSE), FP8Blocks(COARSE, power_of_two=True), FP8()]


@EACH
@KINDS
@pytest.mark.parametrize("one", OLD, ids=str)
@given(values=numbers())
def test_other_scales_round_once_more(
    tile: tuple[int, int], data: str, one: FP8Blocks | FP8, values: np.ndarray
) -> None:
    known = read(replace(one, data=data), values)
    new = FP8Blocks(tile, data=data)
    codes, scales = new.quantize(known)
    lost = np.abs(new.dequantize(codes, scales).astype(np.float64) - known)
    sizes = np.abs(known)
    bound = np.maximum(WORST[data] * sizes, HALF_STEP[data] * repeat(scales, tile))
    assert (lost <= bound + FLOAT32 * sizes).all()


@pytest.mark.parametrize(("data", "bits"), [("e4m3", 4), ("e5m2", 3)])
def test_the_worst_pair_of_numbers(data: str, bits: int) -> None:
    """Of data before, and the largest of them in the tile: scales cancel, and 7 / 2^k is the largest of the type."""
    significands = range(1 << (bits - 1), 1 << bits)
    found = []
    for number, largest in itertools.product(significands, repeat=2):
        exact = Fraction(7 * number, largest) * 4
        while exact >= 1 << bits:
            exact /= 2
        found.append(abs(round(exact) - exact) / exact)
    assert float(max(found)) == WORST[data]


@pytest.mark.parametrize(("data", "number", "largest"), [("e4m3", 11, 144), ("e5m2", 5, 64)])
def test_the_bound_is_met(data: str, number: int, largest: int) -> None:
    """A tile of a number and of the largest, beside one of larger numbers."""
    values = np.array([[448, 448, largest, number]], np.float32)
    known = read(FP8Blocks((1, 4), True, data), values)
    np.testing.assert_array_equal(known, values)
    again = read(FP8Blocks((1, 2), data=data), known)
    assert again[0, :3].tolist() == [448, 448, largest]
    assert abs(again[0, 3] / number - 1) == pytest.approx(WORST[data])


@EACH
@KINDS
@given(values=numbers())
def test_the_tile_of_the_largest_number_stays(
    tile: tuple[int, int], data: str, values: np.ndarray
) -> None:
    known = read(FP8Blocks(COARSE, data=data), values)
    again = read(FP8Blocks(tile, data=data), known)
    stays = list_tops(known, tile) == list_tops(known, COARSE)
    assert stays.any()
    np.testing.assert_array_equal(again[stays], known[stays])


OF_SCALES = "w_scale_inv"


def lie(one: Format, layout: sm.Layout) -> dict[str, sm.Layout]:
    """Data and scales, by name."""
    return dict(zip(("w", OF_SCALES), one.layouts(layout), strict=True))


def cut(layout: sm.Layout, rank: int, whole: np.ndarray) -> np.ndarray:
    """What the rank holds."""
    return whole[np.ix_(*layout.indices(rank))]


def test_a_plan_to_a_finer_grain() -> None:
    """Done at the source, the destination may divide tiles; at the destination it would have parts of large ones."""
    old, new = FP8Blocks((8, 16)), FP8Blocks((4, 16))
    here = sm.Layout(SHAPE, sm.Mesh(tp=2), "(tp n) k", dtype="uint8")
    there = sm.Layout(SHAPE, sm.Mesh(tp=4, ranks=(2, 3, 4, 5)), "(tp n) k", dtype="uint8")
    src, dst = lie(old, here), lie(new, there)
    parts = old.quantize(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32))
    given = dict(zip(src, parts, strict=True))
    wanted = dict(zip(dst, new.quantize(old.dequantize(*parts)), strict=True))
    moved = sm.transforms.transformed(src, dst, {"w": Requantize(old, new, "source")})
    plan = sm.plan(moved.src, moved.dst)
    sm.verify(plan)
    sent = {}
    for rank in plan.src_ranks:
        held = {name: cut(layout, rank, given[name]) for name, layout in src.items()}
        sent[rank] = moved.prepare(rank, held)
    arrived = sm.simulate(plan, sent)
    for rank in plan.dst_ranks:
        found = moved.finalize(rank, arrived[rank])
        for name, layout in dst.items():
            np.testing.assert_array_equal(found[name], cut(layout, rank, wanted[name]))
    with pytest.raises(
        sm.PlanError,
        match=("and so cuts a block of 8 of component 'scales float32 per 8 x 16' at 4"),
    ):
        sm.transforms.transformed(src, dst, {"w": Requantize(old, new, "destination")})
