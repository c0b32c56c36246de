"""Verify: a thousand wrong lists of transfers are refused, and what is equally right is not.

Right and wrong are told apart by `right`, which knows nothing of plans but their layouts: it looks at every element of
every transfer.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from hypothesis import given

from shardmath import (
    Layout,
    Mesh,
    Partial,
    Plan,
    PlanError,
    Program,
    Table,
    Transfer,
    Transposed,
    adjoint,
    plan,
    schedule,
    testing,
    verify,
)
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.plans.flows.topology import Topology
from tests.property.drawn.plans import FAR, FORWARD, PLANS, halves, of, right


@pytest.mark.parametrize("name", PLANS)
def test_right_plans_are_right(name: str) -> None:
    p = PLANS[name]
    verify(p)
    verify(p, transfers=p.transfers())
    verify(p, transfers=reversed(list(p.transfers())))
    if isinstance(p, Plan):
        assert right(p, list(p.transfers()))


@given(testing.pairs())
def test_random_plans_are_right(pair: tuple[Layout, ...]) -> None:
    p = plan(*pair)
    assert right(p, list(p.transfers()))


# Mutations of what is executed

Mutation = Callable[[random.Random, Plan, list[Transfer], int], list[Transfer] | None]


def put(transfers: list[Transfer], i: int, *instead: Transfer) -> list[Transfer]:
    return [*transfers[:i], *instead, *transfers[i + 1 :]]


def shifted(*fields: str) -> Mutation:
    """The slices of these ends one further, in one dimension."""

    def mutate(
        rng: random.Random, p: Plan, transfers: list[Transfer], i: int
    ) -> list[Transfer] | None:
        t = transfers[i]
        if not t.shape:
            return None
        d, by = rng.randrange(len(t.shape)), rng.choice((-2, -1, 1, 2))
        moved = {
            f: tuple(
                slice(s.start + by, s.stop + by) if k == d else s
                for k, s in enumerate(getattr(t, f))
            )
            for f in fields
        }
        return put(transfers, i, t._replace(**moved))

    return mutate


def resized(*fields: str) -> Mutation:
    """The box one longer or shorter in one dimension, in these fields."""

    def mutate(
        rng: random.Random, p: Plan, transfers: list[Transfer], i: int
    ) -> list[Transfer] | None:
        t = transfers[i]
        if not t.shape:
            return None
        d, by = rng.randrange(len(t.shape)), rng.choice((-1, 1))
        new = {
            f: tuple(
                slice(s.start, s.stop + by) if k == d else s for k, s in enumerate(getattr(t, f))
            )
            for f in fields
            if f not in ("shape", "nbytes")
        }
        shape = tuple(n + by * (k == d) for k, n in enumerate(t.shape))
        item = p.src[t.tensor][0].itemsize
        new |= {"shape": shape} if "shape" in fields else {}
        new |= {"nbytes": math.prod(shape) * item} if "nbytes" in fields else {}
        return put(transfers, i, t._replace(**new))

    return mutate


def renamed(field: str, choices: Callable[[Plan, Transfer], list[Any]]) -> Mutation:
    def mutate(
        rng: random.Random, p: Plan, transfers: list[Transfer], i: int
    ) -> list[Transfer] | None:
        other = [x for x in choices(p, transfers[i]) if x != getattr(transfers[i], field)]
        return (
            put(transfers, i, transfers[i]._replace(**{field: rng.choice(other)}))
            if other
            else None
        )

    return mutate


def wrongly_split(
    rng: random.Random, p: Plan, transfers: list[Transfer], i: int
) -> list[Transfer] | None:
    """In two along a dimension, with an element twice or left out."""
    t = transfers[i]
    long = [d for d, n in enumerate(t.shape) if n > 2]
    if not long:
        return None
    d = rng.choice(long)
    at = rng.randrange(1, t.shape[d] - 1)
    spans = ((0, at), (at + rng.choice((-1, 1)), t.shape[d]))
    return put(transfers, i, *(_part(p, t, d, lo, hi) for lo, hi in spans if lo < hi))


def rightly_split(
    rng: random.Random, p: Plan, transfers: list[Transfer], i: int
) -> list[Transfer] | None:
    """In two along a dimension: as right as before."""
    t = transfers[i]
    long = [d for d, n in enumerate(t.shape) if n > 1]
    if not long:
        return None
    d = rng.choice(long)
    at = rng.randrange(1, t.shape[d])
    return put(transfers, i, _part(p, t, d, 0, at), _part(p, t, d, at, t.shape[d]))


def _part(p: Plan, t: Transfer, d: int, lo: int, hi: int) -> Transfer:
    fields = ("src_slices", "dst_slices", "global_slices")
    cut = {
        f: tuple(
            slice(s.start + lo, s.start + hi) if k == d else s for k, s in enumerate(getattr(t, f))
        )
        for f in fields
    }
    shape = tuple(hi - lo if k == d else n for k, n in enumerate(t.shape))
    return t._replace(**cut, shape=shape, nbytes=math.prod(shape) * p.src[t.tensor][0].itemsize)


def stepped(
    rng: random.Random, p: Plan, transfers: list[Transfer], i: int
) -> list[Transfer] | None:
    t = transfers[i]
    if not t.shape:
        return None
    field = rng.choice(("src_slices", "dst_slices", "global_slices"))
    first, *rest = getattr(t, field)
    return put(transfers, i, t._replace(**{field: (slice(first.start, first.stop, 2), *rest)}))


ALL = ("src_slices", "dst_slices", "global_slices")
MUTATIONS: dict[str, Mutation] = {
    "drop": lambda rng, p, ts, i: put(ts, i),
    "duplicate": lambda rng, p, ts, i: [*ts, ts[i]],
    "shift the source": shifted("src_slices"),
    "shift the destination": shifted("dst_slices"),
    "shift the global slices": shifted("global_slices"),
    "shift source and global slices": shifted("src_slices", "global_slices"),
    "shift all slices": shifted(*ALL),
    "resize the shape": resized("shape"),
    "resize the source": resized("src_slices"),
    "resize the destination": resized("dst_slices"),
    "resize all": resized(*ALL, "shape", "nbytes"),
    "source rank": renamed("src_rank", lambda p, t: [*p.ranks, 99]),
    "destination rank": renamed("dst_rank", lambda p, t: [*p.ranks, 99]),
    "operation": renamed("op", lambda p, t: ["copy", "sum", "max", "min", "product", "avg"]),
    "addend": renamed("addend", lambda p, t: [t.addend - 1, t.addend + 1, 0]),
    "bytes": renamed("nbytes", lambda p, t: [t.nbytes - 1, t.nbytes + 1, 0, 2 * t.nbytes]),
    "tensor": renamed("tensor", lambda p, t: [*p.src, "nobody"]),
    "source tensor": renamed(
        "src_tensor", lambda p, t: [t.dst_tensor, "w[0]", "w[1]", "nobody", *p.src]
    ),
    "destination tensor": renamed(
        "dst_tensor", lambda p, t: [t.src_tensor, "w[0]", "w[1]", "nobody", *p.src]
    ),
    "split wrongly": wrongly_split,
    "split rightly": rightly_split,
    "step": stepped,
}


def raises_plan_error(make: Callable[[], object]) -> bool:
    try:
        make()
    except PlanError:
        return True
    return False


@pytest.mark.parametrize("most", [400, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_transfers(most: int) -> None:
    rng = random.Random(0)
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    while wrong.total() < most:
        p, kind = FORWARD[rng.choice(list(FORWARD))], rng.choice(list(MUTATIONS))
        transfers = list(p.transfers())
        if not transfers:
            continue
        mutated = MUTATIONS[kind](rng, p, transfers, rng.randrange(len(transfers)))
        if mutated is None:
            continue
        good = right(p, mutated)
        refused = raises_plan_error(lambda p=p, mutated=mutated: verify(p, transfers=mutated))
        assert refused == (not good), (kind, [t for t in mutated if t not in transfers])
        (kept if good else wrong)[kind] += 1
    assert len(wrong) == len(MUTATIONS) - 1
    assert set(kept) <= {"split rightly", "source rank", "destination rank"}
    assert kept["split rightly"] > most / 50 and kept["source rank"] > 0


def test_adjoints_refuse_all_that_their_plans_refuse() -> None:
    """A mutation of an adjoint's transfers that is not one of the ends alone."""
    rng = random.Random(1)
    kinds = [
        k
        for k in MUTATIONS
        if k not in ("split rightly", "source rank", "destination rank", "tensor")
    ]
    adjoints = [p for p in PLANS.values() if isinstance(p, Transposed)]
    counted = 0
    while counted < 300:
        p, kind = rng.choice(adjoints), rng.choice(kinds)
        transfers = list(p.transfers())
        mutated = MUTATIONS[kind](rng, p, transfers, rng.randrange(len(transfers)))
        if mutated is not None:
            assert raises_plan_error(lambda p=p, mutated=mutated: verify(p, transfers=mutated)), (
                kind,
                p,
            )
            counted += 1


