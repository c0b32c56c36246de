"""Flat parameters outside Megatron-Core's DDP: PyTorch's FSDP1, DeepSpeed's ZeRO stages 1 and 2, Megatron-FSDP.

1. FSDP1 (torch 2.13 `FlatParamHandle`) and ZeRO (DeepSpeed 0.19 `stage_1_and_2.py`) lay out one buffer of one bucket,
   in forward order, padded so that ranks get equal shares.
2. Megatron-FSDP (megatron-fsdp 0.6, `build_data_parallel_buffer_index`) cuts shards at whole rows if it can.
   Parameters start at multiples of a chunk of `factor` elements, the longest row or a common multiple. The odd ends
   of two parameters may share a chunk, and parameters smaller than a chunk fill the gaps in forward order: Megatron
   sorts them by size, and discards the result.

>>> flat_parameter([Param("a", (3,), "float32"), Param("b", (5,), "float32")], data_parallel_world_size=4).placed
(('a', (0, 3, 0)), ('b', (4, 9, 0)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardmath.base import dtypes
from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.draft import Draft
from shardmath.buffers.param import (
    Param,
    read_bucket_size,
    read_flag,
    read_params,
    read_positive,
    round_up,
)
from shardmath.buffers.param_layout import PerBufferParamLayout

__all__ = ["flat_parameter", "megatron_fsdp", "zero"]

ALIGNED_BYTES = 16
"""FSDP1 starts parameters at multiples of these with `use_orig_params` (torch 2.13 `_get_aligned_numel`)."""

ZERO_ALIGNMENT = 2
"""A rank's share is a multiple of this many elements (DeepSpeed `nccl_start_alignment_factor`)."""


def flat_parameter(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    use_orig_params: bool = True,
    forward_dtype: object = None,
) -> PerBufferParamLayout:
    """Return the layout of the FlatParameter of an FSDP1 unit that has `params`, which are of one dtype, in module
    order. With `use_orig_params`, each parameter begins at a multiple of n elements, where n elements of
    `forward_dtype` (the dtype in the forward pass) take 16 bytes.

    `forward_dtype` is the parameters' dtype in the forward: MixedPrecision's `param_dtype`, or their own if not given.
    Raises ParamLayoutError for several dtypes and for scalars, as FSDP1 does, for a parameter given twice, and for
    sizes below 1.
    """
    listed = read_params(params)
    ranks = read_positive(data_parallel_world_size, "data_parallel_world_size")
    kinds = sorted({param.dtype for param in listed})
    if len(kinds) > 1:
        raise ParamLayoutError(
            f"a FlatParameter has one dtype, these parameters have {', '.join(kinds)}; "
            f"call flat_parameter once per dtype"
        )
    scalars = [param.name for param in listed if not param.shape]
    if scalars:
        what = f"parameter {scalars[0]!r} is a scalar, which FSDP1 cannot flatten"
        raise ParamLayoutError(f"{what}; give it the shape (1,)")
    if forward_dtype is None:
        forward_dtype = kinds[0] if kinds else "uint8"
    size = dtypes.itemsize(forward_dtype)
    start = ALIGNED_BYTES // size if read_flag(use_orig_params, "use_orig_params") else 1
    return _lay_one_bucket(listed, order=listed, start=start, divisor=ranks, ranks=ranks)


def zero(
    params: Iterable[Param], *, data_parallel_world_size: int, round_robin: bool = False
) -> PerBufferParamLayout:
    """Return the layout of the flat buffer in which DeepSpeed's ZeRO stage 1 or 2 keeps a parameter group: `params`, of
    one dtype, in the optimizer's order. `round_robin` (DeepSpeed's `round_robin_gradients`) changes the order of
    `params` in the buffer.

    With `round_robin`, parameters i, i + n, i + 2n ... of n ranks come first for each i.
    Raises ParamLayoutError for a parameter given twice, and for sizes below 1.
    """
    listed = read_params(params)
    ranks = read_positive(data_parallel_world_size, "data_parallel_world_size")
    order: list[Param] = list(listed)
    if read_flag(round_robin, "round_robin"):
        order = []
        for first in range(min(ranks, len(listed))):
            order += listed[first::ranks]
    divisor = ranks * ZERO_ALIGNMENT
    return _lay_one_bucket(listed, order, start=1, divisor=divisor, ranks=ranks)


