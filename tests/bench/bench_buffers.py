"""How much of the flat buffers of real models is padding, by each optimizer's rule.

    python tests/bench/bench_buffers.py

Models are whole, as their checkpoints have them: nothing but data parallelism divides them, and experts have as many
data-parallel ranks as everything else. Bucket sizes are Megatron-Core's defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardmath import buffers
from shardmath.base.text import show_share
from shardmath_torch.commands.models.configs import (
    DEEPSEEK_V3,
    NEMOTRON_NANO,
    NEMOTRON_SUPER,
    QWEN3_4B,
    QWEN3_30B,
    QWEN3_235B,
)
from shardmath_torch.commands.models.shapes import parameters
from tests.bench.section import arguments, show

MODELS = (QWEN3_4B, QWEN3_30B, QWEN3_235B, DEEPSEEK_V3, NEMOTRON_NANO, NEMOTRON_SUPER)
RANKS = (8, 128)


def _sized(ranks: int, **more: bool) -> dict[str, Any]:
    return {
        "data_parallel_world_size": ranks,
        "bucket_size": buffers.default_bucket_size(ranks),
        **more,
    }


RULES: dict[str, tuple[buffers.Rule, Callable[[int], dict[str, Any]]]] = {
    "data_parallel": (
        buffers.data_parallel,
        lambda n: {"bucket_size": buffers.default_bucket_size(n)},
    ),
    "distributed_optimizer": (buffers.distributed_optimizer, _sized),
    "distributed_optimizer, pad_for_high_nccl_busbw": (
        buffers.distributed_optimizer,
        lambda n: _sized(n, pad_for_high_nccl_busbw=True),
    ),
    "layer_wise": (buffers.layer_wise, _sized),
    "megatron_fsdp": (buffers.megatron_fsdp, _sized),
    "flat_parameter": (buffers.flat_parameter, lambda n: {"data_parallel_world_size": n}),
    "zero": (buffers.zero, lambda n: {"data_parallel_world_size": n}),
}
"""A rule, and its options for so many ranks."""


def laid_out(params: tuple[buffers.Param, ...], name: str, ranks: int) -> buffers.FullParamLayout:
    """All buffers of a model by the rule; without expert parallelism only Megatron-FSDP puts experts apart."""
    rule, options = RULES[name]
    if rule is not buffers.megatron_fsdp:
        params = tuple(replace(param, expert_parallel=False) for param in params)
    return buffers.full_layout(params, rule=rule, **options(ranks))


def padding(layouts: buffers.FullParamLayout) -> str:
    """The share of all buffers that is padding."""
    return show_share(
        sum(one.padding for one in layouts.values()), sum(one.numel for one in layouts.values())
    )


def main() -> None:
    given = arguments(__doc__ or "")
    found = {model: parameters(model) for model in MODELS}
    rows = [
        [model.partition("/")[2], f"{sum(param.numel for param in params):,}", str(ranks)]
        + [padding(laid_out(params, name, ranks)) for name in RULES]
        for model, params in found.items()
        for ranks in RANKS
    ]
    about = (
        "The table says which share of a model's flat buffers is padding, for each [rule](flat-buffers.md#rules). The "
        "buffers hold all layers and all experts of the model. Each model is in bfloat16, except for routers that "
        "transformers keeps in float32. The model is divided only by data parallelism. Buckets have the default size. "
        "For flat_parameter (FSDP1) and megatron_fsdp, no module is a separate FSDP unit."
    )
    show(
        given.page, "Padding of flat buffers", about, ["model", "parameters", "ranks", *RULES], rows
    )


if __name__ == "__main__":
    main()
