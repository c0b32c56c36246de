"""What processes of several jobs do in joint groups. Imported by workers, so no pytest here."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath.formats import FP8Blocks
from shardmath.models.systems.megatron import megatron
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement import notes
from shardmath_torch.groups.agreement.gather import gather
from tests.distributed.tasks.breaks import Rows, Said, ends
from tests.distributed.tasks.device import BACKEND, DEVICE
from tests.distributed.tasks.nccl_lines import over_gloo
from tests.distributed.tasks.refits import LAYERS, _compare, draw, engine, make, overwrite, shapes

TIMEOUT_S = 20.0

Find = Callable[[dist.ProcessGroup, int], Any]
"""What a rank finds in the group, at its place."""


def joined(rank: int, where: str, first: int, size: int, name: str, find: Find, *args: Any) -> Any:
    """What this rank of its job finds in a joint group, in which the job's ranks begin at `first`."""
    place = first + rank
    group = smt.connect(where, place, size, timeout=TIMEOUT_S, name=name, backend=BACKEND)
    try:
        assert (group.rank(), group.size()) == (place, size)
        found = find(group, place, *args)
        # Nobody leaves before all have what was sent to them.
        gather("", group, "end")
        return found
    finally:
        smt.disconnect(group)


def moves(group: dist.ProcessGroup, place: int, engine: str) -> list[Said]:
    """Moves in every way but beside, each compared; a digest, what ranks say, and who is where."""
    rows = Rows(place, group.size(), 16)
    found = []
    ways: list[dict[str, Any]] = [{}, {"commit": "all"}, {"agree": "once"}]
    for how in ways:
        move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S, engine=engine, **how)
        for check in (None, "digest", None):
            rows.out.fill_(-1.0)
            said = ends(lambda: move(rows.src, out=rows.out, check=check))  # noqa: B023
            found.append(said or ("WRONG" if rows.wrong() else ""))
    held = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S, commit="all")
    rows.out.fill_(-1.0)
    with smt.commit(held):
        held(rows.src, out=rows.out)
    found.append("WRONG" if rows.wrong() else "")
    number = smt.digest(rows.plan.dst[""], rows.out, group=group)
    whole = torch.arange(float(16 * 4 * group.size())).view(16, -1)
    alone = sm.Layout(tuple(whole.shape), sm.Mesh(tp=1), "n h")
    wanted = sm.content.digest_of(alone, {0: whole.cpu().numpy()})
    found.append("" if number == wanted else "another digest")
    found.append("" if gather(place, group) == list(range(group.size())) else "other ranks")
    total = torch.tensor([place], device=DEVICE)
    dist.all_reduce(total, group=group)
    found.append("" if total.item() == sum(range(group.size())) else "another sum")
    dist.broadcast(total.fill_(place), group_src=2, group=group)
    found.append("" if total.item() == 2 else "not that of place 2")
    places = torch.arange(float(group.size()), device=DEVICE)
    gathered = torch.empty_like(places)
    dist.all_gather_into_tensor(gathered, places[place : place + 1], group=group)
    found.append("" if gathered.equal(places) else "other places")
    mine = torch.empty(1, device=DEVICE)
    dist.reduce_scatter_tensor(mine, places, group=group)
    found.append("" if mine.item() == place * group.size() else "another part of the sum")
    return found


def changes(group: dist.ProcessGroup, place: int) -> list[Said]:
    """What has changed at the sources is sent, and nothing else but for the first time."""
    size = group.size()
    rows = Rows(place, size, 16)
    layout, there = rows.plan.src[""][0], rows.plan.dst[""][0]
    whole = torch.arange(float(16 * 4 * size), device=DEVICE).view(16, -1)
    send = smt.compile_changes(rows.plan, group=group, timeout=TIMEOUT_S)
    found = []
    for step in range(3):
        said = ends(lambda: send(rows.src, out=rows.out))
        found.append(said or ("WRONG" if rows.wrong() else ""))
        assert send.last is not None
        found.append("" if bool(send.last.whole) == (step == 0) else "all of it again")
        whole[step::4, step] += 1.0
        rows.src.copy_(whole[layout.indices(place)[0]])
        rows.want = whole[:, there.indices(place)[1]]
    return found


