"""Trainers: what each rank of a trainer does to meet its engines, and to send them its weights.

trainer = Trainer.trainer_init(TrainerInfo("10.0.0.1:29600", 4, workers=2, rank=rank), client=client, source=model)
trainer.send_weights()                                          # on every rank, after each step

1. Rank 0 speaks to the engines, through the client of each; all ranks move what they hold themselves.
2. A worker that fails is an error on all ranks, within the time limit. The ranks then meet again, by `trainer_init`.
3. Any thread may call, one at a time: which calls belong together is their order.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, plural
from shardmath.models.refits.coverage import Native
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.agreement.turns import as_main
from shardmath_torch.moves.exchange.local import check_device
from shardmath_torch.tensors.refits.holders import describe_safely
from shardmath_torch.tensors.refits.views import bind_side, name_natives
from shardmath_vllm.calls import GRACE_S, Calls
from shardmath_vllm.clients import Client
from shardmath_vllm.infos import TrainerInfo, Updating
from shardmath_vllm.link import Life, Link, together
from shardmath_vllm.meeting import Given, Meeting, among_trainers
from shardmath_vllm.source import (
    Source,
    check_kept,
    check_types,
    read_source,
    watch_modules,
)
from shardmath_vllm.update import Phase, Update

__all__ = ["Trainer"]


TORN_FIX = (
    "engines may have partly new weights: before they get a request, call trainer_init and send_weights again on all "
    "ranks, or start the engines again"
)
"""What to do after an error while weights moved."""


class Trainer:
    """One rank of a trainer, connected to inference engines to send them its weights; made by `Trainer.trainer_init`.

    As vLLM's own have it, `client` is what that was given, and `is_sender` says whether this rank calls the engines.
    """

    init_info_cls = TrainerInfo

    def __init__(
        self,
        client: Client | Sequence[Client],
        source: Source,
        link: Link,
        name: str = "",
        calls: Calls | None = None,
    ) -> None:
        self.client = client
        self._name = name
        self.source = source
        self.link = link
        self._clients = _list_clients(client) if self.is_sender else []
        self._calls = calls or Calls()
        self._update_count = 0
        self._watched = watch_modules(source)
        # The tensors that `_check` has found to fit the plan last, and their layouts in memory.
        self._fitting: dict[Native, object] = {}

    @classmethod
    @as_main()
    def trainer_init(
        cls,
        init_info: TrainerInfo,
        *,
        client: Client | Sequence[Client],
        source: Any,
    ) -> Trainer:
        """Connect to engines, one per client, and return a Trainer to send them the tensors of `source`. Collective
        over the trainer's ranks.

        Call it again to recover after a failure. `source` is a module, plain or under FSDP2, HSDP or tensor
        parallelism, a WeightSource of vLLM, or a Source. Raises ExchangeError on all ranks if one does not come, or
        if its arguments or its tensors do not fit the others'; a trainer of one rank raises ValueError or TypeError for
        its own arguments.
        """
        with among_trainers(init_info) as ranks:
            clients = together(ranks, "name its engines", lambda: _check_clients(client, init_info))
            this_source = together(ranks, "read its source", lambda: _read(source, init_info))
            # Drawn, not counted: a process that was started again would count from 0.
            name = gather(secrets.token_hex(8), ranks)[0] if ranks else secrets.token_hex(8)
            meeting = Meeting(init_info, name, init_info.rank)
            join_calls = []
            for engine, engine_client in enumerate(clients):
                joining = init_info.tell(engine, name)
                join_calls.append(partial(engine_client.init_weight_transfer_engine, joining))
            calls = Calls()
            calls.ask(join_calls, meeting.call_off)
            with calls.explain():
                link = meeting.join(Given(this_source.tell()))
            try:
                # All ranks have connected, but an engine's answer may still be an error.
                wait = partial(calls.answer, init_info.timeout)
                link.board.relay("join its engines", wait)
            except BaseException:
                link.leave()
                raise
        return cls(client, this_source, link, name, calls)

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the one rank of the trainer that calls the engines."""
        return self.link.place == 0

    @as_main()
    def send_weights(self) -> None:
        """Send this rank's weights, as they are now, to every engine. Collective over the trainer's ranks.

        Raises ExchangeError on all ranks if a worker or a trainer fails. If that is before any weight has moved,
        engines continue with the weights that they had.
        """
        self._update_count += 1
        life = Life(self.link, Update(self._update_count))
        try:
            with life.failing():
                self._send(life)
        except ExchangeError as error:
            if life.update.phase is Phase.TORN:
                raise ExchangeError(f"{message_of(error)}\n{TORN_FIX}") from error
            raise
        finally:
            self._release()

    def _send(self, life: Life) -> None:
        """Run all steps of an update: start it in the engines, move, take the engines' answers, and end it there."""
        try:
            life.call(self._begin)
            with self._calls.explain():
                life.move(self._check, self._move, lambda: self._calls.fault)
            life.take(partial(self._calls.answer, self.link.timeout))
        except BaseException:
            if life.update.is_new:
                # Engines end the update even so, since they still have adapters that were made for the old weights.
                self._calls.try_to_tell(self._list_ends(), GRACE_S)
            raise
        life.end(lambda: self._calls.tell(self._list_ends(), self.link.timeout))

    def _begin(self) -> None:
        """Have engines begin an update, then receive. Raises ExchangeError if one does not begin."""
        self._calls.tell([partial(_start, client) for client in self._clients], self.link.timeout)
        updating = vars(Updating(self._update_count, self._name))
        self._calls.ask([partial(client.update_weights, updating) for client in self._clients])

    def _list_ends(self) -> list[Callable[[], None]]:
        """The functions that tell the engines that an update is over."""
        return [client.finish_weight_update for client in self._clients]

    def _move(self) -> None:
        """Send this rank's tensors, one refit of the link after the other."""
        for refit in self.link.refits:
            src = self.source.select(refit.planned.trainer.natives(self.link.place))
            # Without modules: `_check` has found, once for all portions, that the modules still have these tensors.
            refit.prepare(src=src, modules=())
            refit(acknowledge=self.link.acknowledges)
            refit.release()

    def shutdown(self) -> None:
        """Disconnect from the engines, which continue with the weights that they have."""
        self.link.leave()

    def _check(self) -> None:
        """Raise StoreError or ExchangeError if this rank's tensors differ from the plan, have no memory, or are no
        longer the modules' parameters.

        It finds all that preparing and moving the portions would refuse, while engines still have all of their weights.
        """
        self.source = self.source.renewed()
        check_kept(self._watched, self.source)
        natives = name_natives(self.source.tensors)
        found: dict[Native, object] = {}
        for native, tensor in natives.items():
            found[native] = id(tensor), describe_safely(tensor)
        # The rest goes by these alone, and takes several times as long.
        if found == self._fitting:
            return
        planned = self.link.planned
        place = self.link.place
        check_types(self.source, planned.trainer, place)
        views = bind_side(planned, place, None, natives, (), {})
        device = compat.device_of(self.link.group)
        for name, tensor in views.tensors.items():
            check_device(repr(name), tensor, device)
        self._fitting = found

    def _release(self) -> None:
        """Free the tensors that were made for one update."""
        if self.source.renew is not None:
            self.source = self.source.released()
            # Another tensor may get the identity of one that is freed.
            self._fitting = {}


