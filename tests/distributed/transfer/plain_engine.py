"""An engine in this very process that runs a plain module: what vLLM's workers do, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import shardmath as sm
import shardmath_torch as smt
from shardmath import ExchangeError
from shardmath_torch.groups.agreement.turns import as_main
from shardmath_vllm.infos import Joining
from shardmath_vllm.link import Life, Link
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from shardmath_vllm.update import Update

__all__ = ["PlainEngine"]


class PlainEngine:
    """Speaks to itself, as a client."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.link: Link | None = None
        self._meeting = ""

    @as_main()
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        if self.link is not None:
            self.link.leave()
        joining = Joining(**init_info)
        given = Given(engine=joining.engine, record=self._record)
        self.link = Meeting(joining, joining.meeting, joining.first).join(given)
        self._meeting = joining.meeting

    def start_weight_update(self) -> None:
        """Nothing."""

    @as_main()
    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.link is not None
        if update_info["meeting"] != self._meeting:
            raise ExchangeError("this engine has joined another trainer since")
        Life(self.link, Update(update_info["number"])).receive(self._receive)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing."""

    def _record(self, told: Told) -> sm.storage.Recorded:
        def load(named: Mapping[str, Tensor]) -> None:
            for name, tensor in named.items():
                self.module.get_parameter(name).data.copy_(tensor)

        return smt.record(load, told.served, self.module)

    def _receive(self) -> None:
        assert self.link is not None
        for refit in self.link.refits:
            (engine,) = refit.planned.engines.values()
            made = {}
            for _, name in engine.natives(self.link.place):
                made[name] = self.module.get_parameter(name).data
            refit.prepare(dst=made, modules=())
            refit()
