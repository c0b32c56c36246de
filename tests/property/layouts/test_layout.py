"""Layouts: three spellings, two readings, equality, what ranks hold, windows and slices, errors."""

from __future__ import annotations

import gc
import itertools
import math
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Balanced,
    BlockCyclic,
    Layout,
    LayoutError,
    Mesh,
    MeshError,
    NotationError,
    Packed,
    Partial,
    PlacementError,
    Ragged,
    Replicate,
    Runs,
    Shard,
    ShardError,
    StridedShard,
    equivalent,
    testing,
)
from shardmath.algebra.runs import from_ranges
from shardmath.layouts.layout import (
    cast,
    holdings_digest,
    relabelled,
    repartialed,
    sliced,
    transposed,
    window,
)

MESH = Mesh(dp=4, tp=2)


def held(layout: Layout) -> list[list[list[int]]]:
    return [[i.tolist() for i in layout.indices(r)] for r in layout.mesh.ranks]


@pytest.mark.parametrize(
    ("text", "placements", "mapping"),
    [
        ("(tp dp n) h", None, {"tp": Shard(0), "dp": Shard(0)}),
        ("(dp tp n) h", (Shard(0), Shard(0)), {"dp": Shard(0), "tp": Shard(0)}),
        ("(dp n) (tp h)", (Shard(0), Shard(1)), {"tp": Shard(1), "dp": Shard(0)}),
        (
            "(4 dp n | tp n) h",
            (StridedShard(0, 4), Shard(0)),
            {"dp": StridedShard(-2, 4), "tp": Shard(-2)},
        ),
        ("n (tp~ h)", (Replicate(), Balanced(-1)), {"tp": Balanced(1)}),
        ("(dp*tp n) h", None, {("dp", "tp"): Shard(0)}),
        ("(tp*dp n) h", None, {("tp", "dp"): Shard(0)}),
        (
            "(n tp 2) h {sum: dp}",
            (Partial(), BlockCyclic(0, 2)),
            {"dp": Partial("sum"), "tp": BlockCyclic(0, 2)},
        ),
        ("n h {avg: dp tp}", (Partial("avg"), Partial("avg")), {("dp", "tp"): Partial("avg")}),
        ("(tp[7 2] n) h", (Replicate(), Ragged(0, (7, 2))), {"tp": Ragged(0, (7, 2))}),
        ("([4 4 1] tp n) h", (Replicate(), Packed(0, (4, 4, 1))), {"tp": Packed(0, (4, 4, 1))}),
        ("n h", (Replicate(), Replicate()), {}),
    ],
)
def test_three_spellings_are_one_value(text: str, placements, mapping) -> None:
    written = Layout((9, 4), MESH, text)
    assert Layout((9, 4), MESH, mapping) is written
    assert placements is None or Layout((9, 4), MESH, placements) is written
    assert placements is None or Layout([9, 4], MESH, list(placements)) is written
    assert written.text == text


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


def test_shape_of_numpy_integers() -> None:
    layout = Layout(np.array([9, 4]), MESH, "n h")
    assert layout is Layout((9, 4), MESH, "n h") and all(type(n) is int for n in layout.shape)


def test_stored_in_placements_and_in_text() -> None:
    assert Layout((9, 4), MESH, {"tp": Shard(0)}, stored={0: 12}) is Layout(
        (9, 4), MESH, "(tp n)=12 h"
    )
    assert Layout((9, 4), MESH, {"tp": Shard(0)}, stored={-2: 12}) is Layout(
        (9, 4), MESH, "(tp n)=12 h"
    )
    runs = from_ranges([(4, 9), 2, (0, 4)])
    assert Layout((9, 4), MESH, {"tp": Shard(0)}, stored={0: runs}) is Layout(
        (9, 4), MESH, "(tp n)=<4:9 -2 0:4> h"
    )
    assert Layout((9, 4), MESH, {}, stored={1: 4}) is Layout((9, 4), MESH, "n h")
    assert Layout((9, 4), MESH, "n h", stored={}) is Layout((9, 4), MESH, "n h")


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


# The two readings


def test_the_two_readings_differ_where_sizes_do_not_divide() -> None:
    spec = (StridedShard(0, 2), Shard(0))
    order = Layout((9, 4), MESH, spec, reading="order")
    written = Layout((9, 4), MESH, spec)
    assert order is Layout((9, 4), MESH, "(tp dp n) h") and written is Layout(
        (9, 4), MESH, "(2 dp n | tp n) h"
    )
    assert not equivalent(order, written)
    even = [Layout((16, 4), MESH, spec, reading=r) for r in ("order", "placement")]
    assert equivalent(*even) and even[0] != even[1]


