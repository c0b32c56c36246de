"""Boxes: a piece taken apart along the dimensions of the stored tensor and of the logical one.

1. A block whose steps stay in one dimension on both sides is an atom. One that goes on in the next dimension where
   the first ends is two. One that runs across dimensions is taken step by step.

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
"""Into which one piece is taken apart; what needs more is no product for any practical purpose."""


class Atom(NamedTuple):
    """A number of steps along one dimension of the stored tensor, which are strides along one of the logical."""

    number: int
    dim: int
    step: int
    of: int
    stride: int


class Box(NamedTuple):
    """A piece by coordinates: where it begins, and its steps from there."""

    cell: _Numbers
    element: _Numbers
    atoms: tuple[Atom, ...]


def align(piece: Piece, cells: Sequence[int], elements: Sequence[int]) -> list[Box]:
    """The piece along the dimensions of a stored and of a logical tensor of these shapes.

    Raises StoreError where that takes more than 65536 boxes.
    """
    stored = tuple(cells)
    logical = tuple(elements)
    found: list[Box] = []
    waiting = [piece]
    while waiting:
        one = waiting.pop()
        box = _find_box(one, stored, logical)
        if box is None:
            waiting += _unroll(one)
        else:
            found.append(box)
        if len(found) + len(waiting) > MOST_BOXES:
            raise StoreError(f"{piece.tensor!r} lies across the dimensions of shape {tuple(cells)}")
    return found


def _unroll(piece: Piece) -> Iterator[Piece]:
    """A piece for each step of the outermost block."""
    (count, cells, elements), *rest = piece.blocks
    for i in range(min(count, MOST_BOXES + 1)):
        cell = piece.cell + i * cells
        element = piece.element + i * elements
        blocks = tuple(rest)
        yield Piece(piece.tensor, cell, element, blocks)


def _find_box(piece: Piece, cells: _Numbers, elements: _Numbers) -> Box | None:
    """The piece as a box; None where a block runs across dimensions."""
    cell = _unravel(piece.cell, cells)
    element = _unravel(piece.element, elements)
    atoms: list[Atom] = []
    waiting = list(reversed(piece.blocks))
    while waiting:
        block = waiting.pop()
        count, across, along = block
        inner = _find_inner(count, across, cells, cell)
        if inner is not None:
            inner = _find_inner(inner, along, elements, element)
        if inner is None:
            return None
        if inner < count:
            waiting += _divide(block, inner)
        else:
            atoms.append(_find_atom(block, cells, elements))
    box = Box(cell, element, tuple(atoms))
    return box if _is_inside(box, cells, elements) else None


def _find_atom(block: Block, cells: _Numbers, elements: _Numbers) -> Atom:
    """The block, whose steps stay in one dimension on both sides."""
    count, across, along = block
    dim, step = _find_step(across, cells)
    of, stride = _find_step(along, elements)
    return Atom(count, dim, step, of, stride)


def _divide(block: Block, inner: int) -> tuple[Block, Block]:
    """The block as one of blocks of so many steps each."""
    count, cells, elements = block
    outer = count // inner, cells * inner, elements * inner
    return outer, (inner, cells, elements)


def _unravel(number: int, shape: _Numbers) -> _Numbers:
    """The row-major coordinates of a flat number."""
    found = []
    for n in reversed(shape):
        number, at = divmod(number, n)
        found.append(at)
    return tuple(reversed(found))


def _find_step(stride: int, shape: _Numbers) -> tuple[int, int]:
    """(dimension, steps along it) of a flat stride; no steps where it is not along one."""
    inner = 1
    for dim in reversed(range(len(shape))):
        outer = inner * shape[dim]
        if inner <= stride < outer:
            steps, rest = divmod(stride, inner)
            return dim, 0 if rest else steps
        inner = outer
    return -1, 0


def _find_inner(count: int, stride: int, shape: _Numbers, at: _Numbers) -> int | None:
    """How many of the steps stay in one dimension before all go on in the next; None where they do not divide."""
    dim, step = _find_step(stride, shape)
    if not step:
        return None
    n = shape[dim]
    if at[dim] + (count - 1) * step < n:
        return count
    inner, rest = divmod(n, step)
    if rest or at[dim] >= step or count % inner:
        return None
    return inner if inner > 1 else None


def _is_inside(box: Box, cells: _Numbers, elements: _Numbers) -> bool:
    """Whether all steps together stay inside every dimension."""
    last_cell = list(box.cell)
    last_element = list(box.element)
    for atom in box.atoms:
        steps = atom.number - 1
        last_cell[atom.dim] += steps * atom.step
        last_element[atom.of] += steps * atom.stride
    return _fits(last_cell, cells) and _fits(last_element, elements)


def _fits(at: Sequence[int], shape: _Numbers) -> bool:
    """Whether the coordinates are inside the shape."""
    inside = (position < n for position, n in zip(at, shape, strict=True))
    return all(inside)
