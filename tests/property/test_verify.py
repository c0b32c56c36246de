"""Verify: a thousand wrong plans are refused, and what is equally right is not.

Right and wrong are told apart by `right`, which knows nothing of plans but their layouts: it looks at every element of
every transfer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given

from shardmath import Layout, Mesh, Partial, Plan, PlanError, Table, Transfer, adjoint, balance, plan, testing, verify
from shardmath.layout import window
from shardmath.runs import from_ranges, identity
from shardmath.store import local_name

# What is right, element by element


def expected_op(p: Plan, name: str, addend: int) -> str:
    """Copies stay copies; of several addends the first is one where nothing is there before it."""
    src, dst = p.src[name][0], p.dst[name][0]
    folded = folded_axes(src, dst)
    if math.prod(src.mesh.axis_size(a) for a in folded) == 1 or (addend == 0 and p.fill(name) is None):
        return "copy"
    return {"avg": "sum"}.get(str(src.op), str(src.op))


def along(mesh: Mesh, axis: str) -> list[set[int]]:
    return [{r for r in mesh.ranks if mesh.coords(r)[axis] == i} for i in range(mesh.axis_size(axis))]


def passing(src: Layout, dst: Layout) -> dict[str, str]:
    """Partial axes with the same operation and ranks on both sides."""
    names = [(a, b) for a, _ in src.partial for b, _ in dst.partial if src.op == dst.op and src.mesh.axis_size(a) > 1]
    return {a: b for a, b in names if along(src.mesh, a) == along(dst.mesh, b)}


def folded_axes(src: Layout, dst: Layout) -> list[str]:
    return [a for a, _ in src.partial if a not in passing(src, dst) and src.mesh.axis_size(a) > 1]


def place(mesh: Mesh, rank: int, axes: list[str]) -> int:
    at = 0
    for name in axes:
        at = at * mesh.axis_size(name) + mesh.coords(rank)[name]
    return at


def indices(slices: tuple[slice, ...], shape: tuple[int, ...]) -> list[range] | None:
    """The positions of a box inside a shape, None if it is not one."""
    good = len(slices) == len(shape) and all(
        s.step in (None, 1) and 0 <= s.start < s.stop <= n for s, n in zip(slices, shape, strict=True)
    )
    return [range(s.start, s.stop) for s in slices] if good else None


def moves(p: Plan, t: Transfer) -> Iterator[tuple[Any, ...]] | None:
    """Which (window, receiver, addend, chosen, element) the transfer serves; None where it is wrong by itself."""
    if t.tensor not in p.src:
        return None
    ends = []
    for side, local, rank, slices in (
        (p.src, t.src_tensor, t.src_rank, t.src_slices),
        (p.dst, t.dst_tensor, t.dst_rank, t.dst_slices),
    ):
        windows = side[t.tensor]
        names = [local_name(t.tensor, i, len(windows)) for i in range(len(windows))]
        if local not in names or rank not in windows[names.index(local)].mesh:
            return None
        layout = windows[names.index(local)]
        at = indices(slices, layout.local_shape(rank))
        if at is None:
            return None
        held = layout.indices(rank)
        ends.append((names.index(local), layout, [held[d][list(x)].tolist() for d, x in enumerate(at)]))
    (_, src, here), (j, dst, there) = ends
    whole = indices(t.global_slices, src.shape)
    shape = tuple(map(len, here))
    if whole is None or not here == there == [list(x) for x in whole] or shape != t.shape:
        return None
    if t.nbytes != math.prod(shape) * src.itemsize:
        return None
    if any(src.mesh.coords(t.src_rank)[a] != dst.mesh.coords(t.dst_rank)[b] for a, b in passing(src, dst).items()):
        return None
    addend = place(src.mesh, t.src_rank, folded_axes(src, dst))
    if (t.addend, t.op) != (addend, expected_op(p, t.tensor, addend)):
        return None
    return ((t.tensor, j, t.dst_rank, addend, e) for e in itertools.product(*here))


def chosen_axes(p: Plan, name: str, j: int) -> list[str]:
    src, dst = p.src[name][0], p.dst[name][j]
    op = src.op if folded_axes(src, dst) else dst.op
    left = [a for a, _ in dst.partial if a not in passing(src, dst).values() and dst.mesh.axis_size(a) > 1]
    return left if op in ("sum", "product") else []


def needed(p: Plan) -> set[tuple[Any, ...]]:
    """Every (tensor, window, group of receivers, addend, element) that is to arrive once."""
    out = set()
    for name, windows in p.dst.items():
        for j, dst in enumerate(windows):
            count = math.prod(p.src[name][0].mesh.axis_size(a) for a in folded_axes(p.src[name][0], dst))
            for rank in dst.mesh.ranks:
                own = itertools.product(*(i[i >= 0].tolist() for i in dst.indices(rank)))
                group = group_of(p, name, j, rank)
                out |= {(name, j, group, a, e) for e in own for a in range(count)}
    return out


def group_of(p: Plan, name: str, j: int, rank: int) -> tuple[int, ...]:
    """Coordinates on all axes but those along which any one may receive."""
    left_out = chosen_axes(p, name, j)
    return tuple(at for axis, at in p.dst[name][j].mesh.coords(rank).items() if axis not in left_out)


def right(p: Plan, transfers: list[Transfer]) -> bool:
    """Whether every group of receivers gets every addend of every element once, and replicas alike."""
    times: Counter[tuple[Any, ...]] = Counter()
    receivers: dict[tuple[Any, ...], set[int]] = {}
    for t in transfers:
        served = moves(p, t)
        if served is None:
            return False
        for name, j, rank, addend, e in served:
            times[name, j, group_of(p, name, j, rank), addend, e] += 1
            dst = p.dst[name][j]
            through = place(dst.mesh, rank, sorted(passing(p.src[name][0], dst).values()))
            receivers.setdefault((name, j, through, addend, e), set()).add(
                place(dst.mesh, rank, chosen_axes(p, name, j))
            )
    return times.keys() == needed(p) and set(times.values()) <= {1} and all(len(x) == 1 for x in receivers.values())


def executed(p: Plan) -> tuple[list[Transfer], dict[Any, list[Transfer]], dict[Any, list[Transfer]]]:
    """All transfers, and by pair as senders and as receivers expand them."""
    sent = [t for rank in p.src_ranks for t in p.transfers(src=rank)]
    received = [t for rank in p.dst_ranks for t in p.transfers(dst=rank)]
    pairs: tuple[dict[Any, list[Transfer]], ...] = ({}, {})
    for listed, by_pair in zip((sent, received), pairs, strict=True):
        for t in listed:
            by_pair.setdefault((t.src_rank, t.dst_rank), []).append(t)
    return sent, *pairs


# Plans of all kinds

NEAR, FAR = Mesh(a=2, b=2), Mesh(x=3, ranks=range(3, 6))
LINE = Mesh(a=3)
OVER = Table(0, (from_ranges([(0, 4)]), from_ranges([(2, 6)]), identity(6)))


def of(shape: tuple[int, ...], src: tuple[Mesh, Any], dst: tuple[Mesh, Any], dtype: str = "float32") -> Plan:
    return plan(*(Layout(shape, mesh, spec, dtype=dtype) for mesh, spec in (src, dst)))


def halves(layout: Layout, at: int) -> tuple[Layout, ...]:
    rest = tuple((0, n) for n in layout.shape[1:])
    return tuple(window(layout, (side, *rest)) for side in ((0, at), (at, layout.shape[0])))


def make_plans() -> dict[str, Plan]:
    column, row = Layout((6, 4), NEAR, "(a b n) h"), Layout((6, 4), FAR, "n (x h)")
    plans = {
        "column to row": plan(column, row),
        "strided": of((9,), (NEAR, "(2 a n | b n)"), (FAR, "(x n)")),
        "blocks": of((7, 3), (NEAR, "(n a 2) (b h)"), (LINE, "(a~ n) h")),
        "replicas": of((5, 3), (LINE, "n h"), (Mesh(x=4, ranks=range(2, 6)), "n h")),
        "three dimensions": of((2, 3, 4), (NEAR, "(a n) h (b w)"), (FAR, "n (x h) w"), "int8"),
        "scalar": of((), (LINE, ""), (FAR, "")),
        "padded": of((5,), (NEAR, "(a n)=8"), (FAR, "(x n)=<3:5 -2 0:3>")),
        "gather": of((6,), (NEAR, "(a b n)"), (NEAR, "n")),
        "all-reduce": of((5,), (NEAR, "n {sum: a b}"), (NEAR, "n")),
        "reduce-scatter": of((6,), (LINE, "n {max: a}"), (LINE, "(a n)")),
        "average": of((6, 2), (NEAR, "(a n) h {avg: b}"), (FAR, "n h")),
        "pass through": of((6,), (NEAR, "(a n) {sum: b}"), (NEAR, "n {sum: b}")),
        "to sum": of((6, 2), (Mesh(a=2), "n h"), (FAR, "n h {sum: x}")),
        "to sum of replicas": of((6,), (Mesh(a=2), "(a n)"), (Mesh(x=2, y=2, ranks=range(3, 7)), "n {sum: x}")),
        "sum to sum": of((4,), (Mesh(a=2), "n {sum: a}"), (FAR, "n {sum: x}")),
        "product": of((4,), (LINE, "n {product: a}"), (Mesh(x=2, ranks=(3, 4)), "n {product: x}")),
        "overlapping source": of((6,), (LINE, (OVER,)), (FAR, "n")),
        "overlapping destination": of((6,), (LINE, "(a n)"), (FAR, (OVER,))),
        "windows": plan({"w": halves(column, 4)}, {"w": halves(row, 1)}),
        "tree": plan({"u": column, "v": column, "w": row}, {"u": row, "v": row, "w": column}),
    }
    for name in ("gather", "column to row", "windows", "to sum", "average"):
        plans[f"adjoint of {name}"] = adjoint(plans[name])
    return plans


with mock.patch.object(balance, "SMALL", 0):
    PLANS = make_plans()
NAMES = list(PLANS)
FORWARD = [name for name in NAMES if PLANS[name].forward is None]


@pytest.mark.parametrize("name", NAMES)
def test_right_plans_are_right(name: str) -> None:
    p = PLANS[name]
    verify(p)
    verify(p, transfers=p.transfers())
    verify(p, transfers=reversed(list(p.transfers())))
    if p.forward is None:
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

    def mutate(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
        t = transfers[i]
        if not t.shape:
            return None
        d, by = rng.randrange(len(t.shape)), rng.choice((-2, -1, 1, 2))
        moved = {
            f: tuple(slice(s.start + by, s.stop + by) if k == d else s for k, s in enumerate(getattr(t, f)))
            for f in fields
        }
        return put(transfers, i, t._replace(**moved))

    return mutate


def resized(*fields: str) -> Mutation:
    """The box one longer or shorter in one dimension, in these fields."""

    def mutate(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
        t = transfers[i]
        if not t.shape:
            return None
        d, by = rng.randrange(len(t.shape)), rng.choice((-1, 1))
        new = {
            f: tuple(slice(s.start, s.stop + by) if k == d else s for k, s in enumerate(getattr(t, f)))
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
    def mutate(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
        other = [x for x in choices(p, transfers[i]) if x != getattr(transfers[i], field)]
        return put(transfers, i, transfers[i]._replace(**{field: rng.choice(other)})) if other else None

    return mutate


def wrongly_split(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
    """In two along a dimension, with an element twice or left out."""
    t = transfers[i]
    long = [d for d, n in enumerate(t.shape) if n > 2]
    if not long:
        return None
    d = rng.choice(long)
    at = rng.randrange(1, t.shape[d] - 1)
    spans = ((0, at), (at + rng.choice((-1, 1)), t.shape[d]))
    return put(transfers, i, *(_part(p, t, d, lo, hi) for lo, hi in spans if lo < hi))


def rightly_split(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
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
        f: tuple(slice(s.start + lo, s.start + hi) if k == d else s for k, s in enumerate(getattr(t, f)))
        for f in fields
    }
    shape = tuple(hi - lo if k == d else n for k, n in enumerate(t.shape))
    return t._replace(**cut, shape=shape, nbytes=math.prod(shape) * p.src[t.tensor][0].itemsize)


def stepped(rng: random.Random, p: Plan, transfers: list[Transfer], i: int) -> list[Transfer] | None:
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
    "source tensor": renamed("src_tensor", lambda p, t: [t.dst_tensor, "w[0]", "w[1]", "nobody", *p.src]),
    "destination tensor": renamed("dst_tensor", lambda p, t: [t.src_tensor, "w[0]", "w[1]", "nobody", *p.src]),
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


def test_a_thousand_mutated_transfers() -> None:
    rng = random.Random(0)
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    while wrong.total() < 1000:
        p, kind = PLANS[rng.choice(FORWARD)], rng.choice(list(MUTATIONS))
        transfers = list(p.transfers())
        mutated = MUTATIONS[kind](rng, p, transfers, rng.randrange(len(transfers)))
        if mutated is None:
            continue
        good = right(p, mutated)
        refused = raises_plan_error(lambda p=p, mutated=mutated: verify(p, transfers=mutated))
        assert refused == (not good), (kind, [t for t in mutated if t not in transfers])
        (kept if good else wrong)[kind] += 1
    assert len(wrong) == len(MUTATIONS) - 1
    assert set(kept) <= {"split rightly", "source rank", "destination rank"}
    assert kept["split rightly"] > 20 and kept["source rank"] > 0


def test_adjoints_refuse_all_that_their_plans_refuse() -> None:
    """A mutation of an adjoint's transfers that is not one of the ends alone."""
    rng = random.Random(1)
    kinds = [k for k in MUTATIONS if k not in ("split rightly", "source rank", "destination rank", "tensor")]
    adjoints = [p for p in PLANS.values() if p.forward is not None]
    counted = 0
    while counted < 300:
        p, kind = rng.choice(adjoints), rng.choice(kinds)
        transfers = list(p.transfers())
        mutated = MUTATIONS[kind](rng, p, transfers, rng.randrange(len(transfers)))
        if mutated is not None:
            assert raises_plan_error(lambda p=p, mutated=mutated: verify(p, transfers=mutated)), (kind, p)
            counted += 1


