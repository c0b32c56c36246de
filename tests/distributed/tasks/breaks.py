"""What workers do where a move is left, late, or met by another one. Imported by workers, so no pytest here."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups.agreement.threads import _wait_for_all
from shardmath_torch.moves.commits.record import Record
from tests.distributed.tasks.device import DEVICE

Said = str
"""What a call ended with: "" for well, otherwise the error's text."""


def ends(act: Callable[[], Any]) -> Said:
    """How a call ends; what is no ShardError is told by its kind."""
    try:
        act()
    except sm.ShardError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Rows:
    """Rows of (rows, 4 n) numbers on this rank, to be moved to columns among the n ranks of a group."""

    def __init__(self, rank: int, size: int, rows: int, times: float = 1.0) -> None:
        mesh, shape = sm.Mesh(tp=size), (rows, 4 * size)
        a, b = sm.Layout(shape, mesh, "(tp n) h"), sm.Layout(shape, mesh, "n (tp h)")
        whole = times * torch.arange(float(rows * 4 * size), device=DEVICE).view(shape)
        self.plan = sm.plan(a, b)
        self.src = whole[a.indices(rank)[0]].clone()
        self.out = torch.full(b.local_shape(rank), -1.0, device=DEVICE)
        self.want = whole[:, b.indices(rank)[1]]

    def wrong(self) -> bool:
        """Whether what arrived is not what should have."""
        return not torch.equal(self.out, self.want)


def left(rank: int, kind: str, at: str) -> list[Said]:
    """Rank 0 leaves its second move by an exception as it sends; then: that move, again, another mover's, a compile."""
    rows, others = Rows(rank, 2, 64), Rows(rank, 2, 6)
    move = smt.compile(rows.plan, timeout=8.0)
    other = smt.compile(others.plan, timeout=8.0)
    move(rows.src, out=rows.out)
    if rank == 0:
        plain = GlooWire._send

        def leave(
            self: GlooWire, memory: torch.Tensor, peer: int, patience: float, step: int
        ) -> Any:
            pending = plain(self, memory, peer, patience, step)
            if bool(step) == (at == "vote"):
                raise {"Ctrl-C": KeyboardInterrupt, "exit": SystemExit, "close": GeneratorExit}[
                    kind
                ]
            return pending

        GlooWire._send = leave  # type: ignore[method-assign]
    rows.out.fill_(-1.0)
    first = ends(lambda: move(rows.src, out=rows.out))
    if not first and rows.wrong():
        first = "WRONG"
    if rank == 0:
        GlooWire._send = plain  # type: ignore[method-assign]
    return [
        first,
        ends(lambda: move(rows.src, out=rows.out)),
        ends(lambda: other(others.src, out=others.out)),
        ends(lambda: smt.compile(rows.plan, timeout=8.0)),
    ]


def interrupted(rank: int, seconds: float, seed: int) -> Said:
    """Moves while a timer's handler raises on rank 0; "WRONG" if any of them ends well with other bytes."""
    rows = Rows(rank, 2, 512)
    move = smt.compile(rows.plan, timeout=8.0)
    moments = torch.empty(1000).uniform_(1e-4, 6e-3, generator=torch.Generator().manual_seed(seed))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    said, end, i = "", time.monotonic() + seconds, 0
    while not said and time.monotonic() < end:
        rows.out.fill_(-1.0)
        try:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, float(moments[i % 1000]))
            said = ends(lambda: move(rows.src, out=rows.out))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:  # between the calls
            continue
        i += 1
        if said.startswith("KeyboardInterrupt") and "broken" not in repr(move):
            said = ""  # before it voted: nobody has heard of this call, which is made again
            continue
        if not said and rows.wrong():
            said = "WRONG"
    signal.setitimer(signal.ITIMER_REAL, 0)
    return said


def waiting(rank: int) -> tuple[Said, float]:
    """Rank 0 is stopped by Ctrl-C while it waits for a rank that comes much later; rank 1 comes then."""
    rows = Rows(rank, 2, 16)
    move = smt.compile(rows.plan, timeout=8.0)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if rank == 1:
        time.sleep(4.0)
        return ends(lambda: move(rows.src, out=rows.out)), 0.0
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    start = time.monotonic()
    return ends(lambda: move(rows.src, out=rows.out, timeout=600.0)), time.monotonic() - start


