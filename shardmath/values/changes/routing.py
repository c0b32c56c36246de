"""Routing: from cells of sources to elements of messages.

1. The elements of a message are numbered piece by piece, each piece row by row, alike at both ends. So a number stands
   for one element of one tensor, however either end stores it: fused, strided, padded, or as a window.
2. A cell goes into each message that has it, for each receiver of it once.
3. Tensors that are cut alike, as experts are, share what says so, and are asked for together.
4. Nothing is as large as a tensor: work grows with the cells that are asked for.

>>> from shardmath import Layout, Mesh, plan
>>> from shardmath.plans.programs.part import make_parts
>>> mesh = Mesh(tp=2)
>>> parts = make_parts(plan(Layout((4, 2), mesh, "(tp n) h"), Layout((4, 2), mesh, "n (tp h)")))
>>> (message,) = parts[0].rounds[0].sends
>>> senders = Senders({"": (2, 2)}, [message])
>>> list(senders.route([AskedCells("", np.array([0, 3]))]))
[Routed(cell=array([1]), piece=array([0]), element=array([1]))]
>>> senders.pieces[0]
range(0, 1)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints, lengths
from shardmath.plans.plan import Transfer
from shardmath.plans.programs.messages import Message, itemsize_of
from shardmath.values.changes.boxes import Boxes, index_boxes

__all__ = ["AskedCells", "Routed", "Senders", "as_row", "count_elements", "find_hulls"]

Slices: TypeAlias = tuple[slice, ...]
BATCH = 1 << 16
"""Cells that are routed together: what is made of them stays in a cache, in memory that is used again."""

_Borders: TypeAlias = tuple[tuple[int, int], ...]
"""First and past cell of a box, by dimension."""


class AskedCells(NamedTuple):
    """Cells of a source tensor, numbered row by row in its local shape."""

    key: str
    cells: Ints


class Routed(NamedTuple):
    """Which of the cells that were given, the piece that it goes in, and its number in that piece's message.

    Pieces are numbered message by message.
    """

    cell: Ints
    piece: Ints
    element: Ints


def count_elements(message: Message) -> int:
    """Elements of all pieces of the message."""
    return sum(math.prod(piece.shape) for piece in message.pieces)


def as_row(numbers: Sequence[int]) -> Ints:
    """The numbers as an array, also where there are none."""
    return np.array(numbers, np.int64)


def find_hulls(messages: Sequence[Message]) -> dict[str, Slices]:
    """Of each source tensor from which a piece leaves the smallest box that has all of its pieces."""
    listed: dict[str, list[Slices]] = {}
    for message in messages:
        for piece in message.pieces:
            listed.setdefault(piece.src_tensor, []).append(piece.src_slices)
    return {key: _find_hull(boxes) for key, boxes in listed.items()}


def _find_hull(boxes: Sequence[Slices]) -> Slices:
    hull = []
    for along in zip(*boxes, strict=True):
        low = min(one.start for one in along)
        high = max(one.stop for one in along)
        hull.append(slice(low, high))
    return tuple(hull)


class _Cut(NamedTuple):
    """How one tensor, or several alike, are cut into pieces: the numbers of those, by tensor and box."""

    boxes: Boxes
    pieces: list[list[int]]


class _Place(NamedTuple):
    """Which cut a tensor has, and its row of that cut's pieces."""

    cut: int
    row: int


class _Leaving(NamedTuple):
    """A piece, and its number among those of all messages."""

    number: int
    piece: Transfer


class _Part(NamedTuple):
    """Some cells of a tensor, and the number of their first among all that was asked."""

    place: _Place
    start: int
    cells: Ints


