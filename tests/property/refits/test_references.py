"""Rows against plain references: what a plan makes of a trainer written in loops is an engine written in loops.

One process simulates all ranks. `tests/distributed/refits/test_executed.py` moves the same cases over gloo.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import shardmath as sm
from shardmath.storage.filling import view_of
from shardmath.storage.stored import Side, Slot
from tests.references import checkpoint, megatron, vllm
from tests.references.checkpoint import Array, Weights
from tests.references.shapes import shapes_of
from tests.refits.cases import CASES, LARGE, Case

EMPTY = -7.0
"""What cells have that are no element's, in stored tensors of either side."""


def fill_trainer(case: Case, weights: Weights, order: megatron.Order = megatron.ORDER) -> Stored:
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


def put(side: Side, slots: dict[str, Slot], arrived: Weights, rank: int) -> Weights:
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


def list_wrong(case: Case, engines: dict[str, dict[int, Weights]], weights: Weights) -> list[str]:
    """The stored tensors that are not as the engine's own rules make them."""
    wrong = []
    for name, ranks in engines.items():
        for rank, found in ranks.items():
            wanted = vllm.load(weights, case.family.hf, case.engines[name], rank, empty=EMPTY)
            assert found.keys() == wanted.keys()
            wrong += [one for one in wanted if found[one].tobytes() != wanted[one].tobytes()]
    return wrong


def draw(case: Case) -> Weights:
    return checkpoint.draw(shapes_of(case.family.hf), 0)


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_what_the_trainer_stores_is_what_the_engine_loads(case: Case) -> None:
    weights = draw(case)
    assert list_wrong(case, move(case, fill_trainer(case, weights)), weights) == []
