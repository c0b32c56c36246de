"""What workers do with DTensors. Imported by workers, so no pytest here.

Placements are written `S0` for Shard(0), `SS0,2` for _StridedShard(0, split_factor=2), `R`, and `Psum`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)
from torch.utils.checkpoint import checkpoint

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.groups import compat
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.device import DEVICE
from tests.distributed.tasks.scenarios import resized

_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def device_mesh(ranks: Any, shape: tuple[int, ...], names: tuple[str, ...] = ()) -> DeviceMesh:
    """A DeviceMesh, made once; all workers ask for it at the same time."""
    key = tuple(ranks), shape, names
    if key not in _meshes:
        array = torch.tensor(list(ranks)).reshape(shape)
        _meshes[key] = DeviceMesh(DEVICE, array, mesh_dim_names=names or None)
    return _meshes[key]


PLACEMENTS = {
    "S": Shard,
    "SS": lambda d, f: _StridedShard(d, split_factor=f),
    "R": Replicate,
    "P": Partial,
}


def words(text: str, of: dict[str, Any]) -> Iterator[Any]:
    """`S0 SS0,2 R Psum` as placements, by kind."""
    for word in text.split():
        kind = "SS" if word.startswith("SS") else word[0]
        yield of[kind](*(int(x) if x.isdigit() else x for x in word[len(kind) :].split(",") if x))


def placements_of(text: str) -> tuple[Placement, ...]:
    """DTensor's placements."""
    return tuple(words(text, PLACEMENTS))


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The element numbers."""
    return torch.arange(math.prod(shape), device=DEVICE).reshape(shape).to(dtype)


def part(layout: sm.Layout, rank: int, full: torch.Tensor) -> torch.Tensor:
    """What the rank holds of the whole tensor, addends apart: the first has all."""
    if rank not in layout.mesh:
        return full.new_empty(0)
    out = full
    for d, index in enumerate(layout.indices(rank)):
        out = out.index_select(d, torch.from_numpy(index.clip(0)).to(DEVICE))
    coords = layout.mesh.coords(rank)
    return (
        out.clone()
        if all(coords[name] == 0 for name, _ in layout.partial)
        else torch.zeros_like(out)
    )


def layouts_of_fsdp2(rank: int, shape: tuple[int, ...], rows: int, columns: int, dim: int) -> Any:
    """ColwiseParallel or RowwiseParallel, then fully_shard: what is read, and what is really there."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = device_mesh(range(8), shape, ("dp", "tp") if len(shape) == 2 else ("hsdp", "dp", "tp"))
    style = ColwiseParallel() if dim == 0 else RowwiseParallel()
    module = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=True, device=DEVICE))
    with torch.no_grad():
        module[0].weight.copy_(whole((rows, columns)))
    parallelize_module(module, mesh["tp"], {"0": style})
    fully_shard(module, mesh=mesh["dp"] if len(shape) == 2 else mesh["hsdp", "dp"])
    weight = module[0].weight
    layout = smt.from_dtensor(weight)
    held = local_of(weight).detach().flatten().tolist()
    return (
        layout.text,
        str(tuple(weight.placements)),
        held,
        part(layout, rank, whole((rows, columns))).flatten().tolist(),
    )


@dataclass(frozen=True)
class Move:
    """From one mesh and placements to others; `reading` is that of both."""

    src_ranks: tuple[int, ...]
    src_mesh: tuple[int, ...]
    src: str
    dst_ranks: tuple[int, ...]
    dst_mesh: tuple[int, ...]
    dst: str
    shape: tuple[int, ...]
    reading: Any = None

    @property
    def layouts(self) -> tuple[sm.Layout, sm.Layout]:
        """What the placements stand for."""
        ends = (
            (self.src_ranks, self.src_mesh, self.src),
            (self.dst_ranks, self.dst_mesh, self.dst),
        )
        return tuple(
            layout(ranks, mesh, text, self.shape, self.reading) for ranks, mesh, text in ends
        )  # type: ignore[return-value]

    def source(self) -> DTensor:
        """The element numbers as a DTensor, on this rank."""
        return dtensor(
            self.layouts[0], device_mesh(self.src_ranks, self.src_mesh), placements_of(self.src)
        )


