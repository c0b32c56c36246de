"""Programs of all kinds, what their ranks do, and whether it is right.

Right and wrong are told apart by `carried_out`, which reads nothing but the rounds of every rank: it looks at every
element of every message.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from unittest import mock

import hypothesis.strategies as st
import numpy as np
from hypothesis import assume

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Program,
    Table,
    Topology,
    Transfer,
    plan,
    schedule,
    simulate,
    testing,
)
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.edits import window
from shardmath.layouts.store import local_tensors
from shardmath.plans.demands import gather_lines
from shardmath.plans.programs import scheduling
from shardmath.plans.programs.fanout import Way, find_legs
from shardmath.plans.programs.messages import Message, Round
from shardmath.plans.programs.program import digest_program
from shardmath.plans.programs.tapers import HEAVIEST

Rounds: TypeAlias = Mapping[int, Sequence[Round]]
Arrays: TypeAlias = dict[int, dict[str, np.ndarray]]


@contextlib.contextmanager
def cut_anywhere(small: int = 0) -> Iterator[None]:
    """Boxes of more than `small` bytes may be cut, so that small tensors are."""
    with mock.patch("shardmath.plans.units.SMALL", small):
        yield


# Data, and what becomes of it


@functools.lru_cache(maxsize=64)
def shards_of(p: Plan) -> Arrays:
    """Source arrays, the same at all replicas: random, so that no two elements are alike and no sum is exact."""
    rng = np.random.default_rng(0)
    out: Arrays = {rank: {} for rank in p.src_ranks}
    for name, windows in p.src.items():
        count = math.prod(windows[0].mesh.axis_size(axis) for axis, _ in windows[0].partial)
        values = [rng.standard_normal(windows[0].shape) for _ in range(count)]
        for key, layout in local_tensors(name, windows):
            for rank, array in testing.distribute(layout, values, hole=99.0).items():
                out[rank][key] = array
    return out


def results(p: Plan | Program) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Bit for bit what every rank holds in the end."""
    out = simulate(p, shards_of(p.plan if isinstance(p, Program) else p))
    named = {rank: held if isinstance(held, dict) else {"": held} for rank, held in out.items()}
    return {
        (rank, key): (array.shape, array.dtype, array.tobytes())
        for rank, held in named.items()
        for key, array in held.items()
    }


def all_rounds(prog: Program) -> dict[int, tuple[Round, ...]]:
    return {rank: prog.for_rank(rank) for rank in prog.ranks}


def messages(rounds: Rounds, *ways: str) -> Iterator[tuple[int, tuple[int, int, int], Message]]:
    """(rank, step, message) of all messages that go one of these ways: "sends", "receives", "keeps"."""
    for rank, mine in rounds.items():
        for one in mine:
            for way in ways:
                yield from ((rank, one.step, m) for m in getattr(one, way))


# What is right, element by element


def ends_meet(rounds: Rounds) -> bool:
    """Whether what is sent is received, in the same step, and steps follow each other at every rank."""
    sent = Counter(
        (step, rank, m.dst_rank, m.leg, m.nbytes, repr(m.pieces))
        for rank, step, m in messages(rounds, "sends")
    )
    got = Counter(
        (step, m.src_rank, rank, m.leg, m.nbytes, repr(m.pieces))
        for rank, step, m in messages(rounds, "receives")
    )
    return sent == got and all(
        a.step < b.step for mine in rounds.values() for a, b in itertools.pairwise(mine)
    )


def under_way(rounds: Rounds) -> tuple[int, int]:
    """The most bytes and the most messages of a rank in a round."""
    posted = [(*one.sends, *one.receives) for mine in rounds.values() for one in mine]
    return max((sum(m.nbytes for m in some) for some in posted), default=0), max(
        map(len, posted), default=0
    )


NEVER = 1 << 60


class _Arrived:
    """When each addend of each cell arrives, by rank and local tensor; negative where it never does."""

    def __init__(self, p: Plan) -> None:
        self.addends = max((p.rules[name].addends for name in p.dst), default=1)
        self.at = {
            (rank, key): np.full((p.rules[name].addends, *layout.local_shape(rank)), NEVER)
            for name, windows in p.dst.items()
            for key, layout in local_tensors(name, windows)
            for rank in layout.mesh.ranks
        }

    def put(self, t: Transfer, when: int) -> bool:
        """Whether the piece is the first to arrive there."""
        cells = self.at[t.dst_rank, t.dst_tensor][(slice(t.addend, t.addend + 1), *t.dst_slices)]
        new = bool((cells == NEVER).all()) and cells.shape == (1, *t.shape)
        cells[...] = when
        return new

    def has(self, t: Transfer, when: int) -> bool:
        """Whether the sender of a piece that is relayed has it by then, and nothing on top of it."""
        cells = self.at[t.src_rank, t.src_tensor][(slice(None), *t.src_slices)]
        return (
            bool((cells[0] < when).all() and (cells[1:] > when).all())
            and cells.shape[1:] == t.shape
        )

    def same_cells(self, other: _Arrived) -> bool:
        return all(((self.at[key] == NEVER) == (other.at[key] == NEVER)).all() for key in self.at)

    def in_order(self) -> bool:
        """Whether addends arrive one after the other."""
        return all(((x[1:] > x[:-1]) | (x[:-1] == NEVER)).all() for x in self.at.values())


