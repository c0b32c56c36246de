"""Routing: from cells of a source to elements of messages, and from those to cells of a destination.

1. The elements of a message are numbered piece by piece, each piece row by row, alike at both ends. So a number stands
   for one element of one tensor, however either end stores it: fused, strided, padded, or as a window.
2. A cell goes into each message that has it, for each receiver of it once.
3. Nothing is as large as a tensor: work grows with the cells that are asked for.

>>> from shardmath import Layout, Mesh, plan
>>> from shardmath.programs.part import make_parts
>>> mesh = Mesh(tp=2)
>>> parts = make_parts(plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)")))
>>> (message,) = parts[0].rounds[0].sends
>>> Senders({"": (2, 2)}, [message]).route("", np.array([0, 3]))
Routed(cell=array([1]), message=array([0]), element=array([1]))
>>> Receivers({"": (1, 1)}, [message]).place(0, np.array([1]))
Placed(tensor=array([0]), cell=array([1]))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.changes.boxes import Boxes, index_boxes
from shardmath.plans.plan import Transfer
from shardmath.programs.messages import Message

__all__ = ["Placed", "Receivers", "Routed", "Senders", "count_elements"]

Slices: TypeAlias = tuple[slice, ...]


class Routed(NamedTuple):
    """Which of the cells that were given, the message it goes into, and the number that it has there."""

    cell: Ints
    message: Ints
    element: Ints


class Placed(NamedTuple):
    """Which tensor an element comes into, and how many cells behind that tensor's first in memory."""

    tensor: Ints
    cell: Ints


def count_elements(message: Message) -> int:
    """Elements of all pieces of the message."""
    return sum(math.prod(piece.shape) for piece in message.pieces)


class _Sent(NamedTuple):
    """The pieces that leave one tensor: as boxes of it, the message of each, and the number of its first element."""

    boxes: Boxes
    message: Ints
    first: Ints


class Senders:
    """What leaves a rank's source tensors, of these local shapes, in these messages."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], messages: Sequence[Message]) -> None:
        listed: dict[str, list[tuple[int, int, Transfer]]] = {key: [] for key in shapes}
        for number, message in enumerate(messages):
            first = 0
            for piece in message.pieces:
                listed[piece.src_tensor].append((number, first, piece))
                first += math.prod(piece.shape)
        self._sent = {key: _index_sent(shapes[key], sent) for key, sent in listed.items() if sent}

    def route(self, key: str, cells: Ints) -> Routed:
        """Where these cells of the tensor go, numbered row by row in its local shape."""
        sent = self._sent.get(key)
        if sent is None:
            nothing = np.zeros(0, np.int64)
            return Routed(nothing, nothing, nothing)
        cell, box, place = sent.boxes.find(cells)
        message = sent.message[box]
        element = sent.first[box] + place
        return Routed(cell, message, element)


def _index_sent(shape: tuple[int, ...], sent: Sequence[tuple[int, int, Transfer]]) -> _Sent:
    """The pieces of one tensor, made ready to be asked."""
    pieces = [piece for _, _, piece in sent]
    slices = [piece.src_slices for piece in pieces]
    low, size = _find_corners(slices, len(shape))
    boxes = index_boxes(shape, low, size)
    messages = [number for number, _, _ in sent]
    starts = [start for _, start, _ in sent]
    return _Sent(boxes, _as_row(messages), _as_row(starts))


def _as_row(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def _find_corners(boxes: Sequence[Slices], ndim: int) -> tuple[Ints, Ints]:
    """The first cell and the size of each box, by dimension."""
    starts = []
    stops = []
    for box in boxes:
        starts += [one.start for one in box]
        stops += [one.stop for one in box]
    rows = len(boxes), ndim
    low = _as_row(starts).reshape(rows)
    high = _as_row(stops).reshape(rows)
    return low, high - low


class _Arriving(NamedTuple):
    """The pieces of one message as rows: their tensors, first elements, and how their elements lie there.

    `size` and `step` are by dimension, a tensor of fewer dimensions than others has some of one element in front.
    """

    tensor: Ints
    first: Ints
    base: Ints
    size: Ints
    step: Ints


class Receivers:
    """What comes into a rank's destination tensors in these messages.

    `strides` are those of the tensors in memory, in cells; tensors are numbered in the order of that mapping.
    """

    def __init__(self, strides: Mapping[str, tuple[int, ...]], messages: Sequence[Message]) -> None:
        numbers = {key: number for number, key in enumerate(strides)}
        self._arriving = [_index_arriving(strides, numbers, message) for message in messages]

    def place(self, message: int, elements: Ints) -> Placed:
        """Where these elements of the message come."""
        arriving = self._arriving[message]
        piece = arriving.first.searchsorted(elements, "right") - 1
        rest = elements - arriving.first[piece]
        cell = arriving.base[piece]
        first, *others = zip(arriving.size.T, arriving.step.T, strict=True)
        # From the last dimension on, as elements are numbered row by row.
        for size, step in reversed(others):
            rest, offset = np.divmod(rest, size[piece])
            cell += offset * step[piece]
        _, step = first
        cell += rest * step[piece]
        tensor = arriving.tensor[piece]
        return Placed(tensor, cell)


def _index_arriving(
    strides: Mapping[str, tuple[int, ...]], numbers: Mapping[str, int], message: Message
) -> _Arriving:
    """The pieces of one message, made ready to be asked."""
    ndim = max((len(piece.shape) for piece in message.pieces), default=0)
    ndim = max(ndim, 1)
    tensors = []
    firsts = []
    bases = []
    sizes: list[int] = []
    steps: list[int] = []
    end = 0
    for piece in message.pieces:
        key = piece.dst_tensor
        missing = ndim - len(piece.shape)
        tensors.append(numbers[key])
        firsts.append(end)
        bases.append(_find_base(piece, strides[key]))
        sizes += [*[1] * missing, *piece.shape]
        steps += [*[0] * missing, *strides[key]]
        end += math.prod(piece.shape)
    rows = len(tensors), ndim
    return _Arriving(
        tensor=_as_row(tensors),
        first=_as_row(firsts),
        base=_as_row(bases),
        size=_as_row(sizes).reshape(rows),
        step=_as_row(steps).reshape(rows),
    )


def _find_base(piece: Transfer, strides: Sequence[int]) -> int:
    """Cells from the tensor's first to the first of the piece."""
    base = 0
    for one, step in zip(piece.dst_slices, strides, strict=True):
        base += one.start * step
    return base
