"""Workers of verl in actors of Ray, on CPUs: an actor whose model is under FSDP2, and a rollout's."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

import shardmath_verl  # noqa: F401


class Actor(ActorRolloutRefWorker):
    """verl's worker as it is, except that its `init_model`, which needs a GPU, is this constructor."""

    def __init__(self, folder: str, kwargs: dict[str, Any]) -> None:
        Worker.__init__(self)
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", address, rank=self.rank, world_size=self.world_size)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        assert all(isinstance(weight, DTensor) for weight in self.model.parameters())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.asked = 0
        engine = SimpleNamespace(module=self.model, get_per_tensor_param=self.gather)
        self.actor = SimpleNamespace(engine=engine)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "shardmath", is_master=self.rank == 0, bucket_size=1 << 20, **kwargs
        )

    def gather(self) -> tuple[Any, None]:
        """What verl asks for whole tensors."""
        self.asked += 1
        return ((name, p.full_tensor()) for name, p in self.model.named_parameters()), None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self) -> None:
        tokens = torch.arange(3, 35).reshape(2, 16)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self, prompt: list[int], length: int) -> tuple[list[int], int]:
        """Greedy tokens, and how often verl has asked for whole tensors."""
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(length):
                best = self.model(tokens).logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, best], 1)
        self.model.reshard()
        return tokens[0, len(prompt) :].tolist(), self.asked


class Adapter:
    """What a rollout's worker hands weights to. verl's own is for a server that verl has started on GPUs."""

    received = 0

    async def update_weights(self, weights: Any, **_: Any) -> None:
        async for _each in weights:
            self.received += 1
        assert not self.received
