"""Copying: the binding of one side, reused for another with the same storage on other ranks.

1. Copies of an engine have the same rows, numbers and spots, and meshes of the same axes. The binding of one, with its
   ranks renamed, is the binding of the other: binding never depends on a rank's number.
2. So one binding serves any number of equal engines.

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
from shardmath.layouts.edits import relabeled
from shardmath.models.storage.binding import Bound, Held
from shardmath.models.storage.owners import OwnedTensor
from shardmath.models.storage.stored import Stored

__all__ = ["copy_bound"]


def copy_bound(bound: Bound, stored: Stored) -> Bound | None:
    """Return a copy of `bound` (how the ranks of one engine store tensors) for the ranks of another engine, whose
    storage is declared in `stored`. Return None if the two engines differ in more than their ranks."""
    ranks = _match_ranks(bound.stored.meshes, stored.meshes)
    if ranks is None or dataclasses.replace(bound.stored, meshes=stored.meshes) != stored:
        return None
    renamed = {layout: relabeled(layout, ranks) for layout in set(bound.layouts.values())}
    layouts = {name: renamed[layout] for name, layout in bound.layouts.items()}
    renamer = _Renamer(ranks)
    held = map(renamer.rename, bound.held)
    return Bound(stored, layouts, tuple(held))


def _match_ranks(ours: Iterable[Mesh], theirs: Iterable[Mesh]) -> dict[int, int] | None:
    """The rank in their meshes for each rank in ours; None if the meshes differ in more than ranks."""
    ours, theirs = tuple(ours), tuple(theirs)
    if [mesh.axes for mesh in ours] != [mesh.axes for mesh in theirs]:
        return None
    renamed: dict[int, int] = {}
    for our_mesh, their_mesh in zip(ours, theirs, strict=True):
        for our_rank, their_rank in zip(our_mesh.ranks, their_mesh.ranks, strict=True):
            if renamed.setdefault(our_rank, their_rank) != their_rank:
                return None
    return renamed


class _Renamer:
    """Renames ranks in the stored tensors of rows; blocks that share meshes share the renamed ones."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self.ranks = ranks
        self.meshes: dict[tuple[Mesh, ...], tuple[Mesh, ...]] = {}

    def rename(self, held: Held) -> Held:
        """Return a copy of `held`, a declaration of stored tensors, in which every rank r is replaced by
        `self.ranks[r]`."""
        blocks = map(self._rename_block, held.blocks)
        return dataclasses.replace(held, blocks=tuple(blocks))

    def _rename_block(self, block: OwnedTensor) -> OwnedTensor:
        """The same stored tensor on the other ranks."""
        owner = block.owner
        meshes = self.meshes.get(owner.meshes)
        if meshes is None:
            renamed = {mesh: mesh.relabel(self.ranks) for mesh in set(owner.meshes)}
            meshes = tuple(map(renamed.__getitem__, owner.meshes))
            self.meshes[owner.meshes] = meshes
        return block._replace(owner=owner._replace(meshes=meshes))
