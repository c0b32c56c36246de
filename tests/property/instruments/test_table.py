"""The refit table: shapes of real models, and rows that are proved."""

from __future__ import annotations

import json
import math
import sys

import pytest

from bench.__main__ import main
from bench.mappings import ROWS, Engine, Row, Trainer, find_rows
from bench.models import (
    MODELS,
    count_parameters,
    hf_config,
    served_shapes,
    shapes_of,
)
from bench.table import make_refit, measure
from shardmath import PlanError, StoreError, formats
from shardmath.models.storage.stored import Shapes

PUBLIC = {
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "nemotron-3-nano": 31_577_940_288,
    "nemotron-3-super": 120_668_707_840,
    "llama-3-70b": 70_553_706_496,
    "gpt-oss-120b": 116_829_156_672,
}
"""Parameters of the published checkpoints."""


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count_parameters(MODELS[name]) == PUBLIC[name]


def test_an_engine_s_configuration() -> None:
    config = hf_config(MODELS["nemotron-3-nano"])
    assert (config["n_groups"], config["mamba_num_heads"], config["num_experts"]) == (8, 64, 128)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            n, marks=() if n in (0, 2, 8, 16, 18, *range(28, 33), 37, 38) else pytest.mark.slow
        )
        for n in range(len(ROWS))
    ],
)
def test_every_row_is_proved(number: int) -> None:
    measured = measure(ROWS[number], program=False)
    assert measured.verified
    assert measured.plan_s >= measured.bound_s * (1 - 1e-9)
    model = MODELS[measured.model]
    if model.tiles is None:
        assert measured.bytes >= 2 * count_parameters(model) - 4 * measured.tensors
    else:
        assert measured.bytes == _count_bytes(served_shapes(shapes_of(model), model.tiles))


def _count_bytes(shapes: Shapes) -> int:
    sizes = {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}
    return sum(math.prod(shape) * sizes[dtype] for shape, dtype in shapes.values())


def test_nine_rows_are_in_fp8() -> None:
    """Half the bytes of bfloat16, a scale for 16,384 numbers, and two of keys and values in each layer."""
    rows = [row for row in ROWS if MODELS[row.model].tiles]
    assert len(rows) == 9
    held = shapes_of(MODELS["qwen3-4b-fp8"])
    served = served_shapes(held, formats.FP8Blocks())
    linear = 2560 * (32 + 8 + 8 + 32) * 128 + 3 * 2560 * 9728
    assert _count_bytes(held) - _count_bytes(served) == 36 * (linear - 4 * linear // 128**2)
    kv = [name for name in held if name.endswith(("k_scale", "v_scale"))]
    assert len(kv) == 72 and all(held[name] == served[name] == ((1,), "float32") for name in kv)


def test_all_that_an_engine_in_fp8_stores_comes_from_a_trainer_as_it_is() -> None:
    """Data, scales and all else: nothing waits at an engine to be made of something else."""
    (row,) = find_rows(row=31)
    moved = make_refit(row)
    stored = 0
    for side in moved.engines.values():
        for layout in side.layouts.values():
            local = [math.prod(layout.local_shape(rank)) for rank in layout.mesh.ranks]
            stored += sum(local) * layout.itemsize
    assert sum(moved.plan.received_bytes().values()) == stored
    assert moved.engines["0"].natives(8)[0, "model.layers.35.self_attn.attn.k_scale"] == (1,)
    gate_up = moved.engines["0"].natives(8)[0, "model.layers.0.mlp.gate_up_proj.weight_scale_inv"]
    assert gate_up == (2 * 9728 // 128 // 4, 20)


@pytest.mark.parametrize(
    ("model", "engine", "cut"),
    [
        (
            "qwen3-4b-fp8",
            Engine(tp=8),
            "mlp.gate_proj.weight': .* 0:1216 .* at 1216; divide the dimension at multiples of 128",
        ),
        pytest.param(
            "qwen3-30b-a3b-fp8",
            Engine(tp=4),
            "mlp.experts.0.gate_proj.weight': .* 0:192 .* at 192; divide the dimension at multiples of 128",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tile_that_an_engine_cuts_is_named(model: str, engine: Engine, cut: str) -> None:
    """vLLM refuses these, too."""
    with pytest.raises(StoreError, match=f"engine: tensor 'model.layers.0.{cut}"):
        make_refit(Row(model, Trainer(8), engine))


def test_a_program_comes_near_the_bound() -> None:
    (row,) = find_rows(row=2)
    measured = measure(row)
    assert measured.program_s is not None
    assert measured.ratio < 1.02
    assert measured.program_s <= measured.plan_s


def test_engines_that_store_alike_share_what_enters_their_node() -> None:
    """Without it each of two engines on a node takes in bytes of its own: twice the bound."""
    (row,) = find_rows(row=15)
    assert measure(row).ratio < 1.02


def test_why_a_program_is_not_nearer_to_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["refit-table", "--row", "28"]) == 0
    reason = capsys.readouterr().out.splitlines()[-1]
    assert reason.startswith(
        "qwen3-4b-fp8 DP8 -> DP8: rank 3 sends 551.57 MB in 11.0 ms; 0.2 ms more"
    )


@pytest.mark.parametrize("there", [True, False], ids=["a terminal", "a pipe"])
def test_progress_is_seen_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """One line on stderr, cut to the width, and gone when the table comes."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: there)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["refit-table", "--model", "qwen3-4b", "--no-programs"]) == 0
    captured = capsys.readouterr()
    assert " of 7" not in captured.out
    lines = captured.err.split("\r")
    if there:
        assert lines[1].rstrip() == "1 of 7: qwen3-4b DP8 -> DP8"
        assert lines[5] == "3 of 7: qwen3-4b PP2 DP4 -> T"
        assert lines[-2:] == [" " * 29, ""]
    else:
        assert lines == [""]


def test_rows_count_in_the_model_that_was_chosen() -> None:
    """They counted over all models, so that --model with --row found nothing."""
    kimi = find_rows("kimi-k2")
    assert find_rows("kimi-k2", 0) == kimi[:1]
    with pytest.raises(PlanError, match="row 1 of 1 row of kimi-k2; rows count from 0"):
        find_rows("kimi-k2", 1)
    with pytest.raises(PlanError, match="rows; rows count from 0"):
        find_rows(row=-1)


def test_a_mapping_in_its_own_words_and_in_ours() -> None:
    assert ROWS[7].mapping == "EP4 TP2 DP2 -> TP4 DP4"
    assert ROWS[7]._replace(written="").mapping == "TP2 EP4 DP8 -> 4 x TP4"


def test_engines_of_a_row_lie_behind_the_trainer() -> None:
    (row,) = find_rows(row=15)
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
    with pytest.raises(PlanError, match="row 99 of 40 rows; rows count from 0"):
        find_rows(row=99)
    with pytest.raises(PlanError, match="no row of model 'gpt-9'"):
        find_rows(model="gpt-9")
