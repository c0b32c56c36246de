"""Shapes of real architectures: published sizes, transformers' own names and dtypes, and the bytes of two refits."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from shardmath import Layout, ShardError
from shardmath.base import dtypes
from shardmath.models.systems.former import engine, trainer
from shardmath.models.systems.hf import grouped
from shardmath_torch.commands.models import shapes as module
from shardmath_torch.commands.models.configs import DEEPSEEK_V3, MODELS, QWEN3_235B
from shardmath_torch.commands.models.shapes import UNSTACK, Entry, Unstack, shapes
from tests.refits.families import FAMILIES

cached = cache(shapes)


def elements(model: str) -> int:
    return sum(math.prod(shape) for shape, _ in cached(model).values())


# Dtypes


def config_of(family: str) -> Any:
    return transformers.AutoConfig.for_model(**FAMILIES[family].hf, dtype="bfloat16")


@cache
def rewritten(family: str) -> dict[str, Entry]:
    """The checkpoint that transformers writes of a model in bfloat16 that it loaded: it keeps some tensors in float32.

    Which ones differs by its version. From 5.24 on, DeepSeek-V3's and Nemotron's routers are among them."""
    auto = transformers.AutoModelForCausalLM
    with TemporaryDirectory() as folder:
        auto.from_config(config_of(family)).save_pretrained(folder)
        auto.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
        stored = load_file(Path(folder, "model.safetensors"))
    return {name: (tuple(t.shape), dtypes.canonical(t.dtype)) for name, t in stored.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_are_those_that_transformers_writes(family: str) -> None:
    assert shapes(config_of(family)) == rewritten(family)


def dtypes_of(entries: dict[str, Entry]) -> dict[str, str]:
    """By names without numbers of layers and experts."""
    return {re.sub(r"\d+", "*", name): dtype for name, (_, dtype) in entries.items()}


# Two models


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [(DEEPSEEK_V3, 45_395, 671_026_419_200), (QWEN3_235B, 36_945, 235_093_634_560)],
)
def test_sizes_are_those_published(model: str, tensors: int, parameters: int) -> None:
    assert (len(cached(model)), elements(model)) == (tensors, parameters)


def test_deepseek_v3() -> None:
    found = cached(DEEPSEEK_V3)
    biases = {name for name in found if name.endswith("e_score_correction_bias")}
    assert len(biases) == 58 and {found[name] for name in biases} == {((256,), "float32")}
    assert dtypes_of(found) == dtypes_of(rewritten("deepseek_v3"))
    assert len(grouped(found)) == 1_025
    layer = "model.layers.60."
    rest = {name.removeprefix(layer): found[name][0] for name in found if name.startswith(layer)}
    assert {name: shape for name, shape in rest.items() if "experts" not in name} == {
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.o_proj.weight": (7168, 16384),
        "mlp.gate.weight": (256, 7168),
        "mlp.gate.e_score_correction_bias": (256,),
        "input_layernorm.weight": (7168,),
        "post_attention_layernorm.weight": (7168,),
    }  # fmt: skip
    assert found[layer + "mlp.experts.255.gate_proj.weight"][0] == (2048, 7168)
    assert found[layer + "mlp.experts.255.up_proj.weight"][0] == (2048, 7168)
    assert found[layer + "mlp.experts.255.down_proj.weight"][0] == (7168, 2048)
    assert found[layer + "mlp.shared_experts.down_proj.weight"][0] == (7168, 2048)
    assert found["model.layers.2.mlp.up_proj.weight"][0] == (18432, 7168)
    assert found["lm_head.weight"][0] == found["model.embed_tokens.weight"][0] == (129280, 7168)


def test_qwen3_235b() -> None:
    found = cached(QWEN3_235B)
    layer = "model.layers.93."
    assert found[layer + "self_attn.q_proj.weight"][0] == (8192, 4096)
    assert (
        found[layer + "self_attn.k_proj.weight"][0]
        == found[layer + "self_attn.v_proj.weight"][0]
        == (512, 4096)
    )
    assert found[layer + "self_attn.q_norm.weight"][0] == (128,)
    assert found[layer + "mlp.experts.127.down_proj.weight"][0] == (4096, 1536)
    assert found["lm_head.weight"] == ((151936, 4096), "bfloat16")


# What a refit of each moves


def received(side: dict[str, Layout], rank: int) -> int:
    """Bytes of the rank's own cells."""
    count = Counter(side.values())
    return sum(
        math.prod(r.size for r in held.runs(rank)) * held.itemsize * n for held, n in count.items()
    )


