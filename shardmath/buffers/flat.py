"""Flat parameters outside Megatron-Core's DDP: PyTorch's FSDP1, DeepSpeed's ZeRO stages 1 and 2, Megatron-FSDP.

1. FSDP1 (torch 2.13 `FlatParamHandle`) and ZeRO (DeepSpeed 0.19 `stage_1_and_2.py`) lay one buffer of one bucket, in
   forward order, padded so that ranks get equal shares.
2. Megatron-FSDP (megatron-fsdp 0.6, `build_data_parallel_buffer_index`) cuts shards at whole rows where it can: with a
   chunk of `factor` elements, the longest row or a common multiple, parameters start at multiples of it; the odd ends
   of two share a chunk, and parameters smaller than a chunk fill the gaps, first come first served: Megatron sorts them
   by size and drops the result.

>>> flat_parameter([Param("a", (3,), "float32"), Param("b", (5,), "float32")], data_parallel_world_size=4).placed
(('a', (0, 3, 0)), ('b', (4, 9, 0)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardmath.base import dtypes
from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.param import Param, checked_bucket_size, flag, forward, positive, up
from shardmath.buffers.param_layout import PerBufferParamLayout, Placed, laid_out

__all__ = ["flat_parameter", "megatron_fsdp", "zero"]

ALIGNED_BYTES = 16
"""Between which FSDP1 starts parameters with `use_orig_params` (torch 2.13 `_get_aligned_numel`)."""

ZERO_ALIGNMENT = 2
"""Elements that a rank's share is a multiple of (DeepSpeed `nccl_start_alignment_factor`)."""


def flat_parameter(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    use_orig_params: bool = True,
    forward_dtype: object = None,
) -> PerBufferParamLayout:
    """The FlatParameter of one FSDP1 unit; `params` in the order of its modules, all of one dtype.

    With `use_orig_params` parameters start at multiples of 16 bytes, in the dtype that they have in the forward:
    MixedPrecision's `param_dtype`, their own if not given. Raises ParamLayoutError for several dtypes and for scalars,
    which FSDP1 refuses, for a parameter given twice, and for sizes below 1.
    """
    listed, ranks = forward(params), positive(data_parallel_world_size, "data_parallel_world_size")
    kinds = sorted({param.dtype for param in listed})
    if len(kinds) > 1:
        raise ParamLayoutError(
            f"a FlatParameter has one dtype, these parameters have {', '.join(kinds)}; group them"
        )
    scalar = next((param.name for param in listed if not param.shape), None)
    if scalar is not None:
        raise ParamLayoutError(
            f"parameter {scalar!r} is a scalar, which FSDP1 cannot flatten; give it one dimension"
        )
    size = dtypes.itemsize(next(iter(kinds), "uint8") if forward_dtype is None else forward_dtype)
    start = ALIGNED_BYTES // size if flag(use_orig_params, "use_orig_params") else 1
    return _one_bucket(listed, listed, start=start, end=ranks, ranks=ranks)


def zero(
    params: Iterable[Param], *, data_parallel_world_size: int, round_robin: bool = False
) -> PerBufferParamLayout:
    """The flat group of DeepSpeed's ZeRO stages 1 and 2: one param group of one dtype, in the optimizer's order.

    With `round_robin` (`round_robin_gradients`) parameters i, i + n, i + 2n ... of n ranks come first for each i.
    Raises ParamLayoutError for a parameter given twice, and for sizes below 1.
    """
    listed, ranks = forward(params), positive(data_parallel_world_size, "data_parallel_world_size")
    starts = range(min(ranks, len(listed))) if flag(round_robin, "round_robin") else ()
    order = [param for i in starts for param in listed[i::ranks]] or listed
    return _one_bucket(listed, order, start=1, end=ranks * ZERO_ALIGNMENT, ranks=ranks)


def _one_bucket(
    params: Sequence[Param], order: Sequence[Param], *, start: int, end: int, ranks: int
) -> PerBufferParamLayout:
    placed, position = list[tuple[str, Placed]](), 0
    for param in order:
        position = up(position, start)
        placed.append((param.name, (position, position + param.numel, 0)))
        position += param.numel
    bucket = [(0, up(position, end))] if placed else []
    return laid_out(params, placed, bucket, [position] if placed else [], ranks=ranks)


