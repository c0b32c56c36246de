"""Recorded: the storage of one rank, recorded from its weight loader.

1. A recording has every parameter and persistent buffer of the rank, with the pieces of logical tensors in it. Cells
   that nothing wrote are counted too.
2. No cell is written by two tensors, and no element lies twice in one stored tensor. Chunks are virtual stages, whose
   tensors may have equal names.
3. A recording is a small value: it compares, pickles, and converts to JSON with its digest.

>>> half = Native("qk", (4,), "int8", (Piece("q", 0, 2, ((2, 1, 1),)),), "views", "")
>>> recorded = Recorded((("q", (4,), "int8"),), (half,))
>>> recorded.unwritten
{'qk': 2}
>>> recorded.fill({"q": np.arange(4, dtype=np.int8)}, empty=-1)
{'qk': array([ 2,  3, -1, -1], dtype=int8)}
>>> Recorded.from_json(recorded.to_json()) == recorded
True
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.digest import digest, read_digested
from shardmath.base.errors import StoreError
from shardmath.base.public import public_in
from shardmath.models.recordings.pieces import Piece, overlap

__all__ = ["Native", "Recorded", "label", "show"]

_Shape: TypeAlias = tuple[int, ...]

FORMAT = "shardmath recorded storage"
VERSION = 1
LARGE = 1 << 24
"""With more cells than this, the error for cells that are written twice does not look for them."""


class Native(NamedTuple):
    """A tensor that a rank stores: its name, shape and dtype, and the elements of logical tensors in it (`pieces`).

    `way` says how these were found: "views", "numbers" or "rows".
    """

    name: str
    shape: _Shape
    dtype: str
    pieces: tuple[Piece, ...]
    way: str
    function: str
    chunk: int = 0

    @property
    def label(self) -> str:
        """The name of the stored tensor, followed by its chunk (virtual stage) unless that is 0."""
        return label(self.chunk, self.name)

    @property
    def unwritten(self) -> int:
        """The number of positions in the stored tensor that hold no recorded element of a logical tensor."""
        return math.prod(self.shape) - self.written

    @property
    def written(self) -> int:
        """The number of positions in the stored tensor that hold a recorded element of a logical tensor."""
        return sum(piece.size for piece in self.pieces)


def label(chunk: int, name: str) -> str:
    """A text for the stored tensor `name`: its name, followed by its `chunk` (virtual stage) unless that is 0.

    >>> label(0, "A"), label(1, "A")
    ('A', 'A of chunk 1')
    """
    return f"{name} of chunk {chunk}" if chunk else name


@public_in("storage")
@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded storage of one rank: its stored tensors (`natives`), and which element of a logical (checkpoint)
    tensor lies in each of their positions (cells).

    Raises StoreError if a cell, an element or a stored tensor comes twice, and if a piece reaches outside its tensors.
    `tensors` are (name, shape, dtype) of the logical tensors, `aliases` (name, stored tensor of the same memory). In
    mappings of all stored tensors of a rank, names in chunks behind the first are "A of chunk 1".
    """

    tensors: tuple[tuple[str, _Shape, str], ...]
    natives: tuple[Native, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, shape, _ in self.tensors:
            _check_shape(name, shape)
        sizes = {name: math.prod(shape) for name, shape, _ in self.tensors}
        seen = set()
        for native in self.natives:
            key = native.chunk, native.name
            if key in seen:
                what = f"natives= has the stored tensor {native.label!r} twice"
                raise StoreError(f"{what}; record each name once per chunk")
            seen.add(key)
            _check_shape(native.label, native.shape)
            _check_inside(native, sizes)
            _check_once(native)

    def __str__(self) -> str:
        lines = [f"{native.label} {show(native)}" for native in self.natives]
        return "\n".join(lines)

    @property
    def unwritten(self) -> dict[str, int]:
        """The stored tensors that have positions without a logical element, as a dict from the tensor's name to the
        number of these positions."""
        return {native.label: native.unwritten for native in self.natives if native.unwritten}

    @property
    def shapes(self) -> dict[str, tuple[_Shape, str]]:
        """A dict from the name of each logical tensor to its (shape, dtype)."""
        return {name: (shape, dtype) for name, shape, dtype in self.tensors}

    @property
    def digest(self) -> str:
        """A SHA-256 digest of the recording, as 64 hexadecimal digits; equal on all ranks with equal recordings."""
        return digest(_list_plain(self))

    def fill(self, arrays: Mapping[str, NDArray[Any]], empty: float = 0) -> dict[str, NDArray[Any]]:
        """Return the arrays that the rank stores, by name, filled from the logical `arrays`. Positions without a
        logical element get the value of `empty`.

        Functions, such as neg_exp, are not applied.
        """
        stored = {}
        for native in self.natives:
            # A dtype that holds the dtypes of its pieces' tensors; of all tensors, if it has no pieces.
            names = {piece.tensor for piece in native.pieces} or arrays
            dtype = np.result_type(*{arrays[name].dtype for name in names})
            cells = np.full(math.prod(native.shape), empty, dtype)
            for piece in native.pieces:
                flat = arrays[piece.tensor].ravel()
                cells[piece.cells] = flat[piece.elements]
            stored[native.label] = cells.reshape(native.shape)
        return stored

    def to_json(self) -> str:
        """The recording as JSON text that `from_json` reads."""
        tensors, natives, aliases = _list_plain(self)
        value = {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            "tensors": tensors,
            "natives": natives,
            "aliases": aliases,
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Recorded:
        """Read the recording that `to_json` wrote as JSON `text`. Raises StoreError for any other text."""
        return read_digested(text, FORMAT, VERSION, _read)


def show(native: Native) -> str:
    """One line of text about a stored tensor: dtype, shape, its logical tensors, and the number of empty positions."""
    function = f" = {native.function}(...)" if native.function else ""
    tensors = ", ".join(dict.fromkeys(piece.tensor for piece in native.pieces))
    unwritten = f"; {native.unwritten} cells unwritten" if native.unwritten else ""
    return f"{native.dtype}{list(native.shape)}{function} by {native.way or 'nothing'}: {tensors}{unwritten}"


def _check_shape(name: str, shape: _Shape) -> None:
    """Raise StoreError for a negative size."""
    if min(shape, default=0) < 0:
        raise StoreError(f"{name!r} has shape {shape}; give sizes of 0 or more")


def _check_inside(native: Native, sizes: Mapping[str, int]) -> None:
    """Raise StoreError if a piece reaches outside the stored tensor or its logical tensor."""
    cells = math.prod(native.shape)
    for piece in native.pieces:
        if piece.tensor not in sizes:
            raise StoreError(
                f"{native.label!r} has {piece} of a tensor that tensors= does not have; "
                f"add {piece.tensor!r} to tensors="
            )
        if any(count < 1 for count, _, _ in piece.blocks):
            raise StoreError(f"{native.label!r} has {piece}, which fills no cell; leave it out")
        # Side 1 of a block counts cells, side 2 elements.
        for side, size, name in (
            (1, cells, native.label),
            (2, sizes[piece.tensor], piece.tensor),
        ):
            low, high = piece.span(side)
            if low < 0 or high >= size:
                raise StoreError(
                    f"{native.label!r} has {piece}, which reaches from {low} to {high} in {name!r} "
                    f"of {size}; keep it inside 0 to {size - 1}"
                )


def _check_once(native: Native) -> None:
    """Raise StoreError if a cell is written twice, or an element lies in two cells."""
    # More cells are written than there are; to look for one of so many would take long.
    if native.unwritten < 0 and native.written > LARGE:
        raise StoreError(
            f"pieces write {native.written} cells of {native.label!r}, which has "
            f"{math.prod(native.shape)}; write each cell once"
        )
    # Side 1 of a block counts cells, side 2 elements.
    clash = overlap(native.pieces, 1)
    if clash is not None:
        one, other = (piece.tensor for piece in clash)
        what = f"cells of {native.label!r} are written by {one!r} and again by {other!r}"
        raise StoreError(f"{what}; write each cell once")
    by_tensor: dict[str, list[Piece]] = {}
    for piece in native.pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for tensor, pieces in by_tensor.items():
        if overlap(pieces, 2) is not None:
            what = f"elements of {tensor!r} lie in two cells each of {native.label!r}"
            raise StoreError(f"{what}; store each element once")


def _list_plain(recorded: Recorded) -> tuple[Any, Any, Any]:
    """The value as tuples of numbers and text; a piece has the position of its tensor in the list."""
    positions = {name: i for i, (name, _, _) in enumerate(recorded.tensors)}
    natives = []
    for native in recorded.natives:
        pieces = []
        for piece in native.pieces:
            tensor = positions[piece.tensor]
            pieces.append((tensor, piece.cell, piece.element, piece.blocks))
        *plain, chunk = native._replace(pieces=tuple(pieces))  # type: ignore[arg-type]
        # Chunk 0 is left out, so that recordings from before there were chunks keep their digests.
        natives.append((*plain, chunk) if chunk else tuple(plain))
    return recorded.tensors, tuple(natives), recorded.aliases


def _read(value: Mapping[str, Any]) -> Recorded:
    """The recording that `to_json` wrote as this value."""
    tensors = []
    for name, shape, dtype in value["tensors"]:
        tensors.append((str(name), tuple(int(n) for n in shape), str(dtype)))
    names = [name for name, _, _ in tensors]
    natives = [_read_native(names, *native) for native in value["natives"]]
    aliases = [(str(alias), str(name)) for alias, name in value["aliases"]]
    return Recorded(tuple(tensors), tuple(natives), tuple(aliases))


def _read_native(
    names: Sequence[str],
    name: str,
    shape: Sequence[int],
    dtype: str,
    listed: Sequence[Any],
    way: str,
    function: str,
    chunk: int = 0,
) -> Native:
    """A stored tensor, whose pieces have the positions of their tensors in `names`."""
    pieces = [_read_piece(names, *piece) for piece in listed]
    sizes = tuple(int(n) for n in shape)
    return Native(str(name), sizes, str(dtype), tuple(pieces), str(way), str(function), int(chunk))


def _read_piece(
    names: Sequence[str], tensor: int, cell: int, element: int, listed: Sequence[Sequence[int]]
) -> Piece:
    """A piece of the tensor at this position in `names`."""
    blocks = []
    for count, cell_stride, element_stride in listed:
        blocks.append((int(count), int(cell_stride), int(element_stride)))
    return Piece(names[tensor], int(cell), int(element), tuple(blocks))
