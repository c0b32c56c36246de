"""What torchtitan's own adapters make of checkpoints, recorded: `python tools/torchtitan_storage.py TORCHTITAN OUT`.

TORCHTITAN is a folder with the unpacked wheel of torchtitan 0.3.0. Each element of a checkpoint is numbered from 1,
and `from_hf` of the model's adapter is called on it. OUT has the form of tests/vectors/sglang_storage.json.gz, and its
writer. What torchtitan imports and is not installed is stood in for by empty modules.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_storage
import torch

VERSION = "0.3.0"
SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 4, "num_attention_heads": 2}
LATENT |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 5, "num_experts_per_tok": 2}
MODELS = {
    "llama3": ("LlamaConfig", "Llama3StateDictAdapter", {**SMALL, **HEADS}),
    "qwen3": ("Qwen3MoeConfig", "Qwen3StateDictAdapter", {**SMALL, **HEADS, **EXPERTS}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepSeekV3StateDictAdapter",
        {**SMALL, **LATENT, **EXPERTS},
    ),
}
"""torchtitan's folder, the class of transformers' configuration, the adapter, and the fields."""


def list_ref(name: str, config: dict[str, int]) -> list[list[Any]]:
    """The checkpoint's tensors and shapes."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        own = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        own |= _list_attention(name, config)
        # Layer 0 is dense in each of them.
        own |= (
            _list_sparse(name, config) if layer and name != "llama3" else _list_mlp(config, "mlp.")
        )
        for key, shape in own.items():
            leaf = "" if key.endswith("_bias") else ".weight"
            shapes[f"model.layers.{layer}.{key}{leaf}"] = shape
    return [[key, list(shape)] for key, shape in shapes.items()]


def _list_attention(name: str, config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if name == "deepseek_v3":
        low, latent, rope = (
            config[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
        )
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        shapes = {
            "q_a_proj": (low, hidden),
            "q_a_layernorm": (low,),
            "q_b_proj": (heads * (nope + rope), low),
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "kv_a_layernorm": (latent,),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }
    else:
        size = config["head_dim"]
        queries, keys = heads * size, config["num_key_value_heads"] * size
        shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden)}
        shapes |= {"v_proj": (keys, hidden), "o_proj": (hidden, queries)}
        if name == "qwen3":
            shapes |= {"q_norm": (size,), "k_norm": (size,)}
    return {f"self_attn.{key}": shape for key, shape in shapes.items()}


def _list_mlp(config: dict[str, int], prefix: str, ffn: int = 0) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    ffn = ffn or config["intermediate_size"]
    shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return {f"{prefix}{key}": shape for key, shape in shapes.items()}


def _list_sparse(name: str, config: dict[str, int]) -> dict[str, tuple[int, ...]]:
    count, ffn = config["num_experts"], config["moe_intermediate_size"]
    shapes = {"mlp.gate": (count, config["hidden_size"])}
    prefixes = [f"mlp.experts.{e}." for e in range(count)]
    if name == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
        prefixes.append("mlp.shared_experts.")
    for prefix in prefixes:
        shapes |= _list_mlp(config, prefix, ffn)
    return shapes


def convert(name: str, ref: list[list[Any]], config: dict[str, int]) -> dict[str, np.ndarray]:
    """What the adapter makes of the numbered checkpoint."""
    module = importlib.import_module(f"torchtitan.models.{name}.state_dict_adapter")
    attention = SimpleNamespace(
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        q_lora_rank=config.get("q_lora_rank", 0),
    )
    moe = SimpleNamespace(num_experts=config.get("num_experts"))
    layer = SimpleNamespace(attention=attention, moe=moe)
    model = SimpleNamespace(layers=[layer] * config["num_hidden_layers"], dim=config["hidden_size"])
    model.enable_weight_tying = False
    model.mtp_layers = []
    adapter = getattr(module, MODELS[name][1])(model, None)
    # It compares the rotation with a config.json, of which there is none here.
    adapter._validate_hf_rope_config = lambda *_: None
    starts = itertools.accumulate((math.prod(shape) for _, shape in ref), initial=1)
    numbered = {
        key: torch.arange(start, start + math.prod(shape)).reshape(shape)
        for (key, shape), start in zip(ref, starts, strict=False)
    }
    return {key: value.numpy() for key, value in adapter.from_hf(numbered).items()}


def main() -> None:
    """Records all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("torchtitan", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(given.torchtitan))
    sglang_storage.ABSENT = ("torchvision", "spmd_types", "tyro")
    sys.meta_path.append(sglang_storage._Finder())
    writer = sglang_storage.Writer()
    models = {}
    for name, (hf, _, config) in MODELS.items():
        ref = list_ref(name, config)
        sizes = [math.prod(shape) for _, shape in ref]
        starts = np.array([1, *itertools.accumulate(sizes, initial=1)][1:-1])
        found = convert(name, ref, config)
        entries = [writer.entry(key, ids, starts) for key, ids in found.items()]
        layouts = {"one": {"layout": {}, "ranks": [{"chunks": [entries]}]}}
        models[name] = {"hf": hf, "note": "", "config": config, "config_over": {}, "ref": ref}
        models[name]["layouts"] = layouts
    doc = {
        "overview": "what from_hf of torchtitan's adapters makes of checkpoints; tools/torchtitan_storage.py"
    }
    meta = {"doc": doc, "torchtitan": f"{VERSION} (PyPI wheel, Python sources unmodified)"}
    runs = [json.loads(text) for text in writer.runs]
    written = {"meta": meta, "strings": list(writer.strings), "runs": runs, "models": models}
    text = json.dumps(written, separators=(",", ":"))
    given.out.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
