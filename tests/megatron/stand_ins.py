"""What Megatron-Core takes from a GPU and from packages that need one, for a model that could do without.

Weights are not touched by any of this: it is arithmetic, devices and streams. All else that runs is Megatron's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "replace", "replace_for_mamba"]

TRITON = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def replace() -> None:
    """Put the stand-ins in their places, in this process."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    Tensor.cuda = lambda self, *args, **named: self  # type: ignore[assignment]
    # Small functions are compiled on first use, which would take a C++ compiler.
    torch.compiler.set_stance("force_eager")
    # Nothing is dropped, so no state of a GPU's random numbers is needed.
    CudaRNGStatesTracker.fork = _fork
    # Without TransformerEngine, these two look for it all the same.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    # The deterministic gated delta net is written in torch, but for this norm.
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = _normalize
    experts.gg = SimpleNamespace(
        assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=_multiply_groups)
    )


def replace_for_mamba() -> None:
    """Before Megatron's modules of Mamba are imported: they are put together for TransformerEngine only."""
    sys.modules[TRITON] = MagicMock()
    transformer_engine.TELayerNormColumnParallelLinear = NormAndLinear
    transformer_engine.TERowParallelLinear = RowParallelLinear
    transformer_engine.TEDotProductAttention = Attention
    transformer_engine.TENorm = WrappedTorchNorm
    from megatron.core.ssm import mamba_mixer

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_chunk_scan_combined = _scan


class Attention(DotProductAttention):  # type: ignore[misc]
    """Takes the sizes of heads that latent attention gives, and that only TransformerEngine's attention asks for."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*args, **named)


class NormAndLinear(ColumnParallelLinear):  # type: ignore[misc]
    """TransformerEngine's fused norm and linear layer, by the names of its parameters."""

    def __init__(self, size: int, *args: Any, config: Any, **named: Any) -> None:
        super().__init__(size, *args, config=config, **named)
        self.layer_norm_weight = nn.Parameter(torch.ones(size))
        self.epsilon = config.layernorm_epsilon

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Any:
        normal = functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.epsilon)
        return super().forward(normal, *args, **named)


class GatedNorm(nn.Module):
    """That of mamba_ssm: of each group on its own, after the gate."""

    def __init__(self, size: int, eps: float, group_size: int, **named: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = eps
        self.group_size = group_size

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        groups = (x * functional.silu(gate)).unflatten(-1, (-1, self.group_size))
        normal = functional.rms_norm(groups, groups.shape[-1:], eps=self.epsilon)
        return normal.flatten(-2) * self.weight


@contextlib.contextmanager
def _fork(self: Any, name: str = "") -> Iterator[None]:
    yield


def _normalize(x: Tensor) -> Tensor:
    """As flash-linear-attention does."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _multiply_groups(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool) -> Tensor:
    """As the grouped_gemm package does: so many rows times the first matrix, so many times the next."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    **named: Any,
) -> Tensor:
    """That of mamba_ssm, one token after the other: x (b l h p), dt (b l h), A (h), B and C (b l g n), D (h)."""
    heads_per_group = x.shape[2] // B.shape[2]
    B = B.repeat_interleave(heads_per_group, dim=2)
    C = C.repeat_interleave(heads_per_group, dim=2)
    step = functional.softplus(dt + dt_bias)
    decay = torch.exp(step * A)
    state = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        added = torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], B[:, t])
        state = state * decay[:, t, :, None, None] + added
        out[:, t] = torch.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t]
    return out
