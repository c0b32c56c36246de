"""torchtitan's rows under FSDP2 and tensor parallelism cut as torch's own modules are cut, on each rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardmath_torch as smt
from shardmath import Layout
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.systems.torchtitan import torchtitan

CONFIG = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
PREFIX = "model.layers.0."
TENSORS = {
    "self_attn.v_proj": ((10, 7), 0),
    "self_attn.o_proj": ((7, 10), 1),
    "mlp.gate_proj": ((13, 7), 0),
    "mlp.down_proj": ((7, 13), 1),
}
"""Shapes that the meshes do not divide, and the dimension that tensor parallelism cuts."""


@pytest.mark.parametrize(("shards", "tp"), [(2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("name", TENSORS)
def test_torch_cuts_as_the_rows_say(name: str, shards: int, tp: int) -> None:
    shape, dim = TENSORS[name]
    whole = np.arange(np.prod(shape)).reshape(shape)
    logical = f"{PREFIX}{name}.weight"
    world = shards * tp
    side = torchtitan(CONFIG, ranks=range(world), dp_shard=shards, tp=tp)
    bound = bind(side, {logical: (shape, "int64")})
    layout = cut(shape, dim, torch.arange(world).view(shards, tp))
    for rank in range(world):
        stored = next(iter(fill(bound, {logical: whole}, rank).values()), whole[:0])
        assert np.array_equal(stored, whole[np.ix_(*layout.indices(rank))])


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Meshes need a process group, and torch keeps them where it has gone."""
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    yield
    dist.destroy_process_group()


def cut(shape: tuple[int, ...], dim: int, ranks: torch.Tensor) -> Layout:
    """How torch divides a linear layer's weight."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("fsdp", "tp"))
    module = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    divided = distribute_tensor(module.weight, mesh["tp"], [Shard(dim)], src_data_rank=None)
    module.weight = torch.nn.Parameter(divided)
    fully_shard(module, mesh=mesh["fsdp"])
    # Sizes alone do not tell on one rank which reading of the placements is meant.
    return smt.from_dtensor(module.weight, reading="order")
