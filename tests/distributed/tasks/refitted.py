"""What workers do with refits that send changes, agree once, or go on beside; and with changes that come to nothing.

Imported by workers, so no pytest here.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.digests.checking import Check
from shardmath_torch.tensors.changes import carrying
from tests.distributed.tasks.breaks import Rows, Said, ends
from tests.distributed.tasks.combined import own_group
from tests.distributed.tasks.commits import NEW, OLD, TORN, Two
from tests.distributed.tasks.refits import (
    Arrays,
    draw,
    engine,
    make,
    overwrite,
    shapes,
    trainer,
)

SLOW_S = 0.4
"""By which a rank comes later than the others."""


class Way(NamedTuple):
    """How a refit is made, and how it is called; `in_block` and whether an engine stores functions besides."""

    options: Mapping[str, Any]
    call: Mapping[str, Any]
    in_block: bool = False
    computes: bool = False


@functools.cache
def plan_refit(computes: bool) -> Any:
    """From 4 trainer ranks to 4 engine ranks."""
    return sm.refit(trainer(range(4)), engine(range(4, 8), computes), shapes())


class Refitted:
    """A refit made ready, and what its tensors hold."""

    def __init__(self, rank: int, way: Way) -> None:
        self.way = way
        self._rank = rank
        self.planned = plan_refit(way.computes)
        group = own_group()
        self.refit = smt.Refit(self.planned, timeout=30.0, group=group, **way.options)
        self.arrays = draw(0)
        self.src: list[dict[str, Tensor]] | None = None
        self.dst: dict[str, Tensor] | None = None

    def take_others(self) -> None:
        """Other tensors, of which the trainer's hold what they should."""
        if self._rank < 4:
            self.src = make(self.planned.trainer, self.arrays, self._rank)
        else:
            nothing = {name: array * 0 for name, array in self.arrays.items()}
            (self.dst, _) = make(self.planned.engines["engine"], nothing, self._rank)

    def prepare(self) -> None:
        self.refit.prepare(self.src, self.dst)

    def change(self, step: int, share: float) -> None:
        """Other numbers in some cells, on all ranks alike."""
        random = np.random.default_rng(step)
        new: Arrays = {}
        for name, array in draw(step).items():
            new[name] = np.where(random.random(array.shape) < share, array, self.arrays[name])
        self.arrays = new
        if self.src is not None:
            overwrite(self.src, make(self.planned.trainer, new, self._rank))

    def step(self) -> None:
        """A step as the way has it, to its end."""
        block: AbstractContextManager[None] = nullcontext()
        if self.way.in_block:
            block = smt.commit(self.refit)
        with block:
            handle = self.refit(**self.way.call)
        if handle is not None:
            handle.wait()

    def wrong(self) -> list[str]:
        """The engine's tensors that are not as they should be."""
        if self.dst is None:
            return []
        side = self.planned.engines["engine"]
        (wanted, _) = make(side, self.arrays, self._rank, functions=self.way.computes)
        found = []
        for name, tensor in wanted.items():
            # A function is as exact as torch and numpy agree.
            close = torch.allclose if ".o_proj." in name else torch.equal
            if not close(self.dst[name], tensor):
                found.append(name)
        return found


def steps(rank: int, ways: list[Way]) -> list[list[Any]]:
    """Of each way what is wrong after each of some steps, before two of which other tensors are prepared."""
    return [_step(Refitted(rank, way)) for way in ways]


def _step(one: Refitted) -> list[Any]:
    found: list[Any] = []
    for step, share in enumerate((1.0, 0.02, 0.0, 1.0, 0.02)):
        if step in (0, 3):
            one.take_others()
            one.prepare()
        one.change(step, share)
        said = ends(one.step)
        found.append(said or one.wrong())
        changes = one.refit.changes
        if changes is not None and changes.last is not None and not said:
            found[-1] = found[-1] or _find_odd(changes, step, share)
            whole = changes._sparse._whole
            assert not (whole._shadows and whole._shadows.tensors), "let go of"
    version = one.refit.version
    expected = 5 if one.way.options.get("commit") == "all" else 0
    found.append("" if version == expected else f"version {version}")
    return found


def _find_odd(changes: Any, step: int, share: float) -> str:
    """What is odd of what was sent: everything first, and less from then on."""
    sent = changes.last
    everything = sum(m.nbytes for one in changes._ready.part.rounds for m in one.sends)
    is_right = sent.nbytes == everything if step in (0, 3) else sent.nbytes <= everything * 0.8
    if share == 0.0:
        is_right = sent.nbytes == 0
    return "" if is_right else f"step {step}: {sent.nbytes} bytes of {everything}"


def in_one_name(rank: int) -> list[Any]:
    """What is wrong after steps by a refit that goes by one name, in the main thread of even ranks, and in a thread of
    another name on odd ranks."""
    found: list[list[Any]] = []

    def act() -> None:
        found.append(_step(Refitted(rank, Way({"thread": "refit", "changes": True}, {}))))

    thread = threading.Thread(target=act, name=f"worker {rank}")
    if rank % 2:
        thread.start()
        thread.join()
    else:
        act()
    return found[0]


def prepare_meanwhile(rank: int) -> list[Any]:
    """Other tensors are prepared while a step goes on beside, for which rank 1 is late: those of the step have come,
    and the next step is of the others."""
    one = Refitted(rank, Way({}, {}, computes=True))
    one.take_others()
    one.prepare()
    if rank == 1:
        time.sleep(SLOW_S)
    handle: Any = one.refit(async_op=True)
    first = one.dst
    one.take_others()
    second, one.dst = one.dst, first
    one.refit.prepare(one.src, second)
    found: list[Any] = [ends(handle.wait) or one.wrong()]
    one.dst = second
    one.change(1, 1.0)
    one.step()
    return [*found, one.wrong()]


