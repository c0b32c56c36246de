"""Swizzled scales: the formula, there and back, and as layouts that are planned and proved like any others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.formats import flattened, swizzle, swizzle_runs, swizzled, unswizzle

shapes = st.tuples(st.integers(0, 300), st.integers(0, 11))


def offset(r: int, c: int, columns: int) -> int:
    """As cuBLAS has it (and torchao's `to_blocked`)."""
    across = -(-columns // 4)
    tile = (r // 128) * across + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


@given(shape=shapes)
def test_the_formula(shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    storage = swizzle(scales)
    expected = np.zeros(-(-shape[0] // 128) * -(-shape[1] // 4) * 512, np.uint8)
    for (r, c), scale in np.ndenumerate(scales):
        expected[offset(r, c, shape[1])] = scale
    np.testing.assert_array_equal(storage, expected)
    np.testing.assert_array_equal(unswizzle(storage, shape), scales)
    runs = swizzle_runs(shape)
    numbers = runs.indices()
    held = numbers >= 0
    assert sm.Runs(runs.segments, runs.length) == runs, "canonical, as Runs would make it"
    np.testing.assert_array_equal(scales.ravel()[numbers[held]], storage[held])


def test_rows_are_joined_at_tiles_alone() -> None:
    scales = np.random.default_rng(0).integers(1, 256, (256, 4), np.uint8)
    halves = [swizzle(scales[:128]), swizzle(scales[128:])]
    np.testing.assert_array_equal(np.concatenate(halves), swizzle(scales))
    parts = [swizzle(scales[:96]), swizzle(scales[96:])]
    assert not np.array_equal(np.concatenate(parts), swizzle(scales))


MESH = sm.Mesh(tp=2, dp=2)
TEXTS = ["r c", "(tp r) c", "r (tp c)", "(dp r) (tp c)", "(tp dp r) c", "(tp r 3) c"]


def locals_of(scales: np.ndarray, layout: sm.Layout) -> dict[int, np.ndarray]:
    """What each rank has; 0 in holes."""
    out = {}
    for rank in layout.mesh.ranks:
        rows, columns = layout.indices(rank)
        is_held = (rows >= 0)[:, None] & (columns >= 0)
        out[rank] = scales[np.ix_(rows, columns)] * is_held
    return out


@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 11)),
    src=st.sampled_from(TEXTS),
    dst=st.sampled_from(TEXTS),
)
def test_compact_to_swizzled_and_back_is_a_plan(shape: tuple[int, int], src: str, dst: str) -> None:
    """Each rank has its own scales, swizzled on their own; what arrives is what the rank would make itself."""
    scales = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    held = sm.Layout(shape, MESH, src, dtype="uint8")
    wanted = sm.Layout(shape, MESH, dst, dtype="uint8")
    there = sm.plan(flattened(held), swizzled(wanted))
    sm.verify(there)
    rows = {rank: own.reshape(-1) for rank, own in locals_of(scales, held).items()}
    arrived = sm.simulate(there, rows)
    expected = locals_of(scales, wanted)
    for rank, own in expected.items():
        np.testing.assert_array_equal(arrived[rank], swizzle(own))
    back = sm.plan(swizzled(wanted), flattened(held))
    sm.verify(back)
    returned = sm.simulate(back, arrived)
    for rank, own in rows.items():
        np.testing.assert_array_equal(returned[rank], own)


@given(shape=st.tuples(st.integers(1, 300), st.integers(1, 11)), parts=st.integers(1, 5))
def test_a_shard_of_swizzled_storage_is_no_slice_and_is_planned(
    shape: tuple[int, int], parts: int
) -> None:
    """As FSDP cuts a flat buffer: anywhere, inside tiles, with padding on either side."""
    scales = np.random.default_rng(0).integers(1, 256, shape, np.uint8)
    held = sm.Layout(shape, MESH, "(tp r) c", dtype="uint8")
    storage = swizzle(scales)
    mesh = sm.Mesh(fsdp=parts)
    stored = {0: swizzle_runs(shape)}
    by = {"fsdp": sm.Shard(0)}
    wanted = sm.Layout((scales.size,), mesh, by, dtype="uint8", stored=stored)
    plan = sm.plan(flattened(held), wanted)
    sm.verify(plan)
    rows = {rank: own.reshape(-1) for rank, own in locals_of(scales, held).items()}
    arrived = sm.simulate(plan, rows)
    pieces = [arrived[rank] for rank in mesh.ranks]
    np.testing.assert_array_equal(np.concatenate(pieces), storage)


def test_flattening_keeps_what_people_write() -> None:
    rows = sm.Layout((64, 4), sm.Mesh(tp=4), "(tp r) c", dtype="uint8")
    assert flattened(rows).text == "(tp n)"
    whole = sm.Layout((64, 4), sm.Mesh(tp=4), "r c", dtype="uint8")
    assert flattened(whole).text == "n"
    text = swizzled(sm.Layout((33, 4), sm.Mesh(tp=4), "r c", dtype="uint8")).text
    assert text.startswith("(n)=<0:4 128:132 -8 4:8 -12 8:12") and text.endswith("-12>")
    again = sm.Layout((132,), sm.Mesh(tp=4), text, dtype="uint8")
    assert again.text == text


@given(
    shape=st.tuples(*[st.integers(0, 5)] * 3),
    text=st.sampled_from(["(tp a) b c", "a (dp b) (tp c)", "a b (c)=7"]),
)
def test_any_tensor_in_a_row(shape: tuple[int, ...], text: str) -> None:
    layout = sm.Layout(shape, MESH, text, dtype="int64")
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    flat = flattened(layout)
    for rank in MESH.ranks:
        own = flat.indices(rank)[0]
        shape_there = layout.local_shape(rank)
        for at, number in zip(np.ndindex(*shape_there), own, strict=True):
            place = tuple(int(index[i]) for index, i in zip(layout.indices(rank), at, strict=True))
            assert number == (-1 if -1 in place else numbers[place])


def test_a_hole_before_the_first_element() -> None:
    """From -1, which is a hole, to 0 is a step of 1 too."""
    layout = sm.Layout((4,), sm.Mesh(), "(a)=<-2 0:4>", dtype="uint8")
    assert str(flattened(layout).runs(0)[0]) == "[-2 0:4]"


def test_errors() -> None:
    with pytest.raises(
        sm.FormatError,
        match=(
            r"scales of shape \(3,\) have 1 dimension, "
            r"but tiles have rows and columns"
        ),
    ):
        swizzle(np.zeros(3, np.uint8))
    with pytest.raises(
        sm.FormatError,
        match=(
            r"storage has shape \(3,\), but scales of shape \(2, 2\) "
            r"fill \(512,\)"
        ),
    ):
        unswizzle(np.zeros(3, np.uint8), (2, 2))
    with pytest.raises(
        sm.FormatError, match=("have 3 dimensions, but tiles have rows and columns")
    ):
        swizzled(sm.Layout((2, 3, 4), sm.Mesh(), "a b c"))
    with pytest.raises(
        sm.FormatError,
        match=(
            "is Partial and cannot be flattened; reduce "
            "it first, by a plan to a layout without "
            "Partial"
        ),
    ):
        flattened(sm.Layout((2, 3), sm.Mesh(tp=2), "a b {sum: tp}"))
