"""A small transformer, trained in parallel. Imported by workers, so no pytest here.

A mesh is written as its sizes: (4, 2) is FSDP2 over 4 ranks times tensor parallel over 2, (2, 2, 2) has replicas before
them, (8,) is FSDP2 alone, and () is rank 0 alone with a plain module.

1. Nothing divides evenly that torch 2.13 can train unevenly: 257 rows of the vocabulary, 27 hidden and 17 intermediate
   features. Heads have to be whole on every rank, so there are 4 of them.
2. What RowwiseParallel takes from local tensors, it takes to be the same size on every rank: an intermediate of 17 is
   refused in the forward. It has to get DTensors, hence `use_local_output=False` above it.
3. Everybody trains on the same batch in all, of 8 sequences of one length; a rank takes its slice. So the mean of the
   ranks' losses is the loss, and the mean of their gradients, which FSDP2 takes, is the gradient.
4. All is float64, but for what the model computes in float32 by itself (norms).
"""

from __future__ import annotations

import time
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath_torch.checkpoints.states import training
from shardmath_torch.tensors.dtensors.devicemesh import group_for, mesh_of
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.device import DEVICE
from tests.distributed.tasks.dtensors import caught, device_mesh

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, BATCH, LENGTH = 257, 27, 17, 2, 8, 9
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("replica", "dp", "tp")}
Mesh = tuple[int, ...]


# The model


def plain() -> nn.Module:
    """The same weights on every rank."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=6,
        sliding_window=None,
        attn_implementation="sdpa",
    )
    return MistralForCausalLM(config).double().to(DEVICE)


def styles(local: bool = False) -> dict[str, Any]:
    """What tensor parallelism does to which module; with `local`, the intermediate goes on as local tensors."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.self_attn.{x}_proj": ColwiseParallel() for x in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        **{
            f"model.layers.*.mlp.{x}_proj": ColwiseParallel(use_local_output=local)
            for x in ("gate", "up")
        },
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }


def divided(mesh: Mesh, local: bool = False) -> tuple[nn.Module, DeviceMesh | None]:
    """The model under tensor parallelism and FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    module = plain()
    if not mesh:
        return module, None
    devices = device_mesh(range(8), mesh, NAMES[len(mesh)])
    if len(mesh) > 1:
        parallelize_module(module, devices["tp"], styles(local))
    data = devices[NAMES[len(mesh)][: max(1, len(mesh) - 1)]]
    for layer in module.get_submodule("model.layers").children():
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
    return module, devices


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """In two groups, as people do."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), amsgrad=True)


# Steps


def batch(step: int) -> Tensor:
    """The tokens of a step, of all ranks together: two batches in turn, so that there is something to learn."""
    drawn = torch.Generator().manual_seed(step % 2)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=drawn).to(DEVICE)


def mine(tokens: Tensor, devices: DeviceMesh | None) -> Tensor:
    """The slice of this rank: ranks along replica and dp take one each."""
    if devices is None:
        return tokens
    names = [name for name in devices.mesh_dim_names or () if name != "tp"]
    sizes, at = (
        [devices[name].size() for name in names],
        [devices[name].get_local_rank() for name in names],
    )
    parts = tokens.chunk(torch.Size(sizes).numel())
    return parts[sum(i * torch.Size(sizes[k + 1 :]).numel() for k, i in enumerate(at))]


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of the next token."""
    logits = module(input_ids=tokens).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
    )


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, devices: DeviceMesh | None, steps: range
) -> list[float]:
    """The losses of these steps, over all ranks."""
    out = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        loss = loss_of(module, mine(batch(step), devices))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if devices is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        out.append(mean.item())
    return out


# What workers do


class Run(NamedTuple):
    """Losses, and what was held before and after the last of them: layouts, and this rank's tensors."""

    losses: list[float]
    layouts: dict[str, sm.Layout]
    before: dict[str, Any]
    after: dict[str, Any]


def held(
    module: nn.Module, optimizer: training.Optimizers
) -> tuple[dict[str, sm.Layout], dict[str, Any]]:
    """Layouts, and copies of all that is saved of this rank."""
    tensors, layouts = training.state_of(module, optimizer)
    divided = {name: layout for name, layout in layouts.items() if layout is not None}
    return divided, {name: tensors[name].cpu().numpy().copy() for name in divided}


def alone(mesh: Mesh) -> Any:
    """The group that saves and loads."""
    group = group_for((0,))
    return group if not mesh else None


def uninterrupted(rank: int, mesh: Mesh, path: str, steps: int, more: int) -> Run | None:
    """Trains, saves, and goes on."""
    group = alone(mesh)
    if not mesh and rank:
        return None
    module, devices = divided(mesh)
    optimizer = adamw(module)
    first = train(module, optimizer, devices, range(steps))
    training.save_state(path, module, optimizer, group=group)
    layouts, before = held(module, optimizer)
    losses = train(module, optimizer, devices, range(steps, steps + more))
    return Run(first + losses, layouts, before, held(module, optimizer)[1])


