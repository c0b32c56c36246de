"""Flat buffers of real parameters: what modules say to the rules, layouts by parameter and back, views, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardmath as sm
import shardmath_torch as smt
from shardmath import buffers
from shardmath.layouts.store import Store, View
from shardmath_torch.commands.models.flat_buffers import (
    by_name,
    by_parameter,
    params_of,
    state_views,
    views,
)


class Tied(nn.Module):
    """An embedding that is the output layer too, a matrix, a frozen one, and an expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.frozen, self.expert = (
            nn.Linear(4, 6),
            nn.Linear(4, 4),
            nn.Linear(4, 2, bias=False),
        )
        self.frozen.requires_grad_(False)
        self.embed.weight.shared_embedding = True
        self.expert.weight.allreduce = False
        self.up.weight.use_muon = False

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_what_a_module_says() -> None:
    """What is trained, each once, with Megatron's marks."""
    assert params_of(Tied()) == (
        buffers.Param("embed.weight", (8, 4), "float32", shared_embedding=True, managed=False),
        buffers.Param("up.weight", (6, 4), "float32", managed=False),
        buffers.Param("up.bias", (6,), "float32"),
        buffers.Param("expert.weight", (2, 4), "float32", expert_parallel=True),
    )


def test_embeddings_are_not_managed() -> None:
    """Megatron's own mark, output layers and embeddings; other matrices are."""
    module = Tied()
    del module.up.weight.use_muon, module.embed.weight.shared_embedding
    module.expert.weight.is_embedding_or_output_parameter = True
    assert [p.is_managed for p in params_of(module)] == [False, True, False, False]


@dataclass
class Original:
    """The fields of Megatron-Core's PerBufferParamLayout, with lists and a dict by parameter."""

    param_index_map: dict[nn.Parameter, tuple[int, int, int]] = field(default_factory=dict)
    bucket_indices: list[tuple[int, int]] = field(default_factory=list)
    per_bucket_numel_unpadded: list[int] = field(default_factory=list)
    param_indices: list[int] = field(default_factory=list)
    num_optimizer_shards: int | None = None


@pytest.mark.parametrize("rule", [buffers.distributed_optimizer, buffers.layer_wise])
def test_by_parameter_and_back(rule: Any) -> None:
    module = Tied()
    layout = rule(params_of(module), data_parallel_world_size=4, bucket_size=20)
    original = Original(**by_parameter(layout, module)._asdict())
    names = {p: name for name, p in module.named_parameters()}
    assert [(names[p], at) for p, at in original.param_index_map.items()] == list(
        layout.param_index_map.items()
    )
    assert isinstance(original.bucket_indices, list) and isinstance(original.param_index_map, dict)
    assert by_name(original, module, data_parallel_world_size=4) == layout


def test_other_parameters() -> None:
    module, other = Tied(), Tied()
    layout = buffers.distributed_optimizer(params_of(module), data_parallel_world_size=2)
    with pytest.raises(sm.ParamLayoutError, match=r"lacks 2 parameters of the layout: \['up.bias'"):
        by_parameter(
            layout, nn.ModuleDict({"embed": nn.Embedding(8, 4), "expert": nn.Linear(4, 2)})
        )
    with pytest.raises(sm.ParamLayoutError, match=r"that the module lacks"):
        by_name(by_parameter(layout, module), other)


def test_a_layout_that_contradicts_itself() -> None:
    """As of a checkpoint whose buckets were padded otherwise: found when it is read, not when it is used."""
    module = Tied()
    module.embed.weight.shared_embedding = False
    read = by_parameter(
        buffers.distributed_optimizer(params_of(module), data_parallel_world_size=4), module
    )
    for broken, said in (
        (read._replace(per_bucket_numel_unpadded=[50]), "per_bucket_numel_unpadded has 50 for it"),
        (read._replace(bucket_indices=[(0, 64)]), "bucket 0 has 64 elements"),
        (
            read._replace(bucket_indices=[(0, 130)], per_bucket_numel_unpadded=[120]),
            "of the buffer, in bucket 0, which is",
        ),
        (read._replace(bucket_indices=[(64, 320)]), "begin it at 0, and end it there or later"),
        (read._replace(param_indices=[0]), "param_indices has 1 entries for 4 parameters"),
    ):
        with pytest.raises(sm.ParamLayoutError, match=said):
            by_name(broken, module)
    odd = by_name(read._replace(bucket_indices=[(0, 257)]), module)
    with pytest.raises(
        sm.ParamLayoutError, match="bucket 0 has 257 elements, which 4 ranks do not divide evenly"
    ):
        buffers.state_layouts(odd, sm.Mesh(dp=4))


