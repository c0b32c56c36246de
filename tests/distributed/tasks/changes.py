"""What workers do: moves of what has changed, and the same with something wrong. Imported by workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.scenarios import Bytes, Case, results, tensor_of, tensors_of

Step = dict[int, Bytes]
"""Every rank's source tensors at one time."""


def change_cases(
    rank: int, cases: Sequence[tuple[Case, Sequence[Step]]], is_told: bool = False
) -> list[list[tuple[dict[str, bytes], smt.Sent]]]:
    """Each case's destinations, and what was sent, after each step; once more after the last.

    Told or not, snapshots are kept, so in the end nothing is found that has changed.
    """
    return [_change(rank, case, steps, is_told) for case, steps in cases]


def _change(
    rank: int, case: Case, steps: Sequence[Step], is_told: bool
) -> list[tuple[dict[str, bytes], smt.Sent]]:
    send = smt.compile_changes(case.plan, **case.options)
    src = tensors_of(case.src.get(rank), case.lying)
    out = tensors_of(case.dst.get(rank), case.lying)
    found = [(results(out), send(src, out=out))]
    found[0] = results(out), found[0][1]
    for step in steps:
        before = {key: _bits(tensor) for key, tensor in _name(src).items()}
        _overwrite(src, step.get(rank, {}))
        positions = _tell(before, _name(src)) if is_told else None
        sent = send(src, out=out, positions=positions)
        found.append((results(out), sent))
    sent = send(src, out=out)
    found.append((results(out), sent))
    return found


def _name(tensors: Any) -> dict[str, torch.Tensor]:
    """The tensors of a side, by local key."""
    return {"": tensors} if isinstance(tensors, torch.Tensor) else dict(tensors or {})


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each cell, row by row."""
    cells = tensor.detach().clone(memory_format=torch.contiguous_format)
    return cells.view(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _tell(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Which cells have changed, in any order."""
    positions = {}
    for key, tensor in now.items():
        cells = (_bits(tensor) != before[key]).any(1).nonzero().view(-1)
        positions[key] = cells.flip(0)
    return positions


def _overwrite(tensors: Any, given: Bytes) -> None:
    """Give the tensors these elements, where they lie."""
    named = {"": tensors} if isinstance(tensors, torch.Tensor) else tensors or {}
    for key, value in given.items():
        named[key].copy_(tensor_of(*value))


def lets_go(rank: int, agree: str) -> tuple[str, list[float]]:
    """What every rank is told of changes after rank 1 has let go, and what arrives by the next whole move."""
    group = dist.new_group()
    send = smt.compile_changes(sm.plan(LINE, PLANE), group=group, agree=agree, timeout=30.0)
    src, out = torch.full((1, 4), float(rank)), torch.zeros(8, 1)
    send(src, out=out)
    src += 10
    send(src, out=out)
    if rank == 1:
        send.let_go()
    said = ""
    try:
        send(src, out=out)
    except sm.ExchangeError as error:
        said = str(error)
    src += 10
    if agree == "every":
        send(src, out=out, whole=True)
    return said, out.flatten().tolist()


LINE = sm.Layout((8, 4), sm.Mesh(tp=8), "(tp n) h")
PLANE = sm.Layout((8, 4), sm.Mesh(tp=4, dp=2), "n (tp h)")


def fails(rank: int, name: str) -> tuple[str, list[float]]:
    """What every rank is told of a call that rank 1 makes wrongly, and what the next, right one brings."""
    plan = sm.plan(LINE, PLANE)
    send = smt.compile_changes(plan, snapshots=name != "no snapshot")
    src, out = torch.full((1, 4), float(rank)), torch.zeros(8, 1)
    send(src, out=out)
    src += 10
    wrong: dict[str, Callable[[], object]] = {
        "other memory": lambda: send(src, out=out.clone()),
        "other strides": lambda: send(src.t().contiguous().t().expand(1, 4), out=out),
        "shape": lambda: send(src[:, :3], out=out),
        "whole": lambda: send(src, out=out, whole=True),
        "whole=1": lambda: send(src, out=out, whole=1),  # type: ignore[arg-type]
        "outside": lambda: send(src, out=out, positions={"": torch.tensor([4])}),
        "twice": lambda: send(src, out=out, positions={"": torch.tensor([1, 1])}),
        "name": lambda: send(src, out=out, positions={"w": torch.tensor([1])}),
        "kind": lambda: send(src, out=out, positions={"": torch.tensor([1.0])}),
        "no snapshot": lambda: send(src, out=out),
    }
    all_cells = {"": torch.arange(4)} if name == "no snapshot" else None
    try:
        if rank == 1:
            wrong[name]()
        else:
            send(src, out=out, positions=all_cells)
        said = ""
    except sm.ExchangeError as error:
        said = str(error)
    unchanged = out.flatten().tolist() == [float(r) for r in range(8)]
    if name == "no snapshot":
        send(src, out=out, positions={"": torch.arange(4)})
    else:
        send(src, out=out)
    return said if unchanged else "changed", out.flatten().tolist()


def among_others(rank: int) -> tuple[list[float], int]:
    """What arrives where tensors are made elsewhere by default; and the bytes of both storages, once resized."""
    src, out = torch.full((1, 4), float(rank)), torch.zeros(8, 1)
    with torch.device("meta"):
        send = smt.compile_changes(sm.plan(LINE, PLANE))
        send(src, out=out)
        src += 10
        send(src, out=out, check="digest")
    found = out.flatten().tolist()
    storages = [tensor.untyped_storage() for tensor in (src, out)]
    for storage in storages:
        storage.resize_(0)
    return found, sum(storage.nbytes() for storage in storages)


def in_modes(rank: int, is_inference: bool) -> list[float]:
    """The destination after each of four moves, made in inference mode in turns, first if `is_inference`."""
    mesh = sm.Mesh(tp=8)
    plan = sm.plan(sm.Layout((24,), mesh, "(tp n)"), sm.Layout((24,), mesh, "n"))
    move = smt.compile_changes(plan, timeout=20.0)
    src, out, found = torch.zeros(3), torch.zeros(24), []
    for number in range(4):
        src[1] = number + 1.0
        with torch.inference_mode((number % 2 == 0) == is_inference):
            move(src, out=out)
        found.append(out[1].item())
    return found


def refuses(rank: int, name: str) -> str:
    """What every rank is told where one compiles something wrong."""
    plan: Any = sm.plan(LINE, PLANE)
    partial = sm.Layout((8, 4), sm.Mesh(tp=8), "n h {sum: tp}")
    given = {"program": sm.schedule(plan), "reduces": sm.plan(partial, PLANE), "none": None}
    try:
        smt.compile_changes(given[name] if rank == 3 else plan)
    except sm.ExchangeError as error:
        return str(error)
    return ""
