"""Buffers: flat parameter and gradient buffers of distributed optimizers, exactly as the optimizers lay them out.

In reading order:

- `param`: parameters as the rules see them, and padding;
- `param_layout`: where parameters lie in a buffer, as values with the fields of Megatron-Core's;
- `draft`: a buffer while a rule lays it out;
- `megatron_ddp`: the rules of its DistributedOptimizer, of plain DDP, and NVFP4's packed map;
- `layer_wise`: the rule of its LayerWise optimizer (Muon);
- `fsdp_zero`: the rules of PyTorch's FSDP1, DeepSpeed's ZeRO, and Megatron-FSDP;
- `grouping`: which parameters share a buffer, and the buffers of a model;
- `shares`: the share of each rank in a buffer, and in each parameter in it;
- `windows`: the ranks' shares of a parameter, as windows of its shape;
- `states`: optimizer state in these buffers as layouts, which plans and checkpoints take.

A rule is a function from parameters in forward order, and options by keyword, to a `PerBufferParamLayout`; a
custom rule needs no more than that, and `shardmath.testing.check_rule` checks it.

>>> from shardmath import Mesh, buffers, plan
>>> params = [buffers.Param("w", (64, 96)), buffers.Param("emb", (1000,), shared_embedding=True)]
>>> layout = buffers.distributed_optimizer(params, data_parallel_world_size=8, bucket_size=40_000)
>>> print(layout.bucket_indices, dict(layout.param_index_map))
((0, 1024), (1024, 7168)) {'emb': (0, 1000, 0), 'w': (1024, 7168, 1)}
>>> other = buffers.distributed_optimizer(params, data_parallel_world_size=3)
>>> moved = plan(buffers.state_layouts(layout, Mesh(dp=8)), buffers.state_layouts(other, Mesh(dp=3)))
>>> sum(moved.received_bytes().values())
24992
"""

from shardmath.buffers.fsdp_zero import flat_parameter, megatron_fsdp, zero
from shardmath.buffers.grouping import BufferKey, FullParamLayout, full_layout
from shardmath.buffers.layer_wise import layer_wise
from shardmath.buffers.megatron_ddp import (
    data_parallel,
    default_bucket_size,
    distributed_optimizer,
    nvfp4_packed,
)
from shardmath.buffers.param import (
    Param,
    bucket_end_divisor,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
)
from shardmath.buffers.param_layout import PerBufferParamLayout, Rule
from shardmath.buffers.shares import SHARD, Axis, shard_numel, shard_ranges, state_numel
from shardmath.buffers.states import model_parallel_state, state_layouts, state_store

__all__ = [
    "SHARD",
    "Axis",
    "BufferKey",
    "FullParamLayout",
    "Param",
    "PerBufferParamLayout",
    "Rule",
    "bucket_end_divisor",
    "data_parallel",
    "default_bucket_size",
    "distributed_optimizer",
    "flat_parameter",
    "full_layout",
    "layer_wise",
    "megatron_fsdp",
    "model_parallel_state",
    "nvfp4_packed",
    "pad_bucket_end",
    "pad_param_start",
    "pad_to_divisor",
    "shard_numel",
    "shard_ranges",
    "state_layouts",
    "state_numel",
    "state_store",
    "zero",
]
