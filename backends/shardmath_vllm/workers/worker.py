"""Workers: the weight-transfer engine that vLLM makes in each of its workers for `{"backend": "shardmath"}`.

1. As it is told of a trainer, a worker joins it, records its own model's loader, and plans.
2. An update arrives a layer at a time, in tensors of the form in which weights are loaded; vLLM makes of them what it
   runs. Besides the model a worker needs memory for one layer, and for the bytes in flight.
3. Nothing is taken back before all ranks are there. If anything fails, on whatever rank, after a worker has begun to
   receive, its model does not answer until updates, of one trainer or another, have written again all that the one that
   failed may have written on any worker of the engine. A worker that has not begun keeps its weights and answers:
   without it nobody has moved a byte.
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
from shardmath.base.errors import ExchangeError, StoreError
from shardmath.base.text import message_of, plural
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.agreement.turns import as_main
from shardmath_vllm import infos
from shardmath_vllm.cells import Cells
from shardmath_vllm.link import Life, Link, NotJoinedError
from shardmath_vllm.meeting import Given, Meeting
from shardmath_vllm.source import Told
from shardmath_vllm.update import Phase, Update
from shardmath_vllm.workers.coverage import (
    check_coverage,
    check_stays,
    check_types,
    find_engine,
    list_written,
)
from shardmath_vllm.workers.loading import Loading
from shardmath_vllm.workers.reducing import join_groups, reducing
from shardmath_vllm.workers.refusing import accept, refuse

__all__ = ["WorkerEngine"]


class _Joining(infos.Joining, WeightTransferInitInfo):
    """The message to a worker, as a class that vLLM accepts."""


class _Updating(infos.Updating, WeightTransferUpdateInfo):
    """The message to a worker, as a class that vLLM accepts."""


class WorkerEngine(WeightTransferEngine[_Joining, _Updating]):
    """The weight transfer engine of one vLLM worker, which receives weights from a trainer."""

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
        self._writes = Cells({})
        self._torn = Cells({})

    @as_main()
    def init_transfer_engine(self, init_info: _Joining) -> None:
        """Connect to the trainer that `init_info` describes, after disconnecting from any earlier trainer. Raises
        ExchangeError if connecting fails.
        """
        self.shutdown()
        parallel = self.parallel_config
        replica = parallel.world_size
        worker = parallel.data_parallel_index * replica + parallel.rank
        if worker >= init_info.workers or init_info.workers % replica:
            raise ExchangeError(
                f"TrainerInfo has workers={init_info.workers} for engine {init_info.engine}, but this is its worker "
                f"{worker}, counted from 0, and a replica of it has {plural(replica, 'worker')}; pass "
                f"TP times PP times DP"
            )

        def record(told: Told) -> sm.storage.Recorded:
            check_stays(self.vllm_config)
            _check_transport(init_info.transport, self.device)
            try:
                return self._loading.record(told.served, told.checkpoint, check)
            except StoreError as error:
                fix = "if the trainer's model is not the engine's, start both from one checkpoint"
                raise StoreError(f"{message_of(error)}\n{fix}") from error

        def check(recorded: sm.storage.Recorded) -> None:
            check_types(recorded)
            check_coverage(recorded, self.model, init_info.own)

        is_joint = self.vllm_config.quant_config is not None and parallel.world_size > 1
        given = Given(engine=init_info.engine, record=record, is_joint=is_joint)
        meeting = Meeting(init_info, init_info.meeting, init_info.first + worker)
        link = meeting.join(given)
        try:
            if is_joint:
                link.beside.update(join_groups(link.board.store, init_info))
            writes = list_written(link.planned, link.place)
        except BaseException:
            link.leave()
            raise
        self._link = link
        self._meeting = init_info.meeting
        self._writes = writes

    def start_weight_update(self) -> None:
        """Do nothing: old weights stay until all ranks are ready to send and to receive."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights of the update that `update_info` describes (its number and connection), and have vLLM use
        them for inference.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @as_main()
    def receive_weights(self, update_info: _Updating) -> None:
        """Receive all weights of the update that `update_info` describes, and have vLLM use them for inference. Raises
        ExchangeError on all ranks if one fails.

        Raises NotJoinedError before `init_transfer_engine`.
        """
        link = self._link
        if link is None:
            raise NotJoinedError(
                "this worker is not connected to a trainer; call init_weight_transfer_engine first"
            )
        if update_info.meeting != self._meeting:
            # The ranks of the latest connection take no part in this update.
            raise ExchangeError(
                f"the update is for connection {update_info.meeting!r}, but this engine has joined another trainer "
                f"since, {self._meeting!r}; connect to it again by trainer_init"
            )
        life = Life(link, Update(update_info.number, writes=self._writes, torn=self._torn))
        why = "an update failed"
        try:
            life.receive(lambda: self._receive(link))
        except BaseException as error:
            why = f"an update failed ({word_objection(error)})"
            raise
        finally:
            self._settle(life.update, why)

    def _settle(self, update: Update, why: str) -> None:
        """Let the model answer if its weights are of one version on all ranks of the engine; else make it raise."""
        self._torn = update.mixed
        if not self._torn:
            accept(self.model)
        elif update.phase in (Phase.BEGUN, Phase.TORN):
            # Even if this rank has all of its weights: another rank may not. In other phases weights are mixed by an
            # earlier update, after which the model already raises.
            refuse(self.model, why)

    def _receive(self, link: Link) -> None:
        """Receive an update, one refit of the link after the other."""
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
        """Receive the tensors of one refit, and have vLLM make its running tensors of them, then free them."""
        refit = link.refits[number]
        assert link.recorded is not None, "workers have recorded"
        engine_name, engine = find_engine(refit.planned, link.place)
        stored_names = {native for _, native in engine.natives(link.place)}
        unwritten = link.recorded.unwritten
        unwritten_counts = {name: unwritten.get(name, 0) for name in stored_names}
        refit.prepare(dst={engine_name: self._loading.materialize(unwritten_counts)}, modules=())
        # If ranks process together, none begins before all of them have the tensors to process.
        refit(acknowledge=link.acknowledges)
        # Without the refit's references, the tensors of each module are freed as soon as vLLM has processed the module.
        refit.release()
        self._loading.process(stored_names)

    def finish_weight_update(self) -> None:
        """Do nothing: an update has ended on this worker when `update_weights` returns or raises."""

    def shutdown(self) -> None:
        """Disconnect from the trainer; the engine continues with the weights that it has."""
        if self._link is not None:
            self._link.leave()
            self._link = None


def _check_transport(transport: str, device: torch.device) -> None:
    """Raise ExchangeError if `transport` does not move tensors on the worker's device: the first update would fail,
    after the worker had given up its weights.
    """
    if transport == "gloo" and device.type != "cpu":
        raise ExchangeError(
            f"TrainerInfo has transport={transport!r}, which moves tensors on CPUs, but this engine runs on "
            f"{device.type!r}; pass transport='nccl'"
        )
