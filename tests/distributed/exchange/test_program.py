"""Programs over gloo do what their plans do, bit for bit: relayed inside nodes and between them, in many rounds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath.layouts.edits import window
from shardmath.plans.programs.messages import Round, keeps_fold_order, staging_bytes
from tests.distributed.pool import Pool
from tests.distributed.tasks.cases import (
    Arrays,
    as_bytes,
    expected,
    held,
    random_arrays,
    random_plan,
    thinned,
)
from tests.distributed.tasks.scenarios import (
    Case,
    bad_move,
    compile_with,
    move_again,
    move_cases,
    staging,
    tensors_of,
)
from tests.property.drawn.programs import weighted, with_mates

pytestmark = pytest.mark.long

Wanted = dict[int, dict[str, bytes]]
Side = Mapping[str, tuple[sm.Layout, ...]]
Parts = int | tuple[int, ...]
Way = tuple[int, str, Parts]
"""Ranks of a node, fan-out, and parts, or the weights of slots: what makes a program of a plan."""
TAPER = (500, 500, 60, 7, 1)
FANOUTS = ("auto", "none", "node")


# Programs


def nodes_of(n: int) -> sm.Topology:
    """Without latency, so that small tensors are relayed, too."""
    return sm.Topology(ranks_per_node=n, latency_s=0.0)


@functools.cache
def program(plan: sm.Plan, per_node: int, fanout: Any, parts: Parts = 1) -> sm.Program:
    """The plan's program, with about 1/parts of what its fullest rank moves under way at once, or slots of these
    weights. With the fan-out "mates", other ranks of a node send for its holders."""
    if fanout == "mates":
        handing = with_mates(plan, nodes_of(per_node))
        assert handing is not None
        return weighted(handing, parts) if isinstance(parts, tuple) else handing
    make = functools.partial(sm.schedule, plan, topology=nodes_of(per_node), fanout=fanout)
    if isinstance(parts, tuple):
        return weighted(make(), parts)
    if parts == 1:
        return make()
    most = max(
        sum(m.nbytes for one in make().for_rank(r) for m in one.messages) for r in plan.ranks
    )
    while True:
        try:
            return make(max_inflight_bytes=max(most // parts, 1))
        except sm.PlanError:
            parts -= 1


def ways(*parts: Parts) -> list[Way]:
    """All fan-outs, on nodes of 2 and of 4 ranks."""
    return [(n, fanout, k) for n in (2, 4) for fanout in FANOUTS for k in parts]


def programs(plan: sm.Plan, *parts: Parts) -> list[sm.Program]:
    return [program(plan, *way) for way in ways(*parts)]


def legs(prog: sm.Program) -> set[int]:
    return {m.leg for r in prog.ranks for one in prog.for_rank(r) for m in one.messages}


# Data that is the same at all replicas: a program may take it from others than its plan does


def case_of(plan: sm.Plan, seed: int = 0, **rest: Any) -> tuple[Case, Wanted]:
    """The plan with random data on both sides, and the destinations' bytes that must come of it."""
    rng = np.random.default_rng(seed)
    src, dst = distributed(plan.src, rng), random_arrays(plan.dst, rng)
    return Case(plan, as_bytes(src, plan.src), as_bytes(dst, plan.dst), **rest), expected(
        plan, src, dst
    )


def distributed(side: Side, rng: np.random.Generator) -> Arrays:
    """Each rank's local arrays of random global ones, an addend each."""
    whole = {name: _addends(windows[0], rng) for name, windows in side.items()}
    out = random_arrays(side, rng)
    names = {key: name for name in side for _, key, _ in held({name: side[name]})}
    for rank, key, layout in held(side):
        place = layout.mesh.coordinate(name for name, _ in layout.partial)
        addend = whole[names[key]][int(place[layout.mesh.ranks.index(rank)])]
        index = layout.indices(rank)
        own = np.ix_(*(np.flatnonzero(i >= 0) for i in index))
        out[rank][key][own] = addend[np.ix_(*(i[i >= 0] for i in index))]
    return out


def _addends(layout: sm.Layout, rng: np.random.Generator) -> list[Any]:
    count = math.prod(layout.mesh.axis_size(name) for name, _ in layout.partial)
    free = sm.Layout(layout.shape, sm.Mesh(a=count), {}, dtype=layout.dtype)
    return [named[""] for _, named in sorted(random_arrays({"": (free,)}, rng).items())]


