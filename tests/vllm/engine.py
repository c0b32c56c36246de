"""Engines: vLLM's own model of a rank, before `process_weights_after_loading`.

One process is every rank in turn: building and loading asks vLLM's groups for a rank and a size, and sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.distributed.pool import free_port

__all__ = ["VERSION", "built", "configure", "initialize", "leave"]

VERSION = vllm.__version__

# vLLM asks a process of its own what a model's class can do, which takes the time that importing takes.
registry._run_in_subprocess = lambda ask: ask()


def configure(folder: Path, tp: int = 1, **more: Any) -> VllmConfig:
    """vLLM's configuration of a saved model."""
    given = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        tensor_parallel_size=tp,
        **more,
    )
    return given.create_engine_config()


def initialize() -> None:
    """vLLM's groups, of this process alone unless torch has a group already."""
    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(VllmConfig()):
        where = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(1, 0, where, 0, "gloo")
        parallel_state.initialize_model_parallel(1)


def leave() -> None:
    """Ends vLLM's groups of this process, and torch's that they are made of: `initialize` makes them again."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@contextlib.contextmanager
def placed(rank: int, size: int) -> Iterator[None]:
    """This process as a rank of tensor parallelism."""
    groups = [parallel_state._TP, parallel_state._EP]
    before = [(group, group.rank_in_group, group.world_size) for group in groups if group]
    try:
        for group, _, _ in before:
            group.rank_in_group, group.world_size = rank, size
        yield
    finally:
        for group, own, world in before:
            group.rank_in_group, group.world_size = own, world


@contextlib.contextmanager
def built(
    folder: Path,
    rank: int = 0,
    tp: int = 1,
    device: str = "meta",
    *,
    to_run: bool = False,
    draft: bool = False,
    **more: Any,
) -> Iterator[nn.Module]:
    """The rank's model, or the `draft` that predicts further tokens for it, which is as if it were on that rank as long
    as the block is.

    Unless it is `to_run`, the processor need not have what its kernels multiply with.
    """
    initialize()
    if draft:
        more["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    config = configure(folder, tp, **more)
    speculative = config.speculative_config
    model_config = speculative.draft_model_config if draft and speculative else config.model_config
    with placed(rank, tp), set_current_vllm_config(config):
        with contextlib.ExitStack() as building:
            building.enter_context(set_default_torch_dtype(torch.bfloat16))
            building.enter_context(torch.device(device))
            if not to_run:
                building.enter_context(_on_any_processor())
            model = initialize_model(config, model_config=model_config)
        yield model


def _on_any_processor() -> contextlib.AbstractContextManager[Any]:
    """What has vLLM build layers of FP8 tiles also where its kernel for them, which needs AMX, cannot run.

    It looks for a kernel when it makes a layer's parameters, which are the same with any, and loading runs none.
    """
    can_run = classmethod(lambda kernel, capability=None: (True, None))
    return mock.patch.object(CPUFp8BlockScaledMMKernel, "is_supported", can_run)