# Overlapping destination parts: replicas of one addend across parts


def test_parts_that_overlap_have_to_choose_the_same_addend() -> None:
    """Ranks 5 and 6 are the last addend; both hold element 2, and rank 4 may not receive it in place of rank 6."""
    parts = Table(0, (from_ranges([(0, 3)]), from_ranges([(2, 4)])))
    dst = Layout((4,), Mesh(p=2, t=2, ranks=(3, 4, 5, 6)), {"t": parts, "p": Partial("sum")})
    p = plan(Layout((4,), Mesh(), "n"), dst)
    transfers = list(p.transfers())
    assert {t.dst_rank for t in transfers} == {5, 6} and right(p, transfers)
    verify(p)
    moved = [
        t._replace(dst_rank=4) if t.dst_rank == 6 and t.global_slices[0].start == 2 else t
        for t in transfers
    ]
    assert not right(p, moved)
    assert raises_plan_error(lambda: verify(p, transfers=moved))


# What is said of each

W = ("w", Layout((4, 6), Mesh(a=2), "(a n) h"), Layout((4, 6), Mesh(b=2, ranks=(2, 3)), "n (b h)"))
TREE = plan({"v": W[1], "w": W[1]}, {"v": W[2], "w": W[2]})
CUT = plan({"w": halves(W[1], 1)}, {"w": halves(W[2], 3)})
REDUCE = of((4,), (Mesh(a=2), "n {sum: a}"), (FAR, "n"))
ONE_BOX = "give slices of that shape, with step 1"
ADD = "add a transfer that brings it"
OMIT = "leave out one of the transfers"


