"""Moves over gloo do what `simulate` says, bit for bit, and so does the broadcast reference."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch

import shardmath as sm
from shardmath.base import dtypes
from shardmath.layouts.edits import window
from shardmath_torch.groups.dtypes import missing
from tests.distributed.pool import Pool
from tests.distributed.tasks.cases import make_case, random_plan, thinned
from tests.distributed.tasks.scenarios import Case, move_again, move_cases, staging

Wanted = dict[int, dict[str, bytes]]


def check(pool: Pool, cases: Sequence[tuple[Case, Wanted]]) -> None:
    """All cases in one task; every destination byte is as wanted."""
    got = pool.run(move_cases, [case for case, _ in cases], timeout=90)
    for i, (case, wanted) in enumerate(cases):
        for rank, named in wanted.items():
            assert got[rank][i] == named, (
                f"case {i} ({case.plan.src} -> {case.plan.dst}, {case.options}) on rank {rank}"
            )


@pytest.mark.parametrize("engine", ["exchange", "broadcast"])
def test_random_plans(pool: Pool, engine: str) -> None:
    """Random layouts, meshes that overlap or not, reductions, empty dimensions, scalars."""
    seeds = thinned(range(100), len(engine))
    check(pool, [make_case(random_plan(seed), seed, options={"engine": engine}) for seed in seeds])


@pytest.mark.parametrize("limit", [64, 1000, 20_000])
def test_many_rounds(pool: Pool, limit: int) -> None:
    """The same with little room: many rounds, and reductions that must go one addend after the other."""
    check(
        pool,
        [
            make_case(random_plan(seed), seed, options={"max_inflight_bytes": limit})
            for seed in thinned(range(100, 200), limit)
        ],
    )


@pytest.mark.parametrize("lying", ["transposed", "strided"])
def test_tensors_that_are_not_contiguous(pool: Pool, lying: str) -> None:
    """Sources and destinations may be any views."""
    seeds = thinned(range(200, 240), len(lying))
    check(pool, [make_case(random_plan(seed), seed, lying=lying) for seed in seeds])


@pytest.mark.parametrize("group", [(0, 1, 2), (5, 3, 1, 7), (2,), (6, 0)])
def test_groups_of_some_ranks(pool: Pool, group: tuple[int, ...]) -> None:
    """Rank ids are global ranks; a group of some, in any order, will do, also of ranks that the plan does not name."""
    mesh, less = sm.Mesh(tp=len(group), ranks=group), sm.Mesh(tp=1, ranks=group[-1:])
    a, b, c = (
        sm.Layout((7, 5), m, spec)
        for m, spec in ((mesh, "(tp n) h"), (mesh, "n (tp h)"), (less, "n h"))
    )
    check(
        pool, [make_case(sm.plan(*pair), group=group) for pair in ((a, b), (b, c), (c, a), (a, a))]
    )


DTYPES = [name for name in sorted(dtypes.ITEMSIZE) if hasattr(torch, name)]


def test_all_dtypes_of_torch_are_known() -> None:
    """Every dtype of torch that can be made and copied has a name in the core; what has none cannot even be copied."""
    made = {
        str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)
    }
    unnamed = made - set(DTYPES)
    assert all(name.startswith(("bits", "q", "int", "uint")) for name in unnamed), unnamed
    assert set(dtypes.ITEMSIZE) - made <= {"bcomplex32"}  # from torch 2.14 on


@pytest.mark.parametrize("engine", ["exchange", "broadcast"])
def test_all_dtypes_move(pool: Pool, engine: str) -> None:
    """Random bits of every dtype arrive bit by bit: disjoint, overlapping and same meshes, alone and in a tree."""
    left, right, both = sm.Mesh(tp=4), sm.Mesh(tp=4, ranks=range(3, 7)), sm.Mesh(dp=2, tp=4)
    a = {name: sm.Layout((6, 9), left, "(tp n) h", dtype=name) for name in DTYPES}
    b = {name: sm.Layout((6, 9), right, "n (tp h)", dtype=name) for name in DTYPES}
    c = {name: sm.Layout((6, 9), both, "(dp n) (tp h)", dtype=name) for name in DTYPES}
    plans = [
        sm.plan(a, b),
        sm.plan(b, c),
        sm.plan(c, c),
        *(sm.plan(a[name], c[name]) for name in thinned(DTYPES, len(engine))),
    ]
    check(pool, [make_case(plan, options={"engine": engine}) for plan in plans])


REDUCED = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint64",
]


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
@pytest.mark.parametrize(
    "options", [{}, {"max_inflight_bytes": 1 << 12}, {"engine": "broadcast"}], ids=str
)
def test_reductions_are_bitwise(pool: Pool, op: str, options: dict[str, object]) -> None:
    """Reduce-scatter, all-reduce, to another mesh, and from Partial to Partial, in the order of simulate."""
    plans = reductions(op)
    chosen = thinned(plans, len(op) + len(options))
    check(pool, [make_case(plan, options=options) for plan in chosen])


def reductions(op: str) -> list[sm.Plan]:
    """Each dtype in two of seven relayouts; all of them for float32."""
    mesh, other = sm.Mesh(dp=4, tp=2), sm.Mesh(pp=3, ranks=(7, 2, 4))
    part, both = f"n (tp h) {{{op}: dp}}", f"n h {{{op}: dp tp}}"
    ways = [(part, mesh, to) for to in ("(dp n) (tp h)", "n h", f"(tp n) h {{{op}: dp}}")]
    ways += [(both, mesh, "(tp dp n) h"), ("n (tp h)", mesh, f"(dp n) h {{{op}: tp}}")]
    ways += [(part, other, "(pp n) h"), (part, other, f"n h {{{op}: pp}}")]
    chosen = [("float32", way) for way in ways]
    chosen += [
        (dtype, ways[i % len(ways)]) for k in (0, 3) for i, dtype in enumerate(REDUCED[1:], k)
    ]
    out = []
    for dtype, (a, there, b) in chosen:
        with contextlib.suppress(sm.ShardError):
            out.append(
                sm.plan(
                    sm.Layout((9, 16), mesh, a, dtype=dtype),
                    sm.Layout((9, 16), there, b, dtype=dtype),
                )
            )
    return [plan for plan in out if not _lacks(plan)]


def _lacks(plan: sm.Plan) -> bool:
    """Whether torch lacks what the plan needs: compile says so, which test_bad_input tests."""
    ops = {t.op for t in plan.transfers()} - {"copy"}
    dtype = plan.src[""][0].dtype
    return any(missing(dtype, op) for op in ops) or (
        plan.divisor("") > 1 and missing(dtype, "divide")
    )


def test_adjoints(pool: Pool) -> None:
    """Adjoint plans, sums in their own order."""
    plans = []
    for seed in thinned(range(300, 360)):
        with contextlib.suppress(sm.ShardError):
            plan = sm.adjoint(random_plan(seed, ops=("sum",)))
            plans += [] if _lacks(plan) else [plan]
    check(pool, [make_case(plan, seed) for seed, plan in enumerate(plans)])


def test_trees_and_windows(pool: Pool) -> None:
    """Many tensors of several dtypes in one message a peer; a tensor held as two windows; padding stays as it was."""
    mesh, other = sm.Mesh(dp=2, tp=2), sm.Mesh(tp=3, ranks=(6, 1, 3))
    names = [f"layers.{i}.{w}" for i in range(5) for w in ("q", "norm", "scale")]
    specs = {
        "q": ((12, 10), "(tp dp n) h", "n (tp h)"),
        "norm": ((10,), "n", "(tp n)"),
        "scale": ((), "", ""),
    }
    kinds = {"q": "bfloat16", "norm": "float32", "scale": "int64"}
    sides = [
        {
            n: sm.Layout(specs[w][0], m, specs[w][k], dtype=kinds[w])
            for n in names
            for w in [n.rpartition(".")[2]]
        }
        for k, m in ((1, mesh), (2, other))
    ]
    whole = sm.Layout((8, 6), mesh, "(tp n) h")
    halves = (window(whole, ((0, 3), (0, 6))), window(whole, ((3, 8), (0, 6))))
    padded = sm.Layout((9, 4), sm.Mesh(tp=4), "(tp n)=16 h")
    plans = [
        sm.plan(*sides),
        sm.plan({"w": halves}, {"w": sm.Layout((8, 6), other, "n (tp h)")}),
        sm.plan(
            {"w": whole}, {"w": (window(whole, ((0, 3), (0, 6))), window(whole, ((2, 8), (0, 4))))}
        ),
        sm.plan(padded, padded),
        sm.plan(sm.Layout((9, 4), mesh, "n h {sum: dp}"), padded),
        sm.plan(sm.Layout((9, 4), mesh, "n h {avg: dp}"), padded),
    ]
    check(
        pool,
        [
            make_case(plan, options=options)
            for plan in plans
            for options in ({}, {"engine": "broadcast"}, {"max_inflight_bytes": 96})
        ],
    )


@pytest.mark.parametrize("limit", [1 << 14, 1 << 17, 1 << 30])
def test_staging_is_bounded_and_made_once(pool: Pool, limit: int) -> None:
    """Never above max_inflight_bytes; the same block for every move; no memory allocated after the first."""
    mesh = sm.Mesh(dp=4, tp=2)
    plan = sm.plan(
        sm.Layout((256, 512), mesh, "(dp tp n) h"), sm.Layout((256, 512), mesh, "n (tp dp h)")
    )
    for seen in pool.run(staging, make_case(plan, options={"max_inflight_bytes": limit})[0], 2):
        sizes, places, allocated = zip(*seen, strict=True)
        assert 0 < sizes[0] <= limit
        assert len(set(sizes)) == len(set(places)) == 1
        assert allocated[1] < 20_000, "only the records of agreement"


def test_what_is_contiguous_is_not_staged(pool: Pool) -> None:
    """Whole rows from and to contiguous tensors go straight from memory to memory."""
    mesh = sm.Mesh(dp=4, tp=2)
    plan = sm.plan(
        sm.Layout((64, 64), mesh, "(dp tp n) h"), sm.Layout((64, 64), mesh, "(tp dp n) h")
    )
    for seen in pool.run(staging, make_case(plan)[0], 1):
        assert [size for size, _, _ in seen] == [0]


def test_moving_again_moves_what_is_there_now(pool: Pool) -> None:
    """Other values, other tensors that lie otherwise: a mover keeps nothing of an earlier move."""
    plan = random_plan(7, ops=("sum",))
    cases = [
        make_case(plan, seed, lying=lying)
        for seed, lying in enumerate(("contiguous", "transposed", "contiguous", "strided"))
    ]
    got = pool.run(move_again, [case for case, _ in cases])
    for i, (_, wanted) in enumerate(cases):
        for rank, named in wanted.items():
            assert got[rank][i] == named


def test_long_pieces_go_in_place_beside_short_ones(pool: Pool) -> None:
    """Whole rows of 2 MB are messages of their own; columns and short rows between them share staging."""
    here, there = sm.Mesh(tp=2), sm.Mesh(tp=2, ranks=(2, 3))
    shapes = {"a": (1024, 1024), "b": (6, 4), "c": (64, 8), "d": (1024, 1024), "e": (3,)}
    src = {name: sm.Layout(shape, here, "(tp n) ...") for name, shape in shapes.items()}
    dst = {name: sm.Layout(shape, there, "(tp n) ...") for name, shape in shapes.items()}
    dst["c"] = sm.Layout(shapes["c"], there, "n (tp h)")
    case, wanted = make_case(sm.plan(src, dst))
    check(pool, [(case, wanted)])
    for seen in pool.run(staging, case, 1):
        assert seen == [] or seen[0][0] < 1 << 12
