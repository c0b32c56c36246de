"""The refit table's rows in FP8, executed with small models: every stored byte is that of tensors quantized whole."""

from __future__ import annotations

import pytest

import shardmath as sm
from bench.table import make_refit
from tests.distributed.pool import Pool
from tests.distributed.tasks import fp8_rows

pytestmark = pytest.mark.long

ATTENTION = "model.layers.3.self_attn."
MLP = "model.layers.3.mlp."
SCALES = {
    "dense": {
        f"{ATTENTION}qkv_proj.weight_scale_inv",
        f"{ATTENTION}attn.k_scale",
        f"{ATTENTION}attn.v_scale",
        f"{MLP}gate_up_proj.weight_scale_inv",
    },
    "experts": {
        f"{ATTENTION}qkv_proj.weight_scale_inv",
        f"{ATTENTION}attn.k_scale",
        f"{MLP}experts.routed_experts.w13_weight_scale_inv",
        f"{MLP}experts.routed_experts.w2_weight_scale_inv",
    },
    "latent": {
        f"{ATTENTION}fused_qkv_a_proj.weight_scale_inv",
        f"{ATTENTION}kv_b_proj.weight_scale_inv",
        f"{MLP}experts.routed_experts.w13_weight_scale_inv",
        f"{MLP}shared_experts.gate_up_proj.weight_scale_inv",
    },
}


QUICK = 3, 5, 8


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            marks=() if number in QUICK else pytest.mark.slow,
            id=f"{row.model} {row.mapping}",
        )
        for number, row in enumerate(fp8_rows.ROWS)
    ],
)
def test_engines_have_what_quantizing_whole_tensors_gives(pool: Pool, number: int) -> None:
    model = fp8_rows.ROWS[number].model
    for rank, (found, compared) in enumerate(pool.run(fp8_rows.steps, number)):
        assert not found, f"rank {rank}: {found}"
        assert rank < 4 or SCALES[model] <= set(compared)


def test_scales_of_a_row_are_as_vllm_has_them() -> None:
    """q_a has 8 rows and kv_a 10, which are two tiles of four and three; experts are stacks of scales."""
    planned = fp8_rows.plan(fp8_rows.ROWS[8])
    natives = planned.engines["0"].natives(4)
    assert natives[0, f"{ATTENTION}fused_qkv_a_proj.weight_scale_inv"] == (5, 4)
    assert natives[0, f"{MLP}experts.routed_experts.w13_weight_scale_inv"] == (4, 2, 4)
    assert natives[0, f"{MLP}experts.routed_experts.w2_weight_scale_inv"] == (4, 4, 1)


def test_a_tile_that_an_engine_cuts_is_named() -> None:
    """Eight rows on four ranks are two each, and a tile has four. Six on two ranks have as many scales as ranks."""
    row = fp8_rows.ROWS[7]._replace(engine=fp8_rows.Engine(tp=4))
    with pytest.raises(
        sm.StoreError,
        match=r"experts.0.gate_proj.weight': rank 4 holds positions 0:2 .* divide the dimension at multiples of 4",
    ):
        fp8_rows.plan(row)
    model = fp8_rows.MODELS["experts"]
    odd = model._replace(config=model.config | {"moe_ffn_hidden_size": 6})
    with pytest.raises(
        sm.StoreError, match=r"0: rank 5 has values of '.*gate_proj.weight' without their scale"
    ):
        make_refit(fp8_rows.ROWS[7], odd)
