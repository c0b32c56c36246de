"""Tensors: the tensors of a move, grouped; all of them, or those that differ from the last move.

1. If few tensors differ, only these are read, and each leaves one group for another.
2. If ranks differ, all layouts are other objects, but tensors that had equal layouts have equal layouts again: groups
   are read instead of tensors.
3. Tensors that are read from the last move equal those that are read anew, groups and their order included.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from shardmath.layouts.holdings import LayoutOrWindows, Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.groups import (
    NOTHING,
    Group,
    Side,
    group_alike,
    list_windows,
    make_groups,
    pair_by_name,
)
from shardmath.plans.reduction import Reduction

__all__ = ["Given", "Tensors", "list_given", "read_tensors", "reread_tensors"]

FEW = 64
"""The number of tensors, beside a sixteenth of all, that move one by one from group to group."""

_Side: TypeAlias = Mapping[str, LayoutOrWindows]
_Pair: TypeAlias = tuple[int, int]
"""The ids of the windows at the source and at the destination."""


class Given(NamedTuple):
    """What a caller gave for a side: the names of the tensors, and what each stands for, in the caller's order."""

    names: list[str]
    held: list[object]


class Tensors(NamedTuple):
    """The tensors of a move by name, ascending: their windows at source and destination, their reductions, and the
    groups of tensors that share their windows."""

    src: Mapping[str, Windows]
    dst: Mapping[str, Windows]
    rules: Mapping[str, Reduction]
    alike: list[Group]


class Read(Protocol):
    """The parts of a Plan from which the tensors of a changed move are read: layouts and reductions by tensor name, and
    the names of each group of tensors with equal layouts."""

    @property
    def src(self) -> Mapping[str, Windows]: ...
    @property
    def dst(self) -> Mapping[str, Windows]: ...
    @property
    def rules(self) -> Mapping[str, Reduction]: ...
    @property
    def alike(self) -> tuple[tuple[str, ...], ...]: ...


def list_given(side: Side) -> Given:
    """Return what a caller gave for a side. There are no names if it is not a mapping."""
    if isinstance(side, Mapping):
        return Given(list(side), list(side.values()))
    return Given([], [side])


def read_tensors(src: Side, dst: Side) -> Tensors:
    """Return the tensors of the move from `src` to `dst`. Raises PlanError if both sides do not have the same names, or
    if the layouts of a tensor do not fit each other."""
    src_by_name, dst_by_name = pair_by_name(src, dst)
    names = sorted(src_by_name)
    source = list_windows(names, src_by_name)
    target = list_windows(names, dst_by_name)
    alike = group_alike(source, target)
    return Tensors(source, target, _list_rules(source, alike), alike)


def _list_rules(names: Mapping[str, object], alike: list[Group]) -> dict[str, Reduction]:
    """The reduction of each tensor."""
    rules = dict.fromkeys(names, NOTHING)
    for group in alike:
        if group.rule is not NOTHING:
            rules |= dict.fromkeys(group.names, group.rule)
    return rules


def reread_tensors(last: Read, given: tuple[Given, Given], src: Side, dst: Side) -> Tensors | None:
    """Return the tensors of the move from `src` to `dst`, as `read_tensors` does, but read only what differs from the
    plan `last`, which was made of `given`. Return None if too much differs."""
    if not (isinstance(src, Mapping) and isinstance(dst, Mapping)):
        return None
    src_by_name: _Side
    src_by_name, dst_by_name = src, dst
    now = list_given(src), list_given(dst)
    is_renamed = any(new.names != old.names for new, old in zip(now, given, strict=True))
    if is_renamed:
        src_by_name, dst_by_name = pair_by_name(src, dst)
    ends = _End.of(last.src, src_by_name, last.alike), _End.of(last.dst, dst_by_name, last.alike)
    if not all(end.is_single for end in ends):
        return None
    removed: set[str] = set()
    if is_renamed:
        changed = [end.find_changed() for end in ends]
        removed.update(itertools.filterfalse(src_by_name.__contains__, last.src))
    else:
        changed = [_find_differing(new, old) for new, old in zip(now, given, strict=True)]
    if sum(map(len, changed)) + len(removed) <= FEW + len(last.src) // 16:
        return _patch(last, ends, set(itertools.chain(*changed)), removed)
    return None if is_renamed else _translate(last, ends, given, now)


def _find_differing(new: Given, old: Given) -> list[str]:
    """The names that stand for other objects now."""
    return list(itertools.compress(new.names, map(operator.is_not, new.held, old.held)))


