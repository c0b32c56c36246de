"""verl reads from the spec of a layout the elements that ranks hold, and the other way round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from verl.workers.engine.spec import BlockPlacement

from shardmath import (
    Layout,
    Mesh,
    PlacementError,
    Shard,
    StridedShard,
    Table,
    equivalent,
    from_ranges,
)
from shardmath.testing import strategies
from tests.distributed.pool import Pool
from tests.verl import tasks

RANKS = 8
"""Of fewer, FSDP2's order and that of the placements hardly ever differ."""

MESHES = (Mesh(dp=8), Mesh(dp=4, tp=2), Mesh(replica=2, dp=4), Mesh(dp=8, tp=1))
OVERLAPPING = Table(0, [from_ranges([(0, 2)]), from_ranges([(0, 1)])])
UNEVEN = Layout((9, 4), MESHES[1], "(tp dp n) h")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(RANKS)
    yield made
    made.close()


def list_positions(layout: Layout, rank: int) -> list[int]:
    """The flat positions of what a rank holds, in the order of its local tensor."""
    grid = np.ix_(*layout.indices(rank)) if layout.shape else ()
    numbers = np.arange(np.prod(layout.shape, dtype=int)).reshape(layout.shape)
    return list(numbers[grid].flatten().tolist())


def count(layout: Layout) -> int:
    return int(np.prod(layout.shape, dtype=int))


def is_once(layout: Layout) -> bool:
    """Whether ranks that hold an element are replicas of each other. Of layouts without holes."""
    held = {tuple(list_positions(layout, rank)) for rank in range(RANKS)}
    return sum(map(len, held)) == count(layout)


def is_one_block(layout: Layout, rank: int) -> bool:
    """Whether a rank holds consecutive positions of each dimension, and no hole."""
    held = layout.runs(rank)
    return all((np.diff(runs.indices()) == 1).all() and runs.size == len(runs) for runs in held)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(layout=st.sampled_from(MESHES).flatmap(lambda mesh: strategies.layouts(mesh=mesh, op="sum")))
@example(layout=UNEVEN)
@example(layout=Layout((9, 4), Mesh(dp=8, tp=1), (StridedShard(0, 1), Shard(0))))
# The last ranks have no rows, and DTensor has offsets for them.
@example(layout=Layout((5, 4), Mesh(dp=8), "(dp n) h"))
@example(layout=Layout((8, 4), Mesh(dp=8), "(2 dp n) h"))
# Ranks that are no replicas of each other have the same row.
@example(layout=Layout((2, 1), Mesh(replica=2, dp=4), {"replica": OVERLAPPING}))
# A rank has one block, of no elements, but no order of splits gives the stride.
@example(layout=Layout((0, 2), MESHES[1], "n (2 tp h)"))
def test_verl_reads_what_the_layout_says(pool: Pool, layout: Layout) -> None:
    """Every rank's elements are where the layout has them, and verl takes each element from one rank, once."""
    seen = pool.run(tasks.describe, layout)
    is_blocks = all(is_one_block(layout, rank) for rank in range(RANKS))
    if layout.partial or not is_blocks or not is_once(layout):
        assert seen == [PlacementError.__name__] * RANKS
        return
    taken: Counter[int] = Counter()
    for rank, (positions, contributes, again) in enumerate(seen):
        assert positions == list_positions(layout, rank)
        assert equivalent(again, layout)
        if contributes:
            taken.update(positions)
    assert taken == dict.fromkeys(range(count(layout)), 1)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    tp_dim=st.sampled_from([0, 1, None]),
    axes=st.sampled_from(
        [{"dp": 4, "tp": 2}, {"dp": 8, "tp": 1}, {"replica": 2, "dp": 4, "tp": 1}]
    ),
)
@example(shape=(9, 4), tp_dim=0, axes={"dp": 4, "tp": 2})
def test_layouts_are_what_fsdp2_stores(
    pool: Pool, shape: tuple[int, int], tp_dim: int | None, axes: dict[str, int]
) -> None:
    """Even and uneven, strided or not. verl reads the same if it reads the trainer's spec, and always from ours."""
    for rank, (numbers, by_verl, layout, again) in enumerate(
        pool.run(tasks.shard, shape, tp_dim, axes)
    ):
        assert numbers == list_positions(layout, rank) == again[0]
        if isinstance(by_verl, str):
            assert "does not support uneven strided sharding" in by_verl
            assert shape[0] % RANKS
        else:
            assert by_verl == again


def test_uneven_strided_shards_are_those_that_verl_refuses(pool: Pool) -> None:
    for numbers, by_verl, layout, _ in pool.run(tasks.shard, (9, 4), 0, {"dp": 4, "tp": 2}):
        assert isinstance(by_verl, str)
        assert equivalent(layout, UNEVEN)
        assert len(numbers) < 16


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hf_slots": [("w", (4,))]}, "has a converter"),
        ({"to_hf_chunk": len}, "has a converter"),
        ({"place": 3}, "offset place=3"),
        ({"place": BlockPlacement((8, 4), (0, 0), (8, 4))}, "gather_group=None does not say"),
    ],
    ids=["slots", "converter", "offset", "no-group"],
)
def test_what_no_layout_says_is_an_error(pool: Pool, fields: dict[str, object], says: str) -> None:
    assert all(says in seen for seen in pool.run(tasks.refuse, fields))


def test_blocks_of_several_tensors_or_without_a_layout(pool: Pool) -> None:
    """Megatron's export calls each rank's part a whole tensor. A layout is a product of dimensions."""
    halves = [BlockPlacement((4, 4), (4 * (rank // 4), 0), (8, 4)) for rank in range(RANKS)]
    shapes = [(8, 4)] * RANKS
    assert (
        pool.run(tasks.read_blocks, halves, shapes)
        == ["bfloat16[8, 4] (d0 n) h on d0=2 copy=4"] * RANKS
    )
    assert all(
        "tensors of different shapes" in seen
        for seen in pool.run(tasks.read_blocks, halves, [(8, 4)] * 4 + [(6, 4)] * 4)
    )
    offsets = [((0, 0), (4, 4)), ((4, 0), (2, 4)), ((6, 0), (2, 2)), ((6, 2), (2, 2))]
    uneven = [BlockPlacement(size, offset, (8, 4)) for offset, size in 2 * offsets]
    assert all("no single layout" in seen for seen in pool.run(tasks.read_blocks, uneven, shapes))


def test_a_whole_tensor_is_on_all_ranks(pool: Pool) -> None:
    seen = pool.run(tasks.whole)
    assert [contributes for _, contributes in seen] == [True] + [False] * 7
    assert all(str(layout) == "bfloat16[8, 4] n h on world=8" for layout, _ in seen)
