"""Overlays against sets of elements."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, testing
from shardmath.base.arrays import ranges
from shardmath.layouts.algebra.overlay import Overlay, overlay, overlay_dimensions
from shardmath.layouts.algebra.partition import Partition, partition
from shardmath.layouts.algebra.runs import Runs, from_ranges, identity


def parts_of(*held: Runs) -> Partition:
    return Partition(("a",), held, np.arange(len(held)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_ranges(spans: list[tuple[int, int]]) -> None:
    starts, stops = (np.array([span[i] for span in spans], np.int64) for i in (0, 1))
    values, owner = ranges(starts, stops)
    expected = [(x, i) for i, (lo, hi) in enumerate(spans) for x in range(lo, hi)]
    assert list(zip(values.tolist(), owner.tolist(), strict=True)) == expected


@st.composite
def partitions(draw: st.DrawFn, overlap: bool) -> Partition:
    """Distinct parts of 0..11 in any order, with holes; disjoint unless `overlap`."""
    if overlap:
        held = draw(st.lists(testing.runs(most=12), min_size=1, max_size=4, unique=True))
        return parts_of(*held)
    owner = draw(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    order = draw(st.permutations(range(12)))
    held = [from_ranges([(i, i + 1) for i in order if owner[i] == p]) for p in range(4)]
    return parts_of(*dict.fromkeys(held))


def holders(held: Partition, g: int) -> tuple[int, ...]:
    """The parts that hold a position, ascending."""
    return tuple(p for p, runs in enumerate(held.parts) if g in runs.indices().tolist())


Pairs = st.booleans().flatmap(partitions)
FOUR = identity(4)


@given(Pairs, Pairs)
@example(
    parts_of(FOUR, from_ranges([(2, 4)])),
    parts_of(from_ranges([(1, 3)]), from_ranges([(3, 4), (0, 2)])),
)
def test_rows_are_what_both_hold(source: Partition, target: Partition) -> None:
    """Every position that both sides hold is in one row, of the pair of those who hold it, at the place they say."""
    over = overlay(source, target)
    found: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for pair, (k, g) in enumerate(
        zip(over.pair_key.tolist(), over.pair_goal.tolist(), strict=True)
    ):
        key, goal = over.keys[k], over.goals[g]
        for r in range(int(over.first[pair]), int(over.first[pair + 1])):
            for i, x in enumerate(range(int(over.start[r]), int(over.start[r] + over.size[r]))):
                assert x not in found
                found[x] = key, goal
                assert all(
                    source.parts[p].indices()[over.src[r, m] + i] == x for m, p in enumerate(key)
                )
                assert all(
                    target.parts[p].indices()[over.dst[r, m] + i] == x for m, p in enumerate(goal)
                )
    both = {x: (holders(source, x), holders(target, x)) for x in range(12)}
    assert found == {x: ends for x, ends in both.items() if all(ends)}


@given(Pairs, Pairs)
def test_tables_fit_each_other(source: Partition, target: Partition) -> None:
    over = overlay(source, target)
    assert (
        over.first[0] == 0 and (np.diff(over.first) > 0).all() and over.first[-1] == len(over.start)
    )
    assert (
        len(over.start) == len(over.size) == len(over.dst) == len(over.src)
        and (over.size > 0).all()
    )
    sizes = [int(over.size[a:b].sum()) for a, b in itertools.pairwise(over.first.tolist())]
    assert over.pair_size.tolist() == sizes
    pairs = list(zip(over.pair_key.tolist(), over.pair_goal.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    for sets in (over.keys, over.goals):
        assert len(set(sets)) == len(sets) and all(
            parts == tuple(sorted(set(parts))) for parts in sets
        )
    for a, b in itertools.pairwise(over.first.tolist()):
        assert (np.diff(over.dst[a:b, 0]) > 0).all()


@given(Pairs, Pairs)
def test_transposed(source: Partition, target: Partition) -> None:
    """Sides change places: the same rows."""
    over, back = overlay(source, target), overlay(target, source)
    assert (over.keys, over.goals) == (back.goals, back.keys)
    assert sorted(rows(over)) == sorted(
        (start, size, src, dst) for start, size, dst, src in rows(back)
    )


def rows(over: Overlay) -> list[tuple[int, ...]]:
    """(global start, size, destination start, source start in the first parts) of every row."""
    return list(
        zip(
            *(x.tolist() for x in (over.start, over.size, over.dst[:, 0], over.src[:, 0])),
            strict=True,
        )
    )


def test_rows_are_as_long_as_they_can_be() -> None:
    tp8, tp6 = (
        parts_of(*(from_ranges([(i * s, i * s + s)]) for i in range(24 // s))) for s in (3, 4)
    )
    assert max(np.bincount(overlay(tp8, tp6).pair_goal)) == 2
    assert len(overlay(tp8, tp6).size) == 12
    one = overlay(parts_of(from_ranges([(2, 6), (0, 2)])), parts_of(identity(6)))
    assert rows(one) == [(0, 2, 0, 4), (2, 4, 2, 0)]


def test_rows_of_a_pair_are_in_order_of_the_destination() -> None:
    one = overlay(parts_of(identity(6)), parts_of(from_ranges([(4, 6), 1, (0, 3)])))
    assert rows(one) == [(4, 2, 0, 4), (0, 3, 3, 0)]


def test_overlapping_parts_are_cut_into_atoms() -> None:
    """At the source they are keys, at the destination goals."""
    both, whole = parts_of(from_ranges([(0, 4)]), from_ranges([(2, 6)])), parts_of(identity(6))
    over = overlay(both, whole)
    assert (over.keys, over.goals) == (((0,), (0, 1), (1,)), ((0,),))
    assert over.pair_size.tolist() == [2, 2, 2]
    assert over.src.tolist() == [[0, -1], [2, 0], [2, -1]] and over.dst.tolist() == [[0], [2], [4]]
    back = overlay(whole, both)
    assert (back.keys, back.goals) == (((0,),), ((0,), (0, 1), (1,)))
    assert back.dst.tolist() == [[0, -1], [2, 0], [2, -1]] and back.src.tolist() == [[0], [2], [4]]


def test_atoms_of_one_set_are_one_key() -> None:
    """Positions 0:1 and 5:6 have the same two holders."""
    over = overlay(parts_of(identity(6), from_ranges([(5, 6), (0, 1)])), parts_of(identity(6)))
    assert over.keys == ((0, 1), (0,))
    assert over.pair_size.tolist() == [2, 4] and over.first.tolist() == [0, 2, 3]
    assert over.src.tolist() == [[0, 1], [5, 0], [1, -1]]


def test_parts_that_touch_do_not_overlap() -> None:
    over = overlay(parts_of(from_ranges([(0, 2)]), from_ranges([(2, 4)])), parts_of(identity(4)))
    assert over.keys == ((0,), (1,)) and over.src.shape == (2, 1)


def test_nothing_in_common() -> None:
    over = overlay(parts_of(from_ranges([(0, 2)])), parts_of(from_ranges([(2, 4)])))
    assert len(over.pair_key) == 0 and over.first.tolist() == [0]
    empty = overlay(parts_of(Runs()), parts_of(Runs()))
    assert len(empty.pair_key) == 0 and empty.keys == empty.goals == ((0,),)


def test_overlays_of_dimensions_are_made_once() -> None:
    a, b = Layout((6, 6), Mesh(tp=2), "(tp n) m"), Layout((6, 6), Mesh(tp=3), "(tp n) m")
    over = overlay_dimensions(a.dims[0], b.dims[0])
    assert over is overlay_dimensions(
        Layout((6,), Mesh(tp=2, ranks=(8, 9)), "(tp n)").dims[0], b.dims[0]
    )
    assert over.source is partition(a.dims[0]) and over.target is partition(b.dims[0])
    assert overlay_dimensions(b.dims[0], a.dims[0]) is not over
