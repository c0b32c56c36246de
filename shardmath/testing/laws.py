"""Laws: functions with a one-line docstring that assert; one law, one cause of failure.

`LAWS` lists each with the strategy of its arguments; `PLACEMENT_LAWS` are those of one placement.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np

from shardmath.algebra.cuts import Rule
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.runs import Runs, compose, invert
from shardmath.algebra.stages import pieces_runs, stage_runs
from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.layouts.layout import Layout, equivalent, relabelled, sliced, transposed
from shardmath.layouts.layout import cast as cast_layout
from shardmath.layouts.placement import Placement, Shard, Table, check_protocol
from shardmath.layouts.store import local_tensors
from shardmath.plans.adjoint import adjoint
from shardmath.plans.plan import Plan, Side, plan
from shardmath.plans.reduction import reduction
from shardmath.proofs.simulate import simulate
from shardmath.proofs.verify import verify
from shardmath.testing.oracle import Array, addends, distribute, run, value
from shardmath.testing.strategies import boxes, layouts, lengths, pairs, parts, runs, tilings, trees

__all__ = ["LAWS", "PLACEMENT_LAWS", "Law", "check_placement"]


def _require(holds: bool, placement: Placement, n: int, count: int, what: str) -> None:
    """An AssertionError that names the case, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{placement}.split({n}, {count}): {what}")


def _positions(placement: Placement, n: int, count: int) -> Ints:
    """The positions of all parts, ascending, holes left out."""
    held = np.concatenate(
        [np.zeros(0, np.int64), *(part.indices() for part in placement.split(n, count))]
    )
    return np.sort(held[held >= 0])


def _require_none(found: Ints, placement: Placement, n: int, count: int, where: str) -> None:
    """An AssertionError that names the first of the positions found, and where it is."""
    first = found[0] if len(found) else None
    _require(first is None, placement, n, count, f"position {first} is in {where}")


def in_bounds(placement: Placement, n: int, count: int) -> None:
    """There is a part for every coordinate, inside the length."""
    Rule(placement, count).split(n)


def disjoint(placement: Placement, n: int, count: int) -> None:
    """No position has two parts."""
    held = _positions(placement, n, count)
    _require_none(held[1:][held[1:] == held[:-1]], placement, n, count, "two parts")


def covering(placement: Placement, n: int, count: int) -> None:
    """Every position has a part."""
    lost = np.setdiff1d(np.arange(n), _positions(placement, n, count))
    _require_none(lost, placement, n, count, "no part")


def hashable(placement: Placement, n: int, count: int) -> None:
    """Equal placements are equal and hash alike after pickling, and split alike every time."""
    check_protocol(placement)
    try:
        again = pickle.loads(pickle.dumps(placement))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        again = None
        _require(
            False,
            placement,
            n,
            count,
            f"it cannot be pickled: {error}; define its class in a module",
        )
    same = again == placement and hash(again) == hash(placement)
    _require(same, placement, n, count, "a copy is not equal to it; make it a frozen dataclass")
    alike = again.split(n, count) == placement.split(n, count)
    _require(
        alike, placement, n, count, "it splits differently every time; split by n and parts alone"
    )


def composes(placement: Placement, n: int, count: int) -> None:
    """A layout gives coordinate r exactly part r."""
    layout = Layout((n,), Mesh(a=count), {"a": _at_zero(placement)})
    held = tuple(layout.runs(r)[0] for r in range(count))
    _require(
        held == placement.split(n, count),
        placement,
        n,
        count,
        "a layout of it holds other positions",
    )


def _at_zero(placement: Placement) -> Placement:
    return placement if placement.dim in (0, -1) else _Moved(placement)


@dataclass(frozen=True)
class _Moved:
    """A placement seen on dimension 0."""

    of: Placement
    dim: int = 0

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return self.of.split(n, parts)


