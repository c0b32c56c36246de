"""Connecting: the ranks of accelerate and the workers of a vLLM server, of which TRL's client on rank 0 knows."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import broadcast_object_list

from shardmath.base.errors import ExchangeError
from shardmath.base.text import word_error
from shardmath_torch.groups.compat import TCPStore
from shardmath_vllm import HTTPClient, Trainer, TrainerInfo

__all__ = ["check_server", "connect"]


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
        f"{host}:{port or _serve(host).port}",
        accelerator.num_processes,
        workers=client.get_world_size(),
        dtype=dtype.removeprefix("torch."),
        transport="nccl" if accelerator.device.type == "cuda" else "gloo",
        run=secrets.token_hex(8),
        rank=0,
    )


@cache
def _serve(host: str) -> TCPStore:
    """A store that this process serves at a free port of `host`; the cache keeps it, and its port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _find_own_address(server: str) -> str:
    """The address of this machine on its way to the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        # It sends nothing: a port of UDP may have nobody behind it.
        way.connect((server, 9))
        address: str = way.getsockname()[0]
    return address
