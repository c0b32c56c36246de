"""Numbers: element numbers in the cells of a stored tensor, as pieces.

1. Stretches of neighbours are found first, then stretches of one length at equal distances, and so on. Each pass
   goes through the cells in order and takes what is at equal distances as long as it is.

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
    """The pieces of a tensor of which these elements lie in these cells, which ascend."""
    if not len(cells):
        return []
    groups = _group_neighbours(cells, elements)
    while True:
        grouped = groups.grouped()
        if len(grouped.shapes) == len(groups.shapes):
            break
        groups = grouped
    starts = zip(groups.cells.tolist(), groups.elements.tolist(), strict=True)
    pieces = []
    for (cell, element), blocks in zip(starts, groups.shapes, strict=True):
        pieces.append(Piece(tensor, cell, element, blocks))
    return pieces


class _Groups:
    """Pieces by where they begin and by their blocks, in the order of cells."""

    def __init__(self, cells: _Flat, elements: _Flat, shapes: list[tuple[Block, ...]]) -> None:
        self.cells = cells
        self.elements = elements
        self.shapes = shapes

    def grouped(self) -> _Groups:
        """With pieces of one shape at equal distances as one, as they are met from the first on."""
        cells = np.diff(self.cells).tolist()
        elements = np.diff(self.elements).tolist()
        steps = list(zip(cells, elements, strict=True))
        starts = []
        shapes = []
        at = 0
        for last in self._list_ends(steps):
            # A step before has taken what this one would begin with.
            if last < at:
                continue
            starts.append(at)
            shape = self.shapes[at]
            if last < len(steps) and self.shapes[at + 1] == shape:
                shape = ((last - at + 2, *steps[at]), *shape)
                at = last + 1
            shapes.append(shape)
            at += 1
        return _Groups(self.cells[starts], self.elements[starts], shapes)

    def _list_ends(self, steps: list[tuple[int, int]]) -> list[int]:
        """The last of each stretch of equal steps between pieces of one shape, and the last piece."""
        alike = [one == other for one, other in itertools.pairwise(self.shapes)]
        ends = []
        for i, (step, following) in enumerate(itertools.pairwise(steps)):
            goes_on = alike[i] and alike[i + 1]
            if not goes_on or step != following:
                ends.append(i)
        if steps:
            ends.append(len(steps) - 1)
        return [*ends, len(steps)]


def _group_neighbours(cells: _Flat, elements: _Flat) -> _Groups:
    """Stretches of elements that follow each other in cells that do."""
    across = np.diff(cells) == 1
    along = np.diff(elements) == 1
    ends = np.flatnonzero(~(across & along))
    borders = ends + 1
    starts = np.concatenate([[0], borders])
    counts = np.diff(np.append(starts, len(cells)))
    shapes: list[tuple[Block, ...]] = [((count, 1, 1),) for count in counts.tolist()]
    return _Groups(cells[starts], elements[starts], shapes)
