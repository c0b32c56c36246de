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
from dataclasses import dataclass, field

from shardmath.layouts.layout import Layout
from shardmath.models.storage.stored import KnownSide, Slot

__all__ = ["Selected"]


@dataclass(frozen=True, slots=True)
class Selected:
    """A trainer or engine restricted to the tensors in `names`; it keeps all ranks, even those without such tensors."""

    side: KnownSide
    names: frozenset[str]
    # What `visit` found for the rank that was visited last: portions of a model visit all of its tensors, each time.
    _visited: dict[int, list[tuple[str, Slot, tuple[int, ...]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[object, ...]:
        # Without what was visited, which would make a pickle several times as large.
        return Selected, (self.side, self.names)

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each selected tensor, by name."""
        return {name: layout for name, layout in self.side.layouts.items() if name in self.names}

    @property
    def ranks(self) -> Collection[int]:
        """All ranks of the trainer or engine, even those without a selected tensor."""
        return self.side.ranks

    def slots(self, rank: int) -> dict[str, Slot]:
        """A dict from each selected tensor's name to the Slot (stored tensor, slices) where `rank` stores its part."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """Return the shape of each tensor of `rank` in which a selected tensor is stored, by (virtual stage, stored
        name)."""
        return {(slot.chunk, slot.native): shape for _, slot, shape in self.visit(rank)}

    def row_of(self, native: tuple[int, str], rank: int) -> object:
        """Return the declaration of how `rank` stores the tensor `native`, a pair (virtual pipeline stage, name): a Row
        if the storage was declared in rows of text, otherwise a str. Raises StoreError if `rank` does not store this
        tensor."""
        return self.side.row_of(native, rank)

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """Yield (logical name, Slot (location), stored tensor's shape) for each selected tensor on `rank`."""
        found = self._visited.get(rank)
        if found is None:
            found = [visit for visit in self.side.visit(rank) if visit[0] in self.names]
            # Of one rank only: whoever looks at all ranks would keep a list for each.
            self._visited.clear()
            self._visited[rank] = found
        return iter(found)

    def find_computed(self, names: Collection[str]) -> tuple[str, Slot] | None:
        """Return the name and Slot (location) of a selected tensor in `names` that is stored as a function of its
        values, such as neg_exp; or None."""
        return self.side.find_computed(self.names.intersection(names))