def quantizes(group: dist.ProcessGroup, place: int) -> Said:
    """Blocks that ranks cut have the scales that the whole tensor's have."""
    layout = sm.Layout((10, 64), sm.Mesh(tp=group.size()), "(tp n) k", dtype="float32")
    whole = torch.linspace(-3.0, 5.0, 640).view(10, 64).to(DEVICE)
    make = smt.compile_quantize(FP8Blocks((4, 32)), layout, group=group, timeout=TIMEOUT_S)
    made = make(_part(whole, layout, place))
    wanted = smt.quantize(FP8Blocks((4, 32)), whole)
    for one, all_of_it, lies in zip(made, wanted, make.amaxes.layouts, strict=True):
        same = torch.uint8 if lies.dtype != "float32" else torch.float32
        if not torch.equal(one.view(same), _part(all_of_it.view(same), lies, place)):
            return "WRONG"
    return ""


def _part(whole: Tensor, layout: sm.Layout, rank: int) -> Tensor:
    """The rank's own."""
    rows, columns = layout.indices(rank)
    return whole[list(rows)][:, list(columns)].clone()


def refits(group: dist.ProcessGroup, place: int) -> list[Any]:
    """Steps from 2 trainers to 2 engines that send changes, commit together, agree once and go on beside."""
    trainer = megatron(LAYERS, ranks=range(2), tp=2, pp=1, ep=2, etp=1, vocab=10, vocab_multiple=1)
    planned = sm.refit(trainer, engine(range(2, 4), computes=False), shapes())
    refit = smt.Refit(
        planned, group=group, timeout=TIMEOUT_S, changes=True, commit="all", agree="once"
    )
    arrays = draw(0)
    src = dst = None
    if place < 2:
        src = make(planned.trainer, arrays, place)
    else:
        nothing = {name: array * 0 for name, array in arrays.items()}
        (dst, _) = make(planned.engines["engine"], nothing, place)
    refit.prepare(src and src[0], dst)
    found: list[Any] = []
    for step in range(3):
        if src is not None:
            overwrite(src, make(planned.trainer, arrays, place))
        if step % 2:
            handle = refit(async_op=True, check="digest")
            assert handle is not None
            handle.wait()
        else:
            refit(check="digest")
        if dst is not None:
            (wanted, _) = make(planned.engines["engine"], arrays, place)
            found += _compare(dst, wanted)
        for array in arrays.values():
            array.flat[step] += 1.0
    return [*found, refit.version]


def beside(group: dist.ProcessGroup, place: int, turns: int) -> list[Said]:
    """Moves in the job's own default group, and in the joint one, by two threads at once."""
    found: list[Said] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    own, joint = Rows(rank, size, 8, 3.0), Rows(place, group.size(), 16)
    movers = {
        "own": smt.compile(own.plan, timeout=TIMEOUT_S, thread="own"),
        "joint": smt.compile(joint.plan, timeout=TIMEOUT_S, thread="joint", group=group),
    }

    def use(name: str, rows: Rows) -> None:
        for _ in range(turns):
            rows.out.fill_(-1.0)
            said = ends(lambda: movers[name](rows.src, out=rows.out))
            found.append(said or ("WRONG" if rows.wrong() else ""))

    threads = [threading.Thread(target=use, args=it) for it in (("own", own), ("joint", joint))]
    for thread in threads:
        thread.start()
    for _ in range(turns):
        total = torch.ones(1)
        # A collective of torch's own on the joint group would meet ours there; on another group it may.
        dist.all_reduce(total, group=_third())
        found.append("" if total.item() == size else "WRONG")
    for thread in threads:
        thread.join()
    return found


