"""Routing: from cells of sources to elements of messages.

1. The elements of a message are numbered piece by piece, each piece row by row, in the same way at both ends. So a
   number stands for one element of one tensor, however either end stores it: fused, strided, padded, or as a window.
2. A cell goes into every message that contains it, once for each receiver.
3. Tensors that are cut identically, such as experts, share one index and are searched together.
4. No array is as large as a tensor: work grows with the number of cells that are routed.

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
from shardmath.plans.programs.messages import Message, itemsize_of
from shardmath.plans.transfers import Transfer
from shardmath.values.changes.boxes import Boxes, index_boxes

__all__ = ["AskedCells", "Routed", "Senders", "as_row", "count_elements", "find_hulls"]

Slices: TypeAlias = tuple[slice, ...]
BATCH = 1 << 16
"""Cells that are routed together: few enough for intermediate arrays to stay in a cache, in reused memory."""

_Borders: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of a box, by dimension."""


class AskedCells(NamedTuple):
    """Elements of the local source tensor `key` that are to be sent, as their row-major numbers in the tensor
    (`cells`)."""

    key: str
    cells: Ints


class Routed(NamedTuple):
    """Routes of elements that a rank sends, as parallel arrays: an element's index among those passed to
    `Senders.route`, the number of the piece (part of a message) that carries it, and the element's number in the
    message.

    Pieces are numbered message by message.
    """

    cell: Ints
    piece: Ints
    element: Ints


def count_elements(message: Message) -> int:
    """Return the number of elements in all pieces of `message`."""
    return sum(math.prod(piece.shape) for piece in message.pieces)


def as_row(numbers: Sequence[int]) -> Ints:
    """Return the `numbers` as an int64 array, even if there are no numbers."""
    return np.array(numbers, np.int64)


def find_hulls(messages: Sequence[Message]) -> dict[str, Slices]:
    """Return a dict from the name of each source tensor in `messages` to the smallest box (slices) that contains all
    parts of it that they send."""
    listed: dict[str, list[Slices]] = {}
    for message in messages:
        for piece in message.pieces:
            listed.setdefault(piece.src_tensor, []).append(piece.src_slices)
    return {key: _find_hull(boxes) for key, boxes in listed.items()}


def _find_hull(boxes: Sequence[Slices]) -> Slices:
    hull = []
    for spans in zip(*boxes, strict=True):
        low = min(span.start for span in spans)
        high = max(span.stop for span in spans)
        hull.append(slice(low, high))
    return tuple(hull)


class _CutIndex(NamedTuple):
    """The boxes into which one or more tensors are cut identically, and the piece number of each tensor's boxes."""

    boxes: Boxes
    pieces: list[list[int]]


class _CutRow(NamedTuple):
    """The number of a tensor's cut index, and the tensor's row in that index's `pieces`."""

    cut: int
    row: int


class _Leaving(NamedTuple):
    """A piece, and its number among the pieces of all messages."""

    number: int
    piece: Transfer


class _CellBatch(NamedTuple):
    """Some cells of a tensor, and the index of the first among all cells to route."""

    cut_row: _CutRow
    start: int
    cells: Ints


