"""Flat buffers of real parameters: modules as buffers' Params, layouts by parameter, and views of flat arrays.

1. `params_of` reads a module as Megatron-Core's DDP does: trained parameters in order, each once,
   with this rank's shapes; and the marks that Megatron puts on parameters (`shared_embedding`,
   `allreduce`, `is_embedding_or_output_parameter`).
2. `by_parameter` gives a layout the keys and types of Megatron's own `PerBufferParamLayout`;
   `by_name` converts one back.
3. `state_views` are local tensors in the memory of a rank's flat array: moving into them fills the
   array. `views` are such tensors for any Store.

>>> module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
>>> [(param.name, param.shape) for param in params_of(module)]
[('0.weight', (3, 4)), ('0.bias', (3,)), ('1.weight', (2, 3))]
>>> layout = buffers.distributed_optimizer(params_of(module), data_parallel_world_size=2)
>>> by_parameter(layout, module).param_index_map[module[1].weight]
(0, 6, 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmath import Layout, Mesh, ParamLayoutError, StoreError, buffers
from shardmath.base.text import plural
from shardmath.layouts.store import Held, Place, Store, locals_of
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.dtensors.dtensor import local_of

__all__ = [
    "ParamLayout",
    "by_name",
    "by_parameter",
    "embeddings",
    "params_of",
    "state_views",
    "views",
]


def params_of(module: nn.Module) -> tuple[buffers.Param, ...]:
    """Return a module's trained parameters as Params (name, local shape, dtype and more) from which flat buffers are
    laid out, in the order of `named_parameters`.

    A tied parameter appears once, under its first name.

    Embeddings and output layers (`get_output_embeddings`) are not managed by LayerWise optimizers.
    Quantized storage is not detected: set `quantized=` of such a Param.
    """
    unmanaged = embeddings(module)
    params = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            params.append(_describe(name, parameter, id(parameter) in unmanaged))
    return tuple(params)


def embeddings(module: nn.Module) -> set[int]:
    """Return the `id()` of each parameter of the module's embeddings and of its output layer."""
    tables: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            tables.append(part)
    output = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        tables.append(output)
    return {id(parameter) for table in tables for parameter in table.parameters()}


def _describe(name: str, p: nn.Parameter, embedding: bool) -> buffers.Param:
    """The Param of a parameter, with the marks that Megatron puts on it."""
    unmanaged = embedding or getattr(p, "is_embedding_or_output_parameter", False)
    # A parameter without this mark may be managed, so only False itself counts.
    if getattr(p, "use_muon", None) is False:
        unmanaged = True
    return buffers.Param(
        name,
        _local_shape(p),
        str(p.dtype),
        shared_embedding=bool(getattr(p, "shared_embedding", False)),
        expert_parallel=not getattr(p, "allreduce", True),
        managed=False if unmanaged else None,
    )


def _local_shape(p: Tensor) -> tuple[int, ...]:
    """The shape of this rank's part."""
    if isinstance(p, DTensor):
        return tuple(local_of(p).shape)
    return tuple(p.shape)


class ParamLayout(NamedTuple):
    """The layout of a flat buffer, with the fields and types of Megatron-Core's `PerBufferParamLayout`. The keys of
    `param_index_map` are the parameters themselves, not their names.

    That one takes them as keywords: `PerBufferParamLayout(**by_parameter(layout,
    module)._asdict())`.
    """

    param_index_map: dict[nn.Parameter, tuple[int, int, int]]
    bucket_indices: list[tuple[int, int]]
    per_bucket_numel_unpadded: list[int]
    param_indices: list[int]
    num_optimizer_shards: int | None


class _LikeMegatron(Protocol):
    param_index_map: Any
    bucket_indices: Any
    per_bucket_numel_unpadded: Any
    param_indices: Any


def by_parameter(layout: buffers.PerBufferParamLayout, module: nn.Module) -> ParamLayout:
    """Return the buffer layout with the module's parameters as keys instead of their names.

    Raises ParamLayoutError for a name that the module lacks.
    """
    named = dict(module.named_parameters())
    unknown = [name for name, _ in layout.placed if name not in named]
    if unknown:
        fix = "make the layout from params_of(module)"
        what = f"the module lacks {plural(unknown, 'parameter')} of the layout: {unknown[:8]}"
        raise ParamLayoutError(f"{what}; {fix}")
    return ParamLayout(
        {named[name]: position for name, position in layout.placed},
        list(layout.bucket_indices),
        list(layout.per_bucket_numel_unpadded),
        list(layout.param_indices),
        layout.num_optimizer_shards,
    )