def as_program(case: Case, prog: sm.Program) -> Case:
    return dataclasses.replace(case, plan=prog)  # type: ignore[arg-type]


def check(pool: Pool, cases: Sequence[tuple[Case, Wanted]]) -> None:
    """All cases in one task; every destination byte is as wanted."""
    got = pool.run(move_cases, [case for case, _ in cases], timeout=100)
    for i, (case, wanted) in enumerate(cases):
        for rank, named in wanted.items():
            assert got[rank][i] == named, (
                f"case {i} ({case.plan}, {case.lying}, {case.options}) on rank {rank}"
            )


def moved_by(
    plan: sm.Plan, chosen: Sequence[Way | None], seed: int = 0, **rest: Any
) -> list[tuple[Case, Wanted]]:
    """The plan's programs of these ways; None is the plan itself. Only these are scheduled, which takes long."""
    case, wanted = case_of(plan, seed, **rest)
    return [(as_program(case, program(plan, *way)) if way else case, wanted) for way in chosen]


# Plans in which something is relayed


def layout(shape: tuple[int, ...], mesh: sm.Mesh, spec: Any, dtype: str = "float32") -> sm.Layout:
    return sm.Layout(shape, mesh, spec, dtype=dtype)


TWO, ONE = sm.Mesh(tp=2), sm.Mesh(tp=1)
REST = sm.Mesh(dp=2, tp=2, ranks=range(2, 6))
SEVEN, EIGHT = sm.Mesh(dp=7, ranks=range(1, 8)), sm.Mesh(dp=4, tp=2)
MIXED = sm.Mesh(dp=3, tp=2, ranks=(7, 1, 4, 2, 6, 3))


def trees() -> tuple[dict[str, sm.Layout], dict[str, sm.Layout]]:
    """Several tensors of element sizes 1, 2, 4 and 8 by name, from two ranks to six."""
    kinds = {
        "q": ("bfloat16", (12, 10)),
        "norm": ("float32", (11,)),
        "scale": ("int64", ()),
        "mask": ("uint8", (5, 3)),
    }
    texts = {
        "q": ("(tp n) h", "n (tp h)"),
        "norm": ("n", "n"),
        "scale": ("", ""),
        "mask": ("n h", "(tp n) h"),
    }
    names = [(f"layers.{i}.{kind}", kind) for i in range(4) for kind in kinds]
    sides = [
        {n: layout(kinds[k][1], mesh, texts[k][i], kinds[k][0]) for n, k in names}
        for i, mesh in ((0, TWO), (1, MIXED))
    ]
    return sides[0], sides[1]


def windows() -> tuple[Any, Any]:
    """A tensor in two windows at the source, in two that overlap at a replicated destination."""
    here, there = layout((24, 6), TWO, "(tp n) h"), layout((24, 6), SEVEN, "n h")
    return (
        {"w": (window(here, ((0, 9), (0, 6))), window(here, ((9, 24), (0, 6))))},
        {"w": (window(there, ((0, 14), (0, 6))), window(there, ((10, 24), (1, 6))))},
    )


SPREADS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tp2 to tp2 dp2": lambda: (
        layout((12, 10), TWO, "(tp n) h"),
        layout((12, 10), sm.Mesh(tp=2, dp=2, ranks=range(2, 6)), "n (tp h)"),
    ),
    "tp2 to dp3 tp2": lambda: (
        layout((12, 10), TWO, "(tp n) h"),
        layout((12, 10), sm.Mesh(dp=3, tp=2, ranks=range(2, 8)), "n (tp h)"),
    ),
    "one to seven": lambda: (layout((31, 9), ONE, "n h"), layout((31, 9), SEVEN, "n h")),
    "uneven": lambda: (
        layout((13, 7), sm.Mesh(x=3, ranks=(5, 0, 6)), "(x n) h"),
        layout((13, 7), MIXED, "(tp n) h"),
    ),
    "to all": lambda: (layout((16, 6), REST, "(tp n) h"), layout((16, 6), sm.Mesh(dp=8), "n h")),
    "padded": lambda: (layout((13, 3), TWO, "(tp n) h"), layout((13, 3), MIXED, "(tp n)=20 h")),
    "strided": lambda: (
        layout((30, 4), TWO, "n (tp h)"),
        layout((30, 4), MIXED, {"tp": sm.StridedShard(0, 3)}),
    ),
    "cyclic": lambda: (
        layout((29, 4), TWO, "n (tp h)", "bfloat16"),
        layout((29, 4), MIXED, "(n tp 4) h", "bfloat16"),
    ),
    "scalar": lambda: (layout((), ONE, ""), layout((), SEVEN, "")),
    "windows": windows,
    "tree": trees,
}


