"""Over gloo, ranks that cut blocks anywhere get their parts of what the whole tensor becomes; errors are all ranks'."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath import formats
from shardmath.values.formats.casting import cast_array
from tests.distributed.pool import Pool
from tests.distributed.tasks import amaxes as tasks
from tests.distributed.tasks.amaxes import Quantized

SHAPE = (44, 100)
FORMATS: list[formats.Format] = [
    formats.MXFP8(),
    formats.MXFP8("e5m2", "floor", axis=-2),
    formats.FP8Blocks((16, 32)),
    formats.FP8Blocks((1, 64), power_of_two=True),
    formats.FP8("channel"),
    formats.FP8(),
    formats.FP8(tensor_amax=3),
    formats.NVFP4(),
    formats.NVFP4(two_d=True, tensor_amax=3),
]
MESHES = [
    sm.Mesh(dp=2, tp=2, ranks=(5, 0, 7, 2)),
    sm.Mesh(dp=4, tp=2),
    sm.Mesh(dp=1, tp=3, ranks=(4, 1, 6)),
    sm.Mesh(dp=2, tp=4),
]
TEXTS = [
    "(tp n) k",
    "n (tp k)=100",
    "(dp n) (tp k)",
    "(2 tp n) k",
    "n k",
    "(n tp) k",
    "(dp tp n) k",
]
DTYPES = ["float32", "bfloat16", "float16"]


def draw_layout(rng: random.Random) -> sm.Layout:
    mesh = rng.choice(MESHES)
    dtype = rng.choice(DTYPES)
    if rng.random() < 0.5:
        cuts = sorted(
            rng.randrange(0, SHAPE[1] // 2 + 1) * 2 for _ in range(dict(mesh.axes)["tp"] - 1)
        )
        ends = [0, *cuts, SHAPE[1]]
        sizes = tuple(b - a for a, b in itertools.pairwise(ends))
        return sm.Layout(SHAPE, mesh, {"tp": sm.Ragged(1, sizes), "dp": sm.Shard(0)}, dtype=dtype)
    return sm.Layout(SHAPE, mesh, rng.choice(TEXTS), dtype=dtype)


def draw_case(format: formats.Format, seed: int) -> tuple[Quantized, dict[int, list[bytes]]]:
    """A tensor, and every rank's parts of it quantized; other cuts where a byte of two numbers was cut."""
    rng = random.Random(seed)
    while True:
        layout = draw_layout(rng)
        try:
            lies = format.layouts(layout, duplicated=True)
        except sm.FormatError:
            continue
        break
    values = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
    values[3, 5] = np.nan
    values[7, 9] = np.inf if seed % 2 else 0
    values[20:24] = 0
    held = cast_array(values, "float32", layout.dtype)
    whole = format.quantize(cast_array(held, layout.dtype, "float32"))
    tensors: dict[int, Any] = {}
    wanted = {}
    for rank in layout.mesh.ranks:
        local = held[np.ix_(*layout.indices(rank))]
        tensors[rank] = {"": (local.shape, layout.dtype, local.tobytes())}
        wanted[rank] = [
            part[np.ix_(*one.indices(rank))].tobytes()
            for part, one in zip(whole, lies, strict=True)
        ]
    lying = "transposed" if seed % 3 == 0 else "contiguous"
    return Quantized(format, layout, tensors, lying), wanted


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_parts_are_those_of_the_whole_tensor(pool: Pool, count: int) -> None:
    cases = [
        draw_case(format, 31 * seed + i)
        for seed in range(count)
        for i, format in enumerate(FORMATS)
    ]
    got = pool.run(tasks.quantize, [case for case, _ in cases], timeout=60.0 * count)
    moved = 0
    for i, (case, wanted) in enumerate(cases):
        amaxes = sm.formats.plan_amaxes(case.format, case.layout, "w")
        planned = sm.plan(amaxes.src, amaxes.dst).received_bytes()
        for rank in range(8):
            made, same, received = got[rank][i]
            assert made == wanted.get(rank, []), (
                f"{case.format.name} of {case.layout} on rank {rank}"
            )
            assert same
            assert received == planned.get(rank, 0)
            moved += received
    assert moved


WRONG = {
    "shape": "shape (2, 3), the plan's layout stores (2, 64) there",
    "dtype": "dtype float64, the plan's layout has float32",
    "missing": "the source tensor is missing",
    "mapping": "pass that tensor without a dict",
    "count": "out= has 1 tensor, where 2 are needed; pass the tensors data, scales",
    "alone": "out= is Tensor, where a tuple of tensors is needed; pass the tensors data, scales",
    "scales": "destination tensor 'scales' has dtype float64",
    "shared": "share memory",
}


def test_what_is_wrong_on_one_rank_is_an_error_on_all(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(tasks.go_wrong, list(WRONG))):
        for (said, took, unchanged, works), message in zip(found, WRONG.values(), strict=True):
            assert message in said and "rank 1" in said, (rank, said)
            assert took < 10 and unchanged and works


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("format", "to FP8 e4m3 per 4 x 16\nnothing was moved"),
        ("layout", "to FP8 e4m3 per 4 x 32\nrank 1: compile_quantize "),
        ("none", "None is not a format; give one such as formats.MXFP8()"),
        ("double", "which is not one of float32, bfloat16, float16; cast the tensor"),
        ("absent", "pass group= with all ranks that hold the tensor"),
    ],
)
def test_ranks_agree_on_what_they_quantize(pool: Pool, kind: str, message: str) -> None:
    said = pool.run(tasks.compile_wrong, kind)
    assert all(message in one for one in said), said
