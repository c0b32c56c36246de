"""Templates against index arrays: what units hold, who has them, how they are expanded and where they are cut."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Table, testing
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.edits import relabeled
from shardmath.plans.reduction import find_reduction
from shardmath.plans.template import Template, hidden_pairs, make_template, unit_addends
from shardmath.plans.units import SMALL, is_legal_cut, snap, unit_boxes, unit_grains, unit_rows
from tests.property.drawn.pieces import BoxPiece, expand

MESH = Mesh(dp=2, tp=2)


def of(src: Layout, dst: Layout) -> Template:
    return make_template(src, dst, find_reduction(src, dst))


def holders(t: Template) -> list[list[int]]:
    return [x.tolist() for x in t.holders]


def receivers(t: Template) -> list[list[int]]:
    return [x.tolist() for x in t.receivers]


def units(t: Template) -> list[tuple[int, list[int], list[int]]]:
    """(unit, positions that hold it, positions that ask for it)."""
    here, there = holders(t), receivers(t)
    ends = zip(t.unit_class.tolist(), t.unit_cell.tolist(), strict=True)
    return [(unit, here[k], there[c]) for unit, (k, c) in enumerate(ends)]


def elements(piece: BoxPiece) -> list[tuple[int, ...]]:
    """(addend, global element) of a piece, row-major."""
    return list(
        itertools.product([piece.addend], *(range(s.start, s.stop) for s in piece.global_slices))
    )


def local(layout: Layout, position: int, slices: tuple[slice, ...]) -> list[tuple[int, ...]]:
    """The global elements at a box of the local array of a position of a form."""
    held = zip(layout.form.indices(position), slices, strict=True)
    return list(itertools.product(*(index[s].tolist() for index, s in held)))


@given(testing.pairs())
def test_units_move_what_is_asked(pair: tuple[Layout, ...]) -> None:
    """From every holder to every receiver a unit is at the same elements on both sides, and all units are there."""
    src, dst = pair
    t = of(src, dst)
    asked: dict[int, list[tuple[int, ...]]] = {i: [] for i in range(dst.mesh.size)}
    for unit, here, there in units(t):
        for sender, receiver in itertools.product(here, there):
            pieces = expand(t, unit, sender, receiver, 0, int(t.unit_size[unit]))
            for piece in pieces:
                whole = [x[1:] for x in elements(piece)]
                assert local(src, sender, piece.src) == local(dst, receiver, piece.dst) == whole
                assert piece.shape == tuple(s.stop - s.start for s in piece.global_slices)
                assert piece.nbytes == len(whole) * src.itemsize
            seen = [x for piece in pieces for x in elements(piece)]
            assert len(seen) == t.unit_size[unit]
            asked[receiver] += seen if sender == here[0] else []
    for position, found in asked.items():
        index = dst.form.indices(position)
        need = itertools.product(range(t.reduction.addends), *(i[i >= 0].tolist() for i in index))
        assert sorted(found) == sorted(need)


@given(testing.pairs(ops=(None, "sum")))
def test_holders_are_all_that_hold_a_unit(pair: tuple[Layout, ...]) -> None:
    """And receivers all that ask for it; where addends pass through, only those of the unit's."""
    src, dst = pair
    t = of(src, dst)
    through = [(src.mesh.coordinate(a), dst.mesh.coordinate(b)) for a, b in t.reduction.matched]
    folded = src.mesh.coordinate(t.reduction.folded)
    for unit, here, there in units(t):
        piece = expand(t, unit, here[0], there[0], 0, int(t.unit_size[unit]))[0]
        first = elements(piece)[0][1:]
        assert here and there and here == sorted(set(here)) and there == sorted(set(there))
        for side, positions, other, k in ((src, here, there[0], 0), (dst, there, here[0], 1)):
            mesh = side.form.mesh
            held = {
                i
                for i in mesh.ranks
                if all(x in i_d for x, i_d in zip(first, side.form.indices(i), strict=True))
            }
            held &= {i for i in mesh.ranks if all(at[k][i] == at[1 - k][other] for at in through)}
            assert set(positions) == (held if k else {i for i in held if folded[i] == piece.addend})


@given(testing.pairs())
def test_sets_are_of_members_that_are_used(pair: tuple[Layout, ...]) -> None:
    t = of(*pair)
    for members, number in ((t.holders, t.unit_class), (t.receivers, t.unit_cell)):
        sets = list(members)
        assert len(sets) == len(members) == len(set(number.tolist()))
        assert sorted(set(number.tolist())) == list(range(len(members)))
        assert all(x.dtype == np.int64 for x in sets)


