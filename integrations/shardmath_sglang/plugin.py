"""Plugin: what SGLang calls in each of its processes, by the entry point in the group `sglang.srt.plugins`.

SGLang's own way in, `--custom-weight-loader`, would let an error out of the loader, which ends the server. The hook
answers with the error instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from shardmath.base.text import message_of, word_error
from shardmath_sglang.client import FORMAT

__all__ = ["register"]

TARGET = (
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ".WeightUpdater.update_weights_from_tensor"
)
"""What each rank does with what `/update_weights_from_tensor` has for it."""


def register() -> None:
    """Register the hook with SGLang, which applies it after all plugins were called."""
    HookRegistry.register(TARGET, update, HookType.AROUND)


def update(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    *,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Do what a trainer says by SGLangClient; call SGLang's own method for any other format."""
    if load_format != FORMAT:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    # Processes that run no model load plugins as well.
    from shardmath_sglang.worker import obey

    try:
        obey(updater, named_tensors)
    except Exception as error:
        return False, message_of(word_error(error))
    return True, "Success"
