"""A module's weights from checkpoints of quantized weights, beside transformers; and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats
from shardmath.layouts.edits import cast
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.weights.dequantizing import dequantize
from shardmath_torch.checkpoints.weights.quantized import QuantizedRead
from tests.distributed.pool import Pool
from tests.distributed.tasks import fine_grained as work
from tests.distributed.tasks.quantized import taken

TILES = formats.FP8Blocks()
HOW = ["FSDP2", "tensor parallel on four", "FSDP over tensor parallel"]


def quantized(
    name: str, x: np.ndarray, one: formats.Format = TILES, suffix: str = "_scale_inv"
) -> dict[str, torch.Tensor]:
    """Data and scales, as a file has them."""
    data, scales = map(torch.from_numpy, one.quantize(x))
    kinds = [getattr(torch, part.kind) for part in one.parts]
    return {name: data.view(kinds[0]), name + suffix: scales.view(kinds[1])}


def dequantized(
    stored: dict[str, torch.Tensor], one: formats.Format = TILES
) -> dict[str, torch.Tensor]:
    """All numbers in bfloat16, whole: the oracle."""
    out = {}
    for name, data in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is not None:
            values = one.dequantize(data.view(torch.uint8).numpy(), scales.numpy())
            out[name] = torch.from_numpy(values).bfloat16()
        elif not name.endswith("_scale_inv"):
            out[name] = data
    return out


def random(*shape: int, seed: int = 0) -> np.ndarray:
    made: np.ndarray = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return made


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in which the last tiles are shorter, and rows are few."""
    stored = {
        **quantized("q_proj.weight", random(300, 130)),
        **quantized("o_proj.weight", random(200, 400, seed=1)),
        **quantized("k_proj.weight", random(5, 260, seed=2)),
        "norm.weight": torch.from_numpy(random(9)).bfloat16(),
    }
    save_file(stored, tmp_path / "model.safetensors")
    save_file(dequantized(stored), tmp_path / "wanted")
    return stored


MESH = sm.Mesh(dp=2, tp=3)
PARTS = [
    "(tp n) (dp k)",
    "(n dp 5) (k tp 7)",
    "(3 tp n) k",
    "(dp[31 59] n) (tp~ k)",
    "(n)=<16:32 -5 0:16 32:90> (tp k)",
    "(tp n)=99 k",
]
FEW: list[formats.Format] = [
    formats.FP8Blocks((16, 32)),
    formats.FP8Blocks((1, 8), data="e5m2"),
    formats.MXFP8(axis=-2),
    formats.FP8("channel"),
    formats.FP8(),
]


@pytest.mark.parametrize("one", FEW, ids=lambda one: one.name)
@pytest.mark.parametrize("text", PARTS)
def test_every_rank_has_its_slice(one: formats.Format, text: str) -> None:
    """Cyclic, packed, reordered, padded, and cut anywhere."""
    lies = sm.Layout((90, 70), MESH, text)
    stored = dict(
        zip(("data", "scales"), map(torch.from_numpy, one.quantize(random(90, 70))), strict=True)
    )
    whole = torch.from_numpy(one.dequantize(*(part.numpy() for part in stored.values())))
    scale_layout = one.scale_layout(lies, duplicated=True)
    quant = QuantizedRead("w", one, lies, cast(lies, "uint8"), scale_layout, "scales")
    for rank in MESH.ranks:
        read = [
            taken(stored[name], layout, rank)
            for name, layout in (("data", quant.data), ("scales", quant.scales))
        ]
        found = dequantize(quant, *read, rank)
        assert found.numpy().tobytes() == taken(whole, lies, rank).numpy().tobytes()


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("how", HOW)
def test_any_layout_of_short_tiles(pool: Pool, tmp_path: Path, how: str) -> None:
    """Every rank has the slice of what is dequantized whole, where ranks cut tiles, too."""
    file = str(tmp_path / "model.safetensors")
    assert pool.run(work.filled, file, str(tmp_path / "wanted"), how) == [[]] * 8