def resumed(rank: int, mesh: Mesh, path: str, steps: int, more: int) -> Run | None:
    """Loads into a module of other weights and a fresh optimizer, and goes on."""
    group = alone(mesh)
    if not mesh and rank:
        return None
    module, devices = divided(mesh)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    optimizer = adamw(module)
    training.load_state(path, module, optimizer, group=group)
    layouts, before = held(module, optimizer)
    losses = train(module, optimizer, devices, range(steps, steps + more))
    return Run(losses, layouts, before, held(module, optimizer)[1])


def gathered(rank: int) -> Any:
    """Shapes of one weight while FSDP2 keeps it gathered, as it is saved then, and as it should be."""
    name = "lm_head.weight"
    module, devices = divided((4, 2))
    wanted = held(module, None)[1][f"model.{name}"].shape
    with torch.no_grad():
        loss_of(module, mine(batch(0), devices))
    found = tuple(local_of(module.get_parameter(name)).shape)
    return found, held(module, None)[1][f"model.{name}"].shape, wanted


class Gated(nn.Module):
    """A gate and its other half in one matrix, of unequal components."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(8, 6, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.arange(1.0, 1 + p.numel()).reshape(p.shape))


def fused(mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same after `set_device_mesh` and FSDP2, with an Adam whose first moment will be a tenth of the weights."""
    from torch.distributed.fsdp import fully_shard

    module, devices = Gated(), device_mesh(range(8), mesh, NAMES[2])
    smt.set_device_mesh(module, devices["tp"], styles={"up": smt.Fused((8, 4)), "down": "row"})
    fully_shard(module, mesh=devices["dp"])
    return module, torch.optim.Adam(module.parameters(), lr=0.0)


