"""Recorded: what one rank stores, as a loader was seen to store it.

1. Every parameter and persistent buffer of the rank is there, with the pieces of logical tensors that lie in it.
   Cells that nothing wrote are counted, not passed over.
2. No cell is written by two tensors, and no element comes twice in one stored tensor.
   Chunks are virtual stages, whose tensors may have equal names.
3. It is a small value: it compares, pickles, and goes through JSON with its digest.

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
"""Cells of which it is not said which are written twice."""


class Native(NamedTuple):
    """A stored tensor: the pieces in it, how they were read ("views" or "numbers"), and what function stores it."""

    name: str
    shape: _Shape
    dtype: str
    pieces: tuple[Piece, ...]
    way: str
    function: str
    chunk: int = 0

    @property
    def label(self) -> str:
        """Its name, and its chunk where that is not the first."""
        return label(self.chunk, self.name)

    @property
    def unwritten(self) -> int:
        """Cells that no piece fills."""
        return math.prod(self.shape) - self.written

    @property
    def written(self) -> int:
        """Cells that pieces fill."""
        return sum(piece.size for piece in self.pieces)


def label(chunk: int, name: str) -> str:
    """What a stored tensor is called among all of its rank.

    >>> label(0, "A"), label(1, "A")
    ('A', 'A of chunk 1')
    """
    return f"{name} of chunk {chunk}" if chunk else name


@public_in("storage")
@dataclass(frozen=True, slots=True)
class Recorded:
    """What one rank stores (see the module). Raises StoreError where a cell, an element or a stored tensor comes
    twice, and where a piece reaches outside.

    `tensors` are (name, shape, dtype) of the logical tensors; `aliases` (name, stored tensor of the same memory). Of a
    chunk behind the first, a name is "A of chunk 1" wherever all of a rank's are together.
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
                raise StoreError(f"{native.label!r} is recorded twice; record one of each name")
            seen.add(key)
            _check_shape(native.label, native.shape)
            _check_inside(native, sizes)
            _check_once(native)

    def __str__(self) -> str:
        lines = [f"{native.label} {show(native)}" for native in self.natives]
        return "\n".join(lines)

    @property
    def unwritten(self) -> dict[str, int]:
        """How many cells of each stored tensor nothing wrote, where there are any."""
        left = {}
        for native in self.natives:
            if native.unwritten:
                left[native.label] = native.unwritten
        return left

    @property
    def shapes(self) -> dict[str, tuple[_Shape, str]]:
        """Shape and dtype of each logical tensor."""
        shapes = {}
        for name, shape, dtype in self.tensors:
            shapes[name] = shape, dtype
        return shapes

    @property
    def digest(self) -> str:
        """The same for equal values on every rank: 64 hexadecimal digits."""
        return digest(_list_plain(self))

    def fill(self, arrays: Mapping[str, NDArray[Any]], empty: float = 0) -> dict[str, NDArray[Any]]:
        """What the rank stores of these logical arrays, without functions; other cells have the value `empty`."""
        stored = {}
        for native in self.natives:
            # A type that holds those of its own pieces; of all, where it has none.
            own = {piece.tensor for piece in native.pieces} or arrays
            kind = np.result_type(*{arrays[name].dtype for name in own})
            cells = np.full(math.prod(native.shape), empty, kind)
            for piece in native.pieces:
                flat = arrays[piece.tensor].ravel()
                cells[piece.cells] = flat[piece.elements]
            stored[native.label] = cells.reshape(native.shape)
        return stored

    def to_json(self) -> str:
        """As text that `from_json` reads."""
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
        """The value of such text. Raises StoreError for any other."""
        return read_digested(text, FORMAT, VERSION, _read)


def show(native: Native) -> str:
    """The stored tensor, for people."""
    of = f" = {native.function}(...)" if native.function else ""
    tensors = ", ".join(dict.fromkeys(piece.tensor for piece in native.pieces))
    left = f"; {native.unwritten} cells unwritten" if native.unwritten else ""
    return f"{native.dtype}{list(native.shape)}{of} by {native.way or 'nothing'}: {tensors}{left}"


def _check_shape(name: str, shape: _Shape) -> None:
    """Raise StoreError for a negative size."""
    if min(shape, default=0) < 0:
        raise StoreError(f"{name!r} has shape {shape}; sizes are >= 0")


def _check_inside(native: Native, sizes: Mapping[str, int]) -> None:
    """Raise StoreError where a piece reaches outside the stored tensor, or outside its logical one."""
    cells = math.prod(native.shape)
    for piece in native.pieces:
        if piece.tensor not in sizes:
            raise StoreError(f"{native.label!r} has {piece}, of no logical tensor; name one")
        if any(count < 1 for count, _, _ in piece.blocks):
            raise StoreError(f"{native.label!r} has {piece}, which fills no cell; leave it out")
        sides = (1, cells, native.label), (2, sizes[piece.tensor], piece.tensor)
        for side, size, name in sides:
            low, high = piece.span(side)
            if low < 0 or high >= size:
                raise StoreError(
                    f"{native.label!r} has {piece}, which reaches from {low} to {high} in {name!r} "
                    f"of {size}; record it again"
                )


def _check_once(native: Native) -> None:
    """Raise StoreError where a cell is written twice, or an element lies in two cells."""
    if native.unwritten < 0 and native.written > LARGE:
        raise StoreError(
            f"{native.written} cells of {native.label!r} are written, which has "
            f"{math.prod(native.shape)}; write each once"
        )
    cells = overlap(native.pieces, 1)
    if cells is not None:
        one, other = (piece.tensor for piece in cells)
        raise StoreError(f"cells of {native.label!r} are written by {one!r} and again by {other!r}")
    by_tensor: dict[str, list[Piece]] = {}
    for piece in native.pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for tensor, pieces in by_tensor.items():
        if overlap(pieces, 2) is not None:
            raise StoreError(f"elements of {tensor!r} lie in two cells each of {native.label!r}")


def _list_plain(recorded: Recorded) -> tuple[Any, Any, Any]:
    """The value as tuples of numbers and text; tensors in pieces by their place in the list."""
    places = {name: i for i, (name, _, _) in enumerate(recorded.tensors)}
    natives = []
    for native in recorded.natives:
        pieces = []
        for piece in native.pieces:
            place = places[piece.tensor]
            pieces.append((place, piece.cell, piece.element, piece.blocks))
        *plain, chunk = native._replace(pieces=tuple(pieces))  # type: ignore[arg-type]
        # Left out where it is the first, so that what was recorded before there were chunks has its digest.
        natives.append((*plain, chunk) if chunk else tuple(plain))
    return recorded.tensors, tuple(natives), recorded.aliases


def _read(value: Mapping[str, Any]) -> Recorded:
    """The value of what JSON had."""
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
    """A stored tensor, whose pieces have tensors by their place in the list of names."""
    pieces = []
    for piece in listed:
        pieces.append(_read_piece(names, *piece))
    sizes = tuple(int(n) for n in shape)
    return Native(str(name), sizes, str(dtype), tuple(pieces), str(way), str(function), int(chunk))


def _read_piece(
    names: Sequence[str], place: int, cell: int, element: int, listed: Sequence[Sequence[int]]
) -> Piece:
    blocks = []
    for count, across, along in listed:
        blocks.append((int(count), int(across), int(along)))
    return Piece(names[place], int(cell), int(element), tuple(blocks))