@pytest.mark.parametrize("name", SPREADS)
def test_what_is_relayed_arrives(pool: Pool, name: str) -> None:
    """All fan-outs, on nodes of 2 and 4 ranks, in one round, in several, and in slots that taper off: always the plan's
    bytes."""
    plan = sm.plan(*SPREADS[name]())
    assert any(max(legs(prog)) > 1 for prog in programs(plan, 1))
    check(pool, moved_by(plan, thinned([None, *ways(1, 6, TAPER)], len(name))))


@pytest.mark.parametrize("lying", ["transposed", "strided"])
def test_what_is_relayed_lies_anywhere(pool: Pool, lying: str) -> None:
    """Destinations that are no contiguous tensors are read where they were written."""
    check(
        pool,
        [
            move
            for turn, make in enumerate(SPREADS.values())
            for move in moved_by(sm.plan(*make()), thinned(ways(3), turn), lying=lying)
        ],
    )


BIG = sm.plan(layout((1024, 256), TWO, "(tp n) h"), layout((1024, 256), MIXED, "n (tp h)"))
"""Boxes that are cut, so that nodes hold stripes and other nodes relay."""
COPIES = sm.plan(layout((2048, 128), ONE, "n h"), layout((2048, 128), SEVEN, "n h"))


@pytest.mark.parametrize(("plan", "last"), [(BIG, 2), (COPIES, 3)], ids=["columns", "rows"])
def test_big_tensors_go_in_stripes_and_many_rounds(pool: Pool, plan: sm.Plan, last: int) -> None:
    """What enters a node is relayed there, or to other nodes and then there, slice by slice while more arrives."""
    narrow = programs(plan, 24)
    assert any(max(legs(prog)) == last for prog in narrow)
    assert all(max(len(prog.for_rank(r)) for r in prog.ranks) > 12 for prog in narrow)
    check(pool, moved_by(plan, thinned([None, *ways(1, 24, TAPER)], last)))
    check(pool, moved_by(plan, thinned(ways(24), last), lying="transposed"))


def test_random_programs(pool: Pool) -> None:
    """Random layouts, meshes that overlap or not, reductions, empty dimensions, scalars; many in several rounds."""
    cases = []
    for seed in thinned(range(400, 450)):
        plan = random_plan(seed)
        case, wanted = case_of(plan, seed)
        cases += [
            (as_program(case, program(plan, *way)), wanted)
            for way in thinned(ways((1, 5, TAPER)[seed % 3]), seed)
        ]
    check(pool, cases)


# Mates


def staged(last: str = "n (tp h)", op: str = "") -> sm.Plan:
    """Pipeline stages on two ranks each, of which the first has most; to four ranks of another node."""
    sides = (
        (96, "bfloat16", (0, 1)),
        (10, "float32", (2, 3)),
        (7, "float32", (3,)),
        (40, "int64", (0,)),
    )
    src, dst = {}, {}
    for i, (n, kind, ranks) in enumerate(sides):
        few = sm.Mesh(a=len(ranks), ranks=ranks)
        src[f"w{i}"] = layout((n, 6), few, f"n h {{{op}: a}}" if op else "n h", kind)
        dst[f"w{i}"] = layout((n, 6), sm.Mesh(dp=2, tp=2, ranks=range(4, 8)), last, kind)
    return sm.plan(src, dst)


@pytest.mark.parametrize("last", ["n (tp h)", "n h", "(dp tp n) h"])
def test_what_mates_send_arrives(pool: Pool, last: str) -> None:
    """In even slots and in others, wherever tensors lie, and reduced on arrival."""
    plan = staged(last)
    for one in (program(plan, 4, "mates", weights) for weights in ((), TAPER, (1, 9, 3))):
        assert {4, 5} <= legs(one) and max(len(one.for_rank(r)) for r in one.ranks) > 1
    ways = [(4, "mates", weights) for weights in ((), TAPER, (1, 9, 3))]
    check(pool, moved_by(plan, ways))
    check(pool, moved_by(plan, ways[1:], seed=1, lying="transposed"))
    check(pool, moved_by(staged(last, "sum"), ways[:2], seed=2))