def packed(rank: int, path: str) -> list[bool]:
    """Saved on (4, 2), restored on (2, 4): whether weights and moments are those that belong there."""
    module, optimizer = fused((4, 2))
    for p in module.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    training.save_state(path, module, optimizer)
    module, optimizer = fused((2, 4))
    wanted = [local_of(p).detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    training.load_state(path, module, optimizer)
    state = [optimizer.state[p]["exp_avg"] for p in module.parameters()]
    right = [local_of(p).equal(w) for p, w in zip(module.parameters(), wanted, strict=True)]
    return right + [local_of(m).allclose(w / 10) for m, w in zip(state, wanted, strict=True)]


class Counting(nn.Module):
    """Counts, one of them divided, and something of each rank's own."""

    def __init__(self, devices: DeviceMesh, value: int, own: bytes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((9, 2), float(value)))
        self.weight = nn.Parameter(distribute_tensor(self.weight.data, devices["tp"], [Shard(0)]))
        self.register_buffer(
            "rows", distribute_tensor(torch.arange(9) * value, devices["tp"], [Shard(0)])
        )
        self.register_buffer("steps", torch.tensor(value))
        self.register_buffer("scratch", torch.tensor(value), persistent=False)
        self.own = own

    def get_extra_state(self) -> bytes:
        return self.own

    def set_extra_state(self, state: bytes) -> None:
        self.own = state


def counted(rank: int, path: str) -> Any:
    """Saved on (4, 2) and restored on (2, 4), replicas of tensor parallelism: layouts, and what arrived."""
    meshes = [device_mesh(range(8), shape, NAMES[2]) for shape in ((4, 2), (2, 4))]
    source, target = Counting(meshes[0], 3, f"rank {rank}".encode()), Counting(meshes[1], 1, b"")
    training.save_state(path, source, mesh=mesh_of(meshes[0]))
    texts = {
        name: str(layout)
        for name, layout in training.state_of(source, mesh=mesh_of(meshes[0]))[1].items()
    }
    wanted = local_of(target.rows).clone() * 3
    training.load_state(path, target, mesh=mesh_of(meshes[1]))
    return (
        texts,
        local_of(target.rows).equal(wanted),
        target.steps.item(),
        target.scratch.item(),
        target.own.decode(),
    )


def buffers_apart(rank: int, path: str) -> list[set[float]]:
    """The values of buffers, which are each rank's number, after a save and a load; and after an export of files that
    several ranks write, and a load."""
    from torch.distributed.fsdp import fully_shard

    def filled(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
        module.register_buffer("queue", torch.empty(64, 8))
        module.register_buffer("seen", torch.empty((), dtype=torch.int64))
        fully_shard(module, mesh=device_mesh(range(8), (8,), NAMES[1]))
        for buffer in module.buffers():
            buffer.fill_(value)
        return module

    smt.save_state(f"{path}/saved", filled(rank))
    smt.export(f"{path}/exported", filled(rank), max_shard_size=100)
    saved, exported = filled(9), filled(9)
    smt.load_state(f"{path}/saved", saved)
    smt.load_weights(f"{path}/exported", exported)
    found = []
    for module in (saved, exported):
        found.append({float(x) for buffer in module.buffers() for x in buffer.flatten()})
    return found


def odd_state(rank: int) -> list[str]:
    """What is said of state of DTensors that does not lie as they do."""
    mesh = device_mesh(range(8), (4, 2), NAMES[2])["tp"]
    said = []
    part = torch.zeros(1, 2)
    inside: list[Any] = [[part], (1, {"a": [part]}), {"a": part}]
    for value in (
        torch.zeros(9),
        distribute_tensor(torch.zeros(9, 2), mesh, [Replicate()]),
        *inside,
    ):
        module = nn.Linear(2, 9, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["row_var"] = value
        said.append(caught(lambda: training.state_of(module, optimizer)))  # noqa: B023 (called at once)
    return said


def lay_out_anew(rank: int, path: str) -> list[str]:
    """What is said where state of a plain parameter is to become that of a DTensor, by what that is; "" of numbers."""
    mesh = device_mesh(range(8), (8,), NAMES[1])
    said = []
    for i, value in enumerate((torch.zeros(9), [torch.zeros(9, 2)], [torch.zeros(()), 5])):
        module = nn.Linear(2, 9, bias=False)
        optimizer = torch.optim.SGD(module.parameters())
        optimizer.state[module.weight]["odd"] = value
        training.save_state(f"{path}/{i}", module, optimizer)
        other = nn.Linear(2, 9, bias=False)
        other.weight = nn.Parameter(distribute_tensor(torch.ones(9, 2), mesh, [Shard(0)]))
        fresh = torch.optim.SGD(other.parameters())
        told = caught(lambda: training.load_state(f"{path}/{i}", other, fresh))  # noqa: B023 (called at once)
        is_loaded = isinstance(told, training.Unmatched)
        said.append("" if is_loaded else told[1])
        assert is_loaded is bool(fresh.state)
    return said


def _with_scale(names: str, mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parameter of shape (), and for the name "w" a matrix, plain or as DTensors; with NAdam, after a step."""
    whole = {"w": torch.ones(9, 2), "scale": torch.tensor(2.0)}
    module = nn.ParameterDict({name: whole[name] for name in names.split()})
    if mesh is not None:
        for name, parameter in module.items():
            placement = Shard(0) if parameter.ndim else Replicate()
            module[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
    optimizer = torch.optim.NAdam(module.parameters(), foreach=True)
    _step_squares(module, optimizer)
    return module, optimizer


def _step_squares(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()


def scale_numbers(rank: int, path: str, names: str) -> tuple[set[str], bool]:
    """The keys of the state of a parameter of shape () that are DTensors, after a load of what was saved plain; and
    whether it goes on as the plain one, also if it is saved and loaded again."""
    module, optimizer = _with_scale(names, None)
    _step_squares(module, optimizer)
    smt.save_state(f"{path}/plain", module, optimizer)
    other, second = _with_scale(names, device_mesh(range(8), (8,), NAMES[1]))
    smt.load_state(f"{path}/plain", other, second)
    divided = {key for key, x in second.state[other["scale"]].items() if isinstance(x, DTensor)}
    _step_squares(other, second)
    smt.save_state(f"{path}/divided", other, second)
    third, last = _with_scale(names, None)
    smt.load_state(f"{path}/divided", third, last)
    _step_squares(third, last)
    for _ in range(2):
        _step_squares(module, optimizer)
    same = all(module[name].equal(third[name]) for name in names.split())
    plain = not any(isinstance(x, DTensor) for x in last.state[third["scale"]].values())
    return divided, same and plain


def hold_whole(rank: int, path: str) -> tuple[bool, list[float]]:
    """Whether a moment that the optimizer held whole lies as its parameter after a load, and its value."""
    mesh = device_mesh(range(8), (8,), NAMES[1])
    module = Named("a")
    module.a = nn.Parameter(distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(module.parameters(), momentum=0.5)
    module.a.grad = module.a.detach().clone()
    optimizer.step()
    smt.save_state(path, module, optimizer)
    whole = distribute_tensor(torch.full((8,), 9.0), mesh, [Replicate()])
    optimizer.state[module.a]["momentum_buffer"] = whole
    smt.load_state(path, module, optimizer)
    moment = optimizer.state[module.a]["momentum_buffer"]
    return moment.placements == module.a.placements, moment.full_tensor().tolist()


def in_another_order(rank: int, path: str) -> list[Any]:
    """What is said of a module that FSDP2 divides among ranks that do not ascend, in each call."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(2, 8, bias=False)
    fully_shard(module, mesh=device_mesh([1, 0, *range(2, 8)], (8,), NAMES[1]))
    return [
        caught(lambda: smt.layout_of(module)),
        caught(lambda: smt.save_state(path, module)),
        caught(lambda: smt.export(path, module)),
    ]


def in_an_order_that_is_kept(rank: int, path: str) -> tuple[bool, bool]:
    """Whether a module whose mesh keeps another order is laid out as it lies, and is there again after a load."""
    from torch.distributed.fsdp import fully_shard

    order = [1, 0, *range(7, 1, -1)]
    mesh = DeviceMesh("cpu", order, mesh_dim_names=NAMES[1], preserve_rank_order=True)
    module = nn.Linear(2, 9, bias=False)
    whole = torch.arange(18.0).reshape(9, 2)
    with torch.no_grad():
        module.weight.copy_(whole)
    fully_shard(module, mesh=mesh)
    held = module.weight.to_local().clone()
    rows, _ = smt.layout_of(module)["weight"].indices(rank)
    smt.save_state(path, module)
    with torch.no_grad():
        module.weight.to_local().zero_()
    smt.load_state(path, module)
    return held.equal(whole[rows]), module.weight.to_local().equal(held)


def share_state(rank: int, path: str) -> tuple[bool, str]:
    """Whether the moment and the step of two DTensors are one each again on another mesh, and what is said where the
    DTensors are divided differently."""
    across, square = device_mesh(range(8), (8,)), device_mesh(range(8), (4, 2))
    rows = [Shard(0)]

    def made(mesh: Any, *placements: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = Named("a", "b")
        for name, each in zip("ab", placements, strict=True):
            setattr(module, name, nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, each)))
        return module, torch.optim.SGD(module.parameters(), lr=0.5)

    module, optimizer = made(across, rows, rows)
    shared = {"moment": torch.ones_like(module.a), "step": torch.ones(())}
    optimizer.state.update({p: dict(shared) for p in module.parameters()})
    smt.save_state(path, module, optimizer)
    other, fresh = made(square, [*rows, Shard(1)], [*rows, Shard(1)])
    smt.load_state(path, other, fresh)
    a, b = (fresh.state[p] for p in other.parameters())
    said = caught(lambda: smt.load_state(path, *made(square, [*rows, Shard(1)], [*rows, *rows])))
    return all(a[key] is b[key] for key in shared), said[1]


class Dealt(torch.optim.Optimizer):
    """Each rank takes steps with its own of the parameters, and gives them to the others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {"lr": 0.1})

    def buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        found: Tensor = state.setdefault("buffer", torch.zeros_like(parameter))
        return found

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for owner, parameter in enumerate(self.param_groups[0]["params"]):
            if owner == dist.get_rank() and parameter.grad is not None:
                parameter.sub_(self.buffer(parameter).add_(parameter.grad), alpha=0.1)
            dist.broadcast(parameter.data, owner)

    def spread(self) -> None:
        for owner, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(self.buffer(parameter), owner)


def _deal_out(kind: str, module: nn.Module) -> Any:
    """An optimizer whose state ranks share out: ours, or torch's."""
    if kind == "ours":
        return Dealt(module.parameters())
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)


def deal(rank: int, path: str, kind: str) -> Any:
    """What is said of state that ranks have shared out, and whether training goes on as it would have once each rank
    has all of it, as the error says."""

    def made() -> Any:
        module = nn.Linear(2, 1)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)
        return module, _deal_out(kind, module)

    def step(module: nn.Module, optimizer: Any) -> None:
        module.zero_grad()
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    (module, one), (other, two) = made(), made()
    step(module, one)
    shared = one if kind == "ours" else one.optim
    said = caught(lambda: training.save_state(path, module, shared))
    saved, loaded = one, two
    if kind == "ours":
        one.spread()
    else:
        saved, loaded = (torch.optim.Adam(m.parameters()) for m in (module, other))
        for to in range(dist.get_world_size()):
            one.consolidate_state_dict(to=to)
            if to == rank:
                saved.load_state_dict(one.state_dict())
    training.save_state(path, module, saved)
    training.load_state(path, other, loaded)
    if kind != "ours":
        two.load_state_dict(loaded.state_dict())
    step(module, one)
    step(other, two)
    same = map(torch.equal, module.parameters(), other.parameters())
    return said, all(same)


def by_torch(rank: int, path: str, vocabulary: bool) -> list[str] | str:
    """The module saved by torch on (4, 2) and loaded by it on (2, 4): names that came out wrong, or what it says."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    (source, _), (target, _) = divided((4, 2)), divided((2, 4))
    wanted = held(target, None)[1]
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    states = [
        {
            name: value
            for name, value in module.state_dict().items()
            if vocabulary or value.shape[0] != VOCABULARY
        }
        for module in (source, target)
    ]
    try:
        dcp.save(states[0], checkpoint_id=path)
        dcp.load(states[1], checkpoint_id=path)
    except CheckpointException as error:
        return str(error)
    found = held(target, None)[1]
    return [name for name in states[0] if (wanted[f"model.{name}"] != found[f"model.{name}"]).any()]


def refused(rank: int) -> str:
    """What a forward says where the intermediate features go from layer to layer as local tensors."""
    module, devices = divided((4, 2), local=True)
    try:
        loss_of(module, mine(batch(0), devices))
    except RuntimeError as error:
        return str(error)
    return ""


class Counter(nn.Module):
    """Has bytes of its own, and may refuse to give or to take them."""

    def __init__(self, gives: bool, takes: bool) -> None:
        super().__init__()
        self.gives, self.takes, self.weight = gives, takes, nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> bytes:
        if not self.gives:
            raise ValueError("nothing to give")
        return b"seven"

    def set_extra_state(self, state: Any) -> None:
        if not self.takes:
            raise ValueError("nothing is taken")


def wrong_on_one(rank: int, path: str, what: str) -> Any:
    """Saves or restores uneven FSDP2 over tensor parallelism, where rank 2 is wrong about something."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = device_mesh(range(8), (4, 2), ("dp", "tp"))

    def made(gives: bool = True, takes: bool = True) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 7, bias=False), Counter(gives, takes))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(module[0], mesh=mesh["dp"])
        return module

    good, odd = made(), rank == 2
    if what == "gives":
        return caught(lambda: smt.save_state(path, made(gives=not odd)))
    smt.save_state(path, good)
    if what == "takes":
        return caught(lambda: smt.load_state(path, made(takes=not odd)))
    return caught(lambda: smt.load_state(path, nn.Linear(2, 2) if odd else good))


