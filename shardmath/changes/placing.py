"""Placing: from elements of messages to cells of memory.

1. Memory is rows of cells. A destination tensor lies in one of them, from some cell on, in steps; tensors that are views
   of one, as of fused weights, lie in the same.
2. The elements of a message come in ascending order of their numbers. So those of a piece stand together, and only the
   borders of pieces are searched for.
3. Elements are given row by row of memory, so that each row is written once.

>>> from shardmath import Layout, Mesh, plan
>>> from shardmath.programs.part import make_parts
>>> mesh = Mesh(tp=2)
>>> parts = make_parts(plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)")))
>>> (message,) = parts[0].rounds[0].sends
>>> receivers = Receivers({"": Lying(0, 5, (1, 1))}, [message])
>>> list(receivers.place(0, np.array([1])))
[Placed(row=0, which=array([0]), cell=array([6]))]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.changes.routing import as_row
from shardmath.changes.windows import Steps, join_steps
from shardmath.plans.plan import Transfer
from shardmath.programs.messages import Message

__all__ = ["Lying", "Placed", "Receivers"]


class Lying(NamedTuple):
    """How a tensor lies: in which row of memory, from which of its cells on, and how many cells are between two."""

    row: int
    start: int
    strides: tuple[int, ...]


class Placed(NamedTuple):
    """A row of memory, which of the elements come into it, and into which of its cells."""

    row: int
    which: Ints
    cell: Ints


class _Piece(NamedTuple):
    """A piece where it arrives: its first element in the message, and from which cell on it lies, in which steps."""

    row: int
    first: int
    count: int
    base: int
    steps: Steps


class _Arriving(NamedTuple):
    """The pieces of a message, in the order of their rows of memory.

    `sizes` and `steps` are by dimension and piece: a piece of fewer dimensions than others has some of one cell in front.
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

    def place(self, message: int, elements: Ints) -> Iterator[Placed]:
        """Where these elements of the message come; their numbers ascend."""
        arriving = self._arriving[message]
        begin = elements.searchsorted(arriving.first)
        end = elements.searchsorted(arriving.past)
        which, piece = ranges(begin, end)
        cell = arriving.base[piece]
        rest = elements[which] - arriving.first[piece]
        # From the last dimension on, as elements are numbered row by row.
        for size, step in zip(arriving.sizes[:0:-1], arriving.steps[:0:-1], strict=True):
            quotient = rest // size[piece]
            cell += (rest - quotient * size[piece]) * step[piece]
            rest = quotient
        cell += rest * arriving.steps[0][piece]
        borders = np.append(0, (end - begin).cumsum())[arriving.rows.first]
        for name, first, past in zip(arriving.names, borders[:-1], borders[1:], strict=True):
            if first < past:
                yield Placed(name, which[first:past], cell[first:past])


def _index_arriving(lying: Mapping[str, Lying], message: Message) -> _Arriving:
    """The pieces of one message, made ready to be asked."""
    pieces = []
    first = 0
    for piece in message.pieces:
        count = math.prod(piece.shape)
        base, steps = _find_steps(piece, lying[piece.dst_tensor])
        pieces.append(_Piece(lying[piece.dst_tensor].row, first, count, base, steps))
        first += count
    pieces.sort(key=lambda one: one.row)
    ndim = max((len(one.steps) for one in pieces), default=1)
    padded = [((1, 0),) * (ndim - len(one.steps)) + one.steps for one in pieces]
    dims = np.array(padded, np.int64).reshape(len(pieces), ndim, 2)
    firsts = as_row([one.first for one in pieces])
    names = as_row([one.row for one in pieces])
    rows = Offsets.of_sorted(names)
    return _Arriving(
        rows=rows,
        names=tuple(names[rows.first[:-1]].tolist()),
        first=firsts,
        past=firsts + as_row([one.count for one in pieces]),
        base=as_row([one.base for one in pieces]),
        sizes=dims[:, :, 0].T,
        steps=dims[:, :, 1].T,
    )


def _find_steps(piece: Transfer, lying: Lying) -> tuple[int, Steps]:
    """The cell of the piece's first element, and the steps from there on."""
    base = lying.start
    steps = []
    for one, size, step in zip(piece.dst_slices, piece.shape, lying.strides, strict=True):
        base += one.start * step
        steps.append((size, step))
    return base, join_steps(steps)
