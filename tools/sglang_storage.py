"""What SGLang's own loaders store, recorded: `python tools/sglang_storage.py SGLANG VLLM_VECTORS OUT`.

SGLANG is a folder with the unpacked wheel of SGLang 0.5.23, imported as it is. The models are those of VLLM_VECTORS,
whose form OUT has. Each is built by SGLang's own class as one rank of a layout, without processes: SGLang is told its
ranks and sizes in the place of process groups. What it imports and no CPU has is stood in for by empty modules.

Every element of the checkpoint is numbered from 1. SGLang loads three checkpoints, of one byte of the numbers each,
which every floating type stores exactly; a cell that still has what was there before has no source.

It needs torch, transformers, triton, and what SGLang imports of pure Python; none of it is a dependency of shardmath.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import math
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

VERSION = "0.5.23"
ABSENT = ("torchvision", "vllm")
"""Packages that are stood in for."""
BYTES = 3
FILES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "llama_tied": ("llama", "LlamaForCausalLM"),
    "llama_pp": ("llama", "LlamaForCausalLM"),
    "llama_vocab": ("llama", "LlamaForCausalLM"),
    "llama_thirds": ("llama", "LlamaForCausalLM"),
    "phi3": ("llama", "Phi3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "deepseek_v3": ("deepseek_v2", "DeepseekV3ForCausalLM"),
}
"""SGLang's file and class of each model."""
ADDED = {"deepseek_v3": {"moe_layer_freq": 1}}
"""Fields that SGLang reads, and transformers' configuration has no more."""

DENSE = ({}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2})
EXPERTS = ({"tp": 2, "ep": 2}, {"tp": 4, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2})
ATTENTION = (
    {"tp": 4, "attn_dp": 2},
    {"tp": 4, "attn_dp": 4, "ep": 2},
    {"tp": 4, "attn_dp": 2, "enable_dp_lm_head": True},
    {"tp": 4, "attn_dp": 2, "moe_dense_tp_size": 1, "ep": 2},
    {"tp": 4, "attn_cp": 2, "ep": 2},
    {"tp": 4, "attn_cp": 2, "moe_dp": 2, "ep": 2},
)
SHARED = {"tp": 4, "ep": 2, "SGLANG_SHARED_EXPERT_TP1": "1"}
"""Shared experts whole on each rank, as with all-to-all backends."""
LAYOUTS = {
    "llama_pp": ({"pp": 2}, {"pp": 3}, {"pp": 4}),
    "llama_vocab": ({"tp": 2}, {"tp": 8}),
    "llama_thirds": ({"tp": 3}, {"tp": 6}),
    "gpt2": ({}, {"tp": 2}, {"tp": 4}),
    "mixtral": (*DENSE, *EXPERTS),
    "gpt_oss": (*DENSE, ATTENTION[0], ATTENTION[2]),
    "qwen3": (*DENSE, *ATTENTION[:1], ATTENTION[2]),
    "qwen3_moe": (*DENSE, *EXPERTS, *ATTENTION),
    "deepseek_v3": (*DENSE, *EXPERTS, *ATTENTION, SHARED),
}
DOC = {
    "overview": "what vllm_storage.json.gz says of vLLM, of SGLang: its own model classes and their load_weights, as "
    "each rank of each layout; written by tools/sglang_storage.py",
    "layouts.<l>.layout": "tp, pp, ep, attn_dp, attn_cp, moe_dp: sizes; the others are SGLang's arguments. World rank "
    "= pp * TP + tp; tp = (attn_dp * ATTN_CP + attn_cp) * ATTN_TP + attn_tp = (moe_dp * EP + ep) * MOE_TP + moe_tp",
    "entry": "[name_i, kind, shape, -1, -1, segs, -1, -1, []]; kind 0: parameters and persistent buffers",
    "patches": f"ranks and sizes are put in SGLang's ParallelContext; stood in for: {', '.join(ABSENT)}",
}


