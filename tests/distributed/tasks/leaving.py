"""What workers do where a rank leaves, or acts on a mover that moves. Imported by workers, so no pytest here."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.groups.stores import check_served
from tests.distributed.tasks.breaks import Rows, Said, ends
from tests.distributed.tasks.combined import own_group

SENT = sm.Layout((8, 4), sm.Mesh(dp=2), "(dp n) h")
RECEIVED = sm.Layout((8, 4), sm.Mesh(tp=2, ranks=(2, 3)), "n (tp h)")

LATE_S = 1.0
"""By which a rank calls after it has heard a goodbye."""

Told = tuple[Said, float]
"""How a call ends, and after how many seconds."""


def timed(act: Callable[[], Any]) -> Told:
    start = time.monotonic()
    said = ends(act)
    return said, time.monotonic() - start


def leave(rank: int, how: str, options: Mapping[str, Any]) -> Any:
    """Rank 0 leaves after a move; rank 1 waits for it, rank 2 calls later. What they are told, and the version."""
    rows = Rows(rank, 3, 6)
    move = smt.compile(rows.plan, timeout=60.0, **options)

    def act() -> None:
        move(rows.src, out=rows.out)

    def fail() -> None:
        with move:
            raise ValueError("no data")

    act()
    if rank == 0:
        left = ends(fail if how == "error" else move.close)
        again, twice = ends(act), ends(move.close)
        return [left, again, twice, ends(lambda: smt.commit(move).__enter__()), repr(move)]
    time.sleep(LATE_S * (rank - 1))
    found = [*timed(act), *timed(act), move.version]
    return [*found, "WRONG" if rows.wrong() else "", move.left]


def serve_until_all_left(rank: int) -> Any:
    """Ranks 0 and 1 send and close; 2 and 3 receive until all who send have left. How often, and what they are told."""
    move = smt.compile(sm.plan(SENT, RECEIVED), timeout=60.0, commit="all")
    before = move.left
    if rank in SENT.mesh.ranks:
        for _ in range(3):
            move(torch.ones(SENT.local_shape(rank)))
        # When the first has left, the engines' group breaks before the second leaves.
        time.sleep(LATE_S * rank)
        move.close()
        return before, move.version
    out = torch.zeros(RECEIVED.local_shape(rank))
    told = []
    # A rank may be told of one that left before another has.
    while not set(SENT.mesh.ranks) <= set(move.left):
        told.append(ends(lambda: move(None, out=out)))
    return before, move.version, move.left, told[3:]


def end_with_the_store(rank: int, closes: bool) -> Any:
    """Rank 0's process, which serves the store, ends; what rank 1 is told later, and what torch writes."""
    rows = Rows(rank, 2, 6)
    move = smt.compile(rows.plan, timeout=30.0, commit="all")
    for _ in range(2):
        move(rows.src, out=rows.out)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        # The other rank asks it what was decided on the last move.
        store.wait(["moved"])
        if closes:
            move.close()
        os._exit(0)
    with tempfile.TemporaryFile() as written:
        kept = os.dup(2)
        os.dup2(written.fileno(), 2)
        store.set("moved", "")
        while not ends(lambda: check_served(store)):
            time.sleep(0.01)
        told = timed(lambda: move(rows.src, out=rows.out))
        os.dup2(kept, 2)
        written.seek(0)
        return *told, written.read().decode()


def disconnect(rank: int, where: str, leaver: int, moves: bool) -> Any:
    """A rank disconnects from a joint group whose store rank 0 serves; one waits for it, and one calls later.

    They have moved before, or the others make their first mover.
    """
    group = smt.connect(where, rank, 3, timeout=30.0)
    rows = Rows(rank, 3, 6)

    def compile() -> smt.Mover:
        return smt.compile(rows.plan, timeout=60.0, group=group)

    act: Callable[[], Any] = compile
    if moves:
        move = compile()

        def act() -> None:
            move(rows.src, out=rows.out, acknowledge=True)

        act()
    if rank == leaver:
        return timed(lambda: smt.disconnect(group))
    time.sleep(LATE_S * (rank % 2))
    told = timed(act)
    smt.disconnect(group)
    return told


