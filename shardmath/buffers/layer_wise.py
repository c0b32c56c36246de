"""The buffer of Megatron-Core's LayerWise optimizer, which orthogonalises whole matrices (Muon; d98e8a64).

1. A bucket is `data_parallel_world_size` shards of one size, and no parameter crosses a border between them: a rank
   updates the parameters of its shard alone, whole.
2. Parameters fill buckets last one first. A full bucket takes in what fits beside its largest shard, as estimated by
   putting each parameter where least lies; a bucket is full at `bucket_size`, or where its largest parameter is no
   longer more than a tenth above an even share.
3. In a bucket the costliest parameters choose first, each the shard with the least work so far, over all buckets, among
   those that stay within 1.3 even shares; where there is none, the one that holds least. Ties go to the lowest shard.
4. A shared embedding is alone in shard 0 of a bucket of its own.
5. Megatron looks through all shards for every parameter. Here they are in heaps, and a shard that has no room for the
   smallest parameter to come is left out of them.

>>> params = [Param(f"p{i}", (16, 16)) for i in range(5)]
>>> layout = layer_wise(params, data_parallel_world_size=4)
>>> print(layout.bucket_indices, dict(layout.param_index_map)["p1"])
((0, 2048),) (1536, 1792, 0)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.param import (
    START,
    Param,
    bucket_end_divisor,
    checked_bucket_size,
    forward,
    up,
)
from shardmath.buffers.param_layout import PerBufferParamLayout, Placed, laid_out

__all__ = ["layer_wise"]

MOST_SHARDS = 1 << 20
"""Work is counted by shard, with or without parameters in it; more take gigabytes."""

FILLED = 0.9
"""Of the largest parameter's size times the shards: what a bucket holds before it may close."""

SPARE = 1.3
"""Even shares that a shard may hold where the work is balanced."""


def layer_wise(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    bucket_size: int | None = None,
    pad_for_high_nccl_busbw: bool = False,
) -> PerBufferParamLayout:
    """The buffer of Megatron-Core's LayerWiseDistributedOptimizer: all `params`, in forward order, managed or not.

    Raises ParamLayoutError for a parameter given twice, and for sizes below 1.
    """
    listed, size = forward(params), checked_bucket_size(bucket_size)
    end = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    shards = int(data_parallel_world_size)
    if shards > MOST_SHARDS:
        raise ParamLayoutError(f"data_parallel_world_size is {shards}; give at most {MOST_SHARDS}")
    divisor = math.lcm(START, end // shards)
    placed, buckets, unpadded, work = (
        list[tuple[str, Placed]](),
        list[tuple[int, int]](),
        list[int](),
        [0] * shards,
    )
    for chunk in _chunks(listed, size, shards, divisor):
        first = buckets[-1][1] if buckets else 0
        if chunk[0].shared_embedding:
            homes, shard = [chunk, *([] for _ in range(shards - 1))], up(chunk[0].numel, divisor)
        else:
            homes, held = _assigned(chunk, work)
            shard = up(max(held), divisor)
        for number, home in enumerate(homes):
            position = first + number * shard
            for param in home:
                position = up(position, START)
                placed.append((param.name, (position, position + param.numel, len(buckets))))
                position += param.numel
        buckets.append((first, first + shards * shard))
        unpadded.append(sum(param.numel for param in chunk))
    return laid_out(listed, placed, buckets, unpadded, shards, ranks=shards)


def _chunks(
    params: Sequence[Param], bucket_size: int | None, shards: int, divisor: int
) -> list[list[Param]]:
    """The parameters of each bucket, last one first."""
    chunks: list[list[Param]] = []
    loads, largest, total, most, open_ = [(0, s) for s in range(shards)], 0, 0, 0, False
    for param in reversed(params):
        n = param.numel
        if open_ and not param.shared_embedding and bucket_size is not None:
            full = total >= max(bucket_size, int(shards * largest * FILLED))
            open_ = not full or up(loads[0][0], START) + n <= up(most, divisor)
        if param.shared_embedding or not open_:
            chunks.append([])
            loads, largest, total, most = [(0, s) for s in range(shards)], 0, 0, 0
        chunks[-1].append(param)
        open_ = not param.shared_embedding
        least, shard = loads[0]
        heapq.heapreplace(loads, (up(least, START) + n, shard))
        largest, total, most = max(largest, n), total + n, max(most, up(least, START) + n)
    return chunks


def _cost(param: Param) -> int:
    """Multiplications of a Newton-Schulz step, but for a factor; of what is no matrix, its size."""
    if len(param.shape) != 2:
        return param.numel
    rows, columns = param.shape[0] * param.gtp_remat_size, param.shape[1]
    return max(rows, columns) * min(rows, columns) ** 2


def _assigned(chunk: Sequence[Param], work: list[int]) -> tuple[list[list[Param]], list[int]]:
    """The parameters of each shard, and how far it is filled; `work` grows by what is assigned."""
    homes, held = [list[Param]() for _ in work], [0] * len(work)
    most = math.floor(sum(param.numel for param in chunk) / len(work) * SPARE)
    idlest = [(done, shard) for shard, done in enumerate(work)]
    emptiest = [(0, shard) for shard in range(len(work))]
    heapq.heapify(idlest)
    ordered = sorted(((_cost(param), param) for param in chunk), key=itemgetter(0), reverse=True)
    for (cost, param), least in zip(
        ordered, _smallest_from([param.numel for _, param in ordered]), strict=True
    ):
        full = _without_room(idlest, held, most - param.numel)
        if idlest:
            done, shard = idlest[0]
            heapq.heapreplace(idlest, (done + cost, shard))
        else:
            shard = _emptiest(
                emptiest, held
            )  # which has no room from now on, so that its entry does not matter
        for entry in full:
            if up(held[entry[1]], START) + least <= most:
                heapq.heappush(idlest, entry)
        homes[shard].append(param)
        held[shard] = up(held[shard], START) + param.numel
        work[shard] += cost
    return homes, held


def _smallest_from(sizes: Sequence[int]) -> list[int]:
    """The smallest of each size and all that follow."""
    return list(itertools.accumulate(reversed(sizes), min))[::-1]


def _without_room(
    heap: list[tuple[int, int]], held: Sequence[int], room: int
) -> list[tuple[int, int]]:
    """What stands on top of the heap and holds more than `room`, taken off."""
    out = []
    while heap and up(held[heap[0][1]], START) > room:
        out.append(heapq.heappop(heap))
    return out


def _emptiest(heap: list[tuple[int, int]], held: Sequence[int]) -> int:
    """The shard that holds least; entries that have become too low are put back where they belong."""
    while heap[0][0] != held[heap[0][1]]:
        heapq.heapreplace(heap, (held[heap[0][1]], heap[0][1]))
    return heap[0][1]