OURS = {"S": sm.Shard, "SS": sm.StridedShard, "R": sm.Replicate, "P": sm.Partial}


def layout(
    ranks: Any, mesh: tuple[int, ...], text: str, shape: tuple[int, ...], reading: Any = None
) -> sm.Layout:
    """The layout that placements stand for."""
    axes = sm.Mesh({f"dim{i}": n for i, n in enumerate(mesh)}, ranks=ranks)
    return sm.Layout(shape, axes, tuple(words(text, OURS)), reading=reading or "placement")


def dtensor(
    layout: sm.Layout, mesh: DeviceMesh, placements: Any, dtype: Any = torch.float32
) -> DTensor:
    """The element numbers as a DTensor of the layout."""
    full = whole(layout.shape, dtype)
    local = part(layout, dist.get_rank(), full)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def caught(act: Any) -> Any:
    """What it returns, or the kind and text of its error."""
    try:
        return act()
    except sm.ShardError as error:
        return type(error).__name__, str(error)


def redistributed(rank: int, moves: list[Move]) -> list[Any]:
    """Of each move: this rank's part, and the layout that the result says it has."""
    out = []
    for move in moves:
        mesh = device_mesh(move.dst_ranks, move.dst_mesh)
        moved = smt.redistribute(
            move.source(), placements_of(move.dst), device_mesh=mesh, reading=move.reading
        )
        out.append((local_of(moved).cpu().numpy(), smt.from_dtensor(moved, reading=move.reading)))
    return out


def on_submeshes(rank: int, axes: tuple[str, ...], src: str, dst: str) -> Any:
    """Every part of a (2, 2, 2) mesh moves a tensor of its own, at the same time; its gradient comes back."""
    root = device_mesh(range(8), (2, 2, 2), ("replica", "dp", "tp"))
    mesh = root[axes]
    ranks = mesh.mesh.flatten().tolist()
    there = sm.Layout(
        (9, 4),
        sm.Mesh(dict(zip(axes, mesh.shape, strict=True)), ranks=ranks),
        tuple(words(src, OURS)),
    )
    local = part(there, rank, whole((9, 4)) + ranks[0])
    given = DTensor.from_local(
        local, mesh, placements_of(src), run_check=False, shape=(9, 4), stride=(4, 1)
    )
    moved = smt.redistribute(given.requires_grad_(), placements_of(dst), reading="placement")
    (moved * moved.detach()).sum().backward()
    after = smt.from_dtensor(moved, reading="placement")
    right = part(after, rank, whole((9, 4)) + ranks[0])
    return local_of(moved).detach().equal(right), local_of(given.grad).equal(local)


def reduced(rank: int, op: str, after: str) -> Any:
    """Addends of a reduction to `after`: ours, and torch's."""
    mesh = device_mesh(range(8), (4, 2))
    local = (whole((9, 3)) * 7 + rank // 2 * 5) % 11 - 4
    given = DTensor.from_local(
        local, mesh, placements_of(f"P{op} R"), run_check=False, shape=(9, 3), stride=(3, 1)
    )
    ours, theirs = (
        smt.redistribute(given, placements_of(after)),
        given.redistribute(mesh, placements_of(after)),
    )
    return local_of(ours).tolist(), local_of(theirs).tolist()


def across_meshes(rank: int, how: str) -> Any:
    """From ranks 0 and 1 to ranks 1 to 3, which DTensor can say, and back with the gradient of the squares."""
    mesh = device_mesh((0, 1), (2,), ("a",))
    src = sm.Layout((7, 5), sm.Mesh(a=2, ranks=(0, 1)), "(a n) h")
    dst = sm.Layout((7, 5), sm.Mesh(tp=3, ranks=(1, 2, 3)), "n (tp h)")
    local = part(src, rank, whole((7, 5)))
    given = local.clone()
    if how == "DTensor":
        given = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=(7, 5), stride=(5, 1)
        )
    given.requires_grad_()
    moved = smt.redistribute(given, dst, layout=None if how == "DTensor" else src)
    moved.to_local().pow(2).sum().backward()
    held = local_of(moved).detach().equal(part(dst, rank, whole((7, 5)))) or rank not in dst.mesh
    gradient = local_of(given.grad) if isinstance(given.grad, DTensor) else given.grad
    return held, gradient.equal(2 * local)