class Named(nn.Module):
    """Weights of one shape, of the names given; `one` says that they are one parameter."""

    def __init__(self, *names: str, one: bool = False) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.zeros(8, 2)) for _ in names]
        for name, weight in zip(names, weights, strict=True):
            self.register_parameter(name, weights[0] if one else weight)


def asked_otherwise(rank: int, path: str) -> dict[str, Any]:
    """What becomes of calls in which rank 1 asks for something else, by name; and what was restored after all."""
    from torch.distributed.fsdp import fully_shard

    odd = rank == 1
    mesh = device_mesh(range(8), (8,))

    def divided(*names: str, one: bool = False) -> nn.Module:
        module = Named(*names, one=one)
        fully_shard(module, mesh=mesh)
        return module

    def sgd(module: nn.Module, *names: str, steps: int = 0) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([getattr(module, n) for n in names], lr=0.5, momentum=0.5)
        for _ in range(steps):
            for name in names:
                weight = getattr(module, name)
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return optimizer

    made = divided("a", "b")
    moved = sgd(made, "a", "b", steps=1)
    state, weights = f"{path}/state", f"{path}/weights"
    smt.save_state(state, made, moved)
    smt.export(weights, {"a": torch.ones(8, 2), "b": torch.ones(8, 2) * 2})

    fresh = divided("a", "b")
    both = sgd(fresh, "a", "b")
    one_of_two = sgd(fresh, "a" if odd else "b")
    free, plain = divided("x", "y"), Named("x")
    tied = divided(*(("y", "x") if odd else ("x", "y")), one=True)
    half = divided("x", "y", one=odd)
    names = {"x": "b" if odd else "a", "y": "b"}
    new = f"{path}/new"
    calls = {
        "no optimizer": lambda: smt.load_state(state, fresh, None if odd else both),
        "other parameters": lambda: smt.load_state(state, fresh, one_of_two, strict=False),
        "other optimizers": lambda: smt.load_state(state, fresh, None if odd else [], strict=False),
        "other names": lambda: smt.load_weights(weights, free, names=names),
        "other names of what is plain": lambda: smt.load_weights(
            weights, plain, names={"x": names["x"]}
        ),
        "other order of names": lambda: smt.load_weights(weights, tied, names={"x": "a", "y": "b"}),
        "tied": lambda: smt.load_weights(weights, half, names={"x": "a", "y": "b"}),
        "saved without an optimizer": lambda: smt.save_state(new, made, None if odd else moved),
        "saved with other parameters": lambda: smt.save_state(
            new, made, sgd(made, "a" if odd else "b")
        ),
        "exported tied": lambda: smt.export(new, half),
        "exported with layouts": lambda: smt.export(
            new,
            {"x": torch.ones(8, 2)},
            {"x": sm.Layout((8, 2), sm.Mesh(world=8), {})} if odd else None,
        ),
        "exported under other names": lambda: smt.export(
            new, {"x": torch.ones(8, 2)}, tied={"y" if odd else "z": "x"}
        ),
    }
    found: dict[str, Any] = {name: caught(call) for name, call in calls.items()}
    restored = [*fresh.parameters(), *free.parameters(), *plain.parameters(), *tied.parameters()]
    touched = any(bool(getattr(one, "_local_tensor", one).any()) for one in restored)
    found["restored"] = touched or bool(both.state) or bool(one_of_two.state)
    return found


