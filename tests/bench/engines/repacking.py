"""The floor: vLLM's repacking for the processor, of weights that are in the worker's memory already.

No update takes less, by whatever way its weights come. Kernels are freed before they are made again, which is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

__all__ = ["Weights", "make_weights", "repack"]

Weights: TypeAlias = Sequence[tuple[Any, Tensor]]
"""Linear layers, each with a weight in the form in which it is loaded."""


def make_weights(model: nn.Module) -> Weights:
    """A weight for each linear layer of a model that vLLM runs. Layers of one shape share their weight."""
    by_shape: dict[torch.Size, Tensor] = {}
    weights = []
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            parameters, _ = get_layerwise_info(module).restore_metadata
            loaded = parameters["weight"]
            # Written to, so that it is in memory.
            ones = by_shape.setdefault(loaded.shape, torch.ones(loaded.shape, dtype=loaded.dtype))
            weights.append((module, ones))
    return weights


@torch.no_grad()
def repack(weights: Iterable[tuple[Any, Tensor]]) -> None:
    """Have vLLM pack the weights for the processor, as it does when an update ends."""
    for module, weight in weights:
        running = module.weight
        module.cpu_linear = None
        module.weight = nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=True)
        module.weight = running
