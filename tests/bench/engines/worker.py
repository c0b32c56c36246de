"""What vLLM's workers are given beside what they do: another backend while they run, and figures of an update.

vLLM imports this in each worker for `worker_extension_cls`, which makes the peer known there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

import shardmath as sm
from shardmath_torch.groups.dtypes import dtype_of
from tests.bench.engines import costs, peer, repacking

__all__ = ["Extension"]

peer.register()


class Extension:
    """Methods of a worker, called by `LLM.collective_rpc`."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    model_runner: Any
    measured_since: costs.Since
    processed: float
    transfer_engines: dict[str, Any]
    to_repack: repacking.Weights

    def use_backend(self, name: str) -> None:
        """Have this backend's engine in the place of the one that there is, which is kept."""
        made = vars(self).setdefault("transfer_engines", {})
        if name not in made:
            made[name] = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=name),
                self.vllm_config,
                self.device,
                self.model_runner.get_model(),
            )
            if hasattr(made[name], "_loading"):
                self._time_processing(made[name]._loading)
        self.weight_transfer_engine = made[name]

    def _time_processing(self, loading: Any) -> None:
        """Count seconds of this processor in which vLLM makes what it runs of what has arrived."""
        process = loading.process

        def process_and_count(natives: Collection[str]) -> None:
            start = time.process_time()
            process(natives)
            self.processed += time.process_time() - start

        loading.process = process_and_count

    def begin_measuring(self) -> None:
        """Before an update."""
        self.processed = 0.0
        self.measured_since = costs.begin()

    def end_measuring(self) -> costs.Cost:
        """What this worker took for it."""
        return self.measured_since.end()

    def count_processed(self) -> float:
        """Seconds in which vLLM made what it runs of what had arrived, in the latest update by shardmath."""
        return self.processed

    def begin_repacking(self) -> None:
        """Before `repack`, at the first call: make the weights."""
        if "to_repack" not in vars(self):
            self.to_repack = repacking.make_weights(self.model_runner.get_model())

    def repack(self) -> None:
        """Pack weights that are there for the processor."""
        repacking.repack(self.to_repack)

    def count_received(self) -> int:
        """Bytes that came from other ranks in the latest update."""
        engine = self.weight_transfer_engine
        if isinstance(engine, peer.Worker):
            return engine.received
        moved = [refit.last for refit in engine._link.refits]
        return sum(one.received.nbytes for one in moved if one is not None)

    def count_stored(self) -> tuple[int, int]:
        """Bytes that the model's own loader stores here: of all tensors, and of the fullest layer."""
        link = self.weight_transfer_engine._link
        sizes = {one.name: _count_bytes(one, link.recorded) for one in link.recorded.natives}
        layers = []
        for refit in link.refits:
            stored: set[str] = set()
            for engine in refit.planned.engines.values():
                stored.update(name for _, name in engine.natives(link.place))
            layers.append(sum(sizes[name] for name in stored))
        return sum(sizes.values()), max(layers)


def _count_bytes(native: Any, recorded: sm.storage.Recorded) -> int:
    """Those of a stored tensor that are written."""
    written = math.prod(native.shape) - recorded.unwritten.get(native.name, 0)
    return int(written * dtype_of(native.dtype).itemsize)