def close_as_others_compile(rank: int, ends_too: bool) -> Told:
    """Rank 0 closes a mover while the others wait in another compile; then its process ends, or it compiles, too."""
    rows = Rows(rank, 3, 6)
    move = smt.compile(rows.plan, timeout=60.0)
    move(rows.src, out=rows.out, acknowledge=True)
    if rank == 0:
        time.sleep(LATE_S)
        move.close()
        if ends_too:
            os._exit(0)
        # So long that the others have heard.
        time.sleep(LATE_S)
    return timed(lambda: smt.compile(rows.plan, timeout=60.0))


def close_as_others_replan(rank: int, kind: str, waits: bool) -> list[Told]:
    """Rank 0 closes a mover that the others replan, before they do or as they wait; whether another mover works on."""
    rows = Rows(rank, 3, 6)
    options: dict[str, Any] = {"timeout": 30.0}
    other = smt.compile(rows.plan, **options)
    transforms = sm.transforms.transformed(rows.plan.src[""][0], rows.plan.dst[""][0], {})
    plan = rows.plan
    if kind == "changes":
        move: smt.Mover = smt.compile_changes(plan, **options)
    elif kind == "transforms":
        move = smt.compile_transformed(transforms, **options)
        plan = sm.plan(transforms.src, transforms.dst)
    else:
        move = smt.compile(plan, **options)
    move(rows.src, out=rows.out, acknowledge=True)
    if rank == 0:
        time.sleep(LATE_S if waits else 0.0)
        move.close()
        # Until the others have heard.
        time.sleep(LATE_S)
        found = [("", 0.0)]
    else:
        time.sleep(0.0 if waits else LATE_S)
        found = [timed(lambda: move.replan(plan))]
    return [*found, timed(lambda: other(rows.src, out=rows.out, timeout=30.0))]


def leave_before_blocks(rank: int) -> list[Told]:
    """Rank 0 closes two movers, before a block and in one; how blocks of those end, and the group's next move."""
    group = own_group()
    rows, others = Rows(rank, 8, 16), Rows(rank, 8, 8)
    first, second, other = (
        smt.compile(one.plan, timeout=30.0, group=group, commit="all")
        for one in (rows, rows, others)
    )

    def last_of(move: smt.Mover) -> None:
        if rank == 0:
            move.close()
        else:
            time.sleep(LATE_S)
            move(rows.src, out=rows.out)

    def begin() -> None:
        with smt.commit(first):
            last_of(first)

    def go_on() -> None:
        with smt.commit(group):
            other(others.src, out=others.out)
            last_of(second)

    before = timed(first.close if rank == 0 else begin)
    return [before, timed(go_on), timed(lambda: other(others.src, out=others.out))]


def leave_one_waiting(rank: int) -> list[Said]:
    """Rank 0 leaves; rank 1 waits for it, rank 2 calls later, and then 0 and 2 go on with another mover."""
    rows = Rows(rank, 3, 6)
    move, other = (smt.compile(rows.plan, timeout=20.0) for _ in range(2))
    move(rows.src, out=rows.out)

    def act(one: smt.Mover) -> Said:
        return ends(lambda: one(rows.src, out=rows.out))

    if rank == 0:
        time.sleep(LATE_S / 2)
        move.close()
        return [act(other)]
    time.sleep(2 * LATE_S * (rank - 1))
    return [act(move), act(other).removeprefix("this mover is broken: ")]


def all_leave(rank: int) -> list[Said]:
    """All close one mover, each in its time, and go on with the group: with another mover, a new one, torch's own."""
    group = own_group()
    rows, others = Rows(rank, 8, 16), Rows(rank, 8, 8)
    second = smt.compile(others.plan, timeout=20.0, group=group)

    def first() -> None:
        with smt.compile(rows.plan, timeout=20.0, group=group) as move:
            handle: Any = move(rows.src, out=rows.out, async_op=True)
            time.sleep(0.02 * rank)
        # Closing has waited for it.
        assert handle.done() and not rows.wrong()

    said = [ends(first), ends(lambda: second(others.src, out=others.out)), ends(first)]
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    return [*said, "" if total.tolist() == [8.0, 8.0] and not others.wrong() else "WRONG"]


