"""Headers: damaged files are refused before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardmath_torch.checkpoints.safetensors.headers import WeightsError
from shardmath_torch.checkpoints.safetensors.weights import Weights, open_weights
from tests.distributed.tasks.every_type import tensors


def test_headers_say_every_type(file: Path) -> None:
    weights = open_weights(file)
    assert weights.shapes == {
        n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors().items()
    }
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors().values())


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
    assert f"{size + 3} bytes present, but {size} expected by its header, 3 too many" in fails(file)


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
        (lambda h: h["bias"].update(dtype="F4"), "'bias' as F4, a type that cannot be read"),
        (
            lambda h: h["bias"].update(shape=[10]),
            r"'bias' is F32\[10\], 40 bytes, but its data_offsets .* hold 36",
        ),
        (lambda h: h["bias"].update(dtype="F64"), r"'bias' is F64\[9\], 72 bytes"),
        (
            lambda h: h.pop("bias"),
            "begins at byte .* of the data, but the tensor before it ends at|bytes present",
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
