"""What a process of a soak does: moves of one generation after the other, each looked at.

A generation is a group of processes and the movers that they have compiled. It ends when one is struck, or after its
moves; then a new one is formed, of the survivors and of a process in the place of each that died.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from tests.soak.draw import (
    KINDS,
    SIZE,
    Asked,
    Rng,
    cast,
    change_some,
    cut,
    draw_content,
    draw_sides,
    draw_step,
)

TIMEOUT_S = 4.0


class Strike(NamedTuple):
    """What happens to a rank, in which step, so many seconds after that has begun."""

    rank: int
    way: str
    step: int
    after: float


class Told(NamedTuple):
    """What a process says of a generation: steps that went well, faults, why it ended, and the lanes' versions."""

    steps: int
    faults: list[str]
    ended: str
    versions: dict[str, tuple[int, bool]]
    sent: int


class Held(NamedTuple):
    """What a process holds: bytes of memory, open files, threads."""

    memory: int
    files: int
    threads: int


Tensors = dict[str, torch.Tensor]


class Lane:
    """A mover, what it moves on this rank, and what that should bring."""

    def __init__(self, rng: Rng, kind: str, rank: int, group: Any) -> None:
        self.kind = kind
        self.rank = rank
        self.src, self.dst = draw_sides(rng, kind)
        self.content = {name: draw_content(rng, one) for name, one in self.src.items()}
        self.move = self._compile(group)
        self.source = self._cut(self.src, rounded=False)
        self.out = {name: torch.full_like(one, 1) for name, one in self.expect().items()}
        self.before = _clone(self.out)

    def _compile(self, group: Any) -> Any:
        options: dict[str, Any] = {"group": group, "timeout": TIMEOUT_S}
        if "all" in self.kind:
            options["commit"] = "all"
        if self.kind == "once":
            options["agree"] = "once"
        if "cast" in self.kind:
            return smt.compile_transformed(cast(self.src, self.dst), **options)
        plan = sm.plan(self.src, self.dst)
        if self.kind == "program":
            return smt.compile(sm.schedule(plan), **options)
        if "changes" in self.kind:
            return smt.compile_changes(plan, **options)
        return smt.compile(plan, **options)

    def _cut(self, side: dict[str, sm.Layout], rounded: bool) -> Tensors:
        found = {}
        for name, layout in side.items():
            if self.rank in layout.mesh.ranks:
                content = self.content[name]
                if rounded:
                    content = content.to(torch.bfloat16).to(content.dtype)
                found[name] = cut(content, layout, self.rank)
        return found

    def expect(self) -> Tensors:
        """What this rank's destinations hold once the present content has come."""
        return self._cut(self.dst, rounded="cast" in self.kind)

    def renew(self, rng: Rng) -> None:
        """Other content at the source; the destinations are remembered."""
        self.before = _clone(self.out)
        for name, content in self.content.items():
            if "changes" in self.kind and rng.random() < 0.9:
                change_some(rng, content)
            else:
                self.content[name] = draw_content(rng, self.src[name])
        for name, one in self._cut(self.src, rounded=False).items():
            self.source[name].copy_(one)

    def find_other(self, wanted: Tensors) -> list[str]:
        """The destinations that hold something else in their own cells."""
        other = []
        for name, one in wanted.items():
            layout = self.dst[name]
            for here, _ in layout.boxes(self.rank):
                mine = tuple(slice(*part) for part in here)
                if _bits(self.out[name][mine]) != _bits(one[mine]):
                    other.append(name)
                    break
        return other

    def judge(self) -> str:
        """What is wrong with the destinations after a move that was not refused, and failed; "" for nothing."""
        not_new = set(self.find_other(self.expect()))
        not_old = set(self.find_other(self.before))
        if "all" in self.kind:
            return "some is new and some is old" if not_new and not_old else ""
        silent = (not_new & not_old) - set(self.move.torn)
        return f"torn in silence: {sorted(silent)}" if silent else ""


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _clone(tensors: Tensors) -> Tensors:
    return {name: one.clone() for name, one in tensors.items()}


