"""Safetensors that torch leaves in shards: written by torch's own writer, loaded under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.pool import Pool
from tests.distributed.tasks import checkpoints as work

MESH = sm.Mesh(dp=4, tp=2)
LAYOUTS = {
    "rows": sm.Layout((13, 6), MESH, "(tp dp n) h"),
    "few": sm.Layout((3, 2), MESH, "(n dp 1) (tp h)", dtype="bfloat16"),
    "plane": sm.Layout((9, 5), MESH, "(dp~ n) (tp h)", dtype="int64"),
    "columns": sm.Layout((4, 7), MESH, "(tp n) (dp h)", dtype="float16"),
    "plain": sm.Layout((5,), MESH, "(dp n)", dtype="float64"),
    "scalar": sm.Layout((), MESH, ""),
}
NAMES = list(LAYOUTS)
HOW: dict[str, Any] = {
    "a file a rank": {},
    "three files a rank": {
        "fqn_to_index_mapping": {name: i % 3 + 1 for i, name in enumerate(NAMES)}
    },
}


@pytest.mark.parametrize("how", HOW)
def test_torchs_shards_load_into_any_layout(pool: Pool, tmp_path: Path, how: str) -> None:
    """On eight ranks, and on one."""
    pool.run(work.by_torchs_sharded_writer, str(tmp_path), HOW[how])
    files = sorted(file.name for file in tmp_path.iterdir())
    assert len(files) >= 8 and all(name.startswith("shard-0") for name in files)
    assert smt.open_checkpoint(tmp_path).shapes == {
        n: (one.shape, one.dtype) for n, one in sorted(LAYOUTS.items())
    }
    assert pool.run(work.loaded, str(tmp_path), LAYOUTS) == [[]] * 8
    alone = {
        name: sm.Layout(one.shape, sm.Mesh(), {}, dtype=one.dtype) for name, one in LAYOUTS.items()
    }
    assert work.loaded(0, str(tmp_path), alone) == []
    module = torch.nn.Module()
    module.rows = torch.nn.Parameter(torch.zeros(13, 6))
    smt.load_weights(tmp_path, module)
    assert module.rows.equal(work.elements((13, 6), "float32"))


def test_a_shard_that_is_missing(pool: Pool, tmp_path: Path) -> None:
    """In the middle of a tensor it is noticed."""
    pool.run(work.by_torchs_sharded_writer, str(tmp_path), {})
    next(tmp_path.glob("shard-00003-*")).unlink()
    with pytest.raises(sm.ShardError, match=r"'rows' .* no box with element"):
        smt.load(tmp_path, {"rows": sm.Layout((13, 6), sm.Mesh(), {})})


def shard(folder: Path, number: int, rows: int, at: object, **tensors: torch.Tensor) -> None:
    """A shard with a tensor `w`, which is said to begin there."""
    info = {"w": {"saved_offsets": at}} if at != "none" else {}
    tensors = tensors or {"w": torch.full((rows, 2), float(number))}
    metadata = {"DCP_SHARDING_INFO": json.dumps(info)} if at is not None else None
    save_file(
        tensors, folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", metadata=metadata
    )


def test_one_shard_is_enough(tmp_path: Path) -> None:
    shard(tmp_path, 1, 4, [0, 0])
    assert smt.load(tmp_path, {"w": sm.Layout((4, 2), sm.Mesh(), {})})["w"].equal(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("at", "what"),
    [
        ([2, 0], "overlap"),
        ([5, 0], "no box with element"),
        ([4], "not saved_offsets of as many numbers"),
        ([4, -1], "not saved_offsets of as many numbers"),
        ([4, 1 << 70], "not saved_offsets of as many numbers"),
        ("none", "not saved_offsets of as many numbers"),
        (None, "has not; keep only the files of one checkpoint in a folder"),
    ],
)
def test_shards_that_do_not_fit(tmp_path: Path, at: object, what: str) -> None:
    shard(tmp_path, 1, 4, [0, 0])
    shard(tmp_path, 2, 3, at)
    with pytest.raises(sm.ShardError, match=what):
        smt.load(tmp_path, {"w": sm.Layout((7 if at != [5, 0] else 8, 2), sm.Mesh(), {})})


def test_shards_of_other_types(tmp_path: Path) -> None:
    shard(tmp_path, 1, 4, [0, 0])
    shard(tmp_path, 2, 3, [4, 0], w=torch.ones(3, 2, dtype=torch.float16))
    with pytest.raises(
        sm.ShardError, match=r"float32.* float16.*keep only the files of one checkpoint"
    ):
        smt.open_checkpoint(tmp_path)
    shard(tmp_path, 2, 3, [4], w=torch.ones(3))
    with pytest.raises(sm.ShardError, match="keep only the files of one checkpoint"):
        smt.open_checkpoint(tmp_path)
