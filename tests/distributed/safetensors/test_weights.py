"""Weights: what is a checkpoint, and which file of it has which tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardmath import Layout, Mesh
from shardmath_torch.checkpoints.safetensors.headers import WeightsError
from shardmath_torch.checkpoints.safetensors.slices import load
from shardmath_torch.checkpoints.safetensors.weights import open_weights, tied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = {
        f"model-0000{i}-of-00002.safetensors": {f"a{i}": torch.arange(6.0) + i} for i in (1, 2)
    }
    for name, part in parts.items():
        save_file(part, tmp_path / name)
    write_index(tmp_path, {next(iter(part)): name for name, part in parts.items()})
    return tmp_path


def write_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


def test_sharded_checkpoint(folder: Path) -> None:
    weights = open_weights(folder)
    layouts = {name: Layout((6,), Mesh(tp=2), "(tp n)") for name in ("a2", "a1")}
    assert {n: t.tolist() for n, t in load(weights, layouts, 1).items()} == {
        "a2": [5.0, 6.0, 7.0],
        "a1": [4.0, 5.0, 6.0],
    }


def test_some_files_of_several_without_an_index(folder: Path) -> None:
    """A part is never taken for the whole, and what is missing is named."""
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match="has neither"):
        open_weights(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightsError,
        match=r"neither model-00002-of-00002\.safetensors nor .*index\.json, so a part",
    ):
        open_weights(folder)
    (folder / "model-00001-of-00002.safetensors").rename(
        folder / "model-00001-of-00001.safetensors"
    )
    assert list(open_weights(folder).entries) == ["a1"]


def test_one_file_goes_before_an_index(folder: Path) -> None:
    save_file({"b": torch.zeros(2)}, folder / "model.safetensors")
    assert list(open_weights(folder).entries) == ["b"]


def test_the_only_file_of_a_folder(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert open_weights(tmp_path).path.name == "other.safetensors"


def test_tied_names(folder: Path) -> None:
    weights = tied(open_weights(folder), {"head": "a1"})
    layouts = {name: Layout((6,), Mesh(tp=2), "(tp n)") for name in ("a1", "head")}
    local = load(weights, layouts, 0)
    assert torch.equal(local["a1"], local["head"])
    assert local["a1"].data_ptr() != local["head"].data_ptr()


@pytest.mark.parametrize(
    ("names", "what"), [({"head": "a7"}, "has no 'a7'"), ({"a2": "a1"}, "has 'a2' already")]
)
def test_tied_names_that_cannot_be(folder: Path, names: dict[str, str], what: str) -> None:
    with pytest.raises(WeightsError, match=what):
        tied(open_weights(folder), names)


def fails(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(path)
    return str(caught.value)


def test_missing(tmp_path: Path) -> None:
    assert fails(tmp_path / "no.safetensors").endswith(
        "no.safetensors does not exist; give a safetensors file, or a folder of safetensors or of a checkpoint"
    )
    (tmp_path / "pytorch_model.bin").touch()
    assert (
        "has neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin"
        in fails(tmp_path)
    )


@pytest.mark.parametrize(
    ("places", "what"),
    [
        ({}, "has the weight_map {}, not a mapping"),
        (None, "has the weight_map None, not a mapping"),
        ({"a1": 3}, "puts 'a1' in 3"),
        ({"a1": "../a.safetensors"}, "puts 'a1' in '../a.safetensors'"),
        (
            {"a1": "gone.safetensors"},
            r"names 1 file, of which 1 cannot be found \(gone.safetensors\)",
        ),
        (
            {"a1": "model-00002-of-00002.safetensors", "a2": "model-00001-of-00002.safetensors"},
            "but model-0000. does",
        ),
        ({"x": "model-00001-of-00002.safetensors"}, "holds 'x', but no file of the index does"),
    ],
)
def test_bad_index(folder: Path, places: object, what: str) -> None:
    write_index(folder, places)
    with pytest.raises(
        WeightsError,
        match=what.replace("model-0000. does", r"model-0000\d-of-00002.safetensors does"),
    ):
        open_weights(folder)


def test_index_that_is_not_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')
    assert "the index is not JSON" in fails(folder)
