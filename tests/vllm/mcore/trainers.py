"""Ranks of a trainer: Megatron-Core's model, filled with a checkpoint, whose weights engines take.

The plain reference fills it (`tests/references`), which knows nothing of shardmath's rows; that Megatron computes the
right logits of what it says is tested in `tests/megatron`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import shardmath_vllm as sv
from shardmath import ExchangeError
from tests.megatron import configs, trainer
from tests.megatron.cases import Case
from tests.references.checkpoint import unstack
from tests.references.megatron import Trainer, store
from tests.vllm import checkpoints
from tests.vllm.mcore.calls import Caller
from tests.vllm.mcore.cases import Sending

__all__ = ["build", "fill", "send"]

TIMEOUT_S = 60.0


def send(rank: int, sending: Sending) -> dict[str, Any]:
    """Send each checkpoint in turn to the engine, which generates in between; what the rank saw."""
    case, first = sending.case, sending.folders[0]
    hf = transformers.AutoConfig.from_pretrained(first)
    chunks = build(case, hf, sending.dtype)
    engine = Caller(sending.engine) if rank == 0 else None
    # Wrapped, as where Megatron trains.
    wrapped = [Wrapped(chunk) for chunk in chunks]
    refused = join_as_it_is(rank, sending, wrapped, hf, engine)
    source = sv.read_megatron(wrapped, hf, spec=case.spec, dtype="bfloat16")
    sender = sv.Trainer.trainer_init(tell(rank, sending), client=engine or [], source=source)
    generated = []
    for folder in sending.folders:
        fill(chunks, case, hf, folder)
        sender.send_weights()
        if engine is not None:
            generated.append(engine.generate())
    sender.shutdown()
    if engine is not None:
        engine.close()
    return {"generated": generated, "portions": len(sender.link.refits), "refused": refused}


def tell(rank: int, sending: Sending) -> sv.TrainerInfo:
    return sv.TrainerInfo(
        f"127.0.0.1:{sending.port}",
        trainers=dist.get_world_size(),
        workers=sending.tp,
        rank=rank,
        timeout=TIMEOUT_S,
    )


def join_as_it_is(
    rank: int, sending: Sending, chunks: Sequence[Any], hf: Any, engine: Caller | None
) -> str:
    """Why a trainer cannot send its tensors as they are: norms at least are float32, in an engine of bfloat16."""
    source = sv.read_megatron(chunks, hf, spec=sending.case.spec)
    try:
        sv.Trainer.trainer_init(tell(rank, sending), client=engine or [], source=source)
    except ExchangeError as error:
        return str(error)
    return ""


class Wrapped(torch.nn.Module):
    """As Megatron's DistributedDataParallel and Float16Module wrap a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def build(case: Case, hf: Any, dtype: str) -> list[Any]:
    """This rank's model, a chunk per virtual stage, whose parameters have this dtype."""
    config = configs.configure(case, hf)
    config.params_dtype = getattr(torch, dtype)
    return trainer.build(case, config, hf)


@torch.no_grad()
def fill(chunks: Sequence[Any], case: Case, hf: Any, folder: Path) -> None:
    """Have the model's own tensors hold what the reference says that this rank stores of the checkpoint."""
    weights = {name: tensor.float().numpy() for name, tensor in checkpoints.read(folder)}
    sizes = {"tp": case.tp, "pp": case.pp, "vpp": case.vpp, "ep": case.ep, "etp": case.etp}
    plain = Trainer(range(case.ranks), **sizes, te=case.spec == "te", multiple=128)
    fields = {**hf.to_dict(), "num_hidden_layers": hf.num_hidden_layers}
    stored = store(unstack(weights), fields, plain, dist.get_rank())
    for chunk, wanted in zip(chunks, stored, strict=True):
        own: dict[str, Tensor] = trainer.own_tensors(chunk)
        assert own.keys() == wanted.keys()
        for name, tensor in own.items():
            tensor.copy_(torch.from_numpy(wanted[name].copy()))
