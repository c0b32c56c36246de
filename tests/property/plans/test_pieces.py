"""Pieces: what is expanded together equals what is expanded one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, Table, Topology, Transfer, clear_caches, from_ranges, plan
from shardmath.plans.stretches import list_received, list_sent
from shardmath.testing.strategies import pairs, trees
from tests.property.drawn.spelled import transfers_of

Trees = tuple[dict[str, Layout], dict[str, Layout]]


def check(p: Plan) -> None:
    for rank in p.ranks:
        for listed, others in (
            (p.transfers(src=rank), list_sent),
            (p.transfers(dst=rank), list_received),
        ):
            found = list(listed)
            assert found == transfers_of(p, rank, others)
            assert all(type(t) is Transfer for t in found)


@given(pairs(), st.booleans())
def test_pieces_of_two_layouts(pair: tuple[Layout, Layout], near: bool) -> None:
    check(plan(*pair, topology=Topology(ranks_per_node=2) if near else None))


@given(trees())
def test_pieces_of_trees(tree: Trees) -> None:
    check(plan(*tree))


def test_boxes_that_are_cut() -> None:
    """Boxes of more than 64 KiB are divided between their rows, and a rank gets parts of many tensors."""
    src = {f"w{i}": Layout((1, 300, 201 + i), Mesh(dp=3), "k n h") for i in range(2)}
    other = Mesh(tp=2, ranks=[6, 7])
    dst = {name: Layout(w.shape, other, "k n (tp h)") for name, w in src.items()}
    p = plan(src, dst)
    check(p)
    assert any(t.shape[1] < 300 for t in p.transfers())


def test_shards_that_overlap() -> None:
    """A position that several parts hold lies at another place in each of them."""
    parts = tuple(from_ranges([(2 * i, 2 * i + 4)]) for i in range(3))
    src = Layout((8,), Mesh(x=3), {"x": Table(0, parts)})
    dst = Layout((8,), Mesh(x=2, ranks=[3, 4]), "(x n)")
    names = [f"w{i}" for i in range(6)]
    p = plan(dict.fromkeys(names, src), dict.fromkeys(names, dst))
    starts = {(t.src_rank, t.src_slices[0].start) for t in p.transfers()}
    assert {rank for rank, start in starts if not start} == {0, 1, 2}
    check(p)


def test_numbers_are_python_integers() -> None:
    src = Layout((40, 40), Mesh(dp=40), "(dp n) h")
    (first, *_), count = (
        list(plan(src, Layout((40, 40), Mesh(dp=40), "n (dp h)")).transfers(src=3)),
        0,
    )
    clear_caches()
    for part in (first.shape, (first.nbytes, first.addend, first.src_rank, first.dst_rank)):
        count += sum(type(x) is int for x in part)
    for box in (first.src_slices, first.dst_slices, first.global_slices):
        count += sum(type(x) is int for s in box for x in (s.start, s.stop))
    assert count == 2 + 4 + 3 * 4
