"""Moving over gloo, between processes on CPUs: the exchange, and broadcasts as its reference."""

from __future__ import annotations

from collections.abc import Callable

from shardmath_gloo.broadcast import Broadcast
from shardmath_gloo.wire import LONG, GlooWire
from shardmath_torch.moves.exchange.engine import Exchange
from shardmath_torch.moves.exchange.task import Engine, Task

__all__ = ["ENGINES", "open_wire"]


def gloo_exchange(task: Task) -> Exchange:
    """The engine "exchange".

    Copies into staging and out of it take as long as the wire does, so that long pieces go without: each is a message
    of its own, and one that the wire itself looks after.
    """
    return Exchange(task, apart=LONG)


ENGINES: dict[str, Callable[[Task], Engine]] = {"exchange": gloo_exchange, "broadcast": Broadcast}
open_wire = GlooWire
