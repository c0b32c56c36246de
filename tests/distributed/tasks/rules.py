"""Refits by rules: what engines hold is made of what the trainer holds, on its way or where it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import transforms
from tests.distributed.tasks import refits
from tests.distributed.tasks.breaks import ends

ENGINES = {"a": range(4, 6), "b": range(6, 8)}
RULES = {
    "*.gate_proj.weight": transforms.Cast("bfloat16", at="destination"),
    "*": transforms.Cast("bfloat16"),
}


def plan(rules: Mapping[str, Any] = RULES, computes: bool = True) -> sm.Refit:
    """From a trainer's float32 masters to two engines in bfloat16, which may store functions besides."""
    shapes = refits.shapes()
    served = {name: (shape, "bfloat16") for name, (shape, _) in shapes.items()}
    engines = {name: refits.engine(ranks, computes) for name, ranks in ENGINES.items()}
    return sm.refit(refits.trainer(range(4)), engines, shapes, served=served, rules=rules)


def _round(arrays: refits.Arrays) -> refits.Arrays:
    """To the nearest bfloat16, as float32."""
    return {
        name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in arrays.items()
    }


def _serve(
    bound: Any, arrays: refits.Arrays, rank: int, computes: bool = True
) -> dict[str, Tensor]:
    """What the engine is to hold."""
    (made, _) = refits.make(bound, _round(arrays), rank, functions=computes)
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def _compare(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The tensors that differ; a function is as exact as torch and numpy agree, before it is rounded."""
    wrong = []
    for name, tensor in wanted.items():
        near = {"rtol": 2**-7, "atol": 0.0} if ".o_proj." in name else {"rtol": 0.0, "atol": 0.0}
        if not torch.allclose(found[name].float(), tensor.float(), **near):
            wrong.append(name)
    return wrong


def refuse_changes(rank: int) -> str:
    """What is said of changes that ranks commit, of which tensors are made where they arrive."""
    return ends(lambda: smt.Refit(plan(), timeout=30.0, changes=True, commit="all"))


def steps(rank: int, options: dict[str, Any], call: dict[str, Any], leaves: bool) -> list[Any]:
    """What is wrong in each of some steps; after the second, engine b leaves and comes back."""
    # What changes are made into as ranks commit is refused.
    makes = not (options.get("changes") and options.get("commit") == "all")
    planned = plan(RULES if makes else {"*": transforms.Cast("bfloat16")}, makes)
    mine = {name: planned.engines[name] for name, ranks in ENGINES.items() if rank in ranks}
    group = dist.new_group() if "async_op" in call else None
    refit = smt.Refit(planned, group=group, timeout=30.0, **options)
    src = refits.make(planned.trainer, refits.draw(0), rank) if rank < 4 else None
    zeros = {name: array * 0 for name, array in refits.draw(0).items()}
    dst = {name: _serve(bound, zeros, rank, makes) for name, bound in mine.items()}
    refit.prepare(src, dst)
    found: list[Any] = []

    def step(number: int, engines: Mapping[str, Any]) -> None:
        arrays = refits.draw(number)
        if src is not None:
            refits.overwrite(src, refits.make(planned.trainer, arrays, rank))
        found.append(ends(lambda: _finish(refit(**call))))
        for name, bound in engines.items():
            found.extend(_compare(dst[name], _serve(bound, arrays, rank, makes)))

    for number in (0, 1, 1):
        step(number, mine)
    if leaves:
        rest = planned.without("b")
        refit.replan(rest)
        step(2, {name: bound for name, bound in mine.items() if name in rest.engines})
        refit.replan(planned)
        refit.prepare(*((None, dst) if "b" in mine else ()))
        step(3, mine)
    shadows = refit.shadow_bytes > 0
    found.append("" if shadows == (options.get("commit") == "all" and rank >= 4) else "shadows")
    return found


def _finish(handle: smt.Handle | None) -> None:
    if handle is not None:
        handle.wait()


def disagree(rank: int) -> str:
    """What is said where one rank has other rules."""
    planned = plan()
    if rank == 5:
        shapes = refits.shapes()
        served = {name: (shape, "bfloat16") for name, (shape, _) in shapes.items()}
        engines = {name: refits.engine(ranks) for name, ranks in ENGINES.items()}
        rules = {"*": transforms.Cast("bfloat16")}
        planned = sm.refit(refits.trainer(range(4)), engines, shapes, served=served, rules=rules)
    return ends(lambda: smt.Refit(planned, timeout=30.0))


def bytes_moved() -> tuple[int, int]:
    """Bytes that are sent by rules, and as the trainer holds them."""
    shapes = refits.shapes()
    engines = {name: refits.engine(ranks) for name, ranks in ENGINES.items()}
    plain = sm.refit(refits.trainer(range(4)), engines, shapes)
    return tuple(int(np.sum(list(p.plan.sent_bytes().values()))) for p in (plan(), plain))  # type: ignore[return-value]
