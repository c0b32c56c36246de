"""Placing: from elements of messages to cells of memory.

1. Memory is rows of cells. A destination tensor lies in one row, from some cell on, in steps; tensors that are views
   of one storage, such as parts of fused weights, lie in the same row.
2. The elements of a message come in ascending order of their numbers. So the elements of a piece are contiguous, and
   only the borders of pieces are searched for.
3. Elements are yielded by row of memory, so that each row is written once.

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
from shardmath.plans.programs.messages import Message
from shardmath.plans.transfers import Transfer
from shardmath.values.changes.routing import as_row
from shardmath.values.changes.windows import Steps, join_steps

__all__ = ["Lying", "PlacedRow", "Receivers"]


class Lying(NamedTuple):
    """The location of a tensor in memory: the integer with which the caller identifies its storage (`row`), the
    position of its first element there, and its strides, both in elements."""

    row: int
    start: int
    strides: tuple[int, ...]


class PlacedRow(NamedTuple):
    """The offsets (`cell`, counted in elements) at which to write received elements in the storage with the number
    `row`. `which` has these elements' indices in the array passed to `Receivers.place`."""

    row: int
    which: Ints
    cell: Ints


class _ReceivedPiece(NamedTuple):
    """A received piece: its elements [first, past) of the message, and its row, first cell and steps in memory."""

    row: int
    first: int
    past: int
    base: int
    steps: Steps


class _Arriving(NamedTuple):
    """The pieces of a message, sorted by row of memory.

    `rows` groups the pieces by row, and `names` has the caller's number of each row. `sizes` and `steps` are indexed by
    dimension and piece. Pieces with fewer dimensions have leading ones of size 1.
    """

    rows: Offsets
    names: tuple[int, ...]
    first: Ints
    past: Ints
    base: Ints
    sizes: Ints
    steps: Ints


class Receivers:
    """An index of messages that a rank receives: finds where in memory to write the elements that arrive."""

    def __init__(self, lying: Mapping[str, Lying], messages: Sequence[Message]) -> None:
        self._arriving = [_index_arriving(lying, message) for message in messages]

    def place(self, message: int, elements: Ints) -> Iterator[PlacedRow]:
        """Yield a PlacedRow per storage: where to write `elements`, ascending numbers of elements in the message with
        the index `message`."""
        arriving = self._arriving[message]
        begin = elements.searchsorted(arriving.first)
        end = elements.searchsorted(arriving.past)
        # By element that is placed: its index in `elements`, and the number of the piece that contains it.
        which, piece = ranges(begin, end)
        cell = _find_cells(arriving, piece, elements[which])
        counts = arriving.rows.sums(end - begin)
        borders = Offsets.of_counts(counts).first.tolist()
        for row, (start, stop) in zip(arriving.names, itertools.pairwise(borders), strict=True):
            if start < stop:
                yield PlacedRow(row, which[start:stop], cell[start:stop])


def _find_cells(arriving: _Arriving, piece: Ints, element: Ints) -> Ints:
    """The cell of each element, given the piece that contains it."""
    cell = arriving.base[piece]
    rest = element - arriving.first[piece]
    first, *others = zip(arriving.sizes, arriving.steps, strict=True)
    # Elements are numbered row by row, so the last dimension's coordinate is the lowest digit.
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
    """Index the pieces of one message for searches."""
    pieces = sorted(_list_pieces(lying, message), key=lambda piece: piece.row)
    row_of_piece = as_row([piece.row for piece in pieces])
    rows = Offsets.of_sorted(row_of_piece)
    sizes, steps = _stack_steps([piece.steps for piece in pieces])
    distinct = row_of_piece[rows.first[:-1]]
    return _Arriving(
        rows=rows,
        names=tuple(distinct.tolist()),
        first=as_row([piece.first for piece in pieces]),
        past=as_row([piece.past for piece in pieces]),
        base=as_row([piece.base for piece in pieces]),
        sizes=sizes,
        steps=steps,
    )


def _list_pieces(lying: Mapping[str, Lying], message: Message) -> Iterator[_ReceivedPiece]:
    """The pieces of a message, in the message's order; `lying` has the location of each destination tensor by name."""
    first = 0
    for piece in message.pieces:
        tensor = lying[piece.dst_tensor]
        past = first + math.prod(piece.shape)
        first_cell, steps = _find_steps(piece, tensor)
        yield _ReceivedPiece(tensor.row, first, past, first_cell, steps)
        first = past


def _stack_steps(by_piece: Sequence[Steps]) -> tuple[Ints, Ints]:
    """Sizes and steps, as arrays indexed by dimension and piece."""
    ndim = max(map(len, by_piece), default=1)
    padded = [[(1, 0)] * (ndim - len(steps)) + list(steps) for steps in by_piece]
    pairs = np.array(padded, np.int64).reshape(len(by_piece), ndim, 2)
    sizes, strides = pairs.transpose(2, 1, 0)
    return sizes, strides


def _find_steps(piece: Transfer, lying: Lying) -> tuple[int, Steps]:
    """The cell of the piece's first element, and the steps through its cells."""
    base = lying.start
    steps = []
    for span, size, step in zip(piece.dst_slices, piece.shape, lying.strides, strict=True):
        base += span.start * step
        steps.append((size, step))
    return base, join_steps(steps)
