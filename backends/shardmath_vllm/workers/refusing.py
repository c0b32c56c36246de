"""Refusing: a model whose weights are partly old and partly new does not answer.

vLLM continues with the weights of a worker's model, even after an update of it failed. After every step, whether it ran
as a graph or not, vLLM asks the model for its logits, or its pooler for outputs: there such a model is stopped. Models
that have neither are stopped before the step.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from shardmath.base.errors import ExchangeError

__all__ = ["accept", "refuse"]


def refuse(model: nn.Module, why: str) -> None:
    """Make the methods that vLLM calls for outputs of `model` raise ExchangeError with the reason `why`."""

    def answer(*args: Any, **kwargs: Any) -> NoReturn:
        raise ExchangeError(
            f"the weights are torn (partly old, partly new): {why}; send all weights again, or start the engine again"
        )

    for module, name in _list_asked(model):
        # On the instance, before what its class has.
        vars(module)[name] = answer


def accept(model: nn.Module) -> None:
    """Undo `refuse`: have the methods of `model` answer again."""
    for module, name in _list_asked(model):
        vars(module).pop(name, None)


def _list_asked(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules and method names by which vLLM gets outputs: a pooling model may compute logits, too."""
    # Also `compute_logits_local`, by which vLLM samples a part of a batch on each rank. Names of the class: `accept`
    # uncovers its methods again, where a method that only the instance had would be lost.
    asked = [(model, name) for name in dir(type(model)) if name.startswith("compute_logits")]
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, nn.Module):
        asked.append((pooler, "forward"))
    return asked or [(model, "forward")]
