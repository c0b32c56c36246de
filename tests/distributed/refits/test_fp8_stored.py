"""FP8 data and scales that exist already move into an FP8 engine as they are, and no rank has data without scales."""

from __future__ import annotations

import pytest

import shardmath as sm
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.vllm import vllm
from tests.distributed.pool import Pool
from tests.distributed.tasks import fp8_stored

pytestmark = pytest.mark.long

KINDS = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("source", ["checkpoint", "trainer"])
@pytest.mark.parametrize("kind", KINDS)
def test_scales_move_like_weights(pool: Pool, kind: str, source: str, tp: int) -> None:
    for rank, (found, compared) in enumerate(pool.run(fp8_stored.steps, kind, source, tp)):
        assert not found, f"rank {rank}: {found}"
        in_engine = fp8_stored.ENGINE <= rank < fp8_stored.ENGINE + tp
        assert not in_engine or any(name.endswith("_scale_inv") for name in compared)


def test_experts_of_finer_tiles_are_quantized_again(pool: Pool) -> None:
    for rank, (found, _) in enumerate(pool.run(fp8_stored.refine)):
        assert not found, f"rank {rank}: {found}"


@pytest.mark.parametrize(
    ("tp", "rows", "why"),
    [
        (4, 8, r"experts\.0\.gate_proj\.weight': rank 4 holds positions 0:2 .* multiples of 4"),
        (2, 12, r"experts\.0\.gate_proj\.weight': rank 4 holds positions 0:6 .* multiples of 4"),
        (2, 6, r"rank 5 has values of '.*experts\.0\.gate_proj\.weight' without their scale"),
        (1, 6, r"up_proj\.weight' begins at 6 .* its values would be read with other scales"),
    ],
)
def test_a_tile_that_a_rank_cuts_is_named(tp: int, rows: int, why: str) -> None:
    """Scales that are sent as they are have no rule, which would say how large tiles are: the engine does."""
    tiles = fp8_stored.TILES
    shapes = {}
    for name, shape in (("gate", (rows, 16)), ("up", (rows, 16)), ("down", (16, rows))):
        whole = f"{fp8_stored.LAYER}mlp.experts.0.{name}_proj.weight"
        shapes[whole] = shape, "float8_e4m3fn"
        shapes[f"{whole}_scale_inv"] = tiles.scale_shape(shape), "float32"
    config = fp8_stored.configure("qwen3_moe", moe_intermediate_size=rows, num_experts=1)
    engine = vllm(config, ranks=range(4, 4 + tp), tp=tp)
    with pytest.raises(sm.StoreError, match=why):
        sm.refit(hugging_face(config, shapes), engine, shapes)
