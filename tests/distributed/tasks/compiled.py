"""What workers do inside of functions that torch compiles. Imported by workers, so no pytest here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.breaks import Rows, Said, ends


def calls(rank: int, kinds: tuple[str, ...]) -> list[tuple[list[Said], bool, int]]:
    """What `call` returns of each kind."""
    return [call(rank, kind) for kind in kinds]


def call(rank: int, kind: str) -> tuple[list[Said], bool, int]:
    """Two calls of a compiled step that moves twice the rows: how they end, whether all values are right, and how
    many graphs each of its parts made."""
    rows = Rows(rank, 2, 4)
    group = dist.new_group()
    options: dict[str, Any] = {"group": group, "timeout": 20.0, "commit": "all"}
    if kind == "once":
        options["agree"] = "once"
    make = smt.compile_changes if kind == "changes" else smt.compile
    move: Any = make(rows.plan, **options)
    # Whole, since torch may put the doubled rows elsewhere each time.
    whole = {"whole": True} if kind == "changes" else {}
    graphs: list[object] = []

    def compile_graph(graph: Any, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def step(src: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        doubled = src * 2
        if kind == "beside":
            move(doubled, out=out, async_op=True).wait()
        elif kind == "block":
            with smt.commit(group):
                move(doubled, out=out)
        elif kind == "replan":
            move.replan(rows.plan)
            move(doubled, out=out)
        elif kind == "compile":
            smt.compile(rows.plan, group=group)(doubled, out=out)
        else:
            move(doubled, out=out, **whole)
        return out + 1

    compiled = torch.compile(step, backend=compile_graph, fullgraph=kind == "fullgraph")
    said, is_right = [], True
    for add in (0, 1):
        out = torch.zeros_like(rows.out)
        said.append(ends(lambda: compiled(rows.src + add, out)))  # noqa: B023
        is_right &= torch.equal(out, (rows.want + add) * 2)
    move(rows.src, out=rows.out, **whole)
    return said, is_right and torch.equal(rows.out, rows.want), len(graphs)


def gradients(rank: int) -> list[bool]:
    """What `differentiate` returns for each kind of tensor and step."""
    return [differentiate(rank, *given) for given in itertools.product((False, True), repeat=2)]


def differentiate(rank: int, is_plain: bool, has_backward: bool) -> bool:
    """A compiled forward with a redistribution, and with the backward or without it: whether its value and its
    gradient are those of the same function as it is."""
    device_mesh = DeviceMesh("cpu", [0, 1])
    mesh = sm.Mesh(dim0=2)
    rows = sm.Layout((4, 4), mesh, [sm.Shard(0)])
    # torch has no placements for these, so that what arrives is plain.
    ragged = sm.Layout((4, 4), mesh, [sm.Ragged(0, sizes=(1, 3))])
    whole = torch.arange(16.0).reshape(4, 4)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if is_plain:
            return smt.redistribute(tensor, ragged, layout=rows, device_mesh=device_mesh)
        return smt.redistribute(tensor, [Shard(1)], device_mesh=device_mesh).to_local()

    def step(weight: torch.Tensor) -> torch.Tensor:
        loss = (move(weight * 2) ** 2).sum()
        if has_backward:
            loss.backward()
        return loss

    found = []
    # torch 2.13 cannot compile the backward of `to_local` after a graph break, whatever breaks it.
    for act in (step, torch.compile(step, backend="aot_eager" if is_plain else "eager")):
        weight = whole.chunk(2)[rank].clone()
        if not is_plain:
            weight = DTensor.from_local(weight, device_mesh, [Shard(0)])
        loss = act(weight.requires_grad_())
        if not has_backward:
            loss.backward()
        found.append((loss.detach(), local_of(weight.grad)))
    (loss, gradient), (other_loss, other_gradient) = found
    return torch.equal(loss, other_loss) and torch.equal(gradient, other_gradient)


def local_of(gradient: torch.Tensor | None) -> torch.Tensor:
    """The local part of a gradient."""
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
