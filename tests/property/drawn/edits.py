"""Edits: plans with something else in their tables, and what comes of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shardmath import Layout, Mesh, Plan, PlanError, plan, verify
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.reduction import Reduction
from shardmath.plans.template import Members, Template, unit_addends
from tests.property.drawn.plans import FAR, LINE, executed, right

# Whether it is right


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool((a == b).all())
    return repr(a) == repr(b) if isinstance(a, int | float | complex | None) else bool(a == b)


def outcome(p: Plan) -> Any:
    """What would be executed, or that it cannot be."""
    try:
        return executed(p)
    except Exception:
        return None


def refused(p: Plan) -> bool:
    """Whether PlanError comes out; nothing else may."""
    try:
        verify(p)
    except PlanError:
        return True
    return False


def is_right(p: Plan, done: Any) -> bool:
    """Whether both ends find the same, and it is right."""
    return done is not None and done[1] == done[2] and right(p, done[0])


# Something else at one place

PARTS = (Plan, Batch, Template, Overlay, Demands, Partition, Reduction, Members)
SPECIFICATION = ("src", "dst", "rules", "digest", "is_tree", "topology", "alike", "whole", "left")
"""Fields of a plan that are no tables."""


def leaves(
    value: Any, rebuild: Callable[[Any], Any] = lambda new: new
) -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """Everything inside a plan's tables, with how to put something else in its place."""
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)
        if isinstance(value, Plan) and f.name in SPECIFICATION:
            continue

        def put(new: Any, value: Any = value, name: str = f.name) -> Any:
            return rebuild(dataclasses.replace(value, **{name: new}))

        yield f"{type(value).__name__}.{f.name}", inner, put
        if isinstance(inner, PARTS):
            yield from leaves(inner, put)
        elif isinstance(inner, tuple) and inner and isinstance(inner[0], PARTS):
            for i, item in enumerate(inner):
                yield from leaves(
                    item, lambda new, i=i, all=inner, put=put: put((*all[:i], new, *all[i + 1 :]))
                )


def edited(value: Any, path: str, change: Callable[[Any], Any]) -> Any:
    """The value with something else at the end of a path of fields and numbers."""
    head, _, rest = path.partition(".")
    if not head:
        return change(value)
    if head.isdigit():
        return tuple(edited(x, rest, change) if i == int(head) else x for i, x in enumerate(value))
    return dataclasses.replace(value, **{head: edited(getattr(value, head), rest, change)})


def to(*new: Any) -> Callable[[Any], Any]:
    """Another value; in an array, after its index."""
    *index, number = new

    def change(old: Any) -> Any:
        if not index:
            return number
        out = old.copy()
        out[tuple(index)] = number
        return out

    return change


# Other rows


class Row(NamedTuple):
    """Elements lo..hi-1 of a unit of a batch, of ranks that hold them, for others."""

    batch: int
    unit: int
    lo: int
    hi: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def rows_of(p: Plan) -> list[Row]:
    on, out = p.lines, []
    for line in range(len(on.holders)):
        for block in range(on.first[line], on.first[line + 1]):
            for r in range(on.row_first[block], on.row_first[block + 1]):
                ranks = on.sets[on.holders[line]], on.sets[on.receivers[block]]
                out.append(
                    Row(int(on.batch[r]), int(on.unit[r]), int(on.lo[r]), int(on.hi[r]), *ranks)
                )
    return out


def grouped(
    rows: list[Row], key: Callable[[Row], tuple[int, ...]]
) -> list[tuple[tuple[int, ...], list[Row]]]:
    return [(k, list(group)) for k, group in itertools.groupby(sorted(rows, key=key), key)]


def addend_of(batches: tuple[Batch, ...], row: Row) -> int:
    t = batches[row.batch].template
    return int(unit_addends(t)[row.unit]) if t.reduction.folded else 0


def lines_of(
    batches: tuple[Batch, ...], rows: list[Row], share: Callable[[list[int], int], int]
) -> Demands:
    """Demands of these rows, end to end; `share` says where each is cut, given the borders of rows."""
    sets = sorted({ranks for row in rows for ranks in row[4:]})
    table: dict[str, list[Any]] = {f.name: [] for f in dataclasses.fields(Demands)}

    def add(**new: Any) -> None:
        for name, value in new.items():
            table[name].append(value)

    for holders, asked in grouped(rows, lambda row: row.holders):
        add(
            holders=sets.index(holders),
            near=False,
            first=len(table["start"]),
            cut_first=len(table["cuts"]),
        )
        length, borders = 0, [0]
        for (addend, *receivers), block in grouped(
            asked, lambda row: (addend_of(batches, row), *row.receivers)
        ):
            add(
                row_first=len(table["at"]),
                receivers=sets.index(tuple(receivers)),
                start=length,
                addend=addend,
            )
            count, size = len(set(receivers) - set(holders)), 0
            for row in block:
                batch = batches[row.batch]
                each = (row.hi - row.lo) * batch.template.src.itemsize
                add(batch=row.batch, unit=row.unit, lo=row.lo, hi=row.hi, at=size, each=each)
                size += each * len(batch.names)
                borders += [length + k * size for k in range(1, count + 1)][-1:]
            add(count=count, nbytes=size)
            length += size * count
        inner = sorted(share(sorted(set(borders)), length) for _ in holders[1:])
        table["cuts"] += [0, *inner, length]
    add(first=len(table["start"]), row_first=len(table["at"]), cut_first=len(table["cuts"]))
    arrays = {
        name: np.array(column, bool if name == "near" else np.int64)
        for name, column in table.items()
    }
    return Demands(**{**arrays, "sets": tuple(sets)})


def uncut(p: Plan, rows: list[Row]) -> Plan:
    """The plan with lines of these rows, all sent by the first holders."""
    return dataclasses.replace(p, lines=lines_of(p.batches, rows, lambda borders, length: length))


# Small plans to edit


def lay(mesh: Mesh, text: str) -> Layout:
    return Layout((6, 4), mesh, text)


ONE, TWO, FIVE = Mesh(), Mesh(a=2), Mesh(x=2, y=2, ranks=range(3, 7))
SPLIT = plan({"w": lay(LINE, "(a n) h")}, {"w": lay(FAR, "n h")})
TWICE = plan({"w": lay(TWO, "n h")}, {"w": lay(FAR, "n (x h)")})
SUM = plan({"w": lay(TWO, "n h {sum: a}")}, {"w": lay(FAR, "n (x h)")})
ANY = plan({"w": lay(ONE, "n h")}, {"w": lay(FIVE, "n h {sum: x}")})