def arrivals(p: Plan, rounds: Rounds) -> _Arrived | None:
    """When everything arrives; None where something comes twice, or is relayed too early or too late."""
    steps = {
        step: i
        for i, step in enumerate(sorted({one.step for mine in rounds.values() for one in mine}))
    }
    if not handed_on(rounds):
        return None
    got = [
        (steps[step], m.leg, t)
        for _, step, m in messages(rounds, "receives", "keeps")
        for t in m.pieces
        if m.leg != 4
    ]
    out = _Arrived(p)
    if sum(out.put(t, when) for when, _, t in got) < len(got):
        return None
    return out if all(out.has(t, when) for when, leg, t in got if leg in (2, 3)) else None


def handed_on(rounds: Rounds) -> bool:
    """Whether ranks send what they are handed in the slot before, and nothing else that they do not have."""
    handed, sent = Counter[Any](), Counter[Any]()
    for rank, (phase, slot, _), m in messages(rounds, "receives", "sends"):
        ends = {(t.src_rank, t.dst_rank) for t in m.pieces}
        what = repr(m.pieces), m.starts, m.nbytes
        if m.leg == 4 and rank == m.dst_rank:
            handed[rank, phase, slot + 1, what] += 1
            if ends != {(m.src_rank, t.dst_rank) for t in m.pieces[:1]}:
                return False
        if m.leg == 5 and rank == m.src_rank:
            sent[rank, phase, slot, what] += 1
            if ends != {(t.src_rank, m.dst_rank) for t in m.pieces[:1]}:
                return False
    return handed == sent


@functools.lru_cache(maxsize=64)
def expected(p: Plan) -> dict[tuple[int, str], tuple[Any, ...]]:
    """What the plan itself gives."""
    return results(p)


@functools.lru_cache(maxsize=64)
def promised(p: Plan) -> _Arrived:
    """All that is to arrive, at once."""
    out = _Arrived(p)
    for t in p.transfers():
        out.put(t, 0)
    return out


def carried_out(prog: Program) -> bool:
    """Whether ranks that do what `for_rank` says bring what the plan promises, once and in order, within limits."""
    with np.errstate(all="ignore"):
        return _carried_out(prog)


def _carried_out(prog: Program) -> bool:
    try:
        rounds = all_rounds(prog)
        done = arrivals(prog.plan, rounds)
        if (
            done is None
            or not ends_meet(rounds)
            or not done.in_order()
            or not done.same_cells(promised(prog.plan))
        ):
            return False
        nbytes, count = under_way(rounds)
        if nbytes > prog.max_inflight_bytes or count > prog.max_ops_per_group:
            return False
        with mock.patch.object(Program, "for_rank", lambda _, rank: rounds[rank]):
            return results(prog) == expected(prog.plan)
    except Exception:
        return False


# Programs of all kinds

FANOUTS = ("auto", "none", "node")


def nodes_of(n: int, latency_s: float = 2e-11) -> Topology:
    """Where relays cost next to nothing, small contents are cut and relayed as large ones are."""
    return Topology(ranks_per_node=n, latency_s=latency_s)


def topologies() -> st.SearchStrategy[Topology]:
    return st.sampled_from([nodes_of(n, s) for n in (1, 2, 4, 8) for s in (0.0, 2e-11, 1e-5)])


MANY = [(4, 2), (8, 1), (3, 4), (8, 2), (5, 1), (16, 1), (6, 3), (9, 2)]
TEXTS = ["n", "n", "n", "(y n)", "(y n)", "(x n)", "(2 x n)", "(y x n)"]


