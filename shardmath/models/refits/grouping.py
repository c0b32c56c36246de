"""Grouping: tensors that move together, so that an engine receives whole modules at once.

1. Names with the same outermost number, one layer's, are one group. Names without a number are grouped by module, such
   as an embedding, a norm, or a head.
2. Tensors in one module of an engine are in one group, whatever their names: a fused tensor arrives whole.

>>> names = ["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.10.q.weight", "norm.weight"]
>>> for group in group_by_layer(names):
...     print(*group)
embed.weight
layers.0.q.weight layers.0.k.weight
layers.10.q.weight
norm.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardmath.models.storage.stored import KnownSide

__all__ = ["group_by_layer", "join_modules"]


def group_by_layer(names: Iterable[str]) -> list[list[str]]:
    """Return lists of the tensor `names`, one per layer (or per module for names without a layer), in the order in
    which layers first occur."""
    groups: dict[object, list[str]] = {}
    for name in names:
        key = _find_layer(name) or name.rpartition(".")[0]
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _find_layer(name: str) -> tuple[str, int] | None:
    """(text before it, number) of the outermost number of a name; None without a number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        # int reads no other digits, such as "²", and other scripts' digits as those of ASCII.
        if part.isascii() and part.isdecimal():
            return ".".join(parts[:i]), int(part)
    return None


def join_modules(groups: Sequence[Sequence[str]], engines: Iterable[KnownSide]) -> list[list[str]]:
    """Merge any two `groups` of tensor names that both have tensors in the same module on one rank of an engine. Return
    all groups after merging."""
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    # Union-find: each group points to an earlier one that it is joined with, or to itself.
    parents = list(range(len(groups)))
    for engine in engines:
        for rank in engine.ranks:
            _join_rank(engine, rank, group_of, parents)
    joined: dict[int, list[str]] = {}
    for i, group in enumerate(groups):
        joined.setdefault(_find_root(parents, i), []).extend(group)
    return list(joined.values())


def _join_rank(
    engine: KnownSide, rank: int, group_of: Mapping[str, int], parents: list[int]
) -> None:
    """Join the groups that have tensors in one module of the rank."""
    group_of_module: dict[object, int] = {}
    for name, slot in engine.slots(rank).items():
        # Companions, such as scales, move with their tensors.
        if name not in group_of:
            continue
        module = slot.chunk, slot.native.rpartition(".")[0]
        group = _find_root(parents, group_of[name])
        other = _find_root(parents, group_of_module.setdefault(module, group))
        parents[max(group, other)] = min(group, other)


def _find_root(parents: Sequence[int], group: int) -> int:
    """The first of the groups that are joined with this one."""
    while parents[group] != group:
        group = parents[group]
    return group
