"""Slices equal slices of the whole, and what is asked must be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardmath import Layout, Mesh
from shardmath_torch.checkpoints.safetensors.headers import WeightsError
from shardmath_torch.checkpoints.safetensors.slices import assemble, check, load
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from tests.distributed.tasks.every_type import raw, size_of, tensors

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
            expected = torch.zeros(len(rows), 6 * size_of(name), dtype=torch.uint8)
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
    seen: list[tuple[int, int]] = []
    layouts = {
        "bias": Layout((9,), MESH, "(tp n)"),
        "float16": Layout((10, 6), MESH, "n h", dtype="float16"),
    }
    arrived = load(open_weights(file), layouts, 0, progress=lambda *numbers: seen.append(numbers))
    check(open_weights(file), layouts, 0, arrived, progress=lambda *numbers: seen.append(numbers))
    assert seen.count((0, 140)) == seen.count((140, 140)) == 2 and seen[-1] == (140, 140)


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


@pytest.mark.parametrize(
    ("name", "layout", "what"),
    [
        ("b", Layout((9,), MESH, "(tp n)"), "has no 'b' among its"),
        (
            "bias",
            Layout((8,), MESH, "(tp n)"),
            r"'bias' is float32\[9\] in .*, but its layout is float32\[8\]",
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
