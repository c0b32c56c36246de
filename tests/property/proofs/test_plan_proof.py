"""Proof: wrong tables are refused, thousands of them, and nothing but PlanError comes out.

Tables are wrong where what they expand to is not `right`, element by element, or differs between the ends of a pair.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, PlanError, Runs, adjoint, plan, testing, verify
from shardmath.layouts.edits import relabeled, window
from shardmath.layouts.holdings import Windows
from shardmath.plans.balance import balance
from shardmath.plans.demands import Batch, gather_lines
from shardmath.plans.flows.topology import Topology
from shardmath.plans.reduction import Reduction
from shardmath.plans.template import Template, make_template
from shardmath.proofs.templates import End
from tests.property.drawn.edits import (
    ANY,
    FIVE,
    ONE,
    PARTS,
    SPLIT,
    SUM,
    TWICE,
    TWO,
    Row,
    edited,
    is_right,
    lay,
    leaves,
    lines_of,
    outcome,
    refused,
    rows_of,
    same,
    to,
    uncut,
)
from tests.property.drawn.plans import (
    FAR,
    FORWARD,
    LINE,
    NEAR,
    PLANS,
    by_pair,
    executed,
    halves,
    right,
)

# What is accepted is right


def proved_is_right(p: Plan) -> None:
    """A plan whose tables are proved has transfers that are proved, the same at both ends of every pair."""
    verify(p)
    verify(p, transfers=p.transfers())
    _, by_sender, by_receiver = executed(p)
    assert by_sender == by_receiver == by_pair(p.transfers())


@pytest.mark.parametrize("name", PLANS)
def test_what_is_proved_is_right(name: str) -> None:
    proved_is_right(PLANS[name])


topologies = st.one_of(st.none(), st.integers(1, 5).map(lambda n: Topology(ranks_per_node=n)))


@given(testing.pairs(), topologies, st.sampled_from([0, 1 << 16]))
def test_plans_are_proved(pair: tuple[Layout, ...], topology: Topology | None, small: int) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        proved_is_right(plan(*pair, topology=topology))


@given(testing.trees(), topologies)
def test_trees_are_proved(
    tree: tuple[dict[str, Layout], dict[str, Layout]], topology: Topology | None
) -> None:
    proved_is_right(plan(*tree, topology=topology))


@given(st.data(), testing.pairs(ops=(None, "sum")), topologies)
def test_windows_are_proved(
    data: st.DataObject, pair: tuple[Layout, ...], topology: Topology | None
) -> None:
    src, dst = (data.draw(testing.tilings(layout)) for layout in pair)
    proved_is_right(plan({"w": src}, {"w": dst}, topology=topology))


@given(testing.pairs(ops=(None, "sum", "avg")))
def test_adjoints_are_proved(pair: tuple[Layout, ...]) -> None:
    proved_is_right(adjoint(plan(*pair)))


# Mutations: one thing anywhere in the tables is another


class Pool(NamedTuple):
    """What else there is to put somewhere."""

    names: list[str]
    meshes: list[Mesh]
    forms: list[Layout]
    templates: list[Template]
    runs: list[Runs]

    def like(self, value: Any) -> list[Any]:
        kinds = {
            str: self.names,
            Mesh: self.meshes,
            Layout: self.forms,
            Template: self.templates,
            Runs: self.runs,
        }
        return kinds.get(type(value), [])


def pool_of(plans: list[Plan]) -> Pool:
    batches = [batch for p in plans for batch in p.batches]
    templates = list(dict.fromkeys(batch.template for batch in batches))
    overlays = [over for t in templates for over in t.overlays]
    runs = {runs for over in overlays for part in (over.source, over.target) for runs in part.parts}
    meshes = {mesh for batch in batches for mesh in (batch.src, batch.dst)}
    names = {name for batch in batches for name in batch.names}
    forms = {layout for t in templates for layout in (t.src, t.dst)}
    return Pool(
        [*sorted(names), "nobody", "sum", "max", "product", "avg", "a", "b", "x"],
        sorted(meshes, key=repr),
        sorted(forms, key=repr),
        templates,
        sorted(runs, key=repr),
    )


POOL = pool_of(list(FORWARD.values()))


def other(rng: random.Random, value: Any) -> Any:
    """Something of the same kind that is near it; maybe equal."""
    if isinstance(value, np.ndarray):
        return other_array(rng, value)
    if isinstance(value, tuple):
        return other_tuple(rng, value)
    if isinstance(value, Mesh) and value.size > 1 and rng.random() < 0.5:
        ranks = list(value.ranks)
        i, j = rng.sample(range(len(ranks)), 2)
        ranks[i], ranks[j] = ranks[j], ranks[i] if rng.random() < 0.5 else max(ranks) + 1
        return (
            Mesh(value.shape, ranks=dict.fromkeys(ranks))
            if len(set(ranks)) == len(ranks)
            else value
        )
    if isinstance(value, bool) or value is None or isinstance(value, complex | float):
        return rng.choice((None, 0, 1, -0.0, True, False))
    if isinstance(value, int):
        return rng.choice((value - 1, value + 1, value + 2, -1, 0))
    return rng.choice(POOL.like(value) or [value])


def other_array(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """One number is another, or two change places, or one is gone or there twice."""
    kind = rng.choice(
        ("nudge", "nudge", "copy", "zero", "minus", "jump", "swap", "short", "long", "move")
    )
    if not array.size:
        return np.zeros((1, *array.shape[1:]), array.dtype) if kind == "long" else array
    if kind in ("short", "long"):
        i = rng.randrange(len(array))
        return np.delete(array, i, 0) if kind == "short" else np.insert(array, i, array[i], 0)
    new = array.copy()
    at, from_ = (tuple(rng.randrange(n) for n in new.shape) for _ in range(2))
    if kind == "swap":
        new[at], new[from_] = array[from_], array[at]
    elif kind == "move":
        new[at[0]], new[from_[0]] = array[from_[0]], array[at[0]]
    elif new.dtype == bool:
        new[at] = not new[at]
    else:
        step = int(new[at]) + rng.choice((-1, 1, 2, 4))
        new[at] = {
            "nudge": step,
            "copy": array[from_],
            "zero": 0,
            "minus": -1,
            "jump": int(new.max()) + 3,
        }[kind]
    return new


def other_tuple(rng: random.Random, value: tuple[Any, ...]) -> tuple[Any, ...]:
    """One item is another, or two change places, or one is gone or there twice."""
    if not value:
        return (rng.choice((0, "a", (0,))),)
    i, j = rng.randrange(len(value)), rng.randrange(len(value))
    kind = rng.choice(("item", "item", "swap", "drop", "copy", "twice", "sorted"))
    if kind == "drop":
        return (*value[:i], *value[i + 1 :])
    if kind == "twice":
        return (*value[:i], value[j], *value[i:])
    new = list(value)
    if kind == "swap":
        new[i], new[j] = new[j], new[i]
    elif kind == "copy":
        new[i] = new[j]
    elif not isinstance(new[i], PARTS) or isinstance(new[i], Template):
        new[i] = other(rng, new[i])
    return (
        tuple(sorted(set(new)))
        if kind == "sorted" and all(isinstance(x, int) for x in new)
        else tuple(new)
    )


@pytest.mark.parametrize("most", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_tables(most: int) -> None:
    """All wrong ones are refused; of those that are still right some are, which cannot be read off the tables alone.

    Whether every table was once the wrong one shows in a thousand of them.
    """
    rng = random.Random(2)
    before = {name: executed(p) for name, p in FORWARD.items()}
    places = {name: list(leaves(p)) for name, p in FORWARD.items()}
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    careful: Counter[str] = Counter()
    while wrong.total() < most:
        name = rng.choice(list(FORWARD))
        table, value, rebuild = rng.choice(places[name])
        new = other(rng, value)
        if same(value, new):
            continue
        q = rebuild(new)
        no, done = refused(q), outcome(q)
        good = is_right(q, done)
        assert good or no, (name, table, value, new)
        if done != before[name]:
            (wrong if not good else careful if no else kept)[table] += 1
    assert set(kept) <= {"Demands.cuts", "Demands.receivers", "Demands.sets", "Batch.names"}, kept
    assert careful.total() < most / 50, careful
    if most == 1000:
        assert len(wrong) > 35 and min(wrong[f"Demands.{x}"] for x in READ) > 5, wrong
        assert min(wrong[f"Overlay.{x}"] for x in PAIRED) > 5, wrong
        assert kept.total() > 1, kept


READ = ("sets", "holders", "first", "cut_first", "cuts", "receivers", "count", "nbytes", "start")
READ += ("row_first", "batch", "unit", "lo", "hi", "at", "each")
"""What `transfers` reads of lines."""
PAIRED = ("keys", "goals", "start", "size", "src", "dst", "first")


@pytest.mark.parametrize(
    "junk", [None, "x", 2.5, (), (None,), [1], {}, {0: 1}, np.zeros(3), np.zeros((2, 2), np.int64)]
)
def test_nothing_but_plan_errors_comes_out(junk: Any) -> None:
    for name in ("sum to sum", "overlapping source", "windows", "scalar"):
        for table, value, rebuild in leaves(FORWARD[name]):
            if not (type(value) is type(junk) and same(value, junk)):
                q = rebuild(junk)
                assert refused(q) or outcome(q) == executed(FORWARD[name]), (name, table)


@pytest.mark.parametrize("number", [-(1 << 63), 1 << 32, (1 << 63) - 1])
def test_numbers_far_away(number: int) -> None:
    for name in ("sum to sum", "overlapping source", "windows", "scalar"):
        for table, value, rebuild in leaves(FORWARD[name]):
            for at in range(
                value.size if isinstance(value, np.ndarray) and value.dtype == np.int64 else 0
            ):
                new = value.copy()
                new.ravel()[at] = number
                q = rebuild(new)
                assert refused(q) or executed(q) == executed(FORWARD[name]), (name, table, at)


# Tables that are well formed, and not what was asked for


def changed(rng: random.Random, p: Plan, rows: list[Row]) -> list[Row]:
    """One row is another, or gone, or there twice, or in two."""
    i = rng.randrange(len(rows))
    row, kind = rows[i], rng.choice(("drop", "twice", "split", "halve", "swap", *Row._fields))
    if kind == "drop":
        return [*rows[:i], *rows[i + 1 :]]
    if kind == "twice":
        again = row._replace(
            receivers=rng.choice(rows).receivers, holders=rng.choice((row, *rows)).holders
        )
        return [*rows, again]
    if kind == "swap":
        j = rng.randrange(len(rows))
        new = {
            i: row._replace(receivers=rows[j].receivers),
            j: rows[j]._replace(receivers=row.receivers),
        }
        return [new.get(k, x) for k, x in enumerate(rows)]
    at = rng.randrange(row.lo, row.hi)
    middle = row._replace(hi=at), row._replace(lo=at + rng.choice((0, 0, 1)))
    some = rng.randrange(len(row.receivers) + 1)
    ends = (
        row._replace(receivers=row.receivers[:some]),
        row._replace(receivers=row.receivers[some:]),
    )
    changes = {"split": middle, "halve": ends}
    parts = (
        changes[kind] if kind in changes else (row._replace(**{kind: other_of(rng, p, row, kind)}),)
    )
    kept = [x for x in parts if x.lo < x.hi and x.receivers and x.holders]
    return [*rows[:i], *kept, *rows[i + 1 :]]


def other_of(rng: random.Random, p: Plan, row: Row, kind: str) -> Any:
    if kind in ("holders", "receivers"):
        ranks = set(getattr(row, kind)) ^ {rng.choice(p.ranks)}
        return tuple(sorted(ranks))
    size = p.batches[row.batch].template.unit_size
    most = {"batch": len(p.batches), "unit": len(size), "lo": row.hi, "hi": size[row.unit] + 1}[
        kind
    ]
    return rng.randrange(int(most))


def test_ranks_beyond_64_bits() -> None:
    """A set of ranks is a tuple of Python's integers."""
    p = plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(ranks=[2]), "n"))
    sets = (*p.lines.sets[:-1], (*p.lines.sets[-1], 2**70))
    with pytest.raises(PlanError):
        verify(dataclasses.replace(p, lines=dataclasses.replace(p.lines, sets=sets)))