def _lay_one_bucket(
    params: Sequence[Param], order: Sequence[Param], *, start: int, divisor: int, ranks: int
) -> PerBufferParamLayout:
    """One bucket of the parameters in this order, each at a multiple of `start`; it ends at a multiple of `divisor`."""
    draft = Draft()
    position = 0
    for param in order:
        position = draft.place(param.name, round_up(position, start), param.numel)
    if draft.is_filled:
        draft.close(round_up(position, divisor), unpadded=position)
    return draft.finish(params, ranks=ranks)


def megatron_fsdp(
    params: Iterable[Param],
    *,
    data_parallel_world_size: int,
    bucket_size: int | None = None,
    chunk_size_factor: int | None = None,
    sharded: bool = True,
) -> PerBufferParamLayout:
    """Return one layout for all buckets in which Megatron-FSDP keeps `params`; ranks divide each bucket if `sharded`. A
    bucket ends once it has `bucket_size` elements; parameters of at least `chunk_size_factor` elements begin (or, to
    fill a gap, end) at a multiple of this number.

    Each bucket is a separate flat buffer, which follows the one before in the layout; multiples of the factor count
    from its start. Large parameters have at least as many elements as the factor. A divided bucket is padded at the
    end. With `bucket_size` None, buckets have no limit.

    `params` are the parameters of one FSDP unit, or all outside units; for a unit, leave `bucket_size` at None. Without
    a `chunk_size_factor` parameters are sorted by the length of their rows, longest first, and the factor of each
    bucket is found as Megatron finds it; with one, they stay in forward order. `sharded=False` is the strategy
    "no_shard", without padding at the end.

    Raises ParamLayoutError for a parameter given twice or without elements, and for sizes below 1.
    """
    listed = read_params(params)
    ranks = read_positive(data_parallel_world_size, "data_parallel_world_size")
    empty = [param.name for param in listed if not param.numel]
    if empty:
        what = f"parameter {empty[0]!r} has no elements, which Megatron-FSDP cannot chunk"
        raise ParamLayoutError(f"{what}; leave it out")
    read_flag(sharded, "sharded")
    if chunk_size_factor is not None:
        chunk_size_factor = read_positive(chunk_size_factor, "chunk_size_factor")
    draft = Draft()
    for group in _fill_buckets(listed, read_bucket_size(bucket_size), sharded):
        _lay_chunks(draft, group, chunk_size_factor, ranks if sharded else None)
    return draft.finish(listed, ranks=ranks if sharded else 1)


def _lay_chunks(
    draft: Draft, params: Sequence[Param], given_factor: int | None, ranks: int | None
) -> None:
    """One bucket of these parameters in chunks of the given factor, padded for the ranks that share it."""
    # As in Megatron: only a factor that is given leaves parameters in forward order.
    if given_factor is None:
        params = sorted(params, key=_count_row, reverse=True)
    factor = given_factor or _find_factor(params)
    chunks = _Chunks(params, factor)
    first = draft.first
    for param, start in chunks.starts:
        draft.place(param.name, first + start, param.numel)
    size = chunks.end
    if ranks is not None:
        size = round_up(size, ranks * factor)
    draft.close(first + size, unpadded=chunks.end)


def _fill_buckets(
    params: Sequence[Param], bucket_size: int | None, sharded: bool
) -> list[list[Param]]:
    """The parameters of each bucket, in forward order; if sharded, a shared embedding has a separate bucket."""
    buckets: list[list[Param]] = []
    # Elements in the last bucket; 0 if the next parameter begins a new one.
    filled = 0
    for param in params:
        is_separate = param.shared_embedding and sharded
        if not filled or is_separate:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += param.numel
        if is_separate or (bucket_size is not None and filled >= bucket_size):
            filled = 0
    return buckets


def _count_row(param: Param) -> int:
    """Elements of a row, a part of a parameter that shards do not cut."""
    return math.prod(param.shape[1:])


def _find_factor(params: Sequence[Param]) -> int:
    """The chunk of parameters sorted by row: the longest row, multiplied until rows of large parameters fit."""
    factor = _count_row(params[0])
    for param in params:
        row = _count_row(param)
        is_large = param.numel >= factor and row != factor
        # A large parameter fits if a chunk is whole rows of it, and the parameter is whole chunks.
        if is_large and (factor % row or param.numel % factor):
            factor = math.lcm(factor, row)
    return factor


