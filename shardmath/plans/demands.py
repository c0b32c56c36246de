"""Lines: all that is asked, of whom and by whom, as integers.

1. A **line** belongs to a set of ranks that hold the same, its holders. It is made of **blocks**, one for each set of
   receivers. A block's **content** is `nbytes` bytes, the same for every receiver: rows one after the other, in each
   the tensors of a batch one after the other, of each tensor one unit.
2. On the line a block takes its content once for every receiver, receiver by receiver. A receiver that is a holder
   itself copies locally and is not on the line.
3. With a topology, receivers with a holder on their own node ask the holders there: a **near** line.
4. The order of lines, blocks and rows depends on what ranks hold alone, so every rank finds the same.

Nothing here grows with pairs of ranks: rows are a template's units, once for each batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardmath.algebra.mesh import Mesh
from shardmath.base.arrays import Bools, Ints, begins, ranges
from shardmath.base.errors import PlanError
from shardmath.flows.topology import Topology
from shardmath.plans.template import Members, Template, snap, unit_addends

__all__ = ["Batch", "Lines", "Ranks", "lines", "wire"]

Ranks: TypeAlias = tuple[int, ...]
"""Distinct ranks, ascending."""

MOST_BYTES = 1 << 61
"""That all ranks together ask for; sums and differences stay exact in 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors `names` that move by one template from ranks `src` to ranks `dst`, from source window `source` to
    destination window `target`."""

    template: Template
    names: tuple[str, ...]
    src: Mesh
    dst: Mesh
    source: int = 0
    target: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """All lines, and where they are cut.

    Line l is held by the ranks `sets[holders[l]]` and has the blocks `first[l]..first[l+1]-1`; its h-th holder sends
    the bytes `cuts[cut_first[l] + h]..cuts[cut_first[l] + h + 1] - 1` of it; `near` lines stay on a node.
    Block b begins at byte `start[b]` of its line, is addend `addend[b]` of what is folded (0 where nothing is), has
    `nbytes[b]` bytes for each of the `count[b]` ranks of `sets[receivers[b]]` that are not holders, and the rows
    `row_first[b]..row_first[b+1]-1`. Row r begins at byte `at[r]` of the content and is elements `lo[r]..hi[r]-1` of
    `unit[r]`, `each[r]` bytes, of every tensor of `batch[r]`.
    """

    sets: tuple[Ranks, ...]
    holders: Ints
    near: Bools
    first: Ints
    cut_first: Ints
    cuts: Ints
    receivers: Ints
    addend: Ints
    count: Ints
    nbytes: Ints
    start: Ints
    row_first: Ints
    batch: Ints
    unit: Ints
    lo: Ints
    hi: Ints
    at: Ints
    each: Ints


class _Sets:
    """Sets of ranks by number, each once."""

    def __init__(self) -> None:
        self.number: dict[Ranks, int] = {}
        self._known: dict[tuple[int, int], Ints] = {}

    def of(self, ranks: Ranks) -> int:
        return self.number.setdefault(ranks, len(self.number))

    def named(self, mesh: Mesh, members: Members) -> Ints:
        """The number of each set of positions, its positions named by the mesh."""
        key = id(mesh), id(members)
        if key not in self._known:
            ranks = np.array(mesh.ranks, np.int64)[members.position].tolist()
            bounds = itertools.pairwise(members.first.tolist())
            self._known[key] = np.array(
                [self.of(tuple(sorted(ranks[a:b]))) for a, b in bounds], np.int64
            )
        return self._known[key]

    def ordered(self) -> tuple[tuple[Ranks, ...], Ints]:
        """All sets in order, and the place of each number."""
        listed = sorted(self.number)
        place = np.empty(len(listed), np.int64)
        place[[self.number[ranks] for ranks in listed]] = np.arange(len(listed))
        return tuple(listed), place


_Asked: TypeAlias = tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]
"""batch, unit, its order, lo, hi, holders, receivers: by row"""


def lines(batches: Sequence[Batch], topology: Topology | None = None) -> Lines:
    """The lines of all batches, not cut yet."""
    sets = _Sets()
    asked = _stacked(_asked(batches, sets))
    near = np.zeros(len(asked[0]), np.int64)
    if topology is not None:
        asked, near = _by_node(asked, sets, topology)
    listed, place = sets.ordered()
    return _sorted(batches, listed, near, (*asked[:5], place[asked[5]], place[asked[6]]))


def _stacked(parts: Iterable[_Asked]) -> _Asked:
    columns = list(zip(*parts, strict=True)) or [()] * 7
    empty = np.zeros(0, np.int64)
    return tuple(np.concatenate([empty, *column]) for column in columns)  # type: ignore[return-value]


def _asked(batches: Sequence[Batch], sets: _Sets) -> Iterable[_Asked]:
    """Who asks whom for which unit, template by template."""
    groups: dict[Template, list[int]] = {}
    for b, batch in enumerate(batches):
        groups.setdefault(batch.template, []).append(b)
    for t, members in groups.items():
        if t.reduction.chosen:
            yield from (_one_each(b, batches[b], sets) for b in members)
            continue
        here = np.concatenate(
            [sets.named(batches[b].src, t.holders)[t.unit_class] for b in members]
        )
        there = np.concatenate(
            [sets.named(batches[b].dst, t.receivers)[t.unit_cell] for b in members]
        )
        of = np.array(members, np.int64).repeat(len(t.unit_size))
        unit = np.arange(len(of)) % len(t.unit_size)
        yield of, unit, t.unit_order[unit], np.zeros_like(of), t.unit_size[unit], here, there


def _one_each(b: int, batch: Batch, sets: _Sets) -> _Asked:
    """Where any one destination addend may receive: for each unit the one that most hold already, or all a stripe.

    Replicas of an addend have to stay equal, so what is chosen depends on the unit alone.
    """
    t = batch.template
    addend = t.dst.mesh.coordinate(t.reduction.chosen)
    here, there = list(t.holders), list(t.receivers)
    rows: list[tuple[int, int, int, int]] = []
    for unit, (klass, cell) in enumerate(
        zip(t.unit_class.tolist(), t.unit_cell.tolist(), strict=True)
    ):
        held = {batch.src.ranks[i] for i in here[klass].tolist()}
        asking: dict[int, list[int]] = {}
        for i in there[cell].tolist():
            asking.setdefault(int(addend[i]), []).append(batch.dst.ranks[i])
        local = {a: sum(r in held for r in ranks) for a, ranks in asking.items()}
        most = max(sorted(local), key=lambda a: local[a])
        stripes = [most] if local[most] else sorted(asking)
        for (lo, hi), a in zip(_stripes(t, unit, len(stripes)), stripes, strict=True):
            rows += [(unit, lo, hi, sets.of(tuple(sorted(asking[a]))))] * (lo < hi)
    unit_, lo_, hi_, receivers = np.array(rows, np.int64).reshape(-1, 4).T
    holders = sets.named(batch.src, t.holders)[t.unit_class[unit_]]
    return np.full(len(rows), b), unit_, t.unit_order[unit_], lo_, hi_, holders, receivers


def _stripes(t: Template, unit: int, count: int) -> list[tuple[int, int]]:
    """The unit in `count` even ranges of elements, snapped."""
    size = int(t.unit_size[unit])
    return list(
        itertools.pairwise([*(snap(t, unit, size * j // count) for j in range(count)), size])
    )


def _by_node(asked: _Asked, sets: _Sets, topology: Topology) -> tuple[_Asked, Ints]:
    """The same with receivers apart whose node has a holder: those ask the holders there."""
    listed = list(sets.number)
    pairs, index = np.unique(asked[5] * len(listed) + asked[6], return_inverse=True)
    split = [
        _near_far(listed[p // len(listed)], listed[p % len(listed)], topology.node)
        for p in pairs.tolist()
    ]
    first = np.cumsum([0, *map(len, split)])
    table = np.array(
        [(sets.of(h), sets.of(r), near) for parts in split for h, r, near in parts], np.int64
    )
    table = table.reshape(-1, 3)
    at, row = ranges(first[index.ravel()], first[index.ravel() + 1])
    rest = [column[row] for column in asked[:5]]
    return (rest[0], rest[1], rest[2], rest[3], rest[4], table[at, 0], table[at, 1]), table[at, 2]


def _near_far(
    holders: Ranks, receivers: Ranks, node: Callable[[int], int]
) -> list[tuple[Ranks, Ranks, bool]]:
    """(holders, receivers, whether they are on one node): by node that has holders too, then all other receivers."""
    here: dict[int, list[int]] = {}
    for rank in holders:
        here.setdefault(node(rank), []).append(rank)
    there: dict[int, list[int]] = {}
    for rank in receivers:
        there.setdefault(node(rank) if node(rank) in here else -1, []).append(rank)
    far = tuple(there.pop(-1, ()))
    near = [(tuple(here[n]), tuple(ranks), True) for n, ranks in sorted(there.items())]
    return near + [(holders, far, False)] * bool(far)


def _sorted(batches: Sequence[Batch], sets: tuple[Ranks, ...], near: Ints, asked: _Asked) -> Lines:
    """Rows in their order, gathered in blocks and lines."""
    batch, unit, order, lo, hi, holders, receivers = asked
    line, addend = holders * 2 + near, _addends(batches, batch, unit)
    block = (line * (int(addend.max(initial=0)) + 1) + addend) * len(sets) + receivers
    by = np.lexsort((lo, batch * (int(order.max(initial=0)) + 1) + order, block))
    batch, unit, lo, hi, block = (x[by] for x in (batch, unit, lo, hi, block))
    of_block = begins(block)
    receivers, addend, line = (x[by[of_block]] for x in (receivers, addend, line))
    row_first = np.append(of_block, len(by))
    _check_total(batches, sets, batch, hi - lo, block % len(sets))
    each = (hi - lo) * np.array([b.template.src.itemsize for b in batches], np.int64)[batch]
    ends = _ends(each * np.array([len(b.names) for b in batches], np.int64)[batch])
    nbytes = ends[row_first[1:]] - ends[row_first[:-1]]
    at = ends[:-1] - np.repeat(ends[row_first[:-1]], np.diff(row_first))
    keys, first = np.unique(line, return_index=True)
    count = _counts(sets, line // 2, receivers)
    block_ends = _ends(nbytes * count)
    start = block_ends[:-1] - np.repeat(block_ends[first], np.diff(np.append(first, len(of_block))))
    none = np.zeros(0, np.int64)
    bounds = np.append(first, len(of_block))
    return Lines(
        sets, keys // 2, keys % 2 > 0, bounds, none, none, receivers, addend, count, nbytes, start, row_first,
        batch, unit, lo, hi, at, each,
    )  # fmt: skip


def _addends(batches: Sequence[Batch], batch: Ints, unit: Ints) -> Ints:
    """Of which addend each row is; 0 where nothing is folded."""
    out = np.zeros(len(batch), np.int64)
    for b, one in enumerate(batches):
        if one.template.reduction.folded:
            mine = batch == b
            out[mine] = unit_addends(one.template)[unit[mine]]
    return out


def _check_total(
    batches: Sequence[Batch], sets: tuple[Ranks, ...], batch: Ints, elements: Ints, asking: Ints
) -> None:
    """Bytes are counted in 64 bits."""
    each = np.array([b.template.src.itemsize * len(b.names) for b in batches], np.float64)
    ranks = np.array([len(one) for one in sets], np.float64)
    total = float((elements * each[batch] * ranks[asking]).sum()) if len(batch) else 0.0
    if total > MOST_BYTES:
        raise PlanError(
            f"the plan moves about {total:.3g} bytes, more than {MOST_BYTES}; plan fewer tensors at a time"
        )


def _ends(sizes: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _counts(sets: tuple[Ranks, ...], holders: Ints, receivers: Ints) -> Ints:
    """How many receivers of each block are not holders."""
    size = np.array([len(ranks) for ranks in sets], np.int64)[receivers]
    sending = set().union(*(sets[i] for i in np.unique(holders).tolist()))
    meets = {i for i in np.unique(receivers).tolist() if not sending.isdisjoint(sets[i])}
    asking = {i: frozenset(sets[i]) for i in meets}
    for b in np.flatnonzero(np.isin(receivers, list(meets))).tolist():
        size[b] -= len(asking[int(receivers[b])].intersection(sets[int(holders[b])]))
    return size


def wire(on: Lines, line: int, block: int) -> Ranks:
    """The receivers of a block that do not hold it themselves."""
    asking = on.sets[on.receivers[block]]
    if on.count[block] == len(asking):
        return asking
    return tuple(sorted(set(asking).difference(on.sets[on.holders[line]])))
