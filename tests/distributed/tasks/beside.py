"""What workers do where moves go on beside, or ranks have agreed before. Imported by workers, so no pytest here."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.turns import turns_of
from tests.distributed.tasks.breaks import Rows, Said, ends
from tests.distributed.tasks.combined import own_group
from tests.distributed.tasks.commits import End, Two, end_of, struck

SLOW_S = 0.6
"""By which a rank comes later than the others."""


def right(rows: Rows, said: Said) -> Said:
    """What was said, or that something else arrived."""
    return said or ("WRONG" if rows.wrong() else "")


def meanwhile(rank: int) -> list[Said]:
    """One rank's move begins late; meanwhile all ranks do other things together, on other groups and in the store."""
    group = own_group()
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=group, commit="all")
    store = dist.distributed_c10d._get_default_store()
    key = f"waited {turns_of(group).votes}"

    def act() -> Any:
        return move(rows.src, out=rows.out, async_op=True, acknowledge=True)

    handle: Any = None if rank == 1 else act()
    found = ["" if rank == 1 or not handle.done() else "done before all had begun"]
    total = torch.ones(2)
    dist.all_reduce(total)
    found.append("" if total.tolist() == [8.0, 8.0] else "WRONG")
    handle = handle or act()
    if rank == 0:
        # torch's connection to the store is locked until another rank's move is over.
        store.wait([key], timedelta(seconds=15))
        found.append(ends(handle.wait))
    else:
        found.append(ends(handle.wait))
        if rank == 2:
            store.set(key, "")
    found.append(right(rows, ends(handle.wait)))
    found.append("" if repr(handle) == "<a move that is done>" else repr(handle))
    return found


