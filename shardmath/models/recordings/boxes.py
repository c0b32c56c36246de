"""Boxes: a piece split along the dimensions of its stored and its logical tensor.

1. A block whose steps stay in one dimension of both tensors is an atom. A block that continues in the next dimension
   at the end of the first becomes two atoms. A block that runs across dimensions is unrolled step by step.

>>> piece = Piece("q", 8, 0, ((2, 8, 4), (4, 1, 1)))
>>> align(piece, (3, 8), (2, 4))
[Box(cell=(1, 0), element=(0, 0), atoms=(Atom(number=2, dim=0, step=1, of=0, stride=1),
                                         Atom(number=4, dim=1, step=1, of=1, stride=1)))]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import StoreError
from shardmath.models.recordings.pieces import Block, Piece

__all__ = ["Atom", "Box", "align"]

_Numbers: TypeAlias = tuple[int, ...]

MOST_BOXES = 1 << 16
"""The most boxes of one piece; a piece that needs more is not a product for any practical purpose."""


class Atom(NamedTuple):
    """One axis of a Box, a grid of elements that a stored tensor and a logical (checkpoint) tensor share. The axis has
    `number` elements: at every `step`-th index in dimension `dim` of the stored tensor, and at every `stride`-th index
    in dimension `of` of the logical tensor."""

    number: int
    dim: int
    step: int
    of: int
    stride: int


class Box(NamedTuple):
    """A grid of elements: the position of the first in the stored and in the logical tensor, and its axes (`atoms`)."""

    cell: _Numbers
    element: _Numbers
    atoms: tuple[Atom, ...]


def align(piece: Piece, cells: Sequence[int], elements: Sequence[int]) -> list[Box]:
    """Split `piece`, a map from elements of a logical tensor to positions in a stored tensor, into Boxes: grids whose
    axes run along dimensions of both tensors. `cells` is the shape of the stored tensor, `elements` the shape of the
    logical one.

    Raises StoreError if the piece needs more than 65536 boxes.
    """
    stored = tuple(cells)
    logical = tuple(elements)
    boxes: list[Box] = []
    waiting = [piece]
    while waiting:
        part = waiting.pop()
        box = _find_box(part, stored, logical)
        if box is None:
            waiting += _unroll(part)
        else:
            boxes.append(box)
        if len(boxes) + len(waiting) > MOST_BOXES:
            what = (
                f"{piece.tensor!r} {logical} needs more than {MOST_BOXES} boxes in shape {stored}"
            )
            raise StoreError(f"{what}; make the loader copy slices along its dimensions")
    return boxes


def _unroll(piece: Piece) -> Iterator[Piece]:
    """A piece for each step of the outermost block."""
    (count, cell_stride, element_stride), *rest = piece.blocks
    # One more than `align` allows is enough for it to raise.
    for i in range(min(count, MOST_BOXES + 1)):
        cell = piece.cell + i * cell_stride
        element = piece.element + i * element_stride
        yield Piece(piece.tensor, cell, element, tuple(rest))


def _find_box(piece: Piece, cells: _Numbers, elements: _Numbers) -> Box | None:
    """The piece as a box in tensors of the shapes `cells` and `elements`; None if a block runs across dimensions, or if
    steps of several blocks together do. The order of atoms has no meaning."""
    cell = _unravel(piece.cell, cells)
    element = _unravel(piece.element, elements)
    atoms: list[Atom] = []
    waiting = list(reversed(piece.blocks))
    while waiting:
        block = waiting.pop()
        count, cell_stride, element_stride = block
        # The number of steps in one dimension of both tensors.
        inner = _find_inner(count, cell_stride, cells, cell)
        if inner is not None:
            inner = _find_inner(inner, element_stride, elements, element)
        if inner is None:
            return None
        if inner < count:
            # `inner` is above 1 and divides `count`, so both halves are shorter, and the loop ends.
            waiting += _split_block(block, inner)
        else:
            atoms.append(_find_atom(block, cells, elements))
    box = Box(cell, element, tuple(atoms))
    return box if _is_inside(box, cells, elements) else None


def _find_atom(block: Block, cells: _Numbers, elements: _Numbers) -> Atom:
    """The atom of a block whose steps stay in one dimension of both tensors."""
    count, cell_stride, element_stride = block
    stored_dim, step = _find_step(cell_stride, cells)
    logical_dim, stride = _find_step(element_stride, elements)
    return Atom(count, stored_dim, step, logical_dim, stride)


def _split_block(block: Block, inner: int) -> tuple[Block, Block]:
    """The block as an outer block of blocks of `inner` steps each."""
    count, cell_stride, element_stride = block
    outer = count // inner, cell_stride * inner, element_stride * inner
    return outer, (inner, cell_stride, element_stride)


def _unravel(number: int, shape: _Numbers) -> _Numbers:
    """The row-major coordinates of a flat number."""
    coords = []
    for n in reversed(shape):
        number, coordinate = divmod(number, n)
        coords.append(coordinate)
    return tuple(reversed(coords))


def _find_step(stride: int, shape: _Numbers) -> tuple[int, int]:
    """(dimension, steps along it) of a flat stride; 0 steps if it is not along one dimension. The dimension is -1 for a
    stride below 1, or as long as the tensor.
    """
    inner = 1
    for dim in reversed(range(len(shape))):
        outer = inner * shape[dim]
        if inner <= stride < outer:
            steps, rest = divmod(stride, inner)
            return dim, 0 if rest else steps
        inner = outer
    return -1, 0


def _find_inner(count: int, stride: int, shape: _Numbers, start: _Numbers) -> int | None:
    """Of `count` steps of a flat stride, the number that stay in one dimension before they go on in the next; None if
    no such number divides `count`."""
    dim, step = _find_step(stride, shape)
    if not step:
        return None
    n = shape[dim]
    fits_in_dim = start[dim] + (count - 1) * step < n
    if fits_in_dim:
        return count
    # Steps continue in the next dimension only if they fill this one from its beginning.
    inner, rest = divmod(n, step)
    if rest or start[dim] >= step or count % inner:
        return None
    # Of blocks of one step, the outer block would be the whole block again.
    return inner if inner > 1 else None


def _is_inside(box: Box, cells: _Numbers, elements: _Numbers) -> bool:
    """Whether the last cell and element are inside their shapes: steps along one dimension may add up to more."""
    last_cell = list(box.cell)
    last_element = list(box.element)
    for atom in box.atoms:
        steps = atom.number - 1
        last_cell[atom.dim] += steps * atom.step
        last_element[atom.of] += steps * atom.stride
    return _fits(last_cell, cells) and _fits(last_element, elements)


def _fits(coords: Sequence[int], shape: _Numbers) -> bool:
    """Whether the coordinates are inside the shape."""
    return all(coordinate < n for coordinate, n in zip(coords, shape, strict=True))