def object_beside(rank: int) -> list[Said]:
    """A step beside of which rank 5's tensors are others than were prepared, and one that was not prepared."""
    one = Refitted(rank, Way({}, {"async_op": True}))
    said = [ends(one.step)]
    one.take_others()
    one.prepare()
    if rank == 5:
        assert one.dst is not None
        one.dst["lm_head.weight"].data = torch.ones(3, 8)
    said.append(ends(one.step))
    return said


def count_votes(rank: int) -> list[Any]:
    """The votes of preparing and of a step, twice, of other tensors: of ranks that agree once, and every time."""
    found = []
    for agree in ("once", "every"):
        one = Refitted(rank, Way({"agree": agree}, {}))
        counts: list[int] = []
        for _ in range(2):
            one.take_others()
            for act in (one.prepare, one.step):
                with mock.patch.object(
                    Party, "vote", autospec=True, side_effect=Party.vote
                ) as vote:
                    act()
                counts.append(vote.call_count)
            assert not one.wrong()
            one.refit.release()
        found.append(counts)
    return found


def prepare_wrongly(rank: int, agree: str) -> list[Said]:
    """Rank 5 prepares what does not fit, in the place of what did: what is said of that, of a step, of preparing again
    and of another step."""
    one = Refitted(rank, Way({"agree": agree}, {}))
    one.take_others()
    one.prepare()
    one.step()
    kept = None if one.dst is None else dict(one.dst)
    if rank == 5:
        assert one.dst is not None
        one.dst["lm_head.weight"] = torch.ones(3, 7)
    said = [ends(one.prepare), ends(one.step)]
    one.dst = kept
    return [*said, ends(one.prepare), ends(one.step) or "WRONG" * bool(one.wrong())]


def refuse_functions(rank: int) -> Said:
    """What is said of functions where changes are committed."""
    one = Refitted(rank, Way({"changes": True, "commit": "all"}, {}, computes=True))
    one.take_others()
    return ends(one.prepare)


# Changes that come to nothing


def holds(two: Two, times: list[float]) -> str:
    """Of which of these its destination is; the last is new."""
    for scale, name in ((times[-1], NEW), *((one, OLD) for one in times[:-1])):
        if two.holds(scale, scale) == NEW:
            return f"{name} {scale}"
    return TORN


STEPS = (
    (1.0, True, False),
    (2.0, False, False),
    (3.0, True, False),
    (2.0, False, False),
    (3.0, True, True),
    (3.0, False, False),
    (4.0, True, False),
    (5.0, False, False),
    (5.0, False, False),
)
"""By how much sources are multiplied, whether the block comes to nothing, and whether it moves all."""


def come_to_nothing(rank: int) -> list[str]:
    """Blocks of changes, some of which come to nothing, after which sources may have again what they had."""
    two = Two(rank, 8, kind="changes")
    other = Two(rank, 8, rows=8)
    send = two.compile(timeout=20.0, commit="all")
    move = other.compile(timeout=20.0, commit="all")

    def block(fails: bool, whole: bool) -> None:
        with smt.commit(send, move):
            send(two.src, out=two.out, whole=whole)
            move(other.src, out=other.out)
            if fails and rank == 1:
                raise ValueError("mine")

    found = []
    in_place = 0.0
    for times, fails, whole in STEPS:
        two.scale(times)
        said = ends(functools.partial(block, fails, whole))
        if not fails:
            in_place = times
        is_right = two.holds(in_place, in_place) == NEW and bool(said) == fails
        found.append("" if is_right else f"{times}: {said} {holds(two, [in_place])}")
    assert send.last is not None
    return [*found, "" if send.last.nbytes == 0 else "sent again", str(send.version)]


def found_wrong(rank: int) -> list[str]:
    """A comparison finds other bytes at rank 1 than were sent; the next call of all ranks repairs them."""
    rows = Rows(rank, 8, 16)
    send = smt.compile_changes(rows.plan, timeout=20.0)
    send(rows.src, out=rows.out, check="digest")
    rows.src += 1.0
    rows.want = rows.want + 1.0

    def spoil(self: Check) -> None:
        rows.out[0] += 100.0
        end(self)

    end = Check.end
    with mock.patch.object(Check, "end", spoil if rank == 1 else end):
        said = [ends(lambda: send(rows.src, out=rows.out, check="digest"))]
    said.append(ends(lambda: send(rows.src, out=rows.out, check="digest")))
    return [*said, "WRONG" if rows.wrong() else ""]


def lack_memory(rank: int, where: str) -> list[str]:
    """Rank 1 cannot make a snapshot, or cannot bring it up to date: what is said of that call, and of later ones."""
    rows = Rows(rank, 8, 16)
    send = smt.compile_changes(rows.plan, timeout=20.0)

    def lack(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for a snapshot")

    patched: dict[str, Callable[[], Any]] = {
        "making": lambda: mock.patch.object(carrying, "Snapshots", lack),
        "updating": lambda: mock.patch.object(carrying.Snapshots, "update", lack),
    }

    def call(**options: Any) -> Said:
        rows.src += 1.0
        rows.want = rows.want + 1.0
        return ends(lambda: send(rows.src, out=rows.out, **options)) or "WRONG" * rows.wrong()

    found = [call()] if where == "updating" else []
    with patched[where]() if rank == 1 else nullcontext():
        found.append(call())
    if where == "making":
        # Nobody has sent anything but all of it.
        found.append("")
    return [*found, call(), call(whole=True), call()]