class Senders:
    """An index of messages that a rank sends: finds the messages that carry given elements of its source tensors.

    `pieces` has the range of piece numbers of each message.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], messages: Sequence[Message]) -> None:
        self._cuts: list[_CutIndex] = []
        self._cut_rows: dict[str, _CutRow] = {}
        self.pieces: list[range] = []
        first_elements: list[int] = []  # of each piece, as a number in its message
        for message in messages:
            before = len(first_elements)
            first_elements += _list_firsts(message)
            numbers = range(before, len(first_elements))
            self.pieces.append(numbers)
        self._first_elements = as_row(first_elements)
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
        """Index the pieces that leave a tensor; `known` has the number of each cut so far, by its borders."""
        size = itemsize_of(leaving[0].piece)
        borders = []
        for _, piece in leaving:
            borders.append(tuple((span.start, span.stop) for span in piece.src_slices))
        cut_key = shape, size, tuple(borders)
        number = known.setdefault(cut_key, len(self._cuts))
        if number == len(self._cuts):
            boxes = _index_borders(shape, borders)
            self._cuts.append(_CutIndex(boxes, []))
        rows = self._cuts[number].pieces
        self._cut_rows[key] = _CutRow(number, len(rows))
        rows.append([piece_number for piece_number, _ in leaving])

    def route(self, asked: Iterable[AskedCells]) -> Iterator[Routed]:
        """Find the pieces (parts of messages) that carry the elements in `asked`; yield them in batches, each a Routed
        with one item per pair of an element and a piece.

        Within a batch, cells of one piece keep their order and form few runs.
        """
        for batch in self._list_batches(asked):
            yield self._route(batch)

    def _list_batches(self, asked: Iterable[AskedCells]) -> Iterator[list[_CellBatch]]:
        """Batches of tensors that are cut identically, each small enough for a cache."""
        waiting: dict[int, list[_CellBatch]] = {}
        counts: Counter[int] = Counter()
        for part in self._list_parts(asked):
            cut = part.cut_row.cut
            counts[cut] += len(part.cells)
            if counts[cut] > BATCH and cut in waiting:
                yield waiting.pop(cut)
                counts[cut] = len(part.cells)
            waiting.setdefault(cut, []).append(part)
        yield from waiting.values()

    def _list_parts(self, asked: Iterable[AskedCells]) -> Iterator[_CellBatch]:
        """The cells of tensors that are sent at all, at most BATCH of one tensor at a time."""
        start = 0
        for key, cells in asked:
            cut_row = self._cut_rows.get(key)
            if cut_row is not None:
                for first in range(0, len(cells), BATCH):
                    yield _CellBatch(cut_row, start + first, cells[first : first + BATCH])
            start += len(cells)

    def _route(self, batch: Sequence[_CellBatch]) -> Routed:
        """Route the cells of a batch, whose tensors are all cut by the same boxes."""
        cut = self._cuts[batch[0].cut_row.cut]
        cells = [part.cells for part in batch]
        cell, box, element = cut.boxes.find(np.concatenate(cells))
        counts = lengths(cells)
        owners = np.arange(len(batch)).repeat(counts)
        owner = owners[cell]
        # The piece that each box is of each part's tensor.
        pieces_by_part = [cut.pieces[part.cut_row.row] for part in batch]
        pieces = np.array(pieces_by_part, np.int64)
        piece: Ints = pieces[owner, box]
        element += self._first_elements[piece]
        # Turn indices in the batch into indices among all cells to route.
        starts = as_row([part.start for part in batch])
        ends = counts.cumsum()
        cell += (starts + counts - ends)[owner]
        return _gather_pieces(Routed(cell, piece, element), pieces.size)


def _list_firsts(message: Message) -> Iterator[int]:
    """The number of each piece's first element in the message."""
    end = 0
    for piece in message.pieces:
        yield end
        end += math.prod(piece.shape)


def _group_pieces(messages: Iterable[Message]) -> dict[str, list[_Leaving]]:
    """The pieces that leave each tensor, numbered over all messages."""
    leaving: dict[str, list[_Leaving]] = {}
    pieces = (piece for message in messages for piece in message.pieces)
    for number, piece in enumerate(pieces):
        leaving.setdefault(piece.src_tensor, []).append(_Leaving(number, piece))
    return leaving


def _gather_pieces(routed: Routed, pieces: int) -> Routed:
    """The same, sorted by piece unless there are already fewer changes of piece than `pieces`."""
    piece = routed.piece
    # Boxes of rows come in few runs already; boxes of columns alternate.
    if np.count_nonzero(piece[1:] != piece[:-1]) < pieces:
        return routed
    # numpy sorts 16-bit integers by radix, in linear time.
    is_small = piece.max() < 1 << 16
    numbers = piece.astype(np.uint16) if is_small else piece
    order = numbers.argsort(kind="stable")
    return Routed(routed.cell[order], piece[order], routed.element[order])


def _index_borders(shape: tuple[int, ...], borders: Sequence[_Borders]) -> Boxes:
    """Index the boxes with these borders for searches."""
    ends = np.array(borders, np.int64)
    by_dimension = ends.reshape(len(borders), len(shape), 2)
    low = by_dimension[:, :, 0]
    high = by_dimension[:, :, 1]
    size = high - low
    return index_boxes(shape, low, size)