class _Chunks:
    """Parameters in chunks of `factor` elements: where each starts, in order of placing, and the end of the last.

    A parameter's odd end are the elements beyond its whole chunks.
    """

    def __init__(self, params: Sequence[Param], factor: int) -> None:
        self.factor = factor
        self.starts: list[tuple[Param, int]] = []
        self.end = 0
        self._small = [param for param in params if param.numel < factor]
        self._large = [param for param in params if param.numel >= factor]
        self._paired: set[int] = set()
        small_sizes = [param.numel for param in self._small]
        self._pieces = _LeftmostFit(small_sizes)
        # A parameter without an odd end counts as a full chunk, which fits next to no other end.
        odds = [param.numel % factor or factor for param in self._large]
        self._odds = _LeftmostFit(odds)
        self._place()

    def _place(self) -> None:
        """Place large parameters in order, and then the small ones that fit no gap."""
        for number in range(len(self._large)):
            if number not in self._paired:
                self._place_large(number)
        for number in self._pieces.list_left():
            self._place_small(number, self.end)
            self.end += self._small[number].numel

    def _place_large(self, number: int) -> None:
        """Place the parameter at the next chunk, and others in the gap that its odd end leaves in the last chunk."""
        param = self._large[number]
        self.starts.append((param, self.end))
        gap_start = self.end + param.numel
        self.end += round_up(param.numel, self.factor)
        if gap_start < self.end:
            # The gap ends where the odd end of a later parameter begins, if one fits.
            gap_end = self._pair_odd(number + 1, self.end - gap_start)
            self._fill_gap(gap_start, gap_end)

    def _pair_odd(self, first: int, room: int) -> int:
        """Place the first later parameter whose odd end fits in `room`, that end first; return where the gap ends."""
        gap_end = self.end
        number = self._odds.find(first, room)
        if number is None:
            return gap_end
        self._odds.remove(number)
        self._paired.add(number)
        param = self._large[number]
        odd = param.numel % self.factor
        self.starts.append((param, gap_end - odd))
        self.end += param.numel - odd
        return gap_end - odd

    def _fill_gap(self, start: int, end: int) -> None:
        """Place small parameters in the gap, in forward order."""
        number = self._pieces.find(0, end - start)
        while number is not None:
            self._pieces.remove(number)
            self._place_small(number, start)
            start += self._small[number].numel
            number = self._pieces.find(number + 1, end - start)

    def _place_small(self, number: int, start: int) -> None:
        self.starts.append((self._small[number], start))


class _LeftmostFit:
    """Numbers, of which the leftmost that is small enough is found in logarithmic time: a tree of minima.

    Node n has the children 2 n and 2 n + 1, and the numbers are the leaves from `size` on.
    """

    GONE = 1 << 63
    """In place of a removed number, and of none: more than any number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.count = len(numbers)
        last = max(self.count - 1, 0)
        self.size = 1 << last.bit_length()
        padding = [self.GONE] * (self.size - self.count)
        inner = [self.GONE] * self.size
        self.tree = [*inner, *numbers, *padding]
        for node in reversed(range(1, self.size)):
            self._update(node)

    def _update(self, node: int) -> None:
        self.tree[node] = min(self.tree[2 * node], self.tree[2 * node + 1])

    def find(self, start: int, most: int) -> int | None:
        """Return the lowest index, from `start` on, of a number that is at most `most`, or None. The numbers are those
        with which this object was made, except the ones that calls of `remove` took out."""
        if start >= self.size:
            return None
        node = self.size + start
        while self.tree[node] > most:
            # A right child has no siblings to its right: go up to a left child, then to its right sibling.
            while node & 1:
                node >>= 1
            if not node:
                return None
            node += 1
        while node < self.size:
            node *= 2
            if self.tree[node] > most:
                node += 1
        return node - self.size

    def remove(self, number: int) -> None:
        """Remove the item at the index `number`: `find` no longer returns this index."""
        node = self.size + number
        self.tree[node] = self.GONE
        while node > 1:
            node >>= 1
            self._update(node)

    def list_left(self) -> list[int]:
        """The indices of the items that have not been removed."""
        leaves = self.tree[self.size : self.size + self.count]
        return [number for number, value in enumerate(leaves) if value != self.GONE]
