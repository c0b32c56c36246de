"""Checkpoints of quantized weights: data and scales, saved, loaded and resharded like any tensors; beside torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats
from shardmath_torch.checkpoints.files.places import CheckpointError
from tests.distributed.pool import Pool
from tests.distributed.tasks import quantized as work

pytestmark = pytest.mark.long

TEXTS = {
    "rows -> columns": ("(tp n) k", "n (tp k)"),
    "FSDP over tensor parallel -> tensor parallel": ("(tp dp n) k", "(dp n) (tp k)"),
    "columns -> rows cut inside blocks": ("n (tp k)", "(n tp 24) k"),
    "rows and columns cut inside blocks -> columns": ("(n dp 24) (k tp 6)", "n (tp k)"),
}
FORMATS: dict[str, formats.Format] = {
    "mxfp8": formats.MXFP8(),
    "mxfp8 e5m2 columns": formats.MXFP8("e5m2", axis=-2),
    "blocks": formats.FP8Blocks((16, 32)),
    "tensor": formats.FP8(),
    "nvfp4": formats.NVFP4(),
}


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("name", FORMATS)
def test_data_and_scales_reshard(pool: Pool, tmp_path: Path, name: str, texts: str) -> None:
    """Scales are saved as each rank pads them, and loaded with and without padding, data as numbers and as bytes."""
    args = FORMATS[name], (256, 128), TEXTS[texts]
    assert pool.run(work.resharded, str(tmp_path), *args) == [[]] * 8


def test_the_last_tiles_are_shorter(pool: Pool, tmp_path: Path) -> None:
    args = FORMATS["blocks"], (250, 100), ("(n tp 16) k", "(dp n) (tp k)")
    assert pool.run(work.resharded, str(tmp_path), *args) == [[]] * 8


def test_swizzled_scales_reshard(pool: Pool, tmp_path: Path) -> None:
    one = formats.MXFP8()
    found = pool.run(work.swizzled, str(tmp_path), one, ("(tp dp n) k", "(dp n) (tp k)"))
    assert found == [[True, True]] * 8


DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_we_read_each_other(pool: Pool, tmp_path: Path, dtype: str) -> None:
    assert pool.run(work.by_torch, str(tmp_path / "theirs"), dtype) == [[]] * 8
    assert pool.run(work.into_torch, str(tmp_path / "ours"), dtype) == [[]] * 8


def test_bytes_are_never_numbers_of_another_kind(tmp_path: Path) -> None:
    """float8 is read as uint8; as another float8, or int8, it is an error."""
    lies = sm.Layout((4, 6), sm.Mesh(), {}, dtype="float8_e4m3fn")
    smt.save(tmp_path, {"w": work.elements((4, 6), "float8_e4m3fn")}, {"w": lies})
    for dtype in ("float8_e5m2", "int8", "bool"):
        with pytest.raises(CheckpointError, match=r"'w' is stored as float8_e4m3fn\[4, 6\]"):
            smt.load(tmp_path, {"w": sm.Layout((4, 6), sm.Mesh(), {}, dtype=dtype)})
