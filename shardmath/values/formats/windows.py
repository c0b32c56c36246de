"""Windows: a box of a tensor whose ends may lie inside blocks, and the numbers of the blocks that it touches.

1. A block's **amax** is its largest magnitude; NaN counts as 0, as in TransformerEngine's kernels. It is the largest of
   the amaxes of the block's parts.
2. So ranks that cut blocks take the largest over ranks of the amaxes of those blocks (`straddles`), and then continue
   as if they had the whole blocks. The largest of floats is exact in any order.

>>> window = make_window(Blocks((4,)), np.s_[3:9], (10,))
>>> x = np.array([1, -2, 3, 4, 5, 6], np.float32)
>>> window.count, window.straddles(), window.amax(x)
((3,), array([ True, False,  True]), array([1., 5., 6.], dtype=float32))
>>> window.spread(np.array([7, 8, 9]))
array([7, 8, 8, 8, 8, 9])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.base.errors import FormatError
from shardmath.base.text import shown
from shardmath.values.formats.blocks import Blocks, Index
from shardmath.values.formats.floats import Floats

__all__ = ["Window", "make_window"]

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Window:
    """A box, from `starts` to `stops` (exclusive), of a tensor of this `shape` that is divided into blocks (positions
    that share a scale).

    `blocks` has the positions of a block in each dimension; `whole` says whether the block is the whole dimension.
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    whole: tuple[bool, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def spans(self) -> str:
        """The box as text, such as "[0:4, 2:3]"."""
        pairs = zip(self.starts, self.stops, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in pairs)}]"

    @property
    def count(self) -> tuple[int, ...]:
        """The number of blocks that the box touches, in each dimension."""
        return tuple(span.stop - span.start for span in self.cover)

    @property
    def cover(self) -> tuple[slice, ...]:
        """Slices, one per dimension, that select the scales of all blocks that the box touches."""
        return tuple(map(self._slice_blocks, range(len(self.shape))))

    def _slice_blocks(self, d: int) -> slice:
        # A block that is a whole dimension belongs to every part of it, even to an empty one.
        if self.whole[d]:
            return slice(0, 1)
        start = self.starts[d]
        stop = self.stops[d]
        block = self.blocks[d]
        first = start // block
        if start == stop:
            return slice(first, first)
        return slice(first, -(-stop // block))

    def _borders(self, d: int) -> Ints:
        """The positions in the box at which each block begins, and at which the last one ends."""
        span = self.cover[d]
        start = self.starts[d]
        borders: Ints = np.arange(span.start, span.stop + 1)
        borders *= self.blocks[d]
        inside = borders.clip(start, self.stops[d])
        return inside - start

    def straddles(self) -> NDArray[np.bool_]:
        """Return an array of flags: for each block that the box touches, whether some of the block's positions lie
        outside the box."""
        out = np.zeros(self.count, np.bool_)
        for d in range(out.ndim):
            # Move dimension d to the end, where flags broadcast; this is a view, so `out` itself changes.
            view = np.moveaxis(out, d, -1)
            view |= self._is_cut(d)
        return out

    def _is_cut(self, d: int) -> NDArray[np.bool_]:
        """Whether the box cuts each block that it touches in dimension d."""
        block = self.blocks[d]
        span = self.cover[d]
        firsts = np.arange(span.start, span.stop)
        firsts *= block
        # The last block may be shorter, and ends with the dimension.
        ends = np.minimum(firsts + block, self.shape[d])
        is_cut: NDArray[np.bool_] = (firsts < self.starts[d]) | (ends > self.stops[d])
        return is_cut

    def amax(self, part: Floats, nan: float = 0) -> Floats:
        """Return an array with, for each block that the box touches, the largest magnitude of the block's numbers in
        `part`, the array of the box; NaN counts as `nan`."""
        out = np.abs(part)
        out[np.isnan(out)] = nan
        for d in range(part.ndim):
            # Blocks of one position are their own largest.
            if self.blocks[d] > 1 and out.size:
                firsts = self._borders(d)[:-1]
                out = np.maximum.reduceat(out, firsts, axis=d)
        if not out.size:
            return np.zeros(self.count, np.float32)
        return out

    def spread(self, numbers: NDArray[_Number]) -> NDArray[_Number]:
        """Spread `numbers`, one per block, over an array of the box's shape: each at all positions of its block."""
        for d in range(numbers.ndim):
            # Of blocks that are a whole dimension, even an empty box has one.
            if self.blocks[d] > 1 or self.whole[d]:
                numbers = np.repeat(numbers, np.diff(self._borders(d)), axis=d)
        return numbers


def make_window(blocks: Blocks, where: Index, shape: tuple[int, ...]) -> Window:
    """Return the part of a tensor of this `shape` that the index `where` selects, as a Window: a box, with the `blocks`
    (positions that share a scale) of the tensor. Raises FormatError unless it selects a box, with steps of 1."""
    # With blocks of one position, `scale_slice` only normalizes the index.
    single_positions = Blocks(())
    starts = []
    stops = []
    for item in single_positions.scale_slice(where, shape):
        if not isinstance(item, slice) or item.step != 1:
            what = f"the part {shown(where)} of a tensor of shape {shape}"
            raise FormatError(f"{what} is not a box; give one slice with step 1 per dimension")
        starts.append(item.start)
        stops.append(item.stop)
    sizes = blocks.per_dimension(len(shape))
    whole = tuple(size is None for size in sizes)
    return Window(shape, blocks.positions(shape), whole, tuple(starts), tuple(stops))
