"""Plans: literal transfers, names and windows, digests, loads, errors."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Layout,
    Mesh,
    PlanError,
    Shard,
    StridedShard,
    Topology,
    Transfer,
    adjoint,
    clear_caches,
    plan,
    testing,
    without,
)
from shardmath.layouts.edits import relabeled, window

TP2, TP4 = Mesh(tp=2), Mesh(tp=4, ranks=range(4, 8))


def arrows(p) -> list[str]:
    return [str(t) for t in p.transfers()]


def test_column_to_row() -> None:
    p = plan(Layout((4, 2), TP2, "(tp n) h"), Layout((4, 2), TP2, "n (tp h)"))
    assert arrows(p) == [
        "0 -> 0 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B",
        "0 -> 1 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B",
        "1 -> 1 copy [2:4, 1:2] of [0:2, 1:2] to [2:4, 0:1], 8 B",
        "1 -> 0 copy [2:4, 0:1] of [0:2, 0:1] to [2:4, 0:1], 8 B",
    ]
    assert p.sent_bytes() == p.received_bytes() == {0: 8, 1: 8}


def test_strided_shards_to_tensor_parallel() -> None:
    mesh = Mesh(dp=2, tp=2)
    src = Layout((8,), mesh, (StridedShard(0, 2), Shard(0)))
    p = plan(src, Layout((8,), TP4, "(tp n)"))
    assert arrows(p) == [
        "0 -> 4 copy [0:2] of [0:2] to [0:2], 8 B",
        "1 -> 6 copy [4:6] of [0:2] to [0:2], 8 B",
        "2 -> 5 copy [2:4] of [0:2] to [0:2], 8 B",
        "3 -> 7 copy [6:8] of [0:2] to [0:2], 8 B",
    ]
    assert p.sent_bytes() == {**dict.fromkeys(range(4), 8), **dict.fromkeys(range(4, 8), 0)}
    assert p.received_bytes() == {**dict.fromkeys(range(4), 0), **dict.fromkeys(range(4, 8), 8)}


def test_all_reduce() -> None:
    p = plan(Layout((2,), TP2, "n {sum: tp}"), Layout((2,), TP2, "n"))
    assert arrows(p) == [
        "0 -> 0 copy [0:2] of [0:2] to [0:2], 8 B",
        "0 -> 1 copy [0:2] of [0:2] to [0:2], 8 B",
        "1 -> 1 sum [0:2] of [0:2] to [0:2], 8 B",
        "1 -> 0 sum [0:2] of [0:2] to [0:2], 8 B",
    ]
    assert [t.addend for t in p.transfers()] == [0, 0, 1, 1]


def test_a_transfer() -> None:
    (t,) = plan(
        {"w": Layout((2, 3), Mesh(), "n h", dtype="int8")},
        {"w": Layout((2, 3), Mesh(ranks=[4]), "n h", dtype="int8")},
    ).transfers()
    box = (slice(0, 2), slice(0, 3))
    assert t == Transfer("w", 0, 4, "copy", "w", box, "w", box, (2, 3), 6, box, 0)
    assert str(t) == "w: 0 -> 4 copy [0:2, 0:3] of [0:2, 0:3] to [0:2, 0:3], 6 B"
    assert Transfer("w", 0, 4, "copy", "w", box, "w", box, (2, 3), 6, box).addend == 0
    (scalar,) = plan(
        Layout((), Mesh(), "", dtype="float64"), Layout((), Mesh(ranks=[1]), "", dtype="float64")
    ).transfers()
    assert (
        scalar.shape,
        scalar.src_slices,
        scalar.dst_slices,
        scalar.global_slices,
        scalar.nbytes,
    ) == (
        (),
        (),
        (),
        (),
        8,
    )
    assert str(scalar) == "0 -> 1 copy [] of [] to [], 8 B"


def test_local_names_of_windows() -> None:
    whole = Layout((4,), TP2, "(tp n)")
    parts = (window(whole, ((0, 1),)), window(whole, ((1, 4),)))
    other = Layout((4,), Mesh(ranks=[9]), "n")
    there = (window(other, ((0, 3),)), window(other, ((3, 4),)))
    p = plan({"w": parts}, {"w": there})
    named = {
        (t.src_tensor, t.src_rank, t.dst_tensor, t.global_slices[0].start, t.shape)
        for t in p.transfers()
    }
    assert named == {
        ("w[0]", 0, "w[0]", 0, (1,)),
        ("w[1]", 0, "w[0]", 1, (1,)),
        ("w[1]", 1, "w[0]", 2, (1,)),
        ("w[1]", 1, "w[1]", 3, (1,)),
    }
    alone = plan(parts, whole)
    assert {t.src_tensor for t in alone.transfers()} == {"[0]", "[1]"} and not alone.is_tree
    assert set(p.src) == {"w"} and p.is_tree and p.src["w"] == parts and p.dst["w"] == there


def test_who_asks_for_transfers() -> None:
    p = plan(Layout((8,), TP2, "(tp n)"), Layout((8,), TP4, "(tp n)"))
    assert [(t.src_rank, t.dst_rank) for t in p.transfers()] == [(0, 4), (0, 5), (1, 6), (1, 7)]
    assert [(t.src_rank, t.dst_rank) for t in p.transfers(src=1)] == [(1, 6), (1, 7)]
    assert [(t.src_rank, t.dst_rank) for t in p.transfers(dst=5)] == [(0, 5)]
    assert [(t.src_rank, t.dst_rank) for t in p.transfers(src=0, dst=5)] == [(0, 5)]
    assert [(t.src_rank, t.dst_rank) for t in p.transfers(src=0, dst=6)] == []
    assert [
        (t.src_rank, t.dst_rank)
        for t in plan(Layout((8,), TP4, "(tp n)"), Layout((8,), TP2, "(tp n)")).transfers(dst=0)
    ] == [(4, 0), (5, 0)]
    assert (p.src_ranks, p.dst_ranks, p.ranks) == ((0, 1), (4, 5, 6, 7), (0, 1, 4, 5, 6, 7))


def test_ranks_of_a_tree_are_of_all_its_tensors() -> None:
    src = {"a": Layout((2,), Mesh(ranks=[5]), "n"), "b": Layout((2,), Mesh(ranks=[3]), "n")}
    dst = {"a": Layout((2,), Mesh(ranks=[3]), "n"), "b": Layout((2,), Mesh(ranks=[1]), "n")}
    p = plan(src, dst)
    assert (p.src_ranks, p.dst_ranks, p.ranks) == ((3, 5), (1, 3), (1, 3, 5))
    assert p.sent_bytes() == {1: 0, 3: 8, 5: 8} and p.received_bytes() == {1: 8, 3: 8, 5: 0}


def test_receivers_that_hold_it_copy_locally() -> None:
    """Rank 1 has what it needs; rank 2 asks the two holders."""
    src, dst = Layout((4,), Mesh(a=2), "n"), Layout((4,), Mesh(b=2, ranks=(1, 2)), "n")
    assert [(t.src_rank, t.dst_rank) for t in plan(src, dst).transfers()] == [(1, 1), (1, 2)]


def test_fill_and_divisor() -> None:
    def of(src: str, dst: str):
        p = plan({"w": Layout((4,), TP2, src)}, {"w": Layout((4,), TP4, dst)})
        return repr(p.fill("w")), p.divisor("w")

    assert of("(tp n)", "n") == ("None", 1)
    assert of("n", "n {sum: tp}") == ("-0.0", 1)
    assert of("n", "n {product: tp}") == ("1", 1)
    assert of("n {avg: tp}", "n") == ("None", 2)
    assert of("n", "n {avg: tp}") == ("None", 1)


# Values


def test_equal_plans() -> None:
    a, b = Layout((8,), TP2, "(tp n)"), Layout((8,), TP4, "(tp n)")
    p, q = plan(a, b), plan(a, b)
    assert p == q and hash(p) == hash(q) == hash(p.digest) and len({p, q}) == 1
    assert p != plan(b, a) and p != "p" and p != p.digest
    assert repr(p) == f"<plan of 1 tensor, 2 -> 4 ranks, {p.digest[:12]}>"
    assert len(p.digest) == 64 and set(p.digest) <= set("0123456789abcdef")


A, B = Layout((8, 2), TP2, "(tp n) h"), Layout((8, 2), TP4, "(tp n) h")


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"w": A}, {"w": B}),
        ({"v": A, "w": A}, {"v": B, "w": B}),
        ({"v": A}, {"v": B}),
        ({"w": B}, {"w": A}),
        (
            {"w": Layout((8, 2), TP2, "(tp n) h", dtype="int8")},
            {"w": Layout((8, 2), TP4, "(tp n) h", dtype="int8")},
        ),
        ({"w": Layout((8, 3), TP2, "(tp n) h")}, {"w": Layout((8, 3), TP4, "(tp n) h")}),
        ({"w": A}, {"w": Layout((8, 2), TP4, "n h")}),
        ({"w": A}, {"w": Layout((8, 2), TP4, "(tp n)=9 h")}),
        ({"w": Layout((8, 2), TP2, "(n tp) h")}, {"w": B}),
        ({"w": Layout((8, 2), Mesh(tp=2, ranks=(1, 0)), "(tp n) h")}, {"w": B}),
        ({"w": Layout((8, 2), TP2, "n h {sum: tp}")}, {"w": B}),
        ({"w": Layout((8, 2), TP2, "n h {max: tp}")}, {"w": B}),
        ({"w": Layout((8, 2), Mesh(tp=2, ranks=(1, 0)), "n h {max: tp}")}, {"w": B}),
        ({"w": (window(A, ((0, 8), (0, 1))), window(A, ((0, 8), (1, 2))))}, {"w": B}),
    ],
)
def test_digests_differ_where_plans_do(src, dst) -> None:
    reference = plan({"w": A}, {"w": B})
    assert (plan(src, dst) == reference) == ((src, dst) == ({"w": A}, {"w": B}))
    assert (
        plan(src, dst).digest
        == plan(dict(reversed(src.items())), dict(reversed(dst.items()))).digest
    )


@given(testing.pairs())
def test_digests_of_fresh_layouts_repeat(pair: tuple[Layout, ...]) -> None:
    a, b = pair
    assert plan(a, b).digest == plan(a, b).digest
    moved = plan(*(relabeled(x, {r: r + 100 for r in x.mesh.ranks}) for x in pair))
    assert (moved.digest == plan(a, b).digest) is False


def test_order_of_names_is_not_identity() -> None:
    names = ["b", "a", "c"]
    p = plan(dict.fromkeys(names, A), dict.fromkeys(names, B))
    q = plan(dict.fromkeys(sorted(names), A), dict.fromkeys(reversed(names), B))
    assert p == q and list(p.transfers()) == list(q.transfers()) and list(p.src) == ["a", "b", "c"]


def test_tensors_that_move_alike_share_a_template() -> None:
    names = [f"w{i}" for i in range(50)]
    p = plan(dict.fromkeys(names, A) | {"x": B}, dict.fromkeys(names, B) | {"x": A})
    assert [len(b.names) for b in p.batches] == [50, 1]
    assert len(list(p.transfers())) == 50 * 4 + 4


def test_nothing_to_do() -> None:
    p = plan({}, {})
    assert (list(p.transfers()), p.ranks, p.sent_bytes(), p.received_bytes()) == ([], (), {}, {})
    empty = plan(Layout((0, 3), TP2, "(tp n) h"), Layout((0, 3), TP4, "n h"))
    assert list(empty.transfers()) == [] and set(empty.received_bytes().values()) == {0}


def test_more_ranks_than_elements() -> None:
    p = plan(Layout((2,), Mesh(a=5), "(a n)"), Layout((2,), Mesh(b=7), "(b n)"))
    assert [(t.src_rank, t.dst_rank) for t in p.transfers()] == [(0, 0), (1, 1)]


def test_loads_leave_local_copies_out() -> None:
    a, b = Layout((1000, 64), Mesh(a=2), "n h"), Layout((1000, 64), Mesh(b=3), "n h")
    p = plan({"v": a, "w": a}, {"v": b, "w": b})
    nbytes = 1000 * 64 * 4
    assert p.received_bytes() == {0: 0, 1: 0, 2: 2 * nbytes}
    assert p.sent_bytes() == {0: nbytes, 1: nbytes, 2: 0}
    local = [t for t in p.transfers() if t.src_rank == t.dst_rank]
    assert len(local) == 4 and all(t.nbytes == nbytes for t in local)


def test_transfers_inside_a_line_of_many_tensors() -> None:
    """Five tensors, three holders: cuts fall inside tensors, at rows."""
    a, b = Layout((100, 256), Mesh(a=3), "n h"), Layout((100, 256), Mesh(ranks=[9]), "n h")
    names = "vwxyz"
    p = plan(dict.fromkeys(names, a), dict.fromkeys(names, b))
    rows = [
        (t.src_rank, t.tensor, t.global_slices[0].start, t.global_slices[0].stop)
        for t in p.transfers()
    ]
    assert rows == [
        (0, "v", 0, 100),
        (0, "w", 0, 66),
        (1, "w", 66, 100),
        (1, "x", 0, 100),
        (1, "y", 0, 33),
        (2, "y", 33, 100),
        (2, "z", 0, 100),
    ]
    assert rows == [
        (t.src_rank, t.tensor, t.global_slices[0].start, t.global_slices[0].stop)
        for t in p.transfers(dst=9)
    ]
    assert all(t.src_slices == t.dst_slices == t.global_slices for t in p.transfers())


# Errors


def halves(layout: Layout) -> tuple[Layout, ...]:
    return tuple(window(layout, ((lo, lo + 4), (0, 2))) for lo in (0, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: plan({"a": A, "b": A}, {"b": B, "c": B}),
            (
                "names of tensors differ: only the source has ['a']; only the destination "
                "has ['c']; give both sides the same names"
            ),
        ),
        (
            lambda: plan({"a": A}, {}),
            ("names of tensors differ: only the source has ['a']; give both sides the same names"),
        ),
        (
            lambda: plan({}, {f"w{i}": A for i in range(10)}),
            f"names of tensors differ: only the destination has {[f'w{i}' for i in range(8)]} and 2 more; "
            "give both sides the same names",
        ),
        (
            lambda: plan({"w": A}, {"w": Layout((8, 3), TP4, "n h")}),
            (
                "tensor 'w' is float32[8, 2] at the source, but float32[8, 3] at the "
                "destination; give both sides and all windows one shape and dtype"
            ),
        ),
        (
            lambda: plan(A, Layout((8, 2), TP4, "n h", dtype="int8")),
            (
                "the tensor is float32[8, 2] at the source, but int8[8, 2] at the "
                "destination; give both sides and all windows one shape and dtype; to cast "
                "it on the way, plan what transformed(src, dst, {'': "
                "transforms.Cast('int8')}) gives"
            ),
        ),
        (
            lambda: plan((window(A, ((0, 1), (0, 2))), Layout((8,), TP2, "n")), A),
            (
                "the tensor is float32[8, 2] at the source, but float32[8] in another source "
                "window; give both sides and all windows one shape and dtype"
            ),
        ),
        (lambda: plan({3: A}, {3: B}), "tensor name 3 is not a str; use a str as its name"),
        (
            lambda: plan({"w": halves(A), "w[1]": A}, {"w": B, "w[1]": B}),
            "window 'w[1]' of tensor 'w' has the name of another tensor; rename that tensor",
        ),
        (
            lambda: plan({"w": A, "w[0]": A}, {"w": halves(B), "w[0]": B}),
            "window 'w[0]' of tensor 'w' has the name of another tensor; rename that tensor",
        ),
        (
            lambda: plan({"w": ()}, {"w": A}),
            "tensor 'w' is (); give a Layout or a tuple of Layouts",
        ),
        (
            lambda: plan({"w": A}, {"w": "n h"}),
            "tensor 'w' is 'n h'; give a Layout or a tuple of Layouts",
        ),
        (
            lambda: plan({"w": (A, None)}, {"w": A}),
            f"tensor 'w' is ({A!r}, None); give a Layout or a tuple of Layouts",
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, PlanError, message)


def test_windows_have_to_be_partial_alike(fails) -> None:
    summed = Layout((8,), TP2, "n {sum: tp}")
    parts = (window(summed, ((0, 4),)), window(Layout((8,), TP2, "n"), ((4, 8),)))
    whole = Layout((8,), TP4, "n")
    fails(
        lambda: plan({"w": parts}, {"w": whole}),
        PlanError,
        f"tensor 'w': windows {parts[1]} and {parts[0]} to {whole} and {whole} are Partial in different ways; "
        "give all windows of a side the same Partial axes",
    )
    fails(
        lambda: plan({"w": whole}, {"w": parts}),
        PlanError,
        f"tensor 'w': windows {whole} and {whole} to {parts[1]} and {parts[0]} are Partial in different ways; "
        "give all windows of a side the same Partial axes",
    )
    plan({"w": (parts[0], window(summed, ((4, 8),)))}, {"w": whole})


def test_loads_are_python_integers() -> None:
    p = plan(A, B)
    for loads in (p.sent_bytes(), p.received_bytes()):
        assert all(type(x) is int for x in itertools.chain(loads, loads.values()))
    t = next(iter(p.transfers()))
    flat = [t.src_rank, t.nbytes, *t.shape, *(x for s in t.src_slices for x in (s.start, s.stop))]
    assert all(type(x) is int for x in flat) and not any(isinstance(x, np.integer) for x in flat)


def test_the_last_plan_is_kept_as_long_as_its_caller_keeps_it() -> None:
    mesh, other = Mesh(tp=2), Mesh(tp=2, ranks=[2, 3])
    src = {name: Layout((4, 2), mesh, "(tp n) h") for name in "ab"}
    dst = {name: Layout((4, 2), other, "n (tp h)") for name in "ab"}
    first = plan(src, dst)
    assert plan(dict(src), dst) is first
    topology = Topology(ranks_per_node=2)
    assert plan(src, dst, topology=topology) is not first
    assert plan(src, dst) is not first  # only the last call counts
    kept = plan(src, dst)
    src["b"] = Layout((4, 2), mesh, "n (tp h)")
    changed = plan(src, dst)
    assert changed is not kept and changed != kept
    clear_caches()
    assert plan(src, dst) is not changed
    alone = plan(src["a"], dst["a"])
    gone = weakref.ref(alone)
    assert plan(src["a"], dst["a"]) is alone
    del alone
    gc.collect()
    assert gone() is None


def test_what_only_seems_to_be_the_last_plan_is_planned_anew() -> None:
    """Arguments are compared as objects: an array has no truth, and windows may have other numbers."""
    halves = tuple(Layout((8,), Mesh(ranks=[r]), f"(n)=<{4 * r}:{4 * r + 4}>") for r in (0, 1))
    whole = Layout((8,), Mesh(tp=2, ranks=[8, 9]), "(tp n)")
    kept = plan({"w": whole}, {"w": halves})
    for wrong in (np.zeros(8), {"w": np.zeros(8)}):
        with pytest.raises(PlanError):
            plan(wrong, {"w": halves})
    assert plan({"w": whole}, {"w": halves}) is kept
    left = without(kept, [0], window=True)
    numbered = plan({"w": whole}, {"w": left.dst["w"]}, window=True)
    plain = plan({"w": whole}, {"w": tuple(left.dst["w"])}, window=True)
    assert numbered.dst["w"].local_names("w") == ["w[1]"]
    assert plain.dst["w"].local_names("w") == ["w"]
    assert plan({}, {}) == plan({}, {}) != plan({"w": whole}, {"w": whole})


def test_the_mappings_of_a_plan_cannot_be_changed() -> None:
    """A plan that is made later may share them. Copies and pickles are plans as well."""
    src = {name: Layout((8, 2), TP2, "(tp n) h") for name in "ab"}
    copies = Mesh(dp=2, tp=2, ranks=range(4, 8))
    dst = {name: Layout((8, 2), copies, "n (tp h)") for name in "ab"}
    made = plan(src, dst)
    for one in (made, without(made, [4, 5]), adjoint(made)):
        for value in (one, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            for by_name in (value.src, value.dst, value.rules):
                with pytest.raises(TypeError, match="does not support item assignment"):
                    by_name["c"] = by_name["a"]
                with pytest.raises(AttributeError, match="no attribute 'clear'"):
                    by_name.clear()
            assert value == one
            assert list(value.transfers()) == list(one.transfers())
