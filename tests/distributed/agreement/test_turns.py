"""What ranks do together on a group: one thing after another, and never another's bytes."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import shardmath as sm
from shardmath_torch.groups.agreement import party as parties
from shardmath_torch.groups.agreement import turns as turning
from shardmath_torch.groups.agreement.turns import Refused, Turns, in_thread
from tests.distributed.pool import Lost, Pool, alone
from tests.distributed.tasks import breaks


@pytest.mark.parametrize(
    ("kind", "at"), [("Ctrl-C", "vote"), ("Ctrl-C", "data"), ("exit", "data"), ("close", "vote")]
)
def test_a_move_that_is_left_breaks_the_group_on_all_ranks(kind: str, at: str) -> None:
    """Whatever it is left by goes on; all later calls say why, on that rank and on the others.

    The other rank may have had all its bytes: then that move is right, and the next one fails.
    """
    mine, others = alone(2, breaks.left, kind, at)
    name = {"Ctrl-C": "KeyboardInterrupt", "exit": "SystemExit", "close": "GeneratorExit"}[kind]
    why = f"it was left in the middle by {name}"
    assert mine[0] == f"{name}: "
    assert all(
        "is broken: rank 0 (this one) failed" in said and why in said for said in mine[1:]
    ), mine
    told = others[1:] if at == "data" and not others[0] else others
    assert told[0].startswith("rank 0 failed while the tensor had to be "), told
    assert all("is broken: rank 0 failed" in said for said in told[1:]), told
    assert all(why in said for said in told), told


@pytest.mark.parametrize("seed", [0, 1])
def test_no_moment_to_interrupt_gives_wrong_bytes(seed: int) -> None:
    """Either all moves so far are right, or every rank has an error."""
    mine, others = alone(2, breaks.interrupted, 2.0, seed)
    assert mine == "KeyboardInterrupt: " or "broken" in mine, mine
    assert "KeyboardInterrupt" in others


def test_a_long_wait_can_be_interrupted() -> None:
    """At once, also in the middle of gloo's own wait; the rank that comes later is told."""
    (mine, took), (others, _) = alone(2, breaks.waiting)
    assert mine == "KeyboardInterrupt: "
    assert took < 3.0
    assert "rank 0 failed" in others, others


@pytest.mark.parametrize(
    "kind", ["compile", "another mover", "nothing to move", "a receipt", "no time"]
)
def test_a_mover_works_again_once_ranks_agree_again(pool: Pool, kind: str) -> None:
    """Two calls that do not fit are the same error on all ranks; then moves are right."""
    for said in pool.run(breaks.disagree, kind):
        assert all(text and "nothing was moved" in text for text in said[:2]), said
        assert said[2:] == ["", ""], said


def test_a_call_may_wait_longer_than_compile_said(pool: Pool) -> None:
    """For the next refit."""
    assert pool.run(breaks.late, 2.0) == [""] * 8


def test_a_receipt_tells_the_sender() -> None:
    """Without one a sender's call returns before the receiver has anything, and knows nothing of its failure."""
    assert alone(2, breaks.received, False)[0] == ""
    sender, receiver = alone(2, breaks.received, True)
    assert "rank 1 failed" in sender
    assert "RuntimeError: no room" in sender
    assert "no room" in receiver


@pytest.mark.parametrize("victim", [0, 1])
def test_half_a_message_is_no_reason_to_wait(victim: int) -> None:
    """Who dies in the middle of a long message is found out at once, not after the timeout."""
    (answer,) = alone(2, breaks.half_moved, victim, 30.0, gone=(victim,))
    assert not isinstance(answer, Lost)
    said, took = answer
    assert f"rank {victim} failed while the tensor had to be" in said
    assert took < 12.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_compile_keeps_its_time_without_the_store(number: int) -> None:
    """The process that serves it is dead, or stopped: an ExchangeError in time, which blames nobody wrongly."""
    for answer in alone(3, breaks.without_store, number, host=0, gone=(0,)):
        assert not isinstance(answer, Lost)
        said, took = answer
        assert (
            "who failed first is not known, since rank 0, whose process serves the group's store"
            in said
        )
        assert took < 6.0


