"""Moves over NCCL. One GPU: world size 1, local copies, folds, and a message of a rank to itself. Several, by torchrun:

torchrun --nproc-per-node=N -m pytest tests/gpu/test_nccl.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.pool import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: NCCL moves only between CUDA devices"
    ),
]


@pytest.fixture(scope="module")
def world() -> Iterator[int]:
    """An NCCL group: torchrun's, or this process alone. Gives the number of ranks."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
        )
    yield dist.get_world_size()
    dist.destroy_process_group()


def check(plan: sm.Plan, dtype: torch.dtype, **options: int) -> None:
    """A move of made-up numbers on the GPU is what simulate says, twice."""
    rank, move = dist.get_rank(), smt.compile(plan, timeout=30.0, **options)
    (source,), (target,) = plan.src[""], plan.dst[""]
    made = {r: _numbers(source.local_shape(r), r) for r in source.mesh.ranks}
    wanted = sm.simulate(plan, made)
    src = torch.from_numpy(made[rank]).to("cuda", dtype) if rank in source.mesh else None
    out = (
        torch.zeros(target.local_shape(rank), dtype=dtype, device="cuda")
        if rank in target.mesh
        else None
    )
    for _ in range(2):
        move(src, out=out)
    torch.cuda.synchronize()
    assert move.staging_bytes <= options.get("max_inflight_bytes", 1 << 30)
    if out is not None:
        assert np.array_equal(out.cpu().double().numpy(), np.asarray(wanted[rank]))


def _numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
@pytest.mark.parametrize("limit", [1 << 10, 1 << 30])
def test_relayouts_and_reductions(world: int, dtype: str, limit: int) -> None:
    """Rows to columns, strided, gathered; sums to shards; all from simulate."""
    mesh = sm.Mesh(tp=world)
    pairs = [
        ("(tp n) h", "n (tp h)"),
        ("(2 tp n) h", "(tp n) h"),
        ("(tp n) h", "n h"),
        ("n h {sum: tp}", "(tp n) h"),
    ]
    for a, b in pairs:
        plan = sm.plan(*(sm.Layout((24, 40), mesh, text, dtype=dtype) for text in (a, b)))
        check(plan, getattr(torch, dtype), max_inflight_bytes=limit)


def test_float8_moves_bit_by_bit(world: int) -> None:
    """Types without arithmetic move as bytes."""
    mesh = sm.Mesh(tp=world)
    plan = sm.plan(
        *(
            sm.Layout((8, 8 * world), mesh, text, dtype="float8_e4m3fn")
            for text in ("n (tp h)", "n h")
        )
    )
    src = torch.full((8, 8), dist.get_rank() + 1, dtype=torch.uint8, device="cuda").view(
        torch.float8_e4m3fn
    )
    out = torch.zeros(8, 8 * world, dtype=torch.float8_e4m3fn, device="cuda")
    smt.compile(plan)(src, out=out)
    assert out.view(torch.uint8).cpu().tolist()[0] == [
        r + 1 for r in range(world) for _ in range(8)
    ]


def test_tensors_on_the_cpu_are_refused(world: int) -> None:
    """The group moves tensors on CUDA devices; every rank is told."""
    layout = sm.Layout((world, 4), sm.Mesh(tp=world), "(tp n) h")
    move = smt.compile(sm.plan(layout, layout))
    with pytest.raises(
        sm.ExchangeError, match="is on device 'cpu', the process group moves tensors on 'cuda:"
    ):
        move(torch.zeros(1, 4), out=torch.zeros(1, 4))


def test_another_stream(world: int) -> None:
    """Moves run on the current stream, and one on another stream does not disturb the staging of the last."""
    mesh = sm.Mesh(tp=world)
    plan = sm.plan(
        *(sm.Layout((8 * world, 64 * world), mesh, text) for text in ("(tp n) h", "n (tp h)"))
    )
    move, out = smt.compile(plan), []
    for k in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            src = torch.full((8, 64 * world), float(k), device="cuda")
            out.append(torch.zeros(8 * world, 64, device="cuda"))
            move(src, out=out[-1])
            torch.cuda.current_stream().synchronize()
    assert [t.unique().tolist() for t in out] == [[float(k)] for k in range(4)]


def test_a_message_to_itself(world: int) -> None:
    """The wire alone: a rank sends to and receives from itself in one group, where NCCL permits."""
    from shardmath_nccl.wire import NcclWire

    wire = NcclWire(dist.distributed_c10d._get_default_group(), 30.0)
    src, dst = (
        torch.arange(64, dtype=torch.uint8, device="cuda"),
        torch.zeros(64, dtype=torch.uint8, device="cuda"),
    )
    arriving, leaving = wire.receive(dst, dist.get_rank()), wire.send(src, dist.get_rank())
    wire.start()
    arriving.wait()
    leaving.wait()
    wire.finish()
    assert torch.equal(src, dst)


def test_what_changed(world: int) -> None:
    """Only what changed is sent: whole first, then elements of two sizes, then elements of one of them alone."""
    mesh = sm.Mesh(tp=world)
    sides = []
    for text in ("(tp n) h", "n (tp h)"):
        sides.append(
            {
                name: sm.Layout((8 * world, 16 * world), mesh, text, dtype=name)
                for name in ("float32", "bfloat16")
            }
        )
    plan = sm.plan(*sides)
    send, rank = smt.compile_changes(plan), dist.get_rank()
    made = {key: _numbers((8 * world, 16 * world), 7) for key in plan.src}
    own = slice(8 * rank, 8 * rank + 8), slice(16 * rank, 16 * rank + 16)
    src, out = {}, {}
    for key, array in made.items():
        kind = getattr(torch, key)
        src[key] = torch.from_numpy(array[own[0]]).to("cuda", kind)
        out[key] = torch.zeros(8 * world, 16, dtype=kind, device="cuda")
    for touched in ((), ("float32", "bfloat16"), ("bfloat16",)):
        for key in touched:
            for row in range(world):
                made[key][8 * row, 3] += 1
            src[key][0, 3] += 1
        send(src, out=out)
        for key, array in made.items():
            assert np.array_equal(out[key].cpu().double().numpy(), array[:, own[1]]), touched