def test_large_pieces_go_over_mates_one_by_one(pool: Pool) -> None:
    """Over gloo they are messages of their own, from the holder to the mate and on."""
    wide = sm.Mesh(dp=2, tp=2, ranks=range(4, 8))
    names = *((f"w{i}", 0) for i in range(9)), ("x", 2), ("y", 3)
    src = {name: layout((1024, 300), sm.Mesh(x=1, ranks=(rank,)), "n h") for name, rank in names}
    dst = {name: layout((1024, 300), wide, "n h") for name in src}
    plan = sm.plan(src, dst)
    way = 4, "mates", (5, 1)
    handed = [m for one in program(plan, *way).for_rank(0) for m in one.sends if m.is_handing]
    assert any(piece.nbytes > 1 << 20 for m in handed for piece in m.pieces[1:])
    check(pool, moved_by(plan, [way]))


def test_what_mates_keep_is_within_the_limit(pool: Pool) -> None:
    """What a rank is handed, and sends on a slot later, is in flight in both; and nothing is staged besides."""
    prog = program(staged(), 4, "mates", (1, 1, 1, 1))
    most = max(
        sum(m.nbytes for m in (*one.sends, *one.receives))
        for r in prog.ranks
        for one in prog.for_rank(r)
    )
    room = most + 15 * max(len(one.messages) for r in prog.ranks for one in prog.for_rank(r))
    for seen in pool.run(staging, as_program(case_of(staged(), lying="transposed")[0], prog), 2):
        sizes, places, _ = zip(*seen, strict=True)
        assert sizes[0] <= room and len(set(sizes)) == len(set(places)) == 1


# Reductions


@pytest.mark.parametrize(
    "op", ["avg", *(pytest.param(op, marks=pytest.mark.slow) for op in ("sum", "max", "product"))]
)
def test_reductions_are_bitwise(pool: Pool, op: str) -> None:
    """All-reduce, reduce-scatter, to other ranks and to Partial: addends come in the order of simulate."""
    part, both, other = (
        f"n h {{{op}: dp}}",
        f"n (tp h) {{{op}: dp}}",
        sm.Mesh(pp=3, ranks=(7, 2, 4)),
    )
    ends = [
        (EIGHT, part, EIGHT, "n h"),
        (EIGHT, part, EIGHT, "(dp n) (tp h)"),
        (EIGHT, part, other, "n h"),
    ]
    ends += [(REST, both, EIGHT, "n h"), (REST, both, other, f"n h {{{op}: pp}}")]
    ends += [(REST, both, sm.Mesh(a=2, b=4), f"n h {{{op}: a}}")]
    chosen = [("float32", end) for end in ends] + [("bfloat16", end) for end in ends[::3]]
    chosen += [("complex64", end) for end in ends[2::3] if op != "max"]
    plans = [
        sm.plan(layout((24, 10), mesh, a, kind), layout((24, 10), there, b, kind))
        for kind, (mesh, a, there, b) in chosen
    ]
    moved = [
        moved_by(plan, thinned([None, *ways(4)], turn), seed=1) for turn, plan in enumerate(plans)
    ]
    check(pool, list(itertools.chain.from_iterable(moved)))


# Movers


def test_moving_again_moves_what_is_there_now(pool: Pool) -> None:
    """Other values, other tensors that lie otherwise: what is relayed is never what an earlier move brought."""
    ways = ("contiguous", "transposed", "contiguous", "strided")
    for prog in (program(BIG, 2, "auto", 12), program(sm.plan(*trees()), 4, "node", 4)):
        made = [case_of(prog.plan, seed, lying=lying) for seed, lying in enumerate(ways)]
        got = pool.run(move_again, [as_program(case, prog) for case, _ in made])
        for i, (_, wanted) in enumerate(made):
            for rank, named in wanted.items():
                assert got[rank][i] == named


@pytest.mark.parametrize("lying", ["contiguous", "transposed"])
def test_staging_is_bounded_and_made_once(pool: Pool, lying: str) -> None:
    """By the program's limit, but for where messages begin; one block for all moves, no memory after the first."""
    prog = program(BIG, 2, "auto", 6)
    room = prog.max_inflight_bytes + 15 * max(
        len(one.messages) for r in prog.ranks for one in prog.for_rank(r)
    )
    for seen in pool.run(staging, as_program(case_of(BIG, lying=lying)[0], prog), 2):
        sizes, places, allocated = zip(*seen, strict=True)
        assert sizes[0] <= room
        assert len(set(sizes)) == len(set(places)) == 1
        assert allocated[1] < 20_000, "only the records of agreement"