@st.composite
def spreads(
    draw: st.DrawFn, ops: tuple[str | None, ...] = (None, None, "sum", "avg")
) -> tuple[Layout, Layout]:
    """From few ranks to many, most of them replicas."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=2)))
    few = draw(testing.meshes(most=4, first=0))
    x, y = draw(st.sampled_from(MANY))
    first = draw(st.sampled_from([0, few.size // 2, few.size, 2 * few.size, 8]))
    text = draw(st.sampled_from(TEXTS)) + " h" * (len(shape) - 1)
    many = Layout(shape, Mesh(x=x, y=y, ranks=range(first, first + x * y)), text, dtype="float64")
    return draw(testing.layouts(shape, few, op=draw(st.sampled_from(ops)))), many


@st.composite
def sides(draw: st.DrawFn) -> tuple[Any, Any]:
    """Source and destination of a plan: two layouts, trees of tensors, windows."""
    kind = draw(st.sampled_from(("pair", "spread", "spread", "tree", "windows")))
    if kind == "tree":
        return draw(testing.trees())
    src, dst = draw(spreads()) if kind == "spread" else draw(testing.pairs())
    if kind == "windows":
        return tuple({"w": draw(testing.tilings(layout))} for layout in (src, dst))
    return src, dst


def copied() -> st.SearchStrategy[tuple[Layout, Layout]]:
    """Layouts without Partial."""
    return st.one_of(testing.pairs(ops=(None,)), spreads(ops=(None,)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return plan(*draw(sides()), topology=draw(st.one_of(st.none(), topologies())))


@st.composite
def stages(draw: st.DrawFn) -> Plan:
    """Tensors of a few ranks each, some of which have more than others, to ranks that need some of all."""
    src, dst = {}, {}
    x, y = draw(st.sampled_from(MANY))
    wide = Mesh(x=x, y=y, ranks=range(8, 8 + x * y))
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3]))
        ranks = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True))
        few = Mesh(a=len(ranks), ranks=tuple(sorted(ranks)))
        op = draw(st.sampled_from(["n h", "(a n) h", "n h {sum: a}"]))
        src[f"w{i}"] = Layout(shape, few, op, dtype="float64")
        text = draw(st.sampled_from(["n h", "(y n) h", "(x n) h"]))
        dst[f"w{i}"] = Layout(shape, wide, text, dtype="float64")
    return plan(src, dst)


MATES = (Way(by_node=True, mates=True),)


def with_mates(p: Plan, where: Topology) -> Program | None:
    """The program in which mates send for holders, however long it takes; None if no rank could be one."""
    legs = find_legs(p, gather_lines(p.batches, where), where.ranks_per_node, MATES[0])
    if not list(legs):
        return None
    with mock.patch.dict(scheduling.WAYS, {"auto": MATES}):
        return schedule(p, topology=where)


@st.composite
def programs_with_mates(draw: st.DrawFn) -> Program:
    """Programs in which mates send for holders, in even slots or in others."""
    p = draw(st.one_of(stages(), stages(), plans()))
    made = with_mates(p, draw(topologies()))
    assume(made is not None)
    chosen = draw(weights())
    return weighted(made, chosen) if chosen else made


def weighted(prog: Program, weights: Sequence[int]) -> Program:
    """The program with slots of these weights, whatever `schedule` would choose; even slots without any."""
    slots = len(weights) or prog.slots
    made = replace(prog, slots=slots, weights=tuple(weights), max_inflight_bytes=1 << 30)
    return replace(made, digest=digest_program(made))


def weights() -> st.SearchStrategy[list[int]]:
    """Weights of slots, which fall and rise; none of even slots."""
    return st.lists(st.sampled_from([1, 2, 7, 500, 501, HEAVIEST]), max_size=9)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of all kinds of plans, on all kinds of nodes, many within narrow limits or with weights of slots."""
    p = draw(plans())
    where, fanout = draw(topologies()), draw(st.sampled_from(FANOUTS))
    limits = draw(st.sampled_from([{}, {}, {"max_inflight_bytes": 400}, {"max_ops_per_group": 4}]))
    try:
        made = schedule(p, topology=where, fanout=fanout, **limits)
    except PlanError:
        made = schedule(p, topology=where, fanout=fanout)
    chosen = draw(st.one_of(st.just([]), weights()))
    return weighted(made, chosen) if chosen else made


ONE, TWO, FOUR = (Mesh(a=n) for n in (1, 2, 4))
WIDE = Mesh(x=4, y=2, ranks=range(8, 16))
LAPS = Table(
    0, (from_ranges([(0, 5)]), from_ranges([(3, 8)]), identity(8), from_ranges([(6, 8), (1, 2)]))
)


def of(
    shape: tuple[int, ...],
    src: tuple[Mesh, Any],
    dst: tuple[Mesh, Any],
    per_node: int,
    fanout: Any,
    **limits: int,
) -> Program:
    layouts = (Layout(shape, mesh, spec, dtype="float64") for mesh, spec in (src, dst))
    return schedule(plan(*layouts), topology=nodes_of(per_node), fanout=fanout, **limits)


