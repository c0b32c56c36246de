"""The refit table: shapes of real models, and rows that are proved."""

from __future__ import annotations

import json

import pytest

from shardmath import PlanError
from shardmath.cli import main
from shardmath.refits.models import MODELS, count_parameters, hf_config
from shardmath.refits.table import ROWS, find_rows, make_refit, measure

PUBLIC = {
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "nemotron-3-nano": 31_577_940_288,
    "nemotron-3-super": 120_668_707_840,
    "llama-3-70b": 70_553_706_496,
}
"""Parameters of the published checkpoints."""


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count_parameters(MODELS[name]) == PUBLIC[name]


def test_an_engine_s_configuration() -> None:
    config = hf_config(MODELS["nemotron-3-nano"])
    assert (config["n_groups"], config["mamba_num_heads"], config["num_experts"]) == (8, 64, 128)


@pytest.mark.parametrize(
    "number", [0, 2, 5, 7, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in range(9, 16))]
)
def test_every_row_is_proved(number: int) -> None:
    measured = measure(ROWS[number], program=False)
    assert measured.verified
    assert measured.plan_s >= measured.bound_s * (1 - 1e-9)
    assert measured.bytes >= 2 * count_parameters(MODELS[measured.model]) - 4 * measured.tensors


def test_a_program_comes_near_the_bound() -> None:
    (row,) = find_rows(row=2)
    measured = measure(row)
    assert measured.program_s is not None
    assert measured.ratio < 1.02
    assert measured.program_s <= measured.plan_s


def test_engines_of_a_row_lie_behind_the_trainer() -> None:
    (row,) = find_rows(row=6)
    moved = make_refit(row)
    assert [bound.stored.meshes[0].ranks for bound in moved.engines.values()] == [
        tuple(range(16, 20)),
        tuple(range(20, 24)),
    ]


def test_rows_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refit-table", "--row", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "qwen3-4b"
    assert row["mapping"] == "DP8 -> TP8"
    assert row["verified"]
    assert 1 <= row["ratio"] < 1.02
    assert row.keys() >= {"bytes", "bound_s", "program_s", "published_s"}


def test_rows_that_there_are_not() -> None:
    with pytest.raises(PlanError, match="row 99 of a table of 16"):
        find_rows(row=99)
    with pytest.raises(PlanError, match="no row of model 'gpt-9'"):
        find_rows(model="gpt-9")
