"""Rows against plain references: what a plan makes of a trainer written in loops is an engine written in loops.

One process simulates all ranks. `tests/distributed/refits/test_executed.py` moves the same cases over gloo.
"""

from __future__ import annotations

import numpy as np
import pytest

import shardmath as sm
from shardmath.models.storage.filling import view_of
from shardmath.models.storage.stored import KnownSide, Slot
from tests.references import checkpoint, megatron, vllm
from tests.references.checkpoint import Array, Order, Weights
from tests.references.shapes import shapes_of
from tests.refits.cases import CASES, LARGE, MORE, Case

EMPTY = -7.0
"""What cells have that are no element's, in stored tensors of either side."""


def fill_trainer(case: Case, weights: Weights, order: Order = megatron.ORDER) -> Stored:
    """What all trainer ranks store."""
    stored = {}
    for rank in case.trainer.ranks:
        chunks = megatron.store(
            weights, case.family.hf, case.trainer, rank, empty=EMPTY, order=order
        )
        stored[rank] = {
            (i, name): array for i, chunk in enumerate(chunks) for name, array in chunk.items()
        }
    return stored


Stored = dict[int, dict[tuple[int, str], Array]]


def move(case: Case, stored: Stored) -> dict[str, dict[int, Weights]]:
    """What the plan makes all engines store of it."""
    moved = case.refit()
    given = {}
    for rank in moved.plan.src_ranks:
        slots = moved.slots(rank)
        given[rank] = {
            name: view_of(stored[rank][slot.chunk, slot.native], slot)
            for name, slot in slots.items()
        }
    arrived = sm.simulate(moved.plan, given)
    engines = {}
    for name, side in moved.engines.items():
        engines[name] = {
            rank: put(side, moved.slots(rank, name), arrived[rank], rank) for rank in side.ranks
        }
    return engines


def put(side: KnownSide, slots: dict[str, Slot], arrived: Weights, rank: int) -> Weights:
    """The stored tensors of an engine's rank."""
    out = {}
    for (_, name), shape in side.natives(rank).items():
        out[name] = np.full(shape, EMPTY, np.float32)
    for local, slot in slots.items():
        layout = side.layouts[local.partition("[")[0]]
        held = np.ix_(*(own >= 0 for own in layout.indices(rank)))
        array = arrived[local][held]
        view_of(out[slot.native], slot)[held] = vllm.neg_exp(array) if slot.function else array
    return out


def list_wrong(
    case: Case,
    engines: dict[str, dict[int, Weights]],
    weights: Weights,
    order: Order = vllm.ORDER,
) -> set[str]:
    """The stored tensors that are not as the engine's own rules make them, by the ends of their names."""
    wrong = set()
    for name, ranks in engines.items():
        for rank, found in ranks.items():
            engine = case.engines[name]
            wanted = vllm.load(weights, case.family.hf, engine, rank, empty=EMPTY, order=order)
            assert found.keys() == wanted.keys()
            for one, array in wanted.items():
                if found[one].tobytes() != array.tobytes():
                    wrong.add(one.removesuffix(".weight").rpartition(".")[2])
    return wrong


def draw(case: Case) -> Weights:
    return checkpoint.draw(shapes_of(case.family.hf), 0)


@pytest.mark.parametrize("case", [*CASES, *MORE, *LARGE], ids=str)
def test_what_the_trainer_stores_is_what_the_engine_loads(case: Case) -> None:
    weights = draw(case)
    assert list_wrong(case, move(case, fill_trainer(case, weights)), weights) == set()


QKV, LATENT, GATED = {"qkv_proj"}, {"fused_qkv_a_proj"}, {"gate_up_proj"}
ROUTED = {"w13_weight"}
MAMBA, CONV = {"in_proj"}, {"conv1d", "bias"}

SWAPPED = [
    ("llama", "qkv", "k q v", QKV),
    ("llama", "qkv", "q v k", QKV),
    ("llama", "gated", "up gate", GATED),
    ("qwen3", "qkv", "v k q", QKV),
    ("qwen3_moe", "gated", "up gate", ROUTED),
    ("deepseek_v3", "gated", "up gate", ROUTED | GATED),
    ("nemotron_h", "mamba", "x z B C dt", MAMBA),
    ("nemotron_h", "mamba", "z x C B dt", MAMBA),
    ("nemotron_h", "conv", "x C B", CONV),
    ("nemotron_h", "qkv", "k q v", QKV),
]
"""A family, what is fused in another order there, and which of an engine's tensors are then wrong."""


@pytest.mark.parametrize(("family", "fused", "order", "wrong"), SWAPPED)
def test_a_trainer_in_another_order_is_not_what_the_engine_loads(
    family: str, fused: str, order: str, wrong: set[str]
) -> None:
    case = next(case for case in CASES if case.name == family)
    weights = draw(case)
    swapped = {**megatron.ORDER, fused: tuple(order.split())}
    assert list_wrong(case, move(case, fill_trainer(case, weights, swapped)), weights) == wrong


@pytest.mark.parametrize(
    ("family", "fused", "order", "wrong"),
    [*SWAPPED, ("deepseek_v3", "latent", "kv_a_proj_with_mqa q_a_proj", LATENT)],
)
def test_an_engine_in_another_order_is_not_what_arrives(
    family: str, fused: str, order: str, wrong: set[str]
) -> None:
    case = next(case for case in CASES if case.name == family)
    weights = draw(case)
    swapped = {**vllm.ORDER, fused: tuple(order.split())}
    assert list_wrong(case, move(case, fill_trainer(case, weights)), weights, swapped) == wrong
