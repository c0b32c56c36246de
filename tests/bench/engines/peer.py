"""The peer: what vLLM's own engine `nccl` does, over gloo.

1. As in vllm/distributed/weight_transfer/nccl_engine.py of 0.32.0, without packing: every rank of the trainer gathers
   each parameter whole, rank 0 sends it to every worker, and the worker's `load_weights` takes its part of it, within
   vLLM's layerwise reload.
2. The group is vLLM's own, too. What differs is that gloo sends, and that a worker counts what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

__all__ = ["PEER", "PeerInfo", "register"]

PEER = "whole_gloo"
HOST = "127.0.0.1"


@dataclass
class PeerInfo(TrainerInitInfo):
    """What a rank of the trainer brings: the port on which rank 0 serves a store, and how many workers there are."""

    backend: ClassVar[str] = PEER

    port: int
    workers: int


@dataclass
class _Joining(WeightTransferInitInfo):
    port: int
    size: int


@dataclass
class _Updating(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Worker(WeightTransferEngine[_Joining, _Updating]):
    """Receives every tensor whole."""

    init_info_cls = _Joining
    update_info_cls = _Updating

    group: ProcessGroup | None = None
    received = 0
    """Bytes of the latest update."""

    def init_transfer_engine(self, init_info: _Joining) -> None:
        self.group = _join(init_info.port, 1 + self.parallel_config.rank, init_info.size)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class has it, which synchronizes with an accelerator afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _Updating) -> None:
        assert self.group is not None, "workers have joined"
        self.received = 0
        named = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        with disable_mtp_completeness_check():
            for name, dtype, shape in named:
                weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                _broadcast(self.group, weight)
                self.received += weight.nbytes
                self.model.load_weights([(name, weight)])  # type: ignore[operator]
                del weight

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


class Trainer(TrainerWeightTransferEngine[PeerInfo]):
    """Gathers every tensor whole, and sends it from rank 0."""

    init_info_cls = PeerInfo

    group: ProcessGroup | None = None

    @classmethod
    def trainer_init(cls, init_info: PeerInfo, *, client: Any, source: Any = None) -> Trainer:
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        if made.is_sender:
            size = 1 + init_info.workers
            joining = asdict(_Joining(init_info.port, size))
            with ThreadPoolExecutor(max_workers=1) as beside:
                joined = beside.submit(client.init_weight_transfer_engine, joining)
                made.group = _join(init_info.port, 0, size)
                joined.result()
        return made

    def send_weights(self) -> None:
        metas = self.source.metadata()
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        updating = _Updating(
            [meta.name for meta in metas],
            [str(meta.dtype).removeprefix("torch.") for meta in metas],
            [list(meta.shape) for meta in metas],
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as beside:
            updated = beside.submit(self.client.update_weights, asdict(updating))
            self._broadcast(metas)
            updated.result()
        self.client.finish_weight_update()

    def _broadcast(self, metas: Sequence[Any]) -> None:
        assert self.group is not None, "rank 0 has joined"
        for meta, (name, tensor) in zip(metas, self.source, strict=True):
            assert name == meta.name, (name, meta.name)
            _broadcast(self.group, tensor.contiguous())

    def shutdown(self) -> None:
        self.group = None


def _join(port: int, rank: int, size: int) -> ProcessGroup:
    group = stateless_init_torch_distributed_process_group(HOST, port, rank, size, "gloo")
    assert isinstance(group, ProcessGroup)
    return group


@torch.no_grad()
def _broadcast(group: ProcessGroup, tensor: Tensor) -> None:
    """From rank 0 to all others. Not by `dist.broadcast`, which looks for ranks among those of the default group."""
    options = BroadcastOptions()
    options.rootRank = 0
    # As bytes: not every type of element is known to gloo.
    group.broadcast([tensor.detach().flatten().view(torch.uint8)], options).wait()


def register() -> None:
    """Make both ends known to vLLM, as its own are in weight_transfer/factory.py; again does nothing."""
    if PEER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(PEER, Worker)
        WeightTransferTrainerFactory.register_engine(PEER, Trainer)
