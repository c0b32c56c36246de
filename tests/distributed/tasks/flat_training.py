"""Training with optimizer state in flat buffers, in parameters' shapes, and from one to the other. For workers.

A stage with a rule is data parallelism with AdamW on each rank's flat array, over tensor parallelism where `tp` is more
than 1; without a rule it is FSDP2 over tensor parallelism, with AdamW on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import buffers
from shardmath_torch.commands.models.flat_buffers import params_of, views
from shardmath_torch.tensors.dtensors.devicemesh import group_for, mesh_of
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks import training
from tests.distributed.tasks.dtensors import device_mesh

ADAM = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1, "amsgrad": True}
KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
KINDS = ("weight", *KEYS)
STEPS = 2


@dataclass(frozen=True)
class Stage:
    """Sizes, and the rule that lays buffers out."""

    dp: int
    tp: int = 1
    rule: Callable[..., buffers.PerBufferParamLayout] | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def lay(self, params: Any) -> buffers.PerBufferParamLayout:
        assert self.rule is not None
        return self.rule(params, data_parallel_world_size=self.dp, **dict(self.options))


STAGES = (
    Stage(8, 1, buffers.distributed_optimizer, (("bucket_size", 3000),)),
    Stage(4, 1, buffers.layer_wise, (("bucket_size", 2000),)),
    Stage(4, 2, buffers.distributed_optimizer, (("bucket_size", 1500),)),
    Stage(4, 2),
    Stage(4, 2, buffers.megatron_fsdp, (("bucket_size", 2500),)),
    Stage(4, 1, buffers.flat_parameter),
    Stage(8, 1, buffers.zero, (("round_robin", True),)),
    Stage(8, 1, buffers.distributed_optimizer, (("bucket_size", 3000),)),
)


class Held(NamedTuple):
    """Layouts by parameter, the same on all ranks, and this rank's tensors of each kind by local name."""

    layouts: Mapping[str, Any]
    tensors: Callable[[str], dict[str, Tensor] | None]


class Flat:
    """A module, and AdamW on this rank's share of its flat buffer."""

    def __init__(self, stage: Stage, module: nn.Module, ranks: Any, group: Any) -> None:
        self.module, self.group, self.shards = module, group, stage.dp
        self.buffer = stage.lay(params_of(module))
        self.ranges = buffers.shard_ranges(
            self.buffer, stage.dp, list(ranks).index(dist.get_rank())
        )
        self.shard = nn.Parameter(self._cut(self._filled(lambda p: p)))
        self.optimizer = torch.optim.AdamW([self.shard], **ADAM)

    def _filled(self, of: Callable[[Tensor], Tensor | None]) -> Tensor:
        """The whole buffer of something that parameters have."""
        whole, named = (
            torch.zeros(self.buffer.numel, dtype=torch.float64),
            dict(self.module.named_parameters()),
        )
        for name, (start, end, _) in self.buffer.placed:
            value = of(named[name])
            assert value is not None, name
            whole[start:end] = local(value).detach().reshape(-1)
        return whole

    def _cut(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[a:b] for a, b in self.ranges])

    def step(self) -> None:
        gradients = self._filled(gradient)
        dist.all_reduce(gradients, group=self.group)
        self.shard.grad = self._cut(gradients) / self.shards
        self.optimizer.step()
        self.spread()

    def spread(self) -> None:
        """All ranks' shares of the weights, into the module."""
        parts = [torch.empty_like(self.shard.data) for _ in range(self.shards)]
        dist.all_gather(parts, self.shard.data, group=self.group)
        whole = torch.empty(self.buffer.numel, dtype=torch.float64)
        for i, part in enumerate(parts):
            at = 0
            for a, b in buffers.shard_ranges(self.buffer, self.shards, i):
                whole[a:b] = part[at : at + b - a]
                at += b - a
        for name, (start, end, _) in self.buffer.placed:
            mine = local(self.module.get_parameter(name)).detach()
            mine.copy_(whole[start:end].view(mine.shape))

    def array(self, kind: str) -> Tensor:
        return self.shard.data if kind == "weight" else self.optimizer.state[self.shard][kind]


def gradient(p: Tensor) -> Tensor | None:
    """That of a parameter, divided as it is: torch keeps an embedding's whole."""
    return p.grad.redistribute(placements=p.placements) if isinstance(p.grad, DTensor) else p.grad


def local(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, DTensor) else value


