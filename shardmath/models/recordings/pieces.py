"""Pieces: elements of a logical tensor in cells of a stored one, as strided blocks.

1. Cells and elements are counted flat, in row-major order. A piece begins at one cell and one element and repeats:
   a block is a count, a stride of cells and a stride of elements, the outermost block first.
2. Pieces are canonical: blocks of count 1 are dropped, blocks are ordered by stride of cells, and a block that
   continues the next one is merged with it. So a whole tensor is one block, whatever its shape.

>>> piece = Piece("q", 8, 0, ((2, 8, 4), (4, 1, 1)))
>>> piece.cells.tolist(), piece.elements.tolist()
([8, 9, 10, 11, 16, 17, 18, 19], [0, 1, 2, 3, 4, 5, 6, 7])
>>> Piece("q", 0, 0, ((2, 4, 4), (4, 1, 1)))
Piece('q', 0, 0, ((8, 1, 1),))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Piece", "overlap"]

Block: TypeAlias = tuple[int, int, int]
"""Count, stride of cells, stride of elements."""
_Flat: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, repr=False)
class Piece:
    """A strided set of elements of one logical tensor, and the positions (cells) where a stored tensor has them."""

    tensor: str
    cell: int
    element: int
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _merge(self.blocks))

    def __repr__(self) -> str:
        return f"Piece({self.tensor!r}, {self.cell}, {self.element}, {self.blocks})"

    @property
    def size(self) -> int:
        """The number of elements in the piece."""
        counts = (count for count, _, _ in self.blocks)
        return math.prod(counts)

    @property
    def cells(self) -> _Flat:
        """The flat position in the stored tensor of each element of the piece."""
        steps = [(count, stride) for count, stride, _ in self.blocks]
        return _expand(self.cell, steps)

    @property
    def elements(self) -> _Flat:
        """The flat index in the logical tensor of each element of the piece."""
        steps = [(count, stride) for count, _, stride in self.blocks]
        return _expand(self.element, steps)

    def span(self, side: int) -> tuple[int, int]:
        """The smallest and the largest flat position in the stored tensor (`side` 1) or the logical one (`side` 2)."""
        low = high = self.cell if side == 1 else self.element
        for block in self.blocks:
            steps = block[0] - 1
            reach = steps * block[side]
            low += min(reach, 0)
            high += max(reach, 0)
        return low, high


def _merge(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks in canonical form: the largest stride of cells first, as few as possible."""
    repeated = (block for block in blocks if block[0] != 1)
    merged: list[Block] = []
    for inner in sorted(repeated, key=lambda block: -block[1]):
        if merged:
            outer_count, outer_cells, outer_elements = merged[-1]
            count, cells, elements = inner
            # An outer step leads to where the inner block ends, so both are one longer block.
            if (outer_cells, outer_elements) == (count * cells, count * elements):
                merged[-1] = (outer_count * count, cells, elements)
                continue
        merged.append(inner)
    return tuple(merged)


def _expand(start: int, blocks: Sequence[tuple[int, int]]) -> _Flat:
    """All numbers that `start` and these (count, stride) lead to, the last block fastest."""
    numbers = np.array([start], np.int64)
    for count, stride in blocks:
        steps = stride * np.arange(count, dtype=np.int64)
        numbers = np.add.outer(numbers, steps).ravel()
    return numbers


def overlap(pieces: Sequence[Piece], side: int) -> tuple[Piece, Piece] | None:
    """Two of `pieces` that share a position of the stored (`side` 1) or the logical tensor (`side` 2), or None.

    A piece that has a position twice is returned twice.
    """
    for cluster in _cluster(pieces, side):
        # A nested piece has no position twice.
        if len(cluster) == 1 and _is_nested(cluster[0], side):
            continue
        pair = _find_overlap(cluster, side)
        if pair is not None:
            return pair
    return None


def _find_overlap(cluster: Sequence[Piece], side: int) -> tuple[Piece, Piece] | None:
    """The first two pieces that share a cell (side 1) or an element (side 2); None if no two do."""
    numbers = np.concatenate([_list_numbers(piece, side) for piece in cluster])
    sizes = [piece.size for piece in cluster]
    owners = np.repeat(np.arange(len(cluster)), sizes)
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if not twice.size:
        return None
    repeat = int(twice[0])
    first, second = owners[order[repeat : repeat + 2]]
    return cluster[first], cluster[second]


def _cluster(pieces: Sequence[Piece], side: int) -> Iterator[list[Piece]]:
    """The pieces in groups whose spans overlap; pieces of different groups share no number."""
    cluster: list[Piece] = []
    reached = -1
    spans = [piece.span(side) for piece in pieces]
    for i in sorted(range(len(pieces)), key=spans.__getitem__):
        low, high = spans[i]
        if low > reached and cluster:
            yield cluster
            cluster = []
        cluster.append(pieces[i])
        reached = max(reached, high)
    if cluster:
        yield cluster


def _list_numbers(piece: Piece, side: int) -> _Flat:
    """The cells (side 1) or elements (side 2) of a piece."""
    return piece.cells if side == 1 else piece.elements


def _is_nested(piece: Piece, side: int) -> bool:
    """Whether every block's stride is beyond all that is inside it, so that no cell (side 1) or no element (side 2)
    comes twice."""
    # A block is (count, stride of cells, stride of elements), so `side` is the index of a stride.
    steps = [(abs(block[side]), block[0]) for block in piece.blocks]
    reached = 0
    for stride, count in sorted(steps):
        if stride <= reached:
            return False
        reached += (count - 1) * stride
    return True
