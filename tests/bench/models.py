"""The workloads of the benchmarks: (source, destination), each a Layout by name.

1. Every function takes the number of ranks of a side, so that the same workload can be drawn from 64 to 16,384 ranks.
2. Sources are ranks 0..n-1, destinations n..2n-1, unless the function says that both are the same ranks.
3. Element types are bfloat16, but for DeepSeek-V3's routers and their biases, float32.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TypeAlias

import numpy as np

import shardmath as sm
from shardmath.layouts.styles import is_expert
from shardmath.models.systems import former, hf, rules

__all__ = [
    "BLOCK",
    "Pair",
    "WORKLOADS",
    "deepseek_v3",
    "deepseek_v3_grouped",
    "deepseek_v3_stacked",
    "fsdp_over_tp",
    "merged",
    "overlapping_tables",
    "qwen3_235b",
    "tp4_to_tp8",
]

Pair: TypeAlias = tuple[dict[str, sm.Layout], dict[str, sm.Layout]]

DEEPSEEK_V3 = "deepseek-ai/DeepSeek-V3"
QWEN3_235B = "Qwen/Qwen3-235B-A22B"
DEEPSEEK_STAGES = (3, *[4] * 14, 2)
QWEN3_STAGES = (11, *[12] * 6, 11)
"""Layers of each pipeline stage (NeMo-RL's recipes for DeepSeek-V3 and Qwen3-235B)."""


@cache
def shapes(model: str) -> hf.Shapes:
    """Names, shapes and dtypes of the model's checkpoint."""
    from shardmath_torch.commands.models.shapes import shapes as of_checkpoint

    return of_checkpoint(model)


def merged(stages: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """Every few consecutive stages as one, so that `pp`, a divisor of their number, remain.

    >>> merged((3, 4, 4, 2), 2)
    (7, 6)
    """
    return tuple(sum(part) for part in zip(*[iter(stages)] * (len(stages) // pp), strict=True))


def sides(ranks: int) -> tuple[range, range]:
    """Source and destination ranks, apart."""
    return range(ranks), range(ranks, 2 * ranks)


def _deepseek_trainer(
    entries: hf.Shapes, ranks: int, *, stacked: bool = False
) -> dict[str, sm.Layout]:
    pp = min(16, ranks // 16)
    stages = merged(DEEPSEEK_STAGES, pp)
    return former.trainer(
        entries, ranks=sides(ranks)[0], pp=pp, ep=16, stages=stages, stacked=stacked
    )


def _deepseek_engine(
    entries: hf.Shapes, ranks: int, *, stacked: bool = False
) -> dict[str, sm.Layout]:
    return former.engine(entries, ranks=sides(ranks)[1], tp=32, stacked=stacked)


def deepseek_v3(ranks: int = 256) -> Pair:
    """PP16 EP16 EDP(ranks/256) -> TP32 DP(ranks/32), 45,395 tensors; below 256 ranks, stages are merged."""
    entries = shapes(DEEPSEEK_V3)
    return _deepseek_trainer(entries, ranks), _deepseek_engine(entries, ranks)


def deepseek_v3_grouped(ranks: int = 256) -> Pair:
    """The same with the experts of a layer as one (E, I, H) tensor a projection: 1,025 tensors."""
    entries = hf.grouped(shapes(DEEPSEEK_V3))
    return _deepseek_trainer(entries, ranks), _deepseek_engine(entries, ranks)


def deepseek_v3_stacked(ranks: int = 256, *, engine: bool = True) -> Pair:
    """The same, 45,395 tensors, with experts (1, I, H) as windows of stacked buffers.

    `engine` says whether that is so on the destination, too (vLLM's w13 and w2), or whether experts lie alone there.
    """
    entries = shapes(DEEPSEEK_V3)
    src = _deepseek_trainer(entries, ranks, stacked=True)
    if engine:
        return src, _deepseek_engine(entries, ranks, stacked=True)
    alone = {name: ((1, *s), d) if is_expert(name) else (s, d) for name, (s, d) in entries.items()}
    return src, _deepseek_engine(alone, ranks)


def qwen3_235b(ranks: int = 128) -> Pair:
    """TP4 PP8 EP16 -> TP8 DP(ranks/8), 36,945 tensors; 4 key-value heads, each on two ranks of an engine."""
    here, there = sides(ranks)
    entries, pp = shapes(QWEN3_235B), min(8, ranks // 16)
    src = former.trainer(entries, ranks=here, tp=4, pp=pp, ep=16, stages=merged(QWEN3_STAGES, pp))
    return src, former.engine(entries, ranks=there, tp=8, kv_heads=4)


DENSE: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (8192, 8192),
    "self_attn.k_proj.weight": (1024, 8192),
    "self_attn.v_proj.weight": (1024, 8192),
    "self_attn.o_proj.weight": (8192, 8192),
    "mlp.gate_proj.weight": (28672, 8192),
    "mlp.up_proj.weight": (28672, 8192),
    "mlp.down_proj.weight": (8192, 28672),
    "input_layernorm.weight": (8192,),
    "post_attention_layernorm.weight": (8192,),
}
"""One block of Llama-3-70B."""


def fsdp_over_tp(ranks: int = 4096, *, apart: bool = False) -> Pair:
    """FSDP(ranks/8) x TP8 -> DP(ranks/4) x TP4, 407 tensors: 45 blocks as Llama-3-70B's, an embedding and a scalar.

    The same ranks on both sides, or others if `apart`. At 4,096 ranks there are 4,609 holder classes: a rank each for
    what is divided over both axes, 512 of 8 ranks for norms, and all ranks for the scalar.
    """
    entries = {
        f"model.layers.{i}.{name}": shape for i in range(45) for name, shape in DENSE.items()
    }
    entries |= {"model.embed_tokens.weight": (128256, 8192), "model.scale": ()}
    typed = {name: (shape, "bfloat16") for name, shape in entries.items()}
    src = rules.parse(f"dp={ranks // 8} tp=8")
    dst = rules.parse(f"replica={ranks // 4} tp=4", first_rank=ranks if apart else 0)
    return src.layouts(typed), dst.layouts(typed)


BLOCK: dict[str, tuple[tuple[int, ...], str]] = {
    "q_proj": ((8192, 8192), "(tp n) h"),
    "k_proj": ((1024, 8192), "(tp n) h"),
    "v_proj": ((1024, 8192), "(tp n) h"),
    "o_proj": ((8192, 8192), "n (tp h)"),
    "gate_up": ((57344, 8192), "(2 tp n) h"),
    "down_proj": ((8192, 28672), "n (tp h)"),
    "norm": ((8192,), "n"),
}
EMBED = ((128256, 8192), "(tp n) h")


def overlapping_tables(positions: int, ranks: int = 64, holders: int = 4) -> Pair:
    """One tensor of which each position lies anywhere, on about so many ranks, on the same ranks before and after.

    The worst for what looks at sets of holders: nearly every position has a set of its own.
    """
    src, dst = (_scattered(seed, positions, ranks, holders) for seed in range(2))
    return {"w": src}, {"w": dst}


def _scattered(seed: int, positions: int, ranks: int, holders: int) -> sm.Layout:
    """A Table of random positions, each on one rank at least."""
    rng = np.random.default_rng(seed)
    has = rng.random((ranks, positions)) < holders / ranks
    has[rng.integers(0, ranks, positions), np.arange(positions)] = True
    parts = [sm.from_ranges((at, at + 1) for at in np.flatnonzero(row).tolist()) for row in has]
    return sm.Layout((positions,), sm.Mesh(x=ranks), {"x": sm.Table(0, tuple(parts))})


def small(tensors: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and text of an embedding and of as many tensors of consecutive blocks as make `tensors` together."""
    blocks = (
        (f"layers.{i}.{name}", kind) for i in itertools.count() for name, kind in BLOCK.items()
    )
    return {"embed": EMBED, **dict(itertools.islice(blocks, tensors - 1))}


def tp4_to_tp8(ranks: int = 64, tensors: int = 400) -> Pair:
    """TP4 DP(ranks/4) -> TP8 DP(ranks/8): an embedding and 57 blocks of 7."""
    here, there = sides(ranks)
    meshes = sm.Mesh(dp=ranks // 4, tp=4, ranks=here), sm.Mesh(dp=ranks // 8, tp=8, ranks=there)
    src, dst = (_small(mesh, tensors) for mesh in meshes)
    return src, dst


def _small(mesh: sm.Mesh, tensors: int) -> dict[str, sm.Layout]:
    kinds = small(tensors)
    made = {
        kind: sm.Layout(kind[0], mesh, kind[1], dtype="bfloat16") for kind in set(kinds.values())
    }
    return {name: made[kind] for name, kind in kinds.items()}


WORKLOADS = {
    "TP4 -> TP8": tp4_to_tp8,
    "DeepSeek-V3": deepseek_v3,
    "DeepSeek-V3, grouped": deepseek_v3_grouped,
    "DeepSeek-V3, stacked": deepseek_v3_stacked,
    "Qwen3-235B": qwen3_235b,
    "FSDP x TP8 -> DP x TP4": fsdp_over_tp,
}
"""Every workload, as a function of the ranks of a side."""
