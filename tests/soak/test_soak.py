"""A short soak: `make soak` is the long one."""

import pytest

from tests.soak.soak import run

pytestmark = pytest.mark.long


def test_nothing_is_lost_and_nothing_is_left_behind() -> None:
    """Moves of every kind in a few groups, of which some are struck; survivors form the next."""
    summary = run(moves=48, seed=3, steps=16)
    assert not summary.faults, str(summary)
    assert summary.moves >= 48
    assert summary.struck
    assert summary.committed
