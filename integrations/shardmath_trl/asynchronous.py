"""Asynchronous: TRL's experimental AsyncGRPOTrainer, whose vLLM server gets its weights from all ranks.

TRL pauses the server, has all ranks walk through the weights, and resumes it. Here each rank sends its shards when it
would begin that walk, and walks through nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer

from shardmath_trl.connecting import check_model, check_server, connect
from shardmath_vllm import Trainer

__all__ = ["ShardAsyncGRPOTrainer"]


class ShardAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's AsyncGRPOTrainer, except that every rank sends its own shards to the vLLM server, and nothing is gathered.

    It takes the same arguments, except `weight_transfer`. Only the update of weights was ever run, on CPUs. Raises
    ValueError for a model whose shards cannot be sent.
    """

    _trainer: Trainer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        transfer = _Transfer()
        super().__init__(*args, weight_transfer=transfer, **kwargs)
        transfer.client = self.vllm_client

    def create_accelerator_and_postprocess(self) -> None:
        """Raise ValueError if the model's shards cannot be sent, before TRL asks the server or starts rollouts."""
        super().create_accelerator_and_postprocess()
        check_model(self.accelerator, self.model)

    def _streaming_iter(self) -> Iterator[Any]:
        """Send this rank's shards, as they are now, and return no weights to gather. Collective over all ranks."""
        if self._trainer is None:
            client = self.vllm_client
            url = client.server_url if client else ""
            self._trainer = connect(self.accelerator, self.model, client, url, None)
        self._trainer.send_weights()
        return iter(())


class _Transfer:
    """TRL's WeightTransferProtocol, which only rank 0 calls: it pauses and resumes the server."""

    client: Any

    def init_weight_transfer(self) -> None:
        """Wait until the server is up. Raises RuntimeError if it does not take shards."""
        self.client.wait_for_server_ready()
        check_server(self.client, self.client.server_url)

    def pause(self) -> None:
        self.client.pause()

    def send_weights(self, iterator: Iterator[Any]) -> None:
        """Do nothing: all ranks have sent their shards."""

    def resume(self) -> None:
        self.client.resume()

    def destroy(self) -> None:
        """Do nothing: the engine continues with the weights that it has."""
