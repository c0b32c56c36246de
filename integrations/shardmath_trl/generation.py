"""Generation: what TRL calls to generate on a vLLM server, and to send it new weights."""

from __future__ import annotations

from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from shardmath_trl.connecting import check_model, check_server, connect
from shardmath_vllm import Trainer

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
        if self.mode != "server":
            raise ValueError(
                f"vllm_mode={self.mode!r} has no server to send shards to; pass vllm_mode='server'"
            )
        check_model(self.accelerator, self.model)
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            check_server(self.vllm_client, url)
        # As TRL does: other ranks do not run ahead while rank 0 waits for the server.
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Send this rank's shards, as they are now. Collective over all ranks; TRL calls it before it generates."""
        if self._trainer is None:
            self._trainer = self._connect()
        self._trainer.send_weights()

    def _connect(self) -> Trainer:
        """Connect this rank to the server's workers."""
        client = self.vllm_client if self.accelerator.is_main_process else None
        url = client.base_url if client else ""
        return connect(self.accelerator, self.model, client, url, self.group_port)
