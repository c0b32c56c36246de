"""Client: how a trainer speaks to an engine in a Ray actor; also an example of a custom client.

1. A client has the four methods of `shardmath_vllm.Client`. Rank 0 of the trainer calls them, from several threads.
2. A call returns once the engine has done what was asked, or raises. `update_weights` lasts as long as the update.
3. Every call has a time limit, longer than the ranks' own, so that their errors come first.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown, word_error
from shardmath_torch.groups.agreement.party import is_time, word_bad_time
from shardmath_vllm.clients import TIMEOUT_S

__all__ = ["RayClient"]

METHODS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class RayClient:
    """A Client that connects a trainer to the engine in the Ray actor `actor`, whose class has the four methods of a
    Client, such as a subclass of LLMClient.

    `timeout`, in seconds, is for each answer, and has to be longer than `TrainerInfo.timeout`. Calls raise
    ExchangeError if the method raises in the actor, if the actor has died, or if it does not answer in time. Raises
    ValueError for a value that is not such an actor, or not a time.
    """

    def __init__(self, actor: Any, timeout: float = TIMEOUT_S) -> None:
        missing = [name for name in METHODS if not hasattr(getattr(actor, name, None), "remote")]
        if missing:
            raise ValueError(
                f"actor={shown(actor)} has no remote method {missing[0]!r}; pass the handle of an actor whose class "
                f"has it, such as a subclass of LLMClient"
            )
        if not is_time(timeout):
            raise ValueError(word_bad_time(timeout))
        self._actor = actor
        self._timeout = float(timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's workers connect to the trainer that `init_info` describes."""
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Tell the engine that an update of its weights begins."""
        self._ask("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the engine's workers receive the weights of the update that `update_info` describes."""
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engine that the update is over; `weight_version` is the name of the new weights."""
        self._ask("finish_weight_update", weight_version)

    def _ask(self, name: str, *args: object) -> None:
        """Call the actor's method `name`, and wait until it has returned. Raises ExchangeError if it does not."""
        try:
            ray.get(getattr(self._actor, name).remote(*args), timeout=self._timeout)
        except RayTaskError as error:
            fault = f"raised {word_error(error.cause)}"
        except GetTimeoutError:
            fix = "start it again if it hangs, or pass RayClient a longer timeout"
            fault = f"has not answered in {self._timeout:g} s; {fix}"
        except RayActorError as error:
            fix = "start an engine again, and call trainer_init with it on all ranks"
            fault = f"does not answer; {fix}: {word_error(error)}"
        except Exception as error:
            fault = f"could not be called: {word_error(error)}"
        else:
            return
        raise ExchangeError(f"{self._actor}, {name}: {fault}")
