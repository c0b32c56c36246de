"""Copying: what is bound for one side, for another that stores alike on ranks of its own.

1. Copies of an engine have the same rows, numbers and spots, and meshes of the same axes. What is bound for one is
   the other's, its ranks renamed: nothing that binding does looks at what a rank is called.
2. So engines are bound once, however many there are.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
>>> from shardmath.models.storage.binding import bind
>>> one, other = (Stored(rows.parse("o.* = o.* : h (tp n)"), (Mesh(tp=2, ranks=ranks),)) for ranks in ((0, 1), (7, 5)))
>>> copy = copy_bound(bind(one, {"o.weight": ((4, 4), "float32")}), other)
>>> print(copy.layouts["o.weight"], copy.natives(5))
float32[4, 4] n (tp h) on tp=2 {(0, 'o.weight'): (4, 2)}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.edits import relabelled
from shardmath.models.storage.binding import Bound, Held
from shardmath.models.storage.owners import OwnedTensor
from shardmath.models.storage.stored import Stored

__all__ = ["copy_bound"]


def copy_bound(bound: Bound, stored: Stored) -> Bound | None:
    """What binding `stored` would give, None where it is no copy of the side that is bound."""
    ranks = _match_ranks(bound.stored.meshes, stored.meshes)
    if ranks is None or dataclasses.replace(bound.stored, meshes=stored.meshes) != stored:
        return None
    renamed = {layout: relabelled(layout, ranks) for layout in set(bound.layouts.values())}
    layouts = {name: renamed[layout] for name, layout in bound.layouts.items()}
    renamer = _Renamer(ranks)
    held = map(renamer.rename, bound.held)
    return Bound(stored, layouts, tuple(held))


def _match_ranks(ours: Iterable[Mesh], theirs: Iterable[Mesh]) -> dict[int, int] | None:
    """What each rank of ours is called in theirs, None where the meshes differ in more than that."""
    ours, theirs = tuple(ours), tuple(theirs)
    if [mesh.axes for mesh in ours] != [mesh.axes for mesh in theirs]:
        return None
    named: dict[int, int] = {}
    for one, other in zip(ours, theirs, strict=True):
        for rank, name in zip(one.ranks, other.ranks, strict=True):
            if named.setdefault(rank, name) != name:
                return None
    return named


class _Renamer:
    """Renames the ranks of what rows hold; blocks that share their meshes go on to share them."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self.ranks = ranks
        self.meshes: dict[tuple[Mesh, ...], tuple[Mesh, ...]] = {}

    def rename(self, held: Held) -> Held:
        """The same on the other ranks."""
        blocks = map(self._rename_block, held.blocks)
        return dataclasses.replace(held, blocks=tuple(blocks))

    def _rename_block(self, block: OwnedTensor) -> OwnedTensor:
        owner = block.owner
        meshes = self.meshes.get(owner.meshes)
        if meshes is None:
            renamed = {mesh: mesh.relabel(self.ranks) for mesh in set(owner.meshes)}
            meshes = tuple(map(renamed.__getitem__, owner.meshes))
            self.meshes[owner.meshes] = meshes
        return block._replace(owner=owner._replace(meshes=meshes))