_made: list[Any] = []


def _third() -> Any:
    """A group of the job besides its default one, in which our votes go."""
    if not _made:
        _made.append(dist.new_group())
    return _made[0]


def nccl_lines(group: dist.ProcessGroup, place: int) -> Said:
    """The lines of the NCCL wire, over gloo in NCCL's place."""
    rows = Rows(place, group.size(), 16)
    with over_gloo():
        move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S)
        said = ends(lambda: move(rows.src, out=rows.out))
    return said or ("WRONG" if rows.wrong() else "")


def disconnected(group: dist.ProcessGroup, place: int) -> list[Said]:
    """What comes of everything that is asked of a group that has ended, as after a move beside."""
    rows = Rows(place, group.size(), 16)
    move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S)
    move(rows.src, out=rows.out, acknowledge=True)
    handle: Any = move(rows.src, out=rows.out, async_op=True, acknowledge=True)
    handle.wait()
    other = smt.connect(dist.HashStore(), 0, 1)  # of this process alone, and of the same class
    smt.disconnect(other)
    smt.disconnect(other)
    mine = Rows(0, 1, 4)
    return [
        ends(lambda: smt.compile(mine.plan, group=other)),
        ends(lambda: gather("", other)),
        ends(lambda: smt.digest(mine.plan.src[""], mine.src, group=other)),
        ends(lambda: other.allreduce([torch.ones(1)])),
        ends(lambda: smt.save("/nowhere", {}, {}, group=group)),
        ends(lambda: smt.disconnect(dist.group.WORLD)),
    ]


def waits_for_moves(group: dist.ProcessGroup, place: int) -> list[Said]:
    """A disconnect while a move goes on beside, of which the others are late; then a call of the mover."""
    rows = Rows(place, group.size(), 16)
    move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S)
    if place:
        time.sleep(0.3)
    handle: Any = move(rows.src, out=rows.out, async_op=True, acknowledge=True)
    if place == 0:
        smt.disconnect(group)
        found = ["" if handle.done() and not rows.wrong() else "before its end"]
        return [*found, ends(handle.wait), ends(lambda: move(rows.src, out=rows.out))]
    return ["", ends(handle.wait), ""]


def left_early(rank: int, where: str) -> list[Said]:
    """`waits_for_moves`, of processes without a default group."""
    dist.destroy_process_group()
    group = smt.connect(where, rank, 3, timeout=TIMEOUT_S)
    found = waits_for_moves(group, rank)
    smt.disconnect(group)
    return found


def without_default(rank: int, where: str, size: int) -> list[Said]:
    """Moves of processes that have no default group, and what is asked without a group then."""
    dist.destroy_process_group()
    found: list[Said] = joined(rank, where, 0, size, "", moves, "exchange")
    return [*found, ends(lambda: compat.group_of(None))]


def killed(rank: int, where: str, size: int, victim: int) -> Any:
    """The rank at place `victim` dies in a move; the others go on without, and then with another in its place.

    One more process than the group has is there from the beginning, and comes once the group is full.
    """
    # Places are other numbers than ranks.
    place = (rank + 1) % (size + 1)
    store = dist.distributed_c10d._get_default_store()
    if place == size:
        store.wait(["full"])
        return _take_place(where, size, victim)
    rows = Rows(place, size, 12)
    group = smt.connect(where, place, size, timeout=TIMEOUT_S)
    move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S, commit="all")
    move(rows.src, out=rows.out)
    store.set("full", "")
    if place == victim:
        _die_in_move(lambda: move(rows.src, out=rows.out))
    start = time.monotonic()
    said = ends(lambda: move(rows.src, out=rows.out))
    took = time.monotonic() - start
    smt.disconnect(group)
    alive = [one for one in range(size) if one != victim]
    less = smt.connect(where, alive.index(place), len(alive), timeout=TIMEOUT_S, name="survivors")
    fewer = Rows(alive.index(place), len(alive), 12)
    found = [ends(lambda: move.replan(fewer.plan, group=less))]
    found.append(ends(lambda: move(fewer.src, out=fewer.out, acknowledge=True)))
    found.append("WRONG" if fewer.wrong() else "")
    again = smt.connect(where, place, size, timeout=TIMEOUT_S)
    smt.disconnect(less)
    found.append(ends(lambda: move.replan(rows.plan, group=again)))
    rows.out.fill_(-1.0)
    found.append(ends(lambda: move(rows.src, out=rows.out, acknowledge=True)))
    found.append("WRONG" if rows.wrong() else "")
    return said, took, found, move.version


