"""What workers do where moves are committed, and something ends them. Imported by workers, so no pytest here."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from shardmath.plans.protocol import Event
from shardmath_gloo.wire import DATA, GlooWire
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.commits import conclude as concluding
from shardmath_torch.moves.commits import shadows
from shardmath_torch.moves.commits.record import Record
from shardmath_torch.moves.movers import carriers
from shardmath_torch.tensors.changes import carrying
from tests.distributed.tasks.breaks import Said, ends
from tests.distributed.tasks.combined import own_group

PHASES = (
    "before the vote",
    "data",
    "before the promise",
    "in the promise",
    "before the decision",
    "after the decision",
    "in the swap",
    "after the swap",
)
WAYS = ("kill", "stop", "error", "Ctrl-C")
OLD, NEW, TORN = "old", "new", "torn"


class End(NamedTuple):
    """How a rank's move ended: its error, what its destination holds, and what its mover says."""

    said: Said
    holds: str
    version: int
    in_doubt: bool
    torn: tuple[str, ...]
    seconds: float = 0.0


def strike(way: str) -> None:
    """What ends this rank, or its call."""
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "error":
        raise RuntimeError("a fault of this rank's")
    if way == "Ctrl-C":
        raise KeyboardInterrupt


class Once:
    """Acts at the n-th time it is reached, and never again."""

    def __init__(self, act: Callable[[], None], at: int = 1) -> None:
        self._act = act
        self._left = at

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()


@contextmanager
def struck(phase: str, way: str) -> Iterator[None]:
    """What ends this rank comes in the named phase of a move."""
    reach = Once(lambda: strike(way))
    with ExitStack() as stack:
        _patch(stack, phase, reach)
        yield


