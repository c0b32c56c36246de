"""Swizzle: scales in the order of tensor cores, which is a permutation with padding, and so a layout.

1. Scales of rows and columns are padded with zeros to multiples of 128 and 4. Each tile of 128 x 4 is 512 consecutive
   bytes, in which rows r and r + 32 are neighbors: with T tiles side by side, the scale of (r, c) is at
   `((r // 128) T + c // 4) 512 + (r % 32) 16 + (r % 128) // 32 * 4 + c % 4`.
2. This order mixes rows with columns, but a layout is a product over dimensions. So it is a layout of the **flattened**
   scales: one dimension, whose positions number the compact array row by row.
3. For a layout of scales, `flattened` and `swizzled` return the layouts of each rank's flattened local array: in
   row-major order, and swizzled separately by each rank, as kernels need it. Plans between the two are ordinary plans
   for arrays `array.reshape(-1)`, which copies nothing.
4. A shard of swizzled storage, such as a flat buffer, is a layout whose stored positions are `swizzle_runs`.

>>> scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
>>> storage = swizzle(scales)
>>> len(storage), storage[:12].tolist()
(512, [0, 1, 2, 3, 128, 129, 130, 131, 0, 0, 0, 0])
>>> np.array_equal(unswizzle(storage, (64, 4)), scales)
True
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> rows = Layout((64, 4), Mesh(tp=32), "(tp n) k", dtype="uint8")
>>> print(flattened(rows).runs(1)[0], flattened(rows))
[8:16] uint8[256] (tp n) on tp=32
>>> print(swizzled(rows).local_shape(0), str(swizzled(rows).runs(1)[0])[:20])
(512,) [8:12 -12 12:16 -492
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.base.errors import FormatError
from shardmath.base.text import plural
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.algebra.stages import list_coordinates
from shardmath.layouts.fitting import fit
from shardmath.layouts.layout import Layout, intern

__all__ = ["flattened", "swizzle", "swizzle_runs", "swizzled", "unswizzle"]

Array: TypeAlias = NDArray[Any]

ROWS = 128
COLUMNS = 4
LANES = 32
"""Consecutive rows of a tile, which lie 16 bytes apart in storage."""
GROUPS = ROWS // LANES
"""Rows of a tile that lie next to each other in storage, 32 rows apart."""


def _count_tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """The numbers of rows and columns of tiles. Raises FormatError unless scales have two dimensions."""
    if len(shape) != 2:
        what = f"scales of shape {tuple(shape)} have {plural(shape, 'dimension')}"
        raise FormatError(
            f"{what}, but tiles have rows and columns; reshape them to two dimensions"
        )
    rows, columns = shape
    return -(-rows // ROWS), -(-columns // COLUMNS)


def swizzle(scales: Array) -> Array:
    """Return the two-dimensional `scales`, padded with zeros to tiles of 128 x 4, as a flat array in the order in which
    tensor cores read them, tile by tile.

    Raises FormatError unless scales have two dimensions.
    """
    down, across = _count_tiles(scales.shape)
    rows, columns = scales.shape
    padded = np.zeros((down * ROWS, across * COLUMNS), scales.dtype)
    padded[:rows, :columns] = scales
    # A row number has three digits and a column number two; storage has them in another order.
    digits = padded.reshape(down, GROUPS, LANES, across, COLUMNS)
    tiles = digits.transpose(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


def unswizzle(storage: Array, shape: tuple[int, int]) -> Array:
    """Undo `swizzle`: return the scales as an array of this `shape`, without padding, from the flat array `storage`.
    Raises FormatError for storage of another size."""
    down, across = _count_tiles(shape)
    size = down * across * ROWS * COLUMNS
    if storage.shape != (size,):
        what = (
            f"storage has shape {storage.shape}, but scales of shape {tuple(shape)} fill ({size},)"
        )
        raise FormatError(f"{what}; pass the whole storage, flattened")
    tiles = storage.reshape(down, across, LANES, GROUPS, COLUMNS)
    digits = tiles.transpose(0, 3, 2, 1, 4)
    padded = digits.reshape(down * ROWS, across * COLUMNS)
    rows, columns = shape
    return padded[:rows, :columns].copy()


# As layouts


def swizzle_runs(shape: tuple[int, int]) -> Runs:
    """Return a map for scales of this `shape`: it takes an index in the flat array that `swizzle` makes, and gives the
    row-major index of the scale that lies there. `swizzle` reorders scales for tensor cores.

    Padding is not in the map.
    """
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return _make_runs(_swizzle_numbers(numbers))


def flattened(layout: Layout) -> Layout:
    """Return a layout of the flattened (one-dimensional) tensor: each rank's local array under it is the rank's local
    array under `layout`, flattened.

    Raises FormatError for a Partial layout.
    """
    return _rearrange(layout, np.ravel)


def swizzled(layout: Layout) -> Layout:
    """Return the layout of the scales after `swizzle`, given the `layout` of the two-dimensional scales: each rank
    swizzles (pads, reorders and flattens) the local array that it has under `layout`.

    Raises FormatError for a Partial layout, and unless scales have two dimensions.
    """
    _count_tiles(layout.shape)
    return _rearrange(layout, _swizzle_numbers)


def _swizzle_numbers(numbers: Ints) -> Ints:
    """The numbers swizzled, -1 in padding."""
    # `swizzle` pads with 0, which is a valid number here: shift numbers by one.
    return swizzle(numbers + 1) - 1


def _rearrange(layout: Layout, arrange: Callable[[Ints], Ints]) -> Layout:
    """The one-dimensional layout of each rank's local array after `arrange`."""
    if layout.addend_axes:
        fix = "reduce it first, by a plan to a layout without Partial"
        raise FormatError(f"{layout} is Partial and cannot be flattened; {fix}")
    axes: dict[str, int] = {}
    for dim in layout.dims:
        axes.update(dim.axes)
    held = []
    for coords in list_coordinates(axes):
        numbers = _number_elements(layout, coords)
        held.append(_make_runs(arrange(numbers)))
    size = math.prod(layout.shape)
    dimension: Dimension = fit(size, axes, held)
    return intern((size,), layout.dtype, layout.mesh, (dimension,), ())


def _number_elements(layout: Layout, coords: dict[str, int]) -> Ints:
    """The row-major number in the whole tensor of each local element at these coordinates; -1 in holes."""
    numbers = np.zeros((), np.int64)
    for dim in layout.dims:
        positions = dim.runs(coords).indices()
        outer = numbers[..., None]
        is_held = (outer >= 0) & (positions >= 0)
        numbers = np.where(is_held, outer * dim.size + positions, -1)
    return numbers


def _make_runs(numbers: Ints) -> Runs:
    """The numbers as Runs; -1 is a hole."""
    count = len(numbers)
    is_first = np.ones(count, np.bool_)
    is_first[1:] = np.diff(numbers) != 1
    # -1 to 0 is a step of 1 as well, but the end of a hole.
    is_first[1:] |= numbers[:-1] < 0
    starts = np.flatnonzero(is_first)
    table = np.empty((len(starts), 3), np.int64)
    table[:, 0] = starts
    table[:, 1] = numbers[starts]
    table[:, 2] = np.diff(starts, append=count)
    held = table[table[:, 1] >= 0]
    segments = map(tuple, held.tolist())
    return Runs.canonical(tuple(segments), count)