def test_views_are_the_array() -> None:
    """What is written to a view is in the array, also of one with a stride; cells of others stay."""
    layout = buffers.distributed_optimizer(params_of(Tied()), data_parallel_world_size=2)
    windows, store = buffers.state_layouts(layout, sm.Mesh(dp=2), shape="nd")
    flat, stores = (
        buffers.state_layouts(layout, sm.Mesh(dp=2)),
        buffers.state_store(layout, sm.Mesh(dp=2)),
    )
    for layouts, where in ((windows, store), (flat, stores)):
        array = torch.full((2 * buffers.shard_numel(layout, 2),), -1.0)[::2]
        own = views(where, layouts, 0, array)
        for i, view in enumerate(own.values()):
            view.fill_(i)
        for start, end, _ in layout.param_index_map.values():
            assert len(set(array[start : min(end, len(array))].tolist())) <= 1
        assert (array == -1).sum() == len(array) - sum(view.numel() for view in own.values())


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (torch.zeros(3), "ends at"),
        (torch.zeros(256, dtype=torch.float64), "the array is float64"),
        (torch.zeros(16, 16), "give a flat one"),
        ({"other": torch.zeros(256)}, "lies in array 'shard'"),
    ],
)
def test_arrays_that_do_not_fit(array: Any, said: str) -> None:
    layout = buffers.distributed_optimizer(params_of(Tied()), data_parallel_world_size=2)
    windows, store = buffers.state_layouts(layout, sm.Mesh(dp=2), shape="nd")
    with pytest.raises(sm.StoreError, match=said):
        views(store, windows, 0, array)


@pytest.mark.parametrize("shape", ["flat", "nd"])
def test_state_views(shape: Any) -> None:
    """The views of layout and Store of one buffer, which cannot be those of two."""
    layout, mesh = (
        buffers.distributed_optimizer(params_of(Tied()), data_parallel_world_size=2),
        sm.Mesh(dp=2, tp=2),
    )
    array = torch.arange(float(buffers.state_numel(layout, mesh, axis="dp")))
    assert len(array) * 2 == layout.numel
    found = state_views(layout, mesh, 2, array, axis="dp", shape=shape)
    if shape == "nd":
        layouts, store = buffers.state_layouts(layout, mesh, axis="dp", shape="nd")
    else:
        layouts, store = (
            buffers.state_layouts(layout, mesh, axis="dp"),
            buffers.state_store(layout, mesh, axis="dp"),
        )
    wanted = views(store, layouts, 2, array)
    assert list(found) == list(wanted)
    assert all(
        found[name].equal(wanted[name]) and found[name].shape == wanted[name].shape
        for name in wanted
    )
    assert state_views(layout, mesh, 4, array, axis="dp") == {}
    for other in (torch.zeros(layout.numel), array.reshape(2, -1), array[:-1]):
        with pytest.raises(sm.StoreError, match=f"rank 2 has {len(array)} elements of the buffer"):
            state_views(layout, mesh, 2, other, axis="dp", shape=shape)
    with pytest.raises(sm.ParamLayoutError, match="laid out for 2 ranks, 4 share it"):
        state_views(layout, mesh, 2, array)


def test_arrays_by_name() -> None:
    """A store of one's own, of several arrays."""
    layouts = {"a": sm.Layout((2, 3), sm.Mesh(), "n h"), "b": sm.Layout((2,), sm.Mesh(), "n")}
    store = Store({("a", 0): View("x", 1, (1, 2)), ("b", 0): View("y", 1)})
    found = views(store, layouts, 0, {"x": torch.arange(7.0), "y": torch.arange(4.0)})
    np.testing.assert_array_equal(found["a"], [[1, 3, 5], [2, 4, 6]])
    np.testing.assert_array_equal(found["b"], [1, 2])


def state(layout: buffers.PerBufferParamLayout) -> tuple[Any, dict[str, torch.Tensor]]:
    """Windows of one rank, and its local tensors, numbered."""
    mesh = sm.Mesh(dp=1)
    windows, store = buffers.state_layouts(layout, mesh, shape="nd")
    return windows, views(store, windows, 0, torch.arange(float(layout.numel)))


def test_checkpoints_have_no_padding(tmp_path: Path) -> None:
    """Saved with one padding, loaded with another: parameters are the same."""
    params = params_of(Tied())
    saved = buffers.distributed_optimizer(
        params, data_parallel_world_size=1, pad_for_high_nccl_busbw=True
    )
    windows, tensors = state(saved)
    smt.save(tmp_path, tensors, windows)
    wanted, _ = state(buffers.data_parallel(params, bucket_size=30))
    found = smt.load(tmp_path, wanted)
    assert (
        all(found[name].equal(tensors[name]) for name in tensors) and found.keys() == tensors.keys()
    )


def test_a_checkpoint_of_whole_buckets_padded_otherwise(tmp_path: Path) -> None:
    """Buckets themselves, saved as flat tensors, are refused where their padding is another one."""
    params = params_of(Tied())
    sizes = [
        buffers.distributed_optimizer(params, data_parallel_world_size=dp, bucket_size=None).numel
        for dp in (8, 96)
    ]
    there, here = ({"bucket": sm.Layout((n,), sm.Mesh(), "n")} for n in sizes)
    smt.save(tmp_path, {"bucket": torch.zeros(sizes[0])}, there)
    with pytest.raises(
        smt.CheckpointError, match=rf"{sizes[0]}.*{sizes[1]}|{sizes[1]}.*{sizes[0]}"
    ):
        smt.load(tmp_path, here)
