"""Gloo: moves between processes on CPUs, by the exchange engine, with broadcasts as its reference."""

from __future__ import annotations

from collections.abc import Callable

from shardmath_gloo.broadcast import Broadcast
from shardmath_gloo.wire import LONG, GlooWire
from shardmath_torch.moves.exchange.engine import Exchange
from shardmath_torch.moves.exchange.task import Engine, Task

__all__ = ["ENGINES", "open_wire"]


def gloo_exchange(task: Task) -> Exchange:
    """Return the engine "exchange", which sends messages between pairs of ranks, for `task` (one rank's work in a plan,
    and its connections).

    Copies into and out of staging take as long as the wire does, so each long piece is a separate message, which needs
    no staging if it is contiguous.
    """
    return Exchange(task, apart=LONG)


ENGINES: dict[str, Callable[[Task], Engine]] = {"exchange": gloo_exchange, "broadcast": Broadcast}
open_wire = GlooWire
