"""Processes that meet in a store: whoever meets is of one meeting and one run, and the store keeps nothing of it."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch.distributed as dist

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.compat import Store
from shardmath_torch.groups.joint import steps
from shardmath_torch.groups.joint.rendezvous import Met, Seat, call_off, leave, meet
from shardmath_torch.groups.joint.steps import Add, Step, carry_out
from tests.distributed.joint.walks import DEAD, End, Walk, World, wander

SIZE = 3

LONG_S = 30.0
"""Patience of those who are not to lose it."""


def seat(rank: int, who: str, size: int = SIZE, run: str = "", backend: str = "gloo") -> Seat:
    return Seat(rank, size, backend, who, run)


A, B, C = seat(0, "a", 2), seat(1, "b", 2), seat(1, "c", 2)
OTHER_A = seat(0, "d", 2)
OF_X, OF_Y = seat(0, "a", 2, "x"), seat(1, "b", 2, "y")
THREE = [seat(0, "a"), seat(1, "b"), seat(2, "c")]


def check(seats: list[Seat], world: World, ends: tuple[End, ...]) -> None:
    """Whoever is one of a full meeting is in it, each rank once, and in one run; nobody alive leaves notes."""
    by_token = dict(zip((one.token for one in seats), zip(seats, ends, strict=True), strict=True))
    for meeting, tokens in world.full:
        for rank, token in enumerate(tokens):
            mine, end = by_token[token]
            assert mine.rank == rank
            assert end == DEAD or (isinstance(end, Met) and end.meeting == meeting)
    for mine, end in by_token.values():
        if isinstance(end, Met):
            assert mine.token in dict(world.full)[end.meeting]
            assert mine.run in ("", end.run)
    assert world.dead or not world.notes


@pytest.mark.parametrize(
    ("seats", "deaths", "waits"),
    [
        ([A, B], 0, False),
        ([A, B], 1, False),
        ([OF_X, OF_Y], 1, True),
        ([A, seat(1, "b", 3)], 1, True),
        pytest.param(THREE, 0, False, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
        pytest.param([A, B, C], 0, True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_every_order_of_steps(seats: list[Seat], deaths: int, waits: bool) -> None:
    """And unless one is not to meet the others, nobody who is in time waits for ever."""
    walk = Walk(seats, deaths).go()
    assert len(walk.ends) > 1
    for world, ends in walk.ends:
        check(seats, world, ends)
    assert waits or not walk.stuck


@pytest.mark.parametrize(
    ("seats", "deaths"),
    [
        (THREE, 0),
        (THREE, 1),
        ([A, OTHER_A, B], 0),
        ([A, OTHER_A, B], 2),
        ([A, B, C], 1),
        ([OF_X, seat(0, "d", 2, "y"), OF_Y], 0),
        ([*THREE, seat(0, "d"), seat(1, "e")], 2),
    ],
)
def test_many_orders_of_more(seats: list[Seat], deaths: int) -> None:
    rng = random.Random(len(seats) + deaths)
    met = 0
    for _ in range(300):
        world, ends = wander(seats, rng, deaths)
        check(seats, world, ends)
        met += bool(world.full)
    assert met > 3


def test_who_comes_after_others_died_meets_and_leaves_nothing() -> None:
    """Whatever a leader, a rank or both have left in the store."""
    rng = random.Random(5)
    again = [seat(0, "e", 2), seat(1, "f", 2)]
    left = 0
    for _ in range(200):
        world, _ = wander([A, B], rng, 2)
        if world.full:
            # What a dead rank's group has in the store nobody removes: its others may use it.
            continue
        left += bool(world.notes)
        after, ends = wander(again, rng, 0, world.notes, lateness=0.0)
        assert all(isinstance(end, Met) for end in ends)
        # A rank that died between two of its own steps may leave one.
        assert set(after.notes) <= set(world.notes) - {"lead"}
    assert left > 20


class Comers:
    """Threads in the place of processes, each of which comes at its time and has its patience."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.met: dict[str, list[Seat]] = collections.defaultdict(list)
        self.said: list[tuple[Seat, str]] = []
        self._threads: list[threading.Thread] = []

    def come(self, seat: Seat, after: float, patience: float) -> None:
        thread = threading.Thread(target=self._come, args=(seat, after, patience))
        self._threads.append(thread)
        thread.start()

    def _come(self, seat: Seat, after: float, patience: float) -> None:
        time.sleep(after)
        try:
            met = carry_out(meet(seat), self.store, time.monotonic() + patience)
        except ExchangeError as error:
            self.said.append((seat, str(error)))
        else:
            self.met[met.meeting].append(seat)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("seed", range(4))
def test_meetings_are_whole(seed: int) -> None:
    """Whenever ranks come and give up, again and again: who meets, meets all ranks, each once."""
    rng = random.Random(seed)
    comers = Comers()
    for again in range(4):
        for rank in range(SIZE):
            after, patience = rng.random() * 0.2, 0.02 + rng.random() * 0.2
            comers.come(seat(rank, f"{rank}.{again}"), after, patience)
    comers.wait()
    assert len(comers.said) + sum(map(len, comers.met.values())) == 4 * SIZE
    for meeting, seats in comers.met.items():
        assert sorted(one.rank for one in seats) == list(range(SIZE))
        for one in seats:
            carry_out(leave(Met(meeting, ""), one.rank, SIZE), comers.store, 0.0)
    assert comers.store.num_keys() == 0


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_leaves_nothing(rank: int, number: int) -> None:
    """After whichever step it comes: the other rank is there, or not, and the store is empty in the end."""
    ask = steps._execute
    store = dist.HashStore()
    done: list[Step] = []

    def interrupted(step: Step, store: Store, until: float) -> str | None:
        answer = ask(step, store, until)
        if threading.current_thread() is not threading.main_thread():
            return answer
        done.append(step)
        if len(done) == number + 1:
            raise KeyboardInterrupt
        return answer

    comers = Comers()
    comers.store = store
    if rank:
        comers.come(seat(0, "a"), 0.0, 0.5)
        time.sleep(0.1)
    with mock.patch.object(steps, "_execute", interrupted), pytest.raises(KeyboardInterrupt):
        carry_out(meet(seat(rank, "b")), store, time.monotonic() + LONG_S)
    comers.wait()
    assert store.num_keys() == 0


