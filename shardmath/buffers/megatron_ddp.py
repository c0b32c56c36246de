"""Megatron-Core's buffers: of DistributedOptimizer, of plain DDP, and of packed NVFP4 parameters (d98e8a64).

1. Parameters are placed one after the other, last one first, since gradients are ready in that order.
2. A bucket closes at the first parameter that makes it `bucket_size` elements or more. DistributedOptimizer starts
   parameters at multiples of 64, ends buckets where data-parallel ranks get equal shares, and gives a shared embedding
   a separate bucket, so that both pipeline stages that hold it divide it equally; the bucket before it ends where the
   embedding would have started, and counts as unpadded up to there. Plain DDP does none of that.
3. NVFP4 has two values per byte: parameters lie packed in a buffer of bytes, with buckets of the same parameters.
4. A parameter without elements takes no room: it lies at [p, p).

>>> params = [Param("a", (1000,)), Param("b", (1000,))]
>>> layout = distributed_optimizer(params, data_parallel_world_size=3)
>>> print(layout.bucket_indices, dict(layout.param_index_map))
((0, 2304),) {'b': (0, 1000, 0), 'a': (1024, 2024, 0)}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmath.base.arguments import as_integer, instance
from shardmath.base.errors import ParamLayoutError
from shardmath.base.text import plural
from shardmath.buffers.draft import Draft
from shardmath.buffers.param import (
    START,
    Param,
    bucket_end_divisor,
    read_bucket_size,
    read_flag,
    read_params,
    read_positive,
    round_up,
)
from shardmath.buffers.param_layout import PerBufferParamLayout

__all__ = ["data_parallel", "default_bucket_size", "distributed_optimizer", "nvfp4_packed"]


def default_bucket_size(
    data_parallel_world_size: int,
    *,
    num_parameters: int | None = None,
    num_buckets: int | None = None,
    overlap_grad_reduce: bool = True,
    pipeline_rank: int = 0,
    chunk: int = 0,
) -> int | None:
    """Return the number of elements per bucket that Megatron-Core's DDP chooses by default; None means one bucket. With
    `num_buckets`, the number is `num_parameters // num_buckets`. `chunk` is the index of the model chunk (virtual
    pipeline stage).

    `num_parameters` counts all of the model chunk. Only the first stage's first chunk has buckets: other stages have
    time to reduce all at once. `data_parallel_world_size` counts ranks of one optimizer instance.
    """
    size = read_positive(data_parallel_world_size, "data_parallel_world_size")
    stage = as_integer(pipeline_rank, "pipeline_rank", ParamLayoutError)
    part = as_integer(chunk, "chunk", ParamLayoutError)
    if not read_flag(overlap_grad_reduce, "overlap_grad_reduce") or max(stage, part) > 0:
        return None
    if num_buckets is None:
        return max(40_000_000, 1_000_000 * size)
    total = read_positive(num_parameters, "num_parameters (which num_buckets divides)")
    count = read_positive(num_buckets, "num_buckets")
    return read_positive(total // count, f"{total} parameters divided by {num_buckets} buckets")


def distributed_optimizer(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    bucket_size: int | None = None,
    pad_for_high_nccl_busbw: bool = False,
) -> PerBufferParamLayout:
    """The layout of the flat buffer of Megatron-Core's DistributedOptimizer; `params` are in forward order.

    Raises ParamLayoutError for a parameter given twice, and for sizes below 1.
    """
    divisor = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    size = read_bucket_size(bucket_size)
    listed = read_params(params)
    return _place_backwards(
        listed, size, start=START, divisor=divisor, ranks=data_parallel_world_size
    )


def data_parallel(
    params: Iterable[Param], *, bucket_size: int | None = None
) -> PerBufferParamLayout:
    """The layout of the flat buffer of Megatron-Core's DDP without a distributed optimizer: unpadded, whole on each
    rank.

    Raises ParamLayoutError for a parameter given twice, and for a bucket size below 1.
    """
    listed = read_params(params)
    return _place_backwards(listed, read_bucket_size(bucket_size), start=1, divisor=1, ranks=None)


def _place_backwards(
    params: Sequence[Param], bucket_size: int | None, *, start: int, divisor: int, ranks: int | None
) -> PerBufferParamLayout:
    """Place parameters, last one first, at multiples of `start`; if ranks share buckets, embeddings are alone."""
    draft = Draft()
    position = 0
    for param in reversed(params):
        is_separate = param.shared_embedding and ranks is not None
        position = round_up(position, start)
        if is_separate and draft.is_filled:
            position = _close(draft, position, divisor)
        position = draft.place(param.name, position, param.numel)
        is_full = bucket_size is not None and position - draft.first >= bucket_size
        if is_separate or is_full:
            position = _close(draft, position, divisor)
    if draft.is_filled:
        _close(draft, position, divisor)
    return draft.finish(params, ranks=ranks or 1)


def _close(draft: Draft, end: int, divisor: int) -> int:
    """Close the open bucket at the next multiple of `divisor` after its `end`; return where the next begins."""
    return draft.close(round_up(end, divisor), unpadded=end - draft.first)


def nvfp4_packed(
    params: Iterable[Param],
    layout: PerBufferParamLayout,
    *,
    data_parallel_world_size: int | None = None,
    pad_for_high_nccl_busbw: bool = False,
) -> PerBufferParamLayout:
    """Return the layout, in bytes, of Megatron-Core's packed buffer of `params`: half a byte per element of NVFP4
    parameters, and one byte per element of others. `layout` is the layout of the gradients' buffer, which has the same
    buckets.

    NVFP4 are the parameters with `quantized="nvfp4"`, or True. `layout` is by a rule that places the last
    parameter first; without `data_parallel_world_size` nothing is padded. Shapes are left out: they count elements, not
    bytes.

    Raises ParamLayoutError for an odd number of elements, and if the layout is not of these parameters in this
    order, or is for another number of ranks.
    """
    listed = read_params(params)
    fix = "give the layout of the gradients' buffer"
    instance(layout, PerBufferParamLayout, fix, ParamLayoutError)
    _check_same(listed, layout)
    start = divisor = 1
    if data_parallel_world_size is not None:
        start = START
        divisor = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    ranks = data_parallel_world_size or 1
    _check_ranks(layout, ranks)
    draft = Draft()
    position = 0
    for param in reversed(listed):
        _, _, bucket = layout.param_index_map[param.name]
        position = round_up(position, start)
        if bucket != draft.bucket:
            position = _close(draft, position, divisor)
        position = draft.place(param.name, position, _count_bytes(param))
    if draft.placed:
        _close(draft, position, divisor)
    return PerBufferParamLayout(
        draft.placed,
        draft.bucket_indices,
        draft.unpadded,
        layout.param_indices,
        data_parallel_world_size=ranks,
    )


def _check_ranks(layout: PerBufferParamLayout, ranks: int) -> None:
    """Raise ParamLayoutError unless the layout is for this number of ranks, or for any."""
    size = layout.data_parallel_world_size
    if size is not None and size != ranks:
        what = f"the layout is for {plural(size, 'rank')}, and data_parallel_world_size is {ranks}"
        raise ParamLayoutError(f"{what}; give data_parallel_world_size={size}")


def _check_same(params: Sequence[Param], layout: PerBufferParamLayout) -> None:
    """Raise ParamLayoutError unless the layout has these parameters, with buckets in backward order."""
    placed = {(name, end - start) for name, (start, end, _) in layout.placed}
    given = {(param.name, param.numel) for param in params}
    if placed != given:
        ours, theirs = sorted(given - placed)[:4], sorted(placed - given)[:4]
        what = f"as (name, elements), only the parameters have {ours}, only the layout has {theirs}"
        raise ParamLayoutError(f"{what}; give the layout of these parameters")
    buckets = []
    for param in reversed(params):
        _, _, bucket = layout.param_index_map[param.name]
        buckets.append(bucket)
    in_order = list(dict.fromkeys(buckets))
    if in_order != sorted(in_order) or len(in_order) != len(layout.bucket_indices):
        what = f"the parameters, last first, lie in buckets {buckets[:8]}, which must ascend from 0"
        fix = "give parameters in forward order, and a layout that follows backward order"
        raise ParamLayoutError(f"{what}; {fix}")


def _count_bytes(param: Param) -> int:
    """The bytes of a parameter in the packed buffer: half a byte per element of NVFP4, and one of others."""
    if param.quantized not in (True, "nvfp4"):
        return param.numel
    if param.numel % 2:
        what = f"NVFP4 parameter {param.name!r} has {plural(param.numel, 'element')}"
        raise ParamLayoutError(f"{what}, and a byte holds two; give an even number")
    return param.numel // 2
