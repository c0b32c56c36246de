"""Grouping: which tensors move together, so that who stores them has whole modules at once.

1. Names of one layer are together: those with the same outermost number. Others are by module, such as an embedding,
   a norm, and a head.
2. What lies in one module of an engine is together, whatever its tensors are called: a fused tensor arrives whole.

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
    """The names by layer, and by module where they are of none, in the order in which these come first."""
    groups: dict[object, list[str]] = {}
    for name in names:
        key = _find_layer(name) or name.rpartition(".")[0]
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _find_layer(name: str) -> tuple[str, int] | None:
    """What stands before the outermost number of a name, and the number; None where there is none."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:place]), int(part)
    return None


def join_modules(groups: Sequence[Sequence[str]], engines: Iterable[KnownSide]) -> list[list[str]]:
    """The groups, of which those that reach into one module of an engine's rank are one."""
    number = {name: i for i, group in enumerate(groups) for name in group}
    first = list(range(len(groups)))
    for engine in engines:
        for rank in engine.ranks:
            _join_rank(engine, rank, number, first)
    joined: dict[int, list[str]] = {}
    for i, group in enumerate(groups):
        joined.setdefault(_find_first(first, i), []).extend(group)
    return list(joined.values())


def _join_rank(engine: KnownSide, rank: int, number: Mapping[str, int], first: list[int]) -> None:
    """Join the groups that reach into one module of the rank; `number` are names' groups."""
    modules: dict[object, int] = {}
    for name, slot in engine.slots(rank).items():
        # Companions go with what they are beside.
        if name not in number:
            continue
        module = slot.chunk, slot.native.rpartition(".")[0]
        own = _find_first(first, number[name])
        other = _find_first(first, modules.setdefault(module, own))
        first[max(own, other)] = min(own, other)


def _find_first(first: Sequence[int], group: int) -> int:
    """The first of those that are one with a group; all others point to one before them."""
    while first[group] != group:
        group = first[group]
    return group
