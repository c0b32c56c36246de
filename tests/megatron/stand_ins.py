"""What Megatron-Core takes from a GPU and from packages that need one, for a model that could do without.

Weights are not touched by any of this: it is arithmetic, devices and streams. All else that runs is Megatron's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import experts, moe_utils
from torch import Tensor

__all__ = ["Attention", "replace"]


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


class Attention(DotProductAttention):  # type: ignore[misc]
    """Takes the sizes of heads that latent attention gives, and that only TransformerEngine's attention asks for."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*args, **named)


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
