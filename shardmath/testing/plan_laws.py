"""Plan laws: the laws of plans between two layouts.

A law is a function with a one-line docstring that asserts; one law, one cause of failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import hypothesis.strategies as st
import numpy as np

from shardmath.base.errors import PlanError
from shardmath.layouts.edits import cast as cast_layout
from shardmath.layouts.edits import relabeled, sliced, transposed
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import adjoint
from shardmath.plans.membership.leaving import without
from shardmath.plans.plan import Side, plan
from shardmath.plans.reduction import find_reduction
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
    "leaving_changes_nothing_else",
    "leaving_twice_is_leaving_together",
    "path_independence",
    "plan_is_proved",
    "plan_moves_the_tensor",
    "relabeling_commutes",
    "round_trip",
    "slicing_commutes",
    "spelling_is_not_meaning",
    "transposing_commutes",
    "trees_are_their_tensors",
    "windows_are_their_union",
]

_Key = TypeVar("_Key")

Held: TypeAlias = dict[int, dict[str, Array]]
"""Rank -> local name -> local array."""


# One plan


def plan_is_proved(src: Layout, dst: Layout) -> None:
    """Check that `verify` accepts the plan from `src` to `dst`, and that the plan's numbers of bytes sent and received
    per rank are the totals of its transfers between different ranks."""
    planned = plan(src, dst)
    verify(planned)
    sent = dict.fromkeys(planned.ranks, 0)
    received = dict.fromkeys(planned.ranks, 0)
    for transfer in planned.transfers():
        if transfer.src_rank != transfer.dst_rank:
            sent[transfer.src_rank] += transfer.nbytes
            received[transfer.dst_rank] += transfer.nbytes
    assert sent == planned.sent_bytes()
    assert received == planned.received_bytes()


def plan_moves_the_tensor(src: Layout, dst: Layout) -> None:
    """Check that a move keeps the tensor's value. If the destination is not Partial, each of its ranks must also have
    exactly the elements that its layout gives it."""
    values = addends(src)
    shards = distribute(src, values, hole=99.0)
    out = run(plan(src, dst), shards)
    moved = value(src, shards)
    assert np.allclose(value(dst, out), moved)
    reduction = find_reduction(src, dst)
    if reduction.chosen or reduction.matched:
        return  # the plan then chooses the addend of each rank
    count = len(addends(dst))
    expected = distribute(dst, [moved] * count)
    _assert_close(out, expected)


def ends_agree(src: Layout, dst: Layout) -> None:
    """Check that, for each sender and receiver in the plan from `src` to `dst`, both list the same transfers between
    them in the same order. Ranks outside the plan must list none."""
    planned = plan(src, dst)
    for sender, receiver in itertools.product(planned.src_ranks, planned.dst_ranks):
        between = list(planned.transfers(src=sender, dst=receiver))
        sends = planned.transfers(src=sender)
        sent = [transfer for transfer in sends if transfer.dst_rank == receiver]
        assert between == sent
        receives = planned.transfers(dst=receiver)
        received = [transfer for transfer in receives if transfer.src_rank == sender]
        assert between == received
    outsider = 10**6
    sends = planned.transfers(src=outsider)
    assert not list(sends)
    receives = planned.transfers(dst=outsider)
    assert not list(receives)


def identity_moves_nothing(layout: Layout) -> None:
    """Check that a plan from a layout to itself sends nothing."""
    planned = plan(layout, layout)
    sent = planned.sent_bytes()
    assert not any(sent.values())


def bytes_are_needed(src: Layout, dst: Layout) -> None:
    """Check that, without Partial, the number of bytes that each rank receives is the size of the elements that it
    needs and does not hold."""
    planned = plan(src, dst)
    received = planned.received_bytes()
    for rank in dst.mesh.ranks:
        missing = _list_elements(dst, rank)
        if rank in src.mesh:
            missing -= _list_elements(src, rank)
        assert received[rank] == len(missing) * src.itemsize


def _list_elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    """The global indices of the elements that a rank holds."""
    held = []
    for index in layout.indices(rank):
        positions = index[index >= 0]
        held.append(positions.tolist())
    return set(itertools.product(*held))


# Plans that ranks leave


def leaving_changes_nothing_else(src: Layout, dst: Layout, leaving: tuple[int, ...]) -> None:
    """Check that, if the ranks `leaving` are removed from a plan's destination, the other ranks keep their transfers
    and results, and the plan is still proved correct."""
    planned = plan(src, dst)
    rest = without(planned, leaving)
    verify(rest)
    for rank in planned.ranks:
        sent = planned.transfers(src=rank)
        staying = [transfer for transfer in sent if transfer.dst_rank not in leaving]
        assert list(rest.transfers(src=rank)) == staying
        received = planned.transfers(dst=rank)
        expected = [] if rank in leaving else list(received)
        assert list(rest.transfers(dst=rank)) == expected
    shards = distribute(src, addends(src))
    before = run(planned, shards)
    after = run(rest, shards)
    assert after.keys() == before.keys() - set(leaving)
    for rank, array in after.items():
        assert np.array_equal(array, before[rank], equal_nan=True)


def leaving_twice_is_leaving_together(src: Layout, dst: Layout, leaving: tuple[int, ...]) -> None:
    """Check that removing replicas from a plan's destination one by one gives the same plan as removing them together.
    `leaving` lists all ranks of one replica, then all ranks of the next; the replicas have equally many ranks."""
    planned = plan(src, dst)
    rest = without(planned, leaving)
    # The strategy `copies` gives the replicas an axis of this name.
    size = dst.mesh.size // dst.mesh.axis_size("copy")
    twice = planned
    for first in range(0, len(leaving), size):
        copy = leaving[first : first + size]
        assert without(twice, copy) != twice
        twice = without(twice, copy)
    assert twice == rest
    assert list(twice.transfers()) == list(rest.transfers())
    assert rest.whole is planned
    assert without(rest, leaving) is rest


# Plans of other spellings, names and paths


def spelling_is_not_meaning(src: Layout, dst: Layout) -> None:
    """Check that plans and transfers stay equal if both layouts are written with the mesh axes in the opposite order
    (except with two Partial axes).

    The order of two Partial axes matters.
    """
    planned = plan(src, dst)
    spelled = plan(_spell_otherwise(src), _spell_otherwise(dst))
    transfers = list(planned.transfers())
    assert planned == spelled
    assert transfers == list(spelled.transfers())


def _spell_otherwise(layout: Layout) -> Layout:
    """An equivalent layout, with the axes in another order unless two are partial: then their order matters."""
    return transpose_mesh(layout) if len(layout.partial) < 2 else layout


def round_trip(src: Layout, dst: Layout) -> None:
    """Check that moving there and back gives every rank its own elements again."""
    shards = distribute(src, addends(src))
    moved = run(plan(src, dst), shards)
    back = run(plan(dst, src), moved)
    _assert_close(back, shards)


def path_independence(a: Layout, b: Layout, c: Layout) -> None:
    """Check that moving from `a` to `c` and then to `b` gives the same value as moving from `a` to `b`."""
    shards = distribute(a, addends(a))
    direct = run(plan(a, b), shards)
    half_way = run(plan(a, c), shards)
    around = run(plan(c, b), half_way)
    # Addends may lie on other ranks, depending on the way; only their value is the same.
    if b.op is None:
        _assert_close(around, direct)
    direct_value = value(b, direct)
    around_value = value(b, around)
    assert np.allclose(direct_value, around_value)


def _assert_close(found: dict[int, Array], expected: dict[int, Array]) -> None:
    """Assert that every rank has the expected array, up to rounding."""
    for rank, array in expected.items():
        assert np.allclose(found[rank], array)


def relabeling_commutes(src: Layout, dst: Layout) -> None:
    """Check that, if all ranks are renumbered, each rank receives as many bytes as under its old number, and the total
    of sent bytes is the same.

    This does not hold, and is not checked, if the plan chooses which addend receives.
    """
    if find_reduction(src, dst).chosen:
        return
    ranks = (*src.mesh.ranks, *dst.mesh.ranks)
    names = {rank: 200 - rank for rank in ranks}
    planned = plan(src, dst)
    renamed_src = relabeled(src, names)
    renamed_dst = relabeled(dst, names)
    renamed = plan(renamed_src, renamed_dst)
    received = {}
    for rank, nbytes in planned.received_bytes().items():
        name = names[rank]
        received[name] = nbytes
    assert renamed.received_bytes() == received
    sent = planned.sent_bytes().values()
    sent_renamed = renamed.sent_bytes().values()
    assert sum(sent) == sum(sent_renamed)


# Plans of other tensors


def transposing_commutes(src: Layout, dst: Layout) -> None:
    """Check that transposing the dimensions of both sides transposes the result."""
    shards = distribute(src, addends(src))
    out = run(plan(src, dst), shards)
    order = tuple(reversed(range(src.ndim)))
    transposed_plan = plan(transposed(src, order), transposed(dst, order))
    transposed_out = run(transposed_plan, _transpose_shards(shards))
    _assert_equal(transposed_out, _transpose_shards(out))


def _transpose_shards(shards: dict[int, Array]) -> dict[int, Array]:
    """Every local array with its dimensions in the opposite order."""
    return {rank: x.T for rank, x in shards.items()}


def _assert_equal(found: Mapping[_Key, Array], expected: Mapping[_Key, Array]) -> None:
    """Assert that every rank, or name, has exactly the expected array."""
    for key, array in expected.items():
        same = found[key] == array
        assert same.all()


def casting_commutes(src: Layout, dst: Layout) -> None:
    """Check that, without reduction, casting before the move equals casting after it."""
    shards = distribute(src, addends(src))
    out = run(plan(src, dst), shards)
    cast_plan = plan(cast_layout(src, "int16"), cast_layout(dst, "int16"))
    cast_out = run(cast_plan, _cast_shards(shards))
    _assert_equal(cast_out, _cast_shards(out))


def _cast_shards(shards: dict[int, Array]) -> dict[int, Array]:
    """Every local array in int16."""
    return {rank: x.astype(np.int16) for rank, x in shards.items()}


def slicing_commutes(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """Check that a move of only a random box of the tensor gives each destination rank its elements of the box. All
    other elements must stay 0."""
    box = data.draw(boxes(src.shape))
    index = tuple(slice(lo, hi) for lo, hi in box)
    values = addends(src)
    parts = []
    for addend in values:
        part = np.zeros_like(addend)
        part[index] = addend[index]
        parts.append(part)
    planned = plan(sliced(src, box), sliced(dst, box))
    shards = distribute(src, values)
    out = run(planned, shards)
    expected = distribute(dst, parts)
    _assert_equal(out, expected)


def windows_are_their_union(data: st.DataObject, src: Layout, dst: Layout) -> None:
    """Check that a tensor arrives as its layout says if the source, or the destination, has it in windows: several
    layouts that together hold it."""
    values = addends(src)
    src_windows = data.draw(tilings(src))
    dst_windows = data.draw(tilings(dst))
    _check_windows(src_windows, dst, values)
    _check_windows(src, dst_windows, values)


def _check_windows(src: Side, dst: Side, values: list[Array]) -> None:
    """Assert that a plan between the sides is proved, and gives every rank its windows of the values."""
    planned = plan({"w": cast(Any, src)}, {"w": cast(Any, dst)})
    verify(planned)
    held = _distribute_windows(planned.src_ranks, planned.src["w"], values)
    out = cast(Held, simulate(planned, held))
    expected = _distribute_windows(planned.dst_ranks, planned.dst["w"], values)
    for rank, arrays in out.items():
        asked = expected[rank]
        assert arrays.keys() == asked.keys()
        _assert_equal(arrays, asked)


def _distribute_windows(ranks: Iterable[int], windows: Windows, values: list[Array]) -> Held:
    """The local arrays of the windows of a tensor, by rank."""
    arrays_by_window = {}
    for local_name, layout in windows.locals("w"):
        arrays_by_window[local_name] = distribute(layout, values)
    return _group_by_rank(ranks, arrays_by_window)


def adjoint_is_transpose(src: Layout, dst: Layout) -> None:
    """Check that <plan(x), y> = <x, adjoint(plan)(y)>, and that the adjoint of the adjoint is the plan."""
    planned = plan(src, dst)
    try:
        back = adjoint(planned)
    except PlanError:
        return  # not linear
    verify(back)
    assert adjoint(back) == planned
    rng = np.random.default_rng(1)
    x = _draw_shards(src, rng)
    y = _draw_shards(dst, rng)
    forward_dot = _dot(run(planned, x), y)
    backward_dot = _dot(x, run(back, y))
    assert np.isclose(forward_dot, backward_dot)


def _draw_shards(layout: Layout, rng: np.random.Generator) -> dict[int, Array]:
    """Random local arrays; integers in floats, so that sums are exact."""
    out: dict[int, Array] = {}
    for rank in layout.mesh.ranks:
        drawn = rng.integers(-4, 5, layout.local_shape(rank))
        out[rank] = drawn.astype(float)
    return out


def _dot(a: dict[int, Array], b: dict[int, Array]) -> float:
    """The inner product over all ranks of `b`."""
    total = 0.0
    for rank, array in b.items():
        products = a[rank] * array
        total += float(products.sum())
    return total


def trees_are_their_tensors(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    """Check that one plan of all tensors in `tree` (source and destination layouts by name) passes `verify`, and gives
    each tensor the value that a plan of it alone gives."""
    src, dst = tree
    planned = plan(src, dst)
    verify(planned)
    held = {}
    for name, layout in src.items():
        values = addends(layout)
        held[name] = distribute(layout, values)
    shards = _group_by_rank(planned.src_ranks, held)
    out = cast(Held, simulate(planned, shards))
    for name, layout in dst.items():
        together = {rank: out[rank][name] for rank in layout.mesh.ranks}
        found = value(layout, together)
        tensor_plan = plan(src[name], layout)
        alone = run(tensor_plan, held[name])
        expected = value(layout, alone)
        assert np.allclose(found, expected)


def _group_by_rank(ranks: Iterable[int], held: dict[str, dict[int, Array]]) -> Held:
    """Local arrays by rank and name, given by name and rank."""
    out: Held = {rank: {} for rank in ranks}
    for name, shards in held.items():
        for rank, array in shards.items():
            out[rank][name] = array
    return out
