"""What real trainers and engines stored is what rows say."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import systems
from bench.__main__ import main
from bench.recorded import Recorded, compare
from shardmath import StoreError

pytestmark = pytest.mark.long

VECTORS = Path(__file__).parents[2] / "vectors"
MEGATRON = VECTORS / "megatron_storage.json.gz"
VERSIONS = tuple(VECTORS / f"megatron_0_{minor}_storage.json.gz" for minor in (16, 19))
"""Stacked experts of 0.16, and in both versions layers that predict further tokens, with and without layouts of stages;
of 0.19 also names that 0.16 does not have."""
VLLM = VECTORS / "vllm_storage.json.gz"
SGLANG = VECTORS / "sglang_storage.json.gz"
TORCHTITAN = VECTORS / "torchtitan_storage.json.gz"


@pytest.mark.parametrize("model", Recorded(MEGATRON).models)
def test_megatron_stores_what_its_rows_say(model: str) -> None:
    found = compare(MEGATRON, [model])
    assert found.total and not found.differences, str(found)


@pytest.mark.parametrize(
    ("path", "model"),
    [(path, model) for path in VERSIONS for model in Recorded(path).models],
    ids=lambda given: (
        given.name.removesuffix("_storage.json.gz") if isinstance(given, Path) else given
    ),
)
def test_versions_of_megatron_store_what_their_rows_say(path: Path, model: str) -> None:
    found = compare(path, [model])
    assert found.total and not found.differences, str(found)


def test_all_entries_of_the_versions_are_compared() -> None:
    assert [compare(path).equal for path in VERSIONS] == [4432, 2781]


def test_a_head_that_is_never_read_may_be_recorded(tmp_path: Path) -> None:
    """A last stage with the tied embedding, to predict further tokens, has a head without sources. With sources it
    would be a tensor that no row stores."""
    data = json.loads(gzip.decompress(VERSIONS[0].read_bytes()))
    model = data["models"]["mtp_dense"]
    name = "tp2_pp2_ep1_etp2_dp1_cp1"
    model["layouts"] = {name: model["layouts"][name]}
    data["models"] = {"mtp_dense": model}
    listed = model["layouts"][name]["ranks"][3]["chunks"][0]
    strings = data["strings"]
    (head,) = [entry for entry in listed if strings[entry[0]] == "output_layer.weight"]
    (words,) = [entry for entry in listed if strings[entry[0]].startswith("embedding.")]
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(data))
    assert not compare(path).differences
    head[5] = words[5]
    path.write_text(json.dumps(data))
    (difference,) = compare(path).differences
    assert (difference.name, difference.why) == ("output_layer.weight", "no row stores it")


def test_gpt_oss_loads_one_expert_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks have unequally many experts its loader reads too few, and copies: a fault that rows do not have."""
    monkeypatch.setattr(systems.Vllm, "load", lambda self, layout, rank, arrays: arrays)
    found = compare(VLLM, ["gpt_oss"])
    assert len(found.differences) == 160
    assert all(".routed_experts." in one.name for one in found.differences)
    assert {one.layout.partition("_ep")[0] for one in found.differences} == {
        "tp4_dp1_pp1",
        "tp2_dp2_pp1",
        "tp1_dp4_pp1",
    }


def test_processed_tensors_are_compared_too() -> None:
    """Six tensors that FlashInfer's CUTLASS backend reorders."""
    file = Recorded(VLLM)
    loaded = sum(
        sum(kind < 2 for chunk in rank["chunks"] for _, kind, *_ in chunk)
        for model in file.models.values()
        for layout in model["layouts"].values()
        for rank in layout["ranks"]
    )
    assert loaded == 10257
    moved = [
        list(file.entries(rank, [0] * 1000, processed=True))
        for model in file.models.values()
        for layout in model["layouts"].values()
        for rank in layout["ranks"]
    ]
    assert sum(map(len, moved)) == 6


def test_all_entries_of_megatron_are_compared() -> None:
    file = Recorded(MEGATRON)
    layouts = [layout for model in file.models.values() for layout in model["layouts"].values()]
    ranks = [rank for layout in layouts for rank in layout["ranks"]]
    assert sum(len(chunk) for rank in ranks for chunk in rank["chunks"]) == 20807


def test_what_processing_computes_is_not_compared(tmp_path: Path) -> None:
    """A processed tensor without sources, such as one of scales that are made anew, was a TypeError."""
    data = json.loads(gzip.decompress(VLLM.read_bytes()))
    model = "qwen3_moe"
    data["models"] = {model: data["models"][model]}
    layouts = data["models"][model]["layouts"]
    name = "tp2_dp1_pp1_noep_moe_backend=flashinfer_cutlass"
    data["models"][model]["layouts"] = {name: layouts[name]}
    data["posts"] = [[shape, None, formula] for shape, _, formula in data["posts"]]
    path = tmp_path / "computed.json"
    path.write_text(json.dumps(data))
    assert not compare(path).differences


