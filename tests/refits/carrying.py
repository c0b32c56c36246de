"""Carrying: what engine ranks store once a refit is simulated, of what trainer ranks store as plain arrays.

>>> carry(whole("w = w"), divided("w = w : (tp n)", range(1, 3)), {0: {"w": np.arange(4)}}, {"w": ((4,), "int64")})
{1: {'w': array([0, 1])}, 2: {'w': array([2, 3])}}
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

import shardmath as sm
from shardmath.models.storage.filling import view_of
from shardmath.models.storage.stored import KnownSide, Shapes
from shardmath.storage import Stored, parse

__all__ = [
    "LAYER",
    "SERVED",
    "TRAINED",
    "Array",
    "Arrays",
    "carry",
    "divided",
    "equal",
    "number",
    "store",
    "whole",
]

Array = NDArray[np.int64]
Arrays = dict[str, Array]


TRAINED = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 2,
    "ffn_hidden_size": 8,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_moe_experts": 64,
    "moe_grouped_gemm": True,
}
SERVED = {
    "model_type": "qwen3_moe",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "num_experts": 64,
    "intermediate_size": 4,
}
LAYER = "model.layers.0."


def whole(table: str, ranks: tuple[int, ...] = (0,)) -> Stored:
    """A side whose ranks store every tensor whole."""
    return Stored(parse(table), (sm.Mesh(dp=len(ranks), ranks=ranks),))


def divided(table: str, ranks: range, **numbers: int) -> Stored:
    """A side of tensor parallelism."""
    return Stored(parse(table), (sm.Mesh(tp=len(ranks), ranks=ranks),), numbers=numbers)


def number(shapes: Shapes) -> Arrays:
    """Arrays whose elements are 1, 2, 3, and so on, through all of them."""
    arrays = {}
    start = 1
    for name, (shape, _) in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return arrays


def carry(
    trainer: Stored, engine: Stored, stored: Mapping[int, Mapping[str, Array]], shapes: Shapes
) -> dict[int, Arrays]:
    """What each engine rank stores afterwards; 0 where no element lies."""
    moved = sm.refit(trainer, engine, shapes)
    sm.verify(moved.plan)
    given = {}
    for rank in moved.plan.src_ranks:
        slots = moved.slots(rank)
        given[rank] = {
            name: view_of(stored[rank][slot.native], slot) for name, slot in slots.items()
        }
    arrived = sm.simulate(moved.plan, given)
    (side,) = moved.engines.values()
    return {rank: store(side, arrived[rank], rank) for rank in side.ranks}  # type: ignore[arg-type]


def store(side: KnownSide, arrived: Mapping[str, Array], rank: int) -> Arrays:
    """The stored tensors of a rank whose local tensors these are."""
    out = {name: np.zeros(shape, np.int64) for (_, name), shape in side.natives(rank).items()}
    for name, slot in side.slots(rank).items():
        held = np.ix_(*(own >= 0 for own in side.layouts[name].indices(rank)))
        view_of(out[slot.native], slot)[held] = arrived[name][held]
    return out


def equal(found: dict[int, Arrays], wanted: dict[int, Arrays]) -> bool:
    """Whether ranks store the same."""
    assert found.keys() == wanted.keys()
    for rank, arrays in wanted.items():
        assert found[rank].keys() == arrays.keys()
        if not all(np.array_equal(found[rank][name], array) for name, array in arrays.items()):
            return False
    return True