# Mutations of the tables that transfers are expanded from

Rebuild = Callable[[np.ndarray], Plan]


def arrays_of(
    value: Any, rebuild: Callable[[Any], Any]
) -> Iterator[tuple[str, np.ndarray, Callable[[np.ndarray], Any]]]:
    """Every array inside a dataclass, with how to put another in its place."""
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)

        def put_back(new: Any, value: Any = value, name: str = f.name) -> Any:
            return rebuild(dataclasses.replace(value, **{name: new}))

        if isinstance(inner, np.ndarray):
            yield f"{type(value).__name__}.{f.name}", inner, put_back
        elif f.name in ("lines", "local", "requests", "template"):
            yield from arrays_of(inner, put_back)
        elif f.name in ("batches", "overlays"):
            for i, item in enumerate(inner):
                yield from arrays_of(
                    item, lambda new, i=i, inner=inner, put_back=put_back: put_back((*inner[:i], new, *inner[i + 1 :]))
                )


def changed(rng: random.Random, array: np.ndarray) -> np.ndarray | None:
    """One number one more or less, or in another's place, or two neighbours swapped, or the last one gone."""
    new = array.copy()
    if not new.size:
        return None
    at = tuple(rng.randrange(n) for n in new.shape)
    kind = rng.choice(("nudge", "nudge", "copy", "zero", "jump", "short"))
    if kind == "short":
        return new[:-1]
    new[at] = {
        "nudge": new[at] + rng.choice((-1, 1, 2, 4)),
        "copy": new.ravel()[rng.randrange(new.size)],
        "zero": 0,
        "jump": int(new.max()) + 3,
    }[kind]
    return new if (new != array).any() else None