REFITS: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    DEEPSEEK_V3: (
        {"ranks": range(256), "pp": 16, "ep": 16, "stages": (3, *[4] * 14, 2)},
        {"tp": 32},
        1342.1,
        43.94,
    ),
    QWEN3_235B: (
        {"ranks": range(128), "tp": 4, "pp": 8, "ep": 16, "stages": (11, *[12] * 6, 11)},
        {"tp": 8, "kv_heads": 4},
        470.2,
        58.96,
    ),
}
"""Trainer, engine, and for elements of 2 bytes: GB in all, and GB that each rank of the engine receives."""


@pytest.mark.parametrize("model", REFITS)
def test_bytes_of_a_refit(model: str) -> None:
    one, two, total, each = REFITS[model]
    entries, n = cached(model), len(one["ranks"])
    src, dst = trainer(entries, **one), engine(entries, ranks=range(n, 2 * n), **two)
    nbytes = sum(math.prod(shape) * dtypes.itemsize(dtype) for shape, dtype in entries.values())
    # Each rank of the engine needs all of a float32 tensor, which has 2 bytes more per element.
    more = sum(2 * math.prod(shape) for shape, dtype in entries.values() if dtype == "float32")
    assert round((nbytes - more) / 1e9, 1) == total
    assert {round((received(dst, rank) - more) / 1e9, 2) for rank in range(n, 2 * n)} == {each}
    assert list(src) == list(dst) == list(entries)
    assert (
        len({id(held) for held in src.values()}) < 1000
        and len({id(held) for held in dst.values()}) < 20
    )


@pytest.mark.parametrize("model", REFITS)
def test_each_stage_has_its_layers(model: str) -> None:
    one = REFITS[model][0]
    src, size = trainer(cached(model), **one), len(one["ranks"]) // one["pp"]
    norms = [name for name in src if name.endswith("input_layernorm.weight")]
    assert Counter(src[name].mesh.ranks[0] // size for name in norms) == dict(
        enumerate(one["stages"])
    )
    assert [src[name].mesh.ranks[0] // size for name in norms] == sorted(
        src[name].mesh.ranks[0] // size for name in norms
    )


# Any model: the names of transformers' own checkpoints


def tiny(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, num_hidden_layers=2, vocab_size=128)


def saved(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes that `save_pretrained` would write, before it drops tied tensors."""
    model = module._build(config)
    return {
        name: tuple(t.shape)
        for name, t in revert_weight_conversion(model, dict(model.state_dict())).items()
    }


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss", "llama", "qwen2", "opt"]
)
def test_names_are_those_of_a_saved_checkpoint(kind: str) -> None:
    config = tiny(kind)
    config.tie_word_embeddings = False
    assert {name: shape for name, (shape, _) in shapes(config).items()} == saved(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNSTACK)
def test_every_row_of_the_table(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    assert {name: shape for name, (shape, _) in shapes(config).items()} == saved(config)


def test_modules_that_transformers_renamed_have_their_old_names() -> None:
    assert "embed_out.weight" in shapes(tiny("gpt_neox"))


def test_names_where_transformers_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before transformers 5: the modules' own names."""
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    config = tiny("llama")
    assert list(shapes(config)) == list(module._build(config).state_dict())


def test_tied_tensors_go_by_their_first_name() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=32
    )
    names = set(shapes(config))
    config.tie_word_embeddings = True
    assert names - set(shapes(config)) == {"lm_head.weight"}


