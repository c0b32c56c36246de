"""The buffer of Megatron-Core's LayerWise optimizer, which orthogonalises whole matrices (Muon; d98e8a64).

1. A bucket is `data_parallel_world_size` shards of one size, and no parameter crosses a border between them: a rank
   updates only the parameters of its shard, whole.
2. Parameters fill buckets last one first. A bucket is full at `bucket_size`, unless its largest parameter is more than
   a ninth above an even share. A full bucket still takes parameters that do not make its largest shard larger, as
   estimated by giving each parameter to the emptiest shard.
3. In a bucket the costliest parameters come first. Each goes to the shard with the least work so far, over all buckets,
   among shards that stay within 1.3 even shares; if none does, to the emptiest. Ties go to the lowest shard.
4. A shared embedding is alone, in shard 0 of a separate bucket.
5. Megatron looks through all shards for every parameter. Here they are in heaps, without the shards that have no room
   for the smallest parameter to come.

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
from typing import TypeAlias

from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.draft import Draft
from shardmath.buffers.param import (
    START,
    Param,
    bucket_end_divisor,
    read_bucket_size,
    read_params,
    round_up,
)
from shardmath.buffers.param_layout import PerBufferParamLayout

__all__ = ["layer_wise"]

MOST_SHARDS = 1 << 20
"""Work is counted by shard, with or without parameters in it; more take gigabytes."""

FILLED = 0.9
"""A bucket may close at this share of its largest parameter's size times the number of shards."""

SPARE = 1.3
"""The number of even shares that a shard may hold as long as another shard has room."""