def on_two_meshes(rank: int, path: str) -> Any:
    """A DTensor of the first four ranks beside one of all, saved and exported in each way, and restored."""
    few, all_ranks = device_mesh(range(4), (4,)), device_mesh(range(8), (8,))

    def made(value: float) -> nn.Module:
        module = Named("few", "all")
        for name, mesh in (("few", few), ("all", all_ranks)):
            whole = torch.full((8, 2), value)
            part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part))
        return module

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)

    module, into, filled = made(3.0), made(0.0), made(0.0)
    optimizer, other = sgd(module), sgd(into)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    smt.save_state(f"{path}/state", module, optimizer)
    smt.load_state(f"{path}/state", into, other)
    smt.export(f"{path}/module", module)
    smt.export(f"{path}/tensors", dict(module.named_parameters()))
    smt.load_weights(f"{path}/module", filled)
    moments = [state["momentum_buffer"] for state in other.state.values()]
    found = [*into.parameters(), *filled.parameters(), *moments]
    lost = caught(lambda: smt.export(f"{path}/new", {"w": torch.ones(2)}, mesh=sm.Mesh(world=4)))
    return [local_of(one).tolist() for one in found], lost


class Counted(torch.optim.Optimizer):
    """Momentum, with steps counted by a number beside the tensor, and state begun where there is none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), {"lr": 0.5})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                state["step"] += 1
                state["exp_avg"].mul_(0.5).add_(weight.grad)
                weight.sub_(state["exp_avg"] * group["lr"])


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters())


APART = {"low": range(4), "high": range(4, 8)}
"""The ranks that have a parameter."""


def apart(value: float) -> nn.Module:
    """A DTensor on the lower half of the ranks, and one on the upper half."""
    module = Named(*APART)
    for name, ranks in APART.items():
        whole = torch.full((8, 2), value)
        mesh = device_mesh(ranks, (4,))
        part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))
    return module


def step_apart(rank: int, module: nn.Module, optimizer: Any, others: str) -> None:
    """A step of "low" and two of "high"; ranks that have not a parameter may give it a gradient all the same."""
    for name in ("low", "high", "high"):
        weight = module.get_parameter(name)
        optimizer.zero_grad()
        if rank in APART[name] or others != "no gradient":
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        if rank not in APART[name] and others == "other steps":
            optimizer.state[weight]["step"] += 7


def on_meshes_apart(rank: int, path: str, kind: str, others: str) -> Any:
    """Trained, saved, restored, saved, restored, trained; and restored where all ranks have all."""
    make: Any = {"adam": adam, "counted": Counted}[kind]
    module = apart(3.0)
    optimizer = make(module)
    step_apart(rank, module, optimizer, others)
    smt.save_state(f"{path}/first", module, optimizer)
    again = apart(0.0)
    second = make(again)
    smt.load_state(f"{path}/first", again, second)
    has_state = [name for name, weight in again.named_parameters() if weight in second.state]
    smt.save_state(f"{path}/second", again, second)
    tensors, layouts = smt.state_of(again, second)
    smt.save(f"{path}/third", tensors, layouts)
    swapped = Named(*APART)
    for name, weight in apart(0.0).named_parameters():
        swapped.register_parameter("high" if name == "low" else "low", nn.Parameter(weight))
    goals = [swapped, *(_plain_apart() for _ in range(3))]
    found = []
    for name, goal in zip(("second", "first", "second", "third"), goals, strict=True):
        into = make(goal)
        smt.load_state(f"{path}/{name}", goal, into)
        found.append(_say_state(goal, into))
    for one, its in ((module, optimizer), (again, second)):
        step_apart(rank, one, its, others)
    same = [
        local_of(a).equal(local_of(b))
        for a, b in zip(module.parameters(), again.parameters(), strict=True)
    ]
    return has_state, found, same


def from_a_generator(rank: int, path: str) -> Any:
    """The steps of parameters on meshes apart, saved and restored with optimizers that are generated."""
    module = apart(3.0)
    optimizer = adam(module)
    step_apart(rank, module, optimizer, "a gradient")
    smt.save_state(path, module, (each for each in [optimizer]))
    again = apart(0.0)
    second = adam(again)
    smt.load_state(path, again, iter([second]))
    return _say_state(again, second)


RATES = {"low": 0.25, "high": 0.5}


def _groups_apart(rank: int, module: nn.Module, own: bool) -> torch.optim.Optimizer:
    """A group for each parameter, or for those alone that are on the rank; others have a rate that nobody tended."""
    groups = []
    for name, weight in module.named_parameters():
        is_here = rank in mesh_of(weight.device_mesh).ranks
        if is_here or not own:
            groups.append({"params": [weight], "lr": RATES[name] if is_here else 9.0 + rank})
    return torch.optim.Adam(groups)


def _swapped_apart() -> nn.Module:
    """The parameters on each other's ranks."""
    swapped = Named(*APART)
    for name, weight in apart(0.0).named_parameters():
        swapped.register_parameter("high" if name == "low" else "low", nn.Parameter(weight))
    return swapped


