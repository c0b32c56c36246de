"""Plugin: what SGLang calls in each of its processes, by the entry point in the group `sglang.srt.plugins`.

1. SGLang's own way in, `--custom-weight-loader`, would let an error out of the loader, which ends the server. The hooks
   answer with the error instead.
2. A rank joins outside of SGLang's sessions for updates. At the end of one, SGLang converts the weights of some layers
   as if they had just been loaded, and as a rank joins, none are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from shardmath.base.text import message_of, word_error
from shardmath_sglang.client import JOIN, UPDATE

__all__ = ["register"]

SCHEDULER = (
    "sglang.srt.managers.scheduler_components.weight_updater"
    ".SchedulerWeightUpdaterManager.update_weights_from_tensor"
)
"""What each rank does with a request to `/update_weights_from_tensor`."""
RUNNER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ".WeightUpdater.update_weights_from_tensor"
)
"""What each rank does, in a session, with what the request has for it."""


def register() -> None:
    """Register the hooks with SGLang, which applies them after all plugins were called."""
    HookRegistry.register(SCHEDULER, join, HookType.AROUND)
    HookRegistry.register(RUNNER, update, HookType.AROUND)


def join(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Join the trainer that an SGLangClient names; call SGLang's own method for any other format."""
    if recv_req.load_format != JOIN:
        return original(manager, recv_req)
    # Processes that run no model load plugins as well.
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    from shardmath_sglang import worker

    def run() -> None:
        said = manager.tp_worker.deserialize_own_rank(recv_req.serialized_named_tensors)
        for _, runner in manager.tp_worker.weight_update_runners():
            worker.join(runner.weight_updater, said)

    success, message = _answer(run)
    return UpdateWeightsFromTensorReqOutput(success=success, message=message)


def update(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    *,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Take the weights that an SGLangClient announces; call SGLang's own method for any other format."""
    if load_format != UPDATE:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    from shardmath_sglang import worker

    return _answer(lambda: worker.receive(updater, named_tensors))


def _answer(run: Callable[[], None]) -> tuple[bool, str]:
    """Call `run`; return whether it succeeded, and SGLang's message or that of its error."""
    try:
        run()
    except Exception as error:
        return False, message_of(word_error(error))
    return True, "Success"
