"""How much of the flat buffers of real models is padding, by each optimizer's rule, and how long they take to lay out.

    python tests/bench/bench_buffers.py [repeats]

Models are whole, as their checkpoints have them: nothing but data parallelism divides them, and experts have as many
data-parallel ranks as everything else. Bucket sizes are Megatron-Core's defaults.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from shardmath import buffers
from shardmath.buffer_map import share
from shardmath_torch.shapes import (
    DEEPSEEK_V3,
    NEMOTRON_NANO,
    NEMOTRON_SUPER,
    QWEN3_4B,
    QWEN3_30B,
    QWEN3_235B,
    parameters,
)
from tests.bench.section import arguments, show

MODELS = (QWEN3_4B, QWEN3_30B, QWEN3_235B, DEEPSEEK_V3, NEMOTRON_NANO, NEMOTRON_SUPER)
RANKS = (8, 128)


def _sized(ranks: int, **more: bool) -> dict[str, Any]:
    return {"data_parallel_world_size": ranks, "bucket_size": buffers.default_bucket_size(ranks), **more}


RULES: dict[str, tuple[buffers.Rule, Callable[[int], dict[str, Any]]]] = {
    "data_parallel": (buffers.data_parallel, lambda n: {"bucket_size": buffers.default_bucket_size(n)}),
    "distributed_optimizer": (buffers.distributed_optimizer, _sized),
    "the same, busbw": (buffers.distributed_optimizer, lambda n: _sized(n, pad_for_high_nccl_busbw=True)),
    "layer_wise": (buffers.layer_wise, _sized),
    "megatron_fsdp": (buffers.megatron_fsdp, _sized),
    "flat_parameter": (buffers.flat_parameter, lambda n: {"data_parallel_world_size": n}),
    "zero": (buffers.zero, lambda n: {"data_parallel_world_size": n}),
}
"""A rule, and its options for so many ranks."""


def laid_out(params: tuple[buffers.Param, ...], name: str, ranks: int) -> buffers.FullParamLayout:
    """All buffers of a model by the rule."""
    rule, options = RULES[name]
    return buffers.full_layout(params, rule=rule, **options(ranks))


def padding(layouts: buffers.FullParamLayout) -> str:
    """The share of all buffers that is padding."""
    return share(sum(one.padding for one in layouts.values()), sum(one.numel for one in layouts.values()))


def seconds(params: tuple[buffers.Param, ...], name: str, repeats: int) -> list[float]:
    """How long each repeat took, on as many ranks as there are."""
    out = []
    for _ in range(repeats):
        start = time.perf_counter()
        laid_out(params, name, RANKS[-1])
        out.append(time.perf_counter() - start)
    return out


def main() -> None:
    given = arguments(__doc__ or "", repeats=5)
    found = {model: parameters(model) for model in MODELS}
    rows = [
        [model.partition("/")[2], f"{sum(param.numel for param in params):,}", str(ranks)]
        + [padding(laid_out(params, name, ranks)) for name in RULES]
        for model, params in found.items()
        for ranks in RANKS
    ]
    about = (
        "The share of a model's flat buffers that is padding; bfloat16, the whole model of transformers' own "
        "architecture, divided by data parallelism alone, default bucket sizes; FSDP1 and Megatron-FSDP without units."
    )
    show(given.page, "Padding of flat buffers", about, ["model", "parameters", "ranks", *RULES], rows)
    params, times = found[DEEPSEEK_V3], []
    for name in RULES:
        took = seconds(params, name, given.repeats)
        buckets = sum(len(one.bucket_indices) for one in laid_out(params, name, RANKS[-1]).values())
        times.append([name, f"{buckets:,}", f"{statistics.median(took):.3f}", f"{min(took):.3f}"])
    about = f"All {len(params):,} parameters of DeepSeek-V3 for {RANKS[-1]} ranks, seconds of {given.repeats} repeats."
    show(given.page, "Laying out flat buffers", about, ["rule", "buckets", "median", "min"], times)


if __name__ == "__main__":
    main()
