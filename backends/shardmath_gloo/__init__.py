"""Moving over gloo, between processes on CPUs: the exchange, and broadcasts as its reference."""

from __future__ import annotations

from collections.abc import Callable

from shardmath_gloo.broadcast import Broadcast
from shardmath_gloo.wire import GlooWire
from shardmath_torch.exchange.engine import Exchange
from shardmath_torch.exchange.task import Engine, Task

__all__ = ["ENGINES", "open_wire"]

ENGINES: dict[str, Callable[[Task], Engine]] = {"exchange": Exchange, "broadcast": Broadcast}
open_wire = GlooWire
