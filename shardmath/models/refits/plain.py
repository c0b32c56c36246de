"""Plain sides: each tensor is stored separately, under its logical name, in its layout.

Torch modules under FSDP2 or tensor parallelism store tensors so; `shardmath_torch.layout_of` reads their layouts.
`rules` and families describe other plain sides.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> side = PlainSide({"w": Layout((4, 3), Mesh(dp=2), "(dp n) h")})
>>> bound = side.bind({"w": ((4, 3), "float32")})
>>> bound.natives(1), bound.slots(1)["w"].cut
({(0, 'w'): (2, 3)}, (slice(0, 2, 1), slice(0, 3, 1)))
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmath.base.errors import StoreError
from shardmath.base.text import show_ranks
from shardmath.layouts.layout import Layout
from shardmath.models.storage.names import matches
from shardmath.models.storage.stored import Shapes, Slot

__all__ = ["PlainSide"]


@dataclass(frozen=True, slots=True)
class PlainSide:
    """A trainer or engine that stores every tensor under its logical name: the layout of each, by name."""

    layouts: Mapping[str, Layout]

    @property
    def ranks(self) -> Collection[int]:
        """The ranks in the meshes of all layouts."""
        return frozenset(
            rank for layout in set(self.layouts.values()) for rank in layout.mesh.ranks
        )

    def bind(self, tensors: Shapes, unused: Sequence[str] = ()) -> PlainSide:
        """Return a PlainSide (the layouts in which a trainer or engine stores tensors) with only `tensors`. Raises
        StoreError if the layout of a tensor is missing, or differs from `tensors` in shape or dtype. A tensor that
        matches a glob in `unused` can lack a layout."""
        faults = []
        held = {}
        for name, (shape, dtype) in tensors.items():
            layout = self.layouts.get(name)
            if layout is None:
                if not matches(name, unused):
                    fix = "add one, or leave the tensor out of the shapes"
                    what = f"no layout is given for {name!r}; {fix}"
                    faults.append(f"{what}; unused= may name it if only engines lack it")
            elif layout.shape != tuple(shape) or layout.dtype != dtype:
                what = f"{name!r} is {dtype}{list(shape)}, and its layout is {layout}"
                faults.append(
                    f"{what}; make them equal, or pass the engines' in served=, with rules="
                )
            else:
                held[name] = layout
        if faults:
            raise StoreError("\n".join(faults))
        return PlainSide(held)

    def slots(self, rank: int) -> dict[str, Slot]:
        """Return a dict from name to Slot (stored tensor, slices) of each tensor with a part on `rank`. The slices of
        each Slot select the whole stored tensor."""
        return {name: slot for name, slot, _ in self.visit(rank)}

    def natives(self, rank: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """The shape of each tensor that `rank` stores, by (0, name); the 0 stands for the first virtual stage."""
        return {(0, name): shape for name, _, shape in self.visit(rank)}

    def visit(self, rank: int) -> Iterator[tuple[str, Slot, tuple[int, ...]]]:
        """Yield (name, Slot (location), shape of the stored tensor) for each tensor of which `rank` holds a part."""
        for name, layout in self.layouts.items():
            if rank in layout.mesh:
                shape = layout.local_shape(rank)
                cut = tuple(slice(0, n, 1) for n in shape)
                order = tuple(range(len(shape)))
                slot = Slot(0, name, cut, order, "")
                yield name, slot, shape

    def find_computed(self, names: Collection[str]) -> None:
        """Return None: a plain side stores each of the tensors `names` as it is, never a function of its values."""

    def row_of(self, native: tuple[int, str], rank: int) -> str:
        """Return text that says how `rank` stores the tensor `native`, a (chunk, name): "name = name : layout". The
        name is there twice, since every tensor is stored under its logical name. Raises StoreError if `rank` does not
        store the tensor."""
        _, name = native
        if name not in self.layouts or rank not in self.layouts[name].mesh:
            stored = [other for other, layout in self.layouts.items() if rank in layout.mesh]
            if not stored:
                what = f"rank {rank} is not on this side, which has {show_ranks(self.ranks)}"
                raise StoreError(f"{what}; pass one of these")
            what = f"rank {rank} stores no {name!r}, but {', '.join(map(repr, stored[:8]))}"
            raise StoreError(f"{what}; pass a key of natives({rank})")
        return f"{name} = {name} : {self.layouts[name].text}"
