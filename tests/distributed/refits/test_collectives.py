"""Ranks record without communication; those of one loader that calls collectives call it equally often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import broadcasts
from tests.distributed.tasks.broadcasts import Seen

BOTH = "views", "numbers"


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
@pytest.mark.parametrize("case", ["dtypes", "none", "map", "thread"])
def test_ranks_call_a_loader_with_collectives_equally_often(
    pool: Pool, case: str, ways: Any
) -> None:
    """Whatever targets they have: a rank that is in a collective by itself waits for ever."""
    found: list[Seen] = pool.run(broadcasts.load_by_broadcasts, case, ways)
    assert len({calls for calls, _ in found}) == 1
    for rank, (_, said) in enumerate(found):
        if case in ("none", "thread") and not rank:
            assert not said
        else:
            assert said.startswith(f"{rank}.w ") and f"by numbers: {rank}.w" in said


def test_an_error_of_one_rank_is_raised_after_the_last_run(pool: Pool) -> None:
    found: list[Seen] = pool.run(broadcasts.load_by_broadcasts, "removed", BOTH)
    assert len({calls for calls, _ in found}) == 1
    assert [rank for rank, (_, said) in enumerate(found) if "removed '1.w'" in said] == [1]


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_functions_of_other_ranks_targets_are_refused_after_the_last_run(
    pool: Pool, ways: Any
) -> None:
    """All ranks may pass the same functions: one that is refused at once would leave the others waiting."""
    found: list[Seen] = pool.run(broadcasts.load_by_broadcasts, "functions", ways)
    for rank, (_, said) in enumerate(found):
        names = f"names '1.w', but the tensors of into= are {rank}.w; "
        assert said.startswith(f"functions= {names if rank != 1 else 'says '}")


def test_a_cast_to_bool_between_collectives_is_named(pool: Pool) -> None:
    """Runs that tell True from False would be twice as many."""
    found: list[Seen] = pool.run(broadcasts.load_by_broadcasts, "bool", BOTH)
    assert len({calls for calls, _ in found}) == 1
    for rank, (_, said) in enumerate(found):
        if rank % 2:
            why = "float32 is not cast to bool in the recording of a loader with collectives"
            assert said.endswith(f"{why}; describe it by a row of sm.storage")
        else:
            assert said.startswith(f"{rank}.w ")


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
@pytest.mark.parametrize("in_pool", [False, True])
def test_barriers_are_skipped(pool: Pool, in_pool: bool, ways: Any) -> None:
    """Ranks that are recorded by views, and by numbers, call their loaders in different numbers."""
    found: list[Seen] = pool.run(broadcasts.load_with_barriers, in_pool, ways)
    assert (len({calls for calls, _ in found}) == 1) == (ways != BOTH)
    for rank, (_, said) in enumerate(found):
        assert said.startswith(f"{rank}.w ") and "unwritten" not in said


@pytest.mark.parametrize("ways", [BOTH, ("numbers",)])
def test_a_rank_waits_by_a_barrier_for_a_file_of_another(
    pool: Pool, ways: Any, tmp_path: Path
) -> None:
    found: list[Seen] = pool.run(broadcasts.load_after_a_barrier, str(tmp_path), ways)
    for rank, (_, said) in enumerate(found):
        assert said.startswith(f"{rank}.w ") and "unwritten" not in said