def moves(placement: Placement, n: int, count: int) -> None:
    """Gathering what it divides, and dividing it again, are proved plans that lose nothing."""
    mesh = Mesh(a=count)
    split, whole = Layout((n,), mesh, {"a": _at_zero(placement)}), Layout((n,), mesh, "n")
    values = [np.arange(n, dtype=float)]
    for src, dst in ((split, whole), (whole, split)):
        p = plan(src, dst)
        verify(p)
        out, expected = run(p, distribute(src, values)), distribute(dst, values)
        kept = all((out[r] == expected[r]).all() for r in range(count))
        _require(kept, placement, n, count, f"moving {src.text} to {dst.text} changes values")


PLACEMENT_LAWS = (in_bounds, disjoint, covering, hashable, composes, moves)
"""What every dividing placement keeps; one that overlaps, like Table, keeps all but `disjoint`."""


def check_placement(placement: Placement, n: int, parts: int, *, dividing: bool = True) -> None:
    """Check a placement of your own against its laws; `dividing=False` if its parts may overlap."""
    for law in PLACEMENT_LAWS:
        if dividing or law is not disjoint:
            law(placement, n, parts)


# --- laws of runs


def compose_is_after(f: Runs, g: Runs) -> None:
    """compose(f, g) at i is g at f(i), a hole where either has one."""
    after = np.append(g.indices(), -1)
    expected = [int(after[i]) if 0 <= i < len(g) else -1 for i in f.indices().tolist()]
    assert compose(f, Runs(g.segments, max(len(g), f.extent))).indices().tolist() == expected


def invert_undoes(r: Runs) -> None:
    """Inverting twice is the identity, and a Runs after its inverse keeps what it holds in its place."""
    n = r.extent + 1
    back = invert(r, n)
    assert invert(back, len(r)) == r
    assert compose(r, back).indices().tolist() == [
        i if g >= 0 else -1 for i, g in enumerate(r.indices().tolist())
    ]


def runs_are_canonical(r: Runs) -> None:
    """Cutting segments apart, or giving them in another order, makes the same value."""
    cells = [(i, g, 1) for i, g in enumerate(r.indices().tolist()) if g >= 0]
    assert Runs(reversed(cells), len(r)) == r and hash(Runs(cells, len(r))) == hash(r)


# --- laws of layouts


def fast_is_definition(layout: Layout) -> None:
    """The closed form of every stage equals cutting pieces one by one."""
    for rank in layout.mesh.ranks:
        coords = layout.mesh.coords(rank)
        for f in (f for dim in layout.dims for f in dim.fields):
            length = f.size
            for stage in f.stages:
                assert stage_runs(stage, length, coords) == pieces_runs(stage, length, coords)
                length = len(stage_runs(stage, length, coords))


def parse_print(layout: Layout) -> None:
    """Reading the printed text gives the same layout, and so do pickle and repr."""
    assert (
        Layout(layout.shape, layout.mesh, layout.text, dtype=layout.dtype, rules=layout.rules)
        is layout
    )
    assert pickle.loads(pickle.dumps(layout)) is layout
    names = {k.__name__: k for k in (Layout, Mesh, Runs, Table)}
    assert eval(repr(layout), names) is layout


def shape_counts_runs(layout: Layout) -> None:
    """local_shape, runs and indices say the same."""
    for rank in layout.mesh.ranks:
        held, index = layout.runs(rank), layout.indices(rank)
        assert layout.local_shape(rank) == tuple(map(len, held)) == tuple(map(len, index))
        assert [r.indices().tolist() for r in held] == [i.tolist() for i in index]


def relabelling_moves_holdings(layout: Layout) -> None:
    """Renaming ranks gives the new name what the old one held."""
    names = {r: 1000 - 3 * r for r in layout.mesh.ranks}
    renamed = relabelled(layout, names)
    assert all(renamed.runs(names[r]) == layout.runs(r) for r in layout.mesh.ranks)


def mesh_transposition_changes_nothing(layout: Layout) -> None:
    """Transposing the mesh changes no holding."""
    turned = layout.mesh.transpose(tuple(layout.mesh.shape)[::-1])
    again = Layout(layout.shape, turned, layout.text, dtype=layout.dtype, rules=layout.rules)
    assert all(again.runs(r) == layout.runs(r) for r in layout.mesh.ranks)


