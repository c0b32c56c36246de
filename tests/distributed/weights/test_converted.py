"""Models of transformers that keep experts in a stack: filled from what it saves, and exported as it saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardmath_torch as smt
from shardmath import formats
from shardmath_torch.checkpoints.files.places import CheckpointError
from tests.distributed.pool import Pool
from tests.distributed.tasks import experts as work

HOW = ["FSDP2", "tensor parallel"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two workers: transformers takes each of them seconds to import."""
    made = Pool(2)
    yield made
    made.close()


@pytest.mark.parametrize("family", work.FAMILIES)
def test_as_transformers_saves_them(pair: Pool, tmp_path: Path, family: str) -> None:
    """Bit for bit both ways, and under the same names."""
    model = work.make_model(family)
    model.save_pretrained(tmp_path / "saved")
    folders = {how: str(tmp_path / how) for how in HOW}
    args = (family, str(tmp_path / "saved"), folders)
    # The first test imports transformers.
    assert pair.run(work.filled_and_exported, *args, timeout=200) == [{how: [] for how in HOW}] * 2
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for folder in folders.values():
        assert set(smt.open_checkpoint(folder)) == set(stored)
        model.config.save_pretrained(folder)
        back = type(model).from_pretrained(folder).state_dict()
        assert all(full.equal(back[name]) for name, full in model.state_dict().items())


def test_layers_that_share_experts(tmp_path: Path) -> None:
    """The parts of the other layer are tied one by one, under the names that transformers gives them."""
    model = work.make_model("Mixtral")
    model.save_pretrained(tmp_path / "apart")
    first, second = model.model.layers
    second.mlp = first.mlp
    smt.export(tmp_path / "shared", model)
    index = json.loads((tmp_path / "shared" / "model.safetensors.index.json").read_text())
    tied = index["metadata"]["tied"]
    assert tied == {name: name.replace("layers.1", "layers.0") for name in tied}
    apart = set(smt.open_checkpoint(tmp_path / "apart"))
    assert tied.keys() == {name for name in apart if "layers.1.block_sparse_moe" in name}
    assert index["weight_map"].keys() == apart - tied.keys()


def test_experts_that_are_saved_whole_under_another_name(tmp_path: Path) -> None:
    """They are stored both ways, so that transformers finds its own."""
    model = work.make_model("Mixtral")
    experts = model.model.layers[0].mlp.experts
    # First, so that the layer's name is the tied one.
    model._modules = {"kept": experts, **model._modules}
    smt.export(tmp_path, model)
    model.config.save_pretrained(tmp_path)
    assert {"kept.gate_up_proj", "kept.down_proj"} <= set(smt.open_checkpoint(tmp_path))
    back = type(model).from_pretrained(tmp_path).state_dict()
    assert all(full.equal(model.state_dict()[name]) for name, full in back.items())


def make_nested() -> Any:
    """A multimodal model, in which a model with experts is a submodule."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    vision = CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, image_size=4, patch_size=2, **heads
    )
    text = work.make_model("Qwen3Moe").config
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision))


def wrap_inner(model: Any, wrap: Callable[[nn.Module], Any]) -> Any:
    """The model, with a wrapper around its language model."""
    model.model.language_model = wrap(model.model.language_model)
    return model


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def checkpointed(module: nn.Module) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)  # type: ignore[no-untyped-call]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "compiled": compiled,
    "checkpointed": checkpointed,
    "both": lambda model: compiled(checkpointed(model)),
    "its language model is compiled": lambda model: wrap_inner(model, compiled),
    "its language model is checkpointed": lambda model: wrap_inner(model, checkpointed),
    "both are compiled": lambda model: compiled(wrap_inner(model, compiled)),
}


@pytest.mark.parametrize("how", WRAPS)
def test_models_in_wrappers(tmp_path: Path, how: str) -> None:
    """They are filled and exported as without: transformers' conversions were found neither for a wrapped model, nor
    for tensors of one inside another."""
    plain = make_nested()
    plain.save_pretrained(tmp_path / "saved")
    wanted = list(plain.state_dict().values())
    other = make_nested()
    wrapped = WRAPS[how](other)
    smt.load_weights(tmp_path / "saved", wrapped)
    assert all(map(torch.equal, other.state_dict().values(), wanted))
    smt.export(tmp_path / "exported", wrapped)
    saved = smt.open_checkpoint(tmp_path / "saved")
    assert smt.open_checkpoint(tmp_path / "exported").shapes == saved.shapes


def test_experts_with_scales(tmp_path: Path) -> None:
    """Data and scales of each expert are those of the stack, if blocks end where experts do."""
    tiles = formats.FP8Blocks((2, 4))
    model = work.make_model("Qwen3Moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    wanted = {}
    for name, full in list(stored.items()):
        if "experts" in name:
            data, scales = map(torch.from_numpy, tiles.quantize(full.numpy()))
            stored[name] = data.view(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            wanted[name] = torch.from_numpy(tiles.dequantize(data.numpy(), scales.numpy()))
    save_file(stored, file)
    smt.load_weights(tmp_path, model, format=tiles)
    experts = model.model.layers[1].mlp.experts
    for e in range(3):
        name = f"model.layers.1.mlp.experts.{e}"
        assert experts.gate_up_proj[e, :6].equal(wanted[f"{name}.gate_proj.weight"])
        assert experts.gate_up_proj[e, 6:].equal(wanted[f"{name}.up_proj.weight"])
        assert experts.down_proj[e].equal(wanted[f"{name}.down_proj.weight"])
    with pytest.raises(CheckpointError, match="give format="):
        smt.load_weights(tmp_path, model)


def change(file: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Puts another tensor under a name, or none."""
    stored = load_file(file)
    stored.pop(name)
    save_file(stored if tensor is None else stored | {name: tensor}, file)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (None, "has no 'model.layers.1.mlp.experts.1.up_proj.weight'"),
        (
            torch.ones(5, 8),
            r"is stored as float32\[5, 8\], but as a part of .* it must be float32\[6, 8\]",
        ),
        (
            torch.ones(6, 8).half(),
            r"is stored as float16\[6, 8\], but as a part of .* it must be float32",
        ),
        (torch.ones(6, 8).to(torch.float8_e4m3fn), "is stored as float8_e4m3fn"),
    ],
    ids=["missing", "another shape", "another type", "bytes"],
)
def test_experts_that_are_not_as_the_others(
    tmp_path: Path, tensor: torch.Tensor | None, what: str
) -> None:
    """Nothing is filled."""
    model = work.make_model("Qwen3Moe")
    model.save_pretrained(tmp_path)
    change(tmp_path / "model.safetensors", "model.layers.1.mlp.experts.1.up_proj.weight", tensor)
    with pytest.raises(CheckpointError, match=what):
        smt.load_weights(tmp_path, model)


def test_scales_of_blocks_that_two_experts_share(tmp_path: Path) -> None:
    """A block of the stack would reach from gate into up, though the stack has as many blocks as both together."""
    tiles = formats.FP8Blocks((4, 4))
    model = work.make_model("Qwen3Moe", moe_intermediate_size=7)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name, full in list(stored.items()):
        if "experts" in name:
            data, scales = map(torch.from_numpy, tiles.quantize(full.numpy()))
            stored |= {name: data.view(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    save_file(stored, file)
    with pytest.raises(
        CheckpointError, match=r"gate_proj.*slice 0:7 of dimension 1 .* cuts a block of 4"
    ):
        smt.load_weights(tmp_path, model, format=tiles)
