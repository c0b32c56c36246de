"""A small model written as Megatron writes one: its forward does the all-reduces. For workers, so no pytest here.

Outside of `parallel` it is the undivided model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmath_torch as smt
from tests.distributed.tasks.dtensors import whole

_group: list[Any] = [None]
"""The tensor-parallel group of the model that runs, None for an undivided one."""


class _Copied(torch.autograd.Function):
    """Megatron's f: what goes in to a column-parallel matrix; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.group = _group[0]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return added(gradient, ctx.group)


class _Added(torch.autograd.Function):
    """Megatron's g: what comes out of a row-parallel matrix is added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return added(x, _group[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def added(x: Tensor, group: Any) -> Tensor:
    """The sum over the group."""
    out = x.clone()
    if group is not None:
        dist.all_reduce(out, group=group)
    return out


def f(x: Tensor) -> Tensor:
    """Copied to all ranks."""
    return _Copied.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def g(x: Tensor) -> Tensor:
    """Added up over all ranks."""
    return _Added.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@contextlib.contextmanager
def parallel(group: Any) -> Iterator[None]:
    """Models that run here are divided over the group."""
    _group[0] = group
    try:
        yield
    finally:
        _group[0] = None


HEADS, KEYS, SIZE, HIDDEN, WIDE, WORDS = 8, 4, 2, 12, 20, 24


class Attention(nn.Module):
    """Grouped queries, one fused matrix of Q, K and V, and an offset of the softmax's sum for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KEYS) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.softmax_offset = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        tp = 1 if _group[0] is None else _group[0].size()
        heads, keys = HEADS // tp, KEYS // tp
        q, k, v = self.qkv(f(x)).split([heads * SIZE, keys * SIZE, keys * SIZE], dim=-1)
        q = q.unflatten(-1, (heads, SIZE)).transpose(0, 1)
        k, v = (
            t.unflatten(-1, (keys, SIZE)).transpose(0, 1).repeat_interleave(heads // keys, 0)
            for t in (k, v)
        )
        scores = q @ k.transpose(1, 2)
        offset = self.softmax_offset[:, None, None].expand(heads, len(x), 1)
        weights = torch.cat([scores, offset], dim=-1).softmax(-1)[..., :-1]
        return g(self.out((weights @ v).transpose(0, 1).flatten(1)))


class Mlp(nn.Module):
    """Gate and up in one matrix; down's input is normalized feature by feature; its bias comes after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * WIDE)
        self.scale = Scale(WIDE)
        self.down = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(f(x)).chunk(2, dim=-1)
        return g(F.linear(self.scale(F.silu(gate) * up), self.down.weight)) + self.down.bias


class Scale(nn.Module):
    """A factor a feature."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(HIDDEN), Attention(), Mlp()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN, bias=False)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        x = x + (checkpoint(self._third, x, use_reentrant=False) if self.again else self._third(x))
        return x + self.mlp(x)

    def _third(self, x: Tensor) -> Tensor:
        return g(F.linear(F.linear(f(x), self.up.weight, self.up.bias).relu(), self.down.weight))


class Model(nn.Module):
    """A vocabulary-parallel embedding, whose weight is that of the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self._embedded(words)
        for block in self.blocks:
            x = block(x)
        return F.linear(f(self.norm(x)), self.embed.weight)

    def _embedded(self, words: Tensor) -> Tensor:
        """Each rank has its words' rows."""
        if _group[0] is None:
            return self.embed(words)  # type: ignore[no-any-return]
        n = WORDS // _group[0].size()
        mine = words - n * _group[0].rank()
        here = (mine >= 0) & (mine < n)
        return g(self.embed(mine.clamp(0, n - 1)) * here[:, None])


STYLES: dict[str, Any] = {
    "*.qkv": smt.Fused((HEADS * SIZE, KEYS * SIZE, KEYS * SIZE)),
    "*.gate_up": smt.Fused(2),
    "*.up": "column",
    "*.out": "row",
    "*.down": "row",
    "*.scale": "row_norm",
    "*.softmax_offset": "softmax_offset",
    "embed": "vocabulary",
}


def model(seed: int = 0, device: str = "cpu") -> Model:
    """The same on every rank."""
    torch.manual_seed(seed)
    with torch.device(device):
        return Model()


def loss(model: nn.Module, words: Tensor, group: Any) -> Tensor:
    """A weighted sum of all logits."""
    weights = torch.sin(whole((len(words), WORDS)))
    logits = model(words)
    mine = weights if group is None else weights.chunk(group.size(), dim=1)[group.rank()]
    return g((logits * mine).sum())


def words_of(at: int) -> Tensor:
    """The input of one data-parallel rank."""
    return (torch.arange(6) * 5 + 3 * at) % WORDS
