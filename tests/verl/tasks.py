"""What workers see of ShardSpecs: which elements verl reads from them, and which layouts shardmath does."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from verl.workers.engine.spec import (
    ShardSpec,
    derive_dtensor_placement,
    translate_flat_indices,
)

from shardmath import Layout, ShardError
from shardmath_verl import from_shard_spec, to_shard_spec


def read_by_verl(spec: ShardSpec, count: int) -> tuple[list[int], bool]:
    """The flat positions of a rank's `count` elements, and whether verl takes them from this rank."""
    place, contributes = spec.place, spec.contributes
    if place is None:
        place, contributes, _ = derive_dtensor_placement(spec)
    return translate_flat_indices(torch.arange(count), place).tolist(), contributes


def describe(rank: int, layout: Layout) -> Any:
    """What verl reads from a layout's spec, and the layout that is read from it again; or the error."""
    try:
        spec = to_shard_spec(layout)
    except ShardError as error:
        return type(error).__name__
    count = torch.Size(layout.local_shape(rank)).numel()
    return *read_by_verl(spec, count), from_shard_spec(spec, layout.dtype)


def shard(rank: int, shape: tuple[int, ...], tp_dim: int | None, axes: dict[str, int]) -> Any:
    """FSDP2 over tensor parallelism of numbered elements: the numbers that a rank has, verl's reading of the spec of
    the parameter, or its error, and shardmath's."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    module = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    placements = [Replicate() if tp_dim is None else Shard(tp_dim)]
    divided = distribute_tensor(whole, mesh["tp"], placements, src_data_rank=None)
    module.weight = torch.nn.Parameter(divided)
    replicas = ("replica", "dp") if "replica" in axes else ("dp",)
    fully_shard(module, mesh=mesh[replicas])
    weight = module.weight
    assert isinstance(weight, DTensor)
    numbers = weight.to_local().flatten().int().tolist()
    spec = ShardSpec.from_param(weight)
    try:
        by_verl = read_by_verl(spec, len(numbers))
    except NotImplementedError as error:
        by_verl = str(error)
    layout = from_shard_spec(spec, "float32")
    again = read_by_verl(to_shard_spec(layout), len(numbers))
    return numbers, by_verl, layout, again


def refuse(rank: int, fields: dict[str, Any]) -> str:
    """The error for a spec that no layout expresses."""
    try:
        return str(from_shard_spec(ShardSpec((8, 4), **fields)))
    except ShardError as error:
        return str(error)


def read_blocks(rank: int, places: list[Any], shapes: list[tuple[int, ...]]) -> str:
    """The layout of blocks, one per rank; or the error."""
    group = torch.distributed.group.WORLD
    spec = ShardSpec(shapes[rank], place=places[rank], gather_group=group)
    try:
        return str(from_shard_spec(spec))
    except ShardError as error:
        return str(error)


def whole(rank: int) -> tuple[Layout, bool]:
    spec = ShardSpec((8, 4))
    return from_shard_spec(spec), read_by_verl(spec, 32)[1]
