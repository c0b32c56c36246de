"""Weights by slices: equal to slices of the whole, and damaged files refused before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardmath import Layout, Mesh
from shardmath_torch.safetensors.headers import DTYPES, WeightsError
from shardmath_torch.safetensors.slices import assemble, check, load
from shardmath_torch.safetensors.weights import Weights, open_weights, tied

MESH = Mesh(dp=2, tp=2)
TEXTS = (
    "(tp dp n) ...",
    "(dp n) ...",
    "(n tp 2) ...",
    "(4 dp n | tp n) ...",
    "... ",
    "(tp[7 3] n) ...",
    "(n)=12 ...",
)


def tensors() -> dict[str, torch.Tensor]:
    """One tensor of every type that safetensors slices, (10, 6), and odd shapes."""
    raw = torch.arange(10 * 6 * 8, dtype=torch.int64).to(torch.uint8)
    typed = {
        name: raw[: 60 * _size(name)].view(getattr(torch, name)).view(10, 6)
        for name in DTYPES.values()
    }
    typed["bool"] = (raw[:60] % 3 == 0).view(10, 6)
    return {
        **typed,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bias": torch.arange(9.0),
    }


def _size(name: str) -> int:
    return int(getattr(torch, name).itemsize)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors().items()}, path)
    return path


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_headers_say_every_type(file: Path) -> None:
    weights = open_weights(file)
    assert weights.shapes == {
        n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors().items()
    }
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors().values())


@pytest.mark.parametrize("text", TEXTS)
def test_slices_equal_the_whole(file: Path, text: str) -> None:
    full, weights = load_file(file), open_weights(file)
    names = [name for name in full if full[name].shape == (10, 6)]
    layouts = {name: Layout((10, 6), MESH, text, dtype=name) for name in names}
    for rank in MESH.ranks:
        local = load(weights, layouts, rank)
        assert list(local) == names
        for name in names:
            rows, _ = layouts[name].indices(rank)
            expected = torch.zeros(len(rows), 6 * _size(name), dtype=torch.uint8)
            held = torch.from_numpy(rows >= 0)
            expected[held] = full[name].view(torch.uint8)[torch.from_numpy(rows[rows >= 0])]
            assert local[name].dtype == full[name].dtype
            assert raw(local[name]) == raw(expected)


@pytest.mark.parametrize(
    ("name", "text"), [("scalar", ""), ("empty", "(tp n) h"), ("bias", "(tp dp n)")]
)
def test_odd_shapes(file: Path, name: str, text: str) -> None:
    weights = open_weights(file)
    shape, dtype = weights.shapes[name]
    layout = Layout(shape, MESH, text, dtype=dtype)
    shards = {rank: load(weights, {name: layout}, rank)[name] for rank in MESH.ranks}
    assert [tuple(shards[rank].shape) for rank in MESH.ranks] == [
        layout.local_shape(rank) for rank in MESH.ranks
    ]
    assert raw(assemble(layout, shards)) == raw(tensors()[name])


def test_progress_counts_local_bytes(file: Path) -> None:
    seen: list[int] = []
    layouts = {
        "bias": Layout((9,), MESH, "(tp n)"),
        "float16": Layout((10, 6), MESH, "n h", dtype="float16"),
    }
    load(open_weights(file), layouts, 0, progress=seen.append)
    assert sorted(seen) == [5 * 4, 120]


def test_check_finds_the_first_byte_that_differs(file: Path) -> None:
    weights, layout = open_weights(file), {"float32": Layout((10, 6), MESH, "(tp dp n) h")}
    local = load(weights, layout, 3)
    assert check(weights, layout, 3, local) == local["float32"].nbytes
    local["float32"].view(torch.uint8)[1, 9] ^= 1
    with pytest.raises(
        WeightsError,
        match=r"'float32' differs from the file on rank 3 at \[9, 2\]: .* arrived, the file",
    ):
        check(weights, layout, 3, local)


def test_check_leaves_holes_alone(file: Path) -> None:
    weights, layout = open_weights(file), {"bias": Layout((9,), MESH, "(tp n)=12")}
    local = load(weights, layout, 1)
    local["bias"][-3:] = 7.0
    assert check(weights, layout, 1, local) == 3 * 4


# Several files, several names


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
        WeightsError, match=r"neither model-00002-of-00002\.safetensors nor .*index\.json: a part"
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


# What is asked must be there


@pytest.mark.parametrize(
    ("name", "layout", "what"),
    [
        ("b", Layout((9,), MESH, "(tp n)"), "has no 'b' among its"),
        (
            "bias",
            Layout((8,), MESH, "(tp n)"),
            r"'bias' is float32\[9\] in .*, its layout says float32\[8\]",
        ),
        (
            "bias",
            Layout((9,), MESH, "(tp n)", dtype="float16"),
            r"'bias' is float32\[9\].*float16\[9\]",
        ),
        (
            "bias",
            Layout((9,), MESH, "(tp n) {sum: dp}"),
            "'bias' is Partial .* a file holds whole values",
        ),
    ],
)
def test_layouts_that_the_file_does_not_have(
    file: Path, name: str, layout: Layout, what: str
) -> None:
    with pytest.raises(WeightsError, match=what):
        load(open_weights(file), {name: layout}, 0)


# Damaged files


def fails(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(path)
    return str(caught.value)


def header_of(file: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(file: Path, header: bytes, data: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_missing(tmp_path: Path) -> None:
    assert fails(tmp_path / "no.safetensors").endswith(
        "no.safetensors does not exist; give a safetensors file, or a folder of safetensors or of a checkpoint"
    )
    (tmp_path / "pytorch_model.bin").touch()
    assert (
        "has neither model.safetensors nor model.safetensors.index.json, but pytorch_model.bin"
        in fails(tmp_path)
    )


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1, -100])
def test_cut_short(file: Path, keep: int) -> None:
    data = file.read_bytes()
    kept = data[:keep]
    file.write_bytes(kept)
    text = fails(file)
    assert f"{file} is cut short: {len(kept)} bytes present" in text
    assert text.endswith("fetch it again")
    if keep < 0:
        assert f"{len(data)} expected by its header, {-keep} missing" in text


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_prefix_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("cut") / "m.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.arange(4)}, file)
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[: data.draw(st.integers(0, len(whole_file) - 1))])
    assert "cut short" in fails(file)


def test_too_long(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"abc")
    assert f"{size + 3} bytes present, {size} expected by its header, 3 too many" in fails(file)


def test_garbage(file: Path) -> None:
    file.write_bytes(b"<html>404 not found</html>" * 10)
    assert "it announces a header of" in fails(file)
    write(file, b"\xff\xfe not json", b"")
    assert "the header is not JSON" in fails(file)
    write(file, b"[1, 2]", b"")
    assert "the header is a JSON list" in fails(file)
    write(file, b'{"a": 1, "a": 2}', b"")
    assert "'a' appears twice" in fails(file)
    write(file, b"[" * 100_000, b"")
    assert "the header is not JSON" in fails(file)


Header = dict[str, dict[str, object]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda h: h["bias"].pop("dtype"),
            "entry of 'bias' is .* not a dtype, a shape and two data_offsets",
        ),
        (lambda h: h["bias"].update(shape=[-9]), "entry of 'bias'"),
        (lambda h: h["bias"].update(shape=9), "entry of 'bias'"),
        (lambda h: h["bias"].update(shape=[True]), "entry of 'bias'"),
        (lambda h: h["bias"].update(data_offsets=[0]), "entry of 'bias'"),
        (lambda h: h.update(bias=None), "entry of 'bias' is None"),
        (lambda h: h["bias"].update(dtype="F4"), "'bias' as F4, which cannot be sliced"),
        (
            lambda h: h["bias"].update(shape=[10]),
            r"'bias' is F32\[10\], 40 bytes, its data_offsets .* hold 36",
        ),
        (lambda h: h["bias"].update(dtype="F64"), r"'bias' is F64\[9\], 72 bytes"),
        (
            lambda h: h.pop("bias"),
            "begins at byte .* of the data, the tensor before it ends at|bytes present",
        ),
        (lambda h: h["float32"].update(data_offsets=h["int32"]["data_offsets"]), "begins at byte"),
    ],
)
def test_headers_that_lie(file: Path, change: Callable[[Header], object], what: str) -> None:
    header, data = header_of(file)
    change(header)
    write(file, json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=what):
        open_weights(file)


@given(st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_a_flipped_header_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int
) -> None:
    """A flipped byte may rename a tensor or change a type of the same size; it never gives bytes outside the file."""
    file = tmp_path_factory.mktemp("flip") / "m.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.arange(4)}, file)
    data = bytearray(file.read_bytes())
    data[at % (len(data) - 56)] ^= flip
    file.write_bytes(data)
    weights = opened(file)
    if weights:
        assert weights.nbytes == 56


def opened(file: Path) -> Weights | None:
    try:
        return open_weights(file)
    except WeightsError:
        return None


@pytest.mark.parametrize(
    ("places", "what"),
    [
        ({}, "has no weight_map"),
        (None, "has no weight_map"),
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
