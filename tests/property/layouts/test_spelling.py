"""Spelling: three spellings, two readings, what is stored, errors."""

from __future__ import annotations

import itertools
import math

import pytest

from shardmath import (
    Balanced,
    BlockCyclic,
    Layout,
    LayoutError,
    Mesh,
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
)
from shardmath.layouts.algebra.runs import from_ranges

MESH = Mesh(dp=4, tp=2)


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


class Strange:
    dim = "0"

    def __repr__(self) -> str:
        return "Strange()"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: Layout((9,), MESH, (Shard(0),)),
            LayoutError,
            (
                "1 placement (Shard(dim=0),) for 2 mesh axes (dp, tp); give one placement "
                "per axis, or a mapping from axis to placement"
            ),
        ),
        (
            lambda: Layout((9,), Mesh(), (Shard(0),)),
            LayoutError,
            (
                "1 placement (Shard(dim=0),) for 0 mesh axes (none); give one placement per "
                "axis, or a mapping from axis to placement"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {"ep": Shard(0)}),
            LayoutError,
            (
                "Shard(dim=0) on axis 'ep': mesh dp=4 tp=2 has no such axis; use one of its "
                "axes, dp, tp"
            ),
        ),
        (
            lambda: Layout((9,), Mesh(), {("tp",): Shard(0)}),
            LayoutError,
            "Shard(dim=0) on axis 'tp': mesh  has no such axis; give it one",
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Shard(0), ("tp", "dp"): Shard(0)}),
            LayoutError,
            (
                "mesh axis 'tp' is used twice, by Shard(dim=0) and Shard(dim=0); give each "
                "axis one placement"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {("tp", "tp"): Shard(0)}),
            LayoutError,
            (
                "mesh axis 'tp' is used twice, by Shard(dim=0) and Shard(dim=0); give each "
                "axis one placement"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Shard(1)}),
            LayoutError,
            (
                "Shard(dim=1) divides dimension 1, but shape (9,) has 1 dimension; use a "
                "dimension from -1 to 0"
            ),
        ),
        (
            lambda: Layout((9, 4), MESH, {"tp": Shard(-3)}),
            LayoutError,
            (
                "Shard(dim=-3) divides dimension -3, but shape (9, 4) has 2 dimensions; use "
                "a dimension from -2 to 1"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {"tp": Strange()}),
            PlacementError,
            (
                "Strange() is not a placement; use one such as shardmath.Shard(0), or an "
                "object with `dim` and `split(n, parts) -> tuple of Runs`"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={1: 3}),
            LayoutError,
            (
                "stored= names dimension 1, but shape (9,) has 1 dimension; use a dimension "
                "from -1 to 0"
            ),
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={-2: 3}),
            LayoutError,
            (
                "stored= names dimension -2, but shape (9,) has 1 dimension; use a dimension "
                "from -1 to 0"
            ),
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
            "3 is not a mesh axis; give axis names, or tuples of axis names, as keys",
        ),
        (
            lambda: Layout((9,), MESH, {(): Shard(0)}),
            LayoutError,
            "() is not a mesh axis; give axis names, or tuples of axis names, as keys",
        ),
        (
            lambda: Layout((9,), MESH, {("tp", 3): Shard(0)}),
            LayoutError,
            "('tp', 3) is not a mesh axis; give axis names, or tuples of axis names, as keys",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: 8}),
            ShardError,
            "stored size 8 is less than the 9 positions of the tensor; pad to 9 or more",
        ),
        (
            lambda: Layout((9,), MESH, {}, stored={0: Runs([(0, 8, 2)])}),
            PlacementError,
            (
                "dimension 0 of shape (9,): stored positions [8:10] reach 9 of a dimension "
                "of 9; store only positions below 9"
            ),
        ),
        (
            lambda: Layout((9,), MESH, "n", stored={0: 12}),
            LayoutError,
            (
                "stored={0: 12} cannot be combined with a text, 'n'; leave it out and write "
                "(n)=8 or (n)=<0:4 -4> in the text"
            ),
        ),
        (
            lambda: Layout((9,), MESH, (StridedShard(0, 3), Shard(0)), reading="order"),
            PlacementError,
            (
                "reading='order': no order of splits gives StridedShard(dim=0, "
                "split_factor=3): the placements after it split its dimension over tp=2, so its "
                "split_factor can only be 1 or 2; use reading='placement', which applies the "
                "splits as written"
            ),
        ),
        (
            lambda: Layout((9,), MESH, (Replicate(), StridedShard(0, 2)), reading="order"),
            PlacementError,
            (
                "reading='order': no order of splits gives StridedShard(dim=0, "
                "split_factor=2): no placement after it splits its dimension, so its "
                "split_factor can only be 1; use reading='placement', which applies the splits "
                "as written"
            ),
        ),
        (
            lambda: Layout(
                (9,),
                Mesh(dp=2, tp=2, ep=3),
                (StridedShard(0, 2), StridedShard(0, 3), Shard(0)),
                reading="order",
            ),
            PlacementError,
            (
                "reading='order': no order of splits gives StridedShard(dim=0, "
                "split_factor=2): the placements after it split its dimension over ep=3 tp=2, "
                "so its split_factor can only be 1 or 3 or 6; use reading='placement', which "
                "applies the splits as written"
            ),
        ),
        (
            lambda: Layout((9,), MESH, (StridedShard(0, 2), Balanced(0)), reading="order"),
            PlacementError,
            (
                "reading='order' is for Shard and StridedShard, but Balanced(dim=0) divides "
                "the same dimension; use reading='placement'"
            ),
        ),
    ],
)
def test_errors(make, kind, message: str, fails) -> None:
    fails(make, kind, message)


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
    what = f"spec {tuple(spec)} names mesh axes by dimension, as JAX's PartitionSpec; a tuple has one placement"
    message = f"{what} per mesh axis: write the text {text!r}"
    fails(lambda: Layout((8, 4), Mesh(dp=2, tp=2), spec), LayoutError, message)


class Reversed(Shard):
    """Chunks from the last rank to the first."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return super().split(n, parts)[::-1]


def test_a_subclass_splits_as_it_says_in_both_readings() -> None:
    """It is no Shard for the order of splits: beside a StridedShard it has no place in it."""
    one = Layout((9,), MESH, (Reversed(0), Replicate()), reading="order")
    assert one == Layout((9,), MESH, (Reversed(0), Replicate()), reading="placement")
    assert (
        one.indices(0)[0].tolist()
        != Layout((9,), MESH, (Shard(0), Replicate())).indices(0)[0].tolist()
    )
    with pytest.raises(
        PlacementError, match="reading='order' is for Shard and StridedShard, but Reversed"
    ):
        Layout((9,), MESH, (Reversed(0), StridedShard(0, 1)), reading="order")
