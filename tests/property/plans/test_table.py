"""The table of a plan is its transfers, and its ranges are the bytes of these."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Topology,
    Transfer,
    TransferTable,
    adjoint,
    plan,
)
from shardmath.plans import units
from shardmath.plans.adjoint import Transposed
from shardmath.testing.strategies import pairs, trees
from tests.property.drawn.plans import PLANS, halves

ENDS = [
    f"{end}_{what}"
    for end in ("src", "dst")
    for what in ("rank", "tensor", "start", "offset", "strides")
]
COLUMNS = ["tensor", "op", "shape", "nbytes", "global_start", "addend", *ENDS]


def rows_of(table: TransferTable, p: Plan | Transposed) -> list[Transfer]:
    """The rows as transfers; offsets and strides are those of contiguous local tensors."""
    columns = [getattr(table, name).tolist() for name in COLUMNS]
    return [
        _row(table, p, dict(zip(COLUMNS, row, strict=True))) for row in zip(*columns, strict=True)
    ]


def _row(table: TransferTable, p: Plan | Transposed, row: dict[str, Any]) -> Transfer:
    name = table.names[row["tensor"]]
    front = len(row["shape"]) - p.src[name][0].ndim
    assert row["shape"][:front] == [1] * front
    boxes = {}
    for end in ("src", "dst", "global"):
        start = row[f"{end}_start"]
        assert start[:front] == [0] * front
        box = zip(start[front:], row["shape"][front:], strict=True)
        boxes[end] = tuple(slice(a, a + n) for a, n in box)
    local = table.src_names[row["src_tensor"]], table.dst_names[row["dst_tensor"]]
    for end, local_name in zip(("src", "dst"), local, strict=True):
        side, rank = getattr(p, end), row[f"{end}_rank"]
        layout = dict(side[name].locals(name))[local_name]
        strides = np.empty(layout.local_shape(rank), f"V{layout.itemsize}").strides
        assert row[f"{end}_strides"][front:] == list(strides)
        starts = [s.start for s in boxes[end]]
        assert row[f"{end}_offset"] == sum(a * n for a, n in zip(starts, strides, strict=True))
    op, shape = table.ops[row["op"]], tuple(row["shape"][front:])
    ends = (
        name,
        row["src_rank"],
        row["dst_rank"],
        op,
        local[0],
        boxes["src"],
        local[1],
        boxes["dst"],
    )
    return Transfer(*ends, shape, row["nbytes"], boxes["global"], row["addend"])


def check(p: Plan | Transposed) -> None:
    some = [p.ranks[0], p.ranks[-1], 99]
    asked: list[dict[str, int]] = [{}]
    asked += [{end: rank} for end in ("src", "dst") for rank in (*p.ranks, 99)]
    asked += [{"src": a, "dst": b} for a, b in itertools.product(some, some)]
    for which in asked:
        table = p.table(**which)
        listed = list(p.transfers(**which))
        assert rows_of(table, p) == listed
        assert len(table) == len(listed)
        assert {t.tensor for t in listed} == set(table.names)
        check_ranges(table)


def check_ranges(table: TransferTable) -> None:
    """Ranges have all bytes of each row, none twice, and no two are one at both ends."""
    ranges = table.ranges()
    assert (np.diff(ranges.row) >= 0).all() and (ranges.nbytes > 0).all()
    assert np.bincount(ranges.row, ranges.nbytes, len(table)).tolist() == table.nbytes.tolist()
    for row in range(len(table)):
        of = ranges.row == row
        ends = [(a[of], ranges.nbytes[of]) for a in (ranges.src_offset, ranges.dst_offset)]
        for (start, n), box in zip(ends, ("src", "dst"), strict=True):
            shape, strides = table.shape[row], getattr(table, f"{box}_strides")[row]
            itemsize = table.nbytes[row] // shape.prod()
            index = np.array(list(np.ndindex(*shape)), np.int64).reshape(shape.prod(), len(shape))
            first = getattr(table, f"{box}_offset")[row] + index @ strides
            cells = [np.arange(a, a + count, itemsize) for a, count in zip(start, n, strict=True)]
            # In the same order at both ends, so that each element gets to its place.
            assert np.concatenate(cells).tolist() == first.tolist()
        touch = [a[1:] == a[:-1] + n[:-1] for a, n in ends]
        assert not (touch[0] & touch[1]).any()


@given(pairs(), st.booleans())
def test_table_of_two_layouts(pair: tuple[Layout, Layout], near: bool) -> None:
    p = plan(*pair, topology=Topology(ranks_per_node=2) if near else None)
    check(p)
    with contextlib.suppress(PlanError):  # not linear
        check(adjoint(p))


@given(trees())
def test_table_of_trees(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
    check(plan(*tree))


@pytest.mark.parametrize("name", PLANS)
def test_table_of_plans_of_all_kinds(name: str) -> None:
    """Overlapping shards, padding, windows, addends, nodes, ranks that left, scalars, no elements, adjoints."""
    check(PLANS[name])


TP = Mesh(tp=2)
ROWS, COLUMNS_OF = (Layout((4, 2), TP, text) for text in ("(tp n) h", "n (tp h)"))
SMALL = plan(ROWS, COLUMNS_OF)


def test_a_table() -> None:
    table = SMALL.table(dst=1)
    assert repr(table) == "<table of 2 transfers>" and repr(table[:1]) == "<table of 1 transfer>"
    assert table.names == table.src_names == table.dst_names == ("",) and table.ops[0] == "copy"
    found = {name: getattr(table, name).tolist() for name in COLUMNS}
    assert found == {
        "tensor": [0, 0],
        "src_rank": [1, 0],
        "dst_rank": [1, 1],
        "op": [0, 0],
        "src_tensor": [0, 0],
        "src_start": [[0, 1], [0, 1]],
        "src_offset": [4, 4],
        "src_strides": [[8, 4], [8, 4]],
        "dst_tensor": [0, 0],
        "dst_start": [[2, 0], [0, 0]],
        "dst_offset": [8, 0],
        "dst_strides": [[4, 4], [4, 4]],
        "shape": [[2, 1], [2, 1]],
        "nbytes": [8, 8],
        "global_start": [[2, 1], [0, 1]],
        "addend": [0, 0],
    }
    assert all(getattr(table, name).dtype == np.int64 for name in COLUMNS)


def test_rows_of_a_table() -> None:
    """As numpy takes them; columns that were read before are of the new rows, too."""
    table = SMALL.table()
    assert table.src_rank.tolist() == [0, 0, 1, 1]
    for rows in (slice(1, 3), np.array([2, 1]), table.src_rank != table.dst_rank):
        some = table[rows]
        for name in COLUMNS:
            assert getattr(some, name).tolist() == getattr(table, name)[rows].tolist()
        row = some.ranges().row
        assert set(row.tolist()) == set(range(len(some)))
    assert len(table[:0]) == len(table[:0].ranges().row) == 0
    for row in (1, np.int64(1)):
        with pytest.raises(PlanError, match=r"1\)? is neither a slice nor an array of rows"):
            table[row]  # type: ignore[index]


def test_a_table_is_a_value() -> None:
    table = SMALL.table()
    for name in COLUMNS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(table, name)[0] = 1
    with pytest.raises(AttributeError):
        table.names = ()  # type: ignore[misc]
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert rows_of(again, SMALL) == list(SMALL.transfers())
        assert not any(getattr(again, name).flags.writeable for name in COLUMNS)


def test_names_are_of_the_table() -> None:
    """Local tensors of windows have names of their own; names of tensors elsewhere are left out."""
    column, row = Layout((6, 4), TP, "(tp n) h"), Layout((6, 4), Mesh(ranks=[5]), "n h")
    p = plan({"v": column, "w": halves(column, 2)}, {"v": column, "w": row})
    table = p.table(dst=5)
    assert table.names == ("w",) and table.dst_names == ("w",)
    assert set(table.src_names) == {"w[0]", "w[1]"}
    assert p.table(dst=0).names == ("v",)


def test_dimensions_in_front() -> None:
    """A scalar, a vector and a matrix have rows of two dimensions."""
    shapes = {"m": ((2, 3), "n h"), "s": ((), ""), "v": ((4,), "n")}
    src, dst = (
        {name: Layout(shape, mesh, text) for name, (shape, text) in shapes.items()}
        for mesh in (Mesh(), Mesh(ranks=[1]))
    )
    p = plan(src, dst)
    table = p.table()
    by_name = dict(zip(table.names, table.shape.tolist(), strict=True))
    assert by_name == {"m": [2, 3], "s": [1, 1], "v": [1, 4]}
    assert table.ranges().nbytes.sum() == 4 * (6 + 1 + 4)
    scalar = plan(src["s"], dst["s"]).table()
    assert scalar.shape.shape == (1, 0) and scalar.ranges().nbytes.tolist() == [4]


def test_too_many_boxes() -> None:
    """As for the transfers."""
    p = plan(Layout((64,), Mesh(a=2), "(n a)"), Layout((64,), Mesh(a=2, ranks=[2, 3]), "n"))
    with mock.patch.object(units, "MOST_BOXES", 31):
        for listed in (p.table, lambda: list(p.transfers())):
            with pytest.raises(PlanError, match="would send another 32 boxes of one tensor"):
                listed()


@given(pairs(ops=(None,)))
def test_ranges_copy_what_transfers_copy(pair: tuple[Layout, Layout]) -> None:
    """Every piece of a rank, by a memcpy between two buffers."""
    src, dst = pair
    p = plan(src, dst)
    rng = np.random.default_rng(0)
    kind = f"V{src.itemsize}"
    before = {
        rank: rng.bytes(int(np.prod(src.local_shape(rank))) * src.itemsize) for rank in p.src_ranks
    }
    held = {
        rank: np.frombuffer(data, kind).reshape(src.local_shape(rank))
        for rank, data in before.items()
    }
    for rank in p.dst_ranks:
        expected = np.zeros(dst.local_shape(rank), kind)
        for t in p.transfers(dst=rank):
            expected[t.dst_slices] = held[t.src_rank][t.src_slices]
        found = np.zeros(dst.local_shape(rank), kind)
        table = p.table(dst=rank)
        for row, here, there, nbytes in zip(*(c.tolist() for c in table.ranges()), strict=True):
            source = held[int(table.src_rank[row])].ctypes.data
            ctypes.memmove(found.ctypes.data + there, source + here, nbytes)
        assert found.tobytes() == expected.tobytes()
