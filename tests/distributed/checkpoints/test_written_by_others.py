"""Checkpoints that versions of torch and of Megatron-Core wrote, as they lie in tests/vectors."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

import shardmath as sm
import shardmath_torch as smt

VECTORS = Path(__file__).parents[2] / "vectors"
MEGATRON = ("megatron_0_16_checkpoint", "megatron_0_19_checkpoint")
SHAPES = {"linear_fc1.weight": (16, 4), "linear_fc2.weight": (4, 8), "linear_fc2.bias": (4,)}
"""Some of what `tools/megatron_checkpoint.py` saves."""


def unpack(name: str, folder: Path) -> Path:
    """The folder with the files of that archive."""
    with tarfile.open(VECTORS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def load_whole(path: Path, name: str) -> torch.Tensor:
    """All of a stored tensor."""
    shape, dtype = smt.open_checkpoint(path).shapes[name]
    return smt.load(path, {name: sm.Layout(shape, sm.Mesh(), {}, dtype=dtype)})[name]


@pytest.mark.parametrize("version", ["2_13", "2_15"])
def test_torch_before_and_after_properties_had_strides(tmp_path: Path, version: str) -> None:
    """`{"w": torch.arange(6.0).view(2, 3).t(), "step": 3}`: torch 2.15 pickles a field that older ones do not take."""
    path = unpack(f"torch_{version}_checkpoint", tmp_path)
    assert load_whole(path, "w").equal(torch.arange(6.0).view(2, 3).t())
    assert set(smt.open_checkpoint(path)) == {"w", "step"}


def test_every_torch_reads_the_properties_that_we_write(tmp_path: Path, monkeypatch: Any) -> None:
    """Also where the torch that writes has a sixth field, as torch 2.15 has."""
    fields = (torch.float32, torch.strided, False, None, False)
    states: list[object] = []
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*fields, (1,)))
    smt.save(tmp_path, {"w": torch.ones(6)}, {"w": sm.Layout((6,), sm.Mesh(), "n")})
    monkeypatch.setattr(TensorProperties, "__setstate__", lambda _, state: states.append(state))
    pickle.loads((tmp_path / ".metadata").read_bytes())
    assert states == [fields]


def test_torch_reads_what_we_write(tmp_path: Path) -> None:
    """Pickled by a pickler that is not torch's."""
    smt.save(tmp_path, {"w": torch.arange(6.0)}, {"w": sm.Layout((6,), sm.Mesh(), "n")})
    state = {"w": torch.zeros(6)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["w"].equal(torch.arange(6.0))


@pytest.mark.parametrize("version", MEGATRON)
def test_megatrons_weights_and_optimizer(tmp_path: Path, version: str) -> None:
    """In the shapes of the weights, whatever the division among ranks was; gradients were the weights."""
    path = unpack(version, tmp_path) / "fully_reshardable"
    for name, shape in SHAPES.items():
        counted = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
        moment = load_whole(path, f"optimizer.state.exp_avg.{name}")
        stepped = load_whole(path, f"optimizer.state.param.{name}")
        torch.testing.assert_close(moment, counted / 10)
        torch.testing.assert_close(stepped, counted - 0.01)
        assert load_whole(path, name).equal(stepped.bfloat16())


@pytest.mark.parametrize("version", MEGATRON)
def test_megatrons_flat_buckets(tmp_path: Path, version: str) -> None:
    """Each group of data-parallel ranks has flat tensors, in which parameters lie one after the other."""
    path = unpack(version, tmp_path) / "dp_reshardable"
    found = smt.open_checkpoint(path)
    buckets = [name for name in found if name.endswith(".bucket_idx_0.exp_avg")]
    assert len(buckets) == 2
    for name in buckets:
        layout = sm.Layout(found[name].shape, sm.Mesh(dp=2), "(dp n)")
        assert load_whole(path, name)[: layout.local_shape(0)[0]].equal(
            smt.load(path, {name: layout})[name]
        )
    # biases begin a bucket, from the last parameter to the first: (1 2 3 4) / 10
    torch.testing.assert_close(load_whole(path, buckets[0])[:4], torch.arange(1.0, 5.0) / 10)


def test_megatrons_objects_are_bytes(tmp_path: Path) -> None:
    """Of torch.save, one per rank that has one."""
    path = unpack(MEGATRON[0], tmp_path) / "dp_reshardable"
    name = "optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"
    content = io.BytesIO(bytes(smt.load(path, {name: None})[name].numpy()))
    (buckets,) = torch.load(content, weights_only=True)[0]
    assert [*buckets.values()] == [[256]]
