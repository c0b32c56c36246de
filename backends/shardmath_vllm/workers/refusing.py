"""Refusing: a model whose weights are partly old and partly new does not answer.

vLLM goes on with whatever a worker's model has, also after an update of it failed. What it asks a model for after every
step, whether that ran as a graph or not, are its logits: that is where it is stopped. Models that have none are stopped
before the step.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from shardmath.base.errors import ExchangeError

__all__ = ["accept", "refuse"]

ASKED = ("compute_logits", "forward")
"""What a model is asked for: the first that it has."""


def refuse(model: nn.Module, why: str) -> None:
    """Have the model raise ExchangeError when it is asked for what its weights make."""

    def answer(*args: Any, **kwargs: Any) -> NoReturn:
        raise ExchangeError(
            f"the weights are torn: {why}; update all of them, or start the engine anew"
        )

    asked = next(name for name in ASKED if hasattr(type(model), name))
    # On the instance, before what its class has.
    vars(model)[asked] = answer


def accept(model: nn.Module) -> None:
    """Have the model answer again."""
    for name in ASKED:
        vars(model).pop(name, None)