def splitting_an_axis_changes_nothing(n: int, outer: int, inner: int) -> None:
    """Splitting a mesh axis, or merging two that are used as one digit, changes no holding."""
    one = Mesh(t=outer * inner)
    for text in ("(t n)", "(2 t n)", "(n t 2)", "(t~ n)"):
        two = text.replace("t", "x*y")
        split = Layout((n,), one.split("t", x=outer, y=inner), two)
        assert equivalent(Layout((n,), one, text), split)
        assert equivalent(split, Layout((n,), split.mesh.merge(("x", "y"), "t"), text))


def one_piece_needs_no_border(n: int, first: int, second: int) -> None:
    """`a | b` is `a b` where a leaves one piece a rank."""
    mesh = Mesh(a=first, b=second)
    assert Layout((n,), mesh, "(a n | b n)") is Layout((n,), mesh, "(a b n)")
    assert Layout((n,), mesh, (Shard(0), Shard(0))) is Layout((n,), mesh, "(a b n)")


# --- laws of plans


def plan_is_proved(src: Layout, dst: Layout) -> None:
    """Every plan passes its proof, and its loads are those of its transfers."""
    p = plan(src, dst)
    verify(p)
    sent, received = dict.fromkeys(p.ranks, 0), dict.fromkeys(p.ranks, 0)
    for t in p.transfers():
        if t.src_rank != t.dst_rank:
            sent[t.src_rank] += t.nbytes
            received[t.dst_rank] += t.nbytes
    assert (sent, received) == (p.sent_bytes(), p.received_bytes())


def plan_moves_the_tensor(src: Layout, dst: Layout) -> None:
    """After the move the destination holds the value that the source held, at every rank."""
    shards = distribute(src, addends(src), hole=99.0)
    out = run(plan(src, dst), shards)
    whole = value(src, shards)
    assert np.allclose(value(dst, out), whole)
    if not reduction(src, dst).chosen and not reduction(src, dst).matched:
        expected = distribute(dst, [whole] * len(addends(dst)))
        assert all(np.allclose(out[r], expected[r]) for r in dst.mesh.ranks)


def ends_agree(src: Layout, dst: Layout) -> None:
    """Both ends of a pair list the same transfers in the same order, and a stranger none."""
    p = plan(src, dst)
    for a, b in itertools.product(p.src_ranks, p.dst_ranks):
        ours = [t for t in p.transfers(src=a) if t.dst_rank == b]
        assert (
            ours
            == [t for t in p.transfers(dst=b) if t.src_rank == a]
            == list(p.transfers(src=a, dst=b))
        )
    assert not list(p.transfers(src=10**6)) and not list(p.transfers(dst=10**6))


def identity_moves_nothing(layout: Layout) -> None:
    """A plan from a layout to itself sends nothing."""
    assert not any(plan(layout, layout).sent_bytes().values())


def spelling_is_not_meaning(src: Layout, dst: Layout) -> None:
    """Equivalent layouts give the same digest and the same transfers."""
    other = [
        Layout(
            x.shape,
            x.mesh.transpose(tuple(x.mesh.shape)[::-1]),
            x.text,
            dtype=x.dtype,
            rules=x.rules,
        )
        if len(x.partial) < 2
        else x
        for x in (src, dst)
    ]
    p, q = plan(src, dst), plan(*other)
    assert p == q and list(p.transfers()) == list(q.transfers())


def round_trip(src: Layout, dst: Layout) -> None:
    """There and back gives every rank its own elements again."""
    shards = distribute(src, addends(src))
    back = run(plan(dst, src), run(plan(src, dst), shards))
    assert all(np.allclose(back[r], shards[r]) for r in src.mesh.ranks)


