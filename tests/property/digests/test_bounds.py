"""The box that is found is the smallest with all that differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmath.layouts.algebra.box import Box
from shardmath.values.digests.bounds import WAYS, find_bounds


@given(st.data(), st.lists(st.integers(1, 500), max_size=3))
def test_smallest_box(data: st.DataObject, sizes: list[int]) -> None:
    one = st.tuples(*(st.integers(0, n - 1) for n in sizes))
    points = data.draw(st.lists(one, min_size=1, max_size=4))
    rounds = []

    def differ(boxes: list[Box]) -> list[bool]:
        rounds.append(len(boxes))
        inside = lambda p, box: all(lo <= at < hi for at, (lo, hi) in zip(p, box, strict=True))  # noqa: E731
        return [any(inside(point, box) for point in points) for box in boxes]

    found = find_bounds(tuple((0, n) for n in sizes), differ)
    assert found == tuple((min(x), max(x) + 1) for x in zip(*points, strict=True))
    assert len(rounds) <= 3 and max(rounds, default=0) <= 2 * WAYS * len(sizes)


def test_answers_that_contradict_each_other_end() -> None:
    assert find_bounds(((0, 100),), lambda boxes: [False] * len(boxes)) == ((0, 100),)
