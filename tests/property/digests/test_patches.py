"""Patches are disjoint, have all that anybody holds, and name everybody who holds it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, testing, window
from shardmath.layouts.holdings import Windows
from shardmath.values.digests.patches import Holder, hull, list_patches, list_portions, narrow


def elements(windows: Windows, holder: Holder) -> set[tuple[int, ...]]:
    index = windows[holder.window].indices(holder.rank)
    return set(itertools.product(*(own[own >= 0].tolist() for own in index)))


@given(st.data(), testing.layouts())
def test_patches(data: st.DataObject, layout: Layout) -> None:
    windows = Windows((*data.draw(testing.tilings(layout)), layout))
    if data.draw(st.booleans()):
        windows = Windows(windows[:-1])
    patches = list_patches(windows)
    held: dict[tuple[int, ...], set[Holder]] = {}
    for w, one in enumerate(windows):
        for rank in one.mesh.ranks:
            for element in elements(windows, Holder(w, rank)):
                held.setdefault(element, set()).add(Holder(w, rank))
    found = {}
    for patch in patches:
        inside = [[p for lo, hi in ranges for p in range(lo, hi)] for ranges in patch.ranges]
        for element in itertools.product(*inside):
            assert element not in found
            found[element] = set(patch.holders)
            assert all(lo <= p < hi for p, (lo, hi) in zip(element, hull(patch), strict=True))
    assert found == held


@given(st.data(), testing.layouts())
def test_portions(data: st.DataObject, layout: Layout) -> None:
    """What a rank holds of all patches is what it holds; narrowed to a box, what it holds there."""
    windows = Windows((layout,))
    box = data.draw(testing.boxes(layout.shape))
    for rank in layout.mesh.ranks:
        mine = []
        for portion in list_portions(windows, rank):
            assert [len(own) for own in portion.runs] == list(layout.local_shape(rank))
            inside = [own.indices() for own in narrow(portion, box).runs]
            mine += itertools.product(*(own[own >= 0].tolist() for own in inside))
        expected = {
            element
            for element in elements(windows, Holder(0, rank))
            if all(lo <= p < hi for p, (lo, hi) in zip(element, box, strict=True))
        }
        assert len(mine) == len(expected) and set(mine) == expected


def test_windows_that_share_nothing_are_not_cut_by_each_other() -> None:
    """A flat buffer's windows: part of a row, whole rows, part of a row."""
    whole = Layout((4, 6), Mesh(), "n h")
    rows = [
        ((0, 1), (0, 2)),
        ((0, 1), (2, 6)),
        ((1, 3), (0, 6)),
        ((3, 4), (0, 4)),
        ((3, 4), (4, 6)),
    ]
    patches = list_patches(Windows(window(whole, box) for box in rows))
    assert sorted(map(hull, patches)) == rows
