"""Placing: from elements of messages to cells of memory.

1. Memory is rows of cells. A destination tensor lies in one of them, from some cell on, in steps; tensors that are
   views of one, as of fused weights, lie in the same.
2. The elements of a message come in ascending order of their numbers. So those of a piece stand together, and only
   the borders of pieces are searched for.
3. Elements are given row by row of memory, so that each row is written once.

>>> from shardmath import Layout, Mesh, plan
>>> from shardmath.plans.programs.part import make_parts
>>> mesh = Mesh(tp=2)
>>> parts = make_parts(plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)")))
>>> (message,) = parts[0].rounds[0].sends
>>> receivers = Receivers({"": Lying(0, 5, (1, 1))}, [message])
>>> list(receivers.place(0, np.array([1])))
[PlacedRow(row=0, which=array([0]), cell=array([6]))]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.plans.plan import Transfer
from shardmath.plans.programs.messages import Message
from shardmath.values.changes.routing import as_row
from shardmath.values.changes.windows import Steps, join_steps

__all__ = ["Lying", "PlacedRow", "Receivers"]


class Lying(NamedTuple):
    """How a tensor lies: in which row of memory, from which of its cells on, and how many cells are between two."""

    row: int
    start: int
    strides: tuple[int, ...]


class PlacedRow(NamedTuple):
    """A row of memory, which of the elements come into it, and into which of its cells."""

    row: int
    which: Ints
    cell: Ints


class _Piece(NamedTuple):
    """A piece where it arrives: its first element in the message, and from which cell on it lies, in which steps."""

    row: int
    first: int
    past: int
    base: int
    steps: Steps


class _Arriving(NamedTuple):
    """The pieces of a message, in the order of their rows of memory.

    `sizes` and `steps` are by dimension and piece. A piece of fewer dimensions than others has some of one
    cell in front.
    """

    rows: Offsets
    names: tuple[int, ...]
    first: Ints
    past: Ints
    base: Ints
    sizes: Ints
    steps: Ints


class Receivers:
    """What comes into a rank's destination tensors, which lie like these, in these messages."""

    def __init__(self, lying: Mapping[str, Lying], messages: Sequence[Message]) -> None:
        self._arriving = [_index_arriving(lying, message) for message in messages]

    def place(self, message: int, elements: Ints) -> Iterator[PlacedRow]:
        """Where these elements of the message come; their numbers ascend."""
        arriving = self._arriving[message]
        begin = elements.searchsorted(arriving.first)
        end = elements.searchsorted(arriving.past)
        which, piece = ranges(begin, end)
        cell = _find_cells(arriving, piece, elements[which])
        counts = arriving.rows.sums(end - begin)
        borders = Offsets.of_counts(counts).first.tolist()
        for name, ends in zip(arriving.names, itertools.pairwise(borders), strict=True):
            here = slice(*ends)
            some = which[here]
            if len(some):
                yield PlacedRow(name, some, cell[here])


def _find_cells(arriving: _Arriving, piece: Ints, element: Ints) -> Ints:
    """The cell of each element, of the piece beside it."""
    cell = arriving.base[piece]
    rest = element - arriving.first[piece]
    first, *others = zip(arriving.sizes, arriving.steps, strict=True)
    # From the last dimension on, as elements are numbered row by row.
    for sizes, steps in reversed(others):
        size = sizes[piece]
        quotient = rest // size
        offset = rest - quotient * size
        cell += offset * steps[piece]
        rest = quotient
    _, steps = first
    cell += rest * steps[piece]
    return cell


def _index_arriving(lying: Mapping[str, Lying], message: Message) -> _Arriving:
    """The pieces of one message, made ready to be asked."""
    pieces = sorted(_list_pieces(lying, message), key=lambda one: one.row)
    names = as_row([one.row for one in pieces])
    rows = Offsets.of_sorted(names)
    sizes, by_dimension = _stack_steps([one.steps for one in pieces])
    each = names[rows.first[:-1]]
    return _Arriving(
        rows=rows,
        names=tuple(each.tolist()),
        first=as_row([one.first for one in pieces]),
        past=as_row([one.past for one in pieces]),
        base=as_row([one.base for one in pieces]),
        sizes=sizes,
        steps=by_dimension,
    )


def _list_pieces(lying: Mapping[str, Lying], message: Message) -> Iterator[_Piece]:
    """The pieces of a message, in their order."""
    first = 0
    for piece in message.pieces:
        here = lying[piece.dst_tensor]
        past = first + math.prod(piece.shape)
        base, steps = _find_steps(piece, here)
        yield _Piece(here.row, first, past, base, steps)
        first = past


def _stack_steps(each: Sequence[Steps]) -> tuple[Ints, Ints]:
    """Sizes and steps by dimension and piece."""
    ndim = max(map(len, each), default=1)
    padded = []
    for joined in each:
        missing = ndim - len(joined)
        before = [(1, 0)] * missing
        padded.append([*before, *joined])
    both = np.array(padded, np.int64)
    by_piece = both.reshape(len(each), ndim, 2)
    sizes, steps = by_piece.transpose(2, 1, 0)
    return sizes, steps


def _find_steps(piece: Transfer, lying: Lying) -> tuple[int, Steps]:
    """The cell of the piece's first element, and the steps from there on."""
    base = lying.start
    steps = []
    for one, size, step in zip(piece.dst_slices, piece.shape, lying.strides, strict=True):
        base += one.start * step
        steps.append((size, step))
    return base, join_steps(steps)
