"""Selected: some of the tensors of a side, as a side.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.models.refits.plain import PlainSide
>>> mesh = Mesh(dp=2)
>>> whole = PlainSide({"a": Layout((4,), mesh, "(dp n)"), "b": Layout((2,), mesh, "n")})
>>> Selected(whole, frozenset("a")).natives(1)
{(0, 'a'): (2,)}
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from shardmath.layouts.layout import Layout
from shardmath.models.storage.stored import KnownSide, Slot

__all__ = ["Selected"]


@dataclass(frozen=True, slots=True)
class Selected:
    """A side restricted to the tensors with these names. It keeps all ranks of the whole side."""

    side: KnownSide
    names: frozenset[str]

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each selected tensor."""
        return {name: layout for name, layout in self.side.layouts.items() if name in self.names}

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the whole side."""
        return self.side.ranks

    def slots(self, rank: int) -> dict[str, Slot]:
        """The slot of each tensor of which the rank holds a part, by logical name."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """The shape of each stored tensor with a selected tensor in it, by chunk and name."""
        return {(slot.chunk, slot.native): shape for _, slot, shape in self.visit(rank)}

    def row_of(self, native: tuple[int, str], rank: int) -> object:
        """The row or recording of this stored tensor, for messages. Raises StoreError if the rank does not store it."""
        return self.side.row_of(native, rank)

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """(logical name, slot, shape of the stored tensor) of everything that the rank holds."""
        for name, slot, shape in self.side.visit(rank):
            if name in self.names:
                yield name, slot, shape

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """The first of these tensors that a rank stores as a function of it, with its slot; None if there is none."""
        return self.side.find_computed(self.names.intersection(names))