def disagree(rank: int, kind: str) -> list[Said]:
    """Ranks 1 and 3 call something else than the rest; then all move alike, twice."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0)
    other = smt.compile(Rows(rank, 8, 24).plan, timeout=20.0)
    here = lambda **how: move(rows.src, out=rows.out, **how)  # noqa: E731
    odd: dict[str, Callable[[], Any]] = {
        "compile": lambda: smt.compile(rows.plan, timeout=20.0),
        "another mover": lambda: other(rows.src, out=rows.out),
        "nothing to move": lambda: move(None),
        "a receipt": lambda: here(acknowledge=True),
        "no time": lambda: here(timeout=float("nan")),
    }
    said = [ends(odd[kind] if rank in (1, 3) else here) for _ in range(2)]
    for _ in range(2):
        rows.out.fill_(-1.0)
        said.append(ends(here) or ("WRONG" if rows.wrong() else ""))
    return said


def late(rank: int, seconds: float) -> Said:
    """Rank 1 comes later than compile's timeout; the others wait for it by a longer one of the call."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=seconds / 2)
    if rank == 1:
        time.sleep(seconds)
    said = ends(lambda: move(rows.src, out=rows.out, timeout=60.0))
    return said or ("WRONG" if rows.wrong() else "")


def received(rank: int, acknowledge: bool) -> Said:
    """Rank 0 sends all that it has to rank 1, which fails when it has it."""
    a, b = (sm.Layout((64, 64), sm.Mesh(tp=1, ranks=(r,)), "n h") for r in (0, 1))
    move = smt.compile(sm.plan(a, b), timeout=8.0)
    held = torch.zeros(64, 64)
    if rank == 1:
        plain = move._carrier._engine.move

        def fail(*sides: Any) -> None:
            plain(*sides)
            time.sleep(0.5)
            raise RuntimeError("no room")

        move._carrier._engine.move = fail  # type: ignore[method-assign]
    src, out = (held, None) if rank == 0 else (None, held)
    return ends(lambda: move(src, out=out, acknowledge=acknowledge))


def half_moved(rank: int, victim: int, timeout: float) -> tuple[Said, float]:
    """One message of 128 MB from rank 0 to rank 1, of whom one dies in the middle of it."""
    a, b = (sm.Layout((32, 1 << 20), sm.Mesh(tp=1, ranks=(r,)), "n h") for r in (0, 1))
    move = smt.compile(sm.plan(a, b), timeout=timeout)
    held = torch.zeros(32, 1 << 20)
    src, out = (held, None) if rank == 0 else (None, held)
    move(src, out=out)
    side = "send" if rank == 0 else "receive"
    plain = getattr(GlooWire, side)
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())

    def post(self: Any, memory: torch.Tensor, peer: int) -> Any:
        pending = plain(self, memory, peer)
        if rank == 0:
            # The receiver stands still until this process is dead: by then only the sockets' buffers are full.
            os.kill(processes[peer], signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {processes[peer]}"])
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
        return pending

    if rank == victim:
        setattr(GlooWire, side, post)
    start = time.monotonic()
    return ends(lambda: move(src, out=out)), time.monotonic() - start


def without_store(rank: int, number: int) -> tuple[Said, float]:
    """The rank that serves the store stops or dies; the others compile."""
    rows = Rows(rank, 3, 16)
    smt.compile(rows.plan, timeout=4.0)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), number)
    time.sleep(0.3)
    start = time.monotonic()
    return ends(lambda: smt.compile(rows.plan, timeout=4.0)), time.monotonic() - start


def destroyed(rank: int) -> list[Said]:
    """A mover whose process group is gone, and a compile without one."""
    rows = Rows(rank, 2, 16)
    move = smt.compile(rows.plan, timeout=8.0)
    move(rows.src, out=rows.out)
    dist.barrier()
    dist.destroy_process_group()
    return [ends(lambda: move(rows.src, out=rows.out)), ends(lambda: smt.compile(rows.plan))]


