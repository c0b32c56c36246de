"""What NCCL workers do where ranks come late, fail or leave. Imported by workers, so no pytest here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

import shardmath_torch as smt
from shardmath_nccl.wire import NcclWire
from tests.distributed.tasks.breaks import Rows, Said, ends
from tests.distributed.tasks.device import BACKEND

Timed = tuple[Said, float]
"""How a call ended, and after how many seconds."""


def timed(act: Callable[[], Any]) -> Timed:
    start = time.monotonic()
    return ends(act), time.monotonic() - start


def connect(place: int, size: int, name: str) -> dist.ProcessGroup:
    """A joint group that meets in the store of the workers' default group."""
    store = dist.distributed_c10d._get_default_store()
    return smt.connect(store, place, size, timeout=30.0, name=name, backend=BACKEND)


def go_on(place: int, size: int, name: str) -> list[Said]:
    """A move in a new joint group: how its calls end, and whether what arrived is wrong."""
    group, rows = connect(place, size, name), Rows(place, size, 16)
    moves = []
    said = ends(lambda: moves.append(smt.compile(rows.plan, group=group, timeout=20.0)))
    found = [said or ends(lambda: moves[0](rows.src, out=rows.out, acknowledge=True))]
    found.append("WRONG" if rows.wrong() else "")
    smt.disconnect(group)
    return found


def come_late(rank: int, seconds: float, timeout: float) -> tuple[Timed, list[Said]]:
    """A move to which rank 1 comes so late, and then one in a new group."""
    size = dist.get_world_size()
    rows = Rows(rank, size, 16)
    move = smt.compile(rows.plan, timeout=timeout)
    move(rows.src, out=rows.out)
    rows.out.fill_(-1.0)
    if rank == 1:
        time.sleep(seconds)
    told = timed(lambda: move(rows.src, out=rows.out))
    if not told[0] and rows.wrong():
        told = "WRONG", told[1]
    return told, go_on(rank, size, "after one was late")


def die(rank: int, victim: int, at: str, how: int) -> tuple[Timed, bool, list[Said]]:
    """Rank `victim` kills or stops itself before a move or as it calls the wire's method `at`; the others go on
    without it.

    Gives how the move ended on this rank, whether its destination is as before, and how it went on.
    """
    size = dist.get_world_size()
    rows = Rows(rank, size, 1 << 12)
    move = smt.compile(rows.plan, timeout=6.0, commit="all")
    move(rows.src, out=rows.out)
    rows.out.fill_(-1.0)

    def end(*given: object) -> None:
        os.kill(os.getpid(), how)

    if rank == victim:
        if not at:
            end()
        with mock.patch.object(NcclWire, at, end):
            move(rows.src, out=rows.out)
    told = timed(lambda: move(rows.src, out=rows.out))
    kept = bool((rows.out == -1.0).all())
    alive = [one for one in range(size) if one != victim]
    place = alive.index(rank)
    group, fewer = connect(place, len(alive), "without it"), Rows(place, len(alive), 12)
    found = [ends(lambda: move.replan(fewer.plan, group=group))]
    found.append(ends(lambda: move(fewer.src, out=fewer.out, acknowledge=True)))
    found.append("WRONG" if fewer.wrong() else "")
    return told, kept, found


def live_on(rank: int, victim: int, seconds: float) -> list[Said]:
    """Moves in a new joint group so long after rank `victim` died: torch's watchdog has not ended this process."""
    die(rank, victim, "", signal.SIGKILL)
    time.sleep(seconds)
    return go_on(rank, dist.get_world_size() - 1, "later")


def interrupt(rank: int) -> Timed:
    """Rank 0 is stopped by Ctrl-C while it waits for the others, which come later."""
    rows = Rows(rank, dist.get_world_size(), 64)
    move = smt.compile(rows.plan, timeout=10.0)
    move(rows.src, out=rows.out)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    else:
        time.sleep(2.5)
    return timed(lambda: move(rows.src, out=rows.out))


def take_wrong(rank: int, sizes: Sequence[int]) -> list[Said]:
    """What a rank does wrong is an error on all, after which the group is whole."""
    rows = Rows(rank, dist.get_world_size(), 16)
    move = smt.compile(rows.plan, timeout=20.0)
    bad = {0: rows.src.double(), 1: rows.src.cpu(), 2: rows.src[:1]}
    found = []
    for way in bad:
        given = bad[way] if rank == 2 else rows.src
        found.append(ends(lambda: move(given, out=rows.out)))  # noqa: B023
        rows.out.fill_(-1.0)
        found.append(ends(lambda: move(rows.src, out=rows.out)))
        found.append("WRONG" if rows.wrong() else "")
    other = Rows(rank, dist.get_world_size(), sizes[rank % len(sizes)])
    found.append(ends(lambda: smt.compile(other.plan, timeout=20.0)))
    return found