def _read(given: Any, info: TrainerInfo) -> Source:
    """The Source of `given`. Raises ValueError if its ranks are not the trainer's."""
    source = read_source(given, info.dtype, rank=info.rank, trainers=info.trainers)
    _check_ranks(source, info)
    return source


def _check_clients(given: Any, info: TrainerInfo) -> list[Client]:
    """The clients, one per engine; [] on ranks that call no engine. Raises ValueError for other values."""
    if isinstance(given, str):
        raise ValueError(f"client={given!r} is text, not a client; pass HTTPClient({given!r})")
    if not info.is_sender:
        return []
    clients = _list_clients(given)
    if len(clients) != len(info.engines):
        raise ValueError(
            f"client= has {plural(clients, 'client')}, but TrainerInfo's workers= names "
            f"{plural(info.engines, 'engine')}; pass one client per engine"
        )
    for client in clients:
        if not isinstance(client, Client):
            kind = type(client).__name__
            raise ValueError(
                f"client= has {kind}, which lacks a client's methods; pass HTTPClient(url) or LLMClient(llm)"
            )
    return clients


def _list_clients(given: Any) -> list[Any]:
    """The clients as a list, one per engine."""
    return list(given) if isinstance(given, Sequence) else [given]


def _check_ranks(source: Source, info: TrainerInfo) -> None:
    """Raise ValueError if the source's ranks differ from TrainerInfo's."""
    if isinstance(source.side, Mapping):
        meshes = {layout.mesh for layout in source.side.values()}
    else:
        meshes = set(source.side.meshes)
    last = max(max(mesh.ranks) for mesh in meshes)
    if last >= info.trainers:
        raise ValueError(
            f"the model has tensors on rank {last}, but TrainerInfo has trainers={info.trainers}, from rank 0 on; "
            f"if ranks 0 to {last} all train this model, pass trainers={last + 1}, and call trainer_init on all of "
            f"them; otherwise pass a Source, whose side= numbers the ranks that train it from 0 on"
        )
    if source.rank is not None and info.trainers > 1 and source.rank != info.rank:
        raise ValueError(
            f"TrainerInfo has rank={info.rank}, but this process is rank {source.rank} of the ranks over which "
            f"the model is divided; pass TrainerInfo rank={source.rank}"
        )


def _start(client: Client) -> None:
    """Have the engine begin an update, even if it has begun an earlier one that never came."""
    try:
        client.start_weight_update()
    except Exception as error:
        # vLLM refuses to begin an update while one is open. To end one in which no weights came changes nothing.
        try:
            client.finish_weight_update()
        except Exception:
            raise error from None
        client.start_weight_update()
