"""Sources of a module whose parameters FSDP2 has gathered for a forward, and then of its shards."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardmath import ExchangeError
from shardmath_vllm.source import check_kept, read_source, watch_modules


def read(rank: int) -> tuple[str, bool]:
    """What is said of the module between a forward and `reshard`; and whether its shards are a source all the while."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    sharded = fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
    source = read_source(sharded)
    watched = watch_modules(source)
    sharded(torch.ones(1, 4))
    check_kept(watched, source)
    said = ""
    try:
        read_source(sharded)
    except ExchangeError as error:
        said = str(error)
    sharded.reshard()
    check_kept(watched, source)
    return said, read_source(sharded).rank == rank