def outcome(p: Plan) -> Any:
    """What would be executed, or that it cannot be."""
    try:
        return executed(p)
    except Exception:
        return None


def test_a_thousand_mutated_tables() -> None:
    rng = random.Random(2)
    before = {name: outcome(PLANS[name]) for name in FORWARD}
    wrong: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    while wrong.total() < 1000:
        name = rng.choice(FORWARD)
        table, array, rebuild = rng.choice(list(arrays_of(PLANS[name], lambda p: p)))
        new = changed(rng, array)
        if new is None:
            continue
        q = rebuild(new)
        done = outcome(q)
        if done == before[name]:
            continue
        good = done is not None and done[1] == done[2] and right(q, done[0])
        try:
            verify(q)
            refused = None
        except Exception as error:
            refused = type(error)
        assert refused is (None if good else PlanError), (name, table, array.tolist(), new.tolist(), done)
        (kept if good else wrong)[table] += 1
    assert set(kept) <= {"Lines.cuts", "Lines.holders", "Lines.start", "Requests.rank"} and kept.total() > 5
    for table in (
        "Overlay.start",
        "Overlay.size",
        "Overlay.dst",
        "Overlay.src",
        "Overlay.first",
        "Lines.cuts",
        "Lines.first",
    ):
        assert wrong[table] > 5, wrong
    for table in (
        "Lines.start",
        "Lines.holders",
        "Lines.nbytes",
        "Requests.unit",
        "Requests.rank",
        "Requests.lo",
        "Template.unit_pairs",
    ):
        assert wrong[table] > 5, wrong


