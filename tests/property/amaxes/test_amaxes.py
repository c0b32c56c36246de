"""Amaxes: parts of a tensor, cut anywhere, are quantized as the whole is; and what travels is counted."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardmath as sm
from shardmath import testing
from shardmath.formats import FP8, MXFP8, NVFP4, Format, FP8Blocks
from shardmath.values.formats.scales import spread_last

FORMATS: list[Format] = [
    MXFP8(),
    MXFP8("e5m2", "floor", axis=-2),
    FP8Blocks((8, 32)),
    FP8Blocks((5, 24), power_of_two=True),
    FP8Blocks((1, 16)),
    FP8(),
    FP8(tensor_amax=3),
    FP8("channel"),
    NVFP4(),
    NVFP4(tensor_amax=1000),
    NVFP4(two_d=True),
]
EACH = pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.name)
SHAPES = [(48, 64), (33, 50), (3, 9, 40), (1, 130), (0, 64), (16, 0)]


@st.composite
def layouts(draw: st.DrawFn) -> sm.Layout:
    """Any cuts of one of the shapes, at even columns because of NVFP4."""
    *outer, last = draw(st.sampled_from(SHAPES))
    half = draw(testing.layouts((*outer, last // 2), dtype="float32"))
    return spread_last(half, 2)


def draw_numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of many sizes, and some of all kinds."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * np.exp2(random.integers(-20, 20, shape))
    kind = random.integers(0, 400, shape)
    x[kind == 0] = np.nan
    x[kind == 1] = np.inf if seed % 2 else 0
    x[kind == 2] = -0.0
    if seed % 3 == 0:
        x[..., : shape[-1] // 2] = 0
    return x.astype(np.float32)


def take(layout: sm.Layout, rank: int, whole: np.ndarray) -> np.ndarray:
    """The rank's local array, with something large where nothing of the tensor is."""
    at = layout.indices(rank)
    padded = np.pad(whole, [(0, 1)] * whole.ndim, constant_values=whole.dtype.type(200))
    return padded[np.ix_(*at)]


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def exchange(
    amaxes: sm.formats.Amaxes, x: np.ndarray
) -> tuple[dict[int, Any], dict[int, Any], sm.Plan]:
    """What every rank has measured, and what has arrived there, by a plan that is proved."""
    ranks = amaxes.layout.mesh.ranks
    own = {rank: amaxes.measure(rank, take(amaxes.layout, rank, x)) for rank in ranks}
    sent = {rank: amaxes.send(rank, own[rank]) for rank in ranks}
    plan = sm.plan(amaxes.src, amaxes.dst)
    sm.verify(plan)
    held: Any = {rank: arrays for rank, arrays in sent.items() if arrays}
    assert set(held) == set(plan.src_ranks)
    return own, sm.simulate(plan, held), plan


def check_parts(one: Format, layout: sm.Layout, x: np.ndarray) -> sm.Plan:
    """Every rank's parts are those of the whole; the plan by which they learned the amaxes."""
    whole = one.quantize(x)
    amaxes = sm.formats.plan_amaxes(one, layout, "w")
    own, arrived, plan = exchange(amaxes, x)
    assert amaxes.layouts == one.layouts(layout, duplicated=True)
    for rank in layout.mesh.ranks:
        local = take(layout, rank, x)
        parts = amaxes.finish(rank, local, own[rank], arrived.get(rank, {}))
        for part, lies, expected in zip(parts, amaxes.layouts, whole, strict=True):
            assert part.shape == lies.local_shape(rank)
            wanted = expected[np.ix_(*lies.indices(rank))]
            np.testing.assert_array_equal(bits(part), bits(wanted))
    return plan


# Rank 1 has none of the columns, and its rows' scales all the same.
@EACH
@given(layout=layouts(), seed=st.integers(0, 1000))
@example(layout=sm.Layout((4, 2), sm.Mesh(a=2), {"a": sm.Ragged(1, (2, 0))}), seed=0)
def test_parts_are_those_of_the_whole_tensor(one: Format, layout: sm.Layout, seed: int) -> None:
    check_parts(one, layout, draw_numbers(layout.shape, seed))