def test_whole_rows_are_relayed_without_staging(pool: Pool) -> None:
    """A stretch of a destination tensor is sent from where it lies."""
    prog = program(COPIES, 2, "node")
    assert max(legs(prog)) > 1
    for seen in pool.run(staging, as_program(case_of(COPIES)[0], prog), 1):
        assert [size for size, _, _ in seen] == [0]


def test_the_broadcast_engine_moves_the_plan(pool: Pool) -> None:
    cases = [
        (as_program(case, program(case.plan, 2, "node")), wanted)
        for case, wanted in (
            case_of(sm.plan(*SPREADS[name]()), options={"engine": "broadcast"}) for name in SPREADS
        )
    ]
    cases += moved_by(staged(), [(4, "mates", TAPER)], options={"engine": "broadcast"})
    check(pool, cases)


def test_a_group_of_some_ranks(pool: Pool) -> None:
    """Ranks of the group that the program does not name take part in agreement and move nothing."""
    plan = sm.plan(
        layout((9, 4), sm.Mesh(x=1, ranks=(5,)), "n h"),
        layout((9, 4), sm.Mesh(x=3, ranks=(3, 1, 2)), "n h"),
    )
    check(pool, moved_by(plan, [None, *ways(1)], group=(5, 3, 1, 7, 2)))


# What is wrong is everybody's error


PLAN = sm.plan(*SPREADS["one to seven"]())
PROG = program(PLAN, 2, "node")


@pytest.mark.parametrize(
    "other", [PLAN, program(PLAN, 2, "none"), program(PLAN, 4, "node")], ids=["plan", "none", "4"]
)
def test_another_program_on_one_rank(pool: Pool, other: Any) -> None:
    """Another fan-out, another topology, or the bare plan: every rank raises and shows which."""
    kind = "plan" if isinstance(other, sm.Plan) else "program"
    for error in pool.run(compile_with, [PROG] * 5 + [other] + [PROG] * 2, [{}], tuple(range(8))):
        assert error.startswith(
            f"ranks disagree on what to do\nranks 0-4, 6-7: compile(program {PROG.digest[:24]}, "
        )
        assert f"rank 5: compile({kind} {other.digest[:24]}, " in error


def test_other_limits_on_one_rank(pool: Pool) -> None:
    """A program with other limits is another program."""
    other = sm.schedule(PLAN, topology=nodes_of(2), fanout="node", max_inflight_bytes=1 << 20)
    for error in pool.run(compile_with, [PROG] * 7 + [other], [{}], tuple(range(8))):
        assert (
            f"rank 7: compile(program {other.digest[:24]}, timeout=20.0, max_inflight_bytes=1048576"
            in error
        )


def test_a_limit_that_is_not_the_programs(pool: Pool) -> None:
    """`max_inflight_bytes` is part of a program: leave it out, or pass the same."""
    shown = "ranks 0-7: max_inflight_bytes=4096, but the program has 1073741824; leave it out, or pass it to"
    for error in pool.run(compile_with, [PROG], [{"max_inflight_bytes": 4096}], tuple(range(8))):
        assert error.startswith(shown)
    same = {"max_inflight_bytes": PROG.max_inflight_bytes}
    assert pool.run(compile_with, [PROG], [same], tuple(range(8))) == [""] * 8


def test_a_group_without_a_rank_of_the_program(pool: Pool) -> None:
    errors = pool.run(compile_with, [PROG], [{}], (0, 1, 2, 3))
    assert all("[4, 5, 6, 7] are not in the group" in errors[rank] for rank in range(4))


def test_a_bad_tensor_on_the_second_move(pool: Pool) -> None:
    """All ranks raise what is wrong and where; no destination has changed; the third move is right."""
    case, wanted = case_of(PLAN)
    for rank, (error, same, end) in enumerate(
        pool.run(bad_move, as_program(case, PROG), (3,), "dst shape")
    ):
        assert error.startswith("rank 3: the destination tensor has shape (31, 9, 2)")
        assert same
        assert end == wanted.get(rank, {})


def dies_passing_on(rank: int, case: Case, victim: int, timeout: float) -> tuple[str, str]:
    """The errors of a move in which the victim is killed when it passes something on, and of the next one."""
    import os
    import signal

    import shardmath_torch as smt
    from shardmath_torch.moves.exchange.rounds import Rounds

    src, dst = tensors_of(case.src.get(rank)), tensors_of(case.dst.get(rank))
    move = smt.compile(case.plan, timeout=timeout)
    move(src, out=dst)
    plain = Rounds._send

    def send(self: Any, one: Any) -> Any:
        if rank == victim and (one.message.relayed or one.message.is_handed):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, one)

    Rounds._send = send  # type: ignore[method-assign]
    errors = []
    for _ in range(2):
        try:
            move(src, out=dst)
            errors.append("")
        except sm.ExchangeError as error:
            errors.append(str(error))
    return errors[0], errors[1]


