"""Shares: the share of each rank of a data-parallel group in a buffer, and in each parameter in it.

1. Rank r of n has the r-th n-th of every bucket; its shares, bucket after bucket, are one flat array.
2. A parameter that lies across borders between shards is cut there. Parameters that are cut in the same way share one
   tuple of cuts.

>>> from shardmath.buffers.megatron_ddp import distributed_optimizer
>>> from shardmath.buffers.param import Param
>>> buffer = distributed_optimizer([Param("w", (20, 10))], data_parallel_world_size=2)
>>> shard_ranges(buffer, 2, 1), dict(list_shares(buffer, 2, {}))["w"].cuts
(((128, 256),), (ShardRange(shard=0, lo=0, hi=128), ShardRange(shard=1, lo=128, hi=200)))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.param import read_positive
from shardmath.buffers.param_layout import PerBufferParamLayout, check_even
from shardmath.layouts.algebra.mesh import Mesh

__all__ = [
    "SHARD",
    "Axis",
    "ShardRange",
    "Cuts",
    "Shares",
    "axes_of",
    "check_shards",
    "list_shares",
    "shard_numel",
    "shard_ranges",
    "state_numel",
]

SHARD = "shard"
"""The str "shard": the default name, in a Store, of the flat array in which each rank keeps its part of a sharded
buffer."""

Axis: TypeAlias = str | tuple[str, ...] | None
"""The type of `axis=`: the name of the mesh axis, or a tuple of names, along which buffers are sharded; None is all
axes of the mesh."""


def shard_ranges(
    buffer_layout: PerBufferParamLayout, shards: int, shard: int
) -> tuple[tuple[int, int], ...]:
    """Return a tuple of (start, end), one per bucket: the positions in the flat buffer that shard number `shard` of
    `shards` holds.

    One shard is all of the buffer. Raises ParamLayoutError for any other number than the buffer is laid out for, and
    if a bucket is not divided evenly.
    """
    count = check_shards(buffer_layout, shards)
    number = as_integer(shard, "the shard", ParamLayoutError)
    if not 0 <= number < count:
        what = f"shard {number} is not one of the {count} shards of the buffer"
        raise ParamLayoutError(f"{what}; pass a number from 0 to {count - 1}")
    ranges = []
    for start, end in buffer_layout.bucket_indices:
        size = (end - start) // count
        first = start + number * size
        ranges.append((first, first + size))
    return tuple(ranges)


def shard_numel(buffer_layout: PerBufferParamLayout, shards: int) -> int:
    """The number of elements, padding included, of the flat buffer on each of the `shards` ranks that share it. Raises
    ParamLayoutError if the buffer cannot be divided so."""
    count = check_shards(buffer_layout, shards)
    return buffer_layout.numel // count


def state_numel(buffer_layout: PerBufferParamLayout, mesh: Mesh, *, axis: Axis = None) -> int:
    """Return the number of elements, padding included, in each rank's flat array of one optimizer state; the ranks of
    `mesh` along `axis` share the buffer.

    Raises ParamLayoutError as `state_layouts` does.
    """
    sizes = [mesh.axis_size(name) for name in axes_of(mesh, axis)]
    return shard_numel(buffer_layout, math.prod(sizes))


def check_shards(buffer: object, given: int) -> int:
    """Return `given` as an int if this number of ranks can share `buffer`, or else raise ParamLayoutError. A number
    above 1 must divide the size of each bucket, and equal the number of ranks that `buffer` records, if any."""
    if not isinstance(buffer, PerBufferParamLayout):
        what = f"{type(buffer).__name__} is not a PerBufferParamLayout"
        raise ParamLayoutError(f"{what}; call this for each value of a FullParamLayout")
    shards = read_positive(given, "the number of shards")
    for made_for in (buffer.data_parallel_world_size, buffer.num_optimizer_shards):
        if made_for == 1 and shards > 1:
            what = f"the buffer is laid out whole for every rank, and {shards} ranks share it"
            fix = f"pass axis=(), or lay it out with data_parallel_world_size={shards}"
            raise ParamLayoutError(f"{what}; {fix}")
        if made_for not in (None, shards) and shards > 1:
            what = f"the buffer is laid out for {made_for} ranks, {shards} share it"
            raise ParamLayoutError(f"{what}; lay it out with data_parallel_world_size={shards}")
    fix = f"lay the buffer out for data_parallel_world_size={shards}"
    check_even(buffer.bucket_indices, shards, fix)
    return shards


class ShardRange(NamedTuple):
    """Elements lo..hi-1 of a parameter, which lie in the shard number `shard` of its buffer."""

    shard: int
    lo: int
    hi: int


class Shares(NamedTuple):
    """The ranges (`cuts`) of a parameter on shards of its buffer. In its shard's flat array the first one begins at
    position `at`, and each later one at `later`, where the bucket begins.
    """

    cuts: tuple[ShardRange, ...]
    at: int
    later: int

    def place(self, cut: ShardRange) -> int:
        """Return the position at which `cut` begins in the flat array of its shard."""
        return self.later if cut.lo else self.at


def axes_of(mesh: Mesh, axis: Axis) -> tuple[str, ...]:
    """The names of the mesh axes that `axis` (a name, a tuple of names, or None for all) stands for.

    Raises ParamLayoutError if `mesh` is not a Mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ParamLayoutError(f"mesh is {mesh!r}; give a shardmath.Mesh, for example Mesh(dp=4)")
    if axis is None:
        return tuple(mesh.shape)
    if isinstance(axis, str):
        return (axis,)
    return listed(axis, "axes", ParamLayoutError)


Cuts: TypeAlias = dict[tuple[int, ...], tuple[ShardRange, ...]]
"""Cuts by the numbers that they depend on; most parameters of a model are cut in the same way."""


def list_shares(
    buffer: PerBufferParamLayout, shards: int, known: Cuts
) -> Iterator[tuple[str, Shares]]:
    """Yield (name, Shares) for each parameter in `buffer`: how its elements are divided among `shards` shards. `known`
    is a cache of the ranges that this function computes, for its later calls; pass an empty dict at first."""
    check_shards(buffer, shards)
    for name, (start, end, number) in buffer.placed:
        first, stop = buffer.bucket_indices[number]
        # A shard has `size` elements of the bucket, after `before` elements of the buckets before.
        size = (stop - first) // shards
        before = first // shards
        shard, offset = divmod(start - first, size) if size else (0, 0)
        numel = end - start
        # The elements that fit in its first shard; -1 if all do, as its cuts then do not depend on the offset there.
        room = size - offset if offset + numel > size else -1
        key = shard, numel, room, size
        if key not in known:
            known[key] = tuple(_list_cuts(start - first, numel, size))
        yield name, Shares(known[key], before + offset, before)


def _list_cuts(start: int, numel: int, size: int) -> Iterator[ShardRange]:
    """Elements start..start+numel-1 of a bucket, cut at the borders between shards of `size`."""
    if not numel:
        return
    end = start + numel
    for shard in range(start // size, (end - 1) // size + 1):
        lo = max(start, shard * size)
        hi = min(end, (shard + 1) * size)
        yield ShardRange(shard, lo - start, hi - start)
