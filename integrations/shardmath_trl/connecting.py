"""Connecting: the ranks of accelerate and the workers of a vLLM server, of which TRL's client on rank 0 knows. Models
and servers that cannot connect are errors.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import broadcast_object_list, is_peft_model
from trl.distributed import DistributedBackend

from shardmath.base.errors import ExchangeError
from shardmath.base.text import word_error
from shardmath_vllm import HTTPClient, Trainer, TrainerInfo
from shardmath_vllm.meeting import serve_store

__all__ = ["check_model", "check_server", "connect"]


def check_model(accelerator: Any, model: Any) -> None:
    """Raise ValueError if the shards cannot be sent that `model` has once `accelerator` has divided it."""
    if is_peft_model(model):
        raise ValueError(
            "the model has PEFT adapters, which are not merged shard by shard; pass a model without adapters, or use "
            "TRL's own trainer"
        )
    backend = DistributedBackend(accelerator)
    if backend.is_zero3 or backend.fsdp_version == 1:
        kind = "DeepSpeed ZeRO-3" if backend.is_zero3 else "FSDP1"
        raise ValueError(
            f"the model is under {kind}, whose shards cannot be sent; set fsdp_version: 2 in accelerate's configuration"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_activation_checkpointing wraps layers, so that the server does not know the names of their "
            "parameters; pass gradient_checkpointing=True to the trainer's configuration instead"
        )


def check_server(client: Any, url: str) -> None:
    """Raise RuntimeError unless the server of TRL's `client` takes weights from shardmath."""
    transfer = client.get_server_info()["weight_transfer_config"] or {}
    if transfer.get("backend") != TrainerInfo.backend:
        raise RuntimeError(
            f"the vLLM server at {url} has the weight transfer {transfer.get('backend')!r}; start it with "
            """--weight-transfer-config '{"backend": "shardmath"}'"""
        )


def connect(accelerator: Any, model: Any, client: Any, url: str, port: int | None) -> Trainer:
    """Connect this rank to the workers of the server at `url`; rank 0, which has TRL's `client`, asks it how many they
    are. They connect at `port` of rank 0's machine, or at a free one if it is None. Collective over all ranks.
    """
    is_first = accelerator.is_main_process
    told: list[Any] = [_describe_or_fail(accelerator, client, url, port) if is_first else None]
    broadcast_object_list(told)
    if isinstance(told[0], ExchangeError):
        raise told[0]
    return Trainer.trainer_init(
        replace(told[0], rank=accelerator.process_index),
        client=HTTPClient(url) if is_first else [],
        source=accelerator.unwrap_model(model),
    )


def _describe_or_fail(
    accelerator: Any, client: Any, url: str, port: int | None
) -> TrainerInfo | ExchangeError:
    """The info of rank 0, or an error for all ranks, which wait for the info."""
    try:
        return _describe(accelerator, client, url, port)
    except Exception as error:
        what = f"rank 0 cannot ask the server at {url}"
        return ExchangeError(f"{what}: {word_error(error)}; start it again")


def _describe(accelerator: Any, client: Any, url: str, port: int | None) -> TrainerInfo:
    """The info of rank 0: where all ranks connect, and what the server has."""
    dtype = client.get_server_info()["model_config"]["dtype"]
    host = _find_own_address(urlsplit(url).hostname or "")
    return TrainerInfo(
        f"{host}:{port}" if port else serve_store(host),
        accelerator.num_processes,
        workers=client.get_world_size(),
        dtype=dtype.removeprefix("torch."),
        transport="nccl" if accelerator.device.type == "cuda" else "gloo",
        run=secrets.token_hex(8),
        rank=0,
    )


def _find_own_address(server: str) -> str:
    """The address of this machine on its way to the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        # It sends nothing: a port of UDP may have nobody behind it.
        way.connect((server, 9))
        address: str = way.getsockname()[0]
    return address
