"""Scales: layouts of one number per block, derived from the tensor's layout.

1. A rank holds the numbers of its blocks, packed: without holes and in ascending order.
2. A layout that cuts inside a block raises FormatError, which names the block; or, on request,
   the block's number is **duplicated**: every rank that holds some of the block has it.
3. If a block is a whole dimension, every rank has its number, however the dimension is cut.
4. Each rank pads separately: the positions after its numbers are holes, which are never sent, stored or read.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((4, 128), Mesh(tp=2), "n (tp k)", dtype="bfloat16")
>>> print(lay_blocks(layout, Blocks((32,)), "uint8", "scales"))
uint8[4, 4] n (tp h) on tp=2
>>> print(lay_blocks(layout, Blocks((None,)), "float32", "scales"))
float32[4, 1] n h on tp=2
>>> cut = Layout((6, 128), Mesh(tp=2), "(tp n) k", dtype="bfloat16")
>>> numbers = lay_blocks(cut, Blocks((4, 128)), "float32", "scales", duplicated=True)
>>> [str(numbers.runs(rank)[0]) for rank in (0, 1)]
['[0:1]', '[0:2]']
>>> pad_parts(numbers, (128, 4)).local_shape(1)
(128, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardmath.base.errors import FormatError
from shardmath.layouts.algebra.dimension import Dimension, Field, cells
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import Runs, Segment
from shardmath.layouts.fitting import fit
from shardmath.layouts.layout import Layout, intern
from shardmath.values.formats.blocks import Blocks, label

__all__ = ["find_bad_cut", "lay_blocks", "list_stretches", "pad_parts", "spread_last"]


class _BadCut(NamedTuple):
    """A stretch start:stop that ranks of one cell (combination of coordinates on the dividing axes) hold, and its end
    `cut` inside a block."""

    cell: int
    start: int
    stop: int
    cut: int


def lay_blocks(
    layout: Layout,
    blocks: Blocks,
    dtype: str,
    what: str,
    name: str = "",
    *,
    duplicated: bool = False,
) -> Layout:
    """Return the layout of an array, such as scales, that has one element of `dtype` per block of a tensor with this
    `layout`; `blocks` is the block size. A block divided between ranks raises FormatError, unless `duplicated`: then
    each of these ranks has the element. In the message, `what` names the array and `name` the tensor.

    The layout has no holes, and Partial axes replicate.
    """
    sizes = blocks.per_dimension(layout.ndim, name)
    shape = blocks.count(layout.shape)
    dims = []
    for d, (dim, block) in enumerate(zip(layout.dims, sizes, strict=True)):
        if block is None:
            dims.append(Dimension(shape[d], (Field(shape[d]),)))
            continue
        bad_cut = find_bad_cut(dim, block)
        if bad_cut and not duplicated:
            message = _word_bad_cut(layout, what, block, d, bad_cut)
            raise FormatError(f"{label(name)}{message}")
        dims.append(_lay_dimension(dim, block, shape[d]))
    return intern(shape, dtype, layout.mesh, tuple(dims), ())


def spread_last(layout: Layout, factor: int) -> Layout:
    """Return `layout` with its last dimension `factor` times as long: each element becomes `factor` neighboring
    elements, on the same ranks."""
    *others, last = layout.dims
    size = last.size * factor
    held = []
    for runs in cells(last):
        segments = [
            (local * factor, start * factor, n * factor) for local, start, n in runs.segments
        ]
        held.append(Runs(segments, runs.length * factor))
    spread = fit(size, last.axes, held)
    shape = (*layout.shape[:-1], size)
    return intern(shape, layout.dtype, layout.mesh, (*others, spread), layout.partial)


def _lay_dimension(dim: Dimension, block: int, size: int) -> Dimension:
    """The dimension of `size` blocks, packed."""
    held = list(cells(dim))
    packed = [_pack_runs(runs, block) for runs in held]
    # The usual case: the dimension is packed already, and keeps its notation.
    if block == 1 and held == packed:
        return dim
    return fit(size, dim.axes, packed)


def _pack_runs(runs: Runs, block: int) -> Runs:
    """The blocks that the positions touch, once each, in ascending order without holes."""
    segments: list[Segment] = []
    local = 0
    end = 0
    for start, stop in list_stretches(runs):
        # Two stretches may have parts of one block if cuts inside blocks are allowed.
        first = max(start // block, end)
        end = -(-stop // block)
        count = end - first
        if count > 0:
            segments.append((local, first, count))
            local += count
    return Runs(segments, local)


def pad_parts(layout: Layout, multiples: Sequence[int]) -> Layout:
    """Return `layout` with holes (positions without an element) added on each rank, so that dimension d of its local
    tensor has a multiple of `multiples[d]` positions."""
    dims = []
    for dim, multiple in zip(layout.dims, multiples, strict=True):
        if multiple > 1:
            dim = _pad_dimension(dim, multiple)
        dims.append(dim)
    return intern(layout.shape, layout.dtype, layout.mesh, tuple(dims), layout.partial)


def _pad_dimension(dim: Dimension, multiple: int) -> Dimension:
    padded = []
    for runs in cells(dim):
        size = len(runs)
        size += -size % multiple
        padded.append(Runs(runs.segments, size))
    return fit(dim.size, dim.axes, padded)


def list_stretches(runs: Runs) -> list[tuple[int, int]]:
    """Return a list of the ranges (start, stop) of global positions that a rank holds in a dimension, ascending, and
    merged if adjacent. `runs` maps the rank's local positions to global ones."""
    # From each global position to itself: Runs sorts such segments, and merges adjacent ones.
    in_place = Runs([(g, g, n) for _, g, n in runs.segments], runs.extent)
    return [(start, start + n) for start, _, n in in_place.segments]


def find_bad_cut(dim: Dimension, block: int) -> _BadCut | None:
    """Return the first stretch of a part of `dim` that begins or ends inside a block of `block` positions, or None."""
    if block == 1:
        return None
    for cell, runs in enumerate(cells(dim)):
        for start, stop in list_stretches(runs):
            # The last block may be shorter than the others, and ends with the dimension.
            for cut in (start, stop):
                if cut % block and cut != dim.size:
                    return _BadCut(cell, start, stop, cut)
    return None


def _word_bad_cut(layout: Layout, what: str, block: int, d: int, bad: _BadCut) -> str:
    """The message about a cut inside a block."""
    dim = layout.dims[d]
    rank = _find_rank(dim, layout.mesh, bad.cell)
    held = f"rank {rank} holds positions {bad.start}:{bad.stop} of dimension {d} under {layout}"
    cuts = f"cuts a block of {block} of {what} at {bad.cut}"
    return f"{held}, and so {cuts}; divide the dimension at multiples of {block}"


def _find_rank(dim: Dimension, mesh: Mesh, cell: int) -> int:
    """The first rank that holds the part of the dimension at that cell."""
    parts = partition(dim)
    index = parts.by_rank(mesh).tolist().index(int(parts.cell[cell]))
    rank: int = mesh.ranks[index]
    return rank