ORDERS = list(itertools.permutations("xyz"))


@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 3), repeat=3)), ids=str)
def test_every_order_is_decoded(sizes: tuple[int, ...]) -> None:
    """The split factor of each axis is the product of the axes before it in the order that come later in the mesh."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=True)))
    for order in ORDERS:
        factors = {
            a: math.prod(mesh.axis_size(b) for b in order[: order.index(a)] if b > a) for a in order
        }
        spec = tuple(Shard(0) if factors[a] == 1 else StridedShard(0, factors[a]) for a in "xyz")
        found = Layout((24,), mesh, spec, reading="order")
        expected = Layout((24,), mesh, f"({' '.join(order)} n)")
        live = [a for a in order if mesh.axis_size(a) > 1]
        assert [a for a in found.dims[0].axes if mesh.axis_size(a) > 1] == live
        assert equivalent(found, expected)


def test_order_without_strides_is_as_written() -> None:
    for spec in (
        (Shard(0), Shard(0)),
        (Balanced(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Replicate(), Partial()),
    ):
        assert Layout((9, 4), MESH, spec, reading="order") is Layout((9, 4), MESH, spec)


def test_order_looks_at_one_dimension_at_a_time() -> None:
    spec = {"dp": StridedShard(0, 1), "tp": Balanced(1)}
    assert Layout((9, 4), MESH, spec, reading="order") is Layout((9, 4), MESH, "(dp n) (tp~ h)")


# Equality and equivalence


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("(dp tp n) h", "(dp n | tp n) h", True),
        ("(dp tp n) h", "(tp dp n) h", False),
        ("(dp n) h", "(dp~ n) h", False),
        ("n (tp h)", "n (tp~ h)", True),
        ("n (dp h)", "n (h dp)", True),
        ("n (tp h)", "n (h tp)", False),
        ("n h {sum: tp}", "n h", False),
        ("n h {sum: tp}", "n h {max: tp}", False),
        ("n h {sum: tp}", "n h {sum: dp}", False),
        ("(n)=12 h", "n h", False),
        ("(n)=<0:4 4:9> h", "n h", True),
    ],
)
def test_equivalent(a: str, b: str, same: bool) -> None:
    x, y = Layout((9, 4), MESH, a), Layout((9, 4), MESH, b)
    assert equivalent(x, y) == equivalent(y, x) == same
    assert (holdings_digest(x) == holdings_digest(y)) == same
    assert equivalent(x, Layout((9, 4), MESH, a))


def test_equivalent_sees_ranks_shapes_and_dtypes() -> None:
    x = Layout((4,), Mesh(a=2), "(a n)")
    assert equivalent(x, Layout((4,), Mesh(b=2, c=1), "(b n)"))
    assert equivalent(x, Layout((4,), Mesh(c=1, b=2), "(b c n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2, ranks=(1, 0)), "(a n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2, ranks=(1, 2)), "(a n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2), "(a n)", dtype="int32"))
    assert not equivalent(x, Layout((4, 1), Mesh(a=2), "(a n) h"))
    turned = Layout((4,), Mesh(a=2, b=2, ranks=(3, 1, 2, 0)), "(b a n)")
    assert equivalent(turned, Layout((4,), Mesh(b=2, a=2, ranks=(3, 2, 1, 0)), "(b a n)"))


def test_partial_over_one_rank_is_no_partial() -> None:
    one = Mesh(a=2, b=1)
    assert equivalent(Layout((4,), one, "(a n) {sum: b}"), Layout((4,), one, "(a n)"))
    assert equivalent(Layout((4,), one, "(a n) {sum: b}"), Layout((4,), one, "(a n) {max: b}"))


@given(testing.pairs())
def test_equivalent_is_holding_the_same(pair: tuple[Layout, ...]) -> None:
    a, b = pair
    if sorted(a.mesh.ranks) == sorted(b.mesh.ranks) and not a.partial and not b.partial:
        same = all(a.runs(r) == b.runs(r) for r in a.mesh.ranks)
        assert equivalent(a, b) == same == (holdings_digest(a) == holdings_digest(b))


# Layouts from layouts


@given(testing.layouts(), st.data())
def test_windows_and_slices(layout: Layout, data: st.DataObject) -> None:
    box = data.draw(testing.boxes(layout.shape))
    inside, part = window(layout, box), sliced(layout, box)
    assert inside.shape == layout.shape and part.shape == tuple(hi - lo for lo, hi in box)
    for rank in layout.mesh.ranks:
        assert inside.local_shape(rank) == part.local_shape(rank) == layout.local_shape(rank)
        for old, new, cut, (lo, hi) in zip(
            *(x.indices(rank) for x in (layout, inside, part)), box, strict=True
        ):
            assert new.tolist() == [i if lo <= i < hi else -1 for i in old.tolist()]
            assert cut.tolist() == [i - lo if lo <= i < hi else -1 for i in old.tolist()]


@given(testing.layouts(op="sum"), st.data())
def test_other_layouts(layout: Layout, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(layout.ndim)))
    turned = transposed(layout, order)
    assert turned.shape == tuple(layout.shape[d] for d in order)
    assert held(turned) == [[h[d] for d in order] for h in held(layout)]
    half = cast(layout, "int16")
    assert (half.dtype, held(half), half.partial) == ("int16", held(layout), layout.partial)
    moved = relabelled(layout, {r: r + 50 for r in layout.mesh.ranks})
    assert held(moved) == held(layout) and moved.mesh.ranks == tuple(
        r + 50 for r in layout.mesh.ranks
    )
    assert repartialed(layout, layout.free_axes).partial == tuple(
        (a, "sum") for a in layout.free_axes
    )
    assert repartialed(layout, ()).partial == () and held(repartialed(layout, ())) == held(layout)


# Errors

RANKS = "its ranks are 0, 1, 2, 3, 4, 5, 6, 7"


class Strange:
    dim = "0"

    def __repr__(self) -> str:
        return "Strange()"


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
            "reading='torch' is not a reading; use 'placement' or 'order'",
        ),
        (lambda: Layout((9, -1), MESH, "n h"), LayoutError, "shape (9, -1) has -1; sizes are >= 0"),
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
            lambda: Layout((9,), MESH, (Shard(0),)),
            LayoutError,
            "1 placement (Shard(dim=0),) for 2 mesh axes (dp, tp); give one an axis, or a mapping",
        ),
        (
            lambda: Layout((9,), Mesh(), (Shard(0),)),
            LayoutError,
            "1 placement (Shard(dim=0),) for 0 mesh axes (none); give one an axis, or a mapping",
        ),
        (
            lambda: Layout((9,), MESH, {"ep": Shard(0)}),
            LayoutError,
            "Shard(dim=0) on axis 'ep': mesh dp=4 tp=2 has no such axis; its axes are dp, tp",
        ),
        (
            lambda: Layout((9,), Mesh(), {("tp",): Shard(0)}),
            LayoutError,
            "Shard(dim=0) on axis 'tp': mesh  has no such axis; its axes are none",
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Shard(0), ("tp", "dp"): Shard(0)}),
            LayoutError,
            "mesh axis 'tp' is used twice, by Shard(dim=0) and Shard(dim=0); an axis has one placement",
        ),
        (
            lambda: Layout((9,), MESH, {("tp", "tp"): Shard(0)}),
            LayoutError,
            "mesh axis 'tp' is used twice, by Shard(dim=0) and Shard(dim=0); an axis has one placement",
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Shard(1)}),
            LayoutError,
            "Shard(dim=1) divides dimension 1, shape (9,) has 1; use -1..0",
        ),
        (
            lambda: Layout((9, 4), MESH, {"tp": Shard(-3)}),
            LayoutError,
            "Shard(dim=-3) divides dimension -3, shape (9, 4) has 2; use -2..1",
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Strange()}),
            PlacementError,
            "Strange() is not a placement; give it `dim` and `split(n, parts) -> tuple of Runs`",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={1: 3}),
            LayoutError,
            "stored= names dimension 1, shape (9,) has 1; use -1..0",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={-2: 3}),
            LayoutError,
            "stored= names dimension -2, shape (9,) has 1; use -1..0",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={"n": 12}),
            LayoutError,
            "a dimension of stored= is 'n'; give an integer",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: 12.0}),
            LayoutError,
            "the stored size of dimension 0 is 12.0; give an integer",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: 12, -1: 12}),
            LayoutError,
            "stored= names dimension 0 of shape (9,) twice; name it once",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored=[12]),
            LayoutError,
            "stored=[12]; give a mapping from dimension to a length or Runs",
        ),
        (
            lambda: Layout((9,), MESH, "n", rules=[3]),
            LayoutError,
            "rules=[3]; give a mapping from name to placement",
        ),
        (
            lambda: Layout((9,), MESH, {3: Shard(0)}),
            LayoutError,
            "3 is no mesh axis; the keys of a spec are axis names or tuples of them",
        ),
        (
            lambda: Layout((9,), MESH, {(): Shard(0)}),
            LayoutError,
            "() is no mesh axis; the keys of a spec are axis names or tuples of them",
        ),
        (
            lambda: Layout((9,), MESH, {("tp", 3): Shard(0)}),
            LayoutError,
            "('tp', 3) is no mesh axis; the keys of a spec are axis names or tuples of them",
        ),
        (
            lambda: Layout((1 << 28, 1 << 27), MESH, "n h"),
            LayoutError,
            f"float32[268435456, 134217728] has more than {1 << 56} bytes; divide the tensor",
        ),
        (
            lambda: Layout((1, 1 << 27), MESH, {}, stored={0: 1 << 28}),
            LayoutError,
            f"float32[268435456, 134217728] has more than {1 << 56} bytes; divide the tensor",
        ),
        (
            lambda: equivalent(Layout((9,), MESH, "n"), "n"),
            LayoutError,
            "'n' is not a Layout; equivalent compares two layouts",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: 8}),
            ShardError,
            "stored size 8 is below the 9 logical positions; pad to 9 or more",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: Runs([(0, 8, 2)])}),
            PlacementError,
            "dimension 0 of shape (9,): stored [8:10] reaches position 9 of a dimension of 9; stay inside",
        ),
        (
            lambda: Layout((9,), MESH, "n", stored={0: 12}),
            LayoutError,
            "stored={0: 12} beside the text 'n'; write it in the text: (n)=8 or (n)=<0:4 -4>",
        ),
        (
            lambda: Layout((9,), MESH, {"dp": Partial("sum"), "tp": Partial("max")}),
            LayoutError,
            "Partial axes wait for different reductions: sum on dp, max on tp; reduce one of them first",
        ),
        (
            lambda: Layout((9,), MESH, (StridedShard(0, 3), Shard(0)), reading="order"),
            PlacementError,
            "reading='order': StridedShard(dim=0, split_factor=3) stands for no order: the axes right of it on its "
            "dimension are tp=2; use reading='placement', which applies the splits as written",
        ),
        (
            lambda: Layout((9,), MESH, (Replicate(), StridedShard(0, 2)), reading="order"),
            PlacementError,
            "reading='order': StridedShard(dim=0, split_factor=2) stands for no order: the axes right of it on its "
            "dimension are none; use reading='placement', which applies the splits as written",
        ),
        (
            lambda: Layout((9,), MESH, (StridedShard(0, 2), Balanced(0)), reading="order"),
            PlacementError,
            "reading='order': Balanced(dim=0) beside StridedShard on one dimension; use reading='placement'",
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
        (
            lambda: transposed(Layout((9, 4), MESH, "n h"), (0, 0)),
            LayoutError,
            "cannot transpose shape (9, 4) to (0, 0); name each of 0..1 once",
        ),
        (
            lambda: window(Layout((9, 4), MESH, "n h"), ((0, 9),)),
            LayoutError,
            "box ((0, 9),) is not inside shape (9, 4); give one (start, stop) a dimension",
        ),
        (
            lambda: window(Layout((9,), MESH, "n"), ((3, 2),)),
            LayoutError,
            "box ((3, 2),) is not inside shape (9,); give one (start, stop) a dimension",
        ),
        (
            lambda: sliced(Layout((9,), MESH, "n"), ((-1, 2),)),
            LayoutError,
            "box ((-1, 2),) is not inside shape (9,); give one (start, stop) a dimension",
        ),
        (
            lambda: sliced(Layout((9,), MESH, "n"), ((0, 10),)),
            LayoutError,
            "box ((0, 10),) is not inside shape (9,); give one (start, stop) a dimension",
        ),
        (
            lambda: repartialed(Layout((9,), MESH, "(tp n)"), ("tp",)),
            LayoutError,
            "mesh axis 'tp' is used in dimension 0 and in Partial('sum'); an axis has one use",
        ),
        (
            lambda: cast(Layout((9,), MESH, "n"), "int7"),
            LayoutError,
            "unknown dtype 'int7'; did you mean 'int8'?",
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


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("dp", "tp"), "(dp n) (tp h)"),
        ((None, "tp"), "n (tp h)"),
        ((("tp", "dp"), None), "(tp dp n) h"),
        (["tp"], "(tp n)"),
    ],
)
def test_axes_by_dimension_are_told_the_text(spec: tuple, text: str, fails) -> None:
    """What JAX calls a PartitionSpec: 'dp' was said to be no placement."""
    what = f"spec {tuple(spec)} names mesh axes by dimension, as JAX's PartitionSpec; a tuple has a placement"
    message = f"{what} for each mesh axis: write the text {text!r}"
    fails(lambda: Layout((8, 4), Mesh(dp=2, tp=2), spec), LayoutError, message)