def test_architectures_decide() -> None:
    bert = transformers.BertConfig(num_hidden_layers=1)
    assert "bert.encoder.layer.0.output.dense.weight" in shapes(bert)
    bert.architectures = ["BertModel"]
    found = shapes(bert)
    assert (
        found["encoder.layer.0.output.dense.weight"] == ((768, 3072), "float32")
        and len(found) == 23
    )


def test_types() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=32
    )
    assert {dtype for _, dtype in shapes(config).values()} == {"float32"}
    assert {dtype for _, dtype in shapes(config, dtype="torch.float16").values()} == {"float16"}
    config.dtype = torch.bfloat16
    assert {dtype for _, dtype in shapes(config).values()} == {"bfloat16"}


def test_integers_keep_their_type() -> None:
    counter = torch.zeros(1, dtype=torch.int64)
    assert module._find_dtype("bn.num_batches_tracked", counter, "bfloat16", ()) == "int64"


def test_a_folder_with_a_config(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=32
    )
    config.save_pretrained(tmp_path)
    assert shapes(str(tmp_path)) == shapes(config)


def test_nothing_is_allocated() -> None:
    assert {
        t.device.type
        for _, t in module._list_stored(module._build(module._find_config(DEEPSEEK_V3)))
    } == {"meta"}


# Errors


def test_an_unknown_name(tmp_path: Any) -> None:
    with pytest.raises(
        ShardError, match=f"no config for .*; give a config, .* or one of {', '.join(MODELS)}"
    ):
        shapes(str(tmp_path / "nothing"))


def test_a_config_that_builds_nothing() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config.hidden_act = "none such"
    with pytest.raises(
        ShardError, match=r"no model can be made of LlamaConfig: .*none such.*; give a config"
    ):
        shapes(config)


def test_a_table_that_does_not_fit() -> None:
    rule = Unstack("experts.w", ("experts.{e}.a", "experts.{e}.b"))
    assert next(module._unstack("m.experts.w", (2, 4, 3), (rule,))) == ("m.experts.0.a", (2, 3))
    with pytest.raises(
        ShardError, match=r"'m.experts.w' of shape \(2, 5, 3\) does not fall into 2 equal parts"
    ):
        list(module._unstack("m.experts.w", (2, 5, 3), (rule,)))


# Configs of strangers


BERT = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 16,
}


def written(folder: Any, settings: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    "name", ["EarlyStoppingCallback", "pipeline", "PreTrainedModel", "AutoModel", "__class__", 3]
)
def test_an_architecture_that_is_no_model(tmp_path: Any, name: object) -> None:
    """Nothing of the kind is called: the config's own model is built."""
    assert shapes(written(tmp_path, BERT | {"architectures": [name]})) == shapes(
        written(tmp_path, BERT)
    )


def test_a_folder_with_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run, and nobody is asked whether to."""
    mark, code = (
        tmp_path / "ran",
        "from transformers import PretrainedConfig\nclass C(PretrainedConfig): pass\n",
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n{code}")
    with pytest.raises(ShardError, match="no config for"):
        shapes(written(tmp_path, {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}))
    known = BERT | {
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModel"), "evil.C"),
        "architectures": ["C"],
    }
    assert shapes(written(tmp_path, known)) == shapes(written(tmp_path, BERT))
    assert not mark.exists()


def test_attention_from_the_hub(tmp_path: Any) -> None:
    """A config may name a kernel, which transformers would fetch and run."""
    assert shapes(written(tmp_path, BERT | {"attn_implementation": "evil/kernel"})) == shapes(
        written(tmp_path, BERT)
    )


def test_layers_without_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends at a number of modules, not where memory does."""
    monkeypatch.setattr("shardmath_torch.commands.models.shapes.MOST_MODULES", 500)
    with pytest.raises(ShardError, match="more than 500 modules"):
        shapes(written(tmp_path, BERT | {"num_hidden_layers": 10**9}))
    assert shapes(written(tmp_path, BERT))
