"""What Megatron-Core takes from a GPU and from packages that need one, for a model that could do without.

None of this knows how components lie in a parameter: what cuts q from k, gate from up and z from x is Megatron's own.
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
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import experts, moe_layer, moe_utils
from torch import Tensor, nn
from torch.nn import functional

from tests.megatron import te_modules

__all__ = ["replace", "replace_for_mamba"]

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
    # Latent experts are between two of TransformerEngine's linear layers, whoever made the other modules.
    moe_layer.HAVE_TE = True
    for module in (provider, gpt_layer_specs, moe_layer, multi_latent_attention):
        te_modules.replace_in(module)
    provider.is_te_min_version = lambda version: True
    for module in (gpt_layer_specs, variants):
        module.TESpecProvider = provider.TESpecProvider
    # The deterministic gated delta net is written in torch, but for this norm. From 0.19 on it is in a file of its own.
    delta = getattr(gated_delta_net, "common", gated_delta_net)
    delta.HAVE_FLA = True
    delta.l2norm = _normalize
    experts.gg = SimpleNamespace(
        assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=_multiply_groups)
    )


def replace_for_mamba(stepwise: bool = False) -> None:
    """Before Megatron's modules of Mamba are imported: they are put together for TransformerEngine only.

    With `stepwise`, a mixer computes as Megatron's own does when it decodes, in torch, without a stand-in of the scan.
    """
    sys.modules[TRITON] = MagicMock()
    te_modules.replace_in(transformer_engine)
    from megatron.core.ssm import mamba_mixer

    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_chunk_scan_combined = None if stepwise else _scan
    if stepwise:
        # Without these kernels, Megatron computes the same in torch.
        mamba_mixer.causal_conv1d_update = mamba_mixer.selective_state_update = None
        mamba_mixer.MambaMixer._ssm_prefill = _decode


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


def _decode(mixer: Any, projected: Tensor, **named: Any) -> Tensor:
    """The mixer's output for `projected`, (l b d), one token after the other, and one sequence after the other: of
    several, Megatron-Core 0.19 would multiply the outputs of each by the gates of all."""
    sequences = []
    for sequence in projected.split(1, dim=1):
        states = [torch.zeros(1, *shape) for shape in mixer.mamba_state_shapes_per_request()]
        tokens = [mixer._ssm_decode(token, *states) for token in sequence.split(1)]
        sequences.append(torch.cat(tokens))
    return torch.cat(sequences, dim=1)


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