@given(st.lists(st.lists(st.integers(-2, 5), max_size=3), min_size=1, max_size=3), st.data())
def test_who_has_a_unit(sets: list[list[int]], data: st.DataObject) -> None:
    """Parts that no position holds are no other set's."""
    held = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    units = range(len(sets))
    number = np.array([[unit] for unit in units])
    end = End([tuple(map(tuple, sets))], [np.array(held)], number, number[:, 0])
    asked = [(unit, at) for unit in units for at in range(-1, len(held))]
    unit, at = np.array(asked).T
    wanted = [at >= 0 and held[at] in sets[unit] for unit, at in asked]
    assert end.has(unit, at).tolist() == wanted


def test_meshes_that_are_equal_are_seldom_compared() -> None:
    """Each tensor may have a mesh of its own; of ranks there are many more, and of rows again."""
    src, dst = {}, {}
    for i in range(9):
        src[f"w{i}"] = Layout((100 + i, 8), Mesh(dp=4, tp=4), "(tp dp n) h")
        dst[f"w{i}"] = Layout((100 + i, 8), Mesh(tp=8, rep=3, ranks=range(16, 40)), "n (tp h)")
    p = plan(src, dst)
    same = Mesh.__eq__
    with mock.patch.object(Mesh, "__eq__", autospec=True, side_effect=same) as compare:
        verify(p)
    assert compare.call_count < 40 * len(src) < len(p.lines.batch)


