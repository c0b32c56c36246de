"""Drafts: a buffer while a rule lays it out, parameter by parameter and bucket by bucket.

1. Parameters are placed in the open bucket; closing it opens the next, which begins where it ends.
2. A finished draft is a `PerBufferParamLayout` with shapes, and with `param_indices` in forward order.

>>> params = [Param("a", (3,)), Param("b", (5,))]
>>> draft = Draft()
>>> end = draft.place("b", 0, 5)
>>> end = draft.place("a", end, 3)
>>> draft.close(16, unpadded=end)
16
>>> print(draft.finish(params, ranks=2))
2 parameters in 1 bucket, 16 elements, 8 of them padding (50.00 %)
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.buffers.param import Param, number_alike
from shardmath.buffers.param_layout import PerBufferParamLayout, Placed

__all__ = ["Draft"]


class Draft:
    """A flat buffer in progress: the parameters placed and the buckets closed so far."""

    def __init__(self) -> None:
        self.placed: list[tuple[str, Placed]] = []
        self.bucket_indices: list[tuple[int, int]] = []
        self.unpadded: list[int] = []
        self.first = 0
        """The start of the open bucket."""
        self.is_filled = False
        """Whether the open bucket has a parameter."""

    @property
    def bucket(self) -> int:
        """The number of the open bucket, counted from 0."""
        return len(self.bucket_indices)

    def place(self, name: str, start: int, numel: int) -> int:
        """Place the parameter `name`, of `numel` elements, in the open bucket at position `start` of the buffer; return
        the position of its end."""
        end = start + numel
        self.placed.append((name, (start, end, self.bucket)))
        self.is_filled = True
        return end

    def close(self, end: int, *, unpadded: int) -> int:
        """End the open bucket at position `end` of the buffer, where the next bucket begins, and return `end`.
        `unpadded` is the number of elements in the bucket, without padding."""
        self.bucket_indices.append((self.first, end))
        self.unpadded.append(unpadded)
        self.first = end
        self.is_filled = False
        return end

    def finish(
        self, params: Sequence[Param], *, ranks: int, shards: int | None = None
    ) -> PerBufferParamLayout:
        """Return the layout of the finished buffer for `ranks` data-parallel ranks; `params` are the buffer's
        parameters in forward order. `shards` is None if a parameter can be divided between ranks; it equals `ranks` if
        each lies whole in one rank's share."""
        shape_of = {param.name: param.shape for param in params}
        kinds = [(param.dtype, param.gradient, param.expert_parallel) for param in params]
        return PerBufferParamLayout(
            self.placed,
            self.bucket_indices,
            self.unpadded,
            number_alike(kinds),
            shards,
            shapes=[shape_of[name] for name, _ in self.placed],
            data_parallel_world_size=ranks,
        )
