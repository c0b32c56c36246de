"""Small modules and optimizers, trained for a few steps, and tensors that cannot be filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

from shardmath_torch.checkpoints.states import training


def small(seed: int = 0) -> nn.Module:
    """Matrices, vectors, buffers, and a parameter that is frozen."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))
    module[0].bias.requires_grad_(False)
    return module


def train(module: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        module(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        module.zero_grad()


def values(
    module: nn.Module, optimizer: optim.Optimizer
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that is to be the same, copied."""
    tensors, _ = training.state_of(module, optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {name: t.clone() for name, t in tensors.items()}, groups


def same(a: tuple[dict[str, Tensor], Any], b: tuple[dict[str, Tensor], Any]) -> None:
    assert a[0].keys() == b[0].keys() and a[1] == b[1]
    for name in a[0]:
        assert a[0][name].equal(b[0][name]) and a[0][name].dtype == b[0][name].dtype, name


class Odd(nn.Module):
    """A parameter before another that cannot be written to."""

    def __init__(self, odd: Tensor, value: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), value))
        self.odd = nn.Parameter(odd, requires_grad=False)


def in_inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


def freed(count: int = 4) -> Tensor:
    out = torch.zeros(count)
    out.untyped_storage().resize_(0)
    return out


STRANGE: dict[str, Callable[[], Tensor]] = {
    "freed": lambda: freed(1),
    "inference": lambda: in_inference()[:1],
    "expanded": lambda: torch.ones(1).expand(3),
    "meta": lambda: torch.ones(1, device="meta"),
}


def stepped(kind: str | None = None, where: str = "") -> tuple[nn.Module, optim.Optimizer]:
    """A module and its optimizer after a step; of a strange tensor among its options or state."""
    module = Odd(torch.ones(4), 5.0)
    optimizer = optim.SGD([module.first], lr=0.5, momentum=0.5)
    module.first.sum().backward()
    optimizer.step()
    if kind is not None and where == "option":
        optimizer.param_groups[0]["lr"] = STRANGE[kind]()
    elif kind is not None:
        optimizer.state[module.first]["momentum_buffer"] = STRANGE[kind]()
    return module, optimizer
