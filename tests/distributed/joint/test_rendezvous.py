"""Processes that meet in a store: whoever meets is of one generation, of which each rank is there once."""

from __future__ import annotations

import collections
import random
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from shardmath.base.errors import ExchangeError
from shardmath_torch.joint import rendezvous
from shardmath_torch.joint.rendezvous import Seat, meet

SIZE = 3


class Comers:
    """Threads in the place of processes, each of which comes at its time and has its patience."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.met: dict[int, list[Seat]] = collections.defaultdict(list)
        self.said: list[tuple[Seat, str]] = []
        self._threads: list[threading.Thread] = []

    def come(self, seat: Seat, after: float, patience: float) -> None:
        thread = threading.Thread(target=self._come, args=(seat, after, patience))
        self._threads.append(thread)
        thread.start()

    def _come(self, seat: Seat, after: float, patience: float) -> None:
        time.sleep(after)
        try:
            number = meet(self.store, seat, time.monotonic() + patience)
        except ExchangeError as error:
            self.said.append((seat, str(error)))
        else:
            self.met[number].append(seat)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()


def seat(rank: int, who: str, size: int = SIZE) -> Seat:
    return Seat(rank, size, "gloo", who)


@pytest.mark.parametrize("seed", range(8))
def test_generations_are_whole(seed: int) -> None:
    """Whenever ranks come and give up, again and again: who meets, meets all ranks, each once."""
    rng = random.Random(seed)
    comers = Comers()
    for again in range(4):
        for rank in range(SIZE):
            after, patience = rng.random() * 0.2, 0.02 + rng.random() * 0.2
            comers.come(seat(rank, f"{rank}.{again}"), after, patience)
    comers.wait()
    assert len(comers.said) + sum(map(len, comers.met.values())) == 4 * SIZE
    for seats in comers.met.values():
        assert sorted(one.rank for one in seats) == list(range(SIZE))
    for _, said in comers.said:
        assert "did not come in time" in said or "two processes" in said or "given up" in said


def test_who_has_time_left_meets_in_the_next_generation() -> None:
    """The first rank gives up, and comes again; the second has waited all the time."""
    comers = Comers()
    comers.come(seat(0, "a", 2), 0.0, 0.1)
    comers.come(seat(1, "b", 2), 0.2, 5.0)
    comers.come(seat(0, "c", 2), 0.4, 5.0)
    comers.wait()
    assert next(said for _, said in comers.said).startswith("rank 1 of 2 ranks did not come")
    assert {number: {one.token for one in seats} for number, seats in comers.met.items()} == {
        2: {"b", "c"}
    }


def test_who_died_as_it_waited_is_replaced() -> None:
    """Its seat is taken for ever, in that generation alone; the others hear nothing of it."""
    comers = Comers()
    absent = pytest.raises(ExchangeError, match="ranks 0, 2 of 3 ranks did not come in time")
    # It looks once, and closes nothing: as a process that is killed.
    with absent, mock.patch.object(rendezvous._Generation, "_close", return_value="over"):
        meet(comers.store, seat(1, "dead"), time.monotonic())
    comers.come(seat(0, "a"), 0.0, 5.0)
    comers.come(seat(1, "b"), 0.05, 5.0)
    comers.come(seat(2, "c"), 0.1, 5.0)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < 2.0
    assert not comers.said
    assert [{one.token for one in seats} for seats in comers.met.values()] == [{"a", "b", "c"}]


def test_two_that_live_are_told() -> None:
    """And who waits for them."""
    comers = Comers()
    comers.come(seat(0, "a"), 0.0, 10.0)
    comers.come(seat(1, "b"), 0.05, 10.0)
    comers.come(seat(1, "c"), 0.05, 10.0)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < 5.0
    assert not comers.met
    assert {said for _, said in comers.said} == {
        "two processes give rank 1; give each process a rank of its own"
    }


def test_other_sizes_and_backends_are_told() -> None:
    """To all that wait."""
    for other in (Seat(1, 2, "gloo", "b"), Seat(1, 3, "nccl", "b")):
        comers = Comers()
        comers.come(seat(0, "a"), 0.0, 2.0)
        comers.come(other, 0.1, 2.0)
        comers.come(seat(2, "c"), 0.2, 2.0)
        comers.wait()
        assert not comers.met
        told = [said for one, said in comers.said]
        assert any("give the same on all ranks" in said for said in told), told