# Overlapping destination parts: replicas of one addend across parts


def test_parts_that_overlap_have_to_choose_the_same_addend() -> None:
    """Ranks 3 and 4 are the first addend; both hold element 2, and rank 5 may not receive it in place of rank 4."""
    parts = Table(0, (from_ranges([(0, 3)]), from_ranges([(2, 4)])))
    dst = Layout((4,), Mesh(p=2, t=2, ranks=(3, 4, 5, 6)), {"t": parts, "p": Partial("sum")})
    p = plan(Layout((4,), Mesh(), "n"), dst)
    transfers = list(p.transfers())
    assert {t.dst_rank for t in transfers} == {3, 4} and right(p, transfers)
    verify(p)
    moved = [t._replace(dst_rank=6) if t.dst_rank == 4 and t.global_slices[0].start == 2 else t for t in transfers]
    assert not right(p, moved)
    assert raises_plan_error(lambda: verify(p, transfers=moved))


# What is said of each

W = ("w", Layout((4, 6), Mesh(a=2), "(a n) h"), Layout((4, 6), Mesh(b=2, ranks=(2, 3)), "n (b h)"))
TREE = plan({"v": W[1], "w": W[1]}, {"v": W[2], "w": W[2]})
CUT = plan({"w": halves(W[1], 1)}, {"w": halves(W[2], 3)})
REDUCE = of((4,), (Mesh(a=2), "n {sum: a}"), (FAR, "n"))
ONE_BOX = "all slices of a transfer list the same box"
ONCE = "it is to be received exactly once"


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
        (TREE, first(tensor="x"), "{t}: the plan has no tensor 'x'; its tensors are 'v', 'w'"),
        (
            TREE,
            first(dst_slices=box((0, 2), (0, 2))),
            f"{{t}}: slices ((0, 2), (0, 2)) are not of shape (2, 3); {ONE_BOX}",
        ),
        (TREE, first(shape=(2, 4)), f"{{t}}: slices ((0, 2), (0, 3)) are not of shape (2, 4); {ONE_BOX}"),
        (
            TREE,
            first(src_slices=box((-1, 1), (0, 3))),
            f"{{t}}: slices ((-1, 1), (0, 3)) are not of shape (2, 3); {ONE_BOX}",
        ),
        (
            TREE,
            first(global_slices=(slice(0, 2, 2), slice(0, 3))),
            f"{{t}}: slices ((0, 2), (0, 3)) are not of shape (2, 3); {ONE_BOX}",
        ),
        (
            TREE,
            first(shape=(0, 3), **dict.fromkeys(ALL, box((0, 0), (0, 3)))),
            "{t}: shape (0, 3) is not a box of (4, 6); give a positive length a dimension",
        ),
        (
            TREE,
            first(shape=(2,), **dict.fromkeys(ALL, box((0, 2)))),
            "{t}: shape (2,) is not a box of (4, 6); give a positive length a dimension",
        ),
        (TREE, first(nbytes=6), "{t}: 6 B for (2, 3) of 4 B each; it is 24 B"),
        (TREE, first(src_tensor="w"), "{t}: no source tensor 'w'; they are 'v'"),
        (CUT, first(dst_tensor="w"), "{t}: no destination tensor 'w'; they are 'w[0]', 'w[1]'"),
        (TREE, first(src_rank=2), f"{{t}}: rank 2 is not in the source {W[1]}"),
        (TREE, first(dst_rank=0), f"{{t}}: rank 0 is not in the destination {W[2]}"),
        (
            TREE,
            first(global_slices=box((1, 3), (0, 3))),
            "{t}: element (1, 0): rank 0 of the source holds [0:2] of dimension 0, not 1:3 at 0:2",
        ),
        (
            TREE,
            first(dst_rank=3),
            "{t}: element (0, 0): rank 3 of the destination holds [3:6] of dimension 1, not 0:3 at 0:3",
        ),
        (TREE, first(op="sum"), "{t}: enters by 'sum' as addend 0; rank 0 enters by 'copy' as addend 0"),
        (TREE, first(addend=1), "{t}: enters by 'copy' as addend 1; rank 0 enters by 'copy' as addend 0"),
        (REDUCE, lambda ts: ts[1:], f"tensor '': rank 3, addend 0 never receives element (0,); {ONCE}"),
        (REDUCE, lambda ts: [*ts, ts[-1]], f"tensor '': rank 5, addend 1 receives element (0,) twice; {ONCE}"),
        (TREE, lambda ts: ts[:-1], f"tensor 'w': rank 3 never receives element (2, 3); {ONCE}"),
        (TREE, lambda ts: [*ts, ts[-1]], f"tensor 'w': rank 3 receives element (2, 3) twice; {ONCE}"),
        (
            CUT,
            lambda ts: [t for t in ts if t.src_rank == 0],
            f"tensor 'w': rank 3 never receives element (2, 3); {ONCE}",
        ),
        (
            PLANS["pass through"],
            first(src_rank=1),
            "{t}: addend 1 of b arrives as addend 0 of b; addends pass through along these axes",
        ),
    ],
)
def test_messages(p: Plan, change: Callable[[list[Transfer]], list[Transfer]], message: str) -> None:
    """`{t}` is the first transfer as it was changed."""
    assert said(p, change) == message.replace("{t}", str(change(list(p.transfers()))[0]))