def test_ctrl_c_waits_for_the_step_that_it_interrupts() -> None:
    """Also as the thread begins that asks: what undoes the step would otherwise come before it."""
    start = threads.start
    done: list[str] = []

    def begin(act: Callable[[], None]) -> threading.Thread:
        start(act)
        raise KeyboardInterrupt

    class Slow(dist.HashStore):
        def append(self, key: str, value: str) -> None:
            time.sleep(0.2)
            done.append(key)

    with mock.patch.object(threads, "start", begin), pytest.raises(KeyboardInterrupt):
        steps._execute(Add("key", "line"), Slow(), time.monotonic() + LONG_S)
    assert done == ["key"]


def test_who_has_time_left_meets_in_the_next_meeting() -> None:
    """Rank 0 gives up, and another comes in its place; rank 1 has waited all the time."""
    comers = Comers()
    comers.come(seat(1, "b"), 0.0, LONG_S)
    with pytest.raises(
        ExchangeError, match=r"rank 2 of 3 ranks did not call smt\.connect in time; start"
    ):
        carry_out(meet(seat(0, "a")), comers.store, time.monotonic() + 0.5)
    comers.come(seat(0, "c"), 0.0, LONG_S)
    comers.come(seat(2, "d"), 0.0, LONG_S)
    comers.wait()
    assert not comers.said
    assert {name: _name_all(seats) for name, seats in comers.met.items()} == {
        "c.1": ["b", "c", "d"]
    }


def _name_all(seats: list[Seat]) -> list[str]:
    return sorted(one.token for one in seats)


def test_two_that_live_are_told() -> None:
    """And who waits for them."""
    comers = Comers()
    for one in (seat(0, "a"), seat(1, "b"), seat(1, "c")):
        comers.come(one, 0.0, LONG_S)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < LONG_S / 2
    assert not comers.met
    assert {said for _, said in comers.said} == {
        "two processes give rank 1; give each process its own rank"
    }


@pytest.mark.parametrize("other", [seat(1, "b", 2), seat(1, "b", backend="nccl")])
def test_other_sizes_and_backends_are_told(other: Seat) -> None:
    comers = Comers()
    comers.come(seat(0, "a"), 0.0, LONG_S)
    comers.come(other, 0.05, LONG_S)
    start = time.monotonic()
    comers.wait()
    assert time.monotonic() - start < LONG_S / 2
    assert all("give the same on all ranks" in said for _, said in comers.said), comers.said
    assert len(comers.said) == 2 and comers.store.num_keys() == 0


def test_a_process_of_another_run_does_not_join() -> None:
    """It is told, and the others meet without it, although it was there first."""
    stale = seat(1, "stale", run="run 1")
    comers = Comers()
    comers.come(stale, 0.0, 0.5)
    comers.come(seat(0, "a", run="run 2"), 0.1, LONG_S)
    comers.come(seat(1, "b", run="run 2"), 0.7, LONG_S)
    comers.come(seat(2, "c"), 0.1, LONG_S)
    comers.wait()
    assert [_name_all(seats) for seats in comers.met.values()] == [["a", "b", "c"]]
    ((told, said),) = comers.said
    assert told == stale
    assert said.startswith(
        "rank 0 is of run 'run 2', and rank 1 of run 'run 1'; end processes of an earlier run"
    )


def test_a_process_of_an_earlier_run_joins_where_no_run_is_given() -> None:
    """As who waits for a rank 0 that is started again, which it cannot be told from."""
    comers = Comers()
    comers.come(seat(0, "earlier"), 0.0, 0.2)
    comers.come(seat(1, "stale"), 0.0, LONG_S)
    comers.come(seat(0, "a"), 0.5, LONG_S)
    comers.come(seat(2, "c"), 0.5, LONG_S)
    comers.come(seat(1, "b"), 2.0, 0.2)
    comers.wait()
    assert [_name_all(seats) for seats in comers.met.values()] == [["a", "c", "stale"]]
    said = {one.token: text for one, text in comers.said}
    # Whether the rank 0 that has gone on is still heard depends on how late this one is.
    late = (
        "rank 0 of 3 ranks did not call smt.connect in time",
        "the others have a group in which another",
    )
    assert said["b"].startswith(late)


def test_who_waits_is_called_off() -> None:
    """Also with a text that UTF-8 has not; and who comes later."""
    comers = Comers()
    comers.come(seat(0, "a"), 0.0, LONG_S)
    comers.come(seat(1, "b"), 0.0, LONG_S)
    carry_out(call_off("no \ud800"), comers.store, 0.0)
    comers.come(seat(2, "c"), 0.0, LONG_S)
    comers.wait()
    assert [said for _, said in comers.said] == ["no \ud800"] * 3
