"""Generation: what TRL calls to generate on a vLLM server, and to send it new weights."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from typing import Any

from accelerate.utils import broadcast_object_list, is_peft_model
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from shardmath.base.errors import ExchangeError
from shardmath.base.text import word_error
from shardmath_vllm import HTTPClient, Trainer, TrainerInfo

__all__ = ["ShardGeneration"]


class ShardGeneration(VLLMGeneration):
    """TRL's VLLMGeneration in server mode, except that every rank sends its own shards to the server.

    TRL constructs it before accelerate shards the model, so it connects to the server's workers at the first
    `sync_weights`.
    """

    _trainer: Trainer | None = None

    def _init_vllm(self) -> None:
        """Connect rank 0 to the server, as TRL does, and open no NCCL group. Raises ValueError or RuntimeError if
        shards cannot be sent."""
        self._check()
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            transfer = self.vllm_client.get_server_info()["weight_transfer_config"] or {}
            if transfer.get("backend") != TrainerInfo.backend:
                raise RuntimeError(
                    f"the vLLM server at {url} has the weight transfer {transfer.get('backend')!r}; start it with "
                    """--weight-transfer-config '{"backend": "shardmath"}'"""
                )
        # As TRL does: other ranks do not run ahead while rank 0 waits for the server.
        self.accelerator.wait_for_everyone()

    def _check(self) -> None:
        """Raise ValueError if the model's shards cannot be sent."""
        if self.mode != "server":
            raise ValueError(
                f"vllm_mode={self.mode!r} has no server to send shards to; pass vllm_mode='server'"
            )
        if is_peft_model(self.model):
            raise ValueError(
                "the model has PEFT adapters, which are not merged shard by shard; pass a model without "
                "adapters, or use TRL's own GRPOTrainer"
            )
        if self._dist.is_zero3 or self._dist.fsdp_version == 1:
            kind = "DeepSpeed ZeRO-3" if self._dist.is_zero3 else "FSDP1"
            raise ValueError(
                f"the model is under {kind}, whose shards cannot be sent; set fsdp_version: 2 in "
                f"accelerate's configuration"
            )
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.activation_checkpointing:
            raise ValueError(
                "fsdp_activation_checkpointing wraps layers, so that the server does not know the names of their "
                "parameters; pass GRPOConfig(gradient_checkpointing=True) instead"
            )

    def sync_weights(self) -> None:
        """Send this rank's shards, as they are now. Collective over all ranks; TRL calls it before it generates."""
        if self._trainer is None:
            self._trainer = self._connect()
        self._trainer.send_weights()

    def _connect(self) -> Trainer:
        """Connect this rank to the server's workers. Rank 0 asks the server how many they are."""
        is_first = self.accelerator.is_main_process
        told: list[Any] = [self._describe_or_fail() if is_first else None]
        broadcast_object_list(told)
        if isinstance(told[0], ExchangeError):
            raise told[0]
        return Trainer.trainer_init(
            replace(told[0], rank=self.accelerator.process_index),
            client=HTTPClient(self.vllm_client.base_url) if is_first else [],
            source=self.accelerator.unwrap_model(self.model),
        )

    def _describe_or_fail(self) -> TrainerInfo | ExchangeError:
        """The info of rank 0, or an error for all ranks, which wait for the info."""
        try:
            return self._describe()
        except Exception as error:
            what = f"rank 0 cannot ask the server at {self.vllm_client.base_url}"
            return ExchangeError(f"{what}: {word_error(error)}; start it again")

    def _describe(self) -> TrainerInfo:
        """The info of rank 0: where all ranks connect, and what the server has."""
        dtype = self.vllm_client.get_server_info()["model_config"]["dtype"]
        return TrainerInfo(
            f"{_find_own_address(self.vllm_client.host)}:{self.group_port}",
            self.accelerator.num_processes,
            workers=self.vllm_client.get_world_size(),
            dtype=dtype.removeprefix("torch."),
            transport="nccl" if self.accelerator.device.type == "cuda" else "gloo",
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
