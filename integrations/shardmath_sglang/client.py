"""Client: how a trainer speaks to an SGLang server.

1. SGLang passes weights on to each rank by `/update_weights_from_tensor`, in a session between
   `/begin_weight_update` and `/end_weight_update`. Here a text goes that way instead, which says what to do.
2. The hooks in `plugin` take two load formats for their own. SGLang itself would end on these.
3. Thus the ranks join outside of a session, where SGLang itself reads nothing and answers with an error.
"""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any, ClassVar

from shardmath.base.errors import ExchangeError
from shardmath_vllm.clients import HTTPClient

__all__ = ["JOIN", "UPDATE", "SGLangClient"]

JOIN = "shardmath_join"
"""The load format of a text that has the engine's ranks join a trainer."""
UPDATE = "shardmath"
"""The load format of a text that has them take its weights."""
MODEL = {"selector": "target"}
"""The model, and not its draft."""

NO_SESSION = "no weight-update session is open"
OUTSIDE = "must run between begin_weight_update() and end_weight_update()"
"""What SGLang says where a session is missing."""


class SGLangClient(HTTPClient):
    """A Client that connects a trainer to the SGLang server at `url`, which has this package as a plugin. The trainer's
    process does not need SGLang. `timeout` is as for HTTPClient.
    """

    _SERVER: ClassVar[str] = "an SGLang server"
    _NO_ROUTE: ClassVar[str] = "start a server of SGLang 0.5.23, or of a newer version that has it"

    _workers = 1
    """The engine's ranks, once it is connected."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engine's ranks connect to the trainer that `init_info` describes."""
        self._workers = init_info["workers"]
        # A session stays open after an update that failed.
        try:
            self.finish_weight_update()
        except ExchangeError as error:
            if NO_SESSION not in str(error):
                raise
        try:
            self._tell(JOIN, init_info)
        except ExchangeError as error:
            if OUTSIDE in str(error):
                fix = "install shardmath in SGLang's environment, and start the server again"
                raise ExchangeError(f"{self._url} has no plugin of shardmath; {fix}") from None
            raise

    def start_weight_update(self) -> None:
        """Tell the engine that an update of its weights begins."""
        self._post("begin_weight_update", MODEL)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the engine's ranks receive the weights of the update that `update_info` describes."""
        self._tell(UPDATE, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engine that the update is over; `weight_version` is the name of the new weights."""
        self._post("end_weight_update")
        if weight_version is not None:
            # By default, SGLang would abort all requests for that.
            named = {"new_version": weight_version, "abort_all_requests": False}
            self._post("update_weight_version", named)

    def _tell(self, load_format: str, said: dict[str, Any]) -> None:
        """Have each rank's hook for the load format do what `said` says."""
        # SGLang unpickles it, and accepts no classes but some; each rank takes the entry with its number.
        entry = base64.b64encode(pickle.dumps(json.dumps(said))).decode()
        body = {
            "serialized_named_tensors": [entry] * self._workers,
            "load_format": load_format,
            "flush_cache": load_format == UPDATE,
        }
        self._post("update_weights_from_tensor", body | MODEL)

    @staticmethod
    def _find_message(answer: Any) -> Any:
        """The message in the JSON of an answer that is an error."""
        return answer["message"]