class Senders:
    """What leaves a rank's source tensors, of these local shapes, in these messages.

    `pieces` are the numbers of each message's pieces.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], messages: Sequence[Message]) -> None:
        self._cuts: list[_Cut] = []
        self._places: dict[str, _Place] = {}
        self.pieces: list[range] = []
        firsts: list[int] = []
        for message in messages:
            before = len(firsts)
            firsts += _list_firsts(message)
            numbers = range(before, len(firsts))
            self.pieces.append(numbers)
        self._firsts = as_row(firsts)
        known: dict[object, int] = {}
        for key, pieces in _group_pieces(messages).items():
            self._index(key, shapes[key], pieces, known)

    def _index(
        self,
        key: str,
        shape: tuple[int, ...],
        leaving: Sequence[_Leaving],
        known: dict[object, int],
    ) -> None:
        """Make what leaves a tensor ready to be asked; `known` are the cuts so far, by what says how they cut."""
        size = itemsize_of(leaving[0].piece)
        borders = []
        for one in leaving:
            ends = [(along.start, along.stop) for along in one.piece.src_slices]
            borders.append(tuple(ends))
        alike = shape, size, tuple(borders)
        number = known.setdefault(alike, len(self._cuts))
        if number == len(self._cuts):
            boxes = _index_borders(shape, borders)
            self._cuts.append(_Cut(boxes, []))
        rows = self._cuts[number].pieces
        self._places[key] = _Place(number, len(rows))
        rows.append([one.number for one in leaving])

    def route(self, asked: Iterable[AskedCells]) -> Iterator[Routed]:
        """Where these cells go, which are numbered end to end; not one after the other.

        Those of one piece keep their order, and stand in few runs.
        """
        for batch in self._list_batches(asked):
            yield self._route(batch)

    def _list_batches(self, asked: Iterable[AskedCells]) -> Iterator[list[_Part]]:
        """Parts of tensors that are cut alike, of few enough cells for a cache with what is made of them."""
        waiting: dict[int, list[_Part]] = {}
        counts: Counter[int] = Counter()
        for part in self._list_parts(asked):
            cut = part.place.cut
            counts[cut] += len(part.cells)
            if counts[cut] > BATCH and cut in waiting:
                yield waiting.pop(cut)
                counts[cut] = len(part.cells)
            waiting.setdefault(cut, []).append(part)
        yield from waiting.values()

    def _list_parts(self, asked: Iterable[AskedCells]) -> Iterator[_Part]:
        """Cells of tensors from which something leaves, at most BATCH of each at once."""
        start = 0
        for key, cells in asked:
            place = self._places.get(key)
            if place is not None:
                for first in range(0, len(cells), BATCH):
                    part = cells[first : first + BATCH]
                    yield _Part(place, start + first, part)
            start += len(cells)

    def _route(self, batch: Sequence[_Part]) -> Routed:
        """Where the cells of a batch go."""
        cut = self._cuts[batch[0].place.cut]
        each = [part.cells for part in batch]
        rows = [cut.pieces[part.place.row] for part in batch]
        cell, box, element = cut.boxes.find(np.concatenate(each))
        counts = lengths(each)
        owners = np.arange(len(batch)).repeat(counts)
        owner = owners[cell]
        pieces = np.array(rows, np.int64)
        piece: Ints = pieces[owner, box]
        element += self._firsts[piece]
        # From numbers in the batch to those among all that was asked.
        starts = as_row([part.start for part in batch])
        ends = counts.cumsum()
        cell += (starts + counts - ends)[owner]
        return _gather_pieces(Routed(cell, piece, element), pieces.size)


def _list_firsts(message: Message) -> Iterator[int]:
    """The number of the first element of each piece."""
    end = 0
    for piece in message.pieces:
        yield end
        end += math.prod(piece.shape)


def _group_pieces(messages: Iterable[Message]) -> dict[str, list[_Leaving]]:
    """The pieces of each tensor, as they are numbered over all messages."""
    leaving: dict[str, list[_Leaving]] = {}
    pieces = (piece for message in messages for piece in message.pieces)
    for number, piece in enumerate(pieces):
        one = _Leaving(number, piece)
        leaving.setdefault(piece.src_tensor, []).append(one)
    return leaving


def _gather_pieces(routed: Routed, most: int) -> Routed:
    """The same, each of so many pieces in few runs."""
    piece = routed.piece
    # Rows come in few runs as they are; columns alternate.
    if np.count_nonzero(piece[1:] != piece[:-1]) < most:
        return routed
    # Of small integers numpy sorts digits, in time in proportion to their number.
    is_small = piece.max() < 1 << 16
    numbers = piece.astype(np.uint16) if is_small else piece
    order = numbers.argsort(kind="stable")
    return Routed(routed.cell[order], piece[order], routed.element[order])


def _index_borders(shape: tuple[int, ...], borders: Sequence[_Borders]) -> Boxes:
    """Boxes with these borders, made ready to be asked."""
    ends = np.array(borders, np.int64)
    by_dimension = ends.reshape(len(borders), len(shape), 2)
    low = by_dimension[:, :, 0]
    high = by_dimension[:, :, 1]
    size = high - low
    return index_boxes(shape, low, size)
