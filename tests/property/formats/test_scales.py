"""Layouts of scales: what a rank quantizes alone is what it has of the scales of the whole, under random layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks

MESH = sm.Mesh(dp=2, tp=3)
TEXTS = [
    "(tp n) k",
    "n (tp k)",
    "(tp n) (dp k)",
    "(dp tp n) k",
    "n (tp k dp)",
    "(2 tp n) k",
    "n k",
    "(dp*tp n) k",
    "(n)=<16:32 -5 0:16 32:96> (tp k)",
    "(tp n 16) k",
]
SHAPE = (96, 192)
FORMATS: list[Format] = [
    MXFP8(),
    MXFP8(axis=-2),
    FP8Blocks((16, 32)),
    FP8(tensor_amax=5),
    NVFP4(tensor_amax=5),
]


def packed(x: np.ndarray, layout: sm.Layout, rank: int) -> np.ndarray:
    """What the rank has, without holes and in ascending order."""
    kept = [np.sort(index[index >= 0]) for index in layout.indices(rank)]
    return x[np.ix_(*kept)]


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@given(text=st.sampled_from(TEXTS), seed=st.integers(0, 100))
def test_what_ranks_quantize_alone_lies_as_the_layouts_say(
    one: Format, text: str, seed: int
) -> None:
    layout = sm.Layout(SHAPE, MESH, text)
    try:
        layouts = one.layouts(layout, "w")
    except sm.FormatError:
        assert cuts_a_block(one, layout)
        return
    assert not cuts_a_block(one, layout)
    x = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
    whole = one.quantize(x)
    assert layouts[1] == one.scale_layout(layout)
    for rank in MESH.ranks:
        found = one.quantize(packed(x, layout, rank))
        for own, part, lies in zip(found, whole, layouts, strict=True):
            assert lies.shape == part.shape and lies.dtype == str(part.dtype)
            assert own.shape == lies.local_shape(rank)
            np.testing.assert_array_equal(own, packed(part, lies, rank))


def cuts_a_block(one: Format, layout: sm.Layout) -> bool:
    """Whether some rank has some positions of a block and not all, in one dimension."""
    sizes = [blocks.blocks.per_dimension(2) for blocks in one.parts]
    for rank in layout.mesh.ranks:
        for d, index in enumerate(layout.indices(rank)):
            held = index[index >= 0]
            for size in {each[d] for each in sizes} - {None}:
                count = np.bincount(held // size, minlength=1)
                if (count % size).any():
                    return True
    return False


def test_a_cut_inside_a_block_names_everything() -> None:
    layout = sm.Layout((4, 128), sm.Mesh(tp=8), "n (tp k)", dtype="bfloat16")
    with pytest.raises(sm.FormatError) as caught:
        MXFP8().scale_layout(layout, "fc1.weight")
    assert str(caught.value) == (
        "tensor 'fc1.weight': rank 0 holds positions 0:16 of dimension 1 under "
        "bfloat16[4, 128] n (tp h) on tp=8, and so cuts a block of 32 of scales of "
        "MXFP8 e4m3 rceil rowwise at 16; divide the dimension at multiples of 32"
    )


def test_a_partial_tensor_has_no_scales() -> None:
    layout = sm.Layout((4, 128), sm.Mesh(tp=2), "n k {sum: tp}")
    with pytest.raises(
        sm.FormatError,
        match=(
            "is Partial and cannot be quantized; reduce "
            "it first, by a plan to a layout without "
            "Partial"
        ),
    ):
        MXFP8().scale_layout(layout)


def test_an_element_of_two_numbers_has_two() -> None:
    """A byte with one number more than the tensor would be refused by whoever quantizes, in the middle of a call."""
    layout = sm.Layout((8, 3), sm.Mesh(), "n k")
    with pytest.raises(
        sm.FormatError,
        match=(
            r"tensor 'w': NVFP4 1-D packs 2 numbers per "
            r"byte, which shape \(8, 3\) does not fill; "
            r"make its last dimension a multiple of 2"
        ),
    ):
        NVFP4().layouts(layout, "w")
    with pytest.raises(sm.FormatError, match="make its last dimension a multiple of 2"):
        sm.formats.plan_amaxes(NVFP4(), layout)


def test_one_scale_is_on_every_rank() -> None:
    layout = sm.Layout((7, 5), MESH, "(tp n) (dp k)")
    assert str(FP8().scale_layout(layout)) == "float32[1, 1] n h on dp=2 tp=3"
    assert str(FP8("channel").scale_layout(layout)) == "float32[7, 1] (tp n) h on dp=2 tp=3"


@given(text=st.sampled_from(["(tp n) k", "n (dp k)", "n k"]), to=st.sampled_from(["n (tp k)", "(dp n) k"]))  # fmt: skip
def test_data_and_scales_are_planned_like_any_tensor(text: str, to: str) -> None:
    one = MXFP8()
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    parts = dict(zip(("data", "scales"), one.quantize(x), strict=True))
    src, dst = (
        dict(zip(parts, one.layouts(sm.Layout(SHAPE, MESH, spec)), strict=True))
        for spec in (text, to)
    )
    plan = sm.plan(src, dst)
    sm.verify(plan)
    held = {
        rank: {name: packed(parts[name], lies, rank) for name, lies in src.items()}
        for rank in MESH.ranks
    }
    arrived = sm.simulate(plan, held)
    for rank in MESH.ranks:
        back = one.dequantize(arrived[rank]["data"], arrived[rank]["scales"])
        expected = packed(x, sm.Layout(SHAPE, MESH, to), rank)
        assert np.abs(back - expected).max() <= np.abs(expected).max() / 16


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@given(text=st.sampled_from([*TEXTS, "(n)=<0:5 8:20 24:96> (k dp 7)"]), seed=st.integers(0, 100))
def test_duplicated_scales_are_those_of_every_block_that_a_rank_has_some_of(
    one: Format, text: str, seed: int
) -> None:
    layout = sm.Layout(SHAPE, MESH, text)
    try:
        lies = one.layouts(layout, "w", duplicated=True)[1]
    except sm.FormatError:
        assert isinstance(one, NVFP4)  # half a byte
        return
    assert lies == one.scale_layout(layout, duplicated=True)
    numbers = np.arange(np.prod(lies.shape)).reshape(lies.shape)
    sizes = one.blocks.per_dimension(2)
    for rank in MESH.ranks:
        kept = []
        for index, size in zip(layout.indices(rank), sizes, strict=True):
            held = index[index >= 0]
            kept.append(np.zeros(1, int) if size is None else np.unique(held // size))
        np.testing.assert_array_equal(packed(numbers, lies, rank), numbers[np.ix_(*kept)])
        assert lies.local_shape(rank) == tuple(map(len, kept))


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
@pytest.mark.parametrize("text", ["(tp n) k", "n (tp k)", "n k", "(n tp 32) k"])
def test_padding_of_each_rank_is_holes(one: Format, text: str) -> None:
    """A plan from compact scales gives each rank what `pad_scales` makes of its own."""
    compact = one.scale_layout(sm.Layout(SHAPE, MESH, text))
    padded = one.pad_layout(compact)
    scales = np.arange(np.prod(compact.shape)).reshape(compact.shape).astype(compact.dtype)
    plan = sm.plan(compact, padded)
    sm.verify(plan)
    held = {rank: packed(scales, compact, rank) for rank in MESH.ranks}
    arrived = sm.simulate(plan, held)
    for rank, own in held.items():
        expected = one.pad_scales(own)
        assert padded.local_shape(rank) == expected.shape
        np.testing.assert_array_equal(arrived[rank], expected)
    assert one.pad_layout(padded) == padded


def test_padding_belongs_to_layouts_of_scales() -> None:
    """Of a tensor that lies whole on a rank, the shape is that of the padded scales."""
    one = MXFP8()
    whole = one.scale_layout(sm.Layout((200, 96), sm.Mesh(), {}))
    assert one.pad_layout(whole).local_shape(0) == one.padded_scale_shape((200, 96)) == (256, 4)
