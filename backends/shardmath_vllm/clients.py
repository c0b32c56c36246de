"""Clients: how a trainer speaks to an engine in its own process; over HTTP, vLLM's own client does."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Client", "LLMClient"]


class Client(Protocol):
    """What speaks to an engine, such as vLLM's HTTPVLLMWeightSyncClient."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class LLMClient:
    """Speaks to a `vllm.LLM` that was made in this process, whose workers may be processes of their own."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have its workers join."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Before an update."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have its workers receive."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """After an update. What was cached of prompts is of the old weights, and is dropped."""
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()
