"""What workers do where ranks tell each other objects, and one of them leaves. No pytest here."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import shardmath as sm
import shardmath_torch as smt
from shardmath_gloo.wire import GlooWire
from shardmath_torch.checkpoints import checkpoint
from shardmath_torch.checkpoints.files.steps import on_all
from shardmath_torch.groups.agreement.gather import PIECE, gather, shared
from tests.distributed.tasks.breaks import Said, ends

ROWS = sm.Layout((8, 6), sm.Mesh(tp=2), "(tp n) h")


def objects(rank: int) -> list[bool]:
    """Objects of many sizes, each rank's of another one."""
    right = []
    for size in (0, 1, 600, 1000, PIECE - 1, PIECE, 3 * PIECE + 5):
        said = [(other, os.fsencode(str(other)) * (size + other)) for other in range(8)]
        right.append(gather(said[rank], None) == said)
    return right


class Unprintable:
    """What cannot be pickled, for a reason that cannot be printed."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise self

    def __reduce__(self) -> str:
        raise self.Silent


def odd_objects(rank: int) -> list[Said]:
    """What cannot be pickled, for two reasons, what is for something else, and then what all can say."""
    odd: Any = (lambda: None) if rank == 3 else "x"
    silent: Any = Unprintable() if rank == 5 else "x"
    what = "load" if rank < 4 else "save"
    acts = (
        lambda: gather(odd, None),
        lambda: gather(silent, None),
        lambda: gather("x", None, what),
        lambda: gather("x", None),
    )
    return [ends(act) for act in acts]


def left(rank: int, at: int) -> list[Said]:
    """Rank 1 is interrupted in the second gather, in its vote or in one of the pieces; then both go on."""
    gather("x", None)
    real = GlooWire.gather
    calls = 0

    def interrupted(*arguments: Any) -> list[bytes]:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at:
            raise KeyboardInterrupt
        return real(*arguments)

    GlooWire.gather = interrupted  # type: ignore[method-assign]
    return [ends(lambda: gather(b"x" * 3 * PIECE, None)) for _ in range(3)]


def waiting(rank: int) -> tuple[Said, float]:
    """Rank 0 is stopped by Ctrl-C while it waits for a rank that comes much later; rank 1 comes then."""
    gather("x", None)
    if rank == 1:
        time.sleep(4.0)
        return ends(lambda: gather("x", None)), 0.0
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    start = time.monotonic()
    return ends(lambda: gather("x", None)), time.monotonic() - start


def lost(rank: int, kind: str) -> Said:
    """Rank 1 ends; then rank 0's step is left by an interrupt, or by an error."""
    gather("x", None)
    if rank == 1:
        os._exit(1)
    time.sleep(0.5)

    def act() -> None:
        raise KeyboardInterrupt if kind == "Ctrl-C" else ValueError("its own")

    try:
        on_all("act", act, None)
    except BaseException as error:
        return f"{type(error).__name__}, {type(error.__cause__).__name__}"
    return ""


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def steps(rank: int, path: str, call: str) -> tuple[list[Said], float]:
    """Rank 1 is interrupted in a step of the call; both call again, and load. Then the seconds of the first."""
    tensors = {"w": torch.full((4, 6), 1.0)}
    layouts = {"w": ROWS}
    smt.save(f"{path}/saved", tensors, layouts)
    progress: Any = _interrupt if rank == 1 else None
    calls: dict[str, Callable[[Any], object]] = {
        "save": lambda told: smt.save(f"{path}/other", tensors, layouts, progress=told),
        "load": lambda told: smt.load(f"{path}/saved", layouts, progress=told),
        "export": lambda told: smt.export(
            f"{path}/model", {**tensors, "v": tensors["w"]}, {**layouts, "v": ROWS},
            max_shard_size=1, progress=told,
        ),
    }  # fmt: skip
    start = time.monotonic()
    said = [ends(lambda: calls[call](progress))]
    took = time.monotonic() - start
    said += [ends(lambda: calls[call](None)), ends(lambda: calls["load"](None))]
    return said, took


def between(rank: int, path: str) -> list[Said]:
    """Rank 1 is interrupted between two steps of a load; both load again."""
    smt.save(path, {"w": torch.full((4, 6), 1.0)}, {"w": ROWS})
    if rank == 1:
        checkpoint.gather_all = _interrupt  # type: ignore[attr-defined]
    return [ends(lambda: smt.load(path, {"w": ROWS})) for _ in range(2)]


def in_torch(rank: int, path: str) -> list[Said]:
    """Rank 1 is interrupted between two of torch's own collectives; both save again."""
    from torch.distributed import distributed_c10d as c10d

    if rank == 1:
        c10d.gather = _interrupt
    return [ends(lambda: smt.save(path, {"w": torch.ones(4, 6)}, {"w": ROWS})) for _ in range(2)]


def forked(rank: int) -> Said:
    """A forked child makes a DTensor without a DeviceMesh; then the ranks do."""
    rows = torch.ones(4, 6)
    said = ""
    if rank == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, ends(lambda: smt.to_dtensor(rows, ROWS)).encode())
            os._exit(0)
        said = os.read(reading, 1000).decode()
        os.waitpid(child, 0)
    smt.to_dtensor(rows, ROWS)
    return said


def threads(rank: int, kind: str, alike: bool, path: str) -> dict[str, Any]:
    """Threads A and B do the same thing one after the other; on rank 1 B comes first, unless `alike`."""
    gather("x", None)
    ends_of: dict[str, Any] = {}
    acts = {"gather": _gather_name, "steps": _gather_in_steps, "save": _save_name}

    def run() -> None:
        name = threading.current_thread().name
        try:
            ends_of[name] = acts[kind](name, path, rank)
        except sm.ShardError as error:
            ends_of[name] = str(error)

    names = ["A", "B"] if alike or rank == 0 else ["B", "A"]
    started = [threading.Thread(target=run, name=name) for name in names]
    for thread in started:
        thread.start()
        time.sleep(0.5)
    for thread in started:
        thread.join()
    if kind == "save":
        for name in sorted(ends_of):
            if ends_of[name] is True:
                ends_of[name] = _has_saved(name, path)
    return ends_of


def _gather_name(name: str, path: str, rank: int) -> bool:
    """Whether all ranks say the same name."""
    return gather(name, None) == [name, name]


def _gather_in_steps(name: str, path: str, rank: int) -> bool:
    """The same at each of two steps, the second of which is late on rank 1."""
    with shared(None):
        first = _gather_name(name, path, rank)
        time.sleep(0.5 * rank)
        return first and _gather_name(name, path, rank)


def _make_rows(name: str) -> torch.Tensor:
    return torch.full((4, 6), float(ord(name)))


def _save_name(name: str, path: str, rank: int) -> bool:
    smt.save(f"{path}/{name}", {name: _make_rows(name)}, {name: ROWS})
    return True


def _has_saved(name: str, path: str) -> bool:
    """Whether what the thread saved is what all ranks now load."""
    loaded = smt.load(f"{path}/{name}", {name: ROWS})
    return loaded[name].equal(_make_rows(name))
