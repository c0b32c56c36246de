"""What workers do: moves of which all is told. Imported by workers, so no pytest here."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.moves.observing import tracers
from tests.distributed.tasks.breaks import Rows, ends
from tests.distributed.tasks.scenarios import Case, tensors_of

Told = list[tuple[int, int]]
"""What a callback was told."""


def _compile(
    rank: int, case: Case, program: bool = False
) -> tuple[Callable[..., None], Any, Any, Any]:
    given: Any = sm.schedule(case.plan, max_inflight_bytes=1 << 16) if program else case.plan
    mover = smt.compile(given, timeout=30.0, **case.options)
    return mover, mover, tensors_of(case.src.get(rank)), tensors_of(case.dst.get(rank))


def tell_cases(rank: int, cases: Sequence[Case]) -> list[tuple[Any, float, Told]]:
    """Of each case what the second of two moves did, how long it took, and what its callback was told."""
    found = []
    for case in cases:
        move, mover, src, out = _compile(rank, case)
        assert mover.last is None
        move(src, out=out)
        told: Told = []
        began = time.perf_counter()
        move(src, out=out, label="second", progress=lambda *numbers: told.append(numbers))  # noqa: B023
        found.append((mover.last, time.perf_counter() - began, told))
    return found


def trace_cases(rank: int, path: str, cases: Sequence[tuple[Case, bool]]) -> None:
    """Two moves of each case, of a program where that is said, in one trace."""
    ready = [_compile(rank, case, program) for case, program in cases]
    with smt.trace(path, topology=sm.Topology(ranks_per_node=2)):
        for move, _, src, out in ready:
            move(src, out=out, label="first")
            move(src, out=out, label="second")


class _Broken(Exception):
    pass


def raising(rank: int) -> list[Any]:
    """Rank 1's callback raises, or moves again; each call's end, whether all arrived, and how often it was told."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0)
    said: list[Any] = []

    def call(progress: Callable[[int, int], object]) -> None:
        rows.out.fill_(-1.0)
        told: Told = []

        def tell(done: int, total: int) -> None:
            told.append((done, total))
            if rank == 1:
                progress(done, total)

        end = ends(lambda: move(rows.src, out=rows.out, progress=tell))
        said.append((end, rows.wrong(), len(told)))

    def fail(done: int, total: int) -> None:
        raise _Broken("no terminal")

    call(fail)
    call(lambda done, total: move(rows.src, out=rows.out))
    call(lambda done, total: None)
    wrong: Any = 3
    said.append(ends(lambda: move(rows.src, out=rows.out, progress=wrong if rank == 1 else None)))
    move(rows.src, out=rows.out)
    return said


def interrupted(rank: int) -> list[str]:
    """Rank 1's callback is left by Ctrl-C, in a group of its own."""
    group = dist.new_group()
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, group=group, timeout=8.0)

    def stop(done: int, total: int) -> None:
        if rank == 1 and done:
            raise KeyboardInterrupt

    first = ends(lambda: move(rows.src, out=rows.out, progress=stop))
    return [first, ends(lambda: move(rows.src, out=rows.out))]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _listening() -> Any:
    logger = logging.getLogger("shardmath")
    handler = _Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def logged(rank: int) -> list[str]:
    """The lines of a move, of one that is refused, of a refit's changes, and of one where nobody listens."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan)
    send = smt.compile_changes(rows.plan)
    with _listening() as lines:
        move(rows.src, out=rows.out, label="step 7")
        ends(lambda: move(rows.src[:1] if rank == 5 else rows.src, out=rows.out))
        send(rows.src, out=rows.out)
        rows.src[0, 0] += 1.0
        send(rows.src, out=rows.out)
    move(rows.src, out=rows.out)
    return list(lines)


def traced(rank: int, path: str) -> dict[str, Any]:
    """Moves of every kind in one trace: committed, compared, refused, of changes, of an adjoint, in two threads."""
    rows = Rows(rank, 8, 16)
    plain, kept = smt.compile(rows.plan), smt.compile(rows.plan, commit="all")
    back = smt.compile(sm.adjoint(rows.plan))
    send = smt.compile_changes(rows.plan)
    groups = [dist.new_group() for _ in range(2)]
    beside = [smt.compile(rows.plan, group=group) for group in groups]
    send(rows.src, out=rows.out)
    rows.src += 1.0
    with smt.trace(path):
        plain(rows.src, out=rows.out, check="digest", acknowledge=True)
        kept(rows.src, out=rows.out)
        with smt.commit(kept):
            kept(rows.src, out=rows.out)
        refused = ends(lambda: plain(rows.src[:1] if rank == 5 else rows.src, out=rows.out))
        sent = send(rows.src, out=rows.out)
        back(rows.out, out=rows.src.clone())
        inside = ends(lambda: plain(rows.src, out=rows.out, progress=lambda *_: back(rows.out)))
        nested = ends(lambda: smt.trace(path).__enter__())

        def use(move: Any) -> None:
            out = rows.out.clone()
            for _ in range(4):
                move(rows.src, out=out)

        threads = [threading.Thread(target=use, args=[move], name=f"{rank}") for move in beside]
        for i, thread in enumerate(threads):
            thread.name = f"worker {i}"
            thread.start()
        for thread in threads:
            thread.join()
    plain(rows.src, out=rows.out)
    return {"refused": refused, "nested": nested, "inside": inside, "sent": sent.nbytes}


def left(rank: int, path: str) -> list[Any]:
    """Traces that are left by an exception, that have no room, that cannot be written; then one more."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan)
    said: list[Any] = []

    def leave() -> None:
        with smt.trace(f"{path}/left.json"):
            move(rows.src, out=rows.out)
            raise _Broken("enough")

    said.append(ends(leave))
    said.append(ends(lambda: smt.trace(f"{path}/none/move.json").__enter__()))
    nothing: Any = 3
    said.append(ends(lambda: smt.trace(nothing).__enter__()))
    said.append(ends(lambda: smt.trace(f"{path}/x.json", topology=nothing).__enter__()))
    most, tracers.MOST_MARKS = tracers.MOST_MARKS, 1
    with smt.trace(f"{path}/full", model=False):
        for _ in range(3):
            move(rows.src, out=rows.out)
    tracers.MOST_MARKS = most
    return said


def others(rank: int) -> list[Any]:
    """What movers of other kinds say: transformed, committed, broadcast; the bytes that they sent and received."""
    wide = sm.Layout((8, 32), sm.Mesh(tp=8), "(tp n) h")
    narrow = sm.Layout((8, 32), sm.Mesh(tp=8), "n (tp h)", dtype="bfloat16")
    to_narrow = {"w": sm.transforms.Cast("bfloat16")}
    cast = smt.compile_transformed(sm.transforms.transformed({"w": wide}, {"w": narrow}, to_narrow))
    told: Told = []
    src, out = torch.ones(1, 32), torch.zeros(8, 4, dtype=torch.bfloat16)
    cast({"w": src}, out={"w": out}, progress=lambda *numbers: told.append(numbers))
    rows = Rows(rank, 8, 16)
    found: list[Any] = [(cast.last, told, bool((out == 1).all()))]
    for options in ({"commit": "all"}, {"engine": "broadcast"}):
        move = smt.compile(rows.plan, **options)  # type: ignore[arg-type]
        told = []
        move(rows.src, out=rows.out, progress=lambda *numbers: told.append(numbers))  # noqa: B023
        found.append((move.last, told, not rows.wrong()))
    return found
