"""Stores: what real systems keep in one buffer, moved on views of the buffers and compared with plain numpy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, PlanError, Shard, StoreError, plan, simulate, testing, verify
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.layouts.edits import window
from shardmath.layouts.store import (
    Place,
    Store,
    View,
    check,
    flat_windows,
    local_name,
    local_tensors,
    views,
)

UNTOUCHED = -7.0


class Side:
    """One side of a move: windows by tensor name, and flat buffers by rank under one store."""

    def __init__(
        self,
        tensors: Mapping[str, Layout | tuple[Layout, ...]],
        store: Store,
        sizes: Mapping[str, int],
    ) -> None:
        self.tensors = tensors
        windows = {
            name: held if isinstance(held, tuple) else (held,) for name, held in tensors.items()
        }
        self.locals = {
            key: layout
            for name, held in windows.items()
            for key, layout in local_tensors(name, held)
        }
        self.store = store
        self.ranks = sorted({r for layout in self.locals.values() for r in layout.mesh.ranks})
        self.buffers = {
            r: {name: np.full(n, UNTOUCHED) for name, n in sizes.items()} for r in self.ranks
        }
        for rank in self.ranks:
            check(store, self.locals, rank)

    def views(self, rank: int) -> dict[str, np.ndarray]:
        return views(self.store, self.locals, rank, self.buffers[rank])


def move(src: Side, dst: Side, **how: bool) -> None:
    """Carry out the proved plan on views of the buffers, and see that simulate says the same."""
    p = plan(src.tensors, dst.tensors, **how)
    verify(p)
    held = {rank: src.views(rank) for rank in src.ranks}
    there = {rank: dst.views(rank) for rank in dst.ranks}
    for t in p.transfers():
        there[t.dst_rank][t.dst_tensor][t.dst_slices] = held[t.src_rank][t.src_tensor][t.src_slices]
    for rank, arrays in simulate(p, held).items():
        for key, array in arrays.items():
            own = np.ix_(*(np.flatnonzero(i >= 0) for i in dst.locals[key].indices(rank)))
            assert (there[rank][key][own] == array[own]).all()


def one_view(
    tensors: Mapping[str, Layout], buffer: str, offsets: Mapping[str, int] | None = None
) -> Store:
    """All tensors in one buffer of every rank, at the beginning or at these offsets."""
    return Store(
        {
            (name, r): View(buffer, (offsets or {}).get(name, 0))
            for name, x in tensors.items()
            for r in x.mesh.ranks
        }
    )


def numbered(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=float).reshape(shape)


# Padded vocabulary


def test_padded_vocabulary() -> None:
    vocab, h = 151936, 2
    mesh, engine = Mesh(tp=2), Mesh(tp=8, ranks=range(2, 10))
    held = {"embed": Layout((vocab, h), mesh, "(tp n)=152064 h")}
    wanted = {"embed": Layout((vocab, h), engine, "(tp n)=152576 h")}
    assert [held["embed"].local_shape(r) for r in mesh.ranks] == [(76032, h)] * 2
    assert [wanted["embed"].local_shape(r) for r in engine.ranks] == [(19072, h)] * 8
    src = Side(held, one_view(held, "e"), {"e": 76032 * h})
    dst = Side(wanted, one_view(wanted, "e"), {"e": 19072 * h})
    whole = numbered(vocab, h)
    padded = np.vstack((whole, np.full((152064 - vocab, h), 99.0)))
    for i, rank in enumerate(src.ranks):
        src.buffers[rank]["e"][:] = padded[i * 76032 : (i + 1) * 76032].ravel()
    move(src, dst)
    expected = np.vstack((whole, np.full((152576 - vocab, h), UNTOUCHED)))
    for i, rank in enumerate(dst.ranks):
        assert (
            dst.buffers[rank]["e"].reshape(-1, h) == expected[i * 19072 : (i + 1) * 19072]
        ).all()


# Megatron's interleaved QKV


class Attention:
    """`heads` query heads in `groups` groups of heads of size `size`, hidden size 2."""

    hidden = 2

    def __init__(self, heads: int, groups: int, size: int) -> None:
        self.heads, self.groups, self.size = heads, groups, size
        rows = {"q": heads * size, "k": groups * size, "v": groups * size}
        self.whole = {
            name: numbered(n, self.hidden, start=10**6 * i)
            for i, (name, n) in enumerate(rows.items())
        }
        self.rows = rows

    def interleaved(self) -> np.ndarray:
        """The fused matrix: per group its query heads, its key head, its value head."""
        q, k, v = (self.whole[name].reshape(self.groups, -1, self.hidden) for name in "qkv")
        return np.concatenate((q, k, v), axis=1).reshape(-1, self.hidden)

    def megatron(self, mesh: Mesh) -> dict[str, Layout]:
        """Three layouts of one buffer of contiguous raw rows, whose holes interlock."""
        each = {"q": self.heads // self.groups * self.size, "k": self.size, "v": self.size}
        out = {}
        for name in each:
            ranges = [
                (g * each[part], (g + 1) * each[part]) if part == name else each[part]
                for g in range(self.groups)
                for part in each
            ]
            shape = (self.rows[name], self.hidden)
            out[name] = Layout(shape, mesh, {"tp": Shard(0)}, stored={0: from_ranges(ranges)})
        return out

    def vllm(self, mesh: Mesh, tp: int) -> dict[str, Layout]:
        """Each rank's [q; k; v]: query heads by rank, key and value heads by groups of ranks where they are fewer."""
        kv = min(self.groups, tp)
        split = mesh.split("tp", kv=kv, rep=tp // kv)
        text = {"q": "(kv*rep n) h", "k": "(kv n) h", "v": "(kv n) h"}
        return {name: Layout((self.rows[name], self.hidden), split, text[name]) for name in text}


def megatron_side(model: Attention, mesh: Mesh) -> Side:
    tensors = model.megatron(mesh)
    rows = len(model.interleaved()) // mesh.size
    return Side(tensors, one_view(tensors, "qkv"), {"qkv": rows * model.hidden})


def vllm_side(model: Attention, mesh: Mesh) -> Side:
    tensors = model.vllm(mesh, mesh.size)
    counts = {name: x.local_shape(mesh.ranks[0])[0] * model.hidden for name, x in tensors.items()}
    offsets = {"q": 0, "k": counts["q"], "v": counts["q"] + counts["k"]}
    return Side(tensors, one_view(tensors, "qkv", offsets), {"qkv": sum(counts.values())})


def vllm_buffer(model: Attention, rank: int, tp: int) -> np.ndarray:
    """What vLLM's loader puts together: head index rank // (tp / groups) where groups < tp."""
    q = model.whole["q"].reshape(tp, -1, model.hidden)[rank]
    kv = min(model.groups, tp)
    k, v = (model.whole[name].reshape(kv, -1, model.hidden)[rank // (tp // kv)] for name in "kv")
    return np.vstack((q, k, v))


def test_super_120b_vector() -> None:
    """32 heads, 2 groups of 128, TP8: 576 raw rows a rank (Nemotron Super under Megatron's linear_qkv)."""
    model, mesh = Attention(32, 2, 128), Mesh(tp=8)
    held = model.megatron(mesh)
    rows = {r: {name: str(x.runs(r)[0]) for name, x in held.items()} for r in mesh.ranks}
    assert all(x.local_shape(r) == (576, 2) for x in held.values() for r in mesh.ranks)
    for r, start in ((0, 0), (1, 576), (2, 1152), (4, 2048), (5, 2624), (6, 3200)):
        assert rows[r] == {"q": f"[{start}:{start + 576}]", "k": "[-576]", "v": "[-576]"}
    assert rows[3] == {"q": "[1728:2048 -256]", "k": "[-320 0:128 -128]", "v": "[-448 0:128]"}
    assert rows[7] == {"q": "[3776:4096 -256]", "k": "[-320 128:256 -128]", "v": "[-448 128:256]"}


@pytest.mark.parametrize(
    ("heads", "groups", "size", "src_tp", "dst_tp"),
    [
        (32, 2, 128, 8, 8),
        (32, 2, 128, 8, 4),
        (32, 2, 128, 4, 2),
        (8, 4, 3, 2, 4),
        (8, 8, 2, 4, 2),
        (6, 2, 5, 5, 1),
    ],
)
def test_interleaved_qkv_to_vllm_and_back(
    heads: int, groups: int, size: int, src_tp: int, dst_tp: int
) -> None:
    model = Attention(heads, groups, size)
    trainer, engine = Mesh(tp=src_tp), Mesh(tp=dst_tp, ranks=range(src_tp, src_tp + dst_tp))
    src, dst, back = (
        megatron_side(model, trainer),
        vllm_side(model, engine),
        megatron_side(model, trainer),
    )
    fused = model.interleaved().reshape(src_tp, -1)
    for i, rank in enumerate(src.ranks):
        src.buffers[rank]["qkv"][:] = fused[i]
    move(src, dst)
    for i, rank in enumerate(dst.ranks):
        assert (
            dst.buffers[rank]["qkv"].reshape(-1, model.hidden) == vllm_buffer(model, i, dst_tp)
        ).all()
    move(dst, back)
    for i, rank in enumerate(back.ranks):
        assert (back.buffers[rank]["qkv"] == fused[i]).all()


# Gate and up projections in one buffer


@pytest.mark.parametrize(("rows", "src_tp", "dst_tp"), [(12, 2, 4), (12, 4, 3), (7, 2, 3)])
def test_gate_and_up(rows: int, src_tp: int, dst_tp: int) -> None:
    gate, up = numbered(rows, 3), numbered(rows, 3, start=1000)

    def side(mesh: Mesh) -> Side:
        tensors = {
            "gate": Layout((rows, 3), mesh, f"(2 tp n)=<0:{rows} -{rows}> h"),
            "up": Layout((rows, 3), mesh, f"(2 tp n)=<-{rows} 0:{rows}> h"),
        }
        most = max(tensors["up"].local_shape(r)[0] for r in mesh.ranks)
        return Side(tensors, one_view(tensors, "fc1"), {"fc1": most * 3})

    def buffer(i: int, tp: int) -> np.ndarray:
        step = -(-rows // tp)
        return np.vstack([x[i * step : (i + 1) * step] for x in (gate, up)])

    src, dst = side(Mesh(tp=src_tp)), side(Mesh(tp=dst_tp))
    for i, rank in enumerate(src.ranks):
        fused = buffer(i, src_tp).ravel()
        src.buffers[rank]["fc1"][: len(fused)] = fused
    move(src, dst)
    for i, rank in enumerate(dst.ranks):
        fused = buffer(i, dst_tp).ravel()
        assert (dst.buffers[rank]["fc1"][: len(fused)] == fused).all()
        assert (dst.buffers[rank]["fc1"][len(fused) :] == UNTOUCHED).all()


# Experts


@pytest.mark.parametrize("expert", range(5))
def test_one_expert_of_a_stack(expert: int) -> None:
    """As a tensor of its own, and as a window of the stack, to tensor-parallel shards of that expert alone."""
    experts = numbered(5, 4, 6)
    mesh = Mesh(ep=2)
    own = {"w": Layout((1, 4, 6), mesh, {"ep": Shard(0)}, stored={0: Runs([(expert, 0, 1)], 5)})}
    seen = {
        "w": window(Layout((5, 4, 6), mesh, "(ep n) i h"), ((expert, expert + 1), (0, 4), (0, 6)))
    }
    engine = Mesh(tp=2, ranks=[4, 5])
    wanted = {"w": Layout((1, 4, 6), engine, "e (tp i) h")}
    inside = {
        "w": window(Layout((5, 4, 6), engine, "e (tp i) h"), ((expert, expert + 1), (0, 4), (0, 6)))
    }
    for held, there, rows in ((own, wanted, 1), (seen, inside, 5)):
        src = Side(held, one_view(held, "stack"), {"stack": 3 * 24})
        for i, rank in enumerate(src.ranks):
            part = experts[3 * i : 3 * i + 3].ravel()
            src.buffers[rank]["stack"][: len(part)] = part
        dst = Side(there, one_view(there, "expert"), {"expert": rows * 12})
        move(src, dst, window=there is inside)
        for i, rank in enumerate(dst.ranks):
            expected = np.full((rows, 2, 6), UNTOUCHED)
            expected[expert if rows == 5 else 0] = experts[expert, 2 * i : 2 * i + 2]
            assert (dst.buffers[rank]["expert"] == expected.ravel()).all()


def test_all_experts_of_a_stack_together() -> None:
    experts = numbered(5, 4, 6)
    mesh = Mesh(ep=2)
    stacks = {
        f"w{e}": Layout((1, 4, 6), mesh, {"ep": Shard(0)}, stored={0: Runs([(e, 0, 1)], 5)})
        for e in range(5)
    }
    src = Side(stacks, one_view(stacks, "stack"), {"stack": 3 * 24})
    for i, rank in enumerate(src.ranks):
        src.buffers[rank]["stack"][: experts[3 * i : 3 * i + 3].size] = experts[
            3 * i : 3 * i + 3
        ].ravel()
    alone = {f"w{e}": Layout((1, 4, 6), Mesh(ranks=[9]), "e i h") for e in range(5)}
    dst = Side(alone, one_view(alone, "all", {f"w{e}": 24 * e for e in range(5)}), {"all": 120})
    move(src, dst)
    assert (dst.buffers[9]["all"] == experts.ravel()).all()


# Replicated key and value heads


@pytest.mark.parametrize(("kv", "rep"), [(1, 4), (2, 2), (4, 1)])
def test_replicated_kv_heads(kv: int, rep: int) -> None:
    heads = numbered(kv, 3)
    mesh = Mesh(tp=4, ranks=range(4, 8)).split("tp", kv=kv, rep=rep)
    held = {"k": Layout((kv, 3), Mesh(), "n h")}
    wanted = {"k": Layout((kv, 3), mesh, "(kv n) h")}
    src, dst = (
        Side(held, one_view(held, "k"), {"k": heads.size}),
        Side(wanted, one_view(wanted, "k"), {"k": 3}),
    )
    src.buffers[0]["k"][:] = heads.ravel()
    move(src, dst)
    assert [dst.buffers[4 + i]["k"].tolist() for i in range(4)] == [
        heads[i // rep].tolist() for i in range(4)
    ]


# Flat optimizer shards


@st.composite
def flat_cases(draw: st.DrawFn):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    total = int(np.prod(shape))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=2, max_size=2)))
    ends = [0, *cuts, total]
    return shape, dict(zip(draw(st.permutations(range(3))), itertools.pairwise(ends), strict=True))


@given(flat_cases(), st.data())
def test_flat_shards_to_shards_and_back(case, data: st.DataObject) -> None:
    shape, ranges = case
    whole = numbered(*shape)
    windows, store = flat_windows("w", shape, ranges, dtype="float64", buffer="flat")
    sizes = {"flat": max(hi - lo for lo, hi in ranges.values())}
    flat, back = Side({"w": windows}, store, sizes), Side({"w": windows}, store, sizes)
    for rank, (lo, hi) in ranges.items():
        if lo < hi:
            flat.buffers[rank]["flat"][: hi - lo] = whole.ravel()[lo:hi]
    layout = data.draw(testing.layouts(shape, overlap=False))
    most = max(int(np.prod(layout.local_shape(r))) for r in layout.mesh.ranks)
    shards = Side({"w": layout}, one_view({"w": layout}, "shard"), {"shard": most})
    move(flat, shards)
    for rank in layout.mesh.ranks:
        local = np.full(layout.local_shape(rank), UNTOUCHED)
        own = [np.flatnonzero(i >= 0) for i in layout.indices(rank)]
        local[np.ix_(*own)] = whole[np.ix_(*(i[i >= 0] for i in layout.indices(rank)))]
        assert (shards.buffers[rank]["shard"][: local.size] == local.ravel()).all()
    move(shards, back)
    for rank, (lo, hi) in ranges.items():
        if lo < hi:
            assert (back.buffers[rank]["flat"][: hi - lo] == whole.ravel()[lo:hi]).all()


def test_flat_windows_literals() -> None:
    windows, store = flat_windows("w", (4, 5), {7: (3, 12)})
    assert [w.text for w in windows] == [
        "(n)=<0:1> (h)=<3:5>",
        "(n)=<1:2> h",
        "(n)=<2:3> (h)=<0:2>",
    ]
    assert {w.mesh.ranks for w in windows} == {(7,)} and {w.dtype for w in windows} == {"float32"}
    assert store == Store(
        {("w[0]", 7): View("w", 0), ("w[1]", 7): View("w", 2), ("w[2]", 7): View("w", 7)}
    )
    alone, place = flat_windows("w", (4, 5), {0: (5, 15), 1: (3, 3)}, dtype="int8", buffer="b")
    assert [(w.text, w.dtype) for w in alone] == [("(n)=<1:3> h", "int8")]
    assert place == Store({("w", 0): View("b", 0)})
    assert flat_windows("w", (4, 5), {0: (2, 2)}) == ((), Store({}))
    with pytest.raises(PlanError, match=r"are not a range of shape \(4, 5\), which has 20"):
        flat_windows("w", (4, 5), {0: (3, 21)})


# Values and errors


def test_names_of_local_tensors() -> None:
    layout = Layout((4,), Mesh(), "n")
    assert local_name("w", 0, 1) == "w" and local_name("w", 1, 2) == "w[1]"
    assert list(local_tensors("w", (layout,))) == [("w", layout)]
    assert list(local_tensors("w", (layout, layout))) == [("w[0]", layout), ("w[1]", layout)]


def test_stores_are_values() -> None:
    entries = {("b", 0): View("x"), ("a", 1): View("y", 3), ("a", 0): View("y")}
    store = Store(entries)
    assert store == Store(reversed(list(entries.items()))) and hash(store) == hash(
        Store(entries.items())
    )
    assert [key for key, _ in store.entries] == [("a", 0), ("a", 1), ("b", 0)]


def test_places() -> None:
    layout = Layout((4, 6), Mesh(tp=2), "n (tp h)")
    store = Store({("w", 0): View("b", 5), ("w", 1): View("b", 1, (1, 4))})
    assert store.place("w", layout, 0) == Place("b", 5, (4, 3), (3, 1))
    assert store.place("w", layout, 1) == Place("b", 1, (4, 3), (1, 4))
    assert store.place("w", layout, 0).end == 17 and store.place("w", layout, 1).end == 13
    assert Place("b", 5, (), ()).end == 6 and Place("b", 5, (0, 3), (3, 1)).end == 5
    assert Place("b", 0, (3, 2), (10, 2)).end == 23


def test_views_write_the_buffer() -> None:
    layout = Layout((4, 6), Mesh(tp=2), "n (tp h)")
    store = Store({("w", 1): View("b", 1, (1, 4))})
    buffer = np.zeros(13, np.int16)
    view = views(store, {"w": layout, "other": Layout((1,), Mesh(), "n")}, 1, {"b": buffer})
    assert list(view) == ["w"]
    view["w"][2, 1] = 9
    assert buffer[1 + 2 + 4] == 9 and view["w"].dtype == np.int16 and (buffer != 0).sum() == 1
    scalar = views(
        Store({("s", 0): View("b", 3)}), {"s": Layout((), Mesh(), "")}, 0, {"b": buffer}
    )["s"]
    scalar[()] = 4
    assert buffer[3] == 4


ROW = Layout((4, 3), Mesh(ranks=[2]), "n h")
W = {"w": ROW}
BOTH = {"w": ROW, "x": ROW}


def told(offset: int = 0, strides: tuple[int, ...] | None = None) -> Store:
    return Store({("w", 2): View("b", offset, strides)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: check(
                Store({("w", 2): View("b", 0, (0, 1)), ("x", 2): View("b", 20)}), BOTH, 2
            ),
            "rank 2: 'w' and 'w' both lie at element 0 of 'b'; give them views that share no element",
        ),
        (
            lambda: Store([(("w", 2), View("a")), (("v", 2), View("a")), (("w", 2), View("b"))]),
            "local tensor 'w' of rank 2 has two views; give it one",
        ),
        (
            lambda: told().place("x", ROW, 2),
            (
                "the store has no view of local tensor 'x' of rank 2; add one to its 1, "
                "which are of 'w' of rank 2"
            ),
        ),
        (
            lambda: Store({}).place("x", ROW, 2),
            (
                "the store has no view of local tensor 'x' of rank 2; add one to its 0, "
                "which are of nothing"
            ),
        ),
        (
            lambda: told(0, (3,)).place("w", ROW, 2),
            (
                "View(buffer='b', offset=0, strides=(3,)) does not fit local tensor 'w' of "
                "shape (4, 3); give an offset >= 0 and 2 strides >= 0"
            ),
        ),
        (
            lambda: told(-1).place("w", ROW, 2),
            (
                "View(buffer='b', offset=-1, strides=None) does not fit local tensor 'w' of "
                "shape (4, 3); give an offset >= 0 and 2 strides >= 0"
            ),
        ),
        (
            lambda: told(9, (-3, 1)).place("w", ROW, 2),
            (
                "View(buffer='b', offset=9, strides=(-3, 1)) does not fit local tensor 'w' "
                "of shape (4, 3); give an offset >= 0 and 2 strides >= 0"
            ),
        ),
        (
            lambda: views(told(), W, 2, {"a": np.zeros(12), "c": np.zeros(1)}),
            "buffer 'b' of local tensor 'w' is not among buffers 'a', 'c'; add it",
        ),
        (
            lambda: views(told(), W, 2, {}),
            ("buffer 'b' of local tensor 'w' is not among buffers none; add it"),
        ),
        (
            lambda: views(told(1), W, 2, {"b": np.zeros(12)}),
            (
                "local tensor 'w' ends at element 13 of buffer 'b', which has shape (12,); "
                "give a flat buffer of 13 elements or more"
            ),
        ),
        (
            lambda: views(told(), W, 2, {"b": np.zeros((4, 3))}),
            (
                "local tensor 'w' ends at element 12 of buffer 'b', which has shape (4, 3); "
                "give a flat buffer of 12 elements or more"
            ),
        ),
        (
            lambda: check(Store({("w", 2): View("b"), ("x", 2): View("b", 11)}), BOTH, 2),
            "rank 2: 'x' and 'w' both lie at element 11 of 'b'; give them views that share no element",
        ),
        (
            lambda: check(Store({("w", 2): View("b", 0, (0, 1))}), W, 2),
            "rank 2: 'w' and 'w' both lie at element 0 of 'b'; give them views that share no element",
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, StoreError, message)


def test_what_fits_is_no_error() -> None:
    views(told(), W, 2, {"b": np.zeros(12)})
    check(Store({("w", 2): View("b"), ("x", 2): View("b", 12)}), BOTH, 2)
    check(Store({("w", 2): View("b", 12), ("x", 2): View("b")}), BOTH, 2)
    check(Store({("w", 2): View("b"), ("x", 2): View("c")}), BOTH, 2)
    check(Store({("w", 2): View("b", 0, (6, 1)), ("x", 2): View("b", 3, (6, 1))}), BOTH, 2)
    check(Store({}), W, 0)


def test_a_hole_may_lie_on_a_cell_and_a_cell_may_not(fails) -> None:
    fused = Attention(2, 1, 2).megatron(Mesh(tp=1))
    check(one_view(fused, "qkv"), fused, 0)
    part = {"q": fused["q"], "v": window(fused["q"], ((3, 4), (0, 2)))}
    message = (
        "rank 0: 'v' and 'q' both lie at element 6 of 'qkv'; give them views that share no element"
    )
    fails(lambda: check(one_view(part, "qkv"), part, 0), StoreError, message)