def test_a_group_that_was_destroyed() -> None:
    """Is an ExchangeError, for movers and for compile."""
    for said in alone(2, breaks.destroyed):
        assert "was destroyed; make a new group, and compile the plan on it" in said[0]
        assert said[1].startswith("torch.distributed has no process group")


@pytest.mark.parametrize("kind", ["two movers", "one mover", "a group for each"])
def test_threads_get_right_bytes_or_an_error(pool: Pool, kind: str) -> None:
    """Two that share a group: right, or all ranks disagree; with a group each: always right."""
    answers = pool.run(breaks.threads, kind, timeout=100.0)
    for said in answers:
        for texts in said.values():
            assert "WRONG" not in texts
            assert all(text == "" or "ranks disagree" in text for text in texts), texts
            assert kind != "a group for each" or texts == [""] * 12


def test_the_librarys_threads_are_not_counted_among_the_programs() -> None:
    """Ranks pair calls by the threads' names, and the numbers in default names would differ between ranks."""
    for before, after in alone(2, breaks.numbered):
        assert int(after.removeprefix("Thread-")) == int(before.removeprefix("Thread-")) + 1


def test_a_thread_may_be_called_shardmath(pool: Pool) -> None:
    """The library's own threads, which live as long as the group, have another name."""
    assert pool.run(breaks.named_shardmath) == [[""]] * 8


def test_an_error_of_a_handler_is_not_the_networks() -> None:
    """It is this rank's failure, in its own words, also where it is of the kind that torch raises."""
    (mine,), (others,) = alone(2, breaks.handled)
    assert mine.startswith("rank 0 (this one) failed")
    assert "RuntimeError: from a handler" in mine
    assert "rank 0 failed" in others
    assert "from a handler" in others


def test_a_forked_child_is_refused() -> None:
    """And takes nothing from its parent's connections."""
    for said in alone(2, breaks.forked):
        assert said.startswith("this process was forked from a rank")


def test_a_forked_child_calls_no_move_off() -> None:
    """At its end, though a move of its parent is in flight: it would end connections that the parent uses."""
    assert alone(2, breaks.forked_beside) == ["", ""]


def test_a_child_forked_in_a_progress_function_ends_there() -> None:
    """It is in the middle of its parent's move, which goes on."""
    assert alone(2, breaks.forked_in_progress) == [(1, ""), (0, "")]


@pytest.mark.parametrize("at", ["commit", "mover", "vote", "promise"])
def test_a_child_that_leaves_its_parents_call_touches_nothing_of_it(at: str) -> None:
    """It has its parent's connections and store: by a report or a goodbye there it would end its parent's group."""
    (_, others), (statuses, mine) = alone(2, breaks.forked_inside, at)
    assert statuses == [7]
    assert mine == others == ["", "", ""]


def test_a_child_forked_before_anything_was_compiled() -> None:
    """Is refused at once, and its parent goes on."""
    (said, mine), (_, others) = alone(2, breaks.forked_first)
    assert said.startswith("this process was forked from a rank")
    assert (mine, others) == ("", "")


FORKED = """
import os, sys
import torch.distributed as dist
import shardmath as sm
import shardmath_torch as smt

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
assert "shardmath_torch.groups.compat" not in sys.modules
if os.fork() == 0:
    held = sm.Layout((4,), sm.Mesh(ranks=[0]), "n")
    try:
        smt.compile(sm.plan(held, held), timeout=4.0)
    except sm.ExchangeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_child_forked_before_the_library_was_used() -> None:
    """Names are imported on their first use; forks before that count, too."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout.startswith("this process was forked from a rank"), ran


def test_movers_are_not_copied(pool: Pool) -> None:
    """Copies would share how tensors lie in memory, and not know of each other."""
    for said in pool.run(breaks.copies):
        assert len(said) == 3
        assert all("cannot be copied or pickled" in text for text in said), said


