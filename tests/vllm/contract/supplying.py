"""Four ranks of a trainer under FSDP2 and tensor parallelism, of rows that do not divide, with the newer vLLM.

    python -m tests.vllm.contract.supplying FOLDER

prints one JSON object per rank. vLLM is imported once, and the ranks are forked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardmath as sm
from shardmath import ExchangeError
from tests.distributed.pool import free_port
from tests.vllm.contract import wheel

RANKS = 4
TIMEOUT_S = 100.0


class Block(nn.Module):
    """A layer, whose 11 rows tensor parallelism divides, and FSDP divides the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)
        self.norm = nn.Linear(8, 1, bias=False)


class Model(nn.Module):
    """Two layers, and what stands around them; the last divides under FSDP alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 9, bias=False)


def divide(model: Model) -> None:
    """Over 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.layers:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def check(rank: int) -> Iterator[tuple[str, Any]]:
    """What this rank finds, by name."""
    from shardmath_vllm.workers.supplying import BACKENDS, ShardSource

    torch.manual_seed(0)
    model = Model()
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    divide(model)
    for backend in BACKENDS:
        source = ShardSource(model, backend)
        faults = []
        for _ in range(2):
            faults += list(_compare(source, whole, rank))
            for each in (*model.parameters(), *whole.values()):
                each.data.add_(1)
        yield backend, faults
    yield "owned", [len(ShardSource(model, each).owned_names(rank)) for each in BACKENDS]
    yield "cast", {str(x.dtype) for _, x in ShardSource(model, "ipc", dtype="bfloat16").iter_full()}
    yield "m2n", _take_for_m2n(ShardSource(model, "nccl_m2n"), rank)
    yield "refused", _list_refused(model)
    yield "broadcast", _take_for_nccl(ShardSource(model, "nccl"), rank)
    yield "rows", _take_rows(rank)
    yield "sent", _send(rank)
    yield "differs", _send_by_other_metadata(model, rank)


def _compare(source: Any, whole: dict[str, Tensor], rank: int) -> Iterator[str]:
    """What differs from the model's own tensors."""
    from shardmath_vllm.source import read_layout

    full, local = dict(source.iter_full()), dict(source.iter_local())
    owned = source.owned_names(rank)
    if not list(full) == list(local) == owned:
        yield "names"
    for meta in source.metadata:
        if meta.name in owned:
            if not torch.equal(full[meta.name], whole[meta.name]):
                yield f"full {meta.name}"
            kept = [torch.as_tensor(each) for each in read_layout(meta, RANKS).indices(rank)]
            mine = whole[meta.name][torch.meshgrid(*kept, indexing="ij")]
            if not torch.equal(local[meta.name], mine):
                yield f"local {meta.name}"


def _take_for_m2n(source: Any, rank: int) -> dict[str, Any]:
    """Whether vLLM's backend takes each tensor's layout, and the pieces have the shapes that it expects."""
    from vllm.distributed.weight_transfer.m2n_common import expected_local_shape, m2n_param_meta

    shapes = {}
    for meta in source.metadata:
        shapes[meta.name] = expected_local_shape(m2n_param_meta(meta, RANKS))
    found = {name: tuple(tensor.shape) for name, tensor in source.iter_local()}
    declared = {meta.name: meta.placements for meta in source.metadata}
    return {"fits": found == shapes, "replicas": [n for n, each in declared.items() if not each]}


def _list_refused(model: Model) -> list[str]:
    """The tensors whose layout that backend refuses if vLLM's own source declares it."""
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.distributed.weight_transfer.m2n_common import expected_local_shape, m2n_param_meta

    refused = []
    for meta in ModuleSource(model).metadata:
        try:
            expected_local_shape(m2n_param_meta(meta, RANKS))
        except ValueError:
            refused.append(meta.name)
    return refused


def _take_for_nccl(source: Any, rank: int) -> Any:
    """How many tensors rank 0 would broadcast, by vLLM's own check of each."""
    from vllm.distributed.weight_transfer.base import layerwise_groups
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    names = [meta.name for meta in source.metadata]
    assert [name for group in layerwise_groups(names) for name in group] == names
    if rank > 0:
        return len(list(source.iter_full()))
    return len(list(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata)))


def _take_rows(rank: int) -> bool:
    """Whether a tensor that rows store fused, one part after the other, comes whole under the names of both parts."""
    from shardmath_vllm import Source
    from shardmath_vllm.workers.supplying import ShardSource

    shapes = dict.fromkeys(("l.0.gate", "l.0.up"), ((8, 3), "float32"))
    mesh = sm.Mesh(tp=RANKS)
    row = "l.{i}.fused = l.{i}.[gate up] : (tp (gate + up)) h"
    side = sm.storage.Stored(sm.storage.parse(row), (mesh,))
    whole = {n: torch.arange(24.0).reshape(8, 3) + at for at, n in enumerate(shapes)}
    fused = torch.cat([each[2 * rank : 2 * rank + 2] for each in whole.values()])
    source = ShardSource(Source({"l.0.fused": fused}, side, shapes), "nccl")
    return all(torch.equal(tensor, whole[name]) for name, tensor in source.iter_full())


def _make_same(model: nn.Module) -> Any:
    """A WeightSource that is read by what it declares and yields, as it is not vLLM's own class."""
    from vllm.distributed.weight_transfer import ModuleSource

    class Same(ModuleSource):
        def iter_local(self) -> Any:
            return super().iter_local()

    return Same(model)


def _meet(source: Any, rank: int, module: nn.Module) -> tuple[Any, Any]:
    """A trainer that sends the source to an engine on rank 0, and the engine."""
    import shardmath_vllm as sv
    from tests.distributed.transfer.plain_engine import PlainEngine

    port = [free_port()]
    dist.broadcast_object_list(port)
    engine = PlainEngine(module)
    info = sv.TrainerInfo(f"127.0.0.1:{port[0]}", RANKS, 1, rank=rank, timeout=TIMEOUT_S)
    clients = [engine] if rank == 0 else []
    return sv.Trainer.trainer_init(info, client=clients, source=source), engine


def _send(rank: int) -> bool:
    """Whether an engine gets what vLLM's own classes declare and yield: pieces, and strided ones that they gather."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 6))
    whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    held = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 6))
    trainer, engine = _meet(_make_same(model), rank, held)
    trainer.send_weights()
    trainer.shutdown()
    if rank > 0:
        return True
    engine.link.leave()
    return all(torch.equal(each, whole[name]) for name, each in held.named_parameters())


def _send_by_other_metadata(model: nn.Module, rank: int) -> str:
    """What is said where ranks declare other owners, as vLLM's ModuleSource does of what FSDP alone divides."""
    try:
        _meet(_make_same(model), rank, Model())
    except ExchangeError as error:
        return str(error)
    return ""


def main(rank: int, port: int) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = dict(check(rank))
    # In one write, so that lines of ranks do not mix.
    os.write(1, f"{json.dumps(found, default=sorted)}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    wheel.prefer(sys.argv[1])

    import shardmath_vllm.workers.supplying  # noqa: F401

    fork = multiprocessing.get_context("fork")
    meeting_port = free_port()
    started = [fork.Process(target=main, args=(rank, meeting_port)) for rank in range(RANKS)]
    for each in started:
        each.start()
    for each in started:
        each.join(TIMEOUT_S)
        each.kill()
