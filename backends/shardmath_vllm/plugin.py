"""The plugin: vLLM finds it by the entry point group `vllm.general_plugins`, in every process that it starts."""

from __future__ import annotations

from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from shardmath_vllm.infos import BACKEND
from shardmath_vllm.trainer import Trainer
from shardmath_vllm.workers.answers import pass_over_old_answers
from shardmath_vllm.workers.caches import drop_caches

__all__ = ["register"]


def register() -> None:
    """Register shardmath's trainer and worker classes with vLLM as "shardmath"; a second call does nothing. Also patch
    vLLM's engines: they drop values cached with old weights before new ones arrive, and skip answers of their workers
    that an earlier call left unread.
    """
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    pass_over_old_answers()
    drop_caches()
    WeightTransferEngineFactory.register_engine(
        BACKEND, "shardmath_vllm.workers.worker", "WorkerEngine"
    )
    WeightTransferTrainerFactory.register_engine(BACKEND, Trainer)
    TrainerWeightTransferEngine.register(Trainer)
