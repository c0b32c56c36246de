"""Checkpoints: what transformers saves of a model, and what vLLM reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import shardmath as sm
from shardmath import formats

__all__ = [
    "Shapes",
    "calibrate",
    "cut",
    "lay_out",
    "quantize",
    "quantize_int8",
    "read",
    "save",
    "save_adapter",
    "shapes_of",
]

Shapes = dict[str, tuple[tuple[int, ...], str]]

INT8_MOST = 127


def save(fields: dict[str, Any], folder: Path, seed: int = 0) -> Path:
    """A model of random weights, as transformers saves it in bfloat16."""
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # A configuration says how its weights begin: too small for tokens to depend on them.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        # The bias of a router, which is float32 in every checkpoint.
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(folder)
    # What transformers has as code alone, vLLM looks for in the file.
    file = folder / "config.json"
    named = {key: fields[key] for key in ("topk_method", "scoring_func") if key in fields}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return folder


def calibrate(folder: Path, layers: int, seed: int = 0) -> Path:
    """The checkpoint with a scale each of the keys and the values that a layer caches."""
    tensors = dict(read(folder))
    torch.manual_seed(seed)
    for layer in range(layers):
        for cached in "kv":
            tensors[f"model.layers.{layer}.self_attn.{cached}_scale"] = torch.rand(())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def quantize(folder: Path, into: Path, tiles: formats.FP8Blocks) -> Path:
    """The same weights as DeepSeek publishes its own: projections in FP8 beside the scales of their tiles.

    The core's plain arithmetic quantizes, and not the kernels that a refit runs.
    """
    tensors = {}
    others = []
    for name, tensor in read(folder):
        tensors[name] = tensor
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            data, scales = tiles.quantize(tensor.float().numpy())
            tensors[name] = torch.from_numpy(data).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.from_numpy(scales)
        elif module != name:
            others.append(module)
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": list(tiles.block),
        "activation_scheme": "dynamic",
        "modules_to_not_convert": others,
    }
    (into / "config.json").write_text(json.dumps(config))
    return into


def quantize_int8(folder: Path, into: Path) -> Path:
    """The same weights as LLM Compressor saves them: projections in INT8, beside the scale of each row."""
    tensors = {}
    for name, tensor in read(folder):
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / INT8_MOST
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }
    (into / "config.json").write_text(json.dumps(config))
    return into


def save_adapter(folder: Path, into: Path, rank: int) -> Path:
    """An adapter of random weights for the checkpoint's attention, as peft saves it."""
    torch.manual_seed(rank)
    modules = ["q_proj", "o_proj"]
    tensors = {}
    for name, (shape, _) in shapes_of(folder).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            rows, columns = shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns) / 8
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank) / 8
    into.mkdir()
    save_file(tensors, into / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (into / "adapter_config.json").write_text(json.dumps(config))
    return into


def read(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all that the checkpoint has."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def shapes_of(folder: Path) -> Shapes:
    """Shape and dtype of each of its tensors."""
    found = {}
    for name, tensor in read(folder):
        found[name] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return found


def lay_out(shapes: Shapes, ranks: int) -> dict[str, sm.Layout]:
    """Layouts as those of FSDP2, of tensors of these shapes. Scalars are whole."""
    mesh = sm.Mesh(fsdp=ranks)
    layouts = {}
    for name, (shape, dtype) in shapes.items():
        divided = {"fsdp": sm.Shard(0)} if shape else {}
        layouts[name] = sm.Layout(shape, mesh, divided, dtype=dtype)
    return layouts


def cut(tensor: Tensor, layout: sm.Layout, rank: int) -> Tensor:
    """What a rank has of it."""
    if not layout.shape:
        return tensor.clone()
    rows = torch.from_numpy(layout.indices(rank)[0])
    return tensor[rows]
