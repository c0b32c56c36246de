"""Updates and boards, without processes: every way in which a step may end at every rank."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from shardmath import ExchangeError
from shardmath_vllm import board as boards
from shardmath_vllm.board import Board, name_rank
from shardmath_vllm.cells import Cells
from shardmath_vllm.link import Life
from shardmath_vllm.update import TABLE, Phase, Step, Update

TRAINERS, WORKERS = 2, 2
SIZE = TRAINERS + WORKERS
TIMEOUT_S = 3.0
SOON_S = 2.0


def cells(names: str) -> Cells:
    """All cells of tensors with these letters for names."""
    return Cells({name: np.array([0, 4]) for name in names})


CELLS = cells("qk")


# The table


def walk(update: Update, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Update]]:
    """Every way through the table, with what the update is after each of its steps."""
    yield path, update
    for step in TABLE.get(update.phase, {}):
        yield from walk(update.after(step), (*path, step))


@pytest.mark.parametrize("torn", ["", "kv", "k"])
def test_every_way_through_an_update(torn: str) -> None:
    """A rank's own account of its cells is right, whichever of them others have written."""
    before = cells(torn)
    ways = list(walk(Update(1, writes=CELLS, torn=before)))
    assert len(ways) == 14
    for path, update in ways:
        # Nobody moves without this rank: others may have moved once it has begun to, until it knows that they have.
        may_move = Step.BEGIN in path
        have_moved = Step.ARRIVE in path
        if not may_move:
            assert update.mixed == before
        elif have_moved:
            assert update.mixed == before - CELLS
        else:
            assert update.mixed == before | CELLS
        assert update.is_new == have_moved
        is_over = not TABLE.get(update.phase)
        assert is_over == ((path[-1:] and path[-1] in (Step.FAIL, Step.REFUSE, Step.END)) or False)
        # Who goes on beside the others knows what became of all of them, and is not waited for.
        if is_over and Step.CHECK in path and not {Step.REFUSE, Step.ARRIVE} & {*path}:
            assert not update.keeps_link


def test_what_cannot_happen_is_an_error() -> None:
    for state, step in itertools.product(Phase, Step):
        if step not in TABLE.get(state, {}):
            with pytest.raises(ExchangeError, match=f"an update that is {state.value} cannot"):
                Update(1, state).after(step)


def test_only_what_writes_the_same_makes_whole() -> None:
    """A trainer of some tensors comes after one of all, which has failed."""
    torn = Update(1, Phase.BEGUN, writes=cells("qkv")).after(Step.FAIL).mixed
    some = Update(1, Phase.BEGUN, writes=cells("qk"), torn=torn).after(Step.ARRIVE)
    assert some.mixed == cells("v")
    rest = Update(1, Phase.BEGUN, writes=cells("v"), torn=some.mixed).after(Step.ARRIVE)
    assert not rest.mixed


# Ranks as threads


class Left(ExchangeError):
    """Connections of this rank are gone."""


