"""Views: the pieces of one logical tensor in one stored tensor, as a view of that and what the view holds.

1. A dimension of the logical tensor is a dimension of the stored one, in any order, with any positions. Single rows
   that were taken by their number say by their number which dimension they are of.
2. What is held is a product of positions of each dimension. Anything else is an error.

>>> view = RecordedView((3, 2), (2, 3), [Piece("q", 0, 0, ((3, 2, 1), (2, 1, 3)))])
>>> view.order, view.cut(2)
((1, 0), (slice(0, 3, 1), slice(0, 2, 1)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardmath.base.errors import RunsError, StoreError
from shardmath.layouts.algebra.runs import Runs, Segment
from shardmath.layouts.fitting import trim
from shardmath.models.recordings.boxes import Atom, Box, align
from shardmath.models.recordings.pieces import Piece

__all__ = ["RecordedView"]

_Shape: TypeAlias = tuple[int, ...]

MOST_SEGMENTS = 1 << 20
"""Into which one dimension is taken apart, as rows of a vocabulary that alternate with others."""
NO_PRODUCT = "its cells are no product of positions of each dimension"


class RecordedView:
    """Pieces of a tensor in a stored one. Raises StoreError where they are no view, and no product.

    `missing` are dimensions of 1 that the stored tensor has too few; `cut` and `order` are those of a slot, `runs`
    what lies where in each dimension of the view.
    """

    def __init__(self, stored: _Shape, shape: _Shape, pieces: Sequence[Piece]) -> None:
        self.stored = stored
        self.boxes: list[Box] = []
        for piece in pieces:
            self.boxes += align(piece, stored, shape)
        shown = _pair(self.boxes)
        self.missing = _pair_rest(shown, len(stored), len(shape))
        self.order = tuple(sorted(shown, key=shown.__getitem__))
        found = [self._find_runs(of, shown[of]) for of in range(len(shape))]
        _check_product(found, self.boxes)
        trimmed = [trim(runs) for runs in found]
        self.runs = tuple(runs for _, runs in trimmed)
        self._spans = {shown[of]: view.span for of, (view, _) in enumerate(trimmed)}

    def cut(self, ndim: int) -> tuple[int | slice, ...]:
        """What takes it out of the stored tensor, to which dimensions of 1 may have been added."""
        cut: list[int | slice] = [0] * ndim
        cut[: len(self.stored)] = self.boxes[0].cell
        for dim, span in self._spans.items():
            cut[dim] = span
        return tuple(cut)

    def _find_runs(self, of: int, dim: int) -> Runs:
        """Which positions of a logical dimension lie at which of the stored one."""
        if dim >= len(self.stored):
            only = self.boxes[0].element[of]
            return Runs(((0, only, 1),), 1)
        # Boxes of a product have few stretches of each dimension.
        stretches = dict.fromkeys(_take_stretch(box, dim, of) for box in self.boxes)
        segments = []
        for stretch in stretches:
            segments += _list_segments(*stretch)
        try:
            return _join(segments, self.stored[dim])
        except RunsError:
            raise StoreError(NO_PRODUCT) from None


def _join(segments: list[Segment], length: int) -> Runs:
    """The segments together, where those of boxes that were cut otherwise may meet. Raises RunsError."""
    try:
        return Runs(segments, length)
    except RunsError:
        positions = set()
        for cell, element, n in segments:
            positions |= {(cell + i, element + i, 1) for i in range(n)}
        return Runs(positions, length)


def _pair(boxes: Sequence[Box]) -> dict[int, int]:
    """The stored dimension that shows each logical one of which there is more than one position."""
    shown: dict[int, int] = {}
    for of, dim in _list_shown(boxes):
        if shown.setdefault(of, dim) != dim:
            raise StoreError(f"its dimension {of} lies along several stored ones")
    if len(set(shown.values())) != len(shown):
        raise StoreError("several of its dimensions lie along a stored one")
    dims = _list_moving([box.cell for box in boxes], shown.values())
    for of in _list_moving([box.element for box in boxes], shown):
        found = [dim for dim in dims if _follows(boxes, dim, of)]
        if not found:
            raise StoreError(NO_PRODUCT)
        shown[of] = found[0]
        dims.remove(found[0])
    return shown


def _follows(boxes: Sequence[Box], dim: int, of: int) -> bool:
    """Whether where a box begins in a logical dimension is said by where it begins in a stored one."""
    pairs = {(box.cell[dim], box.element[of]) for box in boxes}
    cells = {cell for cell, _ in pairs}
    elements = {element for _, element in pairs}
    return len(cells) == len(pairs) == len(elements)


def _list_shown(boxes: Sequence[Box]) -> set[tuple[int, int]]:
    """(logical dimension, stored dimension) of all steps."""
    found = set()
    for box in boxes:
        found |= {(atom.of, atom.dim) for atom in box.atoms}
    return found


def _list_moving(starts: Sequence[_Shape], but: Iterable[int]) -> list[int]:
    """The dimensions in which not all begin at one position, but for these."""
    known = set(but)
    moving = []
    for d, positions in enumerate(zip(*starts, strict=True)):
        if d not in known and len(set(positions)) > 1:
            moving.append(d)
    return moving


def _pair_rest(shown: dict[int, int], stored: int, logical: int) -> int:
    """Pair the logical dimensions of one position with any others; how many had to be added for that."""
    free = [d for d in range(stored) if d not in shown.values()]
    missing = 0
    for of in reversed(range(logical)):
        if of in shown:
            continue
        if free:
            shown[of] = free.pop()
        else:
            shown[of] = stored + missing
            missing += 1
    return missing


def _take_stretch(box: Box, dim: int, of: int) -> tuple[int, int, tuple[Atom, ...]]:
    """Where the box begins in one dimension, and its steps there."""
    atoms = tuple(atom for atom in box.atoms if atom.dim == dim)
    return box.cell[dim], box.element[of], atoms


def _list_segments(cell: int, element: int, atoms: Sequence[Atom]) -> list[Segment]:
    """All steps of a stretch; those one by one are one segment."""
    starts = [(cell, element)]
    length = 1
    single = [atom.number for atom in atoms if not atom.step == atom.stride == 1]
    if math.prod(single) > MOST_SEGMENTS:
        raise StoreError(f"a dimension of it is in more than {MOST_SEGMENTS} parts")
    for atom in atoms:
        if atom.step == atom.stride == 1:
            length = atom.number
            continue
        steps = [(i * atom.step, i * atom.stride) for i in range(atom.number)]
        starts = [(at + across, of + along) for at, of in starts for across, along in steps]
    return [(at, of, length) for at, of in starts]


def _check_product(runs: Sequence[Runs], boxes: Sequence[Box]) -> None:
    """Raise StoreError unless the boxes are all combinations of these positions."""
    # Boxes share no cell, and all are inside the product: they are all of it if they are as many.
    held = 0
    for box in boxes:
        held += math.prod(atom.number for atom in box.atoms)
    positions = [own.size for own in runs]
    if math.prod(positions) != held:
        raise StoreError(NO_PRODUCT)
