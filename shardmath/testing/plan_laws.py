"""Plan laws: what all plans between two layouts keep.

A law is a function with a one-line docstring that asserts; one law, one cause of failure.
"""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias, cast

import hypothesis.strategies as st
import numpy as np

from shardmath.base.errors import PlanError
from shardmath.layouts.edits import cast as cast_layout
from shardmath.layouts.edits import relabelled, sliced, transposed
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import local_tensors
from shardmath.plans.adjoint import adjoint
from shardmath.plans.plan import Plan, Side, plan
from shardmath.plans.reduction import reduction
from shardmath.proofs.simulate import simulate
from shardmath.proofs.verify import verify
from shardmath.testing.layout_laws import transpose_mesh
from shardmath.testing.oracle import Array, addends, distribute, run, value
from shardmath.testing.strategies import boxes, tilings

__all__ = [
    "adjoint_is_transpose",
    "bytes_are_needed",
    "casting_commutes",
    "ends_agree",
    "identity_moves_nothing",
    "path_independence",
    "plan_is_proved",
    "plan_moves_the_tensor",
    "relabelling_commutes",
    "round_trip",
    "slicing_commutes",
    "spelling_is_not_meaning",
    "transposing_commutes",
    "trees_are_their_tensors",
    "windows_are_their_union",
]

Held: TypeAlias = dict[int, dict[str, Array]]
"""Rank -> local name -> local array."""


# One plan


def plan_is_proved(src: Layout, dst: Layout) -> None:
    """Every plan passes its proof, and its loads are those of its transfers."""
    p = plan(src, dst)
    verify(p)
    sent = dict.fromkeys(p.ranks, 0)
    received = dict.fromkeys(p.ranks, 0)
    for t in p.transfers():
        if t.src_rank != t.dst_rank:
            sent[t.src_rank] += t.nbytes
            received[t.dst_rank] += t.nbytes
    assert sent == p.sent_bytes()
    assert received == p.received_bytes()


def plan_moves_the_tensor(src: Layout, dst: Layout) -> None:
    """After the move the destination holds the value that the source held, at every rank."""
    shards = distribute(src, addends(src), hole=99.0)
    out = run(plan(src, dst), shards)
    whole = value(src, shards)
    assert np.allclose(value(dst, out), whole)
    asked = reduction(src, dst)
    if asked.chosen or asked.matched:
        return  # which addend a rank then has is the plan's choice
    expected = distribute(dst, [whole] * len(addends(dst)))
    for rank in dst.mesh.ranks:
        assert np.allclose(out[rank], expected[rank])


def ends_agree(src: Layout, dst: Layout) -> None:
    """Both ends of a pair list the same transfers in the same order, and a stranger none."""
    p = plan(src, dst)
    for a, b in itertools.product(p.src_ranks, p.dst_ranks):
        of_sender = [t for t in p.transfers(src=a) if t.dst_rank == b]
        of_receiver = [t for t in p.transfers(dst=b) if t.src_rank == a]
        assert of_sender == of_receiver == list(p.transfers(src=a, dst=b))
    stranger = 10**6
    assert not list(p.transfers(src=stranger))
    assert not list(p.transfers(dst=stranger))


def identity_moves_nothing(layout: Layout) -> None:
    """A plan from a layout to itself sends nothing."""
    assert not any(plan(layout, layout).sent_bytes().values())


def bytes_are_needed(src: Layout, dst: Layout) -> None:
    """Without Partial, every rank receives exactly what it needs and does not hold."""
    received = plan(src, dst).received_bytes()
    for rank in dst.mesh.ranks:
        need = _list_elements(dst, rank)
        have = _list_elements(src, rank) if rank in src.mesh else set()
        assert received[rank] == len(need - have) * src.itemsize


def _list_elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    """The global indices of what a rank holds."""
    held = [index[index >= 0].tolist() for index in layout.indices(rank)]
    return set(itertools.product(*held))


# Plans of other spellings, names and paths


def spelling_is_not_meaning(src: Layout, dst: Layout) -> None:
    """Equivalent layouts give the same digest and the same transfers."""
    p = plan(src, dst)
    q = plan(_spell_otherwise(src), _spell_otherwise(dst))
    assert p == q
    assert list(p.transfers()) == list(q.transfers())


def _spell_otherwise(layout: Layout) -> Layout:
    """An equivalent layout; the order of the axes means something where two are partial."""
    return transpose_mesh(layout) if len(layout.partial) < 2 else layout


def round_trip(src: Layout, dst: Layout) -> None:
    """There and back gives every rank its own elements again."""
    shards = distribute(src, addends(src))
    there = run(plan(src, dst), shards)
    back = run(plan(dst, src), there)
    for rank in src.mesh.ranks:
        assert np.allclose(back[rank], shards[rank])


def path_independence(a: Layout, b: Layout, c: Layout) -> None:
    """A to C to B is A to B."""
    shards = distribute(a, addends(a))
    direct = run(plan(a, b), shards)
    around = run(plan(c, b), run(plan(a, c), shards))
    if b.op is None:
        for rank in b.mesh.ranks:
            assert np.allclose(direct[rank], around[rank])
    assert np.allclose(value(b, direct), value(b, around))