def said(p: Plan, change: Callable[[list[Transfer]], list[Any]]) -> str:
    with pytest.raises(PlanError) as caught:
        verify(p, transfers=change(list(p.transfers())))
    return str(caught.value)


def first(**fields: Any) -> Callable[[list[Transfer]], list[Transfer]]:
    return lambda ts: [ts[0]._replace(**fields), *ts[1:]]


def box(*sides: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in sides)


@pytest.mark.parametrize(
    ("p", "change", "message"),
    [
        (
            TREE,
            first(tensor="x"),
            "{t}: the plan has no tensor 'x'; give one of its 2 tensors, such as 'v', 'w'",
        ),
        (
            TREE,
            first(dst_slices=box((0, 2), (0, 2))),
            f"{{t}}: slices ((0, 2), (0, 2)) do not have shape (2, 3); {ONE_BOX}",
        ),
        (
            TREE,
            first(shape=(2, 4)),
            f"{{t}}: slices ((0, 2), (0, 3)) do not have shape (2, 4); {ONE_BOX}",
        ),
        (
            TREE,
            first(src_slices=box((-1, 1), (0, 3))),
            f"{{t}}: slices ((-1, 1), (0, 3)) do not have shape (2, 3); {ONE_BOX}",
        ),
        (
            TREE,
            first(global_slices=(slice(0, 2, 2), slice(0, 3))),
            f"{{t}}: slices ((0, 2), (0, 3)) do not have shape (2, 3); {ONE_BOX}",
        ),
        (
            TREE,
            first(shape=(0, 3), **dict.fromkeys(ALL, box((0, 0), (0, 3)))),
            "{t}: shape (0, 3) is not a box of (4, 6); give one positive length per dimension",
        ),
        (
            TREE,
            first(shape=(2,), **dict.fromkeys(ALL, box((0, 2)))),
            "{t}: shape (2,) is not a box of (4, 6); give one positive length per dimension",
        ),
        (
            TREE,
            first(nbytes=6),
            "{t} has nbytes=6, but (2, 3) elements of 4 B each; give nbytes=24",
        ),
        (TREE, first(src_tensor="w"), "{t}: the source has no local tensor 'w'; give one of 'v'"),
        (
            CUT,
            first(dst_tensor="w"),
            "{t}: the destination has no local tensor 'w'; give one of 'w[0]', 'w[1]'",
        ),
        (
            TREE,
            first(src_rank=2),
            f"{{t}}: rank 2 is not in the source {W[1]}; give a rank of its mesh",
        ),
        (
            TREE,
            first(dst_rank=0),
            f"{{t}}: rank 0 is not in the destination {W[2]}; give a rank of its mesh",
        ),
        (
            TREE,
            first(global_slices=box((1, 3), (0, 3))),
            "{t}, element (1, 0): rank 0 of the source holds [0:2] of dimension 0, but the transfer has 1:3 at "
            "local positions 0:2 of this rank; give slices that the rank holds",
        ),
        (
            TREE,
            first(dst_rank=3),
            "{t}, element (0, 0): rank 3 of the destination holds [3:6] of dimension 1, but the transfer has 0:3 at "
            "local positions 0:3 of this rank; give slices that the rank holds",
        ),
        (
            TREE,
            first(op="sum"),
            "{t} has op='sum' and addend=0; give op='copy' and addend=0, as its layouts need",
        ),
        (
            TREE,
            first(addend=1),
            "{t} has op='copy' and addend=1; give op='copy' and addend=0, as its layouts need",
        ),
        (
            REDUCE,
            lambda ts: ts[1:],
            f"the tensor: rank 3, addend 0 never receives element (0,); {ADD}",
        ),
        (
            REDUCE,
            lambda ts: [*ts, ts[-1]],
            f"the tensor: rank 5, addend 1 receives element (0,) twice; {OMIT}",
        ),
        (TREE, lambda ts: ts[:-1], f"tensor 'w': rank 3 never receives element (2, 3); {ADD}"),
        (
            TREE,
            lambda ts: [*ts, ts[-1]],
            f"tensor 'w': rank 3 receives element (2, 3) twice; {OMIT}",
        ),
        (
            CUT,
            lambda ts: [t for t in ts if t.src_rank == 0],
            f"tensor 'w': rank 3 never receives element (2, 3); {ADD}",
        ),
        (
            PLANS["pass through"],
            first(src_rank=1),
            "{t}: addend 1 of b arrives as addend 0 of b; send it to the rank of the same addend",
        ),
    ],
)
def test_messages(
    p: Plan, change: Callable[[list[Transfer]], list[Transfer]], message: str
) -> None:
    """`{t}` is the first transfer as it was changed."""
    assert said(p, change) == message.replace("{t}", str(change(list(p.transfers()))[0]))


