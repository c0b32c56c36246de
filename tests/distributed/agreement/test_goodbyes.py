"""Goodbyes, as those hear them who look into the store."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from shardmath_torch.groups.agreement.goodbyes import LINGER_S, Goodbyes

MOVERS = ("1", "2", "3")


class Stopped(dist.HashStore):
    """One that answers only once it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.goes_on.wait()
        return super().add(key, amount)


def test_a_store_that_does_not_answer_is_waited_for_once() -> None:
    """Not for each mover; and what was said there is heard once it answers."""
    store = Stopped()
    leaves = Goodbyes(store, "group", 1, (0, 1))
    start = time.monotonic()
    for key in MOVERS:
        leaves.say(key, 7, "it closed the mover")
    took = time.monotonic() - start
    store.goes_on.set()
    assert took < 2 * LINGER_S
    others = Goodbyes(store, "group", 0, (0, 1))
    until = time.monotonic() + 60.0
    while not all(others.find(key, 8) for key in MOVERS) and time.monotonic() < until:
        others.look(1.0)
    assert all(others.find(key, 8) for key in MOVERS)