def test_a_backward_sees_that_a_move_has_written(pool: Pool) -> None:
    """Its gradient would be made of what is no longer there."""
    for said in pool.run(breaks.needed_again):
        assert "modified by an inplace operation" in said


def test_numbers_of_numpy_are_numbers(pool: Pool) -> None:
    """And an engine that is none is an objection on all ranks."""
    for said in pool.run(breaks.odd_numbers):
        assert said[:2] == ["", ""], said
        assert "rank 3: engine=array" in said[2]
        assert said[3:7] == [""] * 4, said
        assert "timeout=np.complex64(20+0j) is not a time to wait" in said[7]


def test_a_label_is_a_ranks_own(pool: Pool) -> None:
    """An engine does not know the trainer's step; what is not a text is an objection, and then moves go on."""
    for rank, said in enumerate(pool.run(breaks.labels)):
        assert said[:2] == ["", f"step {rank}"], said
        assert "rank 3: label=" in said[2]
        assert said[3:] == ["", "step 1", "str"], said


def test_arguments_of_other_types_are_objections(pool: Pool) -> None:
    """All ranks stay in step, and move afterwards."""
    for said in pool.run(breaks.odd_arguments):
        assert all("ranks 1, 3: " in text and "nothing was moved" in text for text in said[:-1]), (
            said
        )
        assert said[-1] == ""


def test_given_and_long_names_are_told_apart(pool: Pool) -> None:
    """A second living thread of a given name is refused, and so are names that differ beyond what is shown."""
    for said in pool.run(breaks.given_names):
        assert said[0] == ""
        assert "two threads of this rank are called 'refit'" in said[1]
        assert "ranks disagree" in said[2]


def test_kept_moves_come_back_into_step(pool: Pool) -> None:
    """What ranks refused once is made anew by all."""
    for said in pool.run(breaks.out_of_step):
        assert said[0] == ""
        assert "ranks disagree" in said[1]
        assert said[-2:] == ["", ""], said
        assert "WRONG" not in said


def test_threads_of_one_name(pool: Pool) -> None:
    """Two that live at once are refused; names given by hand stand for the threads' own."""
    for said in pool.run(breaks.namesakes):
        assert "two threads of this rank are called 'sync'" in said[0]
        assert "two threads of this rank are called 'sync'" in said[1]
        assert said[2] == ""


def test_a_turn_inside_a_turn_is_refused() -> None:
    """A signal handler that moves would wait for itself."""
    turns = Turns()
    with (
        turns.taken(1.0),
        pytest.raises(sm.ExchangeError, match="in the middle of a move"),
        turns.taken(1.0),
    ):
        pass