class Trainer:
    """A stage on this rank; ranks that have no part in it have neither module nor optimizer."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.rank = stage, dist.get_rank()
        self.ranks = range(stage.dp * stage.tp)
        self.devices: Any = None
        self.flat: Flat | None = None
        self.module: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        if stage.rule is None:
            self.module, self.devices = training.divided((stage.dp, stage.tp))
            self.optimizer = torch.optim.AdamW(self.module.parameters(), **ADAM)
        elif stage.tp > 1:
            self._over_tensor_parallel()
        else:
            group = group_for(tuple(self.ranks))
            if self.rank in self.ranks:
                self.module = training.plain()
                self.flat = Flat(stage, self.module, self.ranks, group)
        if self.flat is not None:
            self.optimizer = self.flat.optimizer

    def _over_tensor_parallel(self) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        self.module = training.plain()
        self.devices = device_mesh(range(8), (self.stage.dp, self.stage.tp), training.NAMES[2])
        parallelize_module(self.module, self.devices["tp"], training.styles())
        group = self.devices["dp"].get_group()
        self.flat = Flat(self.stage, self.module, dist.get_process_group_ranks(group), group)

    def held(self, shape: str) -> Held:
        """How state is held, in the parameters' shapes or flat."""
        if self.stage.rule is None:
            assert self.module is not None
            return Held(smt.layout_of(self.module), self._parts)
        mesh = sm.Mesh(dp=self.stage.dp, tp=self.stage.tp)
        if self.stage.tp > 1:
            assert self.module is not None
            params = [
                buffers.Param(name, tuple(p.shape))
                for name, p in training.plain().named_parameters()
            ]
            layouts, store = buffers.model_parallel_state(
                params,
                smt.layout_of(self.module, mesh=mesh_of(self.devices)),
                mesh=mesh,
                axis="dp",
                rule=self.stage.rule,
                dtype="float64",
                ranks=[self.rank],
                **dict(self.stage.options),
            )
            return Held(layouts, lambda kind: self._views(store, layouts, kind))
        lay = self.stage.lay(params_of(training.plain()))
        if shape == "flat":
            ragged = buffers.state_layouts(lay, mesh, dtype="float64")
            where = buffers.state_store(lay, mesh, ranks=[self.rank])
            return Held(ragged, lambda kind: self._views(where, ragged, kind))
        windows, where = buffers.state_layouts(lay, mesh, shape="nd", dtype="float64")
        return Held(windows, lambda kind: self._views(where, windows, kind))

    def _views(self, store: Any, layouts: Any, kind: str) -> dict[str, Tensor] | None:
        return (
            None if self.flat is None else views(store, layouts, self.rank, self.flat.array(kind))
        )

    def _parts(self, kind: str) -> dict[str, Tensor]:
        assert self.module is not None and self.optimizer is not None
        return {
            name: local(p if kind == "weight" else self.optimizer.state[p][kind]).detach()
            for name, p in self.module.named_parameters()
        }

    def prepare(self, steps: int, lr: float) -> None:
        """Empty state of an optimizer that has taken so many steps."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            for p in group["params"]:
                with torch.no_grad():
                    p.zero_()
                moments = {key: torch.zeros_like(p) for key in KEYS}
                self.optimizer.state[p] = {"step": torch.tensor(float(steps)), **moments}

    def train(self, steps: range) -> list[float]:
        """The losses of these steps over all ranks; none where this rank has no part."""
        if self.flat is None:
            assert self.module is not None or self.stage.rule is not None
            return (
                []
                if self.module is None
                else training.train(self.module, self.optimizer, self.devices, steps)
            )
        out = []
        for step in steps:
            self.optimizer.param_groups[0]["lr"] *= 0.9
            tokens = training.batch(step)
            rows = (
                training.mine(tokens, self.devices)
                if self.devices
                else tokens.chunk(self.stage.dp)[self.rank]
            )
            loss = training.loss_of(self.module, rows)
            loss.backward()
            self.flat.step()
            self.module.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.flat.group)
            out.append(mean.item() / self.stage.dp)
        return out


def lr_after(steps: int) -> float:
    lr = ADAM["lr"]
    for _ in range(steps):
        lr *= 0.9
    return lr


def moved(src: Trainer, dst: Trainer) -> int:
    """Weights and moments from one to the other; the transfers of one kind."""
    flat = all(t.stage.rule is not None and t.stage.tp == 1 for t in (src, dst))
    here, there = (trainer.held("flat" if flat else "nd") for trainer in (src, dst))
    plan = sm.plan(here.layouts, there.layouts)
    sm.verify(plan)
    move = smt.compile(plan)
    for kind in KINDS:
        move(here.tensors(kind), out=there.tensors(kind))
    return sum(1 for _ in plan.transfers())


def through(src: Trainer, dst: Trainer, path: str) -> None:
    """The same by way of a checkpoint."""
    here, there = src.held("nd"), dst.held("nd")
    tensors = {
        f"{kind}.{name}": t for kind in KINDS for name, t in (here.tensors(kind) or {}).items()
    }
    smt.save(
        path,
        tensors,
        {f"{kind}.{name}": one for kind in KINDS for name, one in here.layouts.items()},
    )
    found = smt.load(
        path, {f"{kind}.{name}": one for kind in KINDS for name, one in there.layouts.items()}
    )
    for kind in KINDS:
        for name, t in (there.tensors(kind) or {}).items():
            t.copy_(found[f"{kind}.{name}"])


def chained(rank: int, stages: tuple[Stage, ...], path: str | None = None) -> list[list[float]]:
    """Trains in one stage after the other, moving what the optimizer has; the losses of each."""
    trainer, losses = Trainer(stages[0]), []
    for i, stage in enumerate(stages):
        if i:
            after = Trainer(stage)
            after.prepare(i * STEPS, lr_after(i * STEPS))
            moved(trainer, after) if path is None else through(trainer, after, path)
            if after.flat is not None:
                after.flat.spread()
            trainer = after
        losses.append(trainer.train(range(i * STEPS, (i + 1) * STEPS)))
    return losses


def alone(rank: int, steps: int) -> list[float]:
    """The losses of one process that does not stop."""
    if rank:
        return []
    module = training.plain()
    return training.train(
        module, torch.optim.AdamW(module.parameters(), **ADAM), None, range(steps)
    )