def tree(per_node: int, fanout: Any) -> Program:
    small, large = (
        (Layout(shape, TWO, "(a n) h"), Layout(shape, WIDE, "n h")) for shape in ((2, 3), (8, 4))
    )
    apart = Layout((8, 4), FOUR, "n (a h)"), Layout((8, 4), WIDE, "(y n) h")
    named = {"u": small, "v": large, "w": large, "x": apart}
    p = plan(
        {name: pair[0] for name, pair in named.items()},
        {name: pair[1] for name, pair in named.items()},
    )
    return schedule(p, topology=nodes_of(per_node), fanout=fanout)


def windows(per_node: int, fanout: Any) -> Program:
    layouts = (Layout((8, 4), TWO, "(a n) h"), Layout((8, 4), WIDE, "(y n) h"))
    src, dst = (
        tuple(window(x, (side, (0, 4))) for side in ((0, at), (at, 8)))
        for x, at in zip(layouts, (3, 5), strict=True)
    )
    return schedule(plan({"w": src}, {"w": dst}), topology=nodes_of(per_node), fanout=fanout)


def mates(weights: Sequence[int]) -> Program:
    """The other ranks of its node send for rank 0, which has most, to two nodes."""
    sides = (
        (24, Mesh(a=1), "n"),
        (4, Mesh(a=2, ranks=(1, 2)), "(a n)"),
        (3, Mesh(a=1, ranks=(3,)), "n"),
    )
    src = {f"w{n}": Layout((n,), mesh, text, dtype="float64") for n, mesh, text in sides}
    dst = {name: Layout(x.shape, WIDE, "(y n)", dtype="float64") for name, x in src.items()}
    prog = with_mates(plan(src, dst), nodes_of(4))
    assert prog is not None
    return weighted(prog, weights)


def every_program() -> dict[str, Program]:
    """By what is special about them."""
    with cut_anywhere():
        return {
            "straight": of((8, 6), (TWO, "(a n) h"), (WIDE, "n (x y h)"), 8, "none"),
            "nodes": of((8, 6), (TWO, "(a n) h"), (WIDE, "n h"), 4, "node"),
            "relays": of((24,), (ONE, "n"), (WIDE, "n"), 1, "auto"),
            "three legs": of(
                (24,), (TWO, "(a n)"), (Mesh(x=6, y=3, ranks=range(3, 21)), "n"), 3, "auto"
            ),
            "tapering off": weighted(
                of((24, 6), (TWO, "(a n) h"), (WIDE, "n h"), 4, "node"), (500, 500, 60, 7, 1)
            ),
            "tapering off on three legs": weighted(
                of((24,), (TWO, "(a n)"), (Mesh(x=6, y=3, ranks=range(3, 21)), "n"), 3, "auto"),
                (9, 2, 5),
            ),
            "mates": mates(()),
            "mates in slots that taper off": mates((3, 90, 90, 7, 1)),
            "in between": of(
                (40,), (TWO, "n"), (Mesh(x=5, y=2, ranks=range(1, 11)), "n"), 2, "auto"
            ),
            "where it is": of((8,), (WIDE, "(y n)"), (WIDE, "n"), 4, "node"),
            "folded": of((9,), (FOUR, "n {sum: a}"), (WIDE, "n"), 4, "node"),
            "folded and relayed": of((12,), (TWO, "n {max: a}"), (WIDE, "n"), 1, "auto"),
            "average": of((6, 2), (FOUR, "(a n) h"), (WIDE, "n h"), 2, "node"),
            "to sum": of(
                (8,), (TWO, "n"), (Mesh(x=2, y=4, ranks=range(4, 12)), "n {sum: x}"), 2, "node"
            ),
            "overlapping": of(
                (8, 3), (TWO, "n h"), (Mesh(a=4, ranks=range(4, 8)), (LAPS,)), 2, "node"
            ),
            "slots and turns": of(
                (24,), (TWO, "(a n)"), (WIDE, "n"), 4, "node", max_inflight_bytes=24
            ),
            "few messages": of(
                (8, 6), (FOUR, "(a n) h"), (WIDE, "n (x y h)"), 8, "none", max_ops_per_group=3
            ),
            "tree": tree(4, "node"),
            "windows": windows(4, "node"),
            "scalar": of((), (TWO, ""), (WIDE, ""), 2, "auto"),
            "no elements": of((0, 3), (TWO, "(a n) h"), (WIDE, "n h"), 4, "auto"),
            "nothing moves": of((8,), (TWO, "(a n)"), (TWO, "(a n)"), 8, "auto"),
        }


PROGRAMS = every_program()