def test_templates_are_of_forms() -> None:
    """Layouts that differ in ranks alone share theirs, and all that is equal in them."""
    src, dst = Layout((6,), MESH, "(dp n)"), Layout((6,), Mesh(tp=3), "(tp n)")
    t = of(src, dst)
    assert t is of(relabeled(src, {0: 9}), relabeled(dst, {2: 7, 1: 3}))
    assert (t.src, t.dst) == (src.form, dst.form)
    other = of(Layout((8,), MESH, "(dp n)"), Layout((8,), Mesh(tp=3), "(tp n)"))
    assert other is not t and other.holders is t.holders
    assert of(src, src) is not t


def test_hidden_dimensions_are_addends() -> None:
    src, dst = Layout((4,), MESH, "n {sum: dp tp}"), Layout((4,), MESH, "n {sum: tp}")
    t = of(src, dst)
    assert (
        t.hidden == 2
        and t.reduction.folded == ("dp",)
        and t.reduction.matched == ((("tp",), ("tp",)),)
    )
    assert of(Layout((4,), MESH, "n"), Layout((4,), MESH, "(tp n)")).hidden == 0
    assert units(t) == [(0, [0], [0, 2]), (1, [1], [1, 3]), (2, [2], [0, 2]), (3, [3], [1, 3])]
    assert unit_addends(t).tolist() == [0, 0, 1, 1]
    folded, matched = hidden_pairs(src, t.reduction)
    assert (folded[0].axes, len(folded[0].parts), folded[1].parts) == (("dp",), 2, (identity(2),))
    assert [x.axes for x in matched] == [("tp",), ("tp",)] and matched[0].parts == matched[1].parts
    assert list(hidden_pairs(src, find_reduction(Layout((4,), MESH, "n"), src))) == []


@given(testing.pairs(ops=("sum", "max", "avg")))
def test_addends_of_units(pair: tuple[Layout, ...]) -> None:
    t = of(*pair)
    if t.reduction.folded:
        at = t.src.mesh.coordinate(t.reduction.folded).tolist()
        assert [{at[i] for i in here} for _, here, _ in units(t)] == [
            {x} for x in unit_addends(t).tolist()
        ]


def test_scalars_are_one_unit() -> None:
    t = of(Layout((), MESH, ""), Layout((), Mesh(ranks=[9]), ""))
    assert (t.unit_size.tolist(), units(t)) == ([1], [(0, [0, 1, 2, 3], [0])])
    assert unit_boxes(t, 0) == ([()], [()], [1])
    assert expand(t, 0, 2, 0, 0, 1) == [BoxPiece((), (), (), (), 4, 0)]
    assert [is_legal_cut(t, 0, at) for at in (0, 1)] == [True, True] and [
        snap(t, 0, at) for at in (0, 1)
    ] == [0, 1]


def test_no_elements_are_no_units() -> None:
    t = of(Layout((0, 3), MESH, "(dp n) h"), Layout((0, 3), MESH, "n h"))
    assert (len(t.unit_size), t.unit_pairs.shape, holders(t), receivers(t)) == (0, (0, 2), [], [])
    assert len(t.holders) == len(t.receivers) == 0


def test_boxes_of_a_unit_are_row_major() -> None:
    src, dst = Layout((8, 8), Mesh(a=2), "(2 a n) h"), Layout((8, 8), Mesh(b=2), "n (2 b h)")
    t = of(src, dst)
    boxes, sizes, ends = unit_boxes(t, 0)
    starts = [[int(o.start[r]) for o, r in zip(t.overlays, row, strict=True)] for row in boxes]
    assert starts == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert sizes == [(2, 2)] * 4 and ends == [4, 8, 12, 16]


def test_part_of_a_unit() -> None:
    """A cut at a box, and at rows of a box."""
    src, dst = Layout((8, 3), Mesh(a=2), "(2 a n) h"), Layout((8, 3), Mesh(), "n h")
    t = of(src, dst)
    assert t.unit_size.tolist() == [12, 12]

    def whole(lo: int, hi: int) -> list[tuple[tuple[int, int], ...]]:
        return [
            tuple((s.start, s.stop) for s in piece.global_slices)
            for piece in expand(t, 0, 0, 0, lo, hi)
        ]

    assert whole(0, 12) == [((0, 2), (0, 3)), ((4, 6), (0, 3))]
    assert whole(6, 12) == [((4, 6), (0, 3))]
    assert whole(0, 6) == [((0, 2), (0, 3))]
    assert whole(3, 9) == [((1, 2), (0, 3)), ((4, 5), (0, 3))]
    assert whole(9, 12) == [((5, 6), (0, 3))]
    assert expand(t, 0, 0, 0, 9, 12)[0][:5] == (
        (slice(3, 4), slice(0, 3)),
        (slice(5, 6), slice(0, 3)),
        (slice(5, 6), slice(0, 3)),
        (1, 3),
        12,
    )