def layer_wise(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    bucket_size: int | None = None,
    pad_for_high_nccl_busbw: bool = False,
) -> PerBufferParamLayout:
    """The layout of the flat buffer of Megatron-Core's LayerWiseDistributedOptimizer; `params` are in forward order.

    Raises ParamLayoutError for a parameter given twice, and for sizes below 1.
    """
    listed = read_params(params)
    size = read_bucket_size(bucket_size)
    end = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    shards = int(data_parallel_world_size)
    if shards > MOST_SHARDS:
        raise ParamLayoutError(f"data_parallel_world_size is {shards}; give at most {MOST_SHARDS}")
    # Equal shards of this divisor make buckets that end at a multiple of `end`.
    divisor = math.lcm(START, end // shards)
    draft = Draft()
    work_by_shard = [0] * shards
    for bucket in _fill_buckets(listed, size, shards, divisor):
        params_by_shard, largest_size = _assign_shards(bucket, work_by_shard)
        shard_size = round_up(largest_size, divisor)
        first = draft.first
        for shard, shard_params in enumerate(params_by_shard):
            position = first + shard * shard_size
            for param in shard_params:
                start = round_up(position, START)
                position = draft.place(param.name, start, param.numel)
        stop = first + shards * shard_size
        numel = sum(param.numel for param in bucket)
        draft.close(stop, unpadded=numel)
    return draft.finish(listed, ranks=shards, shards=shards)


class _BucketLoad:
    """How full the shards of a bucket are if each parameter goes to the emptiest shard."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.held = [0] * shards  # a heap
        self.fullest = 0
        self.largest = 0
        self.total = 0

    def add(self, numel: int) -> None:
        """Add a parameter of `numel` elements to the emptiest shard of the bucket."""
        filled = self._hold(numel)
        heapq.heapreplace(self.held, filled)
        self.fullest = max(self.fullest, filled)
        self.largest = max(self.largest, numel)
        self.total += numel

    def has_room(self, numel: int, bucket_size: int, divisor: int) -> bool:
        """Return whether a parameter of `numel` elements can go in the bucket. Any can until the bucket has
        `bucket_size` elements; later, any that does not increase the size of the ranks' equal shares, which is rounded
        up to a multiple of `divisor`.

        A bucket with less than 0.9 times its largest parameter's elements for each rank also takes any. The size of the
        shares is an estimate: each parameter goes to the emptiest one.
        """
        enough = int(self.shards * self.largest * FILLED)
        if self.total < max(bucket_size, enough):
            return True
        filled = self._hold(numel)
        return filled <= round_up(self.fullest, divisor)

    def _hold(self, numel: int) -> int:
        """The elements of the emptiest shard with the parameter added."""
        return round_up(self.held[0], START) + numel


def _fill_buckets(
    params: Sequence[Param], bucket_size: int | None, shards: int, divisor: int
) -> list[list[Param]]:
    """The parameters of each bucket, last one first; a shared embedding has a separate bucket."""
    buckets: list[list[Param]] = []
    load: _BucketLoad | None = None
    for param in reversed(params):
        is_full = False
        if load is not None and bucket_size is not None:
            is_full = not load.has_room(param.numel, bucket_size, divisor)
        if load is None or is_full or param.shared_embedding:
            load = _BucketLoad(shards)
            buckets.append([])
        buckets[-1].append(param)
        load.add(param.numel)
        if param.shared_embedding:
            load = None
    return buckets


def _assign_shards(bucket: Sequence[Param], work: list[int]) -> tuple[list[list[Param]], int]:
    """The parameters of each shard, and the size of the fullest; adds to the `work` of each shard.

    A shared embedding is in shard 0, and counts as no work.
    """
    first = bucket[0]
    if first.shared_embedding:
        return [list(bucket)], first.numel
    ordered = sorted(bucket, key=_estimate_cost, reverse=True)
    sizes = [param.numel for param in ordered]
    # For each parameter the smallest size from it on.
    backwards = itertools.accumulate(reversed(sizes), min)
    smallest = reversed(list(backwards))
    even = sum(sizes) / len(work)
    most = math.floor(even * SPARE)
    shards = _Shards(work, most)
    for param, least in zip(ordered, smallest, strict=True):
        shards.add(param, least)
    return shards.homes, max(shards.held)


def _estimate_cost(param: Param) -> int:
    """Multiplications of a Newton-Schulz step, up to a factor; the size of a parameter that is not a matrix."""
    if len(param.shape) != 2:
        return param.numel
    # The rows of all ranks that hold parts of the matrix.
    rows = param.shape[0] * param.gtp_remat_size
    columns = param.shape[1]
    return max(rows, columns) * min(rows, columns) ** 2


_Entry: TypeAlias = tuple[int, int]
"""An entry of a heap: the number that orders a shard, and the shard."""


class _Shards:
    """The shards of a bucket while parameters, the costliest first, are assigned to them."""

    def __init__(self, work: list[int], most: int) -> None:
        # By shard: its work in all buckets so far, its parameters in this one, and where these end. `most` is the most
        # elements in a shard as long as another one has room.
        self.work = work
        self.most = most
        shards = range(len(work))
        self.homes: list[list[Param]] = [[] for _ in shards]
        self.held = [0 for _ in shards]
        idlest = zip(work, shards, strict=True)
        emptiest = zip(self.held, shards, strict=True)
        self._idlest: list[_Entry] = list(idlest)
        # Equal entries, in the order of shards, are a heap already.
        self._emptiest: list[_Entry] = list(emptiest)
        heapq.heapify(self._idlest)

    def add(self, param: Param, least: int) -> None:
        """Assign `param` to the shard with the fewest optimizer multiplications (an estimate) among shards with enough
        elements free, or if there are none, to the shard with the fewest elements. `least`, the size of the smallest
        parameter not yet assigned, saves time: shards with fewer elements free are no longer compared.

        Shards without room for `least` elements are no longer compared by work.
        """
        cost = _estimate_cost(param)
        without_room = self._take_without_room(self.most - param.numel)
        if self._idlest:
            shard_work, shard = self._idlest[0]
            heapq.heapreplace(self._idlest, (shard_work + cost, shard))
        else:
            # The shard has no room from now on, so its entry in the heap of idlest shards is not needed.
            shard = self._find_emptiest()
        # Back onto the heap: those without room for this parameter, but for a smaller one.
        for entry in without_room:
            _, other = entry
            start = round_up(self.held[other], START)
            if start + least <= self.most:
                heapq.heappush(self._idlest, entry)
        self.homes[shard].append(param)
        start = round_up(self.held[shard], START)
        self.held[shard] = start + param.numel
        self.work[shard] += cost

    def _take_without_room(self, room: int) -> list[_Entry]:
        """Take the idlest shards that hold more than `room` off the heap, up to the first that does not."""
        full_entries = []
        while self._idlest:
            _, shard = self._idlest[0]
            if round_up(self.held[shard], START) <= room:
                break
            full_entries.append(heapq.heappop(self._idlest))
        return full_entries

    def _find_emptiest(self) -> int:
        """The shard that holds least; outdated entries, which are too low, are put back at their values."""
        while True:
            recorded, shard = self._emptiest[0]
            if recorded == self.held[shard]:
                return shard
            heapq.heapreplace(self._emptiest, (self.held[shard], shard))
