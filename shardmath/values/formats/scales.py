"""Scales: how numbers per block lie, which follows from how the tensor does.

1. A rank has of the scales what it has of the tensor, block by block, packed: without holes and in ascending order.
2. A layout that cuts inside a block is an error, which names the nearest cuts between blocks; or, where that is asked
   for, the block's number is **duplicated**: every rank that holds some of the block has it.
3. What stands for a whole dimension is on every rank, however that dimension is cut.
4. Padding is each rank's own: the positions behind what it has are holes, which nobody sends, stores or reads.

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
from shardmath.values.formats.blocks import Blocks, find_cuts, label

__all__ = ["lay_blocks", "list_stretches", "pad_parts", "spread_last"]


class _BadCut(NamedTuple):
    """The coordinate of the dividing axes that holds start:stop, and the end of these inside a block."""

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
    """The packed layout of one number of that dtype per block of a tensor that lies as `layout` says.

    Partial axes replicate. Raises FormatError, which says `what` of the tensor `name` it is, for a cut inside a block,
    unless numbers of such blocks are to be `duplicated`.
    """
    sizes = blocks.per_dimension(layout.ndim, name)
    shape = blocks.count(layout.shape)
    dims = []
    for d, (dim, block) in enumerate(zip(layout.dims, sizes, strict=True)):
        if block is None:
            dims.append(Dimension(shape[d], (Field(shape[d]),)))
            continue
        bad = _find_bad_cut(dim, block)
        if bad and not duplicated:
            found = _word_bad_cut(layout, what, block, d, bad)
            raise FormatError(f"{label(name)}{found}")
        dims.append(_lay_dimension(dim, block, shape[d]))
    return intern(shape, dtype, layout.mesh, tuple(dims), ())


def spread_last(layout: Layout, factor: int) -> Layout:
    """The layout of a tensor that has `factor` numbers in the place of each, along the last dimension."""
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
    """The dimension of so many blocks."""
    held = list(cells(dim))
    packed = [_pack_runs(runs, block) for runs in held]
    # Nearly always: nothing is between or behind what ranks hold, and the dimension keeps its text.
    if block == 1 and held == packed:
        return dim
    return fit(size, dim.axes, packed)


def _pack_runs(runs: Runs, block: int) -> Runs:
    """The blocks of which there are positions, once each, in ascending order without holes."""
    segments: list[Segment] = []
    at = 0
    behind = 0
    for start, stop in list_stretches(runs):
        # Two stretches may have parts of one block, where cuts inside blocks are allowed.
        first = max(start // block, behind)
        behind = -(-stop // block)
        count = behind - first
        if count > 0:
            segments.append((at, first, count))
            at += count
    return Runs(segments, at)


def pad_parts(layout: Layout, multiples: Sequence[int]) -> Layout:
    """The layout under which each rank has, behind its own positions, holes up to a multiple in each dimension."""
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
    """The positions as ascending (start, stop): what meets is one, however far apart it lies in the local tensor."""
    in_place = Runs([(g, g, n) for _, g, n in runs.segments], runs.extent)
    return [(start, start + n) for start, _, n in in_place.segments]


def _find_bad_cut(dim: Dimension, block: int) -> _BadCut | None:
    """A stretch that ends inside a block; None where there is none."""
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
    """What is wrong with a cut inside a block, and where it may be instead."""
    dim = layout.dims[d]
    below, above = find_cuts(bad.cut, block, dim.size)
    rank = _find_rank(dim, layout.mesh, bad.cell)
    held = f"rank {rank} holds positions {bad.start}:{bad.stop} of dimension {d} under {layout}"
    cuts = f"the nearest cuts to {bad.cut} are {below} and {above}"
    return f"{held}, and {what} is cut every {block}: {cuts}; divide the dimension there"


def _find_rank(dim: Dimension, mesh: Mesh, cell: int) -> int:
    """The first rank that holds what the cell of the dimension does."""
    parts = partition(dim)
    at = parts.by_rank(mesh).tolist().index(int(parts.cell[cell]))
    rank: int = mesh.ranks[at]
    return rank
