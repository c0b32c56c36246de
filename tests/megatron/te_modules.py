"""TransformerEngine's modules, as far as Megatron-Core's layer specs use them: the same parameters, plain torch.

Which module stands where in a layer, and what is fused with what, is said by Megatron's own specs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "replace_in"]


def replace_in(module: ModuleType) -> None:
    """Put the stand-ins where this module has TransformerEngine's, or would have them were it installed."""
    for name, stand_in in STAND_INS.items():
        setattr(module, name, stand_in)


class Attention(DotProductAttention):  # type: ignore[misc]
    """Takes the sizes of heads that latent attention gives, and that only TransformerEngine's attention asks for."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*args, **named)


class Norm(WrappedTorchNorm):  # type: ignore[misc]
    """Is told, from Megatron-Core 0.19 on, whether a residual comes with its input, and adds none unless configured."""

    def __new__(cls, *args: Any, has_residual: bool = False, **named: Any) -> Any:
        return super().__new__(cls, *args, **named)


class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A norm and the linear layer behind it."""

    def __init__(self, size: int, *args: Any, config: Any, **named: Any) -> None:
        super().__init__(size, *args, config=config, **named)
        self.layer_norm_weight = nn.Parameter(torch.ones(size))
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(size))
        self.epsilon = config.layernorm_epsilon

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        weight = self.layer_norm_weight
        if hasattr(self, "layer_norm_bias"):
            bias = self.layer_norm_bias
            normal = functional.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        else:
            normal = functional.rms_norm(x, weight.shape, weight, self.epsilon)
        return super().forward(normal, *args, **named)


class Linear(nn.Module):
    """The same on every rank."""

    def __init__(self, size: int, out: int, *, parallel_mode: str, **named: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated", parallel_mode
        self.weight = nn.Parameter(torch.zeros(out, size))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight), None


class GroupedLinear(nn.Module):
    """A matrix per expert: so many rows times the first, so many times the next."""

    def __init__(self, experts: int, size: int, out: int, **named: Any) -> None:
        super().__init__()
        for expert in range(experts):
            self.register_parameter(f"weight{expert}", nn.Parameter(torch.zeros(out, size)))

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = zip(rows.split(counts), self.parameters(), strict=True)
        return torch.cat([functional.linear(part, weight) for part, weight in parts]), None


class ColumnParallelGroupedLinear(GroupedLinear):
    """Each rank has some of what goes out."""

    def __init__(
        self, experts: int, size: int, out: int, *, pg_collection: Any, **named: Any
    ) -> None:
        super().__init__(experts, size, out // pg_collection.expt_tp.size())


class RowParallelGroupedLinear(GroupedLinear):
    """Each rank has some of what comes in; Megatron's dispatcher of tokens adds up."""

    def __init__(
        self, experts: int, size: int, out: int, *, pg_collection: Any, **named: Any
    ) -> None:
        super().__init__(experts, size // pg_collection.expt_tp.size(), out)


STAND_INS: dict[str, type] = {
    "TEColumnParallelGroupedLinear": ColumnParallelGroupedLinear,
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TEDotProductAttention": Attention,
    "TELayerNormColumnParallelLinear": NormAndLinear,
    "TELinear": Linear,
    "TENorm": Norm,
    "TERowParallelGroupedLinear": RowParallelGroupedLinear,
    "TERowParallelLinear": RowParallelLinear,
}