def relabelling_commutes(src: Layout, dst: Layout) -> None:
    """Renaming all ranks renames received bytes, and sent ones up to ties and snapping."""
    names = {rank: 200 - rank for rank in (*src.mesh.ranks, *dst.mesh.ranks)}
    p = plan(src, dst)
    q = plan(relabelled(src, names), relabelled(dst, names))
    if reduction(src, dst).chosen:
        return
    renamed = {names[rank]: nbytes for rank, nbytes in p.received_bytes().items()}
    assert renamed == q.received_bytes()
    assert sum(p.sent_bytes().values()) == sum(q.sent_bytes().values())


# Plans of other tensors


def transposing_commutes(src: Layout, dst: Layout) -> None:
    """Transposing the dimensions of both sides transposes the result."""
    order = tuple(range(src.ndim))[::-1]
    shards = distribute(src, addends(src))
    out = run(plan(src, dst), shards)
    turned_plan = plan(transposed(src, order), transposed(dst, order))
    turned = run(turned_plan, {rank: x.T for rank, x in shards.items()})
    for rank in dst.mesh.ranks:
        assert (out[rank] == turned[rank].T).all()


def casting_commutes(src: Layout, dst: Layout) -> None:
    """Without reduction, casting before the move is casting after it."""
    shards = distribute(src, addends(src))
    after = _cast_shards(run(plan(src, dst), shards))
    halved = plan(cast_layout(src, "int16"), cast_layout(dst, "int16"))
    before = run(halved, _cast_shards(shards))
    for rank in dst.mesh.ranks:
        assert (before[rank] == after[rank]).all()


def _cast_shards(shards: dict[int, Array]) -> dict[int, Array]:
    """Every local array in int16."""
    return {rank: x.astype(np.int16) for rank, x in shards.items()}


def slicing_commutes(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """Moving a slice gives the slice of the move; elements outside it stay 0."""
    box = data.draw(boxes(src.shape))
    index = tuple(slice(lo, hi) for lo, hi in box)
    values = addends(src)
    parts = []
    for addend in values:
        part = np.zeros_like(addend)
        part[index] = addend[index]
        parts.append(part)
    moved = run(plan(sliced(src, box), sliced(dst, box)), distribute(src, values))
    expected = distribute(dst, parts)
    for rank in dst.mesh.ranks:
        assert (moved[rank] == expected[rank]).all()


def windows_are_their_union(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """A tensor held as windows moves as the tensor does, from windows and to windows."""
    values = addends(src)
    from_windows: tuple[Side, Side] = (data.draw(tilings(src)), dst)
    to_windows: tuple[Side, Side] = (src, data.draw(tilings(dst)))
    for a, b in (from_windows, to_windows):
        p = plan({"w": cast(Any, a)}, {"w": cast(Any, b)})
        verify(p)
        out = cast(Held, simulate(p, _distribute_windows(p, values)))
        for rank, held in out.items():
            expected = _expect_windows(p, rank, values)
            assert held.keys() == expected.keys()
            for key, array in held.items():
                assert (array == expected[key]).all()


def _distribute_windows(p: Plan, values: list[Array]) -> Held:
    """What every rank holds of the source's windows."""
    out: Held = {rank: {} for rank in p.src_ranks}
    for key, layout in local_tensors("w", p.src["w"]):
        for rank, array in distribute(layout, values).items():
            out[rank][key] = array
    return out


def _expect_windows(p: Plan, rank: int, values: list[Array]) -> dict[str, Array]:
    """What a rank is to hold of the destination's windows."""
    out = {}
    for key, layout in local_tensors("w", p.dst["w"]):
        if rank in layout.mesh:
            out[key] = distribute(layout, values)[rank]
    return out


def adjoint_is_transpose(src: Layout, dst: Layout) -> None:
    """<plan(x), y> = <x, adjoint(plan)(y)>, and the adjoint of the adjoint is the plan."""
    p = plan(src, dst)
    try:
        back = adjoint(p)
    except PlanError:
        return  # not linear
    verify(back)
    assert adjoint(back) == p
    rng = np.random.default_rng(1)
    x = _draw_shards(src, rng)
    y = _draw_shards(dst, rng)
    assert np.isclose(_dot(run(p, x), y), _dot(x, run(back, y)))


def _draw_shards(layout: Layout, rng: np.random.Generator) -> dict[int, Array]:
    """Random local arrays; integers in floats, so that sums are exact."""
    out: dict[int, Array] = {}
    for rank in layout.mesh.ranks:
        out[rank] = rng.integers(-4, 5, layout.local_shape(rank)).astype(float)
    return out


def _dot(a: dict[int, Array], b: dict[int, Array]) -> float:
    """The inner product over all ranks of `b`."""
    return sum(float((a[rank] * b[rank]).sum()) for rank in b)


def trees_are_their_tensors(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    """A plan of many tensors is proved, and gives each what its own plan gives."""
    src, dst = tree
    p = plan(src, dst)
    verify(p)
    held = {name: distribute(layout, addends(layout)) for name, layout in src.items()}
    shards: Held = {rank: {} for rank in p.src_ranks}
    for name, arrays in held.items():
        for rank, array in arrays.items():
            shards[rank][name] = array
    out = cast(Held, simulate(p, shards))
    for name, layout in dst.items():
        alone = run(plan(src[name], layout), held[name])
        together = {rank: out[rank][name] for rank in layout.mesh.ranks}
        assert np.allclose(value(layout, together), value(layout, alone))
