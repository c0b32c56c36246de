"""Planning: the ranks of a large trainer and of an engine meet, none of which has any data.

Trainers are what FSDP2 makes of them; the engine's ranks record the model that vLLM builds for them.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardmath as sm
from shardmath_torch.tensors.conversions.saved import record_conversion
from shardmath_vllm.infos import TrainerInfo
from shardmath_vllm.link import Link
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from tests.distributed import pool
from tests.vllm import checkpoints

__all__ = ["TP", "TRAINERS", "Planned", "plan"]

TRAINERS, TP = 4, 2
TIMEOUT_S = 250.0


@dataclass(frozen=True)
class Asked:
    """Where ranks meet, and a model: its configuration in a folder, and its checkpoint's tensors.

    A trainer that is `stacked` has experts as transformers does, otherwise as the checkpoint does.
    """

    address: str
    folder: Path
    shapes: checkpoints.Shapes
    stacked: bool


@dataclass(frozen=True)
class Planned:
    """What came of it on a rank: seconds of its processor, portions, and bytes that it is to receive and stores."""

    seconds: float
    portions: int
    received: int
    stored: int


def plan(config: Any, shapes: checkpoints.Shapes, stacked: bool, folder: Path) -> list[Planned]:
    """What came of it on each rank: trainers first, then workers. The folder gets the configuration."""
    config.save_pretrained(folder)
    asked = Asked(f"127.0.0.1:{pool.free_port()}", folder, shapes, stacked)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool.PRELOADED)
    with ProcessPoolExecutor(TRAINERS + TP, context) as ranks:
        made = ranks.map(partial(_meet, asked=asked), range(TRAINERS + TP), timeout=TIMEOUT_S)
        return list(made)


def _meet(place: int, asked: Asked) -> Planned:
    """Meet the others at this place."""
    torch.set_num_threads(1)
    info = TrainerInfo(asked.address, TRAINERS, TP, rank=min(place, TRAINERS - 1), timeout=120.0)
    link, seconds = (_train if place < TRAINERS else _serve)(place, info, asked)
    received = sum(refit.planned.plan.received_bytes()[place] for refit in link.refits)
    link.leave()
    return Planned(seconds, len(link.refits), received, _count_stored(link.recorded))


def _train(place: int, info: TrainerInfo, asked: Asked) -> tuple[Link, float]:
    model = _build(asked) if asked.stacked else None
    start = time.process_time()
    told = _tell(model, asked.shapes)
    link = Meeting(info, "planning", place).join(Given(told))
    return link, time.process_time() - start


def _build(asked: Asked) -> Any:
    """transformers' own model, without data."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(asked.folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def _tell(model: Any, shapes: checkpoints.Shapes) -> Told:
    """What a trainer's rank says: each tensor is cut into rows."""
    checkpoint = None
    if model is not None:
        shapes = {name: (tuple(p.shape), "bfloat16") for name, p in model.named_parameters()}
        checkpoint = record_conversion(model, shapes)
    mesh = sm.Mesh(fsdp=TRAINERS)
    side = {}
    for name, (shape, dtype) in shapes.items():
        side[name] = sm.Layout(shape, mesh, {"fsdp": sm.Shard(0)}, dtype=dtype)
    return Told(side, shapes, shapes, checkpoint)


def _serve(place: int, info: TrainerInfo, asked: Asked) -> tuple[Link, float]:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from shardmath_vllm.workers.loading import Loading
    from tests.vllm import engine

    with engine.built(asked.folder, place - TRAINERS, TP) as model:
        # As vLLM's own worker does before it loads.
        record_metadata_for_reloading(model)
        loading = Loading(model, get_current_vllm_config().model_config)

        def record(told: Told) -> sm.storage.Recorded:
            return loading.record(told.served, told.checkpoint)

        start = time.process_time()
        link = Meeting(info, "planning", place).join(Given(engine=0, record=record))
        return link, time.process_time() - start


def _count_stored(recorded: sm.storage.Recorded | None) -> int:
    """Bytes that a worker's loader stores; 0 of a trainer."""
    if recorded is None:
        return 0
    total = 0
    for native in recorded.natives:
        written = math.prod(native.shape) - recorded.unwritten.get(native.name, 0)
        total += written * getattr(torch, native.dtype).itemsize
    return total