def of_stages(rank: int, path: str, own: bool) -> Any:
    """Rates and state after a load into stages, other stages, and where everybody has all; of two checkpoints."""
    module = apart(3.0)
    optimizer = _groups_apart(rank, module, own)
    for name in ("low", "high", "high"):
        if rank in APART[name]:
            optimizer.zero_grad()
            module.get_parameter(name).grad = torch.ones_like(module.get_parameter(name))
            optimizer.step()
    smt.save_state(f"{path}/first", module, optimizer)
    tensors, layouts = smt.state_of(module, optimizer)
    smt.save(f"{path}/second", tensors, layouts)
    found = []
    for name in ("first", "second"):
        for goal in (apart(0.0), _swapped_apart(), _plain_apart()):
            if isinstance(goal.low.data, DTensor):
                into = _groups_apart(rank, goal, own)
            else:
                into = torch.optim.Adam([{"params": [one]} for one in goal.parameters()])
            smt.load_state(f"{path}/{name}", goal, into)
            names = {id(weight): name for name, weight in goal.named_parameters()}
            rates = {names[id(g["params"][0])]: g["lr"] for g in into.param_groups}
            found.append((rates, _say_state(goal, into)))
    return found


class Kind(Enum):
    PLAIN = 1
    NESTEROV = 2


