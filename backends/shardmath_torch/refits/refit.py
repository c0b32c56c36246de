"""Refit: a trainer's and an engine's stored tensors bound once, and moved as often as wanted.

refit = smt.Refit(sm.refit(trainer, engine, shapes))            # collective, once
refit.prepare(src=dict(model.named_parameters()))               # on a trainer rank; collective
refit.prepare(dst=dict(model.named_parameters()))               # on an engine rank
refit()                                                         # collective, after every step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.refits.refit import Refit as Planned
from shardmath.storage.stored import Side
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.naming import word_objection
from shardmath_torch.agreement.transport import join
from shardmath_torch.commits.blocks import Member
from shardmath_torch.exchange.compile import DEFAULT_TIMEOUT_S, DIRECT, compile
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.mover import move_held
from shardmath_torch.observing.bars import Progress
from shardmath_torch.observing.moved import Moved
from shardmath_torch.refits.gathered import check_not_gathered, find_groups, give_back
from shardmath_torch.refits.holders import (
    Watched,
    find_moved,
    find_owners,
    find_removed,
    find_replaced,
    watch,
)
from shardmath_torch.refits.views import (
    Function,
    Given,
    Natives,
    Views,
    bind_views,
    compute,
    name_natives,
)

__all__ = ["Refit"]

SHOWN = 24
"""Hexadecimal digits of a digest that a claim has."""


@public
class Refit:
    """A planned refit made ready on this rank: `prepare` binds its tensors, a call moves them.

    `timeout` is in seconds; with `commit="all"` a step is in place on all ranks or on none, as `compile` has it.
    Raises ExchangeError on every rank where ranks plan differently.
    """

    def __init__(
        self,
        planned: Planned,
        *,
        group: compat.Group | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_inflight_bytes: int | None = None,
        commit: str = DIRECT,
    ) -> None:
        if not isinstance(planned, Planned):
            raise ExchangeError(
                f"planned is not a refit, but {type(planned).__name__}; give what sm.refit gives"
            )
        self.planned = planned
        self._mover = compile(
            planned.plan,
            group=group,
            timeout=timeout,
            max_inflight_bytes=max_inflight_bytes,
            commit=commit,
        )
        self._party = join(compat.group_of(group), timeout, timeout)
        self._src = Views({}, [])
        self._dst = Views({}, [])
        self._at: list[Watched] | None = None
        self._groups: list[object] = []

    @property
    def version(self) -> int:
        """How many steps were committed and are in place here, as `Mover.version` counts them."""
        return self._mover.version

    @property
    def in_doubt(self) -> bool:
        """Whether the others may have one version more, as of `Mover.in_doubt`."""
        return self._mover.in_doubt

    @property
    def torn(self) -> tuple[str, ...]:
        """After a step that failed: the plan's tensors of this rank that may be neither old nor new."""
        return self._mover.torn

    @property
    def last(self) -> Moved | None:
        """What the latest step did on this rank, as of `Mover.last`."""
        return self._mover.last

    @property
    def shadow_bytes(self) -> int:
        """Bytes beside the tensors that this rank takes with commit="all"."""
        return self._mover.shadow_bytes

    @property
    def member(self) -> Member:
        """The refit as `commit` sees it."""
        return self._mover.member

    def prepare(
        self,
        src: Given | None = None,
        dst: Given | Mapping[str, Given] | None = None,
        *,
        own: Sequence[str] = (),
        functions: Mapping[str, Function] | None = None,
    ) -> None:
        """Bind this rank's tensors by their own names: all its parameters and persistent buffers. Collective.

        `src` is a trainer rank's, `dst` an engine rank's, by engine where these have names; a mapping per chunk where
        a rank has virtual stages. `own` are globs of tensors that are not the trainer's. `functions` are those that
        rows name. Raises ExchangeError on all ranks, with all that does not fit on one.
        """
        objection = ""
        self._at = None
        try:
            self._bind(src, dst, own, functions or {})
        except Exception as error:
            # The others wait for this rank's vote, whatever went wrong here.
            objection = word_objection(error)
        claim = f"prepare refit {self.planned.plan.digest[:SHOWN]}"
        ballot = Ballot(claim, objection=objection)
        self._party.together(
            lambda: self._party.vote(ballot), lambda failure, rank: "tensors were prepared"
        )

    def _bind(
        self,
        src: Given | None,
        dst: Given | Mapping[str, Given] | None,
        own: Sequence[str],
        functions: Mapping[str, Function],
    ) -> None:
        here = name_natives(src)
        self._src = self._bind_side(here, None, own, functions)
        tensors: dict[str, Tensor] = {}
        computed = []
        received: list[Tensor] = []
        watched = self._watch("source", src, here, self.planned.trainer)
        for engine, given in self._name_engines(dst).items():
            natives = name_natives(given)
            check_not_gathered(self._keep_stored(natives, self.planned.engines[engine]))
            received += natives.values()
            views = self._bind_side(natives, engine, own, functions)
            tensors |= views.tensors
            computed += views.computed
            watched += self._watch(engine, given, natives, self.planned.engines[engine])
        find_owners(watched)
        self._dst = Views(tensors, computed)
        self._groups = find_groups(received)
        self._at = watched

    def _watch(
        self, name: str, given: Given | None, natives: Natives, bound: Side
    ) -> list[Watched]:
        """The tensors that move, to be looked at before every move; those that are a rank's own may be anywhere."""
        if self._party.rank not in bound.ranks:
            return []
        return watch(name, given, self._keep_stored(natives, bound))

    def _keep_stored(self, natives: Natives, bound: Side) -> Natives:
        """Those that the side has on this rank."""
        stored = bound.natives(self._party.rank)
        return {native: tensor for native, tensor in natives.items() if native in stored}

    def _name_engines(self, dst: Given | Mapping[str, Given] | None) -> dict[str, Given | None]:
        """What was given for every engine that this rank is of."""
        engines = self.planned.engines
        rank = self._party.rank
        mine = [name for name, bound in engines.items() if rank in bound.ranks]
        if len(engines) > 1 or _is_by_name(dst, engines):
            return dict(_check_named(rank, mine, dst))
        if not mine and name_natives(dst):  # type: ignore[arg-type]
            raise ExchangeError(f"rank {rank} is not of the engine, and was given dst; pass None")
        return dict.fromkeys(mine, dst)  # type: ignore[arg-type]

    def _bind_side(
        self,
        natives: Natives,
        engine: str | None,
        own: Sequence[str],
        functions: Mapping[str, Function],
    ) -> Views:
        """The views of the trainer's tensors, or of an engine's."""
        planned = self.planned
        rank = self._party.rank
        bound = planned.trainer if engine is None else planned.engines[engine]
        if rank not in bound.ranks:
            if natives:
                raise ExchangeError(f"rank {rank} is not a trainer, and was given src; pass None")
            return Views({}, [])
        slots = planned.slots(rank, engine)
        layouts = {name: bound.layouts[_drop_window(name, bound)] for name in slots}
        receives = engine is not None
        return bind_views(bound, slots, layouts, natives, rank, own, functions, receives=receives)

    def __call__(
        self,
        *,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        progress: Progress | None = None,
    ) -> None:
        """Move what was bound, as a mover does, and compute what functions store. Collective; arguments as a mover's.

        Raises ExchangeError, on all ranks, where one has not prepared, where its tensors lie otherwise in memory,
        where another, in other memory, is in the place of one: in the mapping that was given, or in a module that had
        it; or where no module has it any longer that had it. What FSDP2 has gathered of the engines' parameters it
        gathers again for its next forward.
        """
        move_held(
            self._mover,
            self._src.tensors or None,
            out=self._dst.tensors or None,
            objection=self._object(),
            timeout=timeout,
            acknowledge=acknowledge,
            label=label,
            first=partial(give_back, self._groups) if self._groups else None,
            finalize=self._compute,
            progress=progress,
        )

    def _compute(self, arrived: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """What functions make of what has arrived, and where that is stored."""
        mark_written(one.stored for one in self._dst.computed)
        for one in self._dst.computed:
            with torch.inference_mode():
                made = compute(one, arrived[one.key])
            yield one.stored, made

    def _object(self) -> str:
        """What speaks against a move: tensors that are not bound, or no longer where they were; "" for nothing."""
        if self._at is None:
            return "this rank has not prepared the refit; call prepare() on all ranks"
        moved = find_moved(self._at)
        if moved is not None:
            return (
                f"{moved} lies otherwise in memory than when prepare() was called; "
                f"call it again on all ranks"
            )
        try:
            replaced = find_replaced(self._at)
        except ExchangeError as error:
            return word_objection(error)
        if replaced is not None:
            return (
                f"in the place of {replaced} is another tensor than when prepare() was called; "
                f"prepare again on all ranks"
            )
        removed = find_removed(self._at)
        if removed is not None:
            return (
                f"{removed} is no longer where its module had it when prepare() was called: it was deleted, or has "
                f"another name, as under weight_norm; prepare again on all ranks, with what is to move"
            )
        return ""


def _check_named(
    rank: int, mine: Sequence[str], dst: Given | Mapping[str, Given] | None
) -> Mapping[str, Given]:
    """What was given by engine, for these of the rank. Raises ExchangeError where it is of others, or not by engine."""
    given = dst or {}
    named = list(given) if isinstance(given, Mapping) else [type(given).__name__]
    if not isinstance(given, Mapping) or set(named) != set(mine):
        raise ExchangeError(
            f"rank {rank} is of {', '.join(mine) or 'no engine'}, and was given "
            f"{', '.join(map(str, named)) or 'none'}; pass dst={{engine: tensors}} for each of them"
        )
    return given  # type: ignore[return-value]


def _is_by_name(dst: object, engines: Mapping[str, Side]) -> bool:
    """Whether the tensors of the only engine are given under its name, as those of several are."""
    if not isinstance(dst, Mapping) or set(dst) != set(engines):
        return False
    return not any(isinstance(given, Tensor) for given in dst.values())


def _drop_window(local: str, bound: Side) -> str:
    """The logical tensor of a local one: a window's has its number behind."""
    return local if local in bound.layouts else local.rpartition("[")[0]
