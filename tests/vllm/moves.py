"""A checkpoint's weights move from a trainer's shards into vLLM's own parameters, and vLLM's own loader says whether
they are right.

1. Ranks 0 to 3 are the trainer, each with a quarter of every tensor, as FSDP2 has it; ranks 4 and 5 are an engine of
   TP 2, whose model vLLM builds for them.
2. The engine's side is what its loader was seen to store. Nothing else says how vLLM stores anything.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

import shardmath as sm
import shardmath_torch as smt
from tests.vllm import checkpoints, engine

__all__ = ["refit"]

TRAINERS, TP = 4, 2


def refit(rank: int, folders: list[Path]) -> list[list[str]]:
    """Which tensors of this rank differ from what vLLM loads, after a refit of each checkpoint."""
    _initialise()
    if rank < TRAINERS:
        return _train(rank, folders)
    with engine.built(folders[0], rank - TRAINERS, TP, device="cpu") as model:
        return _serve(model, rank, folders)


def _initialise() -> None:
    """vLLM's groups over all ranks, two and two; those of the trainer are not used."""
    size = dist.get_world_size()
    # What vLLM's own worker takes from its address: on some processors ranks share memory under that name.
    name = [secrets.token_hex(8)]
    dist.broadcast_object_list(name, src=0)
    os.environ["VLLM_DIST_IDENT"] = name[0]
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(size, dist.get_rank(), "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(TP)


def _train(rank: int, folders: list[Path]) -> list[list[str]]:
    """A trainer's rank: it has a part of each checkpoint in turn, in the same memory."""
    shapes = checkpoints.shapes_of(folders[0])
    layouts = _lay_out(shapes)
    moved = _plan(shapes, None)
    own = {name: _cut(tensor, layouts[name], rank) for name, tensor in checkpoints.read(folders[0])}
    moved.prepare(src=own)
    for folder in folders:
        for name, tensor in checkpoints.read(folder):
            own[name].copy_(_cut(tensor, layouts[name], rank))
        moved(acknowledge=True)
    return [[] for _ in folders]


def _serve(model: nn.Module, rank: int, folders: list[Path]) -> list[list[str]]:
    """An engine's rank: what is wrong with it after each refit."""
    shapes = checkpoints.shapes_of(folders[0])
    own = _empty(model)
    moved = _plan(shapes, smt.record(model.load_weights, shapes, model, form="pairs"))
    moved.prepare(dst=own)
    wrong = []
    for folder in folders:
        moved(acknowledge=True)
        with engine.built(folder, rank - TRAINERS, TP, device="cpu") as loaded:
            wanted = _empty(loaded)
            loaded.load_weights(checkpoints.read(folder))
        assert own.keys() == wanted.keys()
        wrong.append([name for name in own if not torch.equal(own[name], wanted[name])])
    return wrong


def _plan(shapes: checkpoints.Shapes, recorded: sm.Recorded | None) -> smt.Refit:
    """The refit, once each rank knows what those of the engine have recorded."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, recorded and recorded.to_json())
    ranks = {rank: sm.Recorded.from_json(text) for rank, text in enumerate(texts) if text}
    planned = sm.refit(_lay_out(shapes), sm.RecordedSide(ranks), shapes)
    sm.verify(planned.plan)
    return smt.Refit(planned, timeout=60.0)


def _lay_out(shapes: checkpoints.Shapes) -> dict[str, sm.Layout]:
    """The trainer's layouts: those of FSDP2."""
    mesh = sm.Mesh(fsdp=TRAINERS)
    cut = {"fsdp": sm.Shard(0)}
    return {
        name: sm.Layout(shape, mesh, cut, dtype=dtype) for name, (shape, dtype) in shapes.items()
    }


def _cut(tensor: Tensor, layout: sm.Layout, rank: int) -> Tensor:
    """A trainer's part."""
    rows = torch.from_numpy(layout.indices(rank)[0])
    return tensor[rows]


def _empty(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors, all zeros: what padding has before it is loaded is anything."""
    own = {}
    # Not those of state_dict, in which a router has a name more for each module that has it.
    for name, parameter in model.named_parameters():
        own[name] = parameter.data.zero_()
    return own