def test_a_difference_is_found_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of one rank have no source."""
    data = json.loads(gzip.decompress(MEGATRON.read_bytes()))
    model = data["models"]["dense_g4_tied"]
    model["layouts"] = dict(list(model["layouts"].items())[:2])
    data["models"] = {"dense_g4_tied": model}
    segments = data["models"]["dense_g4_tied"]["layouts"]["tp2_pp1_ep1_etp2_dp1_cp1"]
    (first, *_) = segments["ranks"][1]["chunks"][0]
    first[5] = [[-1, first[5][0][1]]]
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    assert main(["storage-check", str(path)]) == 1
    counted, *shown = capsys.readouterr().out.splitlines()
    equal, total = counted.removesuffix(" entries equal").split(" of ")
    assert int(equal) == int(total) - 1
    assert shown == [
        "dense_g4_tied tp2_pp1_ep1_etp2_dp1_cp1 rank 1: "
        "embedding.word_embeddings.weight (other elements)"
    ]


def test_the_command_says_when_all_is_equal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["storage-check", str(MEGATRON), "dense_g4_tied"]) == 0
    captured = capsys.readouterr()
    assert " entries equal" in captured.out
    assert captured.err.startswith("\r1 of 1: dense_g4_tied ")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"models": {}}')
    with pytest.raises(StoreError, match="no recorded storage; give a file with meta and models"):
        Recorded(path)
    path.write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        Recorded(path)
    with pytest.raises(StoreError, match="cannot be read"):
        Recorded(tmp_path / "absent.json")


def test_what_is_unpacked_has_a_bound(tmp_path: Path) -> None:
    """0.2 MB took 437 MiB."""
    path = tmp_path / "long.json.gz"
    path.write_bytes(gzip.compress(b"[" * (1 << 20)))
    with pytest.raises(StoreError, match="cannot be read: unpacked it is longer than 64 times its"):
        Recorded(path)


@pytest.mark.parametrize("model", Recorded(VLLM).models)
def test_vllm_stores_what_its_rows_say(model: str) -> None:
    found = compare(VLLM, [model])
    assert found.total and not found.differences, str(found)


@pytest.mark.parametrize("model", Recorded(SGLANG).models)
def test_sglang_stores_what_its_rows_say(model: str) -> None:
    found = compare(SGLANG, [model])
    assert found.total and not found.differences, str(found)


def test_all_entries_of_sglang_are_compared() -> None:
    file = Recorded(SGLANG)
    layouts = [layout for model in file.models.values() for layout in model["layouts"].values()]
    ranks = [rank for layout in layouts for rank in layout["ranks"]]
    assert len(layouts) == 72
    assert sum(len(chunk) for rank in ranks for chunk in rank["chunks"]) == 4152


def test_a_model_that_cannot_be_read_is_all_different(tmp_path: Path) -> None:
    """A configuration with other heads than its tensors have."""
    data = json.loads(gzip.decompress(VLLM.read_bytes()))
    data["models"]["phi3"]["config"]["num_attention_heads"] = 5
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(data))
    found = compare(path, ["phi3", "gpt2"])
    assert {one.model for one in found.differences} == {"phi3"}
    assert found.total - found.equal == len(found.differences)
    assert "with q=30" in found.differences[0].why


@pytest.mark.parametrize("model", Recorded(TORCHTITAN).models)
def test_torchtitan_stores_what_its_rows_say(model: str) -> None:
    found = compare(TORCHTITAN, [model])
    assert found.total and not found.differences, str(found)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"meta": None, "models": {}}, "has no recorded storage"),
        ({"meta": {"vllm": "0.33.0"}, "models": {}}, "has no entries to compare"),
        (b"\x1f\x8b" + bytes(100), "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_files_that_cannot_be_compared(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "file.json"
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    file.write_bytes(raw)
    with pytest.raises(StoreError, match=said):
        compare(file)


def _spoil_block(data: Any, block: list[int]) -> None:
    data["runs"] = [[block] for _ in data["runs"]]


DENSE = "dense_g4_tied"
SPOILED: dict[str, Callable[[Any], object]] = {
    "no strings": lambda data: data.pop("strings"),
    "no runs": lambda data: data.pop("runs"),
    "runs of text": lambda data: data.update(runs="text"),
    "no layouts": lambda data: data["models"][DENSE].pop("layouts"),
    "layouts in a list": lambda data: data["models"][DENSE].update(layouts=[1]),
    "a model of text": lambda data: data["models"].update({DENSE: "text"}),
    "a reference of None": lambda data: data["models"][DENSE].update(ref=None),
    "a reference of 2**60 cells": lambda data: data["models"][DENSE].update(ref=[["a", [1 << 60]]]),
    "a negative reference": lambda data: data["models"][DENSE].update(ref=[["a", [-5]]]),
    "a long block": lambda data: _spoil_block(data, [0, 1 << 40]),
    "a long block without a source": lambda data: _spoil_block(data, [-1, 1 << 40]),
    "a block that is repeated": lambda data: _spoil_block(data, [0, 1, 1 << 40, 1]),
    "a block of a length below 0": lambda data: _spoil_block(data, [-1, -4]),
    "a block of half a repeat": lambda data: _spoil_block(data, [0, 1, 2]),
    "a block of 2**70": lambda data: _spoil_block(data, [1 << 70, 1]),
    "a block of text": lambda data: _spoil_block(data, ["0", "1"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("what", SPOILED)
def test_files_whose_models_are_no_recorded_storage(tmp_path: Path, what: str) -> None:
    """They ended in tracebacks, or took the memory that a block of the file asked for."""
    data = json.loads(gzip.decompress(MEGATRON.read_bytes()))
    SPOILED[what](data)
    path = tmp_path / "spoiled.json"
    path.write_text(json.dumps(data))
    says = f"{path} has no recorded storage of model '{DENSE}': "
    with pytest.raises(StoreError, match=re.escape(says)):
        compare(path, [DENSE])


def test_a_damaged_archive(tmp_path: Path) -> None:
    file = tmp_path / "file.json.gz"
    raw = bytearray(gzip.compress(bytes(range(256)) * 40))
    raw[20:60] = bytes(40)
    file.write_bytes(raw)
    with pytest.raises(StoreError, match="cannot be read"):
        compare(file)