@dataclass
class Rank:
    """A rank's link, as far as lives of updates use it: a store, and connections that end when one leaves."""

    store: Any
    place: int
    barrier: threading.Barrier
    update_numbers: list[int] = field(default_factory=list)
    group: None = None
    trainers: int = TRAINERS

    @property
    def board(self) -> Board:
        return Board(self.store, self.place, TRAINERS, SIZE, TIMEOUT_S)

    def leave(self) -> None:
        self.barrier.abort()

    def meet(self) -> None:
        try:
            self.barrier.wait(2 * TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise Left("a rank left") from error


@dataclass
class Ended:
    """How an update ended at a rank: what it raised, after how many seconds, and what its weights are."""

    error: BaseException | None
    seconds: float
    update: Update
    new: bool


class Run:
    """An update of all ranks, of which one fails: `fail(place, step)` is called at each step of each."""

    def __init__(self, fail: Callable[[int, str], None]) -> None:
        self._fail = fail
        self._store = dist.HashStore()
        self._barrier = threading.Barrier(SIZE)
        self._called = threading.Event()
        self._over = threading.Event()
        self.ended: dict[int, Ended] = {}
        threads = [threading.Thread(target=self._run, args=(place,)) for place in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads[:TRAINERS]:
            thread.join(10 * TIMEOUT_S)
        self._over.set()
        for thread in threads[TRAINERS:]:
            thread.join(10 * TIMEOUT_S)

    def _run(self, place: int) -> None:
        link: Any = Rank(self._store, place, self._barrier)
        life = Life(link, Update(1, writes=CELLS if place >= TRAINERS else cells("")))
        new: list[bool] = []

        def move() -> None:
            self._fail(place, "move")
            link.meet()
            new.append(True)
            self._fail(place, "arrive")
            link.meet()

        start = time.monotonic()
        error: BaseException | None = None
        try:
            if place < TRAINERS:
                life.call(self._call)
                life.move(lambda: self._fail(place, "check"), move)
                life.take(lambda: self._fail(place, "take"))
                life.end(lambda: self._fail(place, "end"))
            else:
                while not self._called.wait(0.01):
                    if self._over.is_set():
                        return
                life.receive(move)
        except BaseException as raised:
            error = raised
        self.ended[place] = Ended(error, time.monotonic() - start, life.update, bool(new))

    def _call(self) -> None:
        self._fail(0, "call")
        self._called.set()


FAILURES = (ArithmeticError("broken"), KeyboardInterrupt(), SystemExit(3))
STEPS = [
    (0, "call"),
    *[(place, "check") for place in range(TRAINERS)],
    *[(place, step) for place in range(SIZE) for step in ("move", "arrive")],
    (0, "take"),
    (0, "end"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("failing", "step"), STEPS)
def test_whatever_fails_wherever(failing: int, step: str, error: BaseException) -> None:
    """All of the trainer raise; no worker answers where another may have other weights; nobody waits for long."""

    def fail(place: int, at: str) -> None:
        if (place, at) == (failing, step):
            raise error

    ended = Run(fail).ended
    for place in range(TRAINERS):
        assert ended[place].error is not None
    for place, one in ended.items():
        assert one.seconds < SOON_S, (place, one)
        if place != failing:
            assert isinstance(one.error, ExchangeError) or place >= TRAINERS, one
            if one.error:
                assert "broken" in str(one.error) or type(error).__name__ in str(one.error)
    workers = [one for place, one in ended.items() if place >= TRAINERS]
    assert bool(workers) == (step != "call")
    if len({one.new for one in workers}) > 1:
        assert all(one.update.mixed for one in workers)
    if workers and all(one.new for one in workers) and step in ("take", "end"):
        assert not any(one.update.mixed for one in workers)
        assert all(ended[place].update.is_new for place in range(TRAINERS))
    if step in ("call", "check"):
        assert not any(one.update.mixed for one in workers)


def test_an_update_that_goes_well() -> None:
    ended = Run(lambda place, step: None).ended
    assert [one.error for one in ended.values()] == [None] * SIZE
    assert [ended[place].update.phase for place in range(SIZE)] == [
        *[Phase.ENDED] * TRAINERS,
        *[Phase.MOVED] * WORKERS,
    ]


@pytest.mark.parametrize("late", range(1, SIZE))
def test_a_rank_that_does_not_come_is_named(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all others, though all wait equally long for the one that says so."""
    monkeypatch.setattr(boards, "HEARD_S", 0.2)
    store = dist.HashStore()
    said: dict[int, str] = {}

    def vote(place: int) -> None:
        board = Board(store, place, TRAINERS, SIZE, 0.5)
        board.vote("begin update 1", "")
        said[place] = board.decide("begin update 1")

    others = [place for place in range(SIZE) if place != late]
    threads = [threading.Thread(target=vote, args=(place,)) for place in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    who = name_rank(late, TRAINERS)
    why = f"1 rank did not begin update 1 in 0.5 s: {who}; call send_weights equally often on all ranks"
    assert said.keys() == set(others)
    assert all(told.startswith(why) for told in said.values())


class Silent:
    """A store that takes what is said, and never answers, as where place 0's process was stopped."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def set(self, key: str, text: str) -> None:
        """Nothing: torch's store waits for no answer to that."""

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        self.goes_on.wait(10 * TIMEOUT_S)
        return old.encode()


def test_a_store_that_does_not_answer_is_not_waited_for_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would wait for as long as place 0's process is stopped, or its machine cut off."""
    monkeypatch.setattr(boards, "LATER_S", 0.2 - TIMEOUT_S)
    store = Silent()
    link: Any = Rank(store, 1, threading.Barrier(1))
    life = Life(link, Update(1))
    start = time.monotonic()
    with pytest.raises(
        ExchangeError, match="trainer rank 0 left, has stopped or is gone, as it was to"
    ):
        life.call(lambda: None)
    life = Life(link, Update(2, writes=CELLS))
    with pytest.raises(ExchangeError, match="trainer rank 0 left, has stopped or is gone: "):
        life.receive(lambda: None)
    # It has not said yes, so that nobody can have moved.
    assert life.update.phase is Phase.KEPT
    assert time.monotonic() - start < 2 * SOON_S + TIMEOUT_S + boards.ANSWER_S
    store.goes_on.set()


@pytest.mark.parametrize("step", ["start", "begin", "end"])
def test_who_waits_to_hear_of_place_0_hears_ctrl_c(step: str) -> None:
    """torch's own wait for a key is deaf to it, for as long as that may take."""
    link: Any = Rank(dist.HashStore(), 1, threading.Barrier(1))
    for key in ("start update 1", "begin update 1"):
        if step == "end" or (step, key) == ("begin", "start update 1"):
            link.store.set(key, "")
    life = Life(link, Update(1))
    threading.Timer(0.3, _thread.interrupt_main).start()
    start = time.monotonic()

    def go_through() -> None:
        life.call(lambda: None)
        life.move(lambda: None, lambda: None)
        life.take(lambda: None)

    with pytest.raises(KeyboardInterrupt):
        go_through()
    assert time.monotonic() - start < SOON_S
    states = {"start": Phase.KEPT, "begin": Phase.PARTED, "end": Phase.STALE}
    assert life.update.phase is states[step]
    # The update has come to its end on the others: place 0 does not wait, and raise, for who has an error of its own.
    if step == "end":
        Board(link.store, 0, TRAINERS, SIZE, 0.5).finish("finish update 1", lambda: None)


class Interrupting:
    """A store that is interrupted once it has taken a vote, or whatever is said that all is well by."""

    def __init__(self, key: str = "begin update 1/") -> None:
        self.store = dist.HashStore()
        self._key = key

    def set(self, key: str, text: str) -> None:
        self.store.set(key, text)
        if key.startswith(self._key) and not text:
            raise KeyboardInterrupt

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        return self.store.compare_set(key, old, new)


def test_who_is_interrupted_as_it_says_yes_is_counted_on() -> None:
    """Others may have heard, and wait for it to move, which it has not: it leaves as it was."""
    barrier = threading.Barrier(1)
    link: Any = Rank(Interrupting(), TRAINERS, barrier)
    life = Life(link, Update(1, writes=CELLS))
    with pytest.raises(KeyboardInterrupt):
        life.receive(lambda: None)
    assert not life.update.mixed and barrier.broken


def test_nothing_moves_once_one_that_has_said_yes_has_left() -> None:
    """Engines are as before, and not torn, where a trainer's rank is interrupted as it waits for them."""
    store = dist.HashStore()
    said: list[str] = []

    def decide() -> None:
        link: Any = Rank(store, 0, threading.Barrier(1))
        life = Life(link, Update(1))
        life.call(lambda: None)
        try:
            life.move(lambda: None, lambda: said.append("moved"))
        except ExchangeError as error:
            said.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "HEARD_S", 0.2)
        thread = threading.Thread(target=decide)
        thread.start()
        for place in range(1, SIZE):
            if place != TRAINERS:
                store.set(f"begin update 1/{place}", "")
        time.sleep(0.1)
        board = Board(store, 1, TRAINERS, SIZE, TIMEOUT_S)
        board.break_off("fail update 1", "KeyboardInterrupt", lambda: None)
        store.set(f"begin update 1/{TRAINERS}", "")
        thread.join()
    assert said == ["trainer rank 1: KeyboardInterrupt"]


def test_a_call_that_comes_after_the_next_update() -> None:
    """Is refused at once, and the weights are as they are: the others would not come, and a worker be torn."""
    ranks: list[Any] = []
    store = dist.HashStore()
    barrier = threading.Barrier(1)
    link: Any = Rank(store, TRAINERS, barrier)
    link.update_numbers.append(2)
    for number in (1, 2):
        life = Life(link, Update(number, writes=CELLS))
        with pytest.raises(ExchangeError, match=f"update {number} comes after update 2 was begun"):
            life.receive(lambda: ranks.append("moved"))
        assert not life.update.mixed and life.update.keeps_link
    assert not ranks and not store.num_keys() and not barrier.broken


def test_who_is_interrupted_again_as_it_leaves_has_left() -> None:
    left: list[str] = []
    board = Board(dist.HashStore(), 1, TRAINERS, SIZE, TIMEOUT_S)
    with pytest.MonkeyPatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(Board, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            board.break_off("fail update 1", "", lambda: left.append("left"))
    assert left == ["left"]


def test_a_rank_that_place_0_says_nothing_to_leaves_as_it_was() -> None:
    """It has said that it is ready: others may be about to move, and cannot without it."""
    store = dist.HashStore()
    barrier = threading.Barrier(1)
    link: Any = Rank(store, TRAINERS, barrier)
    life = Life(link, Update(1, writes=CELLS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boards, "LATER_S", -TIMEOUT_S + 0.1)
        with pytest.raises(ExchangeError, match="trainer rank 0 did not begin update 1"):
            life.receive(lambda: None)
    assert life.update.phase is Phase.PARTED and not life.update.mixed and barrier.broken


@pytest.mark.parametrize("place", range(1, SIZE))
def test_engines_are_as_before_if_place_0_dies_as_it_waits_for_a_late_rank(place: int) -> None:
    """As where the late one has died, and a launcher ends the others."""
    barrier = threading.Barrier(1)
    link: Any = Rank(Dying(), place, barrier)
    life = Life(link, Update(1, writes=CELLS))
    moved: list[str] = []
    with pytest.raises(ExchangeError, match="trainer rank 0 left, has stopped or is gone, as it"):
        life.receive(lambda: moved.append("moved"))
    assert not moved and not life.update.mixed
    assert not life.update.keeps_link and barrier.broken


class Dying:
    """A store whose process dies once it has taken a vote."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._is_gone = False

    def set(self, key: str, text: str) -> None:
        self._check()
        self._store.set(key, text)
        self._is_gone = key.startswith("begin update 1/")

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        self._check()
        return self._store.compare_set(key, old, new)

    def _check(self) -> None:
        if self._is_gone:
            raise RuntimeError("Connection reset by peer")


def test_who_is_interrupted_as_others_are_told_to_go_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between what is decided and the first move: others wait for it there."""
    barrier = threading.Barrier(1)
    link: Any = Rank(dist.HashStore(), 0, barrier)
    monkeypatch.setattr(Board, "decide", lambda *given: "")
    life = Life(link, Update(1, writes=CELLS))

    def interrupt(life: Life) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Life, "_forget", interrupt)
    monkeypatch.setattr(boards, "HEARD_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        life.receive(lambda: None)
    assert life.update.phase is Phase.PARTED and not life.update.mixed and barrier.broken


def test_place_0_that_is_interrupted_before_it_has_said_what_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others hear of that, and do not wait."""
    store = dist.HashStore()
    for place in range(SIZE):
        store.set(f"begin update 1/{place}", "")

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Board, "_say", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Board(store, 0, TRAINERS, SIZE, TIMEOUT_S).decide("begin update 1")
    assert (
        Board(store, 1, TRAINERS, SIZE, TIMEOUT_S).decide("begin update 1") == "KeyboardInterrupt"
    )


@pytest.mark.parametrize("what", ["begin update 1", "end update 1"])
def test_place_0_takes_nothing_back_that_it_has_said(what: str) -> None:
    """Who has heard that all go may move by then: who heard later that they do not would answer beside it."""
    store: Any = Interrupting(what)
    for place in range(SIZE):
        store.store.set(f"begin update 1/{place}", "")
    board = Board(store, 0, TRAINERS, SIZE, TIMEOUT_S)
    with pytest.raises(KeyboardInterrupt):
        board.decide(what) if what.startswith("begin") else board.relay(what, lambda: None)
    assert boards.notes.read(store, what) == ""


def test_who_goes_on_to_the_end_hears_that_place_0_was_interrupted_before_it() -> None:
    """As soon as it had said that engines have taken all: others wait for what comes next."""
    store: Any = Interrupting("end update 1")
    link: Any = Rank(store, 0, threading.Barrier(1))
    with pytest.raises(KeyboardInterrupt):
        Life(link, Update(1, Phase.MOVED)).take(lambda: None)
    start = time.monotonic()
    with pytest.raises(
        ExchangeError, match="trainer rank 0 could not finish update 1: KeyboardInterrupt"
    ):
        Board(store, 1, TRAINERS, SIZE, TIMEOUT_S).finish("finish update 1", lambda: None)
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    ("phase", "awaited"),
    [
        (Phase.IDLE, "start"),
        (Phase.CALLED, "begin"),
        (Phase.VOTED, "begin"),
        (Phase.BEGUN, "begin"),
        (Phase.MOVED, "end"),
        (Phase.TAKEN, "finish"),
    ],
)
def test_nobody_waits_for_place_0_that_is_interrupted_between_two_steps(
    phase: Phase, awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it would have said next; and of engines that wait for its word none is torn by that."""
    monkeypatch.setattr(boards, "HEARD_S", 0.0)
    store = dist.HashStore()
    link: Any = Rank(store, 0, threading.Barrier(1))
    with pytest.raises(KeyboardInterrupt), Life(link, Update(1, phase)).failing():
        raise KeyboardInterrupt
    said = boards.notes.read(store, f"{awaited} update 1")
    assert said is not None and "KeyboardInterrupt" in said


def test_a_child_that_is_forked_in_a_step_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank itself goes on."""
    rank = Rank(dist.HashStore(), 0, threading.Barrier(1))
    link: Any = rank
    life = Life(link, Update(1, writes=CELLS))
    life.call(lambda: None)
    keys = rank.store.num_keys()
    monkeypatch.setattr("shardmath_vllm.link.compat.is_inherited", lambda group: True)
    with pytest.raises(SystemExit), life.failing():
        raise SystemExit(7)
    assert rank.store.num_keys() == keys and life.update.phase is Phase.CALLED