def join(rank: int, generation: int, port: int) -> None:
    """Be of the generation's group, and of no other."""
    leave()
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    own = dist.PrefixStore(f"generation {generation}", store)
    patience = timedelta(seconds=2 * TIMEOUT_S)
    dist.init_process_group("gloo", timeout=patience, store=own, rank=rank, world_size=SIZE)


def leave() -> None:
    """Be of no group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def move(rank: int, seed: int, steps: int, strike: Strike | None) -> Told:
    """The moves of a generation."""
    rng = np.random.default_rng(seed)
    faults: list[str] = []
    done = 0
    lanes: dict[str, Lane] = {}
    try:
        # The default group stays the soak's own: moves beside need another.
        group = dist.new_group()
        for kind in KINDS:
            lanes[kind] = Lane(rng, kind, rank, group)
        for step in range(steps):
            with _struck(rank, step, strike):
                faults += _take(rng, rank, lanes, group)
            done += 1
        ended = ""
    except (sm.ExchangeError, KeyboardInterrupt) as error:
        ended = f"{type(error).__name__}: {error}"
        faults += [f"{lane.kind}: {wrong}" for lane in lanes.values() if (wrong := lane.judge())]
    versions = {
        kind: (one.move.version, one.move.in_doubt) for kind, one in lanes.items() if "all" in kind
    }
    return Told(done, faults, ended, versions, len(lanes))


@contextmanager
def _struck(rank: int, step: int, strike: Strike | None) -> Iterator[None]:
    """What happens to this rank in the step comes soon after it has begun."""
    if strike is None or (strike.rank, strike.step) != (rank, step):
        yield
        return
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "Ctrl-C": signal.SIGINT}[strike.way]
    timer = threading.Timer(strike.after, lambda: os.kill(os.getpid(), number))
    timer.start()
    yield
    # Whoever was faster than the signal waits for it, and is then where the others are in the next step.
    timer.join()


def _take(rng: Rng, rank: int, lanes: dict[str, Lane], group: Any) -> list[str]:
    """One step, and what is wrong after it."""
    asked = draw_step(rng, list(lanes), {kind: kind for kind in lanes})
    mine = [lanes[name] for name in asked.lanes]
    for lane in mine:
        lane.renew(rng)
    if asked.how == "wrong":
        return _refuse(mine[0], wrong_rank=int(rng.integers(SIZE)))
    if asked.how == "block":
        with smt.commit(group, timeout=TIMEOUT_S):
            for lane in mine:
                lane.move(lane.source, out=lane.out)
    elif asked.how == "beside":
        _move_beside(mine)
    else:
        _call(mine[0], asked)
    found = []
    for lane in mine:
        other = lane.find_other(lane.expect())
        if other:
            found.append(f"{asked.how} of {lane.kind}: {other} did not come")
    return found


def _move_beside(lanes: list[Lane]) -> None:
    """Moves that go on while the process does something with the others on its own."""
    handles = [lane.move(lane.source, out=lane.out, async_op=True) for lane in lanes]
    said = ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        said = str(error)
    for handle in handles:
        handle.wait()
    if said:
        raise sm.ExchangeError(f"the collective beside was broken: {said}")


def _call(lane: Lane, asked: Asked) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "acknowledge": {"acknowledge": True},
        "digest": {"check": "digest"},
        "label": {"label": "a soak's"},
    }[asked.how]
    lane.move(lane.source, out=lane.out, **options)


def _refuse(lane: Lane, wrong_rank: int) -> list[str]:
    """One rank has a tensor too many: an error on all, and nothing has changed anywhere."""
    given = dict(lane.source)
    if lane.rank == wrong_rank:
        given["nobody's"] = torch.zeros(1)
    try:
        lane.move(given, out=lane.out)
    except sm.ExchangeError as error:
        if "nobody's" not in str(error):
            raise
        other = lane.find_other(lane.before)
        # What changed at the source is sent by the next move.
        return [f"refused, and {other} changed: {lane.kind}"] if other else []
    return [f"a wrong call of {lane.kind} was not refused"]


def hold() -> Held:
    """What this process holds now, but for what planning keeps to save time."""
    sm.clear_caches()
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), files, threading.active_count())