@given(testing.pairs(), st.data())
def test_parts_of_a_unit_are_the_unit(pair: tuple[Layout, ...], data: st.DataObject) -> None:
    """Cut anywhere that is legal, the pieces have the elements of the whole, in order."""
    t = of(*pair)
    for unit, here, there in units(t):
        size = int(t.unit_size[unit])
        cuts = [at for at in range(size + 1) if is_legal_cut(t, unit, at)]
        at = data.draw(st.sampled_from(cuts))
        ends = data.draw(st.sampled_from(here)), data.draw(st.sampled_from(there))
        parts = [expand(t, unit, *ends, lo, hi) for lo, hi in ((0, at), (at, size)) if lo < hi]
        whole = [x for piece in expand(t, unit, *ends, 0, size) for x in elements(piece)]
        assert [x for pieces in parts for piece in pieces for x in elements(piece)] == whole


def places(t: Template) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(global start, sender, receiver) -> where both have it, of all boxes of one dimension."""
    out = {}
    for unit, here, there in units(t):
        for sender, receiver in itertools.product(here, there):
            for piece in expand(t, unit, sender, receiver, 0, int(t.unit_size[unit])):
                out[piece.global_slices[0].start, sender, receiver] = (
                    piece.src[0].start,
                    piece.dst[0].start,
                )
    return out


def test_both_ends_find_their_own_place() -> None:
    """Parts that overlap hold an atom at places of their own."""
    table = Table(0, (from_ranges([(0, 4)]), from_ranges([1, (2, 6), (0, 1)])))
    held, whole = (
        Layout((6,), Mesh(a=2, ranks=(5, 3)), (table,)),
        Layout((6,), Mesh(ranks=[9]), "n"),
    )
    forth = {(0, 0): 0, (0, 1): 5, (1, 0): 1, (2, 0): 2, (2, 1): 1, (4, 1): 3}
    assert places(of(held, whole)) == {(at, i, 0): (here, at) for (at, i), here in forth.items()}
    assert places(of(whole, held)) == {(at, 0, i): (at, here) for (at, i), here in forth.items()}


def test_receivers_pass_on_what_they_have_received() -> None:
    """`relayed`: the sender's place is at the destination."""
    table = Table(0, (from_ranges([(0, 4)]), from_ranges([1, (2, 6), (0, 1)])))
    t = of(Layout((6,), Mesh(), "n"), Layout((6,), Mesh(a=2), (table,)))
    (unit,) = (u for u, _, there in units(t) if there == [0, 1] and t.unit_size[u] == 3)
    boxes = expand(t, unit, 1, 0, 0, 3, relayed=True)
    assert [(x.global_slices[0].start, x.src[0].start, x.dst[0].start) for x in boxes] == [
        (0, 5, 0),
        (2, 1, 2),
    ]
    direct = expand(t, unit, 0, 0, 0, 3)
    assert [(x.global_slices, x.dst, x.shape, x.nbytes) for x in boxes] == [
        (x.global_slices, x.dst, x.shape, x.nbytes) for x in direct
    ]


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1, 0, 2), (40, 7, 9, 8)])
def test_holders_are_positions(ranks: tuple[int, ...]) -> None:
    mesh = Mesh(dp=2, tp=2, ranks=ranks)
    t = of(Layout((4,), mesh, "(tp n)"), Layout((4,), Mesh(ranks=[99]), "n"))
    assert (holders(t), receivers(t)) == ([[0, 2], [1, 3]], [[0]])


def test_parts_that_all_hold_everything() -> None:
    """Every atom has two holders, though no part is another one."""
    table = Table(0, (identity(4), from_ranges([(2, 4), (0, 2)])))
    one = Layout((4,), Mesh(ranks=[9]), "n")
    t = of(Layout((4,), Mesh(a=2), (table,)), one)
    assert (holders(t), receivers(t)) == ([[0, 1]], [[0]])
    t = of(one, Layout((4,), Mesh(a=2), (table,)))
    assert (holders(t), receivers(t)) == ([[0]], [[0, 1]])


# Units in an order that all spellings share