def test_what_is_no_transfer(fails) -> None:
    good = next(iter(TREE.transfers()))
    fix = "is not a Transfer whose slices have integer starts and stops; give shardmath.Transfer"
    for bad in (
        tuple(good),
        None,
        good._replace(src_slices=(slice(None, 2), slice(0, 3))),
        good._replace(dst_slices=(slice(0, None), slice(0, 3))),
        good._replace(global_slices=(slice(0, 2), (0, 3))),
        good._replace(src_slices=(slice(0, 2), slice(0.0, 3))),
    ):
        fails(lambda bad=bad: verify(TREE, transfers=[bad]), PlanError, f"{bad!r} {fix}")


def test_what_is_no_plan(fails) -> None:
    fails(lambda: verify("plan"), PlanError, "'plan' is not a Plan; pass what plan(src, dst) returns")


def test_fills_and_divisors_are_proved(fails) -> None:
    p = of((4,), (Mesh(a=2), "n {avg: a}"), (FAR, "n"))
    other = dataclasses.replace(p.rules[""], divisor=3)
    message = f"tensor '' is reduced by {other}; its layouts ask for {p.rules['']}"
    fails(lambda: verify(dataclasses.replace(p, rules={"": other})), PlanError, message)
    verify(dataclasses.replace(p, rules={"": other}), transfers=p.transfers())
    whole = adjoint(of((4,), (Mesh(a=2), "(a n)"), (FAR, "n"), "int32"))
    assert repr(whole.rules[""].fill) == "0"
    for fill in (None, -0.0, 1):
        wrong = dataclasses.replace(whole, rules={"": dataclasses.replace(whole.rules[""], fill=fill)})
        assert raises_plan_error(lambda wrong=wrong: verify(wrong))


