"""Plans of all kinds, what they execute, and whether it is right.

Right and wrong are told apart by `right`, which knows nothing of plans but their layouts: it looks at every element of
every transfer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from unittest import mock

from shardmath import Layout, Mesh, Partial, Plan, Table, Transfer, adjoint, plan, without
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.edits import window
from shardmath.layouts.store import local_name
from shardmath.plans.flows.topology import Topology

# What is right, element by element


def expected_op(p: Plan, name: str, addend: int) -> str:
    """Copies stay copies; of several addends the first is one where nothing is there before it."""
    src, dst = p.src[name][0], p.dst[name][0]
    folded = folded_axes(src, dst)
    if math.prod(src.mesh.axis_size(a) for a in folded) == 1 or (
        addend == 0 and p.fill(name) is None
    ):
        return "copy"
    return {"avg": "sum"}.get(str(src.op), str(src.op))


@functools.cache
def along(mesh: Mesh, axis: str) -> list[set[int]]:
    return [
        {r for r in mesh.ranks if mesh.coords(r)[axis] == i} for i in range(mesh.axis_size(axis))
    ]


@functools.cache
def passing(src: Layout, dst: Layout) -> dict[str, str]:
    """Partial axes with the same operation and ranks on both sides."""
    names = [
        (a, b)
        for a, _ in src.partial
        for b, _ in dst.partial
        if src.op == dst.op and src.mesh.axis_size(a) > 1
    ]
    return {a: b for a, b in names if along(src.mesh, a) == along(dst.mesh, b)}


@functools.cache
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
        s.step in (None, 1) and 0 <= s.start < s.stop <= n
        for s, n in zip(slices, shape, strict=True)
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
        numbers = windows.numbers or range(len(windows))
        count = len(windows) + (windows.numbers is not None)
        names = [local_name(t.tensor, i, count) for i in numbers]
        if local not in names or rank not in windows[names.index(local)].mesh:
            return None
        layout = windows[names.index(local)]
        at = indices(slices, layout.local_shape(rank))
        if at is None:
            return None
        held = layout.indices(rank)
        ends.append(
            (names.index(local), layout, [held[d][list(x)].tolist() for d, x in enumerate(at)])
        )
    (_, src, here), (j, dst, there) = ends
    whole = indices(t.global_slices, src.shape)
    shape = tuple(map(len, here))
    if whole is None or not here == there == [list(x) for x in whole] or shape != t.shape:
        return None
    if t.nbytes != math.prod(shape) * src.itemsize:
        return None
    if any(
        src.mesh.coords(t.src_rank)[a] != dst.mesh.coords(t.dst_rank)[b]
        for a, b in passing(src, dst).items()
    ):
        return None
    addend = place(src.mesh, t.src_rank, folded_axes(src, dst))
    if (t.addend, t.op) != (addend, expected_op(p, t.tensor, addend)):
        return None
    return ((t.tensor, j, t.dst_rank, addend, e) for e in itertools.product(*here))


def chosen_axes(p: Plan, name: str, j: int) -> list[str]:
    src, dst = p.src[name][0], p.dst[name][j]
    op = src.op if folded_axes(src, dst) else dst.op
    left = [
        a
        for a, _ in dst.partial
        if a not in passing(src, dst).values() and dst.mesh.axis_size(a) > 1
    ]
    return left if op in ("sum", "product") else []


def needed(p: Plan) -> set[tuple[Any, ...]]:
    """Every (tensor, window, group of receivers, addend, element) that is to arrive once."""
    out = set()
    for name, windows in p.dst.items():
        for j, dst in enumerate(windows):
            count = math.prod(
                p.src[name][0].mesh.axis_size(a) for a in folded_axes(p.src[name][0], dst)
            )
            for rank in dst.mesh.ranks:
                own = itertools.product(*(i[i >= 0].tolist() for i in dst.indices(rank)))
                group = group_of(p, name, j, rank)
                out |= {(name, j, group, a, e) for e in own for a in range(count)}
    return out


def group_of(p: Plan, name: str, j: int, rank: int) -> tuple[int, ...]:
    """Coordinates on all axes but those along which any one may receive."""
    left_out = chosen_axes(p, name, j)
    return tuple(
        at for axis, at in p.dst[name][j].mesh.coords(rank).items() if axis not in left_out
    )


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
    return (
        times.keys() == needed(p)
        and set(times.values()) <= {1}
        and all(len(x) == 1 for x in receivers.values())
    )


Pairs: TypeAlias = dict[tuple[int, int], list[Transfer]]


def by_pair(transfers: Iterable[Transfer]) -> Pairs:
    """In the order given, by sender and receiver."""
    out: Pairs = {}
    for t in transfers:
        out.setdefault((t.src_rank, t.dst_rank), []).append(t)
    return out


def executed(p: Plan) -> tuple[list[Transfer], Pairs, Pairs]:
    """All transfers, and by pair as senders and as receivers expand them."""
    sent = [t for rank in p.src_ranks for t in p.transfers(src=rank)]
    return sent, by_pair(sent), by_pair(t for rank in p.dst_ranks for t in p.transfers(dst=rank))


# Plans of all kinds

NEAR, FAR = Mesh(a=2, b=2), Mesh(x=3, ranks=range(3, 6))
LINE, AWAY = Mesh(a=3), Mesh(x=3, ranks=range(4, 7))
MIXED = Mesh(x=2, y=2, ranks=(6, 1, 3, 0))
OVER = Table(0, (from_ranges([(0, 4)]), from_ranges([(2, 6)]), identity(6)))
LAPS = Table(0, (from_ranges([(3, 5), (0, 2)]), from_ranges([(1, 4), 1, (5, 6)]), identity(6)))


def of(
    shape: tuple[int, ...], src: tuple[Mesh, Any], dst: tuple[Mesh, Any], dtype: str = "float32"
) -> Plan:
    return plan(*(Layout(shape, mesh, spec, dtype=dtype) for mesh, spec in (src, dst)))


def near(
    per_node: int, shape: tuple[int, ...], src: tuple[Mesh, Any], dst: tuple[Mesh, Any]
) -> Plan:
    """The same with nodes of so many ranks."""
    layouts = (Layout(shape, mesh, spec, dtype="int16") for mesh, spec in (src, dst))
    return plan(*layouts, topology=Topology(ranks_per_node=per_node))


def halves(layout: Layout, at: int) -> tuple[Layout, ...]:
    rest = tuple((0, n) for n in layout.shape[1:])
    return tuple(window(layout, (side, *rest)) for side in ((0, at), (at, layout.shape[0])))


def copies() -> dict[str, Plan]:
    """Without Partial."""
    return {
        "column to row": of((6, 4), (NEAR, "(a b n) h"), (FAR, "n (x h)")),
        "strided": of((9,), (NEAR, "(2 a n | b n)"), (FAR, "(x n)")),
        "blocks": of((7, 3), (NEAR, "(n a 2) (b h)"), (LINE, "(a~ n) h")),
        "replicas": of((5, 3), (LINE, "n h"), (Mesh(x=4, ranks=range(2, 6)), "n h")),
        "three dimensions": of((2, 3, 4), (NEAR, "(a n) h (b w)"), (FAR, "n (x h) w"), "int8"),
        "scalar": of((), (LINE, ""), (FAR, "")),
        "padded": of((5,), (NEAR, "(a n)=8"), (FAR, "(x n)=<3:5 -2 0:3>")),
        "gather": of((6,), (NEAR, "(a b n)"), (NEAR, "n")),
        "permuted": of((6, 2), (MIXED, "(y n) h"), (Mesh(a=4, ranks=(3, 6, 0, 2)), "(a n) h")),
        "overlapping source": of((6,), (LINE, (OVER,)), (FAR, "n")),
        "overlapping destination": of((6,), (LINE, "(a n)"), (FAR, (OVER,))),
        "both overlapping": of(
            (6, 2), (LINE, (LAPS,)), (MIXED, {("x", "y"): Table(0, (*LAPS.parts, identity(6)))})
        ),
        "no elements": of((0, 3), (LINE, "(a n) h"), (FAR, "n h")),
    }


def reductions() -> dict[str, Plan]:
    """With Partial: folded, chosen, passing through."""
    two = Mesh(p=2, t=2, ranks=range(3, 7))
    parts = Table(0, (from_ranges([(0, 4)]), from_ranges([(2, 6)])))
    return {
        "all-reduce": of((5,), (NEAR, "n {sum: a b}"), (NEAR, "n")),
        "reduce-scatter": of((6,), (LINE, "n {max: a}"), (LINE, "(a n)")),
        "average": of((6, 2), (NEAR, "(a n) h {avg: b}"), (FAR, "n h")),
        "pass through": of((6,), (NEAR, "(a n) {sum: b}"), (NEAR, "n {sum: b}")),
        "fold and pass through": of((6,), (NEAR, "n {sum: a b}"), (NEAR, "(a n) {sum: b}")),
        "to sum": of((6, 2), (Mesh(a=2), "n h"), (FAR, "n h {sum: x}")),
        "to sum of replicas": of((6,), (Mesh(a=2), "(a n)"), (two, "n {sum: p}")),
        "sum to sum": of((4,), (Mesh(a=2), "n {sum: a}"), (FAR, "n {sum: x}")),
        "sum where it is": of((6,), (LINE, "(a n)"), (NEAR, "n {sum: a}")),
        "product": of((4,), (LINE, "n {product: a}"), (Mesh(x=2, ranks=(3, 4)), "n {product: x}")),
        "scalar sum": of((), (LINE, "{sum: a}"), (FAR, "{sum: x}")),
        "no elements summed": of((0, 3), (LINE, "(a n) h"), (FAR, "n h {sum: x}")),
        "overlapping to sum": of((6,), (LINE, (LAPS,)), (two, "n {sum: p}")),
        "to overlapping sum": of((6,), (Mesh(a=2), "n"), (two, {"t": parts, "p": Partial("sum")})),
        "sum of overlapping": of((6,), (two, {"t": parts, "p": Partial("sum")}), (FAR, "(x n)")),
    }


def trees() -> dict[str, Plan]:
    """Several tensors, and tensors held as windows."""
    column, row = Layout((6, 4), NEAR, "(a b n) h"), Layout((6, 4), FAR, "n (x h)")
    summed, left = (Layout((6, 4), NEAR, f"{n} h {{sum: a}}") for n in ("n", "(b n)"))
    experts = {
        f"e{i}": Layout((4, 2), Mesh(a=2, ranks=(2 * i, 2 * i + 1)), "(a n) h") for i in range(3)
    }
    turned = Layout((6, 4), NEAR.transpose("ba"), "(a b n) h")
    return {
        "windows": plan({"w": halves(column, 4)}, {"w": halves(row, 1)}),
        "windows of one side": plan({"w": halves(column, 4)}, {"w": row}),
        "summed windows": plan({"w": halves(summed, 2)}, {"w": halves(left, 3)}),
        "windows that are empty": plan({"w": halves(column, 4)}, {"w": halves(row, 0)}),
        "tree": plan({"u": column, "v": column, "w": row}, {"u": row, "v": row, "w": column}),
        "experts": plan(
            experts, dict.fromkeys(experts, Layout((4, 2), Mesh(x=4, ranks=range(2, 6)), "n (x h)"))
        ),
        "two spellings": plan({"u": column, "v": turned}, {"u": row, "v": row}),
    }


def nodes() -> dict[str, Plan]:
    """With a topology."""
    wide = Mesh(x=3, y=2, ranks=range(1, 7))
    return {
        "near and far": near(2, (5, 2), (NEAR, "n h"), (wide, "(y n) h")),
        "near sums": near(3, (6,), (Mesh(a=2, b=3), "n {sum: a}"), (wide, "(x n)")),
        "near stripes": near(
            2, (6, 2), (LINE, "n h"), (Mesh(x=2, y=2, ranks=range(3, 7)), "n h {sum: x}")
        ),
        "near parts": near(4, (6,), (NEAR, "n"), (wide, {("x", "y"): Table(0, LAPS.parts * 2)})),
    }


def every_plan() -> dict[str, Plan]:
    """Where every row of a box may be a cut."""
    with mock.patch("shardmath.plans.units.SMALL", 0):
        return copies() | reductions() | trees() | nodes()


def left() -> dict[str, Plan]:
    """That some have left: replicas, copies of two that share a tensor, one window of two, nodes."""
    with mock.patch("shardmath.plans.units.SMALL", 0):
        copied = Layout((6, 4), Mesh(copy=3, x=2, ranks=range(4, 10)), "n (x h)")
        summed = Layout((6, 4), Mesh(x=2, copy=2, ranks=range(4, 8)), "n h {sum: x}")
        column, row = Layout((6, 4), NEAR, "(a b n) h"), Layout((6, 4), AWAY, "n (x h)")
        replicas = of((5, 3), (LINE, "n h"), (Mesh(x=4, ranks=range(2, 6)), "n h"))
        windows = plan({"w": column}, {"w": (row, Layout((6, 4), Mesh(ranks=[9]), "n h"))})
        nodes = plan(column, copied, topology=Topology(ranks_per_node=3))
        return {
            "replicas that left": without(replicas, [3]),
            "copies that left": without(plan(column, copied), [8, 9, 4, 5]),
            "addends that left": without(plan(column, summed), [5, 7]),
            "windows that left": without(windows, AWAY.ranks),
            "near and left": without(nodes, [6, 7]),
        }


FORWARD = every_plan()
LEFT = left()
TRANSPOSED = (
    "gather",
    "column to row",
    "windows",
    "to sum",
    "average",
    "tree",
    "both overlapping",
    "near and far",
)
ADJOINTS = {f"adjoint of {name}": adjoint(FORWARD[name]) for name in TRANSPOSED}
PLANS = FORWARD | ADJOINTS | LEFT
