"""Numbers: pieces from the element numbers in the cells of a stored tensor.

1. Stretches of neighbors are found first, then stretches of one length at equal distances, and so on. Each pass goes
   through the cells in order, and joins pieces as long as their distances stay equal.

>>> find_pieces("q", np.arange(1, 7), np.array([0, 2, 4, 1, 3, 5]))
[Piece('q', 1, 0, ((2, 3, 1), (3, 1, 2)))]
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.models.recordings.pieces import Block, Piece

__all__ = ["find_pieces"]

_Flat: TypeAlias = NDArray[np.int64]


def find_pieces(tensor: str, cells: _Flat, elements: _Flat) -> list[Piece]:
    """Group elements of the logical `tensor` into strided Pieces. `elements[i]` is the flat index of an element in
    `tensor`, and `cells[i]` its flat index in the one stored tensor that holds them all."""
    if not len(cells):
        return []
    groups = _group_neighbors(cells, elements)
    while True:
        grouped = groups.grouped()
        if len(grouped.shapes) == len(groups.shapes):
            break
        groups = grouped
    starts = zip(groups.cells.tolist(), groups.elements.tolist(), strict=True)
    return [
        Piece(tensor, cell, element, blocks)
        for (cell, element), blocks in zip(starts, groups.shapes, strict=True)
    ]


class _Groups:
    """Pieces as arrays of first cells and first elements, and their blocks, in the order of cells."""

    def __init__(self, cells: _Flat, elements: _Flat, shapes: list[tuple[Block, ...]]) -> None:
        self.cells = cells
        self.elements = elements
        self.shapes = shapes

    def grouped(self) -> _Groups:
        """Return the pieces after one merge: successive pieces of equal shape, at equal distances in the stored and in
        the logical tensor, become one strided piece."""
        cells = np.diff(self.cells).tolist()
        elements = np.diff(self.elements).tolist()
        # Step i is from piece i to piece i + 1.
        steps = list(zip(cells, elements, strict=True))
        starts = []
        shapes = []
        first = 0
        for last_step in self._list_ends(steps):
            # A stretch of one step, whose first piece the stretch before has taken; its second begins the next stretch.
            if last_step < first:
                continue
            starts.append(first)
            shape = self.shapes[first]
            if last_step < len(steps) and self.shapes[first + 1] == shape:
                last = last_step + 1
                shape = ((last - first + 1, *steps[first]), *shape)
                first = last
            shapes.append(shape)
            first += 1
        return _Groups(self.cells[starts], self.elements[starts], shapes)

    def _list_ends(self, steps: list[tuple[int, int]]) -> list[int]:
        """The last step of each stretch of equal steps between pieces of one shape; at the end, the step that would
        follow the last piece, which may be in no stretch."""
        # Whether the pieces at both ends of each step have one shape.
        alike = [one == other for one, other in itertools.pairwise(self.shapes)]
        ends = []
        for i, (step, following) in enumerate(itertools.pairwise(steps)):
            continues = alike[i] and alike[i + 1]
            if not continues or step != following:
                ends.append(i)
        if steps:
            ends.append(len(steps) - 1)
        return [*ends, len(steps)]


def _group_neighbors(cells: _Flat, elements: _Flat) -> _Groups:
    """Stretches of successive elements in successive cells."""
    are_next_cells = np.diff(cells) == 1
    are_next_elements = np.diff(elements) == 1
    ends = np.flatnonzero(~(are_next_cells & are_next_elements))
    starts = np.concatenate([[0], ends + 1])
    counts = np.diff(np.append(starts, len(cells)))
    shapes: list[tuple[Block, ...]] = [((count, 1, 1),) for count in counts.tolist()]
    return _Groups(cells[starts], elements[starts], shapes)
