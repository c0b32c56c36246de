"""Calls of several steps that are entered again, left, or met by other calls: an error on all ranks, and no wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import alone
from tests.distributed.tasks import steps


def test_a_thread_without_a_name_is_not_the_main_thread() -> None:
    for said in alone(2, steps.nameless):
        assert all("ranks disagree" in each for each in said), said


def test_another_question_is_never_answered() -> None:
    """Nor waited for: what a rank asks for differs from what others do."""
    for said in alone(3, steps.questions):
        assert all("ranks disagree" in each for each in said), said


@pytest.mark.parametrize("outer", ["save", "load"])
def test_a_callback_that_swallows_its_refusal(tmp_path: Path, outer: str) -> None:
    """What it called was refused at once, and nobody has noticed."""
    mine, others = alone(2, steps.nested, str(tmp_path), outer, True)
    refused = mine[:-2]
    assert refused and all("in the middle of a save, load or export" in said for said in refused)
    assert mine[-2:] == others == ["", ""]


@pytest.mark.parametrize("outer", ["save", "load"])
def test_a_callback_that_is_refused(tmp_path: Path, outer: str) -> None:
    """Its error is that of the step on all ranks, and the group goes on."""
    for said in alone(2, steps.nested, str(tmp_path), outer, False):
        assert f"rank 0 could not {outer}: this thread is in the middle of" in said[0]
        assert said[1] == ""


def test_one_exception_is_told_anew_in_each_call(tmp_path: Path) -> None:
    (mine, _), (others, took) = alone(2, steps.told_twice, str(tmp_path / "saved"))
    assert "KeyboardInterrupt: the same one" in mine[0] and mine[1].startswith("KeyboardInterrupt")
    assert "rank 0 could not load: interrupted by KeyboardInterrupt" in others[0]
    assert "left in the middle by KeyboardInterrupt" in others[1]
    assert took < 7.0


@pytest.mark.parametrize("where", ["ask_group", "from_dtensors"])
def test_an_interrupt_where_ranks_ask_how_dtensors_lie(tmp_path: Path, where: str) -> None:
    """Between steps it breaks the group, in a step it does not; all hear of it at once."""
    mine, *others = alone(4, steps.asking, str(tmp_path), where)
    assert mine[0][:2] == ["", "KeyboardInterrupt: "]
    for said, took in others:
        assert said[0] == "" and took < 12.0
        if where == "from_dtensors":
            assert "rank 0 could not lay out its tensors: interrupted by" in said[1]
            assert said[2] == ""
        else:
            assert "left in the middle by KeyboardInterrupt" in said[1]


def test_a_buffer_that_is_divided_on_one_rank_alone(tmp_path: Path) -> None:
    """Is found before anybody asks how it lies."""
    for said in alone(2, steps.buffer_on_one_rank, str(tmp_path)):
        assert "could not describe its module" in said[0]
        assert said[1] == ""