def test_what_is_no_transfer(fails) -> None:
    good = next(iter(TREE.transfers()))
    fix = "is not a Transfer with texts as names and tuples of slices between integers; give shardmath.Transfer"
    for bad in (
        tuple(good),
        None,
        good._replace(src_slices=(slice(None, 2), slice(0, 3))),
        good._replace(dst_slices=(slice(0, None), slice(0, 3))),
        good._replace(global_slices=(slice(0, 2), (0, 3))),
        good._replace(src_slices=(slice(0, 2), slice(0.0, 3))),
        good._replace(src_slices=None),
        good._replace(dst_slices=5),
        good._replace(tensor=[]),
        good._replace(dst_tensor=None),
    ):
        fails(lambda bad=bad: verify(TREE, transfers=[bad]), PlanError, f"{bad!r} {fix}")
    none = "transfers=5 is not an iterable; give an iterable of shardmath.Transfer"
    fails(lambda: verify(TREE, transfers=5), PlanError, none)


def test_what_is_no_plan(fails) -> None:
    fails(
        lambda: verify("plan"),
        PlanError,
        "'plan' is not a Plan; pass what plan(src, dst) or schedule(plan) returns",
    )


def test_fills_and_divisors_are_proved(fails) -> None:
    p = of((4,), (Mesh(a=2), "n {avg: a}"), (FAR, "n"))
    other = dataclasses.replace(p.rules[""], divisor=3)
    message = (
        f"the tensor is reduced by {other}, but its layouts need {p.rules['']}; make the plan again"
    )
    fails(lambda: verify(dataclasses.replace(p, rules={"": other})), PlanError, message)
    verify(dataclasses.replace(p, rules={"": other}), transfers=p.transfers())
    whole = adjoint(of((4,), (Mesh(a=2), "(a n)"), (FAR, "n"), "int32"))
    assert repr(whole.rules[""].fill) == "0"
    for fill in (None, -0.0, 1):
        wrong = dataclasses.replace(
            whole, rules={"": dataclasses.replace(whole.rules[""], fill=fill)}
        )
        assert raises_plan_error(lambda wrong=wrong: verify(wrong))


