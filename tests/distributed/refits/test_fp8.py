"""Refits in FP8: what fused data and scales are, tensor by tensor, is what quantising the whole tensors gives."""

from __future__ import annotations

from typing import Any

import pytest

import shardmath as sm
from shardmath.storage import Stored, parse
from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import fp8


@pytest.mark.parametrize(
    "options", [{}, {"commit": "all"}, {"changes": True}, {"agree": "once"}], ids=str
)
def test_every_step_brings_all(pool: Pool, options: dict[str, Any]) -> None:
    for rank, found in enumerate(pool.run(fp8.steps, options)):
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
        sm.PlanError, match=r"holds no 'layers.0.down_proj.weight_scale_inv' beside"
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
        assert taken <= wires + fp8.LIMIT + (12 << 20), (taken >> 20, wires >> 20)