def path_independence(a: Layout, b: Layout, c: Layout) -> None:
    """A to C to B is A to B."""
    shards = distribute(a, addends(a))
    direct, around = run(plan(a, b), shards), run(plan(c, b), run(plan(a, c), shards))
    if b.op is None:
        assert all(np.allclose(direct[r], around[r]) for r in b.mesh.ranks)
    assert np.allclose(value(b, direct), value(b, around))


def relabelling_commutes(src: Layout, dst: Layout) -> None:
    """Renaming all ranks renames received bytes, and sent ones up to ties and snapping."""
    names = {r: 200 - r for r in (*src.mesh.ranks, *dst.mesh.ranks)}
    p, q = plan(src, dst), plan(relabelled(src, names), relabelled(dst, names))
    if not reduction(src, dst).chosen:
        assert {names[r]: n for r, n in p.received_bytes().items()} == q.received_bytes()
    assert (
        sum(p.sent_bytes().values()) == sum(q.sent_bytes().values()) or reduction(src, dst).chosen
    )


def bytes_are_needed(src: Layout, dst: Layout) -> None:
    """Without Partial, every rank receives exactly what it needs and does not hold."""
    received = plan(src, dst).received_bytes()
    for rank in dst.mesh.ranks:
        need = _elements(dst, rank)
        have = _elements(src, rank) if rank in src.mesh else set()
        assert received[rank] == len(need - have) * src.itemsize


def _elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    return set(itertools.product(*((i[i >= 0]).tolist() for i in layout.indices(rank))))


def transposing_commutes(src: Layout, dst: Layout) -> None:
    """Transposing the dimensions of both sides transposes the result."""
    order = tuple(range(src.ndim))[::-1]
    shards = distribute(src, addends(src))
    out = run(plan(src, dst), shards)
    turned = run(
        plan(transposed(src, order), transposed(dst, order)), {r: x.T for r, x in shards.items()}
    )
    assert all((out[r] == turned[r].T).all() for r in dst.mesh.ranks)


def casting_commutes(src: Layout, dst: Layout) -> None:
    """Without reduction, casting before the move is casting after it."""
    shards = distribute(src, addends(src))
    after = {r: x.astype(np.int16) for r, x in run(plan(src, dst), shards).items()}
    halved = plan(cast_layout(src, "int16"), cast_layout(dst, "int16"))
    before = run(halved, {r: x.astype(np.int16) for r, x in shards.items()})
    assert all((before[r] == after[r]).all() for r in dst.mesh.ranks)