class Betas(NamedTuple):
    first: float
    second: float


def pairs_on_stages(rank: int, path: str) -> Any:
    """An option of two items after a load, where each stage has two parameters of the one group."""

    def made(value: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleList([apart(3.0), apart(3.0)])
        return module, torch.optim.SGD([{"params": module.parameters(), "pair": value}], lr=0.5)

    found = []
    for first, second in (((1, 2), (3, 4)), ((Kind.PLAIN, 1), (Kind.NESTEROV, 2))):
        smt.save_state(path, *made(first))
        module, optimizer = made(second)
        smt.load_state(path, module, optimizer)
        found.append(optimizer.param_groups[0]["pair"] == first)
    return found


def items_on_stages(rank: int, path: str) -> Any:
    """An option with an item per parameter, saved and loaded by stages whose optimizers have all parameters: in the
    same order, in another one, and into a group of the rank's own."""

    def made(step: int, items: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleList([apart(3.0), apart(3.0)])
        weights = [*module.parameters()][::step]
        return module, torch.optim.SGD([{"params": weights, "items": items}], lr=0.5)

    def loaded(step: int, items: list[int]) -> Any:
        module, optimizer = made(step, items)
        smt.load_state(path, module, optimizer)
        return optimizer.param_groups[0]["items"]

    saved = [*range(len([*made(1, [])[0].parameters()]))]
    smt.save_state(path, *made(1, saved))
    # In the index each stage's part of the group is a group.
    zeros = [0] * len(saved)
    return loaded(1, zeros) == saved, caught(lambda: loaded(-1, zeros)), loaded(-1, saved) == saved


def shares_options_on_stages(rank: int, path: str) -> bool:
    """Whether an option that two groups share, of which one has parameters of both stages, is one object again."""

    def made(first: Any, second: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleList([apart(3.0), apart(3.0)])
        *others, last = module.parameters()
        groups = [{"params": others, "lr": first}, {"params": [last], "lr": second}]
        return module, torch.optim.SGD(groups, lr=0.5)

    rate = torch.tensor(0.25)
    smt.save_state(path, *made(rate, rate))
    module, optimizer = made(0.5, 0.5)
    smt.load_state(path, module, optimizer)
    first, second = optimizer.param_groups
    return first["lr"] is second["lr"] and float(first["lr"]) == 0.25


def share_on_stages(rank: int, path: str, kind: str) -> Any:
    """Whether a rank's optimizer of its own stage has, after a load, state that is one object, and the saved option."""

    def made(value: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = apart(3.0)
        own = [weight for name, weight in module.named_parameters() if rank in APART[name]]
        return module, torch.optim.SGD([{"params": own, "kind": value}], lr=0.5)

    first, second = {
        "state": (1, 2),
        "enum": (Kind.PLAIN, Kind.NESTEROV),
        "namedtuple": (Betas(0.5, 0.75), Betas(0.0, 0.0)),
    }[kind]
    module, optimizer = made(first)
    (weight,) = optimizer.param_groups[0]["params"]
    moment = torch.ones_like(weight)
    optimizer.state[weight] = {"one": moment, "other": moment if kind == "state" else moment + 1}
    smt.save_state(path, module, optimizer)
    goal, into = made(second)
    smt.load_state(path, goal, into)
    (held,) = into.state.values()
    return held["one"] is held["other"], into.param_groups[0]["kind"] == first


def _mixed(rank: int, divided: bool, lacks: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parameter of the lower half and two of the upper; both halves have a group of some of the others'."""
    of = {"low": range(4), "high": range(4, 8), "top": range(4, 8)}
    module = Named(*of)
    for name, ranks in of.items():
        part: Tensor = torch.ones(8, 2)
        if divided:
            mesh = device_mesh(ranks, (4,))
            part = distribute_tensor(part, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))
    grouped = [["low"], ["high", "top"]] if rank < 4 else [["low", "high"], ["top"]]
    if not divided:
        grouped = [[name] for name in of]
    groups: list[Any] = []
    for names in grouped:
        own = [module.get_parameter(name) for name in names if name != lacks]
        groups.append({"params": own, "lr": 9.0 + rank})
    return module, torch.optim.SGD(groups)


def of_mixed_groups(rank: int, path: str) -> Any:
    """Rates of groups after a load into other groups, and into the same; and what is said where a rank lacks one."""
    module, optimizer = _mixed(rank, divided=True)
    rates = [0.25, 7.0] if rank < 4 else [0.5, 0.125]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    smt.save_state(path, module, optimizer)
    found = []
    for divided in (False, True):
        goal, into = _mixed(rank, divided)
        smt.load_state(path, goal, into)
        found.append([group["lr"] for group in into.param_groups])
    odd = _mixed(rank, divided=True, lacks="top" if rank == 5 else "")
    said = caught(lambda: smt.save_state(f"{path}/new", *odd))
    return found, said


def on_meshes_of_some(rank: int, case: str) -> Any:
    """The layouts' names, or the error, of a state of parameters on meshes that the upper half is not on."""
    ranks = (range(2), range(4) if case == "spanned" else range(2, 4))
    meshes = [device_mesh(of, (len(of),)) for of in ranks]
    few = group_for(range(4))
    module = Named(*APART)
    for name, mesh in zip(APART, meshes, strict=True):
        part = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))
    optimizer = adam(module)
    for weight in module.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    if case == "outside":
        return caught(lambda: smt.state_of(module, optimizer)) if rank > 3 else None
    if rank > 3 and case != "all":
        return None
    group = {"some": few, "all": dist.group.WORLD}.get(case)
    return caught(lambda: sorted(smt.state_of(module, optimizer, group=group)[1]))


def with_other_meshes(rank: int, path: str) -> Any:
    """What ranks are told of which the first alone reads plain parameters as on a mesh of half of them."""
    module = nn.Linear(2, 2)
    mesh = sm.Mesh(dp=4) if rank == 0 else None
    start = time.monotonic()
    told = caught(lambda: smt.save_state(path, module, adam(module), mesh=mesh))
    return told, time.monotonic() - start


def _plain_apart() -> nn.Module:
    module = Named(*APART)
    for name in APART:
        module.register_parameter(name, nn.Parameter(torch.zeros(8, 2)))
    return module


def _say_state(module: nn.Module, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Steps and the first element of the moment, of each parameter that has state."""
    said = {}
    for name, weight in module.named_parameters():
        if weight in optimizer.state:
            state = optimizer.state[weight]
            moment = state["exp_avg"]
            part = local_of(moment) if isinstance(weight.data, DTensor) else moment
            assert part.eq(part.flatten()[0]).all()
            said[name] = float(state["step"]), round(float(part.flatten()[0]), 4)
    return said


def divided_by_zero(rank: int, path: str) -> Any:
    """An optimizer of which each rank has a part of the state, in another optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.Linear(2, 2)
    smt.save_state(f"{path}/plain", module, adam(module))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = caught(lambda: smt.save_state(f"{path}/new", module, optimizer))
    loaded = caught(lambda: smt.load_state(f"{path}/plain", module, optimizer))
    return saved, loaded


def on_some_of_the_ranks(rank: int, path: str, step: str) -> Any:
    """Saves or fills a plain module, said to be on rank 0 alone."""
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight), nn.init.ones_(module.bias)
    if step == "load_state":
        smt.save_state(path, module)
    elif step == "load_weights":
        smt.export(path, module)
    act = getattr(smt, step)
    return caught(lambda: act(path, module, mesh=sm.Mesh(ranks=[0])))


def filled(rank: int, path: str) -> Any:
    """Weights of one whole, tied, half-precision model in a folder of safetensors, into uneven shards."""
    from torch.distributed.fsdp import fully_shard

    mesh = device_mesh(range(8), (4, 2), ("dp", "tp"))
    module = nn.Sequential()
    module.embed, module.head, module.norm = (
        nn.Embedding(9, 4),
        nn.Linear(4, 9, bias=False),
        nn.LayerNorm(4),
    )
    module.head.weight = module.embed.weight
    fully_shard(module, mesh=mesh["dp"])
    names = {f"norm.{name}": f"model.ln.{name}" for name in ("weight", "bias")} | {
        "embed.weight": "model.words"
    }
    smt.load_weights(path, module, names=names)
    full = {name: p.full_tensor() for name, p in module.named_parameters()}
    return {name: (str(t.dtype), t.tolist()) for name, t in full.items()}