def _die_in_move(move: Callable[[], Any]) -> None:
    def post(self: Any, memory: Tensor, peer: int, patience: float, step: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(GlooWire, "_receive", post):
        move()


def _take_place(where: str, size: int, place: int) -> Any:
    rows = Rows(place, size, 12)
    group = smt.connect(where, place, size, timeout=TIMEOUT_S)
    move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S, commit="all")
    said = ends(lambda: move(rows.src, out=rows.out, acknowledge=True))
    return said, 0.0, ["WRONG" if rows.wrong() else ""], move.version


def _find_place(where: str) -> Any:
    """The address, or the store that the job has.

    Each connection to a store makes torch look names up, which may take seconds.
    """
    return where or dist.distributed_c10d._get_default_store()


def asks(rank: int, where: str, given: Any) -> tuple[Said, float]:
    """What comes of connecting so; `given` has the place, size and timeout by rank, None for one that stays away."""
    if given[rank] is None:
        return "", 0.0
    place, size, timeout = given[rank]
    start = time.monotonic()
    at = _find_place(where)
    said = ends(lambda: smt.disconnect(smt.connect(at, place, size, timeout=timeout)))
    return said, time.monotonic() - start


def leaves_nothing(rank: int, where: str, rounds: int) -> list[tuple[int, int]]:
    """Open files and threads after a first round and after all, while groups and movers are held."""
    held: list[Any] = []
    counts = []
    for number in range(rounds):
        group = smt.connect(_find_place(where), rank, 2, timeout=TIMEOUT_S)
        rows = Rows(rank, 2, 4)
        commit = "all" if where else "direct"
        move = smt.compile(rows.plan, group=group, timeout=TIMEOUT_S, commit=commit)
        move(rows.src, out=rows.out, acknowledge=True)
        held += [group, move]
        smt.disconnect(group)
        if number in (0, rounds - 1):
            gc.collect()
            # Threads that nobody waits for end by themselves.
            time.sleep(0.2)
            counts.append(_count())
    return counts


def _count() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def forked_meeting(rank: int, address: str) -> tuple[Said, list[str]]:
    """Rank 0's signal handler forks a child while it waits for rank 1; the child leaves by sys.exit. Then a move."""
    process, announced = os.getpid(), []
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), None, is_master=rank == 0, wait_for_workers=False)

    def fork(*_: object) -> None:
        child = os.fork()
        if not child:
            sys.exit(7)
        os.waitpid(child, 0)
        announced.append(notes.read(store, "shardmath/joint//lead") or "")

    if rank == 0:
        signal.signal(signal.SIGALRM, fork)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(0.8)

    def move() -> None:
        group = smt.connect(store, rank, 2, timeout=20.0)
        rows = Rows(rank, 2, 4)
        with smt.compile(rows.plan, group=group, timeout=8.0) as move:
            move(rows.src, out=rows.out)
        assert not rows.wrong()

    said = ends(move)
    if os.getpid() != process:
        os._exit(0)
    return said, announced


def forked(rank: int) -> Said:
    """What a child hears that uses its parent's group."""
    if rank:
        return ""
    group = smt.connect(dist.HashStore(), 0, 1)
    rows = Rows(0, 1, 4)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, ends(lambda: smt.compile(rows.plan, group=group)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    smt.disconnect(group)
    return os.read(reading, 1000).decode()