def test_a_transposed_plan_is_what_its_plan_becomes(fails) -> None:
    """The layouts, the rules and the transfers that it says; and that it has a plan at all."""
    back = adjoint(of((4,), (Mesh(a=2), "(a n)"), (FAR, "n")))
    other = adjoint(of((4,), (Mesh(a=2), "n"), (FAR, "n")))
    wrong = dataclasses.replace(back, dst=other.dst)
    says = f"{wrong!r} is not between the transposed layouts of {back.forward!r}"
    fails(lambda: verify(wrong), PlanError, f"{says}; transpose the plan again")
    for change in (
        {"src": other.dst},
        {"flip": PLANS["adjoint of column to row"].flip},
        {"rules": {}},
    ):
        edited = dataclasses.replace(back, **change)
        assert raises_plan_error(lambda edited=edited: verify(edited))
    nothing = dataclasses.replace(back, forward=back)
    what = f"forward={back!r} is not a Plan; transpose one by adjoint(plan)"
    fails(lambda: verify(nothing), PlanError, what)


def test_replicas_have_to_choose_alike() -> None:
    """Addend 0 of one replica gets what addend 1 of the other does."""
    dst = Layout((4,), Mesh(x=2, y=2, ranks=range(3, 7)), "n {sum: x}")
    p = plan(Layout((4,), Mesh(ranks=[0]), "n"), dst)
    assert {t.dst_rank for t in p.transfers()} == {5, 6}
    message = said(p, lambda ts: [t._replace(dst_rank=4) if t.dst_rank == 6 else t for t in ts])
    where = "element (0,) goes to addend 1 of some replicas and to addend 0 of others"
    assert message == f"the tensor: {where}; send it to the same addend of all replicas"


