"""Ranks that agree once: nobody is asked again; and where they do not agree after all, no wrong bytes arrive."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool, alone
from tests.distributed.tasks import beside, refitted


def test_nobody_is_asked_again(pool: Pool) -> None:
    """Moves of each kind are voted on once; a receipt is a vote of its own."""
    for once, every in pool.run(beside.count_votes):
        assert once == (1, 0, 2, 1, 0, 1, 0, 0)
        assert every == (1, 1, 2, 2, 1, 1, 1, 1)


def test_other_tensors_are_voted_on_once(pool: Pool) -> None:
    """As they are prepared, and not as they move."""
    for once, every in pool.run(refitted.count_votes):
        assert once == [1, 1, 1, 0]
        assert every == [1, 1, 1, 1]


@pytest.mark.parametrize("agree", ["every", "once"])
def test_what_is_prepared_wrongly_breaks_nothing(pool: Pool, agree: str) -> None:
    """All ranks hear of it, and go on once it fits."""
    for prepared, moved, *after in pool.run(refitted.prepare_wrongly, agree):
        assert "rank 5" in prepared and "lm_head.weight" in prepared
        assert "has not prepared" in moved
        assert after == ["", ""]


def test_a_call_may_wait_longer_than_compile_said(pool: Pool) -> None:
    """Also where its ranks do not vote."""
    assert pool.run(beside.late, 2.0) == [[""]] * 8


@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("mover", "receipt", "check", "whole", "compile")
        ),
    ],
)
def test_ranks_that_do_different_things(kind: str) -> None:
    """Never take bytes of one for the other's: the group is broken, at once where a rank knows, or after `timeout`."""
    found = alone(2, beside.unlike, kind)
    for said, wrong, took in found:
        assert not wrong
        assert took < 6.0
        assert "broken" in said[-1]
    first = [said[0] for said, _, _ in found]
    if kind == "tensor":
        assert "rank 1 failed" in first[0] and "the source tensor has shape (8, 2)" in first[0]
        assert "rank 1 (this one) failed" in first[1]
        assert max(took for _, _, took in found) < 3.0
    else:
        assert any("did not answer in time" in said for said in first), first


@pytest.mark.parametrize("is_named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_block_that_is_left_where_nobody_is_asked(is_named: bool) -> None:
    """Breaks the group at once: others may be in a move, in which they hear nothing."""
    others, mine = alone(2, beside.leaves_a_block, is_named)
    assert mine[0][0] == "ValueError: mine"
    assert "rank 1 failed" in others[0][0] and "ValueError: mine" in others[0][0]
    for said, kept, took in (others, mine):
        assert kept and took < 5.0
        assert "broken" in said[1]
