"""Repacking: tensors that vLLM 0.32 packs once on a CPU, and would still use after its weights were replaced.

1. Experts are packed when their kernel is made, which is once; a reload then copies plain weights over packed ones. So
   the kernel is made again.
2. If weights are INT8, a kernel has packed them, and points to the addresses that their scales had then. A reload
   copies the scales elsewhere, and frees them. So the kernel is made to hold on to its scales.
3. A head that is tied to the embedding is packed separately, and a reload does not know of it. So it is packed again.
4. On processors with AMX, latent attention packs a projection's weight, and leaves an empty one instead, into which a
   reload would copy. So a whole one is put there, until attention has packed it.
5. vLLM packs the weights of a linear layer before it frees those that it packed before. So they are freed first.

On a GPU none of this happens, and nothing is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

__all__ = ["drop_kernels", "packs_apart", "process_tied", "repacks_anew", "replace_kernel"]

KERNEL = "cpu_linear"
"""The attribute of linear layers on CPUs in which vLLM keeps the function that has their packed weights."""


@contextmanager
def repacks_anew(module: nn.Module) -> Iterator[None]:
    """When vLLM on a CPU processes the weights of `module` in the `with` block, have it build the module's kernels
    again, as at the first load. On other devices, nothing changes.
    """
    if not current_platform.is_cpu():
        yield
        return
    _refill_emptied(module)
    method: Any = getattr(module, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
    make = ops.create_onednn_scaled_mm

    def make_and_keep(weight: Tensor, scales: Tensor, *others: Any, **named: Any) -> Any:
        kernel: Any = make(weight, scales, *others, **named)
        kernel.kept = scales  # the kernel points to their memory
        return kernel

    ops.create_onednn_scaled_mm = make_and_keep
    try:
        yield
    finally:
        ops.create_onednn_scaled_mm = make


def _refill_emptied(module: nn.Module) -> None:
    """Replace weights that attention has left empty by whole ones, into which vLLM's reload can copy."""
    # vLLM sets this attribute on a projection whose weight latent attention has packed.
    if not getattr(module, "_cpu_skip_gemm_dispatch", False):
        return
    # The pair of parameters and buffers with which the module runs; empty before a reload has begun.
    kernel_tensors = get_layerwise_info(module).kernel_tensors
    running = kernel_tensors[0] if kernel_tensors else {}
    for name, tensor in running.items():
        if not tensor.numel():
            loaded = getattr(module, name).data
            running[name] = nn.Parameter(torch.empty_like(loaded), requires_grad=False)


def process_tied(model: nn.Module, tied: Iterable[str]) -> None:
    """On CPUs, have vLLM rebuild the kernels of output layers whose weights, named in `tied`, are shared with another
    module.
    """
    if not current_platform.is_cpu():
        return
    for native in tied:
        module = model.get_submodule(native.rpartition(".")[0])
        if isinstance(module, ParallelLMHead):
            drop_kernels([module])
            module.quant_method.process_weights_after_loading(module)


def packs_apart(module: nn.Module) -> bool:
    """Whether vLLM packs the module's weights into memory of a kernel, apart from the module's tensors."""
    return current_platform.is_cpu() and hasattr(module, KERNEL)


def drop_kernels(modules: Iterable[nn.Module]) -> None:
    """Free the packed weights of modules that pack them apart. They cannot run until vLLM has processed them again."""
    for module in modules:
        setattr(module, KERNEL, None)


def replace_kernel(module: nn.Module) -> None:
    """If `drop_kernels` has freed the module's packed weights, have vLLM pack those that the module has now."""
    if getattr(module, KERNEL, module) is None:
        method: Any = module.quant_method
        method.process_weights_after_loading(module)