def _knock_within(move: Any, doors: Mapping[str, Callable[[], Any]], rows: Rows) -> list[Said]:
    """What each door says from a progress callback of a move, which then goes on."""
    found: list[Said] = []

    def knock(*_: int) -> None:
        if not found:
            found.extend(map(ends, doors.values()))

    said = ends(lambda: move(rows.src, out=rows.out, progress=knock))
    return [*found, said or ("WRONG" if rows.wrong() else "")]


def knock(rank: int, commit: str) -> list[Said]:
    """Every door of a mover within a move of it, and `let_go` from another thread meanwhile."""
    group, other = own_group(), smt_group()
    rows = Rows(rank, 8, 64)
    move = smt.compile(rows.plan, timeout=20.0, group=group, commit=commit)
    once = smt.compile(rows.plan, timeout=20.0, group=group, commit="all", agree="once")

    def in_block() -> None:
        with smt.commit(once):
            once(rows.src, out=rows.out)

    doors = {
        "block": in_block,
        "let_go": move.let_go,
        "close": move.close,
        "replan": lambda: move.replan(rows.plan),
        "replan elsewhere": lambda: move.replan(rows.plan, group=other),
        "move": lambda: move(rows.src, out=rows.out),
    }
    found = _knock_within(move, doors, rows)
    begun = threading.Event()
    said: list[Said] = []

    def let_go() -> None:
        begun.wait(20.0)
        said.append(ends(move.let_go))

    thread = threading.Thread(target=let_go, name="unloads")
    thread.start()
    rows.out.fill_(-1.0)
    found.append(ends(lambda: move(rows.src, out=rows.out, progress=lambda *_: begun.set())))
    thread.join()
    found += [*said, "WRONG" if rows.wrong() else ""]
    move.close()
    return found


def smt_group() -> dist.ProcessGroup:
    """A second group of all ranks, which nobody moves on."""
    if "other" not in _kept:
        _kept["other"] = dist.new_group()
    return _kept["other"]


_kept: dict[str, Any] = {}


def knock_at_refits(rank: int, commit: str) -> list[Said]:
    """`release` and `prepare` within a move of a refit, which functions of both ends then finish; then it is closed."""
    mesh, shape = sm.Mesh(tp=8), (64, 64)
    a, b = sm.Layout(shape, mesh, "(tp n) h"), sm.Layout(shape, mesh, "n (tp h)")
    shapes = {"w": (shape, "float32")}
    planned = sm.refit({"w": a}, {"w": b}, shapes)
    refit = smt.Refit(planned, timeout=20.0, commit=commit, group=own_group())
    mine, out = {"w": torch.ones(8, 64)}, {"w": torch.zeros(64, 8)}
    refit.prepare(src=mine, dst=out)
    found: list[Said] = []

    def knock(*_: int) -> None:
        if not found:
            found.append(ends(refit.release))
            found.append(ends(lambda: refit.prepare(src=mine, dst=out)))
            found.append(ends(refit.close))

    found.append(ends(lambda: refit(progress=knock)))
    found.append("" if out["w"].eq(1.0).all() else "WRONG")
    with refit:
        found.append(ends(refit))
    return [*found, ends(refit), ends(lambda: refit.prepare(src=mine, dst=out))]


def knock_in_a_block(rank: int) -> list[Said]:
    """What waits for the end of a block is let go of there, and not before."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=own_group(), commit="all")
    found: list[Said] = []

    def act() -> None:
        with smt.commit(move):
            move(rows.src, out=rows.out)
            found.extend([ends(move.let_go), ends(move.close)])

    found.append(ends(act))
    found.append("WRONG" if rows.wrong() or move.version != 1 else "")
    return [*found, ends(move.close)]
