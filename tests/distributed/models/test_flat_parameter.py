"""buffers.flat_parameter beside torch's own FlatParamHandle: offsets, padding, and the shard of every rank.

A handle asks its process group for rank and size alone: with a stand-in, one process has the handles of all ranks.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

from shardmath import Mesh, ParamLayoutError, buffers

SHAPES = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
).filter(lambda shapes: any(map(math.prod, shapes)))


def handle(
    shapes,
    dtype: str,
    rank: int,
    world_size: int,
    aligned: bool,
    forward: torch.dtype | None = None,
):
    """The handle of one rank; parameter i counts its elements from 1000 i + 1 on."""
    module = torch.nn.Module()
    for i, shape in enumerate(shapes):
        values = torch.arange(torch.Size(shape).numel()) % 100 + 1
        module.register_parameter(
            f"p{i}", torch.nn.Parameter(values.reshape(shape).to(getattr(torch, dtype)))
        )
    group = SimpleNamespace(rank=lambda: rank, size=lambda: world_size)
    listed, device = list(module.parameters()), torch.device("cpu")
    strategy = HandleShardingStrategy.FULL_SHARD
    return FlatParamHandle(
        listed, module, device, strategy, False, forward, None, False, group, aligned
    )


def given_to_us(shapes, dtype: str) -> list[buffers.Param]:
    return [buffers.Param(f"p{i}", shape, dtype) for i, shape in enumerate(shapes)]


def offsets(flat) -> dict[str, tuple[int, int, int]]:
    """Name -> (start, end, 0) of the parameters, from torch's sizes, among which are those of padding."""
    names, position, out = iter(flat._fqns), 0, {}
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            out[next(names)] = (position, position + numel, 0)
        position += numel
    return out


DTYPES = st.sampled_from(["float32", "bfloat16", "float64"])


@given(SHAPES, DTYPES, st.integers(1, 6), st.booleans(), st.none() | DTYPES)
@example([(3,), (5,)], "float32", 4, True, None)
@example([(3,), (5,)], "float32", 4, True, "bfloat16")
@example([(1,)], "float32", 6, False, None)
@example([(1,)], "bfloat16", 6, True, None)
@example([(0,), (3, 0), (2,)], "float32", 2, True, None)
def test_offsets_padding_and_shards(
    shapes, dtype: str, world_size: int, aligned: bool, forward: str | None
) -> None:
    layout = buffers.flat_parameter(
        given_to_us(shapes, dtype),
        data_parallel_world_size=world_size,
        use_orig_params=aligned,
        forward_dtype=forward,
    )
    precision = None if forward is None else getattr(torch, forward)
    mesh = Mesh(fsdp=world_size)
    flat = buffers.state_layouts(layout, mesh)
    whole = handle(shapes, dtype, 0, world_size, aligned, precision).flat_param.detach()
    for rank in range(world_size):
        theirs = handle(shapes, dtype, rank, world_size, aligned, precision)
        assert offsets(theirs.flat_param) == dict(layout.param_index_map)
        assert list(theirs.flat_param._fqns) == list(layout.param_index_map)
        theirs.shard()
        shard = theirs.flat_param.detach()
        ((lo, hi),) = buffers.shard_ranges(layout, world_size, rank)
        assert torch.equal(shard[: max(len(whole) - lo, 0)], whole[lo:hi])
        assert shard.numel() == buffers.shard_numel(layout, world_size) == hi - lo
        held = dict(zip(theirs.flat_param._fqns, theirs.flat_param._shard_param_infos, strict=True))
        store = dict(buffers.state_store(layout, mesh).entries)
        for name, info in held.items():
            assert flat[name].local_shape(rank) == (info.numel_in_shard or 0,)
            if info.numel_in_shard:
                assert store[name, rank].offset == info.offset_in_shard
                assert flat[name].runs(rank)[0].segments[0][1] == info.intra_param_start_idx


def test_padding_is_torch_s_where_parameters_are_aligned() -> None:
    """Without alignment torch pads shards when it cuts them, and the flat parameter itself stays as it is."""
    shapes = [(3,), (5,), (2, 3)]
    for aligned, length in ((True, 20), (False, 14)):
        theirs = handle(shapes, "float32", 0, 5, aligned).flat_param
        layout = buffers.flat_parameter(
            given_to_us(shapes, "float32"), data_parallel_world_size=5, use_orig_params=aligned
        )
        assert theirs.numel() == length
        assert layout.bucket_indices == ((0, -(-length // 5) * 5),)
        assert layout.per_bucket_numel_unpadded == (18 if aligned else 14,)


def test_torch_cannot_shard_what_has_no_elements_at_all() -> None:
    theirs = handle([(0,)], "float32", 0, 2, True)
    with pytest.raises(AssertionError):
        theirs.shard()
    assert (
        buffers.flat_parameter(given_to_us([(0,)], "float32"), data_parallel_world_size=2).numel
        == 0
    )


def test_several_dtypes_are_refused_by_both() -> None:
    module = torch.nn.Module()
    module.a, module.b = (
        torch.nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.bfloat16)
    )
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    strategy = HandleShardingStrategy.FULL_SHARD
    with pytest.raises(ValueError, match="uniform dtype"):
        FlatParamHandle(
            list(module.parameters()),
            module,
            torch.device("cpu"),
            strategy,
            False,
            None,
            None,
            False,
            group,
            True,
        )
    mixed = [buffers.Param("a", (2,), "float32"), buffers.Param("b", (2,), "bfloat16")]
    with pytest.raises(
        ParamLayoutError,
        match="a FlatParameter has one dtype, these parameters have bfloat16, float32",
    ):
        buffers.flat_parameter(mixed, data_parallel_world_size=1)
