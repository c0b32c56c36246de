"""What `redistribute` keeps: moves by weight, staging by group, and all of it no longer than the process groups."""

from __future__ import annotations

import pytest

import shardmath as sm
from shardmath_torch.tensors.dtensors.moves import (
    BYTES_PER_MOVE,
    BYTES_PER_PIECE,
    Moves,
    weigh_plan,
)
from tests.distributed.pool import Pool, free_port
from tests.distributed.tasks.cases import make_case
from tests.distributed.tasks.dtensors import axes_of_other_groups, mesh_of_other_groups
from tests.distributed.tasks.scenarios import begin_again, shared_staging

MESH = sm.Mesh(dp=4, tp=2)


def _most_pieces(plan: sm.Plan) -> int:
    return max(len([*plan.transfers(src=rank), *plan.transfers(dst=rank)]) for rank in plan.ranks)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("(tp n) h", "n (tp h)"),
        ("(dp tp n) h", "n (dp tp h)"),
        ("n h", "(dp n) h"),
        ("(dp n) h", "n h"),
        ("(n dp 1) h", "(n tp 2) h"),
        ("n h {sum: tp}", "(dp n) h"),
    ],
)
def test_weight_counts_the_pieces_of_the_busiest_rank(src: str, dst: str) -> None:
    """Without listing them: a rank that could send and need not is counted as if all who hold it sent alike."""
    plan = sm.plan(sm.Layout((24, 16), MESH, src), sm.Layout((24, 16), MESH, dst))
    counted = (weigh_plan(plan) - BYTES_PER_MOVE) // BYTES_PER_PIECE
    assert _most_pieces(plan) / 2 <= counted <= 2 * _most_pieces(plan) + 2


def test_the_oldest_moves_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many light ones are kept, beyond their weight the latest used; one that is too heavy is kept alone.

    To ask for one is not to use it: only what ranks agree on may say which is the latest.
    """
    made: list[sm.Plan] = []

    def fake(plan: sm.Plan, group: object) -> object:
        made.append(plan)
        return object()

    def move_nothing(mover: object, call: object) -> None:
        pass

    monkeypatch.setattr("shardmath_torch.tensors.dtensors.moves.compile", fake)
    monkeypatch.setattr("shardmath_torch.tensors.dtensors.moves.move_by", move_nothing)
    pairs = [
        tuple(sm.Layout((8 * n, 8), MESH, text) for text in ("(tp n) h", "n (tp h)"))
        for n in range(1, 8)
    ]
    assert len({weigh_plan(sm.plan(*pair)) for pair in pairs}) == 1
    moves = Moves(None, most=4 * weigh_plan(sm.plan(*pairs[0])))
    first = [moves.between(*pair) for pair in pairs[:4]]
    assert [moves.between(*pair) for pair in pairs[:4]] == first
    moves.between(*pairs[0])(None, out=None)
    moves.between(*pairs[1])
    for pair in pairs[4:]:
        moves.between(*pair)
    assert moves.between(*pairs[0]) == first[0]
    assert (len(made), len(moves)) == (7, 4)
    assert moves.between(*pairs[1]) != first[1]
    alone = Moves(None, most=1)
    assert alone.between(*pairs[0]) == alone.between(*pairs[0])
    assert len(alone) == 1


def test_moves_of_a_group_share_staging(pool: Pool) -> None:
    """One block, as large as the largest needs, however many movers."""
    texts = [
        ("(dp tp n) h", "n (tp dp h)"),
        ("(tp dp n) h", "n (dp tp h)"),
        ("(dp n) h", "n (dp tp h)"),
    ]
    plans = [sm.plan(sm.Layout((32, 64), MESH, a), sm.Layout((32, 64), MESH, b)) for a, b in texts]
    for needed, blocks in pool.run(shared_staging, [make_case(plan)[0] for plan in plans]):
        assert min(needed) > 0
        assert len(blocks) == 1 and blocks[0] >= max(needed)


def test_groups_that_end_and_begin_again() -> None:
    """`redistribute` between some ranks goes on under new groups, and nothing of the old ones is kept."""
    pool = Pool(3)
    try:
        for moved, alive in pool.run(begin_again, [free_port() for _ in range(3)]):
            assert moved == [True] * 3
            assert alive <= 1, "default groups of earlier worlds"
    finally:
        pool.close()


def test_a_mesh_that_outlives_its_groups() -> None:
    """torch finds groups by name, and gives names out again: other ranks would be waited for."""
    workers = Pool(4)
    try:
        answers = workers.attempt(mesh_of_other_groups, timeout=40.0)
    finally:
        workers.close()
    assert all("make the DeviceMesh again" in said for said in answers), answers
    assert any("was destroyed, and another has its name" in said for said in answers), answers


def test_axes_that_outlive_their_groups() -> None:
    """Other ranks are not asked in their place."""
    workers = Pool(4)
    try:
        answers = workers.attempt(axes_of_other_groups, timeout=20.0)
    finally:
        workers.close()
    assert all("make the DeviceMesh again" in str(said) for said in answers), answers