class _End(NamedTuple):
    """A side of a move: its windows before by name, what is held now, and the windows of each layout before."""

    before: Mapping[str, Windows]
    held: _Side
    known: dict[LayoutOrWindows, Windows]

    @classmethod
    def of(
        cls, before: Mapping[str, Windows], held: _Side, alike: Iterable[tuple[str, ...]]
    ) -> _End:
        """Return a side on which the tensors `alike` have the same layouts."""
        firsts = [before[names[0]] for names in alike]
        return cls(before, held, {windows[0]: windows for windows in firsts})

    @property
    def is_single(self) -> bool:
        """Whether all tensors were held under one layout each."""
        return all(windows.is_single for windows in self.known.values())

    def find_changed(self) -> list[str]:
        """Return the names of tensors that are new or have another layout."""
        held = list(self.held.values())
        if set(map(type, held)) != {Layout}:
            return list(self.held)  # others may have no hash
        windows = map(self.known.get, held, held)  # a layout that was nowhere stands for itself
        same = map(self.before.get, self.held)
        return list(itertools.compress(self.held, map(operator.is_not, windows, same)))

    def find(self, layout: object) -> Windows | None:
        """Return the windows of a layout, the same for each tensor; None for several layouts, or none."""
        if type(layout) is not Layout:
            return None
        return self.known.setdefault(layout, Windows((layout,)))


def _patch(
    last: Read, ends: tuple[_End, _End], changed: set[str], removed: set[str]
) -> Tensors | None:
    """The tensors, if only those of these names were changed or added, or were removed."""
    sides = []
    added = changed.difference(last.src)
    order = None
    if removed or added:
        # Those that stay are in order, so that sorting takes little.
        staying = itertools.filterfalse(removed.__contains__, last.src)
        order = sorted(itertools.chain(staying, added))
    for end in ends:
        fresh = {name: end.find(end.held[name]) for name in changed if type(name) is str}
        if None in fresh.values() or len(fresh) < len(changed):
            return None
        sides.append(_replace(end.before, fresh, order))
    source, target = sides
    names_of = {_pair(last.src, last.dst, names[0]): names for names in last.alike}
    leaving = _group(last.src, last.dst, (changed | removed) - added)
    for pair, some in leaving.items():
        names_of[pair] = tuple(name for name in names_of[pair] if name not in some)
    for pair, some in _group(source, target, changed).items():
        names_of[pair] = tuple(sorted((*names_of.get(pair, ()), *some)))
    return _tensors(last, source, target, filter(None, names_of.values()))


def _replace(
    before: Mapping[str, Windows], fresh: Mapping[str, Windows], order: list[str] | None
) -> Mapping[str, Windows]:
    """The windows of a side with those in place of some; of the names in this order, if names differ."""
    if order is None and all(before[name] is windows for name, windows in fresh.items()):
        return before
    now = dict(before)
    now.update(fresh)
    if order is None:
        return now
    return dict(zip(order, map(now.__getitem__, order), strict=True))


def _pair(src: Mapping[str, Windows], dst: Mapping[str, Windows], name: str) -> _Pair:
    return id(src[name]), id(dst[name])


def _group(
    src: Mapping[str, Windows], dst: Mapping[str, Windows], names: Iterable[str]
) -> dict[_Pair, set[str]]:
    """These names by their windows on both sides."""
    out: dict[_Pair, set[str]] = {}
    for name in names:
        out.setdefault(_pair(src, dst, name), set()).add(name)
    return out


def _translate(
    last: Read, ends: tuple[_End, _End], given: tuple[Given, Given], now: tuple[Given, Given]
) -> Tensors | None:
    """The tensors, if all that had one layout before have one layout again; else None."""
    sides: list[Mapping[str, Windows]] = []
    for end, old, new in zip(ends, given, now, strict=True):
        if old.held[0] is new.held[0] and all(map(operator.is_, old.held, new.held)):
            sides.append(end.before)
            continue
        became = dict(zip(old.held, new.held, strict=True))
        if not all(map(operator.is_, map(became.__getitem__, old.held), new.held)):
            return None
        windows = {before: end.find(after) for before, after in became.items()}
        if None in windows.values():
            return None
        side = dict(end.before)
        side.update(zip(old.names, map(windows.__getitem__, old.held), strict=True))
        sides.append(side)
    source, target = sides
    names_of: dict[_Pair, list[tuple[str, ...]]] = {}
    for names in last.alike:
        names_of.setdefault(_pair(source, target, names[0]), []).append(names)
    joined = map(_join, names_of.values())
    return _tensors(last, source, target, joined)


def _join(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    return parts[0] if len(parts) == 1 else tuple(sorted(itertools.chain.from_iterable(parts)))


def _tensors(
    last: Read,
    source: Mapping[str, Windows],
    target: Mapping[str, Windows],
    names: Iterable[tuple[str, ...]],
) -> Tensors:
    """The tensors of these groups of names, with the reductions of the last plan if there were and are none."""
    groups = make_groups(sorted(names, key=operator.itemgetter(0)), source, target)
    nothing = all(group.rule is NOTHING for group in groups)
    if nothing and len(source) == len(last.src) and source.keys() == last.rules.keys():
        rules = last.rules
        if all(rules[names[0]] is NOTHING for names in last.alike):
            return Tensors(source, target, rules, groups)
    return Tensors(source, target, _list_rules(source, groups), groups)
