"""Cells: which elements of stored tensors are written, as an exact set.

A tensor's cells are kept as their borders: where the set begins, ends, begins again, and so on. How what writes them is
divided leaves no trace, so two trainers that name the same tensors otherwise write the same cells.

>>> from shardmath.models.recordings.pieces import Piece
>>> whole = Cells.of({"qkv": [Piece("qkv", 0, 0, ((12, 1, 1),))]})
>>> parts = Cells.of({"qkv": [Piece("q", 0, 0, ((4, 1, 1),)), Piece("kv", 4, 0, ((8, 1, 1),))]})
>>> whole == parts, bool(whole - parts)
(True, False)
>>> whole - Cells.of({"qkv": [Piece("k", 4, 0, ((4, 1, 1),))]})
Cells({'qkv': ((0, 4), (8, 12))})
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.models.recordings.pieces import Piece

__all__ = ["Cells"]

_NONE: Ints = np.zeros(0, np.int64)


class Cells:
    """A set of elements of several stored tensors, held as positions in each tensor. The tensors' names are any
    hashable values; an empty set counts as False.
    """

    def __init__(self, borders: Mapping[Hashable, Ints]) -> None:
        self._borders = {name: positions for name, positions in borders.items() if len(positions)}

    @classmethod
    def of(cls, pieces: Mapping[Hashable, Iterable[Piece]]) -> Cells:
        """Return the set of elements of stored tensors that `pieces` cover. `pieces` maps the name of a stored tensor
        to its Pieces (strided sets of elements), which must not overlap.
        """
        return cls({name: _find_borders(filled) for name, filled in pieces.items()})

    def __or__(self, other: Cells) -> Cells:
        return self._combine(other, np.logical_or)

    def __sub__(self, other: Cells) -> Cells:
        return self._combine(other, np.greater)

    def __bool__(self) -> bool:
        return bool(self._borders)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cells) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        spans = {
            name: tuple(map(tuple, positions.reshape(-1, 2).tolist()))
            for name, positions in self._borders.items()
        }
        return f"Cells({spans})"

    @property
    def _key(self) -> frozenset[tuple[Hashable, bytes]]:
        """The borders of the ranges of cells, by tensor: equal for equal sets."""
        return frozenset((name, positions.tobytes()) for name, positions in self._borders.items())

    def _combine(self, other: Cells, choose: Callable[[Bools, Bools], Bools]) -> Cells:
        """The set of cells for which `choose` is true, given whether each is in this set and in the other one."""
        combined = {}
        for name in {**self._borders, **other._borders}:
            own_borders = self._borders.get(name, _NONE)
            other_borders = other._borders.get(name, _NONE)
            positions = np.union1d(own_borders, other_borders)
            # A position is inside a set if an odd number of the set's borders are at or before it.
            is_in_own = np.searchsorted(own_borders, positions, "right") % 2 == 1
            is_in_other = np.searchsorted(other_borders, positions, "right") % 2 == 1
            chosen = choose(is_in_own, is_in_other)
            # Borders are where `chosen` changes.
            combined[name] = positions[np.diff(chosen, prepend=False)]
        return Cells(combined)


def _find_borders(pieces: Iterable[Piece]) -> Ints:
    """The positions at which the pieces' ranges of cells begin and end, ascending."""
    ends = [_NONE]
    for piece in pieces:
        # With the cells as its elements, so that blocks that continue each other in memory are joined, even if their
        # elements come in another order.
        cells = Piece(
            "", piece.cell, 0, tuple((n, stride, stride) for n, stride, _ in piece.blocks)
        )
        *outer, innermost = cells.blocks or ((1, 1, 1),)
        count, stride, _ = innermost
        if stride != 1:
            # Each cell is a range of its own.
            outer, count = [*outer, innermost], 1
        starts = Piece("", piece.cell, 0, tuple(outer)).cells
        ends += [starts, starts + count]
    borders, counts = np.unique(np.concatenate(ends), return_counts=True)
    # A position that is there twice ends one range and begins the next: no border.
    distinct: Ints = borders[counts == 1]
    return distinct