def slicing_commutes(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """Moving a slice gives the slice of the move; cells outside it stay 0."""
    box = data.draw(boxes(src.shape))
    values = addends(src)
    moved = run(plan(sliced(src, box), sliced(dst, box)), distribute(src, values))
    part = [np.zeros_like(v) for v in values]
    for v, p in zip(values, part, strict=True):
        index = tuple(slice(lo, hi) for lo, hi in box)
        p[index] = v[index]
    expected = distribute(dst, part)
    assert all((moved[r] == expected[r]).all() for r in dst.mesh.ranks)


def windows_are_their_union(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """A tensor held as windows moves as the tensor does, from windows, to windows and between them."""
    values = addends(src)
    sides: list[tuple[Side, Side]] = [
        (data.draw(tilings(src)), dst),
        (src, data.draw(tilings(dst))),
    ]
    for a, b in sides:
        p = plan({"w": cast(Any, a)}, {"w": cast(Any, b)})
        verify(p)
        out = cast(dict[int, dict[str, Array]], simulate(p, _local(p, values)))
        for rank, held in out.items():
            expected = _expected(p, rank, values)
            assert held.keys() == expected.keys()
            assert all((held[key] == expected[key]).all() for key in held)


def _local(p: Plan, values: list[Array]) -> dict[int, dict[str, Array]]:
    out: dict[int, dict[str, Array]] = {rank: {} for rank in p.src_ranks}
    for key, layout in local_tensors("w", p.src["w"]):
        for rank, array in distribute(layout, values).items():
            out[rank][key] = array
    return out


def _expected(p: Plan, rank: int, values: list[Array]) -> dict[str, Array]:
    held = [(key, layout) for key, layout in local_tensors("w", p.dst["w"]) if rank in layout.mesh]
    return {key: distribute(layout, values)[rank] for key, layout in held}


def adjoint_is_transpose(src: Layout, dst: Layout) -> None:
    """<plan(x), y> = <x, adjoint(plan)(y)> for arbitrary arrays, and the adjoint of the adjoint is the plan."""
    p = plan(src, dst)
    if not _linear(p):
        return
    back = adjoint(p)
    verify(back)
    assert adjoint(back) == p
    rng = np.random.default_rng(1)
    x = {r: rng.integers(-4, 5, src.local_shape(r)).astype(float) for r in src.mesh.ranks}
    y = {r: rng.integers(-4, 5, dst.local_shape(r)).astype(float) for r in dst.mesh.ranks}
    forward, backward = run(p, x), run(back, y)
    left = sum(float((forward[r] * y[r]).sum()) for r in y)
    assert np.isclose(left, sum(float((x[r] * backward[r]).sum()) for r in x))


def trees_are_their_tensors(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    """A plan of many tensors is proved, and gives each what its own plan gives."""
    src, dst = tree
    p = plan(src, dst)
    verify(p)
    held = {name: distribute(layout, addends(layout)) for name, layout in src.items()}
    shards = {
        rank: {name: x[rank] for name, x in held.items() if rank in x} for rank in p.src_ranks
    }
    out = cast(dict[int, dict[str, Array]], simulate(p, shards))
    for name in src:
        alone = value(dst[name], run(plan(src[name], dst[name]), held[name]))
        assert np.allclose(value(dst[name], {r: out[r][name] for r in dst[name].mesh.ranks}), alone)


@dataclass(frozen=True)
class Law:
    """A law and the strategies of its arguments; one strategy of tuples stands for several arguments."""

    check: Callable[..., None]
    cases: st.SearchStrategy[tuple[Any, ...]]

    @property
    def name(self) -> str:
        """The law's name."""
        return self.check.__name__


def _on(check: Callable[..., None], *cases: st.SearchStrategy[Any]) -> Law:
    return Law(check, st.tuples(*cases))


_copies = pairs(ops=(None,))
_linear_pairs = pairs(ops=(None, "sum", "avg"))

LAWS: tuple[Law, ...] = (
    _on(compose_is_after, runs(), runs()),
    _on(invert_undoes, runs()),
    _on(runs_are_canonical, runs()),
    _on(fast_is_definition, layouts()),
    _on(parse_print, layouts(op="sum")),
    _on(shape_counts_runs, layouts()),
    _on(relabelling_moves_holdings, layouts()),
    _on(mesh_transposition_changes_nothing, layouts()),
    _on(splitting_an_axis_changes_nothing, lengths(), parts(), parts()),
    _on(one_piece_needs_no_border, lengths(), parts(), parts()),
    _on(identity_moves_nothing, layouts(op="sum")),
    Law(plan_is_proved, pairs()),
    Law(plan_moves_the_tensor, pairs()),
    Law(ends_agree, pairs()),
    Law(spelling_is_not_meaning, pairs()),
    Law(round_trip, _copies),
    Law(path_independence, pairs(ops=(None, "sum"), count=3)),
    Law(relabelling_commutes, pairs()),
    Law(bytes_are_needed, _copies),
    Law(transposing_commutes, pairs(ops=(None, "sum"))),
    Law(casting_commutes, _copies),
    Law(slicing_commutes, st.tuples(st.data(), _copies).map(lambda x: (x[0], *x[1]))),
    Law(windows_are_their_union, st.tuples(st.data(), _copies).map(lambda x: (x[0], *x[1]))),
    Law(adjoint_is_transpose, _linear_pairs),
    _on(trees_are_their_tensors, trees()),
)
"""Every law with its cases: `given(law.cases)(lambda case: law.check(*case))`."""


def _linear(p: Plan) -> bool:
    try:
        adjoint(p)
    except PlanError:
        return False
    return True
