"""What workers do where a thread waits for a replan of another thread. Imported by workers, so no pytest here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.groups.agreement.turns import turns_of
from shardmath_torch.moves.movers import compile as compiling
from tests.distributed.tasks.breaks import Rows, Said, ends

SLOW_S = 0.2
"""By which a replan takes longer than it would, so that the other thread is in the queue."""


class Queue:
    """A replan by this thread, and a call of another one that is made in the middle of it, and waits."""

    def __init__(self) -> None:
        self._is_inside = threading.Event()
        self._said: list[Said] = []

    def run(self, replan: Callable[[], Any], call: Callable[[], Any]) -> list[Said]:
        """How both end."""

        def wait_and_call() -> None:
            self._is_inside.wait(20.0)
            self._said.append(ends(call))

        thread = threading.Thread(target=wait_and_call, name="second")
        thread.start()
        check = compiling.check_settings

        def check_slowly(*given: Any) -> None:
            if threading.current_thread() is not thread:
                self._is_inside.set()
                time.sleep(SLOW_S)
            check(*given)

        with mock.patch.object(compiling, "check_settings", check_slowly):
            said = ends(replan)
        thread.join()
        return [said, *self._said]


def calls_in_a_replan(rank: int, kind: str) -> list[Said]:
    """A mover is replanned to another group, and meanwhile called otherwise; then a move, and compiles."""
    groups = [dist.new_group() for _ in range(3)]
    rows, others = Rows(rank, 8, 16), Rows(rank, 8, 16)
    move = smt.compile(rows.plan, group=groups[0], timeout=10.0)
    has_turn: list[bool] = []

    def note_turn() -> None:
        has_turn.append(turns_of(move._party.group)._turn.is_mine())

    def move_beside() -> None:
        handle = move(others.src, out=others.out, async_op=True)
        assert handle is not None
        handle.wait()

    kinds: dict[str, Callable[[], Any]] = {
        "move": lambda: move(others.src, out=others.out),
        "move beside": move_beside,
        "let go": lambda: move.let_go(note_turn),
        "close": lambda: move._part("it had enough", note_turn),
        "replan": lambda: move.replan(rows.plan, group=groups[2]),
        "replan there": lambda: move.replan(rows.plan, group=groups[1]),
        "replan here": lambda: move.replan(rows.plan),
    }
    said = Queue().run(lambda: move.replan(rows.plan, group=groups[1]), kinds[kind])
    if kind == "move beside":
        # It would overtake moves of the new group's line.
        assert "another thread has replanned the mover to another process group" in said.pop()
    if kind == "move":
        said.append("WRONG" if others.wrong() else "")
        said.append("" if move.last is not None else "no report")
    if kind in ("let go", "close"):
        said.append("" if has_turn == [True] else "without a turn")
    said.append(ends(lambda: move(rows.src, out=rows.out)))
    said.append("WRONG" if rows.wrong() and not said[-1] else "")
    for group in groups:
        said.append(ends(lambda: smt.compile(rows.plan, group=group, timeout=10.0)))  # noqa: B023
    return said


def replans_at_once(rank: int) -> list[Said]:
    """A mover is replanned to other layouts, and by another thread to the first ones again, from what it is by then."""
    rows = Rows(rank, 8, 16)
    other = Rows(rank, 8, 24)
    move = smt.compile(rows.plan, group=dist.new_group(), timeout=10.0, commit="all")
    said = [ends(lambda: move(rows.src, out=rows.out))]
    said += Queue().run(lambda: move.replan(other.plan), lambda: move.replan(rows.plan))
    rows.out.fill_(-1.0)
    said.append(ends(lambda: move(rows.src.clone(), out=rows.out)))
    return [*said, "WRONG" if rows.wrong() else ""]


def prepares_in_a_replan(rank: int) -> list[Said]:
    """A refit is replanned to another group, and meanwhile prepared; then a step, and a compile in both groups."""
    groups = [dist.new_group() for _ in range(2)]
    rows = Rows(rank, 8, 16)
    src, dst = (sm.Layout(side[""][0].shape, sm.Mesh(tp=4, ranks=range(first, first + 4)), "(tp n) h")
                for side, first in ((rows.plan.src, 0), (rows.plan.dst, 4)))  # fmt: skip
    planned = sm.refit({"w": src}, {"w": dst}, {"w": (src.shape, "float32")})
    refit = smt.Refit(planned, group=groups[0], timeout=10.0)
    given = {"w": torch.full((4, 32), float(rank % 4))}
    out = {"w": torch.zeros(4, 32)}

    def prepare() -> None:
        refit.prepare(given if rank < 4 else None, out if rank >= 4 else None)

    said = Queue().run(lambda: refit.replan(planned, group=groups[1]), prepare)
    said.append(ends(refit))
    said.append("" if rank < 4 or torch.equal(out["w"], given["w"]) else "WRONG")
    for group in groups:
        said.append(ends(lambda: smt.compile(rows.plan, group=group, timeout=10.0)))  # noqa: B023
    return said


def waits_in_a_move(rank: int, is_beside: bool) -> list[Said]:
    """The progress callback of a move waits for a later move beside on rank 0."""
    group = dist.new_group()
    rows, others = Rows(rank, 8, 16), Rows(rank, 8, 6)
    first = smt.compile(rows.plan, group=group, timeout=10.0)
    second = smt.compile(others.plan, group=group, timeout=10.0, thread="second")
    handles: list[Any] = []
    is_inside, is_queued = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        is_inside.set()
        is_queued.wait(10.0)
        if rank == 0:
            handles[0].wait(20.0)

    def queue() -> None:
        is_inside.wait(10.0)
        handles.append(second(others.src, out=others.out, async_op=True))
        is_queued.set()

    thread = threading.Thread(target=queue, name="second")
    thread.start()
    start = time.monotonic()
    handle: Any = None

    def act() -> None:
        nonlocal handle
        handle = first(rows.src, out=rows.out, progress=wait, async_op=is_beside)
        if handle is not None:
            handle.wait()

    said = [ends(act)]
    thread.join()
    said.append(ends(handles[0].wait))
    said.append("WRONG" if rows.wrong() or others.wrong() else "")
    return [*said, "" if time.monotonic() - start < 5.0 else "late"]
