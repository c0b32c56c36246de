"""Question: the texts that were typed on the page, read as two layouts.

>>> asked = read({"shape": "9,4", "src_mesh": "tp=2", "src": "(tp n) h", "dst_mesh": "tp=2", "dst": "n (tp h"})
>>> print(asked.src, "|", asked.dst, "|", asked.faults["dst"])
float32[9, 4] (tp n) h on tp=2 | None | expected ')', found the end of the text
    n (tp h
           ^
close the group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shardmath.base import dtypes
from shardmath.base.errors import LayoutError, NotationError, ShardError
from shardmath.base.text import shown
from shardmath.layouts.layout import Layout
from shardmath.models.systems.rules import parse_mesh
from shardmath.plans.flows.topology import Topology

__all__ = ["FIELDS", "Question", "parse_shape", "read"]

FIELDS = ("shape", "dtype", "src_mesh", "src", "dst_mesh", "dst", "node", "rank")
"""The names of the texts: of the tensor, of both sides, the ranks per node, and the rank that was chosen."""

LONGEST = 1000
"""The most characters of a text."""

MOST_RANKS = 1 << 16
"""The most ranks of a side."""

MOST_DIMENSIONS = 8

_T = TypeVar("_T")


@dataclass(frozen=True)
class Question:
    """Two layouts of one tensor, as far as the texts say them; `faults` has the error of each text that does not."""

    src: Layout | None
    dst: Layout | None
    topology: Topology | None = None
    rank: int | None = None
    faults: Mapping[str, str] = field(default_factory=dict)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse sizes with commas between them, such as "9,4". Raises LayoutError for other text."""
    try:
        return tuple(int(size) for size in text.split(",") if size.strip())
    except ValueError:
        raise LayoutError(f"{shown(text)} is not a shape; write sizes with commas: 9,4") from None


def read(texts: Mapping[str, str]) -> Question:
    """Return the question that the texts ask; see FIELDS for their names. One that is missing is "".

    Never raises: what cannot be read is a fault.
    """
    given = {name: texts.get(name, "").strip() for name in FIELDS}
    reader = _Reader(given)
    return Question(
        src=reader.read_side("src"),
        dst=reader.read_side("dst"),
        topology=reader.read("node", _read_node),
        rank=reader.read("rank", _read_number),
        faults=reader.faults,
    )


class _Reader:
    """The texts, and the errors of those that were read."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self.faults: dict[str, str] = {}

    def read(self, name: str, parse: Callable[[str], _T]) -> _T | None:
        """What `parse` makes of a text, None if it raises."""
        text = self._texts[name]
        try:
            if len(text) > LONGEST:
                raise LayoutError(f"{len(text):,} characters; write at most {LONGEST:,}")
            return parse(text)
        except ShardError as error:
            self.faults[name] = str(error)
            return None

    def read_side(self, name: str) -> Layout | None:
        """The layout of a side, "src" or "dst"."""
        shape = self.read("shape", _read_shape)
        dtype = self.read("dtype", _read_dtype)
        mesh = self.read(f"{name}_mesh", parse_mesh)
        if shape is None or dtype is None or mesh is None:
            return None
        if mesh.size > MOST_RANKS:
            self.faults[f"{name}_mesh"] = f"{mesh.size:,} ranks; write at most {MOST_RANKS:,}"
            return None
        return self.read(name, lambda text: Layout(shape, mesh, text, dtype=dtype))


def _read_shape(text: str) -> tuple[int, ...]:
    """A shape whose positions numpy can count."""
    shape = parse_shape(text)
    if len(shape) > MOST_DIMENSIONS:
        raise LayoutError(f"{len(shape)} dimensions; write at most {MOST_DIMENSIONS}")
    for size in shape:
        if not 0 <= size < 1 << 48:
            raise LayoutError(f"a size of {shown(size)}; write sizes from 0 to {(1 << 48) - 1}")
    return shape


def _read_dtype(text: str) -> str:
    """A dtype in shardmath's spelling, float32 by default."""
    return dtypes.canonical(text or "float32")


def _read_node(text: str) -> Topology | None:
    """Nodes of this many ranks; None if it is left out."""
    number = _read_number(text)
    return None if number is None else Topology(ranks_per_node=number)


def _read_number(text: str) -> int | None:
    """A number of few digits; None if it is left out."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise NotationError(
            f"{shown(text)} is not a number of up to 9 digits; write one, or leave it out"
        )
    return int(text)
