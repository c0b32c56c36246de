"""Refits between Megatron trainers with tied embeddings and multi-token prediction on pipeline stages, on workers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.storage.binding import Bound
from shardmath.models.storage.filling import fill
from shardmath.models.systems.megatron import logical_shapes, megatron

VOCAB = 10
CONFIG = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 12,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "mtp_num_layers": 1,
}
BEFORE = -7.0
"""What every cell has before anything is moved, padding too."""
UNREAD = "output_layer.weight"
"""A parameter that Megatron-Core makes on a last stage that has the tied embedding, and neither reads nor trains."""

Tensors = dict[str, Tensor]


class Trainer(NamedTuple):
    """A layout of pipeline stages, and the ranks of the trainer that has it."""

    stages: str
    ranks: range
    tp: int = 1


def plan(one: Trainer, other: Trainer) -> sm.Refit:
    """The refit from one trainer to the other."""
    return sm.refit(_declare(one), _declare(other), _shapes())


def move(rank: int, there: sm.Refit, back: sm.Refit) -> list[str]:
    """What differs on this rank after the weights went there, and after they came back."""
    source, target = there.trainer, there.engines["engine"]
    held = _store(source, rank)
    given = _blank(_store(target, rank))
    _move(there, held, given, source, target, rank)
    wrong = [f"{name} there" for name in _list_wrong(given, _store(target, rank))]
    returned = _blank(_store(source, rank))
    _move(back, given, returned, target, source, rank)
    return wrong + [f"{name} back" for name in _list_wrong(returned, held)]


def _declare(trainer: Trainer) -> Any:
    pp = trainer.stages.count("|") + 1
    config = {**CONFIG, "pipeline_model_parallel_layout": trainer.stages}
    return megatron(config, ranks=trainer.ranks, tp=trainer.tp, pp=pp, vocab=VOCAB)


@functools.cache
def _shapes() -> Any:
    return logical_shapes(CONFIG, vocab=VOCAB, tied=True)


def _store(side: Bound, rank: int) -> Tensors:
    """What the rank stores, filled by numpy; the parameter that is never read has a value that is nowhere else."""
    if rank not in side.ranks:
        return {}
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal(shape).astype("float32")
        for name, (shape, _) in _shapes().items()
    }
    filled = fill(side, arrays, rank, empty=BEFORE)
    tensors = {name: torch.from_numpy(array) for (_, name), array in filled.items()}
    if _has_unread(side, rank):
        tensors[UNREAD] = torch.full_like(tensors["embedding.word_embeddings.weight"], torch.nan)
    return tensors


def _has_unread(side: Bound, rank: int) -> bool:
    """Whether the rank is of the last stage, and this has the layer that predicts further tokens."""
    mesh = side.stored.meshes[0]
    (spot,) = side.stored.indices["m"]
    return mesh.coords(rank)["pp"] == spot.coords["pp"] == mesh.axis_size("pp") - 1


def _blank(tensors: Tensors) -> Tensors:
    return {
        name: tensor.clone() if name == UNREAD else torch.full_like(tensor, BEFORE)
        for name, tensor in tensors.items()
    }


def _move(
    planned: sm.Refit, src: Tensors, dst: Tensors, source: Bound, target: Any, rank: int
) -> None:
    refit = smt.Refit(planned, timeout=30.0)
    own = [UNREAD] if UNREAD in src or UNREAD in dst else []
    refit.prepare(
        src if rank in source.ranks else None,
        dst if rank in target.ranks else None,
        own=own,
    )
    refit(acknowledge=True)
    refit.close()


def _list_wrong(found: Tensors, wanted: Tensors) -> list[str]:
    """The names of tensors that are not equal; NaN equals itself."""
    assert found.keys() == wanted.keys()
    return [
        name
        for name, tensor in found.items()
        if not np.array_equal(tensor.numpy(), wanted[name].numpy(), equal_nan=True)
    ]
