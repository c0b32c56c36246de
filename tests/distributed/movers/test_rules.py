"""Refits by rules: engines hold what is made of the trainer's tensors, in every way to move."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import rules

WAYS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {"acknowledge": True}, True),
    ({"commit": "all", "agree": "once"}, {}, True),
    ({"changes": True}, {"check": "digest"}, True),
    ({"changes": True, "commit": "all"}, {}, True),
    ({"agree": "once"}, {"async_op": True, "check": "digest"}, False),
]


@pytest.mark.parametrize(("options", "call", "leaves"), WAYS, ids=str)
def test_every_step_brings_all(
    pool: Pool, options: dict[str, Any], call: dict[str, Any], leaves: bool
) -> None:
    for rank, found in enumerate(pool.run(rules.steps, options, call, leaves)):
        assert not any(found), f"rank {rank}: {found}"


def test_ranks_agree_on_rules(pool: Pool) -> None:
    for said in pool.run(rules.disagree):
        assert "transforms" in said and "rank 5" in said


def test_committed_changes_are_not_made_into_others_where_they_arrive(pool: Pool) -> None:
    """They would be made of what was there before."""
    for said in pool.run(rules.refuse_changes):
        assert "a rule computes a tensor from" in said


def test_casts_at_the_source_send_fewer_bytes() -> None:
    by_rules, as_held = rules.bytes_moved()
    assert as_held / 2 < by_rules < as_held
