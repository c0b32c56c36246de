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

LONG_S = 30.0
"""Patience of those who are not to lose it."""


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

    def await_seat(self, rank: int) -> None:
        """Return once it is taken in the first generation."""
        while not self.store.check([f"1/seat/{rank}"]):
            time.sleep(0.001)

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
    """One rank gives up, and another comes in its place; the second has waited all the time."""
    comers = Comers()
    comers.come(seat(1, "b"), 0.0, LONG_S)
    comers.await_seat(1)
    with pytest.raises(ExchangeError, match="rank 2 of 3 ranks did not come in time; see that"):
        meet(comers.store, seat(0, "a"), time.monotonic() + 0.05)
    comers.come(seat(0, "c"), 0.0, LONG_S)
    comers.come(seat(2, "d"), 0.0, LONG_S)
    comers.wait()
    assert not comers.said
    assert {number: _name_all(seats) for number, seats in comers.met.items()} == {
        2: ["b", "c", "d"]
    }


def _name_all(seats: list[Seat]) -> list[str]:
    return sorted(one.token for one in seats)


def test_who_died_as_it_waited_is_replaced() -> None:
    """Its seat is taken for ever, in that generation alone; the others hear nothing of it."""
    comers = Comers()
    absent = pytest.raises(ExchangeError, match="ranks 0, 2 of 3 ranks did not come in time")
    # It looks once, and closes nothing: as a process that is killed.
    with absent, mock.patch.object(rendezvous._Generation, "_close", return_value="over"):
        meet(comers.store, seat(1, "dead"), time.monotonic())
    comers.come(seat(0, "a"), 0.0, LONG_S)
    comers.come(seat(1, "b"), 0.05, LONG_S)
    comers.come(seat(2, "c"), 0.1, LONG_S)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < LONG_S / 2
    assert not comers.said
    assert [_name_all(seats) for seats in comers.met.values()] == [["a", "b", "c"]]


def test_two_that_live_are_told() -> None:
    """And who waits for them."""
    comers = Comers()
    comers.come(seat(0, "a"), 0.0, LONG_S)
    comers.await_seat(0)
    comers.come(seat(1, "b"), 0.0, LONG_S)
    comers.come(seat(1, "c"), 0.0, LONG_S)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < LONG_S / 2
    assert not comers.met
    assert {said for _, said in comers.said} == {
        "two processes give rank 1; give each process a rank of its own"
    }


@pytest.mark.parametrize(
    ("other", "patience"), [(Seat(1, 2, "gloo", "b"), 0.2), (Seat(1, 3, "nccl", "b"), LONG_S)]
)
def test_other_sizes_and_backends_are_told(other: Seat, patience: float) -> None:
    """To all that wait then; whoever comes after that waits in vain."""
    comers = Comers()
    comers.come(seat(0, "a"), 0.0, LONG_S)
    comers.come(other, 0.05, LONG_S)
    comers.come(seat(2, "c"), 0.1, patience)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < LONG_S / 2
    assert not comers.met
    told = {one.token: said for one, said in comers.said}
    assert all("give the same on all ranks" in told[who] for who in "ab"), told
