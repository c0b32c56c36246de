"""Unwrapped: a module and its submodules under their own names, without the wrappers that torch adds.

1. `torch.compile` and activation checkpointing wrap a module in another, which holds it as its only submodule. Each
   wrapper adds a part to names.
2. Saved names are without these parts, and transformers is asked about a model under such names, too.

>>> strip_wrappers("layers.0._orig_mod.weight")
'layers.0.weight'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["WRAPPERS", "Unwrapped", "is_wrapper", "strip_wrappers", "unwrap"]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of dotted names that wrappers add."""


def strip_wrappers(name: str) -> str:
    """Return the dotted name of a module or tensor without the parts that wrappers add."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in WRAPPERS)


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` wraps another one."""
    return not module._modules.keys().isdisjoint(WRAPPERS)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around it: `module` itself if it is not a wrapper."""
    while is_wrapper(module):
        module = next(inner for name, inner in module.named_children() if name in WRAPPERS)
    return module


class Unwrapped:
    """A module whose `named_modules` has no wrappers, and names without their parts; all else is the module's own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = unwrap(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module and its submodules, each once, after its name."""
        for name, module in self._module.named_modules():
            if not is_wrapper(module):
                yield strip_wrappers(name), module