def _in_threads(acts: dict[str, Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act, name=name) for name, act in acts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def threads(rank: int, kind: str) -> dict[str, list[Said]]:
    """Two threads move at once, in another order on each rank; what each of their moves ended with."""
    said: dict[str, list[Said]] = {"one": [], "two": []}
    sets = {"one": Rows(rank, 8, 16), "two": Rows(rank, 8, 16 if kind == "one mover" else 24, 3.0)}
    groups = {name: dist.new_group() if kind == "a group for each" else None for name in said}
    movers = {
        name: smt.compile(rows.plan, group=groups[name], timeout=20.0)
        for name, rows in sets.items()
    }
    if kind == "one mover":
        movers["two"] = movers["one"]

    def use(name: str) -> None:
        rows = sets[name]
        for i in range(12):
            time.sleep(0.002 * ((rank * 7 + i * (3 if name == "one" else 5)) % 4))
            rows.out.fill_(-1.0)
            end = ends(lambda: movers[name](rows.src, out=rows.out))
            said[name].append(end or ("WRONG" if rows.wrong() else ""))

    _in_threads({name: lambda name=name: use(name) for name in said})  # type: ignore[misc]
    return said


def named_shardmath(rank: int) -> list[Said]:
    """A move by a thread that the program calls "shardmath"."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0)
    said: list[Said] = []
    _in_threads({"shardmath": lambda: said.append(ends(lambda: move(rows.src, out=rows.out)))})
    return said


def numbered(rank: int) -> list[str]:
    """Default names of threads made before and after moves with a timeout, a move in the background, and a group."""
    rows, group = Rows(rank, 2, 64), dist.new_group()
    names = [threading.Thread().name]
    move = smt.compile(rows.plan, group=group, commit="all", timeout=20.0)
    move(rows.src, out=rows.out, timeout=30.0)
    move(rows.src, out=rows.out, async_op=True).wait()
    move.close()
    return [*names, threading.Thread().name]


def handled(rank: int) -> list[Said]:
    """A signal handler on rank 0 raises RuntimeError, as torch does, while data are sent; then what each rank says."""
    rows = Rows(rank, 2, 64)
    move = smt.compile(rows.plan, timeout=8.0)
    if rank == 0:
        plain = dist.ProcessGroup.send

        def fail(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            if tag % 32 == 0:
                raise RuntimeError("from a handler")
            return plain(group, tensors, peer, tag)

        dist.ProcessGroup.send = fail  # type: ignore[method-assign]
    return [ends(lambda: move(rows.src, out=rows.out))]


def forked(rank: int) -> Said:
    """A forked child calls the mover; the parent moves on."""
    rows = Rows(rank, 2, 16)
    move = smt.compile(rows.plan, timeout=8.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, ends(lambda: move(rows.src, out=rows.out)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 1000).decode()
    move(rows.src, out=rows.out)
    return said if not rows.wrong() else "WRONG"


def forked_beside(rank: int) -> Said:
    """A child is forked during a move in the background, and ends as Python does; the move, and another, continue."""
    rows = Rows(rank, 2, 16)
    move = smt.compile(rows.plan, timeout=20.0, group=dist.new_group())
    if rank == 0:
        handle = move(rows.src, out=rows.out, async_op=True)
        child = os.fork()
        if child == 0:
            _wait_for_all()
            os._exit(0)
        os.waitpid(child, 0)
        dist.barrier()
        handle.wait()
    else:
        # Until then the other rank's move waits for this one's.
        dist.barrier()
        move(rows.src, out=rows.out)
    move(rows.src, out=rows.out)
    return "WRONG" if rows.wrong() else ""


def forked_in_progress(rank: int) -> tuple[int, Said]:
    """A progress function forks a child, which returns from it; the child's status, and the move after that."""
    rows, statuses = Rows(rank, 2, 64), []
    move = smt.compile(rows.plan, timeout=20.0)

    def fork(*_: int) -> None:
        if rank == 0 and not statuses:
            child = os.fork()
            if child:
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    move(rows.src, out=rows.out, progress=fork)
    rows.out.fill_(-1.0)
    said = ends(lambda: move(rows.src, out=rows.out))
    return sum(statuses), said or ("WRONG" if rows.wrong() else "")


def forked_inside(rank: int, at: str) -> tuple[list[int], list[Said]]:
    """Rank 1 forks a child in a block of `smt.commit` or of the mover, or as a signal handler would in a vote or once
    all bytes are there; the child leaves by sys.exit. Its status, how the block ended, and the move after that."""
    rows, statuses, process = Rows(rank, 2, 64), [], os.getpid()
    move = smt.compile(rows.plan, commit="all", timeout=8.0)

    def fork() -> None:
        if rank == 1 and not statuses:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            # The child leaves before this rank goes on.
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def forking(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            fork()
            return plain(*arguments)

        return call

    def act() -> None:
        with smt.commit(move):
            move(rows.src, out=rows.out)
            if at == "commit":
                fork()
        if at == "mover":
            with move:
                fork()

    if at == "vote":
        GlooWire.gather = forking(GlooWire.gather)  # type: ignore[method-assign]
    if at == "promise":
        Record.ask = forking(Record.ask)  # type: ignore[method-assign]
    said = [ends(act)]
    if os.getpid() != process:
        os._exit(7 if said == ["SystemExit: 7"] else 1)
    said.append("WRONG" if rows.wrong() else "")
    # The mover was closed.
    move = smt.compile(rows.plan, commit="all", timeout=8.0)
    rows.out.fill_(-1.0)
    said.append(ends(lambda: move(rows.src, out=rows.out)) or ("WRONG" if rows.wrong() else ""))
    # Rank 0's process serves the store in which the decision is.
    dist.barrier()
    return statuses, said


def forked_first(rank: int) -> tuple[Said, Said]:
    """A child forked before anything was compiled asks to compile; then the ranks themselves do."""
    rows, said = Rows(rank, 2, 64), ""
    dist.barrier()
    if rank == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, ends(lambda: smt.compile(rows.plan, timeout=4.0)).encode())
            os._exit(0)
        os.close(writing)
        said = os.read(reading, 1000).decode()
        os.waitpid(child, 0)

    def move() -> None:
        smt.compile(rows.plan, timeout=20.0)(rows.src, out=rows.out)
        assert not rows.wrong()

    return said, ends(move)


def copies(rank: int) -> list[Said]:
    """A mover copied in three ways."""
    move = smt.compile(Rows(rank, 8, 64).plan)
    acts = (copy.copy, copy.deepcopy, pickle.dumps)
    return [ends(lambda act=act: act(move)) for act in acts]  # type: ignore[misc]


def needed_again(rank: int) -> Said:
    """A backward needs what a move has written over."""
    rows = Rows(rank, 8, 64)
    move = smt.compile(rows.plan)
    weight = torch.zeros_like(rows.out, requires_grad=True)
    loss = (weight * rows.out).sum()
    move(rows.src, out=rows.out)
    return ends(loss.backward)


def odd_numbers(rank: int) -> list[Said]:
    """Seconds and bytes as numpy has them; an engine that is an array, on one rank."""
    rows = Rows(rank, 8, 64)
    group = dist.new_group()
    move = smt.compile(rows.plan, commit="all", group=group)

    def commit() -> None:
        with smt.commit(move, timeout=np.float32(20)):
            move(rows.src, out=rows.out)

    def wait() -> None:
        handle = move(rows.src, out=rows.out, async_op=True)
        assert handle is not None
        # With the clock's seconds that is infinite, if it is added as it is.
        handle.wait(timeout=np.float16(60_000))

    def compiled(**given: Any) -> None:
        smt.compile(rows.plan, **given)(rows.src, out=rows.out)
        assert not rows.wrong()

    engine = np.zeros(2) if rank == 3 else "auto"
    said = [
        ends(lambda: compiled(timeout=np.int64(20), max_inflight_bytes=np.int64(4096))),
        ends(lambda: compiled(timeout=np.float32(20))),
        ends(lambda: compiled(engine=engine)),
        ends(compiled),
        ends(lambda: move(rows.src, out=rows.out, timeout=np.float32(20))),
        ends(commit),
        ends(wait),
        ends(lambda: move(rows.src, out=rows.out, timeout=np.complex64(20))),
    ]
    dist.destroy_process_group(group)
    return said


class Unspeakable(str):
    """A text that cannot be shown, nor written as bytes."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def encode(self, *_: object, **__: object) -> bytes:
        """Never."""
        raise RuntimeError("no bytes")


def labels(rank: int) -> list[Said]:
    """Labels that differ, one that is not a text, and one of a class that raises; what `last` then has."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0)

    def say(label: Any) -> Said:
        return ends(lambda: move(rows.src, out=rows.out, label=label))

    differ = say(f"step {rank}")
    assert move.last is not None
    found = [
        differ,
        move.last.label,
        say(torch.ones(2) if rank == 3 else ""),
        say(Unspeakable("step 1")),
    ]
    return [*found, str.__str__(move.last.label), type(move.last.label).__name__]


def odd_arguments(rank: int) -> list[Said]:
    """Ranks 1 and 3 pass what is none of what it should be; then all move."""
    rows, odd = Rows(rank, 8, 16), rank in (1, 3)
    move = smt.compile(rows.plan, timeout=20.0)
    kinds: tuple[dict[str, Any], ...] = (
        {"thread": 5},
        {"thread": b"x" * 100},
        {"max_inflight_bytes": 1 << 20000},
    )
    said = []
    for how in kinds:
        given = how if odd else {}
        said.append(ends(lambda given=given: smt.compile(rows.plan, timeout=20.0, **given)))  # type: ignore[misc]
    wrong: Any = torch.ones(2) if odd else False
    said.append(ends(lambda: move(rows.src, out=rows.out, acknowledge=wrong)))
    said.append(ends(lambda: move(rows.src, out=rows.out)) or ("WRONG" if rows.wrong() else ""))
    return said


def given_names(rank: int) -> list[Said]:
    """Two living threads of a rank move under one given name; then, by a mover without, one of a long name."""
    rows = Rows(rank, 8, 16)
    move = smt.compile(rows.plan, timeout=20.0, thread="refit")
    said: list[Said] = []
    done = threading.Event()

    def first() -> None:
        said.append(ends(lambda: move(rows.src, out=rows.out)))
        done.wait(20.0)

    def second() -> None:
        while not said:
            time.sleep(0.001)
        said.append(ends(lambda: move(rows.src, out=rows.out)))
        done.set()

    _in_threads({"a": first, "b": second})
    other = smt.compile(rows.plan, timeout=20.0)
    name = "\U0001f600" * 60 + "ab"[rank % 2]
    _in_threads({name: lambda: said.append(ends(lambda: other(rows.src, out=rows.out)))})
    return said


def out_of_step(rank: int) -> list[Said]:
    """Two kinds of redistribute, of which ranks ask for different ones once; then both, twice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (8,))
    held = [distribute_tensor(torch.arange(64.0 + n), mesh, [Shard(0)]) for n in (0, 1)]

    def moved(kind: int) -> Said:
        found: list[torch.Tensor] = []

        def act() -> None:
            there: Any = smt.redistribute(held[kind], [Replicate()])
            found.append(there.to_local())

        said = ends(act)
        return said or ("" if torch.equal(found[0], torch.arange(64.0 + kind)) else "WRONG")

    return [moved(0), moved(rank % 2), *(moved(kind) for kind in (0, 1, 0, 1))]


def namesakes(rank: int) -> list[Said]:
    """A mover used by two living threads of one name, and by two threads that both ranks name alike by hand."""
    rows = Rows(rank, 8, 16)
    move, shared = (
        smt.compile(rows.plan, timeout=20.0),
        smt.compile(rows.plan, timeout=20.0, thread="refit"),
    )
    said: list[Said] = []
    begun, done = threading.Event(), threading.Event()

    def first() -> None:
        begun.wait(20.0)
        said.append(ends(lambda: move(rows.src, out=rows.out)))
        done.wait(20.0)

    def second() -> None:
        begun.set()
        while not said:
            time.sleep(0.001)
        said.append(ends(lambda: move(rows.src, out=rows.out)))
        done.set()

    pair = [threading.Thread(target=act, name="sync") for act in (first, second)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    _in_threads(
        {f"worker {rank}": lambda: said.append(ends(lambda: shared(rows.src, out=rows.out)))}
    )
    return said
