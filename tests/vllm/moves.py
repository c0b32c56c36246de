"""A checkpoint's weights move from a trainer's shards into vLLM's own parameters, and vLLM's own loader says whether
they are right.

1. Ranks 0 to 3 are the trainer, each with a quarter of every tensor, as FSDP2 has it; ranks 4 and 5 are an engine of
   TP 2, whose model vLLM builds for them.
2. The engine's side is what its loader was seen to store. Nothing else says how vLLM stores anything.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from tests.vllm import checkpoints, engine

__all__ = ["Asked", "refit"]

TRAINERS, TP = 4, 2
ITS_OWN = ["*.attn.q_scale", "*.attn.prob_scale"]
"""What an FP8 engine has for other kinds of attention: no checkpoint has them."""
CACHED = "*.self_attn.[kv]_scale"


class Asked(NamedTuple):
    """A checkpoint for each step: as the trainer has it, and as vLLM loads it, which `rules` make of that."""

    held: list[Path]
    loaded: list[Path]
    rules: Mapping[str, transforms.Transform] | None

    def plan(self, recorded: sm.storage.Recorded | None) -> smt.Refit:
        """The refit, once each rank knows what those of the engine have recorded."""
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, recorded and recorded.to_json())
        ranks = {
            rank: sm.storage.Recorded.from_json(text) for rank, text in enumerate(texts) if text
        }
        held = checkpoints.shapes_of(self.held[0])
        served = self.list_served() if self.rules else None
        side = sm.storage.RecordedSide(ranks)
        planned = sm.refit(
            checkpoints.lay_out(held, TRAINERS), side, held, served=served, rules=self.rules
        )
        sm.verify(planned.plan)
        return smt.Refit(planned, timeout=60.0)

    def list_served(self) -> checkpoints.Shapes:
        """What vLLM stores: of scales of its cache it makes numbers of the model's own type as it loads them."""
        served = checkpoints.shapes_of(self.loaded[0])
        for name in fnmatch.filter(served, CACHED):
            shape, _ = served[name]
            served[name] = shape, "bfloat16"
        return served


def refit(rank: int, asked: Asked) -> list[list[str]]:
    """Which tensors of this rank differ from what vLLM loads, after each step."""
    _initialize()
    if rank < TRAINERS:
        return _train(rank, asked)
    with engine.built(asked.loaded[0], rank - TRAINERS, TP, device="cpu") as model:
        return _serve(model, rank, asked)


def _initialize() -> None:
    """vLLM's groups over all ranks, two and two; those of the trainer are not used."""
    size = dist.get_world_size()
    # What vLLM's own worker takes from its address: on some processors ranks share memory under that name.
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    os.environ["VLLM_DIST_IDENT"] = name[0]
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(size, dist.get_rank(), "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(TP)


def _train(rank: int, asked: Asked) -> list[list[str]]:
    """A trainer's rank: it has a part of each checkpoint in turn, in the same memory."""
    first = asked.held[0]
    layouts = checkpoints.lay_out(checkpoints.shapes_of(first), TRAINERS)
    moved = asked.plan(None)
    own = {
        name: checkpoints.cut(tensor, layouts[name], rank)
        for name, tensor in checkpoints.read(first)
    }
    moved.prepare(src=own)
    for folder in asked.held:
        for name, tensor in checkpoints.read(folder):
            own[name].copy_(checkpoints.cut(tensor, layouts[name], rank))
        moved(acknowledge=True)
    return [[] for _ in asked.held]


def _serve(model: nn.Module, rank: int, asked: Asked) -> list[list[str]]:
    """An engine's rank: what is wrong with it after each refit."""
    own = _empty(model)
    moved = asked.plan(smt.record(model.load_weights, asked.list_served(), model, form="pairs"))
    moved.prepare(dst=own, own=ITS_OWN)
    wrong = []
    for folder in asked.loaded:
        moved(acknowledge=True)
        with engine.built(folder, rank - TRAINERS, TP, device="cpu") as loaded:
            wanted = _empty(loaded)
            loaded.load_weights(checkpoints.read(folder))
        assert own.keys() == wanted.keys()
        wrong.append([name for name in own if not _is_equal(own[name], wanted[name])])
    return wrong


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type and the same bytes."""
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _empty(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors, all zeros: what padding has before it is loaded is anything."""
    own = {}
    # Not those of state_dict, in which a router has a name more for each module that has it.
    for name, parameter in model.named_parameters():
        own[name] = parameter.data.zero_()
    return own
