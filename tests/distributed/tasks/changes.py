"""What workers do: moves of what has changed, and the same with something wrong. Imported by workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.scenarios import Bytes, Case, results, tensor_of, tensors_of

Step = dict[int, Bytes]
"""Every rank's source tensors at one time."""


def change_cases(
    rank: int, cases: Sequence[tuple[Case, Sequence[Step]]]
) -> list[list[tuple[dict[str, bytes], smt.Sent]]]:
    """Each case's destinations, and what was sent, after each step."""
    return [_change(rank, case, steps) for case, steps in cases]


def _change(
    rank: int, case: Case, steps: Sequence[Step]
) -> list[tuple[dict[str, bytes], smt.Sent]]:
    send = smt.compile_changes(case.plan, **case.options)
    src = tensors_of(case.src.get(rank), case.lying)
    out = tensors_of(case.dst.get(rank), case.lying)
    found = [(results(out), send(src, out=out))]
    found[0] = results(out), found[0][1]
    for step in steps:
        _overwrite(src, step.get(rank, {}))
        sent = send(src, out=out)
        found.append((results(out), sent))
    return found


def _overwrite(tensors: Any, given: Bytes) -> None:
    """Give the tensors these elements, where they lie."""
    named = {"": tensors} if isinstance(tensors, torch.Tensor) else tensors or {}
    for key, value in given.items():
        named[key].copy_(tensor_of(*value))


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
        "label": lambda: send(src, out=out, label="other"),
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
