"""Repacking: what vLLM 0.32 packs once on a CPU, and would go on with after its weights were replaced.

1. Experts are packed where their kernel is made, which is once; a reload then copies plain weights over packed ones. So
   the kernel is made anew.
2. A head that is tied to the embedding is packed beside it, and a reload does not know of it. So it is packed again.

Neither is so on a GPU, where nothing is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

__all__ = ["process_tied", "repacks_anew"]


@contextmanager
def repacks_anew(module: nn.Module) -> Iterator[None]:
    """Has experts packed within, as when they were loaded first."""
    method: Any = getattr(module, "quant_method", None)
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None
    yield


def process_tied(model: nn.Module, tied: Iterable[str]) -> None:
    """Pack again what these parameters are in, which are other modules', too."""
    if not current_platform.is_cpu():
        return
    for native in tied:
        module = model.get_submodule(native.rpartition(".")[0])
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
