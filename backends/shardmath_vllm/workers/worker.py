"""Workers: the weight-transfer engine that vLLM makes in each of its workers for `{"backend": "shardmath"}`.

1. As it is told of a trainer, a worker joins it, records its own model's loader, and plans.
2. An update arrives a layer at a time, in tensors of the form in which weights are loaded; vLLM makes of them what it
   runs. Beside the model a worker needs one layer, and what is under way.
3. Nothing is taken back before all ranks are there. Where anything fails later, on whatever rank, no worker's model
   answers until an update is over: others of its engine may have other weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.agreement.turns import as_main
from shardmath_vllm import infos
from shardmath_vllm.link import Link
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from shardmath_vllm.workers.coverage import check_coverage, check_stays, check_types
from shardmath_vllm.workers.loading import Loading
from shardmath_vllm.workers.reducing import join_groups, reducing
from shardmath_vllm.workers.refusing import accept, refuse

__all__ = ["Engine"]


class _Joining(infos.Joining, WeightTransferInitInfo):
    """As vLLM has it."""


class _Updating(infos.Updating, WeightTransferUpdateInfo):
    """As vLLM has it."""


class NotJoinedError(ExchangeError, RuntimeError):
    """No trainer was joined: RuntimeError too, as vLLM's own engines raise it."""


class Engine(WeightTransferEngine[_Joining, _Updating]):
    """One worker's end of transfers."""

    init_info_cls = _Joining
    update_info_cls = _Updating
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._loading = Loading(model, vllm_config.model_config)
        self._link: Link | None = None
        self._meeting = ""

    @as_main()
    def init_transfer_engine(self, init_info: _Joining) -> None:
        """Join a trainer, and leave the one before. Raises ExchangeError where the ranks cannot plan together."""
        self.shutdown()
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        if not 0 <= number < init_info.workers:
            raise ExchangeError(
                f"worker {number} of an engine that the trainer takes to have {init_info.workers}; "
                f"give its number of workers in TrainerInfo"
            )

        def record(told: Told) -> sm.Recorded:
            check_stays(parallel)
            return self._loading.record(told.served, told.checkpoint, check)

        def check(recorded: sm.Recorded) -> None:
            check_types(recorded)
            check_coverage(recorded, self.model, init_info.own)

        is_joint = self.vllm_config.quant_config is not None and parallel.world_size > 1
        given = Given(engine=init_info.engine, record=record, is_joint=is_joint)
        meeting = Meeting(init_info, init_info.meeting, init_info.first + number)
        link = meeting.join(given)
        try:
            if is_joint:
                link.beside.update(join_groups(link.store, init_info))
        except BaseException:
            link.leave()
            raise
        self._link = link
        self._meeting = init_info.meeting

    def start_weight_update(self) -> None:
        """Nothing: weights are taken back once all ranks have come to send and to receive others."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights, and have vLLM run them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @as_main()
    def receive_weights(self, update_info: _Updating) -> None:
        """Receive all weights, and have vLLM run them. Raises ExchangeError on all ranks where one fails.

        Raises NotJoinedError before `init_transfer_engine`.
        """
        link = self._link
        if link is None:
            raise NotJoinedError("no trainer was joined; call init_weight_transfer_engine first")
        if update_info.meeting != self._meeting:
            # Ranks of the one that was joined last have not come for this.
            raise ExchangeError(
                "this engine has joined another trainer since; meet it again, by trainer_init"
            )
        begun: list[bool] = []

        def act() -> None:
            begun.append(True)
            self._receive(link)

        try:
            link.move(update_info.number, lambda: None, act)
        except BaseException as error:
            # Also where this rank has all of its weights: one of the others may not have.
            if begun:
                refuse(self.model, f"an update failed ({word_objection(error)})")
            raise
        accept(self.model)

    def _receive(self, link: Link) -> None:
        """The portions of an update, one after the other."""
        try:
            self._loading.begin()
            with reducing(link.beside):
                for portion in range(len(link.refits)):
                    self._receive_portion(link, portion)
                self._loading.finish()
        except BaseException:
            self._loading.undo()
            raise

    def _receive_portion(self, link: Link, number: int) -> None:
        """One portion into memory that is given back once vLLM has made of it what it runs."""
        refit = link.refits[number]
        assert link.recorded is not None, "workers have recorded"
        own, stored = self._find_stored(link, refit)
        unwritten = link.recorded.unwritten
        left = {name: unwritten.get(name, 0) for name in stored}
        refit.prepare(dst={own: self._loading.materialise(left)}, modules=())
        # Where ranks process together, none begins to before all of them have what is to be processed.
        refit(acknowledge=link.acknowledges)
        # Nobody else has these tensors now, so each module's go as soon as vLLM has made of them what it runs.
        refit.release()
        self._loading.process(stored)

    def _find_stored(self, link: Link, refit: smt.Refit) -> tuple[str, set[str]]:
        """What the refit calls this worker's engine, and the worker's tensors that it fills."""
        for name, engine in refit.planned.engines.items():
            if link.place in engine.ranks:
                return name, {native for _, native in engine.natives(link.place)}
        raise AssertionError("all engines are in all portions")

    def finish_weight_update(self) -> None:
        """Nothing: an update is over when `update_weights` is, and where that raises it is over nowhere for sure."""

    def shutdown(self) -> None:
        """Leave the trainer; the engine goes on with the weights that it has."""
        if self._link is not None:
            self._link.leave()
            self._link = None
