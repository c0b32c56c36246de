"""Refits in FP8: what fused data and scales are, tensor by tensor, is what quantizing the whole tensors gives."""

from __future__ import annotations

from typing import Any

import pytest

import shardmath as sm
from shardmath import formats, transforms
from shardmath.storage import Stored, parse
from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import fp8

pytestmark = pytest.mark.long

SLACK = 24 << 20
"""Of resident memory, which allocators and threads round up as they like. One copy of the wires alone is more."""


@pytest.mark.parametrize(
    "options", [{}, {"commit": "all"}, {"changes": True}, {"agree": "once"}], ids=str
)
def test_every_step_brings_all(pool: Pool, options: dict[str, Any]) -> None:
    for rank, found in enumerate(pool.run(fp8.steps, options)):
        assert not any(found), f"rank {rank}: {found}"


def test_an_engine_recorded_by_its_loader(pool: Pool) -> None:
    """What it loads is FP8 and scales; rows of the same engine say what is right."""
    for rank, found in enumerate(pool.run(fp8.steps, {}, True)):
        assert not any(found), f"rank {rank}: {found}"


def test_wires_are_data_and_scales() -> None:
    """A byte a number and a scale a tile, however many engines there are."""
    planned = fp8.plan()
    sm.verify(planned.plan)
    assert planned.transforms is not None and len(planned.transforms.wired) == 6 * fp8.LAYERS
    name = "layers.0.q_proj.weight"
    assert {f"{name}.data", f"{name}.scales"} <= planned.plan.src.keys()
    assert name in planned.moved and f"{name}_scale_inv" not in planned.moved


def test_what_lacks_its_scales_is_an_error() -> None:
    """Where no engine has them, and where one of several has none."""
    mesh = sm.Mesh(tp=2, ranks=range(4, 6))
    rows = [
        row for row in fp8.ENGINE.splitlines() if not row.startswith("down_proj.weight_scale_inv")
    ]
    short = Stored(parse("\n".join(rows)), (mesh,))
    served = {n: one for n, one in fp8.list_served().items() if "down_proj.weight_scale" not in n}
    with pytest.raises(
        sm.PlanError,
        match=r"needs 'layers.0.down_proj.weight_scale_inv', which the destination does",
    ):
        fp8.plan_to({"a": short}, served)
    whole = Stored(parse(fp8.ENGINE), (sm.Mesh(tp=2, ranks=range(6, 8)),))
    with pytest.raises(sm.PlanError, match=r"a stores 'layers.0.down_proj.weight' without"):
        fp8.plan_to(
            {"a": short, "b": whole}, fp8.list_served(), unused=["*down_proj.weight_scale_inv"]
        )


@pytest.mark.parametrize("at", ["source", "destination"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_wire_tensors_and_what_is_under_way(dtype: str, at: str) -> None:
    """Beside them a few MiB: what kernels work in, what the allocator keeps."""
    for taken, wires in alone(2, fp8.measure_memory, dtype, at):
        assert taken <= wires + fp8.LIMIT + SLACK, (taken >> 20, wires >> 20)


@pytest.mark.parametrize("rows", [200, 256])
def test_parts_of_a_fused_tensor_begin_with_tiles(rows: int) -> None:
    """Who reads it would take the scales of the part before for some of the next one's numbers."""
    tiles = formats.FP8Blocks((128, 128))
    held = {"q_proj.weight": ((rows, 128), "bfloat16"), "k_proj.weight": ((128, 128), "bfloat16")}
    served = {name: (shape, "uint8") for name, (shape, _) in held.items()}
    for name, (shape, _) in held.items():
        served[f"{name}_scale_inv"] = tiles.scale_shape(shape), "float32"
    text = "qk.weight = [q k]_proj.weight : (q + k) h\nqk.scale = [q k]_proj.weight_scale_inv : (q + k) h"
    trainer = {
        n: sm.Layout(shape, sm.Mesh(), "n h", dtype="bfloat16") for n, (shape, _) in held.items()
    }
    engine = Stored(parse(text), (sm.Mesh(ranks=[1]),))

    def plan() -> sm.Refit:
        rules = {"*_proj.weight": transforms.Quantize(tiles)}
        return sm.refit(trainer, engine, held, served=served, rules=rules)

    if rows == 256:
        sm.verify(plan().plan)
        return
    said = "'k_proj.weight' begins at 200 in dimension 0 of 'qk.weight' on rank 1, its scales at 2 of 'qk.scale'"
    with pytest.raises(sm.StoreError, match=said):
        plan()


def test_an_engine_on_the_ranks_of_another_is_checked_by_its_own_numbers() -> None:
    """The same rows: `k` begins at a tile in the first engine, and within one in the second."""
    tiles = formats.FP8Blocks((4, 4))
    held = dict.fromkeys("qk", ((8, 8), "bfloat16"))
    served = {name: (shape, "uint8") for name, (shape, _) in held.items()}
    served |= {f"{name}_scale_inv": ((2, 2), "float32") for name in held}
    rows = parse("qk = [q k] : (q=first + k) h\nscale = [q k]_scale_inv : (q=tiles + k) h")
    trainer = {n: sm.Layout(s, sm.Mesh(), "n h", dtype="bfloat16") for n, (s, _) in held.items()}
    engines = {
        name: Stored(rows, (sm.Mesh(ranks=[1]),), numbers={"first": first, "tiles": 2})
        for name, first in (("a", 8), ("b", 10))
    }
    rules = {"[qk]": transforms.Quantize(tiles)}
    with pytest.raises(sm.StoreError, match="b: 'k' begins at 10 in dimension 0 of 'qk'"):
        sm.refit(trainer, engines, held, served=served, rules=rules)
