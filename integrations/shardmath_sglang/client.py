"""Client: how a trainer speaks to an SGLang server.

1. SGLang passes weights on to each rank by `/update_weights_from_tensor`, in a session between
   `/begin_weight_update` and `/end_weight_update`. Here a text goes that way instead, which says what to do.
2. The hook in `plugin` takes the load format "shardmath"; a server without the plugin rejects it.
"""

from __future__ import annotations

import base64
import json
import pickle
from contextlib import suppress
from typing import Any

from shardmath.base.arguments import as_integer
from shardmath.base.errors import ExchangeError
from shardmath_vllm.clients import TIMEOUT_S, HTTPClient

__all__ = ["FORMAT", "SGLangClient"]

FORMAT = "shardmath"
"""The load format that the hook takes for its own."""
TARGET = {"selector": "target"}
"""The model, and not its draft."""


class SGLangClient(HTTPClient):
    """A Client that connects a trainer to the SGLang server at `url`, which has this package as a plugin. The trainer's
    process does not need SGLang.

    `workers` is the number of the engine's ranks, as in TrainerInfo. `timeout` is as for HTTPClient.
    """

    def __init__(self, url: str, workers: int, timeout: float = TIMEOUT_S) -> None:
        super().__init__(url, timeout)
        self._workers = as_integer(workers, "workers", ValueError)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's ranks connect to the trainer that `init_info` describes."""
        # A session stays open after an update that failed, and SGLang opens no second one.
        with suppress(ExchangeError):
            self.start_weight_update()
        try:
            self._tell({"join": init_info}, flush_cache=False)
        finally:
            self.finish_weight_update()

    def start_weight_update(self) -> None:
        """Tell the engine that an update of its weights begins."""
        self._post("begin_weight_update", TARGET)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the engine's ranks receive the weights of the update that `update_info` describes."""
        self._tell({"update": update_info}, flush_cache=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engine that the update is over; `weight_version` is the name of the new weights."""
        self._post("end_weight_update")
        if weight_version is not None:
            # By default, SGLang would abort all requests for that.
            named = {"new_version": weight_version, "abort_all_requests": False}
            self._post("update_weight_version", named)

    def _tell(self, said: dict[str, Any], *, flush_cache: bool) -> None:
        """Have each rank's hook do what `said` says."""
        # SGLang unpickles it, and accepts no classes but some; each rank takes the entry with its number.
        entry = base64.b64encode(pickle.dumps(json.dumps(said))).decode()
        body = {
            "serialized_named_tensors": [entry] * self._workers,
            "load_format": FORMAT,
            "flush_cache": flush_cache,
        }
        self._post("update_weights_from_tensor", body | TARGET)
