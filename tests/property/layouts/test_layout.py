"""Layouts: one value, interned; what each rank holds; errors."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    NotationError,
    Partial,
    Replicate,
    Shard,
    ShardError,
    testing,
)

MESH = Mesh(dp=4, tp=2)


def test_scalars_and_one_rank() -> None:
    scalar = Layout((), MESH, "{sum: tp}")
    assert (scalar.ndim, scalar.text, scalar.local_shape(3), scalar.runs(3)) == (
        0,
        "{sum: tp}",
        (),
        (),
    )
    alone = Layout((), Mesh(), "")
    assert str(alone) == "float32[] scalar on one rank" and alone.text == ""
    assert Layout(5, Mesh(), "n").shape == (5,)
    assert not scalar.holes(0)


def test_looking_at_a_layout() -> None:
    layout = Layout((9, 4), MESH, "(tp n)=12 h {avg: dp}", dtype="torch.bfloat16")
    assert (layout.shape, layout.ndim, layout.dtype, layout.itemsize) == ((9, 4), 2, "bfloat16", 2)
    assert (layout.op, layout.partial, layout.free_axes) == ("avg", (("dp", "avg"),), ())
    assert (layout.local_shape(0), layout.local_shape(1)) == ((6, 4), (6, 4))
    assert [layout.holes(r) for r in (0, 1)] == [False, True]
    assert layout.indices(1)[0].tolist() == [6, 7, 8, -1, -1, -1]
    assert str(layout) == "bfloat16[9, 4] (tp n)=12 h {avg: dp} on dp=4 tp=2"
    assert (
        repr(layout)
        == "Layout((9, 4), Mesh(dp=4, tp=2), '(tp n)=12 h {avg: dp}', dtype='bfloat16')"
    )
    plain = Layout((9, 4), MESH, "(tp n) h")
    assert (plain.op, plain.partial, plain.free_axes, plain.dtype) == (None, (), ("dp",), "float32")
    assert plain.rules == {}


@given(testing.layouts())
def test_boxes_are_all_that_a_rank_holds(layout: Layout) -> None:
    for rank in layout.mesh.ranks:
        shape = layout.local_shape(rank)
        found = np.full((*shape, layout.ndim), -1)
        for here, there in layout.boxes(rank):
            local = tuple(slice(lo, hi) for lo, hi in here)
            assert (found[local] == -1).all() or not layout.ndim
            spans = [np.arange(lo, hi) for lo, hi in there]
            found[local] = np.stack(np.meshgrid(*spans, indexing="ij"), -1) if spans else 0
        held = np.stack(np.meshgrid(*layout.indices(rank), indexing="ij"), -1) if shape else found
        # An element whose index is -1 in any dimension is a hole.
        assert (found == np.where((held >= 0).all(-1, keepdims=True), held, -1)).all()


def test_boxes_of_a_scalar_and_of_nothing() -> None:
    assert Layout((), MESH, "").boxes(3) == (((), ()),)
    assert Layout((1, 4), Mesh(tp=2), "(tp n) h").boxes(1) == ()
    with pytest.raises(MeshError, match="rank 8 is not in"):
        Layout((9,), MESH, "n").boxes(8)


def test_shape_of_numpy_integers() -> None:
    layout = Layout(np.array([9, 4]), MESH, "n h")
    assert layout is Layout((9, 4), MESH, "n h") and all(type(n) is int for n in layout.shape)


def test_interned_and_forgotten() -> None:
    layout = Layout((977, 3), MESH, "(tp n) h")
    assert Layout((977, 3), MESH, "(tp n) h") is layout and layout == Layout(
        (977, 3), MESH, (Replicate(), Shard(0))
    )
    assert layout != Layout((977, 3), MESH, "(tp n) h", dtype="int8")
    assert len({layout, Layout((977, 3), MESH, "(tp n) h")}) == 1
    seen = weakref.ref(layout)
    del layout
    gc.collect()
    assert seen() is None or seen().shape == (977, 3)


def test_pickle_keeps_identity() -> None:
    layout = Layout((9, 4), MESH, "(2 tp n | dp n)=12 h {sum: }")
    assert pickle.loads(pickle.dumps(layout)) is layout


RANKS = "use one of its ranks, 0, 1, 2, 3, 4, 5, 6, 7"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: Layout((9,), (4, 2), "n"),
            LayoutError,
            "mesh is (4, 2); give a shardmath.Mesh, for example Mesh(dp=4, tp=2)",
        ),
        (
            lambda: Layout((9,), MESH, "n", reading="torch"),
            LayoutError,
            "reading='torch' is not known; use 'placement' or 'order'",
        ),
        (
            lambda: Layout((9, -1), MESH, "n h"),
            LayoutError,
            "shape (9, -1) has a size of -1; give sizes of 0 or more",
        ),
        (
            lambda: Layout((9, 1.0), MESH, "n h"),
            LayoutError,
            "a size of shape (9, 1.0) is 1.0; give an integer",
        ),
        (
            lambda: Layout((9,), MESH, "n", dtype="float"[:3]),
            LayoutError,
            "unknown dtype 'flo'; did you mean 'float64'?",
        ),
        (
            lambda: Layout((1 << 28, 1 << 27), MESH, "n h"),
            LayoutError,
            f"float32[268435456, 134217728] has more than {1 << 56} bytes; store it as several smaller tensors",
        ),
        (
            lambda: Layout((1, 1 << 27), MESH, {}, stored={0: 1 << 28}),
            LayoutError,
            f"float32[268435456, 134217728] has more than {1 << 56} bytes; store it as several smaller tensors",
        ),
        (
            lambda: Layout((9,), MESH, {"dp": Partial("sum"), "tp": Partial("max")}),
            LayoutError,
            (
                "Partial axes have different reductions, sum on dp, max on tp; give all the "
                "same reduction"
            ),
        ),
        (
            lambda: Layout((9,), MESH, "n").runs(8),
            MeshError,
            f"rank 8 is not in Mesh(dp=4, tp=2); {RANKS}",
        ),
        (lambda: Layout((9,), MESH, "n").runs("0"), MeshError, "rank is '0'; give an integer"),
        (
            lambda: Layout((9,), MESH, "n").local_shape(-1),
            MeshError,
            f"rank -1 is not in Mesh(dp=4, tp=2); {RANKS}",
        ),
        (
            lambda: Layout((9,), MESH, "n").indices(99),
            MeshError,
            f"rank 99 is not in Mesh(dp=4, tp=2); {RANKS}",
        ),
        (
            lambda: Layout((9,), MESH, "n").holes(99),
            MeshError,
            f"rank 99 is not in Mesh(dp=4, tp=2); {RANKS}",
        ),
    ],
)
def test_errors(make, kind, message: str, fails) -> None:
    fails(make, kind, message)


def test_all_errors_are_value_errors() -> None:
    for make in (
        lambda: Layout((9,), MESH, "(n ?)"),
        lambda: Mesh(a=0),
        lambda: Layout((9,), MESH, {"x": Shard(0)}),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            make()
        assert isinstance(caught.value, ShardError | NotationError)


def test_as_large_as_can_be() -> None:
    assert Layout((1 << 27, 1 << 27), MESH, "n h").local_shape(0) == (1 << 27, 1 << 27)