def _patch(stack: ExitStack, phase: str, reach: Once) -> None:
    def patch(target: Any, name: str, made: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, made))

    vote, send, ask = Party.vote, GlooWire._send, Record.ask
    put, put_all = carriers.put_in_place, carrying.put_all

    def at_vote(self: Any, mine: Any, patience: Any = None, event: Any = Event.VOTE) -> Any:
        if event is (Event.VOTE if phase == "before the vote" else Event.PROMISE):
            reach()
        return vote(self, mine, patience, event)

    def at_send(self: Any, memory: Any, peer: int, patience: float, step: int) -> Any:
        state = dist_state(self)
        pending = send(self, memory, peer, patience, step)
        if (step == DATA) if phase == "data" else (state == "promised" and step != DATA):
            reach()
        return pending

    def at_ask(self: Any, proposal: Event, limit: float) -> Event:
        if phase == "before the decision":
            reach()
        verdict = ask(self, proposal, limit)
        if phase == "after the decision":
            reach()
        return verdict

    def at_put(pairs: Any, put: Callable[[Any], None] = put) -> None:
        pairs = list(pairs)
        if phase == "in every swap":
            put(pairs[:1])
            strike("error")
        if phase == "in the swap":
            put(pairs[: len(pairs) // 2])
            reach()
        put(pairs)
        if phase == "after the swap":
            reach()

    def at_put_all(dst: Any, puts: Any) -> None:
        at_put(puts, lambda some: put_all(dst, some))

    if phase in ("before the vote", "before the promise"):
        patch(Party, "vote", at_vote)
    elif phase in ("data", "in the promise"):
        patch(GlooWire, "_send", at_send)
    elif phase in ("before the decision", "after the decision"):
        patch(Record, "ask", at_ask)
    else:
        patch(carriers, "put_in_place", at_put)
        patch(carrying, "put_all", at_put_all)
    assert concluding.Record is Record


def dist_state(wire: GlooWire) -> str:
    """The state of the protocol of the wire's group."""
    from shardmath_torch.groups.agreement.turns import turns_of

    return turns_of(wire._group).protocol.state.value


class Two:
    """Two tensors of one plan, whose destinations hold what tells old from new from torn.

    A mover of "changes" is given some that change in some places; one that is "transformed" makes one at the
    destination of what travels.
    """

    def __init__(self, rank: int, size: int, rows: int = 64, kind: str = "plain") -> None:
        mesh, shape = sm.Mesh(tp=size), (rows, 4 * size)
        a, b = sm.Layout(shape, mesh, "(tp n) h"), sm.Layout(shape, mesh, "n (tp h)")
        self.kind = kind
        self._sides = {"v": a, "w": a}, {"v": b, "w": b}
        self.plan = sm.plan(*self._sides)
        numbers = torch.arange(1.0, rows * 4 * size + 1)
        if kind == "changes":
            numbers *= numbers % 7 == 0
        whole = numbers.view(shape)
        self._src = whole[a.indices(rank)[0]]
        self._want = whole[:, b.indices(rank)[1]]
        self.src = {key: self._src.clone() for key in ("v", "w")}
        self.out = {key: torch.zeros(b.local_shape(rank)) for key in ("v", "w")}
        self._times = 0.0

    def compile(self, **options: Any) -> Any:
        """A mover of its kind."""
        if self.kind == "changes":
            return smt.compile_changes(self.plan, **options)
        if self.kind == "transformed":
            same = transforms.Cast("float64", at="source")
            return smt.compile_transformed(
                sm.transforms.transformed(*self._sides, {"w": same}), **options
            )
        return smt.compile(self.plan, **options)

    def scale(self, times: float) -> None:
        """What moves from now on."""
        for tensor in self.src.values():
            tensor.copy_(self._src * times)

    def holds(self, times: float, former: float) -> str:
        """Whether the destination is of this move or of the one before, byte by byte."""
        for name, scale in ((NEW, times), (OLD, former)):
            if all(torch.equal(t, self._want * scale) for t in self.out.values()):
                return name
        return TORN


def end_of(act: Callable[[], Any], two: Two, movers: list[Any], times: float = 2.0) -> End:
    """How the call ended."""
    start = time.monotonic()
    said = ends(act)
    seconds = time.monotonic() - start
    move = movers[0]
    holds = two.holds(times, times - 1)
    return End(said, holds, move.version, move.in_doubt, move.torn, seconds)


def broken(
    rank: int, size: int, phase: str, way: str, victim: int, timeout: float, kind: str = "plain"
) -> End:
    """One good move, and one in which the victim is struck."""
    two = Two(rank, size, kind=kind)
    move = two.compile(timeout=timeout, commit="all")
    move(two.src, out=two.out)
    two.scale(2.0)
    dist.barrier()
    with ExitStack() as stack:
        if rank == victim:
            stack.enter_context(struck(phase, way))
        return end_of(lambda: move(two.src, out=two.out), two, [move])


def errors(
    rank: int, size: int, phases: Sequence[str], way: str, kind: str = "plain"
) -> list[tuple[str, int, End, Said]]:
    """A move in each phase of which the victim is struck, on a group of its own; and what a next call says."""
    return [_error(rank, n % size, phase, way, kind) for n, phase in enumerate(phases)]


def _error(rank: int, victim: int, phase: str, way: str, kind: str) -> tuple[str, int, End, Said]:
    """One of them."""
    group = dist.new_group()
    two = Two(rank, dist.get_world_size(), kind=kind)
    move = two.compile(timeout=5.0, commit="all", group=group)

    def act() -> None:
        move(two.src, out=two.out)

    act()
    two.scale(2.0)
    with ExitStack() as stack:
        if rank == victim:
            stack.enter_context(struck(phase, way))
        end = end_of(act, two, [move])
    again = ends(act)
    dist.barrier()
    dist.destroy_process_group(group)
    return phase, victim, end, again


def block_of_two(
    rank: int, size: int, phase: str, way: str, victim: int, timeout: float
) -> tuple[End, End]:
    """Two movers in one block, in which the victim is struck in the phase; of each mover how it ended."""
    first, second = Two(rank, size), Two(rank, size, rows=32)
    moves = [smt.compile(one.plan, timeout=timeout, commit="all") for one in (first, second)]

    def act() -> None:
        with smt.commit(*moves, timeout=timeout):
            for move, two in zip(moves, (first, second), strict=True):
                move(two.src, out=two.out)

    act()
    for two in (first, second):
        two.scale(2.0)
    dist.barrier()
    with ExitStack() as stack:
        if rank == victim:
            stack.enter_context(struck(phase, way))
        end = end_of(act, first, moves)
    other = end._replace(
        holds=second.holds(2.0, 1.0), version=moves[1].version, in_doubt=moves[1].in_doubt
    )
    return end, other


def blocks(rank: int) -> dict[str, tuple[Said, str, str, int, int]]:
    """What blocks end by that one rank makes otherwise; of each: the error, what both hold, and their versions."""
    size = dist.get_world_size()
    first, second = Two(rank, size), Two(rank, size, rows=32)
    moves = [smt.compile(one.plan, timeout=20.0, commit="all") for one in (first, second)]
    direct = smt.compile(first.plan, timeout=20.0)
    other = own_group()
    odd = rank == 1

    def go(i: int) -> None:
        moves[i]((first, second)[i].src, out=(first, second)[i].out)

    def well() -> None:
        with smt.commit():
            go(0)
            go(1)
            assert first.holds(times, times - 1) == OLD

    def left_out() -> None:
        with smt.commit(*moves):
            go(0)
            if not odd:
                go(1)

    def last_left_out() -> None:
        with smt.commit():
            go(0)
            if odd:
                go(1)

    def error_between() -> None:
        with smt.commit(*moves):
            go(0)
            if odd:
                raise ValueError("mine")
            go(1)

    def error_at_the_end() -> None:
        with smt.commit(*moves):
            go(0)
            go(1)
            if odd:
                raise ValueError("mine")

    def swallowed() -> None:
        with smt.commit(*moves):
            go(0)
            said = ends(lambda: moves[1](None if odd else second.src, out=second.out))
            assert said
            go(1)

    def no_block() -> None:
        if odd:
            go(0)
        else:
            with smt.commit():
                go(0)

    def twice() -> None:
        with smt.commit():
            go(0)
            go(0)

    def directly() -> None:
        with smt.commit():
            direct(first.src, out=first.out)

    def another() -> None:
        with smt.commit(moves[0]):
            go(1)

    def unmoved() -> None:
        with smt.commit(*moves):
            go(0)

    def nested() -> None:
        with smt.commit(), smt.commit():
            go(0)

    def planned_anew() -> None:
        with smt.commit():
            go(0)
            # What it moves next would come into the memory in which this waits.
            moves[0].replan(first.plan, group=other)

    def freed() -> None:
        memory, kept = first.out["w"].untyped_storage(), first.out["w"].clone()
        try:
            with smt.commit():
                go(0)
                if odd:
                    memory.resize_(0)
        finally:
            memory.resize_(kept.nbytes)
            first.out["w"].copy_(kept)

    def elsewhere() -> None:
        kept = first.out["w"].data
        try:
            with smt.commit():
                go(0)
                if odd:
                    first.out["w"].data = kept.clone()
        finally:
            first.out["w"].data = kept

    def nothing() -> None:
        with smt.commit():
            pass

    found = {}
    times = 1.0
    for act in (
        well, left_out, last_left_out, error_between, error_at_the_end, swallowed, no_block, twice,
        directly, another, unmoved, nested, planned_anew, freed, elsewhere, nothing, well,
    ):  # fmt: skip
        for two in (first, second):
            two.scale(times)
        said = ends(act)
        held = [two.holds(times, times - 1) for two in (first, second)]
        name = act.__name__ + " again" * (act.__name__ in found)
        found[name] = (said, *held, *(move.version for move in moves))
        times += moves[0].version == times
    return found  # type: ignore[return-value]


def in_one_name(rank: int) -> Said:
    """A block of a mover for which threads of different names go by one: here the main one and others."""
    two = Two(rank, dist.get_world_size())
    # No other task's name: on the workers' group it stays the main thread's as long as that lives.
    move = two.compile(timeout=20.0, commit="all", group=own_group(), thread="one name")

    def act() -> None:
        with smt.commit(move):
            move(two.src, out=two.out)

    said: list[Said] = []
    thread = threading.Thread(target=lambda: said.append(ends(act)))
    if rank % 2:
        thread.start()
        thread.join()
    else:
        said.append(ends(act))
    return said[0] or two.holds(1.0, 0.0)


def empty_in_any_thread(rank: int) -> Said:
    """A block without moves, in the main thread of rank 0 and in others' threads of their own names."""
    group, said = own_group(), []

    def act() -> None:
        with smt.commit(group):
            pass

    thread = threading.Thread(target=lambda: said.append(ends(act)), name=f"thread {rank}")
    if rank:
        thread.start()
        thread.join()
    else:
        said.append(ends(act))
    return said[0]


def alike(rank: int) -> list[Said]:
    """What else a mover with shadows does: overlapping sides, receipts, bytes that it says, ranks that differ."""
    size = dist.get_world_size()
    mesh = sm.Mesh(tp=size)
    a = sm.Layout((size, size), mesh, "(tp n) h")
    b = sm.Layout((size, size), mesh, "n (tp h)")
    plan = sm.plan(a, b)
    move = smt.compile(plan, timeout=20.0, commit="all")
    whole = torch.arange(float(size * size)).view(size, size)
    # Both sides lie in one buffer, whose middle is the source's end and the destination's beginning.
    buffer = torch.full((size + size // 2,), -1.0)
    src = buffer[:size].view(1, size)
    out = buffer[size // 2 :].view(size, 1)
    src.copy_(whole[rank : rank + 1])
    said = [ends(lambda: move(src, out=out, acknowledge=True))]
    said.append("" if torch.equal(out, whole[:, rank : rank + 1]) else "WRONG")
    nbytes = plan.shadow_bytes()[rank], move.shadow_bytes, 4 * size
    said.append("" if len(set(nbytes)) == 1 else f"WRONG: {nbytes}")
    out.fill_(-1.0)
    with mock.patch.object(shadows, "_make_beside", _lack) if rank == 1 else ExitStack():
        other = smt.compile(plan, timeout=20.0, commit="all")
        said.append(ends(lambda: other(src.clone(), out=out)))
    said.append("" if (other.version, set(out.flatten().tolist())) == (0, {-1.0}) else "WRONG")
    said.append(ends(lambda: other(src.clone(), out=out)))
    said.append("" if (move.version, move.torn, move.in_doubt) == (1, (), False) else "WRONG")
    said.append(ends(lambda: smt.compile(plan, commit="all" if rank == 1 else "direct")))
    said.append(ends(lambda: smt.compile(plan, commit="most" if rank == 1 else "all")))  # type: ignore[arg-type]
    said.append(ends(lambda: move(None if rank == 1 else src, out=out)))
    return said


def _lack(*_: object) -> Any:
    raise torch.OutOfMemoryError("no room for a shadow")


def piecemeal(rank: int, stop: int) -> tuple[Said, list[str], tuple[str, ...]]:
    """A direct move of four tensors in rounds of one, of which rank 0 sends `stop` messages."""
    mesh = sm.Mesh(tp=2)
    a, b = sm.Layout((64, 8), mesh, "(tp n) h"), sm.Layout((64, 8), mesh, "n (tp h)")
    names = "abcd"
    move = smt.compile(
        sm.plan(dict.fromkeys(names, a), dict.fromkeys(names, b)),
        timeout=8.0,
        max_inflight_bytes=1024,
    )
    src = {name: torch.ones(32, 8) for name in names}
    out = {name: torch.zeros(64, 4) for name in names}
    if rank == 0:
        plain = GlooWire._send
        reach = Once(lambda: strike("error"), stop + 1)

        def send(self: Any, memory: Any, peer: int, patience: float, step: int) -> Any:
            if step == DATA:
                reach()
            return plain(self, memory, peer, patience, step)

        with mock.patch.object(GlooWire, "_send", send):
            said = ends(lambda: move(src, out=out))
    else:
        said = ends(lambda: move(src, out=out))
    held = []
    for name in names:
        sums = float(out[name].sum())
        held.append({0.0: OLD, 256.0: NEW}.get(sums, TORN))
    return said, held, move.torn


def soak(rank: int, size: int, seed: int, seconds: float, victim: int, way: str) -> tuple[int, End]:
    """Moves until the victim is struck by a timer; how many were committed, and how the last ended."""
    two = Two(rank, size, rows=512)
    move = smt.compile(two.plan, timeout=6.0, commit="all")
    moment = random.Random(seed).uniform(0.0, seconds)

    def handle(*_: object) -> None:
        strike(way)

    if rank == victim:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, moment + 0.05)
    times = 0.0
    end = None
    while end is None or not end.said:
        times += 1.0
        two.scale(times)
        try:
            end = end_of(lambda: move(two.src, out=two.out), two, [move], times)
        except KeyboardInterrupt:  # between two calls
            end = End("KeyboardInterrupt: ", two.holds(times, times - 1), move.version, False, ())
        assert end.said or (end.holds, end.version) == (NEW, times), end
    return int(times), end
