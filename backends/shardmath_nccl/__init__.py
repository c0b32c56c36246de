"""NCCL: moves between CUDA devices, by the exchange engine, on the caller's current stream."""

from __future__ import annotations

from collections.abc import Callable

from shardmath_nccl.wire import NcclWire
from shardmath_torch.moves.exchange.engine import Exchange
from shardmath_torch.moves.exchange.task import Engine, Task

__all__ = ["ENGINES", "open_wire"]

ENGINES: dict[str, Callable[[Task], Engine]] = {"exchange": Exchange}
open_wire = NcclWire
