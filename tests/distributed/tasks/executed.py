"""Refits between storage made by plain references: there step after step, and back.

What is compared is every byte that a rank stores, cells of no element too, which nothing may write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from tests.references import megatron, vllm
from tests.references.checkpoint import Weights, draw
from tests.references.shapes import shapes_of
from tests.refits.cases import LOGARITHM, Case

Tensors: TypeAlias = dict[str, Tensor]

BEFORE = -7.0
"""What every cell has before anything is moved."""
STEPS = 3


class Found(NamedTuple):
    """What differs on a rank, there and back, and what it stores of each engine after the last step."""

    there: list[str]
    back: list[str]
    engines: dict[str, Weights]


def draw_step(case: Case, step: int) -> Weights:
    """The weights of a step, the same on all ranks."""
    return draw(shapes_of(case.family.hf), step)


def move(rank: int, case: Case, there: sm.Refit, back: Mapping[str, sm.Refit]) -> Found:
    """The refit after each step, and then every engine's weights back to the trainer."""
    refit = smt.Refit(there, timeout=30.0)
    trained = _make_trainer(case, rank) if rank in case.trainer.ranks else None
    engines = {
        name: _blank(vllm.load(draw_step(case, 0), case.family.hf, engine, rank))
        for name, engine in case.engines.items()
        if rank in engine.ranks
    }
    refit.prepare(trained, engines)
    wrong = []
    for step in range(STEPS):
        if trained is not None:
            _train(case, rank, trained, step)
        refit(acknowledge=True)
        wrong += [f"{name} after step {step}" for name in _check_engines(case, rank, engines, step)]
    not_back = list(_move_back(case, rank, back, engines))
    stored = {
        name: {one: tensor.numpy() for one, tensor in tensors.items()}
        for name, tensors in engines.items()
    }
    return Found(wrong, not_back, stored)


def _move_back(
    case: Case, rank: int, back: Mapping[str, sm.Refit], engines: Mapping[str, Tensors]
) -> Iterator[str]:
    """What the trainer does not get back of each engine, after the last step."""
    for name, planned in back.items():
        refit = smt.Refit(planned, timeout=30.0)
        returned = _make_trainer(case, rank) if rank in case.trainer.ranks else None
        refit.prepare(engines.get(name), returned, own=["*.A", f"*.{LOGARITHM}"])
        refit(acknowledge=True)
        if returned is not None:
            for one in _check_trainer(case, rank, returned):
                yield f"{one} from {name}"


# What ranks store


def _store(case: Case, rank: int, step: int) -> list[Weights]:
    weights = draw_step(case, step)
    return megatron.store(weights, case.family.hf, case.trainer, rank, empty=BEFORE)


def _make_trainer(case: Case, rank: int) -> list[Tensors]:
    return [_blank(chunk) for chunk in _store(case, rank, 0)]


def _blank(stored: Weights) -> Tensors:
    return {name: torch.full(array.shape, BEFORE) for name, array in stored.items()}


def _train(case: Case, rank: int, trained: Sequence[Tensors], step: int) -> None:
    """As an optimizer does: in place."""
    for chunk, new in zip(trained, _store(case, rank, step), strict=True):
        for name, array in new.items():
            chunk[name].copy_(torch.from_numpy(array))


def _check_engines(
    case: Case, rank: int, engines: Mapping[str, Tensors], step: int
) -> Iterator[str]:
    weights = draw_step(case, step)
    for name, has in engines.items():
        wanted = vllm.load(weights, case.family.hf, case.engines[name], rank, empty=BEFORE)
        for one in _list_different(has, wanted):
            yield f"{name}: {one}"


def _check_trainer(case: Case, rank: int, returned: Sequence[Tensors]) -> Iterator[str]:
    for has, wanted in zip(returned, _store(case, rank, STEPS - 1), strict=True):
        for name in wanted:
            if LOGARITHM in name:
                wanted[name] = np.full_like(wanted[name], BEFORE)
        yield from _list_different(has, wanted)


def _list_different(has: Tensors, wanted: Weights) -> Iterator[str]:
    for name, array in wanted.items():
        if has[name].numpy().tobytes() != array.tobytes():
            yield name