def named(rank: int) -> list[Said]:
    """A thread of one name on all ranks moves beside on some of them, and by itself on the others."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=own_group())
    found: list[Said] = []

    def act() -> None:
        for turn in range(2):
            handle = move(rows.src, out=rows.out, async_op=rank % 2 == turn)
            if handle is not None:
                handle.wait()

    thread = threading.Thread(target=lambda: found.append(right(rows, ends(act))), name="refit")
    thread.start()
    thread.join()
    return found


def refused(rank: int) -> list[Said]:
    """What is wrong on rank 1 alone is told to all, by handles and by calls; and moves are right after each."""
    group = own_group()
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=group, commit="all")
    everyones = smt.compile(rows.plan, timeout=20.0)
    odd = rank == 1
    src = rows.src

    def wrong_tensor() -> None:
        handle: Any = move(src[:, :3] if odd else src, out=rows.out, async_op=True)
        first = ends(handle.wait)
        assert first == ends(handle.wait) and handle.done()
        assert repr(handle) == "<a move that failed>"
        handle.wait()

    def wrong_flag() -> None:
        move(src, out=rows.out, async_op=1 if odd else False)  # type: ignore[arg-type]

    def default_group() -> None:
        everyones(src, out=rows.out, async_op=odd)

    def in_a_block() -> None:
        with smt.commit(move):
            move(src, out=rows.out, async_op=odd)

    def nested() -> None:
        with turns_of(group).step():
            move(src, out=rows.out, async_op=True)

    def two_of_them() -> None:
        first: Any = move(src, out=rows.out, async_op=True)
        second: Any = move(src[:, :3] if odd else src, out=rows.out, async_op=True)
        first.wait()
        second.wait()

    def bad_time() -> None:
        handle: Any = move(src, out=rows.out, async_op=True)
        said = ends(lambda: handle.wait(timeout=-1.0))
        handle.wait()
        raise sm.ExchangeError(said)

    acts = wrong_tensor, wrong_flag, default_group, in_a_block, nested, two_of_them, bad_time
    found = []
    for act in acts:
        found.append(ends(act))
        rows.out.fill_(-1.0)
        found.append(right(rows, ends(lambda: move(src, out=rows.out))))
    return found


def waits(rank: int) -> list[Said]:
    """Rank 1 is late, and the others wait: for a moment, until Ctrl-C, and then to the end. Another fails, for which
    nobody waits."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=own_group())
    store = dist.distributed_c10d._get_default_store()
    key = f"interrupted {turns_of(own_group()).votes}"
    while rank == 1 and store.add(key, 0) < 7:
        time.sleep(0.02)
    handle: Any = move(rows.src, out=rows.out, async_op=True)
    found = []
    if rank != 1:
        found.append(ends(lambda: handle.wait(timeout=0.05)))
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        found.append(ends(handle.wait))
        # In CPython 3.11 a Thread whose join was left so is taken for ended.
        found.append("WRONG" if handle.done() else "")
        store.add(key, 1)
    found.append(right(rows, ends(handle.wait)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        move(None if rank == 1 else rows.src, out=rows.out, async_op=True)
        found.append(right(rows, ends(lambda: move(rows.src, out=rows.out))))
        gc.collect()
    said = [str(one.message) for one in told if one.category is RuntimeWarning]
    return [*found, *said]


def two_threads(rank: int) -> list[Said]:
    """A mover that has moved in a block of another thread, which is not over, moves; and again after it."""
    group = own_group()
    two = Two(rank, 8)
    move = smt.compile(two.plan, timeout=20.0, group=group, commit="all")
    inside, go_on = threading.Event(), threading.Event()
    found: dict[str, Said] = {}

    def block() -> None:
        with smt.commit(move):
            move(two.src, out=two.out)
            inside.set()
            go_on.wait(20.0)

    thread = threading.Thread(target=lambda: found.update(block=ends(block)), name="second")
    thread.start()
    inside.wait(20.0)
    found["meanwhile"] = ends(lambda: move(two.src, out=two.out))
    held = two.holds(1.0, 0.0)
    go_on.set()
    thread.join()
    found["after"] = ends(lambda: move(two.src, out=two.out))
    return [found["meanwhile"], held, found["block"], found["after"], two.holds(1.0, 0.0)]


def puts_others_in(rank: int) -> list[Said]:
    """While moves wait for an earlier one, their callers put other tensors into the mappings that they have passed."""
    group = own_group()
    first, second = Two(rank, 8), Two(rank, 8, kind="changes")
    slow = smt.compile(first.plan, timeout=20.0, group=group)
    send = second.compile(timeout=20.0, group=group, snapshots=False)
    send(second.src, out=second.out)
    second.scale(2.0)
    cells = {key: torch.arange(tensor.numel()) for key, tensor in second.src.items()}
    given = [dict(second.src), dict(second.out), cells]
    if rank == 1:
        time.sleep(SLOW_S / 4)
    handles = [slow(first.src, out=first.out, async_op=True)]
    handles.append(send(given[0], out=given[1], positions=given[2], async_op=True))
    for mapping in given:
        mapping.clear()
    said = [ends(handle.wait) for handle in handles]
    return [*said, second.holds(2.0, 1.0)]


# Ranks that agree once


def count_votes(rank: int) -> list[tuple[int, int]]:
    """The votes of each call, by kind of call, of ranks that agree once, and of some that agree every time."""
    rows = Rows(rank, 8, 16)
    found = []
    for agree in ("once", "every"):
        move = smt.compile(rows.plan, timeout=20.0, agree=agree)
        kinds: list[dict[str, Any]] = [{}, {}, {"acknowledge": True}, {"acknowledge": True}, {}]
        kinds += [{"check": "digest"}, {"check": "digest"}, {"timeout": 30.0}]
        counts = []
        for kind in kinds:
            rows.out.fill_(-1.0)
            with mock.patch.object(Party, "vote", autospec=True, side_effect=Party.vote) as vote:
                move(rows.src, out=rows.out, **kind)
            counts.append(-1 if rows.wrong() else vote.call_count)
        found.append(tuple(counts))
    return found  # type: ignore[return-value]


def late(rank: int, seconds: float) -> list[Said]:
    """Rank 1 comes later than compile's timeout to moves about which nobody is asked; others wait by their own."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=seconds / 2, agree="once", commit="all")
    move(rows.src, out=rows.out)
    rows.out.fill_(-1.0)
    if rank == 1:
        time.sleep(seconds)
    return [right(rows, ends(lambda: move(rows.src, out=rows.out, timeout=60.0)))]


def unlike(rank: int, kind: str) -> tuple[list[Said], bool, float]:
    """Two ranks that do different things about which nobody is asked: what is said, then and of another call; whether
    any cell has something else than before or than it should; and in what time."""
    group = dist.new_group()
    rows, others = Rows(rank, 2, 16), Rows(rank, 2, 6, times=3.0)
    options: dict[str, Any] = {"timeout": 3.0, "agree": "once", "group": group}
    move, other = smt.compile(rows.plan, **options), smt.compile(others.plan, **options)
    send = smt.compile_changes(rows.plan, **options)
    calls: list[Callable[[], Any]] = [
        lambda: move(rows.src, out=rows.out),
        lambda: other(others.src, out=others.out),
        lambda: move(rows.src, out=rows.out, acknowledge=True),
        lambda: move(rows.src, out=rows.out, check="digest"),
        lambda: send(rows.src, out=rows.out),
        lambda: send(rows.src, out=rows.out),
    ]
    for call in calls:
        call()
    rows.out.fill_(-1.0)
    others.out.fill_(-1.0)
    odd = rank == 1
    kinds: dict[str, Callable[[], Any]] = {
        "mover": lambda: calls[1 if odd else 0](),
        "receipt": lambda: calls[2 if odd else 0](),
        "check": lambda: calls[3 if odd else 0](),
        "whole": lambda: send(rows.src, out=rows.out, whole=odd),
        "tensor": lambda: move(rows.src[:, :2] if odd else rows.src, out=rows.out),
        "compile": lambda: smt.compile(rows.plan, **options) if odd else calls[3](),
    }
    start = time.monotonic()
    said = [ends(kinds[kind])]
    took = time.monotonic() - start
    said.append(ends(calls[0]))
    strange = ((one.out != -1.0) & (one.out != one.want) for one in (rows, others))
    return said, any(bool(cells.any()) for cells in strange), took


def leaves_a_block(rank: int, is_named: bool) -> tuple[list[Said], bool, float]:
    """Rank 1 leaves a block between two moves about which nobody is asked: what is said, whether all is as it was,
    and in what time."""
    first, second = Two(rank, 2), Two(rank, 2, rows=32)
    moves = [smt.compile(two.plan, timeout=8.0, commit="all", agree="once") for two in (first, second)]  # fmt: skip

    def go(leaves: bool) -> None:
        with smt.commit(*(moves if is_named else [])):
            moves[0](first.src, out=first.out)
            if leaves:
                raise ValueError("mine")
            moves[1](second.src, out=second.out)

    go(False)
    for two in (first, second):
        two.scale(2.0)
    start = time.monotonic()
    said = [ends(lambda: go(rank == 1))]
    took = time.monotonic() - start
    kept = all(two.holds(2.0, 1.0) == "old" for two in (first, second))
    said.append(ends(lambda: go(False)))
    return said, kept and [move.version for move in moves] == [1, 1], took


# Ranks that are gone


def broken(
    rank: int, size: int, phase: str, way: str, victim: int, timeout: float, commit: str
) -> tuple[End, float]:
    """One good move, and one in which the victim is struck: both go on beside, while ranks do other things together.

    How it ended, and for how long the thread that called could do other things.
    """
    two = Two(rank, size)
    move = smt.compile(two.plan, timeout=timeout, commit=commit, group=dist.new_group())
    handle: Any = move(two.src, out=two.out, async_op=True)
    handle.wait()
    two.scale(2.0)
    dist.barrier()
    with ExitStack() as stack:
        if rank == victim:
            stack.enter_context(struck(phase, way))
        start = time.monotonic()
        handle = move(two.src, out=two.out, async_op=True)
        called = time.monotonic() - start
        return end_of(handle.wait, two, [move]), called


def destroyed(rank: int) -> tuple[list[Said], float]:
    """Rank 0 destroys its groups while a move is under way, for which rank 1 comes late."""
    two = Two(rank, 2)
    move = smt.compile(two.plan, timeout=20.0, commit="all", group=dist.new_group())
    move(two.src, out=two.out)
    two.scale(2.0)
    start = time.monotonic()
    if rank == 1:
        time.sleep(SLOW_S)
        said = ends(lambda: move(two.src, out=two.out))
    else:
        handle: Any = move(two.src, out=two.out, async_op=True)
        time.sleep(SLOW_S / 2)
        dist.destroy_process_group()
        said = ends(handle.wait)
    return [said, two.holds(2.0, 1.0)], time.monotonic() - start


def slow_wire(rank: int, seconds: float) -> list[Said]:
    """Several moves of two movers, whose bytes take their time on one rank, are made at once, and then waited for."""
    group = own_group()
    both = [Rows(rank, 8, 16), Rows(rank, 8, 6, times=2.0)]
    moves = [smt.compile(rows.plan, timeout=20.0, group=group) for rows in both]
    plain = GlooWire.receive

    def receive(self: Any, memory: Any, peer: int) -> Any:
        time.sleep(seconds)
        return plain(self, memory, peer)

    with mock.patch.object(GlooWire, "receive", receive) if rank == 3 else ExitStack():
        handles: list[Any] = []
        for _ in range(2):
            for move, rows in zip(moves, both, strict=True):
                handles.append(move(rows.src, out=rows.out, async_op=True))
        waited = rank == 3 and handles[-1].done()
        late_one = smt.compile(both[0].plan, timeout=20.0, group=group)
        states = [handle.done() for handle in handles]
    found = ["" if all(states) else f"a compile was before moves: {states}"]
    found.append("calls have waited" if waited else "")
    found += [right(rows, "") for rows in both]
    both[0].out.fill_(-1.0)
    found.append(right(both[0], ends(lambda: late_one(both[0].src, out=both[0].out))))
    return found
