"""Biases: those that vLLM has made wider than they are loaded.

On processors with AMX, vLLM's kernel for small weights asks for a float32 bias. vLLM's own reload takes weights back to
the type in which they are loaded, and never biases: it casts what it loads. Nothing casts in a refit, so they are taken
back, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

__all__ = ["BIAS", "materialize_bias", "take_back_bias"]

BIAS = "bias"


def take_back_bias(module: Any) -> None:
    """If the dtype of the module's bias differs between loading and inference, replace the bias by a meta tensor of the
    dtype for loading.
    """
    running = module._parameters.get(BIAS)
    if running is None or getattr(module, "params_dtype", running.dtype) == running.dtype:
        return
    # vLLM has wrapped this loader, and later unwraps only the loader of the new tensor, a copy.
    running.weight_loader = _get_original_loader(running)
    loaded: Tensor = torch.empty_like(running, dtype=module.params_dtype, device="meta")
    loaded.__class__ = running.__class__
    loaded.__dict__ = running.__dict__.copy()
    module._parameters[BIAS] = loaded


def materialize_bias(module: nn.Module) -> None:
    """Allocate memory for the module's bias if `take_back_bias` has replaced it by a meta tensor."""
    bias = module._parameters.get(BIAS)
    if bias is not None and bias.is_meta:
        with get_layerwise_info(module).restore_device:
            module._parameters[BIAS] = materialize_meta_tensor(bias)