def test_a_turn_is_free_after_any_interrupt() -> None:
    """Also one that comes just as the turn is taken or given back."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    # The timer is that of the test's own time limit.
    limit, _ = signal.getitimer(signal.ITIMER_REAL)
    before = signal.signal(signal.SIGALRM, interrupt)
    rng, turns, interrupted = random.Random(1), Turns(), 0
    try:
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 2e-4))
                # Python drops what is raised while it collects garbage; then no other comes.
                until = time.monotonic() + 0.1
                while time.monotonic() < until:
                    with turns.taken(0.01):
                        pass
            except Interrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            with turns.taken(0.01):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, limit)
    assert interrupted > 1900


def test_a_thread_waits_no_longer_than_it_says() -> None:
    """The other thread has the turn all the time."""
    turns, there, go = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.taken(1.0):
            there.set()
            go.wait(20.0)

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    there.wait(20.0)
    with (
        pytest.raises(
            sm.ExchangeError, match="thread 'holder' has been in a call on this process group"
        ),
        turns.taken(0.05),
    ):
        pass
    go.set()
    thread.join()


def test_a_thread_that_takes_turn_after_turn_lets_others_have_theirs() -> None:
    """In the order in which they came."""
    turns, done = Turns(), threading.Event()
    had: list[int] = []

    def take(number: int) -> None:
        with turns.taken(20.0):
            had.append(number)

    def take_all() -> None:
        while not done.is_set():
            with turns.taken(20.0):
                time.sleep(0.002)

    greedy = threading.Thread(target=take_all)
    greedy.start()
    others = [threading.Thread(target=take, args=(number,)) for number in range(3)]
    for other in others:
        other.start()
        # So long that it has asked.
        time.sleep(0.2)
    for other in others:
        other.join(2.0)
    done.set()
    greedy.join()
    assert had == [0, 1, 2]


def test_only_a_vote_that_is_left_breaks_a_group() -> None:
    """Before the vote nobody counts on this rank, and a refusal is known to all."""
    turns = Turns()

    def leave(error: BaseException, vote: bool) -> None:
        with turns.taken(1.0):
            if vote:
                turns.next()
            raise error

    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt(), vote=False)
    with pytest.raises(Refused):
        leave(Refused("no"), vote=True)
    with pytest.raises(KeyboardInterrupt):
        leave(KeyboardInterrupt(), vote=True)
    with pytest.raises(sm.ExchangeError, match="group is broken: an exception ended a move"):
        leave(KeyboardInterrupt(), vote=True)


def test_long_names_of_threads_stay_apart() -> None:
    """A claim shows the beginning, and a checksum of the rest."""
    one, two = in_thread("x" * 400 + "1"), in_thread("x" * 400 + "2")
    assert one != two
    assert len(one) < 100
    assert in_thread("") == " in thread ''"
    assert in_thread(None) == ""


def test_a_call_that_waits_in_vain_leaves_what_another_has_told() -> None:
    """Or that other thread would break the group over what all ranks have heard."""
    turns = Turns()
    said = []

    def wait_in_vain() -> None:
        with (
            pytest.raises(sm.ShardError, match="has been in a call of several steps"),
            turns.call(0.01),
        ):
            said.append("not reached")
        said.append("in vain")

    with turns.call(1.0):
        turns.told = KeyboardInterrupt()
        thread = threading.Thread(target=wait_in_vain)
        thread.start()
        thread.join()
        assert said == ["in vain"] and turns.told is not None
    assert turns.told is None


def test_a_turn_outlasts_whoever_may_give_it_up() -> None:
    """Otherwise that would break the next turn, of a mover that nobody has left."""
    wire: Any = SimpleNamespace()
    party = parties.Party(None, 0, (0, 1), wire, Turns(), 1.0, 1.0)
    looks = threading.Event()
    ends: list[str] = []

    def find(*_: object) -> str:
        looks.set()
        time.sleep(0.2)
        ends.append("")
        return ""

    party.turns.goodbyes = SimpleNamespace(find=find)
    with party._watching_goodbyes():
        listener = threading.Thread(target=turning._give_up_if_left, args=(party.turns,))
        listener.start()
        looks.wait(60.0)
    assert ends == [""]
    listener.join()


@pytest.mark.parametrize("step", range(24))
def test_a_signal_handler_may_use_the_group_wherever_its_thread_waits(step: int) -> None:
    """At each line of the code that waits for another thread's call, as Python may run a handler there."""
    turns, holds, lines = Turns(), threading.Event(), itertools.count()
    said: list[str] = []

    def hold() -> None:
        with turns.alone(1.0):
            holds.set()
            time.sleep(0.005)

    def handle(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != turning.__file__:
            return None
        if event == "line" and next(lines) == step:
            try:
                with turns.alone(5.0):
                    said.append("")
            except sm.ExchangeError as error:
                said.append(str(error))
        return handle

    other = threading.Thread(target=hold)
    other.start()
    holds.wait()
    before = sys.gettrace()
    sys.settrace(handle)
    try:
        with turns.alone(5.0):
            pass
    finally:
        sys.settrace(before)
    other.join()
    # It may have come while its thread was in the seat.
    assert said == [""] or "in the middle of" in said[0], said
    with turns.alone(0.0):
        pass
