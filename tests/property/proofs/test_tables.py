"""Tables: those that are not well formed are refused, and say where."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, PlanError, Table, Topology, plan, testing, verify
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.runs import from_ranges, restrict
from tests.property.drawn.edits import (
    ONE,
    SPLIT,
    SUM,
    TWICE,
    TWO,
    edited,
    is_right,
    lay,
    leaves,
    outcome,
    refused,
    rows_of,
    to,
    uncut,
)
from tests.property.drawn.plans import FAR, FORWARD, LINE, of, right

topologies = st.one_of(st.none(), st.integers(1, 5).map(lambda n: Topology(ranks_per_node=n)))

# Rows and cuts


@st.composite
def lines_of_rows(draw: st.DrawFn) -> Plan:
    """A plan of one dimension, whose parts overlap, are in any order, and have holes."""
    n = draw(st.integers(1, 9))
    ends = (
        Layout((n,), mesh, draw(tables(n, mesh.size)))
        for mesh in (Mesh(a=2), Mesh(b=3, ranks=range(4, 7)))
    )
    return plan(*ends)


@st.composite
def tables(draw: st.DrawFn, n: int, count: int) -> tuple[Table]:
    """Parts of which one holds everything, the others anything."""
    whole = from_ranges(draw(st.permutations([(0, n // 2), draw(st.integers(0, 2)), (n // 2, n)])))
    held = [restrict(draw(testing.runs(most=n)), 0, n) for _ in range(count - 1)]
    return (Table(0, tuple(draw(st.permutations([whole, *held])))),)


@given(lines_of_rows(), st.data())
def test_rows_are_accepted_where_they_are(p: Plan, data: st.DataObject) -> None:
    """A row that begins elsewhere, at one end or at both, or is of another part, or another size."""
    (over,) = p.batches[0].template.overlays
    row = data.draw(st.integers(0, len(over.start) - 1))
    side, held = data.draw(st.sampled_from([("src", over.source), ("dst", over.target)]))
    column = data.draw(st.integers(0, getattr(over, side).shape[1] - 1))
    new = data.draw(st.integers(0, max(map(len, held.parts))))
    changes = {side: to(row, column, new)(getattr(over, side))}
    if data.draw(st.booleans()):
        changes["start"] = to(row, data.draw(st.integers(0, 8)))(over.start)
    changed = dataclasses.replace(over, **changes)
    q = edited(p, "batches.0.template.overlays", to((changed,)))
    if not refused(q):
        assert all(agrees(changed, pair, r) for pair, r in rows_of_pairs(changed)) and is_right(
            q, outcome(q)
        )
    elif changes.keys() == {side}:
        assert not all(agrees(changed, pair, r) for pair, r in rows_of_pairs(changed))


def rows_of_pairs(over: Overlay) -> list[tuple[int, int]]:
    firsts = itertools.pairwise(over.first.tolist())
    return [(pair, row) for pair, (a, b) in enumerate(firsts) for row in range(a, b)]


def agrees(over: Overlay, pair: int, row: int) -> bool:
    """Whether all parts of the pair hold the positions of the row where it says."""
    want = list(range(over.start[row], over.start[row] + over.size[row]))
    ends = (
        (over.keys[over.pair_key[pair]], over.source, over.src),
        (over.goals[over.pair_goal[pair]], over.target, over.dst),
    )
    return all(
        held.parts[part].indices()[at[row, m] : at[row, m] + over.size[row]].tolist() == want
        for parts, held, at in ends
        for m, part in enumerate(parts)
    )


@pytest.mark.parametrize(("row", "local"), [(0, 2), (2, 0)])
def test_rows_share_no_position(row: int, local: int, fails: Callable[..., None]) -> None:
    """Positions 2:4 in the place of others, where both ends have them: as many as are asked for."""
    parts = Table(0, (from_ranges([(0, 4)]), from_ranges([(2, 6)])))
    src, dst = Layout((6,), Mesh(a=2), (parts,)), Layout((6,), Mesh(), "n")
    p = plan(src, dst)
    (over,) = p.batches[0].template.overlays
    assert (over.start.tolist(), over.keys) == ([0, 2, 4], ((0,), (0, 1), (1,)))
    moved = {
        "start": to(row, 2)(over.start),
        "src": to(row, 0, local)(over.src),
        "dst": to(row, 0, 2)(over.dst),
    }
    q = edited(p, "batches.0.template.overlays", to((dataclasses.replace(over, **moved),)))
    message = f"{src} to {dst}: dimension 0 has rows with positions in common; make the plan again"
    fails(lambda: verify(q), PlanError, message)


def is_fair(p: Plan) -> bool:
    """Whether it is right, and every rank sends as many bytes as the cuts say."""
    done = outcome(p)
    if not is_right(p, done):
        return False
    loads = dict.fromkeys(p.ranks, 0)
    for t in done[0]:
        loads[t.src_rank] += t.nbytes * (t.src_rank != t.dst_rank)
    return loads == p.sent_bytes()


@given(testing.trees(), topologies, st.data())
def test_lines_are_accepted_cut_where_they_may_be(
    tree: Any, topology: Topology | None, data: st.DataObject
) -> None:
    p = plan(*tree, topology=topology)
    lines = [
        i
        for i in range(len(p.lines.holders))
        if p.lines.cut_first[i + 1] - p.lines.cut_first[i] > 2
    ]
    if lines:
        line = data.draw(st.sampled_from(lines))
        a, b = p.lines.cut_first[line] + 1, p.lines.cut_first[line + 1] - 1
        some = st.lists(
            st.integers(0, int(p.lines.cuts[b])), min_size=int(b - a), max_size=int(b - a)
        )
        cuts = p.lines.cuts.copy()
        cuts[a:b] = sorted(data.draw(some))
        q = edited(p, "lines.cuts", to(cuts))
        assert refused(q) != is_fair(q)


SHAPES = {"int8": (3, 4), "int16": (5, 2), "float32": (4,), "uint8": (7,)}


@pytest.mark.parametrize("names", [1, 2])
def test_every_cut_of_two_lines(names: int) -> None:
    """Ranks 0 and 1 hold the first half of all tensors, 2 and 3 the second; everything goes to two."""
    mesh, far = Mesh(a=2, b=2), Mesh(x=2, ranks=(8, 9))
    sides: list[dict[str, Layout]] = [{}, {}]
    for dtype, shape in SHAPES.items():
        for i in range(names):
            sides[0][f"{dtype}.{i}"] = Layout(
                shape, mesh, ({0: "(a n)", 1: "(a n) h"}[len(shape) - 1]), dtype=dtype
            )
            sides[1][f"{dtype}.{i}"] = Layout(shape, far, "...", dtype=dtype)
    p = plan(*sides)
    assert p.lines.cut_first.tolist() == [0, 3, 6] and len(p.lines.batch) == 2 * len(SHAPES)
    for at in (1, 4):
        for cut in range(int(p.lines.cuts[at + 1]) + 1):
            q = edited(p, "lines.cuts", to(at, cut))
            assert refused(q) != is_fair(q), (at, cut)


def test_every_row_of_a_unit() -> None:
    """A unit in two rows is right where both are whole rows of its box."""
    p = plan(lay(ONE, "n h"), lay(FAR, "n h"))
    (row,) = rows_of(p)
    for at in range(1, 24):
        q = uncut(p, [row._replace(hi=at), row._replace(lo=at)])
        assert refused(q) == (at % 4 > 0) and is_right(q, outcome(q)) == (at % 4 == 0)


# Integers


@pytest.mark.parametrize("name", FORWARD)
def test_all_tables_are_of_64_bits(name: str) -> None:
    for table, array, rebuild in leaves(FORWARD[name]):
        if isinstance(array, np.ndarray):
            assert array.dtype == (bool if table == "Demands.near" else np.int64), table
            if not table.startswith(("Partition", "Members")):
                assert refused(rebuild(array.astype(np.float64))) and refused(
                    rebuild(array.astype(np.int32))
                ), table


# What is said

BYTES = of((6,), (LINE, "n"), (Mesh(ranks=[9]), "n"), "int8")
SUMS = f"{lay(TWO, 'n h {sum: a}')} to {lay(FAR, 'n (x h)')}"
FORMS = f"{lay(LINE, '(a n) h')} to {lay(FAR, 'n h')}"
OVER = HIDDEN = "batches.0.template.overlays.0."


@pytest.mark.parametrize(
    ("p", "path", "change", "message"),
    [
        (SPLIT, "batches.0.template.overlays", lambda x: x[:1], f"{FORMS} has 1 dimension, not 2"),
        (
            SPLIT,
            "batches.0.template.overlays",
            lambda x: x[::-1],
            f"{FORMS}: dimension 0 is divided in another way",
        ),
        (SPLIT, OVER + "size", to(0, 0), f"{FORMS}: dimension 0 has empty pairs or rows"),
        (SPLIT, OVER + "first", to(1, 0), f"{FORMS}: dimension 0 has empty pairs or rows"),
        (
            SPLIT,
            OVER + "size",
            to(0, 1),
            f"{FORMS}: dimension 0 has pairs of other sizes than their rows",
        ),
        (
            SPLIT,
            OVER + "pair_key",
            to(0, 3),
            f"{FORMS}: dimension 0 has pairs of unknown keys or goals",
        ),
        (
            SPLIT,
            OVER + "pair_key",
            to(2, -1),
            f"{FORMS}: dimension 0 has pairs of unknown keys or goals",
        ),
        (
            SPLIT,
            OVER + "pair_key",
            to(0, 1),
            f"{FORMS}: dimension 0: position 0 is not where row 0 says",
        ),
        (
            SPLIT,
            OVER + "dst",
            to(1, 0, 1),
            f"{FORMS}: dimension 0: position 2 is not where row 1 says",
        ),
        (
            SUM,
            HIDDEN + "src",
            to(1, 0, 1),
            f"{SUMS}: dimension -1: position 1 is not where row 1 says",
        ),
        (
            SPLIT,
            OVER + "start",
            lambda x: x.astype(np.int32),
            "Overlay.start is not of 64-bit integers",
        ),
        (
            SPLIT,
            "batches.0.template.unit_pairs",
            lambda x: x[:, :1],
            f"{FORMS} has units of other dimensions",
        ),
        (SPLIT, "batches.0.template.unit_pairs", to(0, 0, 3), f"{FORMS} has units of unknown rows"),
        (SPLIT, "batches.0.template.unit_pairs", to(0, 0, 1), f"{FORMS} has one unit twice"),
        (
            SPLIT,
            "batches.0.template.unit_size",
            to(0, 9),
            f"{FORMS} has units of other sizes than their rows",
        ),
        (SPLIT, "lines.near", lambda x: x[1:], "tables of lines are not of one length"),
        (SPLIT, "lines.at", lambda x: x[1:], "tables of lines are not of one length"),
        (SPLIT, "lines.first", to(1, 0), "tables of lines are not of one length"),
        (SPLIT, "lines.sets.3", lambda x: x[::-1], "ranks (5, 4, 3) are not ascending"),
        (SPLIT, "lines.holders", to(0, 4), "lines are of unknown ranks or tensors"),
        (SPLIT, "lines.unit", to(0, 3), "tensor 'w': row 0 is of an unknown unit"),
        (SPLIT, "lines.unit", to(2, -1), "tensor 'w': row 2 is of an unknown unit"),
        (SPLIT, "lines.hi", to(1, 9), "tensor 'w': row 1 is not inside its unit"),
        (SPLIT, "lines.lo", to(1, -1), "tensor 'w': row 1 is not inside its unit"),
        (SPLIT, "lines.hi", to(1, 0), "tensor 'w': row 1 is not inside its unit"),
        (SPLIT, "lines.each", to(0, 9), "tensor 'w': row 0 is not of the bytes of its elements"),
        (SPLIT, "lines.at", to(0, 9), "tensor 'w': row 0 does not follow the one before it"),
        (SUM, "lines.addend", to(0, 1), "tensor 'w': row 0 is not of its block's addend"),
        (
            SPLIT,
            "lines.nbytes",
            to(1, 9),
            "tensor 'w': block 1, for ranks (3, 4, 5), is not of the bytes of its rows",
        ),
        (
            SPLIT,
            "lines.count",
            to(0, 2),
            "tensor 'w': block 0, for ranks (3, 4, 5), counts other receivers",
        ),
        (
            SPLIT,
            "lines.start",
            to(0, 8),
            "tensor 'w': block 0, for ranks (3, 4, 5), does not follow the one before it",
        ),
        (TWICE, "lines.sets.0", to((0,)), "line 0, of ranks (0,), is not cut among them"),
        (
            TWICE,
            "lines.cuts",
            to(0, 1),
            "line 0, of ranks (0, 1), is not cut from its first byte to its last",
        ),
        (
            TWICE,
            "lines.cuts",
            to(2, 1),
            "line 0, of ranks (0, 1), is not cut from its first byte to its last",
        ),
        (TWICE, "lines.cuts", to(1, -3), "line 0, of ranks (0, 1), has cuts that go back"),
        (TWICE, "lines.cuts", to(1, 289), "line 0, of ranks (0, 1), has cuts that go back"),
        (
            BYTES,
            "lines.cuts",
            to(np.array([0, 2, 1, 6])),
            "line 0, of ranks (0, 1, 2), has cuts that go back",
        ),
        (TWICE, "lines.cuts", to(1, 6), "tensor 'w': byte 6 of unit 0 is a cut inside a row"),
    ],
)
def test_messages(
    p: Plan, path: str, change: Callable[[Any], Any], message: str, fails: Callable[..., None]
) -> None:
    fails(lambda: verify(edited(p, path, change)), PlanError, f"{message}; make the plan again")


def test_rows_of_a_unit_are_alike_or_apart(fails: Callable[..., None]) -> None:
    """Two rows that meet in part are refused, though they go to different ranks."""
    first, *rest = rows_of(SPLIT)
    parts = [
        first._replace(receivers=(3, 4)),
        *(first._replace(lo=x, hi=x + 4, receivers=(5,)) for x in (0, 4)),
    ]
    q = uncut(SPLIT, [*parts, *rest])
    assert right(q, list(q.transfers()))
    message = (
        "tensor 'w': element (0, 0) is in two rows with different elements; make the plan again"
    )
    fails(lambda: verify(q), PlanError, message)
    verify(
        uncut(SPLIT, [*(x._replace(lo=at, hi=at + 4) for at in (0, 4) for x in (first,)), *rest])
    )