def test_a_rank_that_dies_passing_on() -> None:
    """The others name it, in time, and say that something was to come from it, though the plan has it send nothing."""
    plan = sm.plan(
        {"w": layout((64, 9), ONE, "n h")},
        {"w": layout((64, 9), sm.Mesh(dp=3, ranks=(1, 2, 3)), "n h")},
    )
    prog = program(plan, 2, "node")
    victim = next(r for r in plan.dst_ranks if relays(prog, r))
    workers = Pool(4, host=0)
    try:
        started = [rank for rank in range(4) if rank != victim]
        case = as_program(case_of(plan)[0], prog)
        answers = workers.attempt(dies_passing_on, case, victim, 5.0, ranks=started, timeout=20)
        assert any(first for first, _ in answers)
        for first, again in answers:
            told = f"rank {victim} failed while tensor 'w' had to be sent by it: "
            assert first.startswith(told) if first else again.startswith(told), (first, again)
            assert not first or again == f"this mover is broken: {first}"
    finally:
        workers.close()


def test_a_mate_that_dies() -> None:
    """The others name it, though the plan has it neither send nor receive these tensors, and nothing else is torn."""
    plan = staged()
    prog = program(plan, 4, "mates", (5, 5, 1))
    victim = next(
        r for r in (2, 3) if any(m.is_handed for one in prog.for_rank(r) for m in one.sends)
    )
    workers = Pool(8, host=0)
    try:
        started = [rank for rank in range(8) if rank != victim]
        case = as_program(case_of(plan)[0], prog)
        answers = workers.attempt(dies_passing_on, case, victim, 5.0, ranks=started, timeout=90)
        assert any(first for first, _ in answers)
        for first, again in answers:
            assert f"rank {victim} failed while tensor 'w" in (first or again), (first, again)
            assert not first or again == f"this mover is broken: {first}"
    finally:
        workers.close()


# Messages, without processes


def relays(prog: sm.Program, rank: int) -> bool:
    return any(m.relayed for one in prog.for_rank(rank) for m in one.sends)


@functools.cache
def some_programs() -> list[tuple[sm.Program, dict[int, tuple[Round, ...]]]]:
    """Programs of all kinds, and every rank's rounds."""
    plans = [(sm.plan(*make()), ways(1, 6, TAPER)) for make in SPREADS.values()]
    plans += [(random_plan(seed), ways(1, 5, TAPER)) for seed in thinned(range(12))]
    plans += [(BIG, ways(24)), (staged(), [(4, "mates", ())]), (staged(), [(4, "mates", TAPER)])]
    made = [
        program(plan, *way)
        for turn, (plan, all_ways) in enumerate(plans)
        for way in thinned(all_ways, turn)
    ]
    return [(prog, {r: prog.for_rank(r) for r in prog.ranks}) for prog in made]


def test_both_ends_have_the_same_messages_in_the_same_order() -> None:
    """A pair's messages are matched by order alone."""
    for prog, walked in some_programs():
        for a, b in itertools.permutations(prog.ranks, 2):
            posted = [m for one in walked[a] for m in one.sends if m.dst_rank == b]
            asked = [m for one in walked[b] for m in one.receives if m.src_rank == a]
            assert posted == asked


def test_no_byte_of_a_message_is_padding() -> None:
    """So staging is the program's limit, and at most 15 bytes a message."""
    for prog, walked in some_programs():
        for rounds in walked.values():
            for one in rounds:
                for m in one.messages:
                    sizes = [t.nbytes // math.prod(t.shape) for t in m.pieces]
                    assert m.nbytes == sum(t.nbytes for t in m.pieces)
                    assert all(
                        start % size == 0 for start, size in zip(m.starts, sizes, strict=True)
                    )
                under_way = [m.nbytes for m in (*one.sends, *one.receives)]
                assert sum(under_way) <= prog.max_inflight_bytes
                assert staging_bytes(one) <= prog.max_inflight_bytes + 15 * len(under_way)


def test_phases_bring_addends_in_order() -> None:
    for _, walked in some_programs():
        assert all(map(keeps_fold_order, walked.values()))
