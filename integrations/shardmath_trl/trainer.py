"""Trainers: TRL's GRPOTrainer whose vLLM server gets its weights from all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl
from trl.trainer import grpo_trainer

from shardmath_trl.generation import ShardGeneration

__all__ = ["ShardGRPOTrainer"]

TESTED = "1.16.0"
if trl.__version__ != TESTED:
    warnings.warn(
        f"shardmath_trl was tested with TRL {TESTED} only, and this is TRL {trl.__version__}, which may call the "
        f"overridden methods differently; install trl=={TESTED}, or compare what the server generates",
        stacklevel=2,
    )


class ShardGRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer, except that every rank sends its own shards to the vLLM server, and nothing is gathered.

    It takes the same arguments, with `GRPOConfig(use_vllm=True, vllm_mode="server")`. All ranks connect at
    `vllm_group_port` of rank 0's machine. Raises ValueError for settings in which no rank has shards to send to a
    server, RuntimeError if the server does not take shards.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _generating_by(ShardGeneration):
            super().__init__(*args, **kwargs)
        if not isinstance(getattr(self, "vllm_generation", None), ShardGeneration):
            raise ValueError(
                "the trainer generates without a vLLM server; pass "
                "args=GRPOConfig(use_vllm=True, vllm_mode='server', vllm_server_base_url=URL)"
            )


@contextmanager
def _generating_by(kind: type) -> Iterator[None]:
    """Have a GRPOTrainer that is constructed within the block make a `kind`: TRL looks the class up by its name."""
    own = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = kind
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = own
