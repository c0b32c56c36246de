"""Gradients of moves: of two groups at once, beside a rank that is idle, through one graph twice, and of scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import gradients as work


@pytest.fixture(scope="module")
def some() -> Iterator[Callable[..., list[Any]]]:
    """Runs a task on so many workers; others after one that left its group broken."""
    made: dict[int, Pool] = {}

    def run(size: int, task: Callable[..., Any], *args: Any) -> list[Any]:
        workers = made.setdefault(size, Pool(size))
        try:
            return workers.run(task, *args, timeout=40.0)
        finally:
            if workers.broken:
                made.pop(size).close()

    yield run
    for workers in made.values():
        workers.close()


@pytest.mark.parametrize("share", [True, False])
def test_gradients_of_moves_of_two_groups_are_never_mixed(some: Any, share: bool) -> None:
    """Moves of each group have the same numbers; where ranks differentiate others first, both get an error."""
    for said in some(3, work.of_two_groups, share)[:2]:
        assert all("ranks disagree" in str(each) for each in said), said


@pytest.mark.parametrize(("kind", "wanted"), [("ragged", (1.0, 2.0)), ("none", (0.0, 0.0))])
def test_a_plain_gradient_keeps_to_the_mesh_given(some: Any, kind: str, wanted: Any) -> None:
    """No group is made for it, for which rank 2 would be asked."""
    first, second, _ = some(3, work.beside_an_idle_rank, kind)
    rows = [*first, *second]
    assert [row[0] for row in rows] == [wanted[0], *[wanted[1]] * 3]


@pytest.mark.parametrize("retain", [False, True])
def test_a_graph_is_gone_through_twice_as_torchs_own(some: Any, retain: bool) -> None:
    """Whatever torch says of it."""
    ours = some(2, work.twice, True, retain)
    assert ours == some(2, work.twice, False, retain)


def test_a_scalar_outside_its_mesh(some: Any) -> None:
    """Is a scalar there, too, and zero: no tensor without dimensions is empty."""
    first, second = some(2, work.scalar_there_and_back)
    assert first == ([()] * 3, [3.0, 0.0, 3.0], 5.0)
    assert second == ([()] * 3, [0.0, 3.0, 0.0], [])


def test_ranks_that_take_a_tensor_for_another(some: Any) -> None:
    """Nobody waits for a rank that would have nothing to do."""
    for said in some(2, work.scalar_of_another_shape):
        assert "ranks disagree" in str(said), said