def test_data_and_scales_by_hand(pool: Pool, tmp_path: Path, odd: dict[str, torch.Tensor]) -> None:
    """The scales' layout follows from the data's; a cut inside a tile names all that one needs to know."""
    file = str(tmp_path / "model.safetensors")
    name = "q_proj.weight"
    found = pool.run(work.by_hand, file, name, "(n tp 128) k")
    whole = dequantized(odd)[name]
    for rank, own in enumerate(found):
        first = rank % 4 * 128
        assert own == whole[first : first + 128].tolist()
    for kind, said in pool.run(work.by_hand, file, name, "(tp n) k"):
        assert kind == "FormatError"
        assert "tensor 'q_proj.weight': rank 0 holds positions 0:75 of dimension 0" in said
        assert "at 75; divide the dimension at multiples of 128" in said


@pytest.mark.usefixtures("odd")
def test_ranks_that_say_other_formats(pool: Pool, tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    for kind, said in pool.run(work.in_other_formats, file):
        assert kind == "CheckpointError" and "the format of 'q_proj.weight'" in said


# Beside transformers


def write_config(folder: Path, config: Any) -> None:
    """What transformers needs to know of a model and its tiles."""
    tiles = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    said = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    text = json.dumps(said | {"quantization_config": tiles})
    (folder / "config.json").write_text(text)


def test_transformers_reads_and_writes_the_same(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What we quantize is read by transformers' own loader as we read it, and what it writes by us as by it."""
    from transformers import (
        AutoModelForCausalLM,
        FineGrainedFP8Config,
        Qwen3Config,
        Qwen3ForCausalLM,
    )
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers import quantizer_finegrained_fp8

    # Asked for before anything is loaded, and not used by a load onto one device.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    for name, full in Qwen3ForCausalLM(config).bfloat16().state_dict().items():
        values = full.float().numpy()
        stored |= quantized(name, values) if "_proj" in name else {name: full.clone()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, config)

    # Without a GPU it dequantizes by itself.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = Qwen3ForCausalLM(config).bfloat16()
    smt.load_weights(tmp_path, ours, format=TILES)
    for name, full in theirs.state_dict().items():
        assert ours.state_dict()[name].equal(full), name
    save_file(dequantized(stored), tmp_path / "wanted")
    for how in HOW:
        assert pool.run(work.filled, str(tmp_path), str(tmp_path / "wanted"), how) == [[]] * 8

    # From 5.24 on, it writes what it dequantized as it is; 5.23 wrote tiles, as its quantizer still makes them.
    again, tiles = tmp_path / "again", tmp_path / "tiles"
    theirs.save_pretrained(again)
    tiles.mkdir()
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    made = quantizer.convert(theirs.state_dict())
    assert made["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    save_file(made, tiles / "model.safetensors")
    for folder in (again, tiles):
        check_read_as_by_transformers(folder, Fp8Dequantize(None))


def check_read_as_by_transformers(folder: Path, read: Any) -> None:
    """`load_weights` fills in what transformers' operation `read` makes of the folder's tiles."""
    wrote = load_file(folder / "model.safetensors")
    back = work.tree({name: tuple(full.shape) for name, full in dequantized(wrote).items()})
    smt.load_weights(folder, back, format=TILES)
    for name, parameter in back.named_parameters():
        scales = wrote.get(f"{name}_scale_inv")
        full = wrote[name]
        if scales is not None:
            full = read._dequantize_one(full, scales, torch.bfloat16)
        assert parameter.equal(full), name


def test_transformers_still_misreads_short_tiles(tmp_path: Path) -> None:
    """Of 192 rows and two scales it makes tiles of 96. If this fails, it was mended. We read what was written."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    x = random(192, 128)
    x[128:] *= 100
    stored = quantized("w", x)
    save_file(stored, tmp_path / "model.safetensors")
    theirs = Fp8Dequantize(None)._dequantize_one(stored["w"], stored["w_scale_inv"], torch.float32)
    ours = work.tree({"w": (192, 128)}, torch.float32)
    smt.load_weights(tmp_path, ours, format=TILES)
    assert np.abs(ours.w.numpy() - x).max() <= np.abs(x).max() / 16
    differ = (theirs != ours.w).any(dim=1)
    assert differ[96:128].all() and not differ[:96].any() and not differ[128:].any()


# Other formats, and scales that are stored otherwise


ROUND = formats.FP8Blocks((128, 128), power_of_two=True)
OTHERS: dict[str, tuple[formats.Format, str, torch.dtype]] = {
    "powers of two as E8M0": (ROUND, "_scale_inv", torch.float8_e8m0fnu),
    "powers of two as bytes": (ROUND, "_scale_inv", torch.uint8),
    "powers of two as bfloat16": (ROUND, "_scale_inv", torch.bfloat16),
    "MXFP8 as bytes": (formats.MXFP8(), "_scale_inv", torch.uint8),
    "MXFP8 as E8M0": (formats.MXFP8("e5m2"), "_scale", torch.float8_e8m0fnu),
    "per channel": (formats.FP8("channel"), "_scale", torch.float32),
    "per tensor": (formats.FP8(), "_scale", torch.float32),
}


@pytest.mark.parametrize("case", OTHERS)
def test_scales_are_found_and_read_as_they_are_stored(tmp_path: Path, case: str) -> None:
    one, suffix, dtype = OTHERS[case]
    x = random(96, 320) * np.float32(2**-20)
    data, scales = one.quantize(x)
    stored = quantized("w", x, one, suffix)
    if stored[f"w{suffix}"].element_size() == 1:
        stored[f"w{suffix}"] = stored[f"w{suffix}"].view(dtype)
    else:
        made = stored[f"w{suffix}"].to(torch.float8_e8m0fnu if dtype == torch.uint8 else dtype)
        stored[f"w{suffix}"] = made.view(dtype)
    save_file(stored, tmp_path / "model.safetensors")
    module = work.tree({"w": (96, 320)}, torch.float32)
    smt.load_weights(tmp_path, module, format=one)
    assert module.w.numpy().tobytes() == one.dequantize(data, scales).tobytes()


def test_what_is_quantized_in_the_module_too_stays_so(tmp_path: Path) -> None:
    """Data and scales of the same types, or as bytes, are filled in as they are stored."""
    x = random(200, 256)
    stored = quantized("w", x, formats.MXFP8())
    save_file(stored, tmp_path / "model.safetensors")
    for kinds in (("float8_e4m3fn", "float8_e8m0fnu"), ("uint8", "uint8")):
        module = torch.nn.Module()
        for name, kind in zip(stored, kinds, strict=True):
            room = torch.zeros(stored[name].shape, dtype=torch.uint8).view(getattr(torch, kind))
            module.register_buffer(name, room)
        smt.load_weights(tmp_path, module, format=formats.MXFP8())
        for name, full in stored.items():
            assert getattr(module, name).view(torch.uint8).equal(full.view(torch.uint8))


def test_tensors_of_few_bits_without_scales_are_cast(tmp_path: Path) -> None:
    full = torch.from_numpy(random(3, 4)).to(torch.float8_e4m3fn)
    save_file({"w": full}, tmp_path / "model.safetensors")
    module = work.tree({"w": (3, 4)})
    smt.load_weights(tmp_path, module, format=TILES)
    assert module.w.equal(full.bfloat16())


@pytest.mark.parametrize("one", [None, TILES])
def test_integers_with_scales_are_no_numbers(tmp_path: Path, one: formats.Format | None) -> None:
    """No format reads them, and without their scales they are other weights."""
    stored = {"w": torch.ones(4, 8, dtype=torch.int8), "w_scale": torch.full((4, 1), 0.01)}
    save_file(stored, tmp_path / "model.safetensors")
    module = work.tree({"w": (4, 8)})
    with pytest.raises(CheckpointError, match=r"'w' is .*int8"):
        smt.load_weights(tmp_path, module, format=one)
    assert not module.w.any()


ERRORS: dict[str, tuple[Any, str]] = {
    "no format": (
        None,
        r"'q_proj.weight' is bfloat16 in the module, but float8_e4m3fn in the checkpoint, with scales in "
        r"'q_proj.weight_scale_inv'; give format=, such as shardmath.formats.FP8Blocks\(\)",
    ),
    "other tiles": (
        formats.FP8Blocks((64, 128)),
        r"'q_proj.weight_scale_inv' has shape \(3, 2\), but format FP8 e4m3 per 64 x 128 has scales \(5, 2\) "
        r"of a tensor of shape \(300, 130\); give format= as the checkpoint was quantized",
    ),
    "other numbers": (
        formats.FP8Blocks(data="e5m2"),
        "'q_proj.weight' is stored as float8_e4m3fn, but format FP8 e5m2 per 128 x 128 has float8_e5m2",
    ),
    "three arrays": (
        formats.NVFP4(),
        "NVFP4 1-D stores a tensor as data, scales, .*; load these with",
    ),
    "no format at all": (
        "fp8",
        "format='fp8' is not a shardmath Format; give one of shardmath.formats",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path: Path, odd: dict[str, torch.Tensor], case: str) -> None:
    """All before anything is filled."""
    one, said = ERRORS[case]
    module = work.tree({name: tuple(full.shape) for name, full in dequantized(odd).items()})
    with pytest.raises(CheckpointError, match=said):
        smt.load_weights(tmp_path / "model.safetensors", module, format=one)
    assert not any(parameter.any() for parameter in module.parameters())


def test_scales_that_are_no_scales(tmp_path: Path) -> None:
    """Bytes that a format needs are not numbers."""
    stored = quantized("w", random(4, 64), formats.MXFP8())
    stored["w_scale_inv"] = torch.ones(4, 2)
    save_file(stored, tmp_path / "model.safetensors")
    module = work.tree({"w": (4, 64)})
    with pytest.raises(
        CheckpointError,
        match=r"'w_scale_inv' is stored as float32, but format MXFP8 .* has float8_e8m0fnu",
    ):
        smt.load_weights(tmp_path, module, format=formats.MXFP8())
    lies = sm.Layout((4, 2), sm.Mesh(), {}, dtype="uint8")
    with pytest.raises(CheckpointError, match="stored as float32"):
        smt.load(tmp_path, {"w_scale_inv": lies})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"w": "averge.w"}, "averge.w"),
        ({"W": "average.w"}, "names= has 'W': 'average.w', but the module has no 'W'"),
    ],
)
def test_names_that_are_not_there(tmp_path: Path, names: dict[str, str], said: str) -> None:
    """A misspelled name, of either side, is not replaced by the module's own, which has other values."""
    save_file({"w": torch.ones(2), "average.w": torch.full((2,), 2.0)}, tmp_path / "m.safetensors")
    module = work.tree({"w": (2,)})
    with pytest.raises(CheckpointError, match=said):
        smt.load_weights(tmp_path / "m.safetensors", module, names=names)
    assert not any(parameter.any() for parameter in module.parameters())
    smt.load_weights(tmp_path / "m.safetensors", module, names={"w": "average.w"})
    assert next(module.parameters()).tolist() == [2, 2]


def test_a_tied_parameter_is_only_under_the_names_that_are_given(tmp_path: Path) -> None:
    """Else a misspelled one of them would load the values of the other name, such as weights instead of the average."""
    module = nn.ParameterDict({"embed": torch.zeros(2)})
    module["head"] = module["embed"]
    stored = {"embed": torch.ones(2), "average.head": torch.full((2,), 2.0)}
    save_file(stored, tmp_path / "m.safetensors")
    for name in ("embed", "head"):
        names = {name: "average.head"}
        smt.load_weights(tmp_path / "m.safetensors", module, names=names)
        assert module["embed"].eq(2).all()
        with pytest.raises(CheckpointError, match=r"has no 'average.haed'"):
            smt.load_weights(tmp_path / "m.safetensors", module, names={name: "average.haed"})
    both = {"embed": "absent", "head": "average.head"}
    smt.load_weights(tmp_path / "m.safetensors", module, names=both)
    assert module["embed"].eq(2).all()


@pytest.mark.parametrize("index", [".metadata", "shardmath.json"])
@pytest.mark.parametrize("model", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_a_checkpoint_and_a_model(tmp_path: Path, index: str, model: str) -> None:
    """Either may be the newer one."""
    module = work.tree({"w": (2,)})
    layout = sm.Layout((2,), sm.Mesh(), {})
    smt.save(tmp_path, {"w": torch.ones(2)}, {"w": layout})
    for name in {".metadata", "shardmath.json"} - {index}:
        (tmp_path / name).unlink()
    smt.load_weights(tmp_path, module)
    assert next(module.parameters()).tolist() == [1, 1]
    file = "model.safetensors" if model == "model.safetensors" else "part.safetensors"
    save_file({"w": torch.full((2,), 2.0)}, tmp_path / file)
    if file != model:
        (tmp_path / model).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match=rf"by its {index}, and another model, in {model};"):
        smt.load_weights(tmp_path, module)
    smt.load_weights(tmp_path / model, module)
    assert next(module.parameters()).tolist() == [2, 2]
