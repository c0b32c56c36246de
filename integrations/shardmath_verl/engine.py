"""Engine: verl's checkpoint engine "shardmath". The ranks of an actor send their shards into vLLM servers through it.

1. verl makes an engine in every rank of the actor, and in every worker of the rollout. A rollout's engine does nothing,
   since the workers of vLLM receive the weights themselves.
2. Ranks connect at the first update, after one that failed, and if the module or the number of ranks or workers has
   changed. verl calls all methods before every update.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import ray
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from shardmath.base.text import plural
from shardmath_vllm import HTTPClient, Trainer, TrainerInfo
from shardmath_vllm.meeting import serve_store

__all__ = ["ShardCheckpointEngine"]


@CheckpointEngineRegistry.register("shardmath")
class ShardCheckpointEngine(CheckpointEngine):
    """A checkpoint engine of verl that sends the shards of a module to the vLLM servers at `urls`, which get parameters
    of type `dtype`.

    verl passes `bucket_size`, which is not used, and `is_master` only on ranks of an actor. The other arguments come
    from verl's `engine_kwargs`. Raises ValueError if `urls` is text.
    """

    takes_training_engine = True

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        urls: Sequence[str],
        dtype: str = "bfloat16",
    ) -> None:
        if isinstance(urls, str):
            raise ValueError(f"urls={urls!r} is text, not a list; pass urls=[{urls!r}]")
        self._is_master = is_master
        self._urls = list(urls)
        self._dtype = dtype
        self._told: dict[str, Any] = {}
        self._trainer: Trainer | None = None
        self._connected: tuple[Any, ...] = ()

    def prepare(self) -> dict[str, Any]:
        """Return an address for the ranks to connect at, on the actor's first rank."""
        if not self._is_master:
            return {}
        address = serve_store(ray.util.get_node_ip_address())
        return {"address": address, "run": secrets.token_hex(8)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for each rank of the actor, and for each worker."""
        each = {**metadata[0], "actors": actor_wg_world_size, "workers": rollout_world_size}
        actors = {name: [value] * actor_wg_world_size for name, value in each.items()}
        actors["rank"] = list(range(actor_wg_world_size))
        return actors, {"rank": [-1] * rollout_world_size}

    def init_process_group(
        self, rank: int, actors: int = 0, workers: int = 0, **address: str
    ) -> None:
        """Keep what a rank of the actor needs to connect. Raises ValueError if servers would have unequal workers."""
        if rank < 0:
            return
        servers = len(self._urls)
        if not servers or workers % servers:
            raise ValueError(
                f"{plural(workers, 'worker')} of the rollout cannot be divided evenly among "
                f"{plural(servers, 'URL')}, urls={self._urls}; pass one URL per replica in engine_kwargs"
            )
        each = [workers // servers] * servers
        self._told = {**address, "trainers": actors, "workers": each, "rank": rank}

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Send the shards of `weights.module`, as they are now. Collective over the actor's ranks.

        Raises TypeError if verl passes a generator of whole tensors instead of a training engine, ValueError for a
        module that is not under FSDP2, and ExchangeError on all ranks if the update fails.
        """
        if not hasattr(weights, "module"):
            raise TypeError(
                f"verl passes {type(weights).__name__} to the checkpoint engine, which is for whole tensors, not the "
                f"training engine, whose module is sharded; change verl as docs/verl.md says"
            )
        module = weights.module
        # Not the module's id: another module may get the id of one that is freed.
        needed = (module, self._told["trainers"], self._told["workers"])
        if self._trainer is None or not _is_same(needed, self._connected):
            self._disconnect()
            self._trainer = self._connect(module)
            self._connected = needed
        try:
            self._trainer.send_weights()
        except BaseException:
            self._disconnect()
            raise
        return {}

    def _disconnect(self) -> None:
        """Disconnect this rank from the workers, if it is connected."""
        trainer, self._trainer, self._connected = self._trainer, None, ()
        if trainer is not None:
            trainer.shutdown()

    def _connect(self, module: Any) -> Trainer:
        """Connect this rank to the workers of all servers. Raises ValueError for a module that is not under FSDP2."""
        _check_module(module)
        on_gpus = next(module.parameters()).device.type == "cuda"
        info = TrainerInfo(dtype=self._dtype, transport="nccl" if on_gpus else "gloo", **self._told)
        clients = [HTTPClient(url) for url in self._urls] if info.is_sender else []
        return Trainer.trainer_init(info, client=clients, source=module)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield nothing: vLLM's workers have the weights."""
        nothing: tuple[tuple[str, Any], ...] = ()
        for each in nothing:
            yield each

    def finalize(self) -> None:
        """Do nothing: ranks stay connected between updates."""


def _is_same(needed: tuple[Any, ...], connected: tuple[Any, ...]) -> bool:
    """Whether a connection was made for the module and the numbers that are needed."""
    return bool(connected) and needed[0] is connected[0] and needed[1:] == connected[1:]


def _check_module(module: Any) -> None:
    """Raise ValueError if verl's strategy has given a module whose shards cannot be read."""
    fix = "set actor_rollout_ref.actor.strategy=fsdp2"
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"the training engine's module is a {type(module).__name__}, as of Megatron, not one module whose shards "
            f"can be read; {fix}"
        )
    if any(isinstance(each, FullyShardedDataParallel) for each in module.modules()):
        raise ValueError(
            f"the module is under FSDP1, verl's default, which has flat parts of several weights; {fix}"
        )