def local_parts_of_a_mesh(rank: int) -> Any:
    """Plain local tensors whose layouts are on different ranks, at the same time, to a target in text."""
    mesh = device_mesh(range(8), (2, 4), ("tp", "dp"))["tp"]
    ranks = mesh.mesh.tolist()
    there = sm.Layout((9, 4), sm.Mesh(tp=2, ranks=ranks), "([4 5] tp n) h")
    local = part(there, rank, whole((9, 4)) + rank % 4)
    plain = smt.redistribute(local, sm.Layout((9, 4), there.mesh, "n h"), layout=there)
    text = smt.redistribute(local, "n (tp h)", layout=there, device_mesh=mesh)
    wanted = whole((9, 4)) + rank % 4
    return local_of(plain).equal(wanted), local_of(text).equal(
        wanted[:, rank // 4 * 2 : rank // 4 * 2 + 2]
    )


def by_torch(rank: int, move: Move) -> Any:
    """What torch's redistribute gives, and what it should."""
    mesh = device_mesh(move.dst_ranks, move.dst_mesh)
    moved = move.source().redistribute(mesh, placements_of(move.dst))
    right = rank not in move.dst_ranks or local_of(moved).equal(
        part(move.layouts[1], rank, whole(move.shape))
    )
    return right and moved.device_mesh == mesh


def distributed(rank: int, mesh: tuple[int, ...], text: str, shape: tuple[int, ...]) -> Any:
    """What distribute_tensor stores, and what is read from it."""
    made = distribute_tensor(
        whole(shape), device_mesh(range(8), mesh), placements_of(text), src_data_rank=None
    )
    found = smt.from_dtensor(made)
    return local_of(made).tolist(), part(found, rank, whole(shape)).tolist()


def viewed(rank: int) -> Any:
    """A view of a DTensor that flattens a dimension divided to the right."""
    mesh = device_mesh(range(4), (4,))
    tensor = dtensor(layout(range(4), (4,), "S1", (4, 8)), mesh, (Shard(1),)).view(-1)
    found = smt.from_dtensor(tensor)
    return (
        found.text,
        local_of(tensor).tolist() if rank < 4 else [],
        part(found, rank, whole((32,))).tolist(),
    )


def ordered(rank: int, n: int) -> Any:
    """Plain shards of one dimension, of which the right one divides first."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = device_mesh(range(8), (4, 2))
    there = sm.Layout((n,), sm.Mesh(dim0=4, dim1=2), "(dim1 dim0 n)")
    local, full = part(there, rank, whole((n,))), whole((n,))
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    tensor = DTensor(local, spec, requires_grad=False)
    found = smt.from_dtensor(tensor)
    return found.text, local_of(tensor).tolist(), part(found, rank, full).tolist()


def misfit(rank: int) -> Any:
    """A DTensor that says another shape than it has."""
    tensor = DTensor.from_local(
        torch.zeros(3),
        device_mesh(range(8), (4, 2)),
        placements_of("SS0,2 S0"),
        shape=(9,),
        stride=(1,),
    )
    return caught(lambda: smt.from_dtensor(tensor).text)


def round_trip(rank: int, layout: sm.Layout) -> Any:
    """Whether the layout comes back from a DTensor of it, and the local tensor with it."""
    local = part(layout, rank, whole(layout.shape))

    def act() -> Any:
        tensor = smt.to_dtensor(local, layout)
        return sm.equivalent(smt.from_dtensor(tensor), layout), local_of(tensor).equal(local)

    return caught(act)


def gradients(rank: int, src: str, dst: str, shape: tuple[int, ...], dtype: str) -> Any:
    """Gradients of a weighted sum of the moved tensor: ours, and torch's."""
    mesh, kind = device_mesh(range(8), (4, 2)), getattr(torch, dtype)
    out = []
    for move in (
        lambda t: smt.redistribute(t, placements_of(dst)),
        lambda t: t.redistribute(mesh, placements_of(dst)),
    ):
        given = dtensor(
            layout(range(8), (4, 2), src, shape), mesh, placements_of(src), kind
        ).requires_grad_()
        there = move(given)
        weight = dtensor(
            layout(range(8), (4, 2), "S0 S1", shape), mesh, placements_of("S0 S1"), kind
        )
        (there * weight.redistribute(mesh, there.placements)).sum().backward()
        out.append((str(given.grad.placements), local_of(given.grad).tolist()))
    return out


def gradient_of_a_gradient(rank: int) -> Any:
    """Of a penalty on the gradient, by torch and by us."""
    mesh = device_mesh(range(4), (4,))
    if rank >= 4:
        return None
    found = []
    for move in (
        lambda t: t.redistribute(mesh, [Replicate()]),
        lambda t: smt.redistribute(t, [Replicate()]),
    ):
        tensor = distribute_tensor(torch.arange(1.0, 9.0), mesh, [Shard(0)]).requires_grad_()
        loss = (move(tensor) ** 3).sum()
        (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
        (gradient**2).sum().backward()
        found.append(tensor.grad.full_tensor().tolist())
    return found


def gradient_that_one_rank_does_not_record(rank: int) -> Any:
    """Rank 0 is outside the target, and its own function of the empty tensor is linear."""
    a = sm.Layout((6,), sm.Mesh(tp=2), "(tp n)")
    b = sm.Layout((6,), sm.Mesh(tp=1, ranks=[1]), "n")
    tensor = torch.arange(1.0, 4.0).add(3.0 * rank).requires_grad_()
    moved = smt.redistribute(tensor, b, layout=a)
    local = moved.to_local() if isinstance(moved, DTensor) else moved
    loss = (local**3).sum() if rank else local.sum()
    return caught(lambda: torch.autograd.grad(loss, tensor, create_graph=True))


def _local(moved: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, as part of the graph."""
    return moved.to_local() if isinstance(moved, DTensor) else moved


def _two_moved(
    rank: int, target: str, needs: tuple[bool, bool] = (True, True)
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two tensors of two ranks, and what both are under the target, by one kept mover."""
    mesh = sm.Mesh(tp=2)
    a, b = sm.Layout((4, 4), mesh, "(tp n) h"), sm.Layout((4, 4), mesh, target)
    tensors = [torch.ones(2, 4).add(rank).requires_grad_(need) for need in needs]
    return tensors, [_local(smt.redistribute(tensor, b, layout=a)) for tensor in tensors]


def gradients_of_two_moves(rank: int, way: str) -> Any:
    """Rank 0's loss depends on the first tensor, rank 1's on the second; or so do their second derivatives."""
    if way == "one needs a gradient":
        _, (x, y) = _two_moved(rank, "n (tp h)", (rank == 0, rank == 1))
        return caught(lambda: (x.sum() + 1000 * y.sum()).backward())
    if way == "one is used":
        _, (x, y) = _two_moved(rank, "n (tp h)")
        return caught(lambda: (1000 * (y if rank else x)).sum().backward())
    tensors, (x, y) = _two_moved(rank, "n h")
    loss = x.sum() + (y**3).sum() if rank else (x**3).sum() + y.sum()
    return caught(lambda: torch.autograd.grad(loss, tensors, create_graph=True))


def gradients_in_step_again(rank: int) -> Any:
    """Rank 0 moved, and so copied, once more than rank 1; after a move of both, gradients of copies are right."""
    mesh = sm.Mesh(tp=2)
    a, b = sm.Layout((4,), mesh, "n"), sm.Layout((4,), mesh, "(tp n)")
    x = torch.arange(4.0).requires_grad_()
    smt.redistribute(x.detach(), b, layout=a)  # makes the DeviceMesh
    if rank == 0:
        smt.redistribute(x.detach(), b, layout=a)
    smt.redistribute(x.detach()[:2].clone(), a, layout=b)
    _local(smt.redistribute(x, b, layout=a, grad="partial")).sum().backward()
    y = torch.arange(4.0).requires_grad_()
    _local(smt.redistribute(y, b, layout=a)).mul(rank + 1).sum().backward()
    return x.grad.tolist(), y.grad.tolist()


def gradient_outside(rank: int, shape: tuple[int, ...], given: tuple[int, ...], target: str) -> Any:
    """From rank 1 to rank 0, or to both; rank 0 passes a tensor that stands for nothing."""
    there = sm.Mesh(tp=2) if target == "both" else sm.Mesh(ranks=[0])
    a, b = sm.Layout(shape, sm.Mesh(ranks=[1]), ()), sm.Layout(shape, there, {})
    right = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    tensor = (right if rank else torch.full(given, 7.0)).clone().requires_grad_()
    local = _local(smt.redistribute(tensor, b, layout=a))
    value = local.detach().clone()
    (gradient,) = torch.autograd.grad((local**2).sum(), tensor, create_graph=True)
    gradient.sum().backward()
    return value.tolist(), gradient.tolist(), tensor.grad.tolist(), tuple(gradient.shape)


def checkpointed(rank: int) -> Any:
    """Activations are made again; rank 1 has none of the target, and a function that needs no activation."""
    a = sm.Layout((6,), sm.Mesh(tp=2), "(tp n)")
    b = sm.Layout((6,), sm.Mesh(tp=1, ranks=[0]), "n")

    def body(tensor: torch.Tensor) -> torch.Tensor:
        local = _local(smt.redistribute(tensor, b, layout=a))
        return local.sum() if rank else (local**3).sum()

    tensor = torch.arange(1.0, 4.0).add(3 * rank).requires_grad_()
    checkpoint(body, tensor, use_reentrant=False).backward()
    return tensor.grad.tolist()


class NoGradient(torch.autograd.Function):
    """Its backward gives none."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def no_gradient(rank: int) -> Any:
    """What comes after a move gives no gradient: it is zero."""
    mesh = device_mesh(range(2), (2,))
    tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]).requires_grad_()
    NoGradient.apply(_local(smt.redistribute(tensor, [Shard(1)]))).sum().backward()
    return tensor.grad.to_local().tolist()


def partial_gradient(rank: int) -> Any:
    """The gradient of a replicated input, left as addends; their sum; and what it should be."""
    mesh = device_mesh(range(8), (4, 2))
    given = dtensor(
        layout(range(8), (4, 2), "R S0", (8, 6)), mesh, placements_of("R S0")
    ).requires_grad_()
    moved = smt.redistribute(given, placements_of("S1 R"), grad="partial")
    (moved * moved.detach()).sum().backward()
    total = given.grad.redistribute(mesh, placements_of("R R"))
    return str(tuple(given.grad.placements)), local_of(total).tolist(), whole((8, 6)).tolist()


def gradients_given(rank: int, src: str, dst: str, given: str) -> Any:
    """The gradient of a moved tensor where it arrives under placements of its own: ours, and torch's."""
    mesh, shape = device_mesh(range(8), (4, 2)), (8, 6)
    out = []
    for move in (
        lambda t: smt.redistribute(t, placements_of(dst)),
        lambda t: t.redistribute(mesh, placements_of(dst)),
    ):
        held = dtensor(
            layout(range(8), (4, 2), src, shape), mesh, placements_of(src)
        ).requires_grad_()
        arriving = dtensor(layout(range(8), (4, 2), given, shape), mesh, placements_of(given))
        (gradient,) = torch.autograd.grad(move(held), held, arriving)
        value = local_of(gradient.redistribute(mesh, placements_of("R R"))).tolist()
        out.append((str(gradient.placements), local_of(gradient).tolist(), value))
    return [*out, local_of(arriving.redistribute(mesh, placements_of("R R"))).tolist()]


def without_grad(rank: int) -> Any:
    """Under no_grad, of a tensor whose memory is not contiguous."""
    mesh = device_mesh(range(8), (4, 2))
    there = layout(range(8), (4, 2), "S1 S0", (8, 12))
    local = part(there, rank, whole((8, 12))).t().contiguous().t()
    given = DTensor.from_local(
        local, mesh, placements_of("S1 S0"), shape=(8, 12), stride=(12, 1)
    ).requires_grad_()
    with torch.no_grad():
        moved = smt.redistribute(given, placements_of("S0 R"))
    wanted = part(layout(range(8), (4, 2), "S0 R", (8, 12)), rank, whole((8, 12)))
    return moved.requires_grad, local_of(moved).equal(wanted)


def through_a_packed_layout(rank: int) -> Any:
    """To a layout that DTensor cannot say, and back, with its gradient."""
    mesh = device_mesh(range(8), (4, 2))
    given = dtensor(
        layout(range(8), (4, 2), "S0 R", (9, 4)), mesh, placements_of("S0 R")
    ).requires_grad_()
    packed = sm.Layout((9, 4), sm.Mesh(tp=2, ranks=(6, 3)), "([4 5] tp n) h")
    local = smt.redistribute(given, packed)
    held = local.tolist() if rank in packed.mesh else []
    back = smt.redistribute(local, placements_of("S1 R"), layout=packed, device_mesh=mesh)
    (back * back.detach()).sum().backward()
    return (
        held,
        part(packed, rank, whole((9, 4))).tolist(),
        local_of(given.grad).equal(local_of(given).detach()),
    )


def wrong(rank: int, what: str) -> Any:
    """Something that cannot be moved."""
    mesh = device_mesh(range(8), (4, 2))
    given = dtensor(layout(range(8), (4, 2), "S0 R", (9, 4)), mesh, placements_of("S0 R"))
    calls = {
        "shape": lambda: smt.redistribute(given, sm.Layout((9, 5), sm.Mesh(tp=2), "n h")),
        "dtype": lambda: smt.redistribute(
            given, sm.Layout((9, 4), sm.Mesh(tp=2), "n h", dtype="float16")
        ),
        "nothing": lambda: smt.redistribute(
            None, placements_of("R R"), layout=smt.from_dtensor(given)
        ),
        "no device mesh": lambda: smt.redistribute(
            given, placements_of("R R"), device_mesh=sm.Mesh(dp=4, tp=2)
        ),
        "plain": lambda: smt.redistribute(torch.zeros(3), sm.Layout((3,), sm.Mesh(), "n")),
        "grad": lambda: smt.redistribute(given, placements_of("R R"), grad="half"),
        "readings": lambda: smt.redistribute(given, placements_of("SS0,2 S0")),
        "mask": lambda: smt.redistribute(given, (Partial("band"), Replicate())),
        "local": lambda: smt.redistribute(
            torch.zeros(1, 4),
            placements_of("S0 S0"),
            layout=smt.from_dtensor(given),
            device_mesh=mesh,
        ),
        "mesh": lambda: smt.redistribute(
            torch.zeros(9, 4), placements_of("R R"), layout=smt.from_dtensor(given)
        ),
        "freed": lambda: smt.redistribute(
            resized(torch.zeros(9, 4), 0),
            placements_of("S0 R"),
            layout=layout(range(8), (4, 2), "R R", (9, 4)),
            device_mesh=mesh,
        ),
    }
    return caught(calls[what])


def from_one_rank(rank: int, text: str, shape: tuple[int, ...], dtype: str) -> Any:
    """A whole tensor that rank 3 alone has, to placements; and that as a whole on every rank again."""
    kind = getattr(torch, dtype)
    alone, mesh = (
        sm.Layout(shape, sm.Mesh(ranks=[3]), {}, dtype=dtype),
        device_mesh(range(8), (4, 2)),
    )
    given = whole(shape, kind) if rank == 3 else torch.empty(0, dtype=kind)
    made = smt.redistribute(
        given, placements_of(text), layout=alone, device_mesh=mesh, reading="placement"
    )
    back = smt.redistribute(made, placements_of("R R"), reading="placement")
    return local_of(made).tolist(), str(made.dtype), local_of(back).equal(whole(shape, kind))


def by_torchs_distribute(rank: int, text: str, shape: tuple[int, ...]) -> Any:
    """What torch's distribute_tensor from rank 0 stores, where it does not fail."""
    made = distribute_tensor(whole(shape), device_mesh(range(8), (4, 2)), placements_of(text))
    return local_of(made).tolist()


def to_addends(rank: int) -> Any:
    """Whole numbers to addends, by us and by torch: the types."""
    mesh = device_mesh(range(8), (8,))
    given = dtensor(layout(range(8), (8,), "R", (5,)), mesh, placements_of("R"), torch.int64)
    ours = smt.redistribute(given, placements_of("Psum"))
    theirs = distribute_tensor(
        whole((5,), torch.int64), mesh, placements_of("Psum"), src_data_rank=None
    )
    total = smt.redistribute(ours, placements_of("R"))
    return str(ours.dtype), str(theirs.dtype), local_of(total).tolist()


def from_ragged(rank: int) -> Any:
    """Shards of given sizes: what DTensor says to them, what comes of them as shards, and of the whole."""
    sizes, mesh = (3, 0, 1, 5, 2, 2, 7, 1), device_mesh(range(8), (8,))
    ragged = sm.Layout((21, 2), sm.Mesh(dim0=8), (sm.Ragged(0, sizes),))
    local = part(ragged, rank, whole((21, 2)))
    refused = caught(lambda: smt.to_dtensor(local, ragged))
    made = smt.redistribute(local, placements_of("S0"), layout=ragged, device_mesh=mesh)
    return refused, local_of(made).tolist(), smt.from_dtensor(made).text


def torch_says(rank: int, case: str) -> Any:
    """What torch does in a case, as something that is True where it is right."""
    return {
        "c02": _boxes_of_fsdp2,
        "c09": _box_of_a_view,
        "c27": _offset_of_an_order,
        "c29": _handed_out,
        "c42": _fsdp2_of_columns,
        "c28": _ragged_without_a_shape,
        "c39": lambda rank: _full("SS0,2 S0", (4, 2), (9,)),
        "fuzz": lambda rank: by_torch(
            rank, Move(range(4), (2, 2), "SS0,3 S0", range(4), (2, 2), "SS1,3 S1", (8, 16))
        ),
    }[case](rank)


def _boxes_of_fsdp2(rank: int) -> Any:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box

    held = layouts_of_fsdp2(rank, (4, 2), 9, 1, 0)[2]
    shape, _ = box((9, 1), device_mesh(range(8), (4, 2), ("dp", "tp")), placements_of("SS0,2 S0"))
    return math.prod(shape) == len(held)


def _box_of_a_view(rank: int) -> Any:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box

    mesh = device_mesh(range(4), (4,))
    tensor = dtensor(layout(range(4), (4,), "S1", (4, 8)), mesh, (Shard(1),)).view(-1)
    if rank >= 4:
        return True
    (size,), (start,) = box(tensor.shape, mesh, tensor.placements)
    return local_of(tensor).tolist() == list(range(start, start + size))


def _offset_of_an_order(rank: int) -> Any:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as box

    held = ordered(rank, 16)[1]
    _, (start,) = box((16,), device_mesh(range(8), (4, 2)), (Shard(0), Shard(0)))
    return held[0] == start


def _handed_out(rank: int) -> Any:
    from torch.distributed._state_dict_utils import _distribute_tensors

    mesh, state = device_mesh(range(8), (8,)), {"w": whole((32,))}
    made = distribute_tensor(torch.zeros(32), mesh, placements_of("SS0,2"), src_data_rank=None)
    there = layout(range(8), (8,), "SS0,2", (32,))
    _distribute_tensors({"w": (made, state["w"])}, ["w"], torch.device("cpu"))
    return local_of(made).equal(part(there, rank, whole((32,))))


def _fsdp2_of_columns(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(9, 4, bias=False)
    fully_shard(module, mesh=device_mesh(range(8), (8,)), shard_placement_fn=lambda p: Shard(1))
    return True


def _ragged_without_a_shape(rank: int) -> Any:
    made = DTensor.from_local(torch.zeros(rank + 1), device_mesh(range(8), (8,)), (Shard(0),))
    return made.full_tensor().numel() == 36


def _full(text: str, mesh: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    made = distribute_tensor(
        whole(shape), device_mesh(range(8), mesh), placements_of(text), src_data_rank=None
    )
    return made.full_tensor().equal(whole(shape))


def layouts_of_module(rank: int, mesh: tuple[int, ...]) -> Any:
    """A column-parallel, a row-parallel, a tied and a plain part under FSDP2: layouts, and whether they are right."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(6, 9), torch.nn.Linear(9, 6)
            self.norm = torch.nn.LayerNorm(6)
            self.tied = self.up

    names = ("dp", "tp") if len(mesh) == 2 else ("replica", "dp", "tp")
    devices, module = device_mesh(range(8), mesh, names), Block()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(whole(tuple(p.shape)))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, devices["tp"], plan)
    before = smt.layout_of(module)
    fully_shard(
        module, mesh=devices[names[:-1]] if len(mesh) == 3 else devices["dp"], ignored_params=set()
    )
    found = smt.layout_of(module)
    right = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        held = local_of(p) if isinstance(p, DTensor) else p
        right[name] = held.detach().equal(part(found[name], rank, whole(tuple(p.shape))))
    return {n: x.text for n, x in before.items()}, {n: str(x) for n, x in found.items()}, right


def plain_module(rank: int) -> Any:
    """A module that nobody divided."""
    return {name: (x.text, x.mesh.size) for name, x in smt.layout_of(torch.nn.Linear(3, 2)).items()}


def _begin_again(rank: int) -> None:
    """Other groups in place of all that there were."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=4)


def axes_of_other_groups(rank: int) -> str:
    """A DeviceMesh of two axes outlives its groups; others of other ranks have their names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("b", "c"))
    assert len(compat.groups_of_axes(mesh)) == 2
    _begin_again(rank)
    DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]))
    return str(caught(lambda: compat.groups_of_axes(mesh)))


def mesh_of_other_groups(rank: int) -> str:
    """A DeviceMesh of one axis outlives its groups; others of other ranks have their names."""
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = plane["b"]
    moved = smt.redistribute(DTensor.from_local(torch.ones(2, 4), line, [Shard(0)]), [Shard(1)])
    assert moved.to_local().equal(torch.ones(4, 2))
    _begin_again(rank)
    for ranks in ([0, 2], [1, 3], [0, 3], [1, 2], [0, 1, 2]):
        dist.new_group(ranks)
    rows = DTensor.from_local(torch.ones(2, 4), line, [Shard(0)])
    return str(caught(lambda: smt.redistribute(rows, [Shard(1)])))


def under_fsdp1(rank: int) -> list[Any]:
    """What `layout_of` says of a module with a unit of FSDP1, with and without its original parameters, and of what is
    inside the unit."""
    out = []
    for original in (True, False):
        unit = _make_unit(ShardingStrategy.FULL_SHARD, original)
        for module in (nn.Sequential(nn.Linear(2, 2), unit), unit.module):
            out.append(caught(lambda module=module: smt.layout_of(module)))
    return out


def state_under_fsdp1(rank: int) -> list[Any]:
    """What `state_of` says of units of FSDP1, sharded or not, and of what is inside a sharded one."""
    out = []
    for original in (True, False):
        unit = _make_unit(ShardingStrategy.FULL_SHARD, original)
        whole = _make_unit(ShardingStrategy.NO_SHARD, original)
        for module in (nn.Sequential(nn.Linear(2, 2), unit), unit.module, whole):
            out.append(caught(lambda module=module: smt.state_of(module)))
    return out


def whole_under_fsdp1(rank: int, original: bool) -> list[dict[str, tuple[int, ...]]]:
    """The shapes that `layout_of` gives inside `summon_full_params`, and for a unit that does not shard."""
    unit = _make_unit(ShardingStrategy.FULL_SHARD, original)
    whole = _make_unit(ShardingStrategy.NO_SHARD, original)
    with FullyShardedDataParallel.summon_full_params(unit, writeback=False):
        inside = smt.layout_of(unit)
    found = (inside, smt.layout_of(whole))
    return [{name: layout.shape for name, layout in each.items()} for each in found]


def scalar_under_fsdp1(rank: int) -> Any:
    """What `layout_of` says of a unit with one element, which one rank has whole, and the other ranks do not."""
    unit = _make_unit(ShardingStrategy.FULL_SHARD, True, nn.PReLU())
    return caught(lambda: smt.layout_of(unit))


def _make_unit(
    strategy: ShardingStrategy, original: bool, module: nn.Module | None = None
) -> FullyShardedDataParallel:
    """A unit of FSDP1 around `module`, by default a linear layer."""
    return FullyShardedDataParallel(
        nn.Linear(16, 16) if module is None else module,
        sharding_strategy=strategy,
        device_id=torch.device(DEVICE),
        use_orig_params=original,
    )
