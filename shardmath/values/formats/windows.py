"""Windows: a box of a tensor whose ends may lie inside blocks, and the numbers of the blocks that it touches.

1. A block's **amax** is its largest magnitude; NaN counts as 0, as in TransformerEngine's kernels. The amax of a part
   of a block is at most that, and the largest over all parts is that.
2. So ranks whose cuts part blocks take the largest over ranks of the amaxes of those blocks (`straddles`), and no
   others, and go on as if they had the whole blocks. The largest of floats is exact in any order.

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
    """A box of a tensor of that shape, by its first positions and those behind its last.

    `blocks` are the positions of a block in each dimension, and `whole` says where that is all of it.
    """

    shape: tuple[int, ...]
    blocks: tuple[int, ...]
    whole: tuple[bool, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        both = zip(self.starts, self.stops, strict=True)
        return tuple(stop - start for start, stop in both)

    @property
    def spans(self) -> str:
        """The box as people write it."""
        both = zip(self.starts, self.stops, strict=True)
        written = [f"{start}:{stop}" for start, stop in both]
        return f"[{', '.join(written)}]"

    @property
    def count(self) -> tuple[int, ...]:
        """Blocks that it touches, in each dimension."""
        return tuple(span.stop - span.start for span in self.cover)

    @property
    def cover(self) -> tuple[slice, ...]:
        """The slice of the scales of all blocks that it touches."""
        return tuple(map(self._count_blocks, range(len(self.shape))))

    def _count_blocks(self, d: int) -> slice:
        # What stands for all of a dimension belongs to every part of it, those of no position too.
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
        """Where in the part each block begins, and where the last ends."""
        span = self.cover[d]
        start = self.starts[d]
        borders: Ints = np.arange(span.start, span.stop + 1)
        borders *= self.blocks[d]
        inside = borders.clip(start, self.stops[d])
        return inside - start

    def straddles(self) -> NDArray[np.bool_]:
        """Whether positions of a block lie outside the box, for each block that it touches."""
        out = np.zeros(self.count, np.bool_)
        for d in range(out.ndim):
            # The dimension to the end, where it broadcasts; a view, so `out` itself changes.
            view = np.moveaxis(out, d, -1)
            view |= self._is_cut(d)
        return out

    def _is_cut(self, d: int) -> NDArray[np.bool_]:
        """Whether the box cuts a block of the dimension, for each that it touches."""
        block = self.blocks[d]
        span = self.cover[d]
        firsts = np.arange(span.start, span.stop)
        firsts *= block
        # The last block may be shorter, and ends with the dimension.
        ends = np.minimum(firsts + block, self.shape[d])
        is_before = firsts < self.starts[d]
        is_behind = ends > self.stops[d]
        is_cut: NDArray[np.bool_] = is_before | is_behind
        return is_cut

    def amax(self, part: Floats, nan: float = 0) -> Floats:
        """The largest magnitude in each block that it touches, of the numbers in the box; that of NaN is `nan`."""
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
        """The number of its block at each position of the box."""
        for d in range(numbers.ndim):
            if self.blocks[d] > 1:
                numbers = np.repeat(numbers, np.diff(self._borders(d)), axis=d)
        return numbers


def make_window(blocks: Blocks, where: Index, shape: tuple[int, ...]) -> Window:
    """The box that the slices take. Raises FormatError for what is no box, such as one with a step."""
    # Indices are read as those of a tensor that may be cut anywhere.
    anywhere = Blocks(())
    starts = []
    stops = []
    for item in anywhere.scale_slice(where, shape):
        if not isinstance(item, slice) or item.step != 1:
            what = f"the part {shown(where)} of a tensor of shape {shape}"
            raise FormatError(f"{what} is no box; give a slice without step for each dimension")
        starts.append(item.start)
        stops.append(item.stop)
    sizes = blocks.per_dimension(len(shape))
    whole = tuple(size is None for size in sizes)
    return Window(shape, blocks.positions(shape), whole, tuple(starts), tuple(stops))
