"""A trainer and workers that meet and move as those of vLLM: what fails on one is soon an error on all that wait."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool, free_port
from tests.distributed.tasks.transfers import (
    TIMEOUT_S,
    TRAINERS,
    WORKERS,
    act,
    finish_alone,
    part,
    update_slowly,
)

SOON_S = 2 * TIMEOUT_S / 3
LAG_S = 0.15
ALL = tuple(range(TRAINERS + WORKERS))
OF_TRAINER = tuple(range(TRAINERS))


@pytest.fixture(params=[0.0, LAG_S])
def lag(request: pytest.FixtureRequest) -> float:
    """By how many seconds each rank comes later than the one before to what is said; the first may have gone on."""
    return float(request.param)


def test_workers_have_what_their_loaders_take(pool: Pool, lag: float) -> None:
    answers = pool.run(act, free_port(), "", lag)
    assert [said for said, _, _ in answers] == [""] * pool.size
    for column in range(WORKERS):
        _, _, made = answers[TRAINERS + column]
        wanted = [float(2 * row + column) for row in range(6)]
        assert made == ["met", wanted, [value + 100 for value in wanted]]


@pytest.mark.parametrize(
    ("how", "who", "why"),
    [
        ("clients", OF_TRAINER, "client= has 2 clients, but TrainerInfo's workers= names 1 engine"),
        ("source", OF_TRAINER, "TrainerInfo has rank=1, but this process is rank 0 of the ranks"),
        ("init", OF_TRAINER, "engine 0: ConnectionError: nobody answers"),
        ("record", ALL, "worker 0 could not record its loader: ArithmeticError"),
        ("start", OF_TRAINER, "trainer rank 0 could not start update 1: engine 0: ConnectionError"),
        ("update", OF_TRAINER, "engine 0: ConnectionError: nobody answers"),
        ("shape", ALL, "trainer rank 1 could not begin update 1: rank 1"),
        ("process", ALL, "cannot be processed"),
        (
            "finish",
            OF_TRAINER,
            "trainer rank 0 could not finish update 1: engine 0: ConnectionError",
        ),
    ],
)
def test_what_fails_on_one_is_an_error_on_all_at_once(
    pool: Pool, lag: float, how: str, who: tuple[int, ...], why: str
) -> None:
    for rank, (said, seconds, made) in enumerate(pool.attempt(act, free_port(), how, lag)):
        if rank in who:
            assert why in said
        assert (rank in who) == bool(said)
        assert seconds < SOON_S
        assert rank >= TRAINERS or "sent" not in made


def test_an_update_may_take_longer_than_ranks_wait(pool: Pool) -> None:
    """Who has nothing to send for most of it hears of the others as each layer is prepared."""
    assert pool.run(update_slowly, free_port()) == [""] * pool.size


def test_nobody_moves_before_all_have_begun(pool: Pool) -> None:
    """Not even what the one that has not begun has no part in: its weights are as they were, and it may answer."""
    others: list[tuple[str, list[float]]]
    first, parted, *others = pool.run(part, free_port())
    assert parted == ("parted", [])
    assert first == ("torn", [])
    assert others[:WORKERS] == [("torn", [0.0] * 6)] * WORKERS


def test_a_trainer_that_does_not_hear_that_an_update_is_finished(pool: Pool) -> None:
    """Is an error at place 0: the trainer has gone."""
    first, *others = pool.run(finish_alone, free_port())
    assert first.startswith(
        "trainer rank 1 has left the group, by shutdown(), after an update that"
    )
    assert not any(others)
