"""Tensors: the tensors of a move, grouped; all of them, or those that differ from the last move.

1. If few tensors differ, only these are read, and each leaves one group for another.
2. If ranks differ, all layouts are other objects, but tensors that had equal layouts have equal layouts again: groups
   are read instead of tensors.
3. Tensors that are read from the last move equal those that `read_tensors` gives, groups and their order included.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from shardmath.base.arrays import Ints, addresses
from shardmath.base.views import to_dict
from shardmath.layouts.holdings import Windows
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

__all__ = [
    "Ends",
    "GivenSide",
    "Tensors",
    "list_given",
    "name_plainly",
    "read_tensors",
    "reread_tensors",
]

FEW = 64
"""The number of tensors, beside a sixteenth of all, that move one by one from group to group."""

_Key = TypeVar("_Key")
_Pair: TypeAlias = tuple[int, int]
"""The ids of the windows at the source and at the destination."""


class GivenSide(NamedTuple):
    """The argument for one side: the names of the tensors, and what each stands for, in the caller's order.

    `ids` are the ids of what is held, which are compared faster than objects.
    """

    names: list[str]
    held: list[object]
    ids: Ints


Ends: TypeAlias = tuple[GivenSide, GivenSide]
"""The source and the destination as a caller gave them."""


class Tensors(NamedTuple):
    """The tensors of a move by name, ascending: their windows at source and destination, their reductions, and the
    groups of tensors that share their windows."""

    src: Mapping[str, Windows]
    dst: Mapping[str, Windows]
    rules: Mapping[str, Reduction]
    alike: list[Group]


class Grouped(Protocol):
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


def list_given(side: Side) -> GivenSide:
    """Return the names and values of an argument of `plan`. There are no names if it is not a mapping."""
    if not isinstance(side, Mapping):
        return GivenSide([], [side], addresses([side]))
    names = list(side)
    # A subclass may have other values than items.
    held: list[object] = list(side.values()) if type(side) is dict else [side[n] for n in names]
    return GivenSide(names, held, addresses(held))


def name_plainly(given: GivenSide) -> GivenSide:
    """Return the side with names that are plain str: a subclass may have another hash. Other names stay."""
    if set(map(type, given.names)) <= {str}:
        return given
    plain = [str.__str__(name) if isinstance(name, str) else name for name in given.names]
    return given._replace(names=plain)


def read_tensors(src: Side, dst: Side) -> Tensors:
    """Return the tensors of the move from `src` to `dst`. Raises PlanError if both sides do not have the same names, or
    if the layouts of a tensor do not fit each other."""
    src_by_name, dst_by_name = pair_by_name(src, dst)
    names = sorted(src_by_name)
    source = list_windows(names, src_by_name)
    target = list_windows(source, dst_by_name)
    alike = group_alike(source, target)
    return Tensors(source, target, _list_rules(source, alike), alike)


def _list_rules(names: Mapping[str, object], alike: list[Group]) -> dict[str, Reduction]:
    """The reduction of each tensor."""
    rules = dict.fromkeys(names, NOTHING)
    for group in alike:
        if group.rule is not NOTHING:
            rules |= dict.fromkeys(group.names, group.rule)
    return rules


def reread_tensors(last: Grouped, given: Ends, now: Ends) -> Tensors | None:
    """Return the tensors of the move between the two sides `now`, as `read_tensors` does, but read only what differs
    from the plan `last`, which was made of `given`. Return None if too much differs."""
    if any(len(side.names) != len(side.held) for side in (*given, *now)):
        return None  # not all sides are mappings
    if any(set(map(type, side.held)) != {Layout} for side in given):
        return None  # some tensor has several windows
    ends = _End.of(last.src, last.alike), _End.of(last.dst, last.alike)
    found = _compare(given[0], now[0]), _compare(given[1], now[1])
    if (found[0].added, found[0].removed) != (found[1].added, found[1].removed):
        return None  # the sides have other names, or names in other orders
    if sum(len(side.at) for side in found) <= FEW + len(last.src) // 16:
        return _patch(last, ends, now, found)
    return _translate(last, ends, given, now)


class _Differences(NamedTuple):
    """The places at which a side has another tensor or layout than before, and the names that came and that left."""

    at: list[int]
    added: set[str]
    removed: set[str]


def _compare(old: GivenSide, new: GivenSide) -> _Differences:
    """How a side differs from the side before: where both begin and end with the same names, in layouts."""
    begin = stop = end = len(new.names)
    if old.names != new.names:
        most = min(len(old.names), len(new.names))
        begin = _count_same(old.names, new.names, most)
        tail = _count_same(reversed(old.names), reversed(new.names), most - begin)
        stop = len(new.names) - tail
        end = len(old.names) - tail
    # No object has the id -1.
    between = np.full(stop - begin, -1)
    before = np.concatenate([old.ids[:begin], between, old.ids[end:]])
    at = np.flatnonzero(new.ids != before).tolist()
    come = set(new.names[begin:stop])
    gone = set(old.names[begin:end])
    return _Differences(at, come - gone, gone - come)


def _count_same(a: Iterable[str], b: Iterable[str], most: int) -> int:
    """The number of equal items with which both begin, but at most so many."""
    differ = map(operator.ne, a, b)
    return min(next(itertools.compress(itertools.count(), differ), most), most)


class _End(NamedTuple):
    """A side of a move: its windows before, by name and by layout."""

    before: Mapping[str, Windows]
    known: dict[object, Windows]

    @classmethod
    def of(cls, before: Mapping[str, Windows], alike: Iterable[tuple[str, ...]]) -> _End:
        """Return a side on which the tensors `alike` have the same layouts."""
        firsts = [before[names[0]] for names in alike]
        return cls(before, {windows[0]: windows for windows in firsts})

    def find(self, held: Mapping[_Key, object]) -> dict[_Key, Windows] | None:
        """Return the windows of each of these layouts, one object for equal ones; None if some is not a layout."""
        out = {}
        for key, layout in held.items():
            if type(layout) is not Layout:
                return None
            out[key] = self.known.setdefault(layout, Windows((layout,)))
        return out


def _patch(
    last: Grouped, ends: tuple[_End, _End], now: Ends, found: tuple[_Differences, _Differences]
) -> Tensors | None:
    """The tensors, if only a few were changed, added or removed."""
    _, added, removed = found[0]
    changed: set[str] = set()
    sides: list[Mapping[str, Windows]] = []
    for end, side, (at, _, _) in zip(ends, now, found, strict=True):
        fresh = end.find({side.names[i]: side.held[i] for i in at})
        if fresh is None or not set(map(type, fresh)) <= {str}:
            return None
        changed.update(fresh)
        sides.append(_edit(end.before, fresh, removed, next(iter(sides), None)))
    source, target = sides
    names_of = {_pair(last.src, last.dst, names[0]): names for names in last.alike}
    leaving = _group(last.src, last.dst, (changed | removed) - added)
    for pair, some in leaving.items():
        names_of[pair] = _leave_out(names_of[pair], some)
    for pair, some in _group(source, target, changed).items():
        names_of[pair] = _join([names_of.get(pair, ()), tuple(some)])
    return _tensors(last, source, target, filter(None, names_of.values()))


def _leave_out(names: tuple[str, ...], some: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in some)


def _edit(
    before: Mapping[str, Windows],
    fresh: Mapping[str, Windows],
    removed: set[str],
    like: Mapping[str, Windows] | None,
) -> Mapping[str, Windows]:
    """The windows of a side with the fresh ones and without some; names stay ascending. `like` is the other side, if it
    was edited before."""
    if not removed and all(before.get(name) is windows for name, windows in fresh.items()):
        return before
    now = to_dict(before)
    for name in removed:
        del now[name]
    added = sorted(name for name in fresh if name not in now)
    now.update(fresh)
    if not added:
        return now
    # A dict has no room in the middle: it is made again from lists, which have.
    names = list(now)[: -len(added)]
    windows = list(now.values())[: -len(added)]
    for name in added:
        at = bisect.bisect(names, name)
        names.insert(at, name)
        windows.insert(at, now[name])
    out = {} if like is None else to_dict(like)
    out.update(zip(names, windows, strict=True))
    return out


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


def _translate(last: Grouped, ends: tuple[_End, _End], given: Ends, now: Ends) -> Tensors | None:
    """The tensors, if all that had one layout before have one layout again; else None."""
    if any(old.names != new.names for old, new in zip(given, now, strict=True)):
        return None
    sides: list[Mapping[str, Windows]] = []
    for end, old, new in zip(ends, given, now, strict=True):
        if np.array_equal(old.ids, new.ids):
            sides.append(end.before)
            continue
        became = dict(zip(old.held, new.held, strict=True))
        if not all(map(operator.is_, map(became.__getitem__, old.held), new.held)):
            return None
        windows = end.find(became)
        if windows is None:
            return None
        side = to_dict(end.before)
        side.update(zip(old.names, map(windows.__getitem__, old.held), strict=True))
        sides.append(side)
    source, target = sides
    names_of: dict[_Pair, list[tuple[str, ...]]] = {}
    for names in last.alike:
        names_of.setdefault(_pair(source, target, names[0]), []).append(names)
    joined = map(_join, names_of.values())
    return _tensors(last, source, target, joined)


def _join(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The names of all parts, ascending, as they are in each part."""
    return parts[0] if len(parts) == 1 else tuple(sorted(itertools.chain.from_iterable(parts)))


def _tensors(
    last: Grouped,
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