def make_thirds() -> dict[str, Any]:
    """A model of 6 heads, so that 64 words cannot be a part of each rank's."""
    config = {"vocab_size": 100, "hidden_size": 36, "intermediate_size": 48}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3}
    layer = {
        "input_layernorm": (36,),
        "mlp.down_proj": (36, 48),
        "mlp.gate_proj": (48, 36),
        "mlp.up_proj": (48, 36),
        "post_attention_layernorm": (36,),
        "self_attn.k_proj": (18, 36),
        "self_attn.o_proj": (36, 36),
        "self_attn.q_proj": (36, 36),
        "self_attn.v_proj": (18, 36),
    }
    ends = {"lm_head": (100, 36), "model.embed_tokens": (100, 36), "model.norm": (36,)}
    shapes = ends | {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    ref = [[f"{name}.weight", list(shape)] for name, shape in shapes.items()]
    note = "vocab 100 over 3 and 6 ranks"
    return {"hf": "LlamaConfig", "note": note, "config": config, "config_over": {}, "ref": ref}


class _Absent(types.ModuleType):
    """A module that has whatever is asked of it."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> mock.MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are stood in for."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing."""


class _Group:
    """What a model asks of a process group while it is built."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = rank
        self.world_size = size
        self.is_first_rank = rank == 0
        self.is_last_rank = rank == size - 1
        self.ranks = list(range(size))
        self.device_group = self.cpu_group = None


@contextlib.contextmanager
def as_rank(rank: int, layout: Mapping[str, Any], config: object) -> Iterator[None]:
    """SGLang as this rank of a layout."""
    context = importlib.import_module("sglang.srt.runtime_context")
    rest = {name: value for name, value in layout.items() if name.islower()}
    environment = {name: layout[name] for name in layout.keys() - rest.keys()}
    tp, pp, ep, moe_dp, attn_dp, attn_cp = (
        rest.pop(name, 1) for name in ("tp", "pp", "ep", "moe_dp", "attn_dp", "attn_cp")
    )
    given = {"tp_size": tp, "pp_size": pp, "ep_size": ep, "moe_dp_size": moe_dp}
    given |= {"attn_dp_size": attn_dp, "attn_cp_size": attn_cp, **rest}
    # Where it has none SGLang reads the configuration from a model's folder.
    given["_model_config"] = types.SimpleNamespace(hf_config=config, hf_text_config=config)
    attn_tp = tp // attn_dp // attn_cp
    ranks = context.derive_spawn_ranks(
        world_rank=rank,
        tp_size=tp,
        ep_join_rank_offset=0,
        attn_cp_size=attn_cp,
        attn_tp_size=attn_tp,
        moe_dp_size=moe_dp,
        moe_ep_size=ep,
    )
    ranks["attn_tp_rank"], ranks["attn_dp_rank"] = context.derive_attention_ranks(
        tp_rank=ranks["tp_rank"], attn_tp_size=attn_tp, attn_cp_size=attn_cp
    )
    sizes = {"tp": tp, "pp": pp, "attn_tp": attn_tp, "attn_cp": attn_cp}
    sizes |= {"moe_ep": ep, "moe_tp": tp // ep // moe_dp, "moe_dp": moe_dp}
    groups = {f"{name}_group": _Group(ranks[f"{name}_rank"], n) for name, n in sizes.items()}
    with (
        context.get_context().override_server_args(**given),
        mock.patch.dict(os.environ, environment),
        context.get_parallel().override(**ranks, **groups),
        context.get_flags().dp.override(enabled=attn_dp > 1),
    ):
        yield


def record(
    name: str, model: Mapping[str, Any], rank: int, layout: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The number of the element in each cell of what the rank stores: 0 for a zero, -1 for no source."""
    transformers = importlib.import_module("transformers")
    file, cls = FILES[name]
    config = getattr(transformers, model["hf"])(**model["config"])
    for field, value in {**model["config_over"], **ADDED.get(name, {})}.items():
        setattr(config, field, value)
    config.architectures = [cls]
    with as_rank(rank, layout, config):
        module = getattr(importlib.import_module(f"sglang.srt.models.{file}"), cls)(config=config)
        kept = module.state_dict().keys()
        stored = dict(module.named_parameters())
        stored |= {name: buffer for name, buffer in module.named_buffers() if name in kept}
        loads = [_load(module, stored, model["ref"], 8 * byte) for byte in range(BYTES)]
    return {name: sum(load[name] for load in loads).clip(-1) for name in stored}


def _load(
    module: Any, stored: Mapping[str, Any], ref: Sequence[tuple[str, Sequence[int]]], shift: int
) -> dict[str, np.ndarray]:
    """One byte of each element's number, at its place in the number; below 0 where nothing was written."""
    torch = importlib.import_module("torch")
    for tensor in stored.values():
        tensor.data.fill_(-1)
    starts = itertools.accumulate((math.prod(shape) for _, shape in ref), initial=1)
    weights = []
    for (name, shape), start in zip(ref, starts, strict=False):
        numbers = np.arange(start, start + math.prod(shape)) >> shift & 255
        weights.append((name, torch.tensor(numbers, dtype=torch.float32).reshape(shape)))
    module.load_weights(iter(weights))
    values = {name: tensor.detach().float().numpy() for name, tensor in stored.items()}
    # Minus all that the other bytes may sum to where there is no source.
    low = -(1 << 8 * BYTES)
    return {
        name: np.where(value < 0, low, value.astype(np.int64) << shift)
        for name, value in values.items()
    }


class Writer:
    """The file, with its tables."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.runs: dict[str, int] = {}

    def entry(self, name: str, ids: np.ndarray, starts: np.ndarray) -> list[Any]:
        """One stored tensor."""
        at = self.strings.setdefault(name, len(self.strings))
        return [at, 0, list(ids.shape), -1, -1, self._segments(ids.ravel(), starts), -1, -1, []]

    def _segments(self, ids: np.ndarray, starts: np.ndarray) -> list[list[int]]:
        """The tensors whose elements follow one another, and which elements."""
        tensors = np.searchsorted(starts, ids, side="right") - 1
        # A zero is padding of the tensor before it.
        for i in np.flatnonzero(ids <= 0):
            tensors[i] = tensors[i - 1] if i else -1
        cuts = [0, *(np.flatnonzero(np.diff(tensors)) + 1), len(ids)]
        segments = []
        for start, stop in itertools.pairwise(cuts):
            tensor = int(tensors[start])
            part = ids[start:stop]
            offset = starts[tensor] if tensor >= 0 else 0
            flat = np.where(part > 0, part - offset, np.where(part == 0, -2, -1))
            segments.append([tensor, self._intern(_compress(flat))])
        return segments

    def _intern(self, blocks: list[list[int]]) -> int:
        return self.runs.setdefault(json.dumps(blocks), len(self.runs))


def _compress(flat: np.ndarray) -> list[list[int]]:
    """Runs of following elements, and of those the equally long ones at equal distances."""
    steps = np.where(flat[:-1] < 0, flat[1:] == flat[:-1], flat[1:] == flat[:-1] + 1)
    cuts = [0, *(np.flatnonzero(~steps) + 1), len(flat)]
    blocks: list[list[int]] = []
    for start, stop in itertools.pairwise(cuts):
        run = [int(flat[start]), int(stop - start)]
        last = blocks[-1] if blocks else [-1, 0]
        if run[0] < 0 or last[0] < 0 or last[1] != run[1]:
            blocks.append(run)
        elif len(last) == 2:
            last += [2, run[0] - last[0]]
        elif run[0] == last[0] + last[2] * last[3]:
            last[2] += 1
        else:
            blocks.append(run)
    return blocks


def write(vllm: Mapping[str, Any], out: Path) -> None:
    """All models in all their layouts."""
    writer = Writer()
    models = {}
    for name in FILES:
        model = vllm["models"].get(name) or make_thirds()
        sizes = [math.prod(shape) for _, shape in model["ref"]]
        starts = np.array([1, *itertools.accumulate(sizes, initial=1)][1:-1])
        layouts = {}
        for layout in LAYOUTS.get(name, DENSE):
            world = layout.get("tp", 1) * layout.get("pp", 1)
            ranks = []
            for rank in range(world):
                found = record(name, model, rank, layout)
                entries = [writer.entry(key, ids, starts) for key, ids in found.items()]
                ranks.append({"chunks": [entries]})
            label = "_".join(f"{key}{value}" for key, value in layout.items()) or "one"
            layouts[label] = {"layout": layout, "ranks": ranks}
            print(name, label)
        fields = {key: model[key] for key in ("hf", "note", "config", "config_over", "ref")}
        models[name] = {**fields, "layouts": layouts}
    runs = [json.loads(text) for text in writer.runs]
    meta = {"doc": DOC, "sglang": f"{VERSION} (PyPI wheel, Python sources unmodified)"}
    written = {"meta": meta, "strings": list(writer.strings), "runs": runs, "models": models}
    text = json.dumps(written, separators=(",", ":"))
    out.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Records all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("sglang", "vllm_vectors", "out"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    sys.path.insert(0, str(given.sglang))
    sys.meta_path.append(_Finder())
    write(json.loads(gzip.decompress(given.vllm_vectors.read_bytes())), given.out)


if __name__ == "__main__":
    main()