def test_the_element_is_named_by_its_own_segment() -> None:
    """Local position 2 begins the second segment: global 4, not 2."""
    p = of((8,), (Mesh(ranks=[9]), "n"), (Mesh(a=2), "(2 a n)"))
    assert [t.global_slices[0].start for t in p.transfers(dst=0)] == [0, 4]
    message = said(p, lambda ts: [t for t in ts if t.global_slices[0].start != 4])
    assert message == f"the tensor: rank 0 never receives element (4,); {ADD}"
    message = said(p, lambda ts: [*ts, *(t for t in ts if t.global_slices[0].start == 6)])
    assert message == f"the tensor: rank 1 receives element (6,) twice; {OMIT}"


@pytest.mark.parametrize("name", PLANS)
def test_many_boxes_are_weighed(name: str) -> None:
    """Where boxes are many they are weighed first; what is wrong is named all the same."""
    p = PLANS[name]
    with mock.patch("shardmath.proofs.claims.MANY", 0):
        verify(p, transfers=p.transfers())
        for t in list(p.transfers())[:5]:
            others = list(p.transfers())
            others.remove(t)
            assert raises_plan_error(lambda others=others: verify(p, transfers=others))
            assert raises_plan_error(lambda t=t: verify(p, transfers=[*p.transfers(), t]))


# Digests, by which ranks tell what they are about to do apart


def _swap_digests(
    one: Plan | Transposed | Program, other: Plan | Transposed | Program
) -> list[Plan | Transposed | Program]:
    return [dataclasses.replace(one, digest=other.digest), dataclasses.replace(other, digest="")]


PAIR = Mesh(tp=2)
LINE = plan(Layout((4,), PAIR, "(tp n)"), Layout((4,), PAIR, "n"))
TURNED = plan(Layout((4,), PAIR, "(tp n)"), Layout((4,), PAIR, "(n tp)"))
ON_NODES = plan(LINE.src[""][0], LINE.dst[""][0], topology=Topology(ranks_per_node=1))
TREES = [plan({name: LINE.src[""][0]}, {name: LINE.dst[""][0]}) for name in "ab"]
PAIRS: dict[str, tuple[Plan | Transposed | Program, Plan | Transposed | Program]] = {
    "other layouts": (LINE, TURNED),
    "a topology": (LINE, ON_NODES),
    "names": (LINE, TREES[0]),
    "other names": (TREES[0], TREES[1]),
    "adjoints": (adjoint(LINE), adjoint(TURNED)),
    "an adjoint": (LINE, adjoint(LINE)),
    "programs": (schedule(LINE), schedule(TURNED)),
    "other rounds": (schedule(LINE), schedule(LINE, max_inflight_bytes=8, max_ops_per_group=2)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_digests_of_something_else(name: str) -> None:
    """Ranks with equal digests go on, so that these would move different elements together."""
    for p in _swap_digests(*PAIRS[name]):
        with pytest.raises(PlanError, match=r"has the digest '.*', but its content has '"):
            verify(p)
        with pytest.raises(PlanError, match="has the digest '"):
            verify(p, transfers=(p if not isinstance(p, Program) else p.plan).transfers())


def test_digests_of_plans_inside() -> None:
    """An adjoint or a program of a plan with another's digest has one that fits the plan's."""
    wrong = dataclasses.replace(LINE, digest=TURNED.digest)
    for p in (adjoint(wrong), schedule(wrong)):
        with pytest.raises(PlanError, match=r"plan of 1 tensor, .* has the digest"):
            verify(p)


def test_digests_of_other_spellings() -> None:
    """What ranks hold has one digest, however it is spelled."""
    p = plan(Layout((4,), PAIR, "(tp n)"), Layout((4,), PAIR, "n"))
    q = plan(Layout((4,), Mesh(a=2, b=1), "(a b n)"), Layout((4,), Mesh(a=1, b=2), "n"))
    verify(dataclasses.replace(p, digest=q.digest))
