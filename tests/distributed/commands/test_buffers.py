"""`python -m shardmath buffers`: it prints what the rules lay out, for models from everywhere; every error, once."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import transformers

from shardmath import ShardError, buffers
from shardmath.display.pictures.buffer_text import buffer_map
from shardmath.display.pictures.text import buffer_table
from shardmath_torch.commands.buffers import RULES, command
from shardmath_torch.commands.models.configs import (
    DEEPSEEK_V3,
    MODELS,
    NEMOTRON_NANO,
    NEMOTRON_SUPER,
    QWEN3_4B,
    QWEN3_30B,
    QWEN3_235B,
)
from shardmath_torch.commands.models.shapes import parameters, shapes


def dense() -> Any:
    return transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=100,
        dtype="bfloat16",
    )


def experts() -> Any:
    return transformers.DeepseekV3Config(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=10,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        vocab_size=100,
        dtype="bfloat16",
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    experts().save_pretrained(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = command([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


# Parameters


def test_parameters_are_what_is_trained_in_forward_order() -> None:
    params = {param.name: param for param in parameters(experts())}
    assert shapes(experts()).keys() - params.keys() == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    assert (
        next(iter(params)) == "model.embed_tokens.weight" and list(params)[-1] == "lm_head.weight"
    )
    assert {name for name, param in params.items() if param.managed is False} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert {name for name, param in params.items() if param.expert_parallel} == {
        f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight"
        for e in range(4)
        for kind in ("gate", "up", "down")
    }
    kinds = shapes(experts())
    assert all(param.dtype == kinds[name][1] for name, param in params.items())
    assert not any(param.shared_embedding for param in params.values())


def test_shared_embeddings_are_named() -> None:
    (shared,) = [
        p.name for p in parameters(dense(), shared=["lm_head.weight"]) if p.shared_embedding
    ]
    assert shared == "lm_head.weight"
    with pytest.raises(
        ShardError,
        match=r"shared names 'head', and .*embeddings: model.embed_tokens.weight, lm_",
    ):
        parameters(dense(), shared=["head"])


PUBLISHED = {
    QWEN3_4B: 4_022_468_096,
    QWEN3_30B: 30_532_122_624,
    QWEN3_235B: 235_093_634_560,
    DEEPSEEK_V3: 671_026_419_200,
    NEMOTRON_NANO: 31_577_940_288,
    NEMOTRON_SUPER: 120_668_707_840,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_sizes_published(name: str) -> None:
    assert sum(math.prod(shape) for shape, _ in shapes(name).values()) == PUBLISHED[name]
    assert PUBLISHED.keys() == MODELS.keys()


def test_renamed_models_keep_their_order() -> None:
    """transformers saves a Nemotron under other names, and sorts them: lm_head came first."""
    kind, settings = MODELS[NEMOTRON_NANO]
    small = {**settings, "hybrid_override_pattern": "ME*", "n_routed_experts": 3}
    names = [param.name for param in parameters(transformers.AutoConfig.for_model(kind, **small))]
    assert (names[0], names[-1]) == ("backbone.embeddings.weight", "lm_head.weight")
    layer = [name for name in names if name.startswith("backbone.layers.2.")]
    assert [re.split(r"[.]", name)[-2] for name in layer] == [
        "norm",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    ]
    assert "backbone.layers.1.mixer.experts.2.down_proj.weight" in names


# The command


def test_what_is_printed(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    status, out, err = run(capsys, model, "--dp", 4, "--expert-dp", 2, "--bucket-size", 1000)
    assert (status, err) == (0, "")
    layouts = buffers.full_layout(
        parameters(experts()),
        rule=buffers.distributed_optimizer,
        data_parallel_world_size=4,
        expert_data_parallel_world_size=2,
        bucket_size=1000,
    )
    assert out.startswith(buffer_table(layouts) + "\n\n")
    for key, layout in layouts.items():
        assert buffer_map(layout, 2 if key.is_expert_parallel else 4, most=4) in out
    assert "distributed_optimizer: bfloat16, gradients bfloat16, experts\n12 parameters in" in out
    assert (
        "model.layers.1.mlp.experts.3.down_proj.weight" in out
        and "e_score_correction_bias" not in out
    )


def count_buffers(rule: str, *, experts_apart: bool) -> int:
    """One of each dtype, and of each kind of parameter that the rule lays apart."""
    kinds = set()
    for param in parameters(experts()):
        whole = rule == "layer_wise" and (param.managed is False or len(param.shape) == 1)
        kinds.add((param.dtype, whole, experts_apart and param.expert_parallel))
    return len(kinds)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(capsys: pytest.CaptureFixture[str], model: Path, rule: str) -> None:
    status, out, err = run(capsys, model, "--dp", 4, "--rule", rule)
    assert (status, err) == (0, "")
    ranks = "1 rank has" if rule == "data_parallel" else "4 ranks have"
    assert ranks in out and f"{model}, {rule}: bfloat16" in out
    parts = [int(n) for n in re.findall(r"^(\d+) parameters? in", out, re.M)]
    assert sum(parts) == len(parameters(experts()))
    assert len(parts) == count_buffers(rule, experts_apart=rule == "megatron_fsdp")


@pytest.mark.parametrize("rule", ["distributed_optimizer", "layer_wise"])
def test_experts_lie_apart_where_they_are_divided(
    capsys: pytest.CaptureFixture[str], model: Path, rule: str
) -> None:
    """As in Megatron-Core, with other ranks."""
    buffers = count_buffers(rule, experts_apart=True)
    _, out, _ = run(capsys, model, "--dp", 4, "--expert-dp", 2, "--rule", rule)
    assert len(re.findall(r"^\d+ parameters? in", out, re.M)) == buffers
    assert "experts" in out and "2 ranks have" in out and "4 ranks have" in out


def test_options_reach_the_rules(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    _, plain, _ = run(capsys, model, "--dp", 4, "--bucket-size", "none")
    _, default, _ = run(capsys, model, "--dp", 4, "--bucket-size", "default")
    _, wide, _ = run(capsys, model, "--dp", 4, "--busbw")
    _, alone, _ = run(capsys, model, "--dp", 4, "--shared-embedding", "lm_head.weight")
    _, float32, _ = run(capsys, model, "--dp", 4, "--dtype", "float32", "--most", 1)
    assert plain == default != wide
    assert "[0, 65,536)" in wide and "bucket 1" in alone and "bucket 1" not in plain
    assert "float32" in float32 and "bfloat16" not in float32 and "more parameters" in float32


@pytest.mark.parametrize("place", ["folder", "file", "type", "name"])
def test_models_from_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    dense().save_pretrained(tmp_path)
    where = {
        "folder": tmp_path,
        "file": tmp_path / "config.json",
        "type": "llama",
        "name": QWEN3_4B,
    }[place]
    status, out, _ = run(capsys, where, "--dp", 8)
    count = {"type": 291, "name": 398}.get(place, len(parameters(dense())))
    assert status == 0 and f"\n{count} parameters in" in out


def test_pictures(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    status, out, _ = run(
        capsys,
        model,
        "--dp",
        4,
        "--expert-dp",
        2,
        "--svg",
        tmp_path / "b.svg",
        "--dtype",
        "float32",
    )
    files = [tmp_path / "b.svg", tmp_path / "b-1.svg"]
    assert status == 0 and all(f"drawn in {file}" in out for file in files)
    titles = [ElementTree.parse(file).getroot()[0].text or "" for file in files]
    assert [title.rpartition(": ")[2] for title in titles] == [
        "float32, gradients float32",
        "float32, gradients float32, experts",
    ]
    assert "experts.3.down_proj" in files[1].read_text() and "lm_head" in files[0].read_text()


# Errors


def test_errors_are_said_once(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    status, _, err = run(capsys, tmp_path / "nothing", "--dp", 2)
    assert status == 1 and re.match(r"buffers: no config for .*nothing.*; give a config", err)
    status, _, err = run(capsys, model, "--dp", 2, "--shared-embedding", "wte")
    assert (status, err.partition(";")[0]) == (
        1,
        "buffers: shared names 'wte', and no parameter is called that",
    )
    status, _, err = run(capsys, model, "--dp", 2, "--svg", tmp_path / "no" / "b.svg")
    assert status == 1 and re.match(
        r"buffers: cannot write .*b.svg: No such file or directory; give", err
    )
    config = (model / "config.json").read_text()
    (tmp_path / "link.svg").symlink_to(model / "config.json")
    status, _, err = run(capsys, model, "--dp", 2, "--svg", tmp_path / "link.svg")
    assert status == 1 and "describes the model; give another file" in err
    assert (model / "config.json").read_text() == config
    status, _, err = run(capsys, "lama", "--dp", 2)
    assert status == 1 and err.startswith(
        "buffers: no config for 'lama': there is no such file or folder; give"
    )
    status, _, err = run(capsys, model, "--dp", 2, "--dtype", "float5")
    assert status == 1 and "float5" in err and err.count("\n") == 1


def test_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = run(capsys, "llama", "--dp", 2)
    assert (status, err) == (1, "buffers: needs transformers; pip install transformers\n")


@pytest.mark.parametrize("setting", [{"hidden_size": -64}, {"hidden_size": "x"}])
def test_configs_that_make_no_model(
    capsys: pytest.CaptureFixture[str], model: Path, setting: dict[str, Any]
) -> None:
    """Whatever transformers makes of them, it is one error of ours."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    status, _, err = run(capsys, model, "--dp", 2)
    assert status == 1 and err.startswith("buffers: ") and "Error" in err and "give a" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--dp"),
        ("--dp 0", "'0' is not a number of 1 or more"),
        ("--dp 2 --bucket-size many", "'many' is not a number of 1 or more"),
        ("--dp 2 --rule adam", "invalid choice: 'adam'"),
        ("--dp 2 --rule zero --bucket-size 4", "--bucket-size does not apply to rule zero"),
        ("--dp 2 --rule megatron_fsdp --busbw", "--busbw does not apply to rule megatron_fsdp"),
        ("--dp 2 --rule zero --expert-dp 1", "--expert-dp does not apply to rule zero"),
        (
            "--dp 2 --rule data_parallel --expert-dp 1",
            "--expert-dp does not apply to rule data_parallel",
        ),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(capsys, "llama", *line.split())
    assert exit_.value.code == 2 and message in capsys.readouterr().err


# JSON

STORED = Path(__file__).parents[2] / "vectors" / "command_json" / "buffers.json"


def test_json_is_as_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A key that is new goes into the copy; one that is gone, or means something else, needs a new schema."""
    dense().save_pretrained(tmp_path)
    status, out, err = run(capsys, tmp_path, "--dp", 2, "--bucket-size", 6000, "--json")
    facts = json.loads(out)
    assert status == 0 and err == "" and facts.pop("model") == str(tmp_path)
    assert facts == json.loads(STORED.read_text())


def test_json_of_an_error_and_of_a_picture(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "a.svg"
    status, out, _ = run(capsys, model, "--dp", 2, "--json", "--svg", picture)
    assert status == 0 and json.loads(out)["buffers"] and picture.exists()
    status, out, err = run(capsys, tmp_path / "none", "--dp", 2, "--json")
    error = json.loads(out)
    assert status == 1 and err == "" and error["schema"] == "shardmath.error/1"
    assert "none" in error["message"]
