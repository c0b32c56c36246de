"""What workers do with gradients of moves that meet, come twice, or come where a rank is idle. No pytest here."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardmath as sm
import shardmath_torch as smt
from tests.distributed.tasks.dtensors import NoGradient, caught


def of_two_groups(rank: int, share: bool) -> Any:
    """Moves over one DeviceMesh of ranks 0 and 1, or over two: rank 0 differentiates x then y, rank 1 y then x."""
    one = DeviceMesh("cpu", [0, 1])
    other = one if share else DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return None
    x = DTensor.from_local(torch.ones(2, 4), one, [Shard(0)]).requires_grad_()
    y = DTensor.from_local(torch.ones(2, 4), other, [Shard(0)]).requires_grad_()
    # There over the first group, and back over the other, as y: only names tell the gradients apart.
    of_x = smt.redistribute(x, [Shard(1)], device_mesh=other).to_local()
    of_y = smt.redistribute(y, [Shard(1)]).to_local()

    def differentiate(local: torch.Tensor, tensor: DTensor) -> list[list[float]]:
        (gradient,) = torch.autograd.grad(local.sum(), tensor)
        return gradient.to_local().tolist()

    acts = [lambda: differentiate(of_x * 10, x), lambda: differentiate(of_y * 77, y)]
    return [caught(act) for act in (acts if rank == 0 else acts[::-1])]


def beside_an_idle_rank(rank: int, kind: str) -> Any:
    """Plain rows to rows of given sizes, or to nothing that gives a gradient, on a mesh that rank 2 is not in."""
    device_mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        return None
    mesh = sm.Mesh(dim0=2, ranks=[0, 1])
    there = {"ragged": sm.Ragged(0, sizes=(1, 3)), "none": sm.Shard(1)}[kind]
    src, dst = sm.Layout((4, 3), mesh, [sm.Shard(0)]), sm.Layout((4, 3), mesh, [there])
    x = torch.ones(2, 3, requires_grad=True)
    moved = smt.redistribute(x, dst, layout=src, device_mesh=device_mesh)
    local = moved.to_local() if isinstance(moved, DTensor) else moved
    loss = NoGradient.apply(local) if kind == "none" else local * (rank + 1)
    loss.sum().backward()
    return x.grad.tolist()


def twice(rank: int, ours: bool, retain: bool) -> Any:
    """Two backwards through one move, ours or torch's."""
    mesh = DeviceMesh("cpu", [0, 1])
    w = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]).requires_grad_()
    moved = smt.redistribute(w, [Replicate()]) if ours else w.redistribute(mesh, [Replicate()])
    try:
        for times in (1, 2):
            (moved.to_local() * times).sum().backward(retain_graph=retain)
    except RuntimeError as error:
        return str(error)
    return w.grad.to_local().tolist()


def scalar_there_and_back(rank: int) -> Any:
    """A scalar of rank 0 to rank 1, and back; its shape and values on the way, and its gradient."""
    here, there = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    given = (torch.tensor(3.0) if rank == 0 else torch.empty(0)).requires_grad_()
    x = smt.to_dtensor(given, sm.Layout((), sm.Mesh(dim0=1, ranks=[0]), {}), device_mesh=here)
    moved = smt.redistribute(x, [Replicate()], device_mesh=there)
    back = smt.redistribute(moved, [Replicate()], device_mesh=here)
    (back.to_local().sum() * 5).backward()
    shapes = [tuple(one.shape) for one in (x, moved, back)]
    held = [one.to_local().tolist() for one in (x, moved, back)]
    return shapes, held, given.grad.tolist()


def scalar_of_another_shape(rank: int) -> Any:
    """torch takes the shape of what rank 1 passes for nothing for that of the scalar."""
    here, there = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    given = torch.tensor(3.0) if rank == 0 else torch.empty(0)
    x = DTensor.from_local(given, here, [Replicate()], shape=torch.Size(()), stride=())
    return caught(lambda: smt.redistribute(x, [Replicate()], device_mesh=there))
