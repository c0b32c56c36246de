"""What workers do where a call of several steps is entered again, left, or met by another one. No pytest here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints import checkpoint
from shardmath_torch.checkpoints.exports import sources
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.tensors.dtensors import dtensor
from tests.distributed.tasks.breaks import Said, ends

ROWS = sm.Layout((8, 6), sm.Mesh(tp=2), "(tp n) h")
HELD = {"w": ROWS}


def _tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 6), 1.0)}


def nameless(rank: int) -> list[Said]:
    """The main thread and one whose name is empty say something each, on the ranks in another order."""
    gather("x", None)
    said = []

    def by_thread() -> None:
        said.append(ends(lambda: gather("of a thread", None)))

    def by_main() -> None:
        said.append(ends(lambda: gather("of main", None)))

    thread = threading.Thread(target=by_thread)
    thread.name = ""
    if rank == 0:
        by_main()
    thread.start()
    thread.join()
    if rank == 1:
        by_main()
    return said


def questions(rank: int) -> list[Said]:
    """One rank asks for a DeviceMesh where the others ask for a process group; then the other way round."""
    some = sm.Mesh(a=2, ranks=(0, 1))
    src = sm.Layout((4,), some, "(a n)")
    dst = sm.Layout((4,), sm.Mesh(b=2, ranks=(0, 1)), [sm.Ragged(0, sizes=(1, 3))])
    local = torch.ones(2) if rank < 2 else torch.empty(0)
    acts: list[Callable[[], object]] = [
        lambda: smt.to_dtensor(local, src),
        lambda: smt.redistribute(local, dst, layout=src),
    ]
    if rank:
        acts.reverse()
    return [ends(act) for act in acts]


def nested(rank: int, path: str, outer: str, swallows: bool) -> list[Said]:
    """In a callback of a save or load, rank 0 makes another call; then all load."""
    smt.save(f"{path}/saved", _tensors(), HELD)
    said = []

    def call_again(*_: int) -> None:
        if rank == 1:
            return
        if not swallows:
            smt.load(f"{path}/saved", HELD)
            return
        said.append(ends(lambda: smt.load(f"{path}/saved", HELD)))
        said.append(ends(lambda: gather("x", None)))

    calls: dict[str, Callable[[], object]] = {
        "save": lambda: smt.save(f"{path}/other", _tensors(), HELD, progress=call_again),
        "load": lambda: smt.load(f"{path}/saved", HELD, progress=call_again),
    }
    ended = ends(calls[outer])
    return [*said, ended, ends(lambda: smt.load(f"{path}/saved", HELD))]


def told_twice(rank: int, path: str) -> tuple[list[Said], float]:
    """One exception leaves a step of rank 0, and then another call between two steps."""
    stop = KeyboardInterrupt("the same one")

    def interrupted(*_: object) -> None:
        raise stop

    smt.save(path, _tensors(), HELD)
    said = [ends(lambda: smt.load(path, HELD, progress=interrupted if rank == 0 else None))]
    if rank == 0:
        checkpoint.gather_all = interrupted  # type: ignore[attr-defined]
    start = time.monotonic()
    said.append(ends(lambda: smt.load(path, HELD)))
    took = time.monotonic() - start
    if rank == 0:
        time.sleep(8.0)
    return said, took


def asking(rank: int, path: str, where: str) -> tuple[list[Said], float]:
    """Rank 0 is interrupted while ranks find out how a DTensor lies; then all export again."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = sm.Mesh(dp=2, tp=2)
    layout = sm.Layout((6, 2), mesh, "(tp dp n) h")
    other = sm.Layout((6, 2), mesh, "(dp tp n) h")
    made = smt.to_dtensor(torch.ones(layout.local_shape(rank)), layout, device_mesh=device_mesh)
    dtensor._list_candidates = lambda tensor: [other, layout]
    said = [ends(lambda: smt.export(f"{path}/a", {"w": made}))]
    real: dict[str, Any] = {name: getattr(sources, name) for name in ("ask_group", "from_dtensors")}

    def interrupted(*_: object) -> Mapping[str, DTensor]:
        setattr(sources, where, real[where])
        raise KeyboardInterrupt

    if rank == 0:
        setattr(sources, where, interrupted)
    start = time.monotonic()
    said.append(ends(lambda: smt.export(f"{path}/b", {"w": made})))
    took = time.monotonic() - start
    return [*said, ends(lambda: smt.export(f"{path}/c", {"w": made}))], took


def parts_of_a_mesh(rank: int, path: str) -> list[bool]:
    """DTensors on both axes of a mesh and on one, beside a plain tensor; whether all is read back."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = {name: torch.arange(24.0).reshape(6, 4) + i for i, name in enumerate("xyzp")}
    given = {
        "x": distribute_tensor(whole["x"], device_mesh["tp"], [Shard(0)]),
        "y": distribute_tensor(whole["y"], device_mesh, [Shard(0), Shard(1)]),
        "z": distribute_tensor(whole["z"], device_mesh["dp"], [Replicate()]),
        "p": whole["p"],
    }
    smt.export(path, given)
    found = smt.load(path, {name: sm.Layout((6, 4), sm.Mesh(world=4), "n h") for name in whole})
    return [found[name].equal(whole[name]) for name in whole]


def buffer_on_one_rank(rank: int, path: str) -> list[Said]:
    """On rank 0 alone a buffer is a DTensor; then on all."""
    device_mesh = init_device_mesh("cpu", (2,))
    module = torch.nn.Linear(4, 2)
    said = []
    for ranks in ((0,), (0, 1)):
        buffer = torch.ones(4)
        if rank in ranks:
            # Where only one rank makes it, nobody may be asked.
            buffer = DTensor.from_local(torch.ones(2), device_mesh, [Shard(0)], run_check=False)
        module.register_buffer("b", buffer)
        said.append(ends(lambda: smt.save_state(path, module)))
    return said