@given(testing.pairs())
def test_unit_order_is_by_first_element(pair: tuple[Layout, ...]) -> None:
    t = of(*pair)
    assert sorted(t.unit_order.tolist()) == list(range(len(t.unit_size)))
    firsts = []
    for unit in np.argsort(t.unit_order).tolist():
        over = list(zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True))
        firsts.append(tuple(int(o.start[o.first[p]]) for o, p in over))
    assert firsts == sorted(set(firsts))


# Where units may be cut


def large(mesh: Mesh, text: str, rows: int = 1000, columns: int = 64) -> Layout:
    """A matrix of float64: 512 bytes a row."""
    return Layout((rows, columns), mesh, text, dtype="float64")


def legal_cuts(t: Template, unit: int, small: int) -> list[int]:
    """Boxes of the unit, and the rows of boxes of more than `small` bytes."""
    out, at = [], 0
    for dims in unit_boxes(t, unit)[1]:
        size = int(np.prod(dims))
        long = next((d for d, n in enumerate(dims) if n > 1), len(dims))
        row = int(np.prod(dims[long + 1 :])) if long < len(dims) else 1
        out += range(at, at + size, row) if size * t.src.itemsize > small else [at]
        at += size
    return [*out, at]


@pytest.mark.parametrize(("rows", "cut"), [(128, 0), (129, 64 * 64)])
def test_boxes_of_64_kib_stay_whole(rows: int, cut: int) -> None:
    t = of(large(Mesh(a=2), "n h", rows), large(Mesh(ranks=[9]), "n h", rows))
    assert SMALL == 65536 and snap(t, 0, 64 * 64 + 1) == cut
    assert is_legal_cut(t, 0, 64 * 64) and not is_legal_cut(t, 0, 64 * 64 + 1)


@given(testing.pairs(), st.sampled_from([0, 16, 64, SMALL]))
def test_snap_is_the_last_place(pair: tuple[Layout, ...], small: int) -> None:
    t = of(*pair)
    with mock.patch("shardmath.plans.units.SMALL", small):
        for unit in range(len(t.unit_size)):
            cuts, rows = legal_cuts(t, unit, small), legal_cuts(t, unit, 0)
            for at in range(int(t.unit_size[unit]) + 1):
                assert snap(t, unit, at) == max(x for x in cuts if x <= at)
                assert is_legal_cut(t, unit, at) == (at in rows)


@given(testing.pairs(), st.sampled_from([0, 16, 64, SMALL]))
def test_rows_of_units_of_one_box(pair: tuple[Layout, ...], small: int) -> None:
    """Snapping to them is snapping; units of several boxes have none."""
    t = of(*pair)
    with mock.patch("shardmath.plans.units.SMALL", small):
        for unit, rows in enumerate(unit_rows(t).tolist()):
            cuts, boxes = legal_cuts(t, unit, small), len(unit_boxes(t, unit)[0])
            if boxes > 1:
                assert rows == -1
            else:
                assert cuts == [*range(0, cuts[-1], rows or cuts[-1]), cuts[-1]]


@given(testing.pairs(), st.sampled_from([0, 16, 64, SMALL]))
def test_grains_are_what_no_cut_divides(pair: tuple[Layout, ...], small: int) -> None:
    """Exactly, but where small boxes lie beside a large one, which may be larger than a row of it."""
    t = of(*pair)
    with mock.patch("shardmath.plans.units.SMALL", small):
        for unit, grain in enumerate(unit_grains(t).tolist()):
            sizes = [int(np.prod(dims)) * t.src.itemsize for dims in unit_boxes(t, unit)[1]]
            longest = t.src.itemsize * max(np.diff(legal_cuts(t, unit, small)))
            assert grain == longest or (grain < longest and min(sizes) <= small < max(sizes))


def test_small_boxes_of_a_large_unit_stay_whole() -> None:
    """Two boxes of 40 KiB: the size of a box counts, not where it ends."""
    t = of(large(Mesh(a=2), "(2 a n) h", 320), large(Mesh(ranks=[9]), "n h", 320))
    assert unit_boxes(t, 0)[1] == [(80, 64), (80, 64)]
    assert [snap(t, 0, 64 * row) for row in (0, 40, 80, 120, 159, 160)] == [
        0,
        0,
        64 * 80,
        64 * 80,
        64 * 80,
        64 * 160,
    ]


def test_rows_are_of_the_first_long_dimension() -> None:
    src, dst = (Layout((1, 100, 7, 100), Mesh(ranks=[r]), "...", dtype="float64") for r in (0, 1))
    t = of(src, dst)
    assert [snap(t, 0, x) for x in (0, 699, 700, 701, 1400, 70000)] == [0, 0, 700, 700, 1400, 70000]
    assert not is_legal_cut(t, 0, 70001) and not is_legal_cut(t, 0, 100)