def count_bytes(one: Format, layout: sm.Layout) -> int:
    """By brute force: 4 for each slot of a block that a rank cuts, and that is not its own."""
    if isinstance(one, FP8) and one.tensor_amax is not None:
        return 0
    kinds = [(one.blocks, one.scale_layout(layout, duplicated=True))]
    if isinstance(one, NVFP4) and one.tensor_amax is None:
        kinds.append((one.parts[2].blocks, one.layouts(layout, duplicated=True)[2]))
    slots = 0
    for blocks, lies in kinds:
        count = blocks.count(layout.shape)
        sizes = blocks.positions(layout.shape)
        at = [np.arange(n) // size for n, size in zip(layout.shape, sizes, strict=True)]
        block_of = np.ravel_multi_index(np.meshgrid(*at, indexing="ij"), count).ravel()
        full = np.bincount(block_of, minlength=np.prod(count))
        held = {}
        for rank in layout.mesh.ranks:
            ids = np.arange(block_of.size).reshape(layout.shape)
            own = ids[np.ix_(*(at[at >= 0] for at in layout.indices(rank)))]
            held[rank] = frozenset(own.ravel().tolist())
        has = {
            part: np.bincount(block_of[sorted(part)], minlength=len(full))
            for part in set(held.values())
        }
        touching = sum((own > 0).astype(int) for own in has.values())
        for rank, part in held.items():
            numbers = np.arange(len(full)).reshape(count)[np.ix_(*lies.indices(rank))].ravel()
            cut = numbers[has[part][numbers] < full[numbers]]
            slots += int((touching[cut] - (has[part][cut] > 0)).sum())
    return 4 * slots


@EACH
@given(layout=layouts())
def test_bytes_are_those_of_slots_that_ranks_lack(one: Format, layout: sm.Layout) -> None:
    amaxes = sm.formats.plan_amaxes(one, layout, "w")
    plan = sm.plan(amaxes.src, amaxes.dst)
    assert sum(plan.received_bytes().values()) == count_bytes(one, layout)


@EACH
def test_nothing_travels_where_no_block_is_cut(one: Format) -> None:
    needs_all = one in (FP8(), NVFP4(), NVFP4(two_d=True))
    text = "n k" if needs_all else "(dp n) k"
    layout = sm.Layout((640, 96), sm.Mesh(dp=2, tp=2), text)
    plan = check_parts(one, layout, draw_numbers(layout.shape, 1))
    assert not plan.src and not sum(plan.received_bytes().values())


def test_only_blocks_that_are_cut_travel() -> None:
    # Of 4 rows, 3 blocks each: the cut at 48 goes through the second, and 2 x 2 ranks receive one slot of each row.
    layout = sm.Layout((4, 96), sm.Mesh(dp=2, tp=2), "n (tp k)")
    plan = check_parts(MXFP8(), layout, draw_numbers((4, 96), 1))
    assert plan.received_bytes() == dict.fromkeys(range(4), 4 * 4)


def test_tensors_share_a_plan() -> None:
    mesh = sm.Mesh(tp=4)
    every = {
        "up": sm.formats.plan_amaxes(FP8Blocks(), sm.Layout((100, 64), mesh, "(tp n) k"), "up"),
        "down": sm.formats.plan_amaxes(
            FP8("channel"), sm.Layout((64, 100), mesh, "n (tp k)"), "down"
        ),
        "none": sm.formats.plan_amaxes(MXFP8(), sm.Layout((64, 128), mesh, "n (tp k)"), "none"),
    }
    src: dict[str, Any] = {}
    dst: dict[str, Any] = {}
    for amaxes in every.values():
        src.update(amaxes.src)
        dst.update(amaxes.dst)
    plan = sm.plan(src, dst)
    sm.verify(plan)
    xs = {name: draw_numbers(one.layout.shape, 2) for name, one in every.items()}
    own: dict[int, Any] = {rank: {} for rank in range(4)}
    sent: dict[int, Any] = {rank: {} for rank in range(4)}
    for rank in range(4):
        for name, amaxes in every.items():
            own[rank][name] = amaxes.measure(rank, take(amaxes.layout, rank, xs[name]))
            sent[rank].update(amaxes.send(rank, own[rank][name]))
    arrived: Any = sm.simulate(plan, sent)
    for rank in range(4):
        for name, amaxes in every.items():
            local = take(amaxes.layout, rank, xs[name])
            data, _ = amaxes.finish(rank, local, own[rank][name], arrived[rank])
            whole, _ = amaxes.format.quantize(xs[name])
            np.testing.assert_array_equal(data, take(amaxes.layout, rank, whole))


def test_plans_stay_small_where_many_rows_are_cut() -> None:
    layout = sm.Layout((512, 720), sm.Mesh(tp=12), "n (tp k)")
    amaxes = sm.formats.plan_amaxes(MXFP8(), layout, "w")
    for rank in range(12):
        assert len(amaxes.src["w"].runs(rank)[0].segments) <= 2
        assert len(amaxes.dst["w"].runs(rank)[0].segments) <= 2
    check_parts(MXFP8(), layout, draw_numbers(layout.shape, 4))


def test_equivalent_layouts_have_the_same_slots() -> None:
    one = sm.Layout((6, 80), sm.Mesh(dp=2, tp=2), "(dp n) (tp k)")
    other = sm.Layout((6, 80), sm.Mesh(tp=2, dp=2, ranks=(0, 2, 1, 3)), "(dp n) (tp k)")
    assert sm.equivalent(one, other)
    plans = []
    for layout in (one, other):
        amaxes = sm.formats.plan_amaxes(FP8Blocks((4, 32)), layout, "w")
        plans.append(sm.plan(amaxes.src, amaxes.dst))
    assert plans[0].digest == plans[1].digest


def test_they_are_values() -> None:
    layout = sm.Layout((4, 96), sm.Mesh(tp=2), "n (tp k)")
    one = sm.formats.plan_amaxes(MXFP8(), layout, "w")
    assert (
        one
        == sm.formats.plan_amaxes(MXFP8(), layout, "w")
        != sm.formats.plan_amaxes(MXFP8(), layout)
    )
    x = draw_numbers((4, 96), 1)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    np.testing.assert_array_equal(copy.measure(1, x[:, 48:]), one.measure(1, x[:, 48:]))


LAYOUT = sm.Layout((4, 96), sm.Mesh(tp=2), "n (tp k)")
LOST = sm.Layout((8,), sm.Mesh(tp=2), {"tp": sm.Table(0, (sm.from_ranges([(0, 3)]),) * 2)})
ROW = np.zeros((4, 48), np.float32)
OWN = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sm.formats.plan_amaxes("MXFP8", LAYOUT), "give one such as formats.MXFP8()"),
        (lambda: sm.formats.plan_amaxes(MXFP8(), "n k"), "give the layout of the tensor"),
        (
            lambda: sm.formats.plan_amaxes(FP8(), sm.Layout((), sm.Mesh(tp=2), ""), "w"),
            (
                "tensor 'w': float32[] scalar on tp=2 has no dimension, and single numbers "
                "cannot be quantized; give the layout of a tensor with at least one"
            ),
        ),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), sm.Layout((8,), sm.Mesh(tp=2), {"tp": sm.Partial()}), "w"),
            (
                "is Partial and cannot be quantized; reduce it first, by a plan to a layout "
                "without Partial"
            ),
        ),
        (
            lambda: sm.formats.plan_amaxes(NVFP4(), sm.Layout((6,), sm.Mesh(tp=2), "(tp n)"), "w"),
            "data of NVFP4 1-D at 3; divide the dimension at multiples of 2",
        ),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), LOST, "w"),
            "tensor 'w': no rank holds position 3 of dimension 0",
        ),
        (lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT, "w").measure(2, ROW), "give one of its ranks: [0, 1]"),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT, "w").measure(1, ROW[:2]),
            (
                "tensor 'w': rank 1: the local array has shape (2, 48); pass an array of "
                "shape (4, 48)"
            ),
        ),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT).measure(1, ROW.astype(np.float64)),
            "rank 1: the local array has dtype float64; pass an array of float32",
        ),
        (lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT).send(1, OWN[:2]), (
                                                                               "pass an "
                                                                               "array of "
                                                                               "shape (4, 2)"
                                                                           )),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT, "w").settle(1, OWN, {}),
            "rank 1: 'w' is not in arrived; pass the received amaxes by local name",
        ),
        (
            lambda: sm.formats.plan_amaxes(MXFP8(), LAYOUT, "w").settle(1, OWN, {"w": OWN[0]}),
            "rank 1: the array of received amaxes has shape (2,); pass an array of shape (8,)",
        ),
    ],
)  # fmt: skip
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(sm.ShardError) as caught:
        call()
    assert message in str(caught.value)
