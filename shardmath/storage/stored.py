"""Stored: how one side stores its tensors, as rows, meshes and numbers.

1. A side has one or more **meshes** over the same ranks; a row lies on the first one that has all axes it names.
2. A **declared index**, such as the layer, says for each of its numbers at which coordinates it is, in which
   chunk (virtual stage) of the model there, and which number it has in that chunk. An index that is not declared is
   everywhere, under its own number.

>>> print(Stored(rows.parse("qkv.* = [q k v].* : (tp q hd + tp k hd + tp v hd) h"), (Mesh(tp=2),), numbers={"hd": 64}))
# Mesh(tp=2)
# hd=64
qkv.* = [q k v].* : (tp q hd + tp k hd + tp v hd) h
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from shardmath.algebra.mesh import Mesh
from shardmath.base.arguments import known
from shardmath.base.errors import StoreError
from shardmath.layouts.layout import Layout
from shardmath.storage import rows
from shardmath.storage.rows import Row

__all__ = ["Shapes", "Side", "Slot", "Spot", "Stored", "replicates"]

UNKNOWN = ("refuse", "replicate")
Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]
"""Global shape and dtype of each logical tensor, by name."""


class Spot(NamedTuple):
    """Where one number of a declared index is: coordinates, chunk, and its number there."""

    coords: Mapping[str, int]
    chunk: int
    number: int


class Slot(NamedTuple):
    """Where a local tensor lies: `native[cut]`, its dimensions then put in `order`; `function` makes it."""

    chunk: int
    native: str
    cut: tuple[int | slice, ...]
    order: tuple[int, ...]
    function: str


class Side(Protocol):
    """A side whose tensors are known: the layout of each, and where ranks store it."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each logical tensor."""
        ...

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the side."""
        ...

    def slots(self, rank: int) -> dict[str, Slot]:
        """Where each tensor that the rank holds a part of lies, by logical name."""
        ...

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """The shape of each tensor that the rank stores, by chunk and name."""
        ...

    def row_of(self, native: tuple[int, str], rank: int) -> object:
        """What says how the rank stores this tensor, for people. Raises StoreError where it does not."""
        ...

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """(logical name, slot, shape of the stored tensor) of all that the rank holds."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """How a side stores its tensors (see the module).

    With `exact`, what axes cut they must divide; else parts are ceil-chunks. Raises StoreError for meshes over
    different ranks, and for none.
    """

    rows: tuple[Row, ...]
    meshes: tuple[Mesh, ...]
    indices: Mapping[str, tuple[Spot, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True

    def __post_init__(self) -> None:
        # Copies, so that nobody changes what the value says.
        kept = {
            "rows": tuple(self.rows),
            "meshes": tuple(self.meshes),
            "indices": dict(self.indices),
            "numbers": dict(self.numbers),
        }
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        if not self.meshes or len({frozenset(mesh.ranks) for mesh in self.meshes}) != 1:
            raise StoreError(f"meshes {list(self.meshes)} do not have the same ranks; give some")
        _check_axes(self.meshes)

    def __hash__(self) -> int:
        numbers = tuple(sorted(self.numbers.items()))
        return hash((self.rows, self.meshes, numbers, self.exact))

    def __str__(self) -> str:
        meshes = "\n".join(f"# {mesh!r}" for mesh in self.meshes)
        numbers = " ".join(f"{name}={n}" for name, n in self.numbers.items())
        return f"{meshes}\n# {numbers or 'no numbers'}\n{rows.show(self.rows)}"

    def extended(self, text: str, **numbers: int) -> Stored:
        """With these rows before its own, and these numbers."""
        before = rows.parse(text)
        every = before + self.rows
        together = {**self.numbers, **numbers}
        return Stored(every, self.meshes, self.indices, together, self.exact)


def _check_axes(meshes: tuple[Mesh, ...]) -> None:
    """Raise StoreError where an axis of two meshes puts a rank at two coordinates."""
    found: dict[tuple[str, int], int] = {}
    for mesh in meshes:
        for axis in mesh.shape:
            at = mesh.coordinate([axis]).tolist()
            for rank, coordinate in zip(mesh.ranks, at, strict=True):
                before = found.setdefault((axis, rank), coordinate)
                if before != coordinate:
                    raise StoreError(
                        f"rank {rank} is at {axis}={before} of one mesh and at {axis}={coordinate} "
                        f"of another; give other ranks, or the axis another name"
                    )


def replicates(unknown: str) -> bool:
    """Whether tensors that no row knows are whole on each rank, and not refused.

    Raises StoreError for a word that says neither.
    """
    if known(unknown, UNKNOWN) is None:
        listed = ", ".join(UNKNOWN)
        raise StoreError(f"unknown={unknown!r}; use one of {listed}")
    return unknown == "replicate"
