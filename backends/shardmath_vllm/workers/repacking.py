"""Repacking: what vLLM 0.32 packs once on a CPU, and would go on with after its weights were replaced.

1. Experts are packed where their kernel is made, which is once; a reload then copies plain weights over packed ones. So
   the kernel is made anew.
2. Where weights are INT8, a kernel has packed them, and points to where their scales were when it was made. A reload
   copies these elsewhere, and frees them. So the kernel is made to hold on to its scales.
3. A head that is tied to the embedding is packed beside it, and a reload does not know of it. So it is packed again.

None of this is so on a GPU, where nothing is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

__all__ = ["process_tied", "repacks_anew"]


@contextmanager
def repacks_anew(module: nn.Module) -> Iterator[None]:
    """Has kernels made within, as when weights were loaded first."""
    if not current_platform.is_cpu():
        yield
        return
    method: Any = getattr(module, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
    make = ops.create_onednn_scaled_mm

    def make_and_keep(weight: Tensor, scales: Tensor, *others: Any, **named: Any) -> Any:
        kernel: Any = make(weight, scales, *others, **named)
        kernel.kept = scales
        return kernel

    ops.create_onednn_scaled_mm = make_and_keep
    try:
        yield
    finally:
        ops.create_onednn_scaled_mm = make


def process_tied(model: nn.Module, tied: Iterable[str]) -> None:
    """Pack again what these parameters are in, which are other modules', too."""
    if not current_platform.is_cpu():
        return
    for native in tied:
        module = model.get_submodule(native.rpartition(".")[0])
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