def megatron_fsdp(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    bucket_size: int | None = None,
    chunk_size_factor: int | None = None,
    sharded: bool = True,
) -> PerBufferParamLayout:
    """The buffers of Megatron-FSDP for parameters of one kind outside its units, or of one unit (`bucket_size=None`).

    Each bucket is a buffer of its own there; here they follow one another. Without a `chunk_size_factor` parameters are
    sorted by the length of their rows, longest first, and the factor of each bucket is found as Megatron finds it; with
    one, they stay in forward order. `sharded=False` is the strategy "no_shard", without padding at the end.

    Raises ParamLayoutError for a parameter given twice or without elements, and for sizes below 1.
    """
    listed, ranks = forward(params), positive(data_parallel_world_size, "data_parallel_world_size")
    empty = next((param.name for param in listed if not param.numel), None)
    if empty is not None:
        raise ParamLayoutError(
            f"parameter {empty!r} has no elements, which Megatron-FSDP cannot chunk; leave it out"
        )
    flag(sharded, "sharded")
    given = None if chunk_size_factor is None else positive(chunk_size_factor, "chunk_size_factor")
    placed, buckets, unpadded, first = (
        list[tuple[str, Placed]](),
        list[tuple[int, int]](),
        list[int](),
        0,
    )
    for group in _buckets(listed, checked_bucket_size(bucket_size), sharded):
        group = group if given else sorted(group, key=_row, reverse=True)
        factor = given or _factor(group)
        starts, size = _chunked(group, factor)
        end = first + (up(size, ranks * factor) if sharded else size)
        placed += [(p.name, (first + at, first + at + p.numel, len(buckets))) for p, at in starts]
        buckets.append((first, end))
        unpadded.append(size)
        first = end
    return laid_out(listed, placed, buckets, unpadded, ranks=ranks if sharded else 1)


def _buckets(params: Sequence[Param], bucket_size: int | None, sharded: bool) -> list[list[Param]]:
    """The parameters of each bucket, in forward order; where they are sharded, shared embeddings are alone."""
    buckets: list[list[Param]] = []
    filled = 0
    for param in params:
        alone = param.shared_embedding and sharded
        if not filled or alone:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += param.numel
        if alone or (bucket_size is not None and filled >= bucket_size):
            filled = 0
    return buckets


def _row(param: Param) -> int:
    return math.prod(param.shape[1:])


def _factor(params: Sequence[Param]) -> int:
    """The chunk of parameters sorted by their rows: the longest, multiplied where another one's does not fit."""
    factor = _row(params[0])
    for param in params:
        if (
            param.numel >= factor
            and (factor % _row(param) or param.numel % factor)
            and _row(param) != factor
        ):
            factor = math.lcm(factor, _row(param))
    return factor


def _chunked(params: Sequence[Param], factor: int) -> tuple[list[tuple[Param, int]], int]:
    """Where each parameter starts, in the order in which they are placed, and where the last one ends."""
    small = [param for param in params if param.numel < factor]
    large = [param for param in params if param.numel >= factor]
    pieces = _Leftmost([param.numel for param in small])
    odds = _Leftmost([param.numel % factor or factor for param in large])
    out: list[tuple[Param, int]] = []
    position, done = 0, set[int]()
    for i, param in enumerate(large):
        if i in done:
            continue
        out.append((param, position))
        odd, gap = param.numel % factor, position + param.numel
        position += up(param.numel, factor)
        if not odd:
            continue
        room = position
        other = odds.find(i + 1, factor - odd)
        if other is not None:
            done.add(other)
            odds.remove(other)
            room -= large[other].numel % factor
            out.append((large[other], room))
            position += large[other].numel // factor * factor
        piece = pieces.find(0, room - gap)
        while piece is not None:
            pieces.remove(piece)
            out.append((small[piece], gap))
            gap += small[piece].numel
            piece = pieces.find(piece + 1, room - gap)
    for piece in pieces.left():
        out.append((small[piece], position))
        position += small[piece].numel
    return out, position


class _Leftmost:
    """Numbers, of which the leftmost that is small enough is found in logarithmic time: a tree of minima."""

    GONE = 1 << 63

    def __init__(self, numbers: Sequence[int]) -> None:
        self.count = len(numbers)
        self.size = 1 << max(self.count - 1, 0).bit_length()
        self.tree = [self.GONE] * self.size + [*numbers] + [self.GONE] * (self.size - self.count)
        for node in range(self.size - 1, 0, -1):
            self.tree[node] = min(self.tree[2 * node], self.tree[2 * node + 1])

    def find(self, start: int, most: int) -> int | None:
        """The first from `start` on that is at most `most`, or None."""
        node = self.size + start
        while start < self.size and self.tree[node] > most:
            while node & 1:
                node >>= 1
            if not node:
                return None
            node += 1
        if start >= self.size:
            return None
        while node < self.size:
            node = 2 * node if self.tree[2 * node] <= most else 2 * node + 1
        return node - self.size

    def remove(self, at: int) -> None:
        node = self.size + at
        self.tree[node] = self.GONE
        while node > 1:
            node >>= 1
            self.tree[node] = min(self.tree[2 * node], self.tree[2 * node + 1])

    def left(self) -> list[int]:
        """Those that have not been removed."""
        return [i for i in range(self.count) if self.tree[self.size + i] != self.GONE]