@pytest.mark.parametrize("most", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_lines_of_other_rows(most: int) -> None:
    rng = random.Random(3)
    names = [name for name, p in FORWARD.items() if len(p.lines.batch)]
    rows = {name: rows_of(FORWARD[name]) for name in names}
    wrong = kept = careful = 0
    while wrong < most:
        name = rng.choice(names)
        p, new = FORWARD[name], rows[name]
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            new = changed(rng, p, new) if new else new
        sizes = [p.batches[row.batch].template.unit_size for row in new]
        if any(
            row.unit >= len(size) or row.hi > size[row.unit]
            for row, size in zip(new, sizes, strict=True)
        ):
            continue
        fair = rng.random() < 0.8
        q = dataclasses.replace(
            p,
            lines=lines_of(
                p.batches,
                new,
                lambda at, n, fair=fair: rng.choice(at) if fair else rng.randrange(n + 1),
            ),
        )
        no, done = refused(q), outcome(q)
        good = is_right(q, done)
        assert good or no, (name, new)
        assert not (no and new == rows[name] and fair), name
        wrong, kept, careful = wrong + (not good), kept + (good and not no), careful + (good and no)
    assert kept > 0.4 * most and careful < 0.08 * most


# Tables of other plans

THERE = Mesh(x=2, y=2, ranks=(3, 2, 4, 5))
SOURCES = ("n h", "(a n) h", "(b n) h", "(a b n) h", "(n a) h", "n (a h)", "(a n) (b h)")
SOURCES += (
    "n h {sum: a}",
    "n h {sum: b}",
    "(b n) h {sum: a}",
    "n h {sum: a b}",
    "(a n) h {max: b}",
)
TARGETS = ("n h", "(x n) h", "(y n) h", "(y x n) h", "(2 x n) h", "n (y h)", "(x n) (y h)")
TARGETS += (
    "n h {sum: x}",
    "n h {sum: y}",
    "(x n) h {sum: y}",
    "n h {sum: x y}",
    "(x n) h {max: y}",
)
Held = tuple[Layout, ...]


def random_end(rng: random.Random, texts: tuple[str, ...], mesh: Mesh) -> Held:
    layout = Layout((4, 2), mesh, rng.choice(texts))
    return halves(layout, 2) if rng.random() < 0.2 else (layout,)


def random_ends(rng: random.Random) -> dict[str, list[Held]]:
    """How two tensors are held at both ends."""
    there = rng.choice((THERE, Mesh(x=2, y=2)))
    return {
        name: [random_end(rng, SOURCES, NEAR), random_end(rng, TARGETS, there)] for name in "uv"
    }


def a_step_away(rng: random.Random, ends: dict[str, list[Held]]) -> dict[str, list[Held]]:
    """The same but for one end of one tensor."""
    new, name, side = (
        {n: list(pair) for n, pair in ends.items()},
        rng.choice("uv"),
        rng.randrange(2),
    )
    mesh = ends[name][side][0].mesh
    kind = rng.choice(("ranks", "text", "other"))
    if kind == "other":
        new[name][side] = ends["u" if name == "v" else "v"][side]
    elif kind == "text":
        new[name][side] = random_end(rng, TARGETS if side else SOURCES, mesh)
    else:
        a, b = rng.sample(mesh.ranks, 2)
        new[name][side] = tuple(relabeled(x, {a: b, b: a}) for x in ends[name][side])
    return new


def planned(ends: dict[str, list[Held]]) -> Plan | None:
    try:
        return plan(*({name: pair[side] for name, pair in ends.items()} for side in (0, 1)))
    except PlanError:
        return None


@pytest.mark.parametrize("most", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_tables_of_other_plans(most: int) -> None:
    """Tables of one plan under the layouts of another that differ in one thing, or in none."""
    rng = random.Random(4)
    wrong = kept = careful = 0
    while wrong < most:
        ends = random_ends(rng)
        p, q = planned(ends), planned(a_step_away(rng, ends))
        if p and q:
            what = rng.choice(
                (("batches", "lines"), ("batches", "lines"), ("lines",), ("batches",))
            )
            mixed = dataclasses.replace(p, **{name: getattr(q, name) for name in what})
            no, good = refused(mixed), is_right(mixed, outcome(mixed))
            assert good or no, (ends, q.src, q.dst, what)
            wrong, kept, careful = (
                wrong + (not good),
                kept + (good and not no),
                careful + (good and no),
            )
    assert kept > 0.1 * most and careful < 0.2 * most


# What is said

PAIR = plan(dict.fromkeys("uv", lay(LINE, "(a n) h")), dict.fromkeys("uv", lay(FAR, "n h")))
MIXED = plan(
    {"u": lay(LINE, "(a n) h"), "v": lay(LINE, "n (a h)")}, dict.fromkeys("uv", lay(FAR, "n h"))
)
CUT = plan({"w": halves(lay(LINE, "(a n) h"), 3)}, {"w": halves(lay(FAR, "n h"), 2)})
TURNED = Mesh(a=3, ranks=(0, 2, 1))


@pytest.mark.parametrize(
    ("p", "path", "change", "message"),
    [
        (SPLIT, "batches.0.names", to(()), "a batch is of no tensor"),
        (SPLIT, "batches.0.names", to(("w", "w")), "tensor 'w' moves twice"),
        (SPLIT, "batches", to(()), "tensor 'w' is in no batch, or not in the plan"),
        (SPLIT, "batches.0.names", to(("x",)), "tensor 'w' is in no batch, or not in the plan"),
        (PAIR, "batches.0.names", to(("u",)), "tensor 'v' is in no batch, or not in the plan"),
        (SPLIT, "batches", lambda x: 2 * x, "tensor 'w' moves twice between two windows"),
        (
            SPLIT,
            "src_ranks",
            to((0, 1)),
            "2 ranks (0, 1) are not those of the source, 3 ranks (0, 1, 2)",
        ),
        (
            SPLIT,
            "dst_ranks",
            to((3, 4)),
            "2 ranks (3, 4) are not those of the destination, 3 ranks (3, 4, 5)",
        ),
        (SPLIT, "batches.0.source", to(1), "tensor 'w' moves from window 1 of 1 to window 0 of 1"),
        (CUT, "batches.0.target", to(-1), "tensor 'w' moves from window 0 of 2 to window -1 of 2"),
        (CUT, "batches", lambda x: x[1:], "tensor 'w': nothing arrives in window 0"),
        (
            MIXED,
            "batches.0.template",
            to(MIXED.batches[1].template),
            f"tensor 'u' lies as {lay(LINE, '(a n) h')} on {LINE!r}, not as {lay(LINE, 'n (a h)')} on {LINE!r}",
        ),
        (
            SPLIT,
            "batches.0.src",
            to(TURNED),
            f"tensor 'w' lies as {lay(LINE, '(a n) h')} on {LINE!r}, not as {lay(LINE, '(a n) h')} on {TURNED!r}",
        ),
        (
            SPLIT,
            "lines.holders",
            to(1, 0),
            "tensor 'w': rank 0 has to send element (2, 0), which it does not hold at the source",
        ),
        (
            TWICE,
            "lines.receivers",
            to(1, 1),
            "tensor 'w': rank 3 has to receive element (0, 2), which it does not hold at the destination",
        ),
        (
            SPLIT,
            "lines.sets.3",
            to((3, 4, 9)),
            "tensor 'w': rank 9 has to receive element (0, 0), which it does not hold at the destination",
        ),
        (
            SPLIT,
            "lines",
            to(None),
            "Plan.lines: NoneType, not Demands",
        ),
        (
            SPLIT,
            "lines.sets",
            to(((3, "4"),)),
            "Demands.sets[0][1]: str, not int",
        ),
        (SPLIT, "lines.lo", to([0, 0]), "Demands.lo: list, not ndarray"),
        (SPLIT, "lines.lo", to(np.zeros((2, 2), np.int64)), "Demands.lo has 2 dimensions, not 1"),
        (
            SPLIT,
            "batches.0.template",
            to(None),
            "Batch.template: NoneType, not Template",
        ),
        (
            SPLIT,
            "batches.0.src",
            to(Mesh(a=2)),
            f"tensor 'w': {Mesh(a=2)!r} has other positions than its template's {LINE!r}",
        ),
    ],
)
def test_messages(
    p: Plan, path: str, change: Callable[[Any], Any], message: str, fails: Callable[..., None]
) -> None:
    fails(lambda: verify(edited(p, path, change)), PlanError, f"{message}; make the plan again")


def test_a_fault_of_ours_is_not_a_wrong_plan() -> None:
    """It used to come out as tables that cannot be read."""
    with (
        mock.patch("shardmath.proofs.plan_proof._check_once", side_effect=AttributeError("ours")),
        pytest.raises(AttributeError, match="ours"),
    ):
        verify(SPLIT)


def test_reductions_are_named(fails: Callable[..., None]) -> None:
    rule = SUM.rules["w"]
    wrong = dataclasses.replace(rule, addends=3)
    message = f"tensor 'w' is reduced by {wrong}, but its layouts need {rule}; make the plan again"
    fails(
        lambda: verify(edited(SUM, "batches.0.template.reduction", to(wrong))), PlanError, message
    )


@pytest.mark.parametrize(
    ("p", "change", "message"),
    [
        (SPLIT, lambda rows: rows[1:], "rank 3 never receives element (0, 0)"),
        (SPLIT, lambda rows: [rows[0], *rows[2:]], "rank 3 never receives element (2, 0)"),
        (
            SPLIT,
            lambda rows: [rows[0]._replace(receivers=(3, 4)), *rows[1:]],
            "rank 5 never receives element (0, 0)",
        ),
        (
            SPLIT,
            lambda rows: [rows[0]._replace(hi=4), *rows[1:]],
            "rank 3 never receives element (1, 0)",
        ),
        (
            SUM,
            lambda rows: [x for x in rows if x.holders != (1,)],
            "rank 3, addend 1 never receives element (0, 0)",
        ),
        (
            ANY,
            lambda rows: [rows[0]._replace(receivers=(5,))],
            "rank 4 never receives element (0, 0)",
        ),
        (
            SPLIT,
            lambda rows: [*rows, rows[1]._replace(receivers=(4,))],
            "rank 4 receives element (2, 0) twice instead of once",
        ),
        (
            SPLIT,
            lambda rows: [*rows, rows[1]],
            "rank 3 receives element (2, 0) twice instead of once",
        ),
    ],
)
def test_elements_that_never_arrive_or_twice(
    p: Plan, change: Callable[[list[Row]], list[Row]], message: str, fails: Callable[..., None]
) -> None:
    again = f"tensor 'w': {message}; make the plan again"
    fails(lambda: verify(uncut(p, change(rows_of(p)))), PlanError, again)


def test_every_dimension_counts(fails: Callable[..., None]) -> None:
    """Rank 3 holds the first columns of the first rows, and is to receive those of the last rows for rank 5."""
    p = plan({"w": lay(ONE, "n h")}, {"w": lay(FIVE, "(x n) (y h)")})
    rows = [row._replace(receivers=(3,)) if row.receivers == (5,) else row for row in rows_of(p)]
    message = "tensor 'w': rank 3 has to receive element (3, 0), which it does not hold at the destination"
    fails(lambda: verify(uncut(p, rows)), PlanError, f"{message}; make the plan again")


def test_all_replicas_of_an_addend_receive_alike(fails: Callable[..., None]) -> None:
    (row,) = rows_of(ANY)
    assert row.receivers == (5, 6)
    both = "goes to addend 0 of some replicas and to addend 1 of others; make the plan again"
    fails(
        lambda: verify(uncut(ANY, [row._replace(receivers=(4, 5))])),
        PlanError,
        f"tensor 'w': element (0, 0) {both}",
    )
    halves = [row._replace(hi=8, receivers=(3, 4)), row._replace(lo=8)]
    verify(uncut(ANY, halves))
    halves = [halves[0], row._replace(lo=8, receivers=(3,)), row._replace(lo=8, receivers=(6,))]
    fails(lambda: verify(uncut(ANY, halves)), PlanError, f"tensor 'w': element (2, 0) {both}")


def test_a_window_arrives_in_one_order_of_ranks(fails: Callable[..., None]) -> None:
    turned = Layout((6, 4), Mesh(x=3, ranks=(5, 4, 3)), "n h")
    other = plan({"w": halves(lay(LINE, "(a n) h"), 3)}, {"w": halves(turned, 2)})
    q = edited(CUT, "batches", lambda x: (*x[:2], *other.batches[2:]))
    assert [(b.source, b.target) for b in q.batches] == [(0, 0), (0, 1), (1, 1)] and right(
        q, list(q.transfers())
    )
    message = "tensor 'w' arrives in one window in several orders of ranks; make the plan again"
    fails(lambda: verify(q), PlanError, message)


def test_tensors_of_a_batch_have_as_many_windows(fails: Callable[..., None]) -> None:
    """Window 0 of 'w' is all of it, window 1 nothing; it may not go by the name of 'u', which has one."""
    whole, nothing = lay(TWO, "n h"), window(lay(TWO, "n h"), ((0, 0), (0, 4)))
    there = lay(FAR, "n h")
    p = plan({"u": whole, "w": (whole, nothing)}, {"u": there, "w": there})
    assert [batch.names for batch in p.batches] == [("u",), ("w",)]
    q = plan({"u": whole, "w": whole}, {"u": there, "w": there})
    mixed = dataclasses.replace(p, batches=q.batches, lines=q.lines)
    assert not right(mixed, list(mixed.transfers()))
    fails(
        lambda: verify(mixed),
        PlanError,
        "tensors of other windows move as 'u' does; make the plan again",
    )


def test_source_windows_hold_different_elements(fails: Callable[..., None]) -> None:
    """Two windows of the first half: as many elements as the whole has."""
    half, whole = window(lay(LINE, "n h"), ((0, 3), (0, 4))), lay(FAR, "n h")
    batches = tuple(
        Batch(make_template(half, whole, Reduction()), ("w",), LINE, FAR, i, 0) for i in (0, 1)
    )
    twice = dataclasses.replace(
        SPLIT,
        src={"w": Windows((half, half))},
        batches=batches,
        lines=balance(gather_lines(batches), batches),
    )
    assert not right(twice, list(twice.transfers()))
    fix = "cut one of them with shardmath.window"
    message = f"tensor 'w': source windows 0 and 1 both hold element (0, 0); {fix}"
    fails(lambda: verify(twice), PlanError, message)


def test_a_trivial_partial_axis_is_no_other_reduction() -> None:
    """`{sum: b}` of one rank and nothing are spelled differently and reduce alike."""
    mesh = Mesh(a=2, b=1)
    p = plan(
        {"u": lay(mesh, "(a n) h"), "v": lay(mesh, "(a n) h {sum: b}")},
        dict.fromkeys("uv", lay(FAR, "n h")),
    )
    assert len(p.batches) == 1
    verify(p)


# Plans travel


@pytest.mark.parametrize("name", PLANS)
def test_plans_pickle(name: str) -> None:
    p = PLANS[name]
    q = pickle.loads(pickle.dumps(p))
    assert q == p and list(q.transfers()) == list(p.transfers())
    assert (q.sent_bytes(), q.received_bytes(), q.ranks) == (
        p.sent_bytes(),
        p.received_bytes(),
        p.ranks,
    )
    verify(q)


def test_a_pickle_has_what_tensors_share_once() -> None:
    src, dst = (
        Layout((64, 6), Mesh(a=8), "(a n) h"),
        Layout((64, 6), Mesh(b=6, ranks=range(8, 14)), "n (b h)"),
    )
    one, many = (
        len(pickle.dumps(plan(dict.fromkeys(names, src), dict.fromkeys(names, dst))))
        for names in (["layers.0.w"], [f"layers.{i}.w" for i in range(1000)])
    )
    assert many - one < 999 * 64 and one > 6400
