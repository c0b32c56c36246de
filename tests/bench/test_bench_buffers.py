"""Flat buffers of DeepSeek-V3: laid out by every rule, and optimizer state replanned for another data-parallel size.

Parameters are those of the Hugging Face checkpoint, experts unstacked; router biases are buffers, not parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import shardmath as sm
from shardmath import buffers
from tests.bench import models
from tests.bench.test_bench_core import rounds_of

Record = Callable[..., None]
DP = 128
SIZE = buffers.default_bucket_size(DP)

RULES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DistributedOptimizer": (
        buffers.distributed_optimizer,
        {"data_parallel_world_size": DP, "bucket_size": SIZE},
    ),
    "plain DDP": (buffers.data_parallel, {"bucket_size": SIZE}),
    "LayerWise": (buffers.layer_wise, {"data_parallel_world_size": DP, "bucket_size": SIZE}),
    "Megatron-FSDP": (buffers.megatron_fsdp, {"data_parallel_world_size": DP, "bucket_size": SIZE}),
    "FSDP1's flat parameter": (buffers.flat_parameter, {"data_parallel_world_size": DP}),
    "ZeRO": (buffers.zero, {"data_parallel_world_size": DP}),
}


def parameters() -> list[buffers.Param]:
    """All 45,337, in forward order."""
    found = models.shapes(models.DEEPSEEK_V3)
    out = [
        buffers.Param(name, shape)
        for name, (shape, _) in found.items()
        if "correction_bias" not in name
    ]
    assert len(out) == 45_337
    return out


@pytest.mark.parametrize("name", RULES)
def test_layout_of_a_model(record: Record, name: str) -> None:
    """One buffer of all parameters."""
    rule, options = RULES[name]
    params = parameters()
    laid = rule(params, **options)
    assert len(laid.placed) == len(params)
    record(
        f"DeepSeek-V3, 45,337 parameters, DP{DP}: {name}",
        rounds_of(lambda: rule(params, **options), 5),
        0.5,
    )


@pytest.mark.parametrize("ranks", [8, 1024])
def test_layer_wise_of_random_sizes(record: Record, ranks: int) -> None:
    """No two parameters alike, where a search through all shards would be quadratic."""
    draw = random.Random(1)
    params = [
        buffers.Param(f"p{i}", (draw.randint(1, 4000), draw.randint(1, 4000)))
        for i in range(45_337)
    ]
    laid = buffers.layer_wise(params, data_parallel_world_size=ranks)
    assert len(laid.placed) == len(params)
    seconds = rounds_of(lambda: buffers.layer_wise(params, data_parallel_world_size=ranks), 3)
    record(f"45,337 matrices of random sizes, DP{ranks}, one bucket: LayerWise", seconds, 0.5)


def test_grouped_layout(record: Record) -> None:
    """Buffers of experts, matrices and the rest apart."""
    params = [
        buffers.Param(
            p.name, p.shape, expert_parallel=".experts." in p.name, managed=unmanaged(p.name)
        )
        for p in parameters()
    ]
    options = {
        "data_parallel_world_size": DP,
        "bucket_size": SIZE,
        "expert_data_parallel_world_size": 8,
    }

    def laid() -> buffers.FullParamLayout:
        return buffers.full_layout(params, rule=buffers.layer_wise, **options)

    assert len(laid()) == 3
    record(
        "DeepSeek-V3, experts on DP8: grouped into buffers of LayerWise and DistributedOptimizer",
        rounds_of(laid, 5),
        0.5,
    )


def unmanaged(name: str) -> bool | None:
    return False if "embed" in name or "lm_head" in name else None


def replanned(a: buffers.PerBufferParamLayout, b: buffers.PerBufferParamLayout) -> sm.Plan:
    """Proved, with the bytes of every rank."""
    p = sm.plan(buffers.state_layouts(a, sm.Mesh(dp=128)), buffers.state_layouts(b, sm.Mesh(dp=96)))
    assert sum(p.sent_bytes().values()) == sum(p.received_bytes().values())
    sm.verify(p)
    return p


@pytest.mark.parametrize("buckets", ["default buckets", "one bucket"])
def test_replan(record: Record, buckets: str) -> None:
    """A moment of all parameters from DP128 to DP96: layouts, plan, loads, proof."""
    params = parameters()
    a, b = (
        buffers_of(
            params, n, buffers.default_bucket_size(n) if buckets == "default buckets" else None
        )
        for n in (128, 96)
    )
    record(
        f"optimizer state DP128 -> DP96, {buckets}: plan and verify",
        rounds_of(lambda: replanned(a, b), 5),
        2.0,
    )
    p = replanned(a, b)
    record(
        f"optimizer state DP128 -> DP96, {buckets}: list one rank's transfers",
        rounds_of(lambda: sum(1 for _ in p.transfers(dst=5)), 3),
    )


def buffers_of(
    params: list[buffers.Param], dp: int, size: int | None
) -> buffers.PerBufferParamLayout:
    return buffers.distributed_optimizer(params, data_parallel_world_size=dp, bucket_size=size)


def test_flat_to_shapes(record: Record) -> None:
    """From DP96 to tensor parallelism over 8 ranks, rows: windows, plan, proof."""
    params = parameters()
    a = buffers_of(params, 96, buffers.default_bucket_size(96))
    tp = sm.Mesh(tp=8)
    there = {p.name: sm.Layout(p.shape, tp, {"tp": sm.Shard(0)}) for p in params}

    def made() -> sm.Plan:
        windows, _ = buffers.state_layouts(a, sm.Mesh(dp=96), shape="nd", ranks=[5])
        return sm.plan(windows, there)

    record(
        "optimizer state DP96 -> TP8, in the parameters' shapes: make windows and plan",
        rounds_of(made, 3),
    )
    p = made()
    record(
        "optimizer state DP96 -> TP8, in the parameters' shapes: verify",
        rounds_of(lambda: sm.verify(p), 3),
    )
