"""Trainers: what each rank of one does. It holds a transformers model, or its part of it, and sends it to engines.

A worker process keeps its model and its trainer from one task to the next.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardmath_vllm as sv
from shardmath_vllm.source import read_source
from tests.vllm.transfer.hosts import HostClient

__all__ = [
    "TIMEOUT_S",
    "Asked",
    "build",
    "count_held",
    "held",
    "join",
    "join_changed",
    "leave",
    "meet",
    "rejoin",
    "send",
    "send_alone",
    "send_between",
    "send_changed",
    "send_often",
    "send_unreached",
    "send_until",
]

TIMEOUT_S = 120.0
BELOW_HALF = 2.0**-11
"""Less than half of the distance of bfloat16 numbers, which are 2**-8 of themselves apart, or more."""


class Asked(NamedTuple):
    """A trainer: how `ranks` hold the model of a checkpoint, and the engines, each by the address of its host."""

    folder: Path
    sharding: str
    ranks: int
    address: str
    engines: tuple[str, ...]
    workers: tuple[int, ...]
    dtype: str = "bfloat16"
    timeout: float = TIMEOUT_S

    def describe(self, rank: int) -> sv.TrainerInfo:
        """What a rank brings."""
        served = None if self.dtype == "bfloat16" else "bfloat16"
        return sv.TrainerInfo(
            self.address,
            self.ranks,
            self.workers,
            dtype=served,
            timeout=self.timeout,
            rank=rank,
        )


class Held(NamedTuple):
    """What a process keeps."""

    model: nn.Module
    trainer: sv.Trainer


held: dict[str, Held] = {}


def join(rank: int, asked: Asked) -> None:
    """Make the model, and meet the engines."""
    model = build(asked)
    meet(rank, asked, model)


def meet(rank: int, asked: Asked, source: Any) -> None:
    """Meet the engines with this source, which is a model or says what one holds."""
    clients = [HostClient(address) for address in asked.engines]
    info = asked.describe(rank)
    trainer = sv.Trainer.trainer_init(info, client=clients if rank == 0 else [], source=source)
    held["own"] = Held(source, trainer)


def rejoin(rank: int, asked: Asked) -> None:
    """Meet the engines again, with the model as it is."""
    meet(rank, asked, held["own"].model)


def send(rank: int, folder: Path) -> None:
    """Take the weights of a checkpoint, and send them."""
    model, trainer = held["own"]
    fill(model, folder)
    trainer.send_weights()


def leave(rank: int) -> None:
    """Leave the engines."""
    held.pop("own").trainer.shutdown()


def send_alone(asked: Asked, folders: list[Path]) -> list[Any]:
    """All that a trainer of one process does, which has no process group; what the first engine generates each time."""
    from tests.vllm.transfer import inside

    assert not dist.is_initialized()
    torch.set_num_threads(1)
    join(0, asked)
    answers = []
    for folder in folders:
        send(0, folder)
        answers.append([HostClient(address).ask(inside.generate) for address in asked.engines])
    leave(0)
    return answers


def build(asked: Asked) -> nn.Module:
    """The model of the checkpoint, divided."""
    os.environ.setdefault("LOCAL_RANK", "0")
    model = _load(asked.folder, getattr(torch, asked.dtype))
    SHARDINGS[asked.sharding](model, asked.ranks)
    return model


# What does not fit


def join_changed(rank: int, asked: Asked, change: Any) -> None:
    """Meet the engines with what `change(rank, asked)` gives in place of the model."""
    meet(rank, asked, change(rank, asked))


def take_other_model(rank: int, asked: Asked) -> nn.Module:
    """A model of another family."""
    return _divide_new(asked, "qwen2")


def take_other_sizes(rank: int, asked: Asked) -> nn.Module:
    """A model of the same family, of which one size is another."""
    return _divide_new(asked, "llama", intermediate_size=96)


def _divide_new(asked: Asked, model: str, **more: Any) -> nn.Module:
    import transformers

    from tests.vllm.cases import fields
    from tests.vllm.transfer.engines import WIDE

    config = transformers.AutoConfig.for_model(**fields(model, **{**WIDE, **more}))
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    SHARDINGS[asked.sharding](made, asked.ranks)
    return made


def leave_out(rank: int, asked: Asked) -> sv.Source:
    """The model without one tensor."""
    own = read_source(build(asked))
    for named in (own.tensors, own.side, own.shapes, own.served):
        del named["model.layers.1.self_attn.k_proj.weight"]
    return own


def differ(rank: int, asked: Asked) -> sv.Source:
    """The model, of which rank 1 says that a tensor has another shape."""
    own = read_source(build(asked))
    if rank == 1:
        own.shapes["model.norm.weight"] = ((7,), "bfloat16")
    return own


def send_changed(rank: int, change: Any, changed: int) -> None:
    """Send after `change(tensors)` of what one rank has, which is put back afterwards."""
    _, trainer = held["own"]
    tensors: Any = trainer.source.tensors
    before = dict(tensors)
    if rank == changed:
        change(tensors)
    try:
        trainer.send_weights()
    finally:
        tensors.clear()
        tensors.update(before)


def reshape_one(tensors: dict[str, Tensor]) -> None:
    """A tensor has a row more."""
    local = tensors["model.norm.weight"].to_local()
    tensors["model.norm.weight"] = torch.zeros(len(local) + 1, dtype=local.dtype)


def retype_one(tensors: dict[str, Tensor]) -> None:
    """A tensor has numbers of another type."""
    local = tensors["model.norm.weight"].to_local()
    tensors["model.norm.weight"] = local.detach().float()


def drop_one(tensors: dict[str, Tensor]) -> None:
    """A tensor is not there."""
    del tensors["model.norm.weight"]


def free_one(tensors: dict[str, Tensor]) -> None:
    """A tensor has given its memory back."""
    local = tensors["model.norm.weight"].to_local().detach().clone()
    local.untyped_storage().resize_(0)
    tensors["model.norm.weight"] = local


def send_between(rank: int, folder: Path, steps: int) -> None:
    """Send, while an engine has a request under way, which goes on before anybody ends the update."""
    from tests.vllm.transfer import inside

    (client,) = held["own"].trainer._clients
    finish = client.finish_weight_update

    def step_and_finish(weight_version: str | None = None) -> None:
        client.ask(inside.step, steps)
        finish(weight_version)

    client.finish_weight_update = step_and_finish
    send(rank, folder)


def send_unreached(rank: int, method: str) -> None:
    """Send where the second engine does not hear this call, and later hears all."""
    _, trainer = held["own"]
    if rank > 0:
        trainer.send_weights()
        return

    def fail(*args: Any) -> None:
        raise ConnectionError("the engine cannot be reached")

    last = trainer._clients[-1]
    setattr(last, method, fail)
    try:
        trainer.send_weights()
    finally:
        delattr(last, method)


def send_until(rank: int, folder: Path, dying: int) -> None:
    """Send, of which one rank has done only a part when it dies."""
    if rank == dying:
        second = held["own"].trainer.link.refits[1]
        vars(second)["prepare"] = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
    send(rank, folder)


def send_often(rank: int, times: int) -> None:
    """So many updates."""
    for _ in range(times):
        held["own"].trainer.send_weights()


def count_held(rank: int) -> dict[str, int]:
    """What this process has open."""
    from tests.vllm.transfer import inside

    return inside.count_held()


# Models


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return loaded


def fill(model: nn.Module, folder: Path) -> None:
    """Put the weights of a checkpoint in place of the model's own."""
    dtype = next(model.parameters()).dtype
    whole = _load(folder, dtype).state_dict()
    if dtype == torch.float32:
        torch.manual_seed(0)
        # Numbers that are rounded to the checkpoint's: some up, some down.
        for name, tensor in whole.items():
            signs = torch.randint(0, 2, tensor.shape) * 2 - 1
            if not name.endswith("e_score_correction_bias"):
                whole[name] = tensor * (1 + BELOW_HALF * signs)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


def _divide_not(model: nn.Module, ranks: int) -> None:
    pass


def _divide_fsdp(model: nn.Module, ranks: int) -> None:
    _shard(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)))


def _divide_hsdp(model: nn.Module, ranks: int) -> None:
    _shard(model, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "fsdp")))


def _divide_fsdp_tp(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("fsdp", "tp"))
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], _list_tp(layer))
    _shard(model, mesh["fsdp"])


def _list_tp(layer: nn.Module) -> dict[str, Any]:
    """How the projections of a layer are divided, of those that it has."""
    columns = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
    plan: dict[str, Any] = {}
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in columns:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ("o_proj", "down_proj"):
            plan[name] = RowwiseParallel()
    return plan


def _shard(model: nn.Module, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


SHARDINGS = {
    "none": _divide_not,
    "fsdp": _divide_fsdp,
    "hsdp": _divide_hsdp,
    "fsdp x tp": _divide_fsdp_tp,
}