def by_name(
    layout: _LikeMegatron, module: nn.Module, *, data_parallel_world_size: int | None = None
) -> buffers.PerBufferParamLayout:
    """Return a buffer layout like `layout` (Megatron-Core's, or from `by_parameter`), but with the names of parameters
    in `module` as keys instead of the parameters. `data_parallel_world_size` is the number of ranks to record in the
    result; None stands for any number.

    A layout with parameters as keys does not have the number of ranks. Raises ParamLayoutError if the module lacks a
    parameter, or if the layout contradicts itself.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    # Each parameter with its (start, end, bucket).
    placed = list(layout.param_index_map.items())
    unknown = [tuple(p.shape) for p, _ in placed if id(p) not in names]
    if unknown:
        what = f"the layout has {plural(unknown, 'parameter')}, of shapes {unknown[:8]}"
        fix = "pass the module for which the layout was made"
        raise ParamLayoutError(f"{what}, that the module lacks; {fix}")
    return buffers.PerBufferParamLayout(
        [(names[id(p)], position) for p, position in placed],
        layout.bucket_indices,
        layout.per_bucket_numel_unpadded,
        layout.param_indices,
        getattr(layout, "num_optimizer_shards", None),
        shapes=[_local_shape(p) for p, _ in placed],
        data_parallel_world_size=data_parallel_world_size,
    )


def state_views(
    buffer_layout: buffers.PerBufferParamLayout,
    mesh: Mesh,
    rank: int,
    array: Tensor,
    *,
    axis: buffers.Axis = None,
    shape: Literal["flat", "nd"] = "flat",
) -> dict[str, Tensor]:
    """Return views of `array` by parameter name; `array` is flat and has the part of an optimizer state buffer that
    `rank` holds. The buffer is divided along `axis` of `mesh`; with `shape` "nd", a view has as many dimensions as its
    parameter.

    Several views of one parameter have the keys `name[0]`, `name[1]` ...

    The views have the layouts that `buffers.state_layouts` gives, and the array's dtype. A rank outside the mesh has
    none.

    Raises StoreError for an array that is not flat, or not as long as the rank's share of the
    buffer, and ParamLayoutError as `state_layouts` does.
    """
    share = buffers.state_numel(buffer_layout, mesh, axis=axis)
    if rank not in mesh:
        return {}
    if tuple(array.shape) != (share,):
        expected = f"rank {rank} has {share} elements of the buffer"
        what = f"the array has shape {tuple(array.shape)}, {expected}"
        raise StoreError(f"{what}; give a flat array of {share}")
    if shape == "nd":
        layouts, store = buffers.state_layouts(
            buffer_layout, mesh, axis=axis, shape="nd", dtype=array.dtype, ranks=[rank]
        )
        return views(store, layouts, rank, array)
    flat = buffers.state_layouts(buffer_layout, mesh, axis=axis, shape=shape, dtype=array.dtype)
    store = buffers.state_store(buffer_layout, mesh, axis=axis, ranks=[rank])
    return views(store, flat, rank, array)


def views(
    store: Store, layouts: Held, rank: int, arrays: Tensor | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the local tensors of `rank` by name, as detached views into `arrays`: flat tensors by name, or the only
    one. `layouts` has the tensors' layouts by name, and `store` tells in which array and at which offset each local
    tensor begins.

    A tensor with several layouts has a view `name[i]` for each layout i. A single array is `buffers.SHARD`. Tensors
    that the rank has no part of are left out. Raises StoreError for an array that is missing, too short, not flat, or
    of another dtype.
    """
    named = {buffers.SHARD: arrays} if isinstance(arrays, Tensor) else arrays
    found = {}
    for local, layout in locals_of(layouts, rank):
        place = store.place(local, layout, rank)
        found[local] = _view_in(place, local, layout, named)
    return found


def _view_in(place: Place, local: str, layout: Layout, arrays: Mapping[str, Tensor]) -> Tensor:
    """A view of the place in its array. Raises StoreError if the array does not hold it."""
    array = arrays.get(place.buffer)
    if array is None:
        known = ", ".join(map(repr, arrays)) or "none"
        what = f"tensor {local!r} lies in array {place.buffer!r}, and the arrays are {known}"
        raise StoreError(f"{what}; pass array {place.buffer!r}, too")
    if array.ndim != 1 or place.end > array.numel() or array.dtype != dtype_of(layout.dtype):
        what = f"{place} of {local!r} ends at {place.end} and is {layout.dtype}"
        given = f"the array is {str(array.dtype).removeprefix('torch.')}{list(array.shape)}"
        fix = f"give a flat one of {layout.dtype} with at least {place.end} elements"
        raise StoreError(f"{what}, {given}; {fix}")
    # A place counts elements of the array, as_strided elements of its storage, which the array may stride over.
    step = array.stride(0)
    strides = tuple(stride * step for stride in place.strides)
    start = array.storage_offset() + place.offset * step
    return torch.as_strided(array.detach(), place.shape, strides, start)
