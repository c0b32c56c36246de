"""Views: the pieces of one logical tensor as a view of its stored tensor, with the positions in the view.

1. A dimension of the logical tensor is a dimension of the stored one, in any order, with any positions. If rows were
   taken one by one, the stored dimension is the one whose positions identify the rows.
2. The elements in the view are a product of positions of each dimension. Anything else is an error.
3. Here as in an `Atom`, `dim` is a dimension of the stored tensor, and `of` one of the logical tensor.

>>> view = RecordedView(stored=(3, 2), shape=(2, 3), pieces=[Piece("q", 0, 0, ((3, 2, 1), (2, 1, 3)))])
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
"""The most segments of one dimension, such as rows of a vocabulary that alternate with others."""
LOAD_SLICES = "make the loader copy slices along its dimensions"
NO_PRODUCT = (
    "its elements here are not all combinations of some positions of each dimension, such as some "
    f"rows of some columns, as a layout needs them; {LOAD_SLICES}"
)


class RecordedView:
    """The indices and slices, one per dimension, that select the elements of one logical (checkpoint) tensor in a
    stored tensor. The constructor finds them from `pieces`, which list these elements and their positions in the stored
    tensor.

    Raises StoreError if the pieces do not form a view. `missing` is the number of dimensions of 1 that the stored
    tensor lacks; `cut` and `order` are as in a Slot; `runs` are the positions in each dimension of the view.
    """

    def __init__(self, stored: _Shape, shape: _Shape, pieces: Sequence[Piece]) -> None:
        self.stored = stored
        self.boxes: list[Box] = []
        for piece in pieces:
            self.boxes += align(piece, stored, shape)
        stored_dims = _pair(self.boxes)
        self.missing = _pair_rest(stored_dims, len(stored), len(shape))
        # The view has the stored dimensions in ascending order: the logical dimension along each.
        self.order = tuple(sorted(stored_dims, key=stored_dims.__getitem__))
        all_runs = [self._find_runs(d, stored_dims[d]) for d in range(len(shape))]
        _check_product(all_runs, self.boxes)
        trimmed = [trim(runs) for runs in all_runs]
        self.runs = tuple(runs for _, runs in trimmed)
        self._spans = {stored_dims[d]: view.span for d, (view, _) in enumerate(trimmed)}

    def cut(self, ndim: int) -> tuple[int | slice, ...]:
        """Return the index tuple that selects the view from the stored tensor. Before indexing, the stored tensor must
        be reshaped to `ndim` dimensions, by appending dimensions of size 1."""
        cut: list[int | slice] = [0] * ndim
        # In dimensions that are not of the view, all boxes have one position.
        cut[: len(self.stored)] = self.boxes[0].cell
        for dim, span in self._spans.items():
            cut[dim] = span
        return tuple(cut)

    def _find_runs(self, logical_dim: int, dim: int) -> Runs:
        """For each position of stored dimension `dim`, that of the logical dimension, or a hole."""
        # A dimension that the stored tensor lacks (`_pair_rest`): all boxes have the same one position in it.
        if dim >= len(self.stored):
            return Runs(((0, self.boxes[0].element[logical_dim], 1),), 1)
        # Boxes of a product share their stretches of each dimension.
        stretches = dict.fromkeys(_take_stretch(box, dim, logical_dim) for box in self.boxes)
        segments = []
        for stretch in stretches:
            segments += _list_segments(*stretch)
        try:
            return _make_runs(segments, self.stored[dim])
        except RunsError:
            raise StoreError(NO_PRODUCT) from None


def _make_runs(segments: list[Segment], length: int) -> Runs:
    """The runs of these segments, which may overlap if they agree. Raises RunsError if they disagree."""
    try:
        return Runs(segments, length)
    except RunsError:
        # Boxes may be cut at different positions: single positions are equal where the boxes agree.
        positions = set()
        for cell, element, n in segments:
            positions |= {(cell + i, element + i, 1) for i in range(n)}
        return Runs(positions, length)


def _pair(boxes: Sequence[Box]) -> dict[int, int]:
    """The stored dimension of each logical dimension of which the boxes have more than one position."""
    stored_dims: dict[int, int] = {}
    for logical_dim, dim in _list_stepped(boxes):
        if stored_dims.setdefault(logical_dim, dim) != dim:
            what = f"its dimension {logical_dim} lies along several dimensions of the stored tensor"
            raise StoreError(f"{what}; {LOAD_SLICES}")
    if len(set(stored_dims.values())) != len(stored_dims):
        what = "several of its dimensions lie along one dimension of the stored tensor"
        raise StoreError(f"{what}; {LOAD_SLICES}")
    _pair_moving(stored_dims, boxes)  # adds the dimensions along which no box has a step
    return stored_dims


def _pair_moving(stored_dims: dict[int, int], boxes: Sequence[Box]) -> None:
    """Add to `stored_dims` (stored dimension by logical one) the dimensions in which boxes begin at several positions.
    Raises StoreError if one is left."""
    unpaired = _list_moving([box.cell for box in boxes], stored_dims.values())
    for logical_dim in _list_moving([box.element for box in boxes], stored_dims):
        matching = [dim for dim in unpaired if _is_bijective(boxes, dim, logical_dim)]
        if not matching:
            raise StoreError(NO_PRODUCT)
        stored_dims[logical_dim] = matching[0]
        unpaired.remove(matching[0])
    if unpaired:
        # A stored dimension is left where a row of elements goes on in the next stored row.
        raise StoreError(NO_PRODUCT)


def _is_bijective(boxes: Sequence[Box], dim: int, logical_dim: int) -> bool:
    """Whether the first positions of boxes in the stored and in the logical dimension determine each other."""
    pairs = {(box.cell[dim], box.element[logical_dim]) for box in boxes}
    cells = {cell for cell, _ in pairs}
    elements = {element for _, element in pairs}
    return len(cells) == len(pairs) == len(elements)


def _list_stepped(boxes: Sequence[Box]) -> set[tuple[int, int]]:
    """(logical dimension, stored dimension) of all steps."""
    return {(atom.of, atom.dim) for box in boxes for atom in box.atoms}


def _list_moving(starts: Sequence[_Shape], paired: Iterable[int]) -> list[int]:
    """The dimensions, except those already paired, in which the starts have several positions."""
    known = set(paired)
    by_dim = enumerate(zip(*starts, strict=True))
    return [d for d, positions in by_dim if d not in known and len(set(positions)) > 1]


def _pair_rest(stored_dims: dict[int, int], stored: int, logical: int) -> int:
    """Pair the remaining logical dimensions, each of one position, with the `stored` dimensions that are left; return
    how many dimensions of 1 have to be added behind these."""
    free = [dim for dim in range(stored) if dim not in stored_dims.values()]
    missing = 0
    for d in reversed(range(logical)):
        if d in stored_dims:
            continue
        if free:
            stored_dims[d] = free.pop()
        else:
            stored_dims[d] = stored + missing
            missing += 1
    return missing


def _take_stretch(box: Box, dim: int, of: int) -> tuple[int, int, tuple[Atom, ...]]:
    """(first position in stored dimension `dim`, first in logical `of`, atoms) of the box."""
    atoms = tuple(atom for atom in box.atoms if atom.dim == dim)
    return box.cell[dim], box.element[of], atoms


def _list_segments(cell: int, element: int, atoms: Sequence[Atom]) -> list[Segment]:
    """The segments of a stretch (ranges of positions that are contiguous in both dimensions). An atom that steps by 1
    in both is the length of each; there is at most one, since atoms do not overlap. Raises StoreError for too many."""
    starts = [(cell, element)]
    length = 1
    strided = [atom.number for atom in atoms if not atom.step == atom.stride == 1]
    count = math.prod(strided)
    if count > MOST_SEGMENTS:
        what = f"one of its dimensions is in {count} segments, more than {MOST_SEGMENTS}"
        raise StoreError(f"{what}; make the loader copy longer slices")
    for atom in atoms:
        if atom.step == atom.stride == 1:
            length = atom.number
            continue
        steps = [(i * atom.step, i * atom.stride) for i in range(atom.number)]
        starts = [
            (cell + across, element + along) for cell, element in starts for across, along in steps
        ]
    return [(cell, element, length) for cell, element in starts]


def _check_product(runs: Sequence[Runs], boxes: Sequence[Box]) -> None:
    """Raise StoreError unless the boxes together are all combinations of these positions."""
    # Boxes share no cell, and are inside the product: they are all of it if they have as many cells.
    cells = sum(math.prod(atom.number for atom in box.atoms) for box in boxes)
    if math.prod(dim_runs.size for dim_runs in runs) != cells:
        raise StoreError(NO_PRODUCT)