def test_ends_that_disagree_are_named() -> None:
    p = of((4,), (LINE, "n"), (FAR, "n"))
    start = p.lines.start.copy()
    start[1] = 0
    q = dataclasses.replace(p, lines=dataclasses.replace(p.lines, start=start))
    with pytest.raises(PlanError) as caught:
        verify(q)
    _, sent, received = executed(q)
    pair = min(pair for pair in sent.keys() | received.keys() if sent.get(pair) != received.get(pair))
    both = itertools.zip_longest(sent.get(pair, []), received.get(pair, []))
    here, there = next((a, b) for a, b in both if a != b)
    ranks = f"ranks {pair[0]} and {pair[1]}"
    assert str(caught.value) == f"{ranks} disagree on what goes between them: {here} or {there}"


def test_tables_that_cannot_be_expanded(fails) -> None:
    nbytes = np.zeros_like(PLANS["strided"].lines.nbytes)
    q = dataclasses.replace(PLANS["strided"], lines=dataclasses.replace(PLANS["strided"].lines, nbytes=nbytes))
    with pytest.raises(
        PlanError, match=r"the plan's tables cannot be expanded: ZeroDivisionError.*; make the plan anew"
    ):
        verify(q)


def test_replicas_have_to_choose_alike() -> None:
    """Addend 0 of one replica gets what addend 1 of the other does."""
    dst = Layout((4,), Mesh(x=2, y=2, ranks=range(3, 7)), "n {sum: x}")
    p = plan(Layout((4,), Mesh(ranks=[0]), "n"), dst)
    assert {t.dst_rank for t in p.transfers()} == {5, 6}
    message = said(p, lambda ts: [t._replace(dst_rank=4) if t.dst_rank == 6 else t for t in ts])
    where = "element (0,) goes to addend 1 of some replicas and to addend 0 of others"
    assert message == f"tensor '': {where}; replicas have to stay equal"


@pytest.mark.parametrize("name", [*FORWARD, "nothing", "no elements"])
def test_all_tables_are_of_64_bits(name: str) -> None:
    others = {"nothing": plan({}, {}), "no elements": of((0, 3), (LINE, "(a n) h"), (FAR, "n h {sum: x}"))}
    for table, array, _ in arrays_of(PLANS.get(name) or others[name], lambda p: p):
        assert array.dtype == np.int64, table


def test_the_element_is_named_by_its_own_segment() -> None:
    """Local position 2 begins the second segment: global 4, not 2."""
    p = of((8,), (Mesh(ranks=[9]), "n"), (Mesh(a=2), "(2 a n)"))
    assert [t.global_slices[0].start for t in p.transfers(dst=0)] == [0, 4]
    message = said(p, lambda ts: [t for t in ts if t.global_slices[0].start != 4])
    assert message == f"tensor '': rank 0 never receives element (4,); {ONCE}"
    message = said(p, lambda ts: [*ts, *(t for t in ts if t.global_slices[0].start == 6)])
    assert message == f"tensor '': rank 1 receives element (6,) twice; {ONCE}"
