"""Refit: a trainer's and an engine's stored tensors bound once, and moved as often as wanted.

refit = smt.Refit(sm.refit(trainer, engine, shapes))            # collective, once
refit.prepare(src=dict(model.named_parameters()))               # on a trainer rank; collective
refit.prepare(dst=dict(model.named_parameters()))               # on an engine rank
refit()                                                         # collective, after every step
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.models.refits.refit import Refit as Planned
from shardmath.models.storage.stored import KnownSide
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import attempt
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.moves.commits.blocks import Member
from shardmath_torch.moves.commits.shadows import Pair
from shardmath_torch.moves.exchange.local import Local, Tensors
from shardmath_torch.moves.exchange.memory import mark_written
from shardmath_torch.moves.movers.calls import EVERY, Call
from shardmath_torch.moves.movers.compile import AgreeFirst, make_ready
from shardmath_torch.moves.movers.handles import Handle
from shardmath_torch.moves.movers.leaving import Leaves
from shardmath_torch.moves.movers.mover import Mover, ask_again, forget, move_by, replan_by
from shardmath_torch.moves.movers.settings import DEFAULT_TIMEOUT_S, DIRECT, Settings
from shardmath_torch.moves.movers.stages import Stage
from shardmath_torch.moves.observing.bars import Progress
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.tensors.refits.gathered import check_not_gathered, find_groups, give_back
from shardmath_torch.tensors.refits.holders import Watched, find_fault, find_owners, watch
from shardmath_torch.tensors.refits.views import (
    Computed,
    Function,
    Given,
    Natives,
    Views,
    are_related,
    bind_views,
    check_named,
    compute,
    drop_window,
    is_by_name,
    list_sides,
    name_natives,
)

if TYPE_CHECKING:
    from shardmath_torch.tensors.changes.changes import Changes
    from shardmath_torch.tensors.transforms.compile import EndStage

__all__ = ["Refit"]

SHOWN = 24
"""Hexadecimal digits of a digest that a claim has."""


class _Ends(Stage):
    """What a refit does at both ends of a move: it gives its views, and computes what functions store."""

    def __init__(self, refit: Refit) -> None:
        self._refit = refit

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """The views that were bound. Raises ExchangeError where there are none, also if they were released just now."""
        if self._refit._at is None:
            raise ExchangeError("this rank has not prepared the refit; call prepare() on all ranks")
        return self._refit._src.tensors or None, self._refit._dst.tensors or None

    def begin(self) -> None:
        """What FSDP2 has gathered of the engines' parameters is old from now on."""
        give_back(self._refit._groups)

    def finish(self, arrived: Tensors) -> Iterator[Pair]:
        """What functions make of what has arrived, and where that is stored."""
        computed = self._refit._dst.computed
        mark_written(one.stored for one in computed)
        for one in computed:
            with torch.inference_mode():
                made = compute(one, arrived[one.key])
            yield one.stored, made


@public
class Refit(Leaves):
    """A planned refit made ready on this rank: `prepare` binds its tensors, a call moves them.

    `timeout`, `max_inflight_bytes`, `commit` and `agree` are those of `compile`; on what is prepared, ranks vote every
    time. With `changes=True` a call sends what has changed since the one before, as `compile_changes` has it; `changes`
    is then what does so, and says what was sent. Raises ExchangeError on every rank where ranks plan differently.
    """

    def __init__(
        self,
        planned: Planned,
        *,
        group: compat.Group | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_inflight_bytes: int | None = None,
        commit: str = DIRECT,
        agree: str = EVERY,
        changes: bool = False,
    ) -> None:
        if not isinstance(planned, Planned):
            raise ExchangeError(
                f"planned is not a refit, but {type(planned).__name__}; give what sm.refit gives"
            )
        self.planned = planned
        settings = Settings(timeout, max_inflight_bytes, commit=commit, agree=agree)
        self._made: EndStage | None = None
        self._changes: Changes | None = None
        self._mover = self._make_mover(group, settings, changes)
        self._timeout = timeout
        self._party = self._join(group)
        self._bound = self._src = self._dst = Views({}, [])
        self._at: list[Watched] | None = None
        self._kept: list[Watched] | None = None
        self._modules: tuple[nn.Module, ...] | None = None
        self._groups: list[object] = []

    def _make_mover(self, group: compat.Group | None, settings: Settings, changes: bool) -> Mover:
        """What moves what is bound. Collective."""
        moving = self.planned.plan
        stages: tuple[Stage, ...] = (_Ends(self),)
        transforms = self.planned.transforms
        again: AgreeFirst | None = None
        if transforms is not None:
            # What few refits need is imported by these: transforms bring all formats along.
            from shardmath_torch.tensors.transforms.compile import agree_again, make_ends

            found = compat.group_of(group)
            timeout, commit = settings.timeout, settings.commit
            _, self._made = make_ends(transforms, moving, found, timeout, commit, holds=True)
            stages += (self._made,)
            again = functools.partial(agree_again, transforms)
        if changes:
            from shardmath_torch.tensors.changes.changes import make_changes

            self._changes = make_changes(moving, group, settings, stages=stages, agree_first=again)
            return self._changes
        return Mover(make_ready(moving, group, settings, stages, agree_first=again))

    def replan(
        self,
        planned: Planned,
        *,
        group: compat.Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Goes on with another refit: collective, as `Mover.replan` has it.

        Where engines have left the same refit (`planned.without`), what was bound stays bound. Otherwise all ranks
        prepare again, those of a refit to which engines have come back by `prepare()`, which binds what was bound.
        """
        found = self._party.group if group is None else group
        # What is no refit is objected to in the vote, for which the others wait.
        plan = planned.plan if isinstance(planned, Planned) else planned
        limit = self._timeout if timeout is None else timeout

        def go_on() -> None:
            self._timeout = limit
            self._party = self._join(found)
            self._kept = self._find_kept(planned)
            only_left = set(planned.plan.left).issuperset(self.planned.plan.left)
            self._at = self._kept if only_left and are_related(self.planned, planned) else None
            self._src = self._bound.keep(planned.moved)
            self.planned = planned

        replan_by(self._mover, plan, found, timeout, go_on)

    def _join(self, group: compat.Group | None) -> Party:
        """This rank in the group, in whose turns its mover is."""
        party = join(compat.group_of(group), self._timeout, Settings(self._timeout).grace)
        return replace(party, key=self.member.key)

    def _find_kept(self, planned: Planned) -> list[Watched] | None:
        """What is bound here that this refit moves, too; None where other tensors are to be bound."""
        rank = self._party.rank
        if rank in planned.plan.left:
            self._bound = self._dst = Views({}, [])
            return []
        if not are_related(self.planned, planned) or rank in self.planned.plan.left:
            return None
        if list_sides(self.planned, rank) != list_sides(planned, rank):
            return None
        return self._kept if self._at is None else self._at

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
        return self._mover.last if self.changes is None else self.changes.moved

    @property
    def shadow_bytes(self) -> int:
        """Bytes beside the tensors that this rank takes with commit="all"."""
        made = None if self._made is None else self._made.shadows
        return self._mover.shadow_bytes + (0 if made is None else made.nbytes)

    @property
    def wire_bytes(self) -> int:
        """Bytes that wire buffers take on this rank, of tensors that rules transform, from a move until release()."""
        return 0 if self._made is None else self._made.nbytes

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
        modules: Sequence[nn.Module] | None = None,
    ) -> None:
        """Bind this rank's tensors by their own names: all its parameters and persistent buffers. Collective.

        `src` is a trainer rank's, `dst` an engine rank's, by engine where these have names; a mapping per chunk where
        a rank has virtual stages. `own` are globs of tensors that are not the trainer's. `functions` are those that
        rows name. Another parameter in the place of one is noticed in all modules that are alive, or, in less time, in
        `modules` and their submodules alone, and then also another submodule in the place of one. With changes the next
        call moves all. Raises ExchangeError on all ranks, with all that does not fit on one.
        """
        self._mover.check_open()

        def bind() -> None:
            if src is None and dst is None and self._kept is not None:
                self._at = self._kept
                return
            watched = self._bind(src, dst, own, functions or {})
            self._modules = None if modules is None else tuple(modules)
            find_owners(watched, self._modules)
            self._at = watched
            self._kept = None

        self._party.together(
            lambda: self._agree(bind), lambda failure, rank: "tensors were prepared"
        )

    def release(self) -> None:
        """Let go of what was bound here, and of wire buffers, as `Mover.let_go` does; prepare() binds again."""
        self._mover.let_go(self._drop)

    def _drop(self) -> None:
        self._at = self._kept = self._modules = None
        self._bound = self._src = self._dst = Views({}, [])
        self._groups = []
        # Also of a rank that has left the plan, whose mover has no ends.
        if self._made is not None:
            self._made.let_go()

    @property
    def _name(self) -> str:
        return f"refit {self.planned.plan.digest[:SHOWN]}"

    def _part(self, why: str) -> None:
        self._mover._part(why, self._drop)

    def _agree(self, bind: Callable[[], None]) -> None:
        """Bind, and vote. Of what was prepared before, nothing holds any more, however that ends."""
        objection = self._mover.find_waiting()
        if not objection:
            self._at = None
            _, objection = attempt(bind)
            forget(self._mover)
        try:
            self._party.vote(Ballot(f"prepare {self._name}", objection=objection))
        except BaseException:
            # Nothing is prepared: that a call finds this is an objection then, also of ranks that agree once.
            ask_again(self._mover)
            raise

    def _bind(
        self,
        src: Given | None,
        dst: Given | Mapping[str, Given] | None,
        own: Sequence[str],
        functions: Mapping[str, Function],
    ) -> list[Watched]:
        """Bind what was given; what is to be looked at before every move."""
        here = name_natives(src)
        self._bound = self._src = self._bind_side(here, None, own, functions)
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
        self._check_computed(computed)
        self._dst = Views(tensors, computed)
        self._groups = find_groups(received)
        return watched

    def _check_computed(self, computed: Sequence[Computed]) -> None:
        """Raise ExchangeError for functions of what is not there when they are called."""
        if computed and self.changes is not None and self.member.is_beside:
            what = f"{computed[0].name} is made by a function of a whole tensor"
            why = "with changes=True and commit='all' parts of it come in place as ranks commit"
            raise ExchangeError(f"{what}, and {why}; make the Refit without one of both")

    def _watch(
        self, name: str, given: Given | None, natives: Natives, bound: KnownSide
    ) -> list[Watched]:
        """The tensors that move, to be looked at before every move; those that are a rank's own may be anywhere."""
        if self._party.rank not in bound.ranks:
            return []
        return watch(name, given, self._keep_stored(natives, bound))

    def _keep_stored(self, natives: Natives, bound: KnownSide) -> Natives:
        """Those that the side has on this rank."""
        stored = bound.natives(self._party.rank)
        return {native: tensor for native, tensor in natives.items() if native in stored}

    def _name_engines(self, dst: Given | Mapping[str, Given] | None) -> dict[str, Given | None]:
        """What was given for every engine that this rank is of."""
        engines = self.planned.engines
        rank = self._party.rank
        mine = [name for name, bound in engines.items() if rank in bound.ranks]
        if len(engines) > 1 or is_by_name(dst, engines):
            return dict(check_named(rank, mine, dst))
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
        layouts = {name: bound.layouts[drop_window(name, bound)] for name in slots}
        receives = engine is not None
        return bind_views(bound, slots, layouts, natives, rank, own, functions, receives=receives)

    def __call__(
        self,
        *,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        check: Literal["digest"] | None = None,
        async_op: bool = False,
        whole: bool = False,
        progress: Progress | None = None,
    ) -> Handle | None:
        """Move what was bound, as a mover does, and compute what functions store. Collective.

        `whole`, with changes: all of it, on all ranks alike, as where an engine's weights were written by others.
        Raises ExchangeError, on all ranks, where one has not prepared, where its tensors lie otherwise in memory,
        where another, in other memory, is in the place of one: in the mapping that was given, or in a module that had
        it; or where no module has it any longer that had it. What FSDP2 has gathered of the engines' parameters it
        gathers again for its next forward.
        """
        how = self.changes.ask(whole) if self.changes is not None else None
        call = Call(None, None, timeout, acknowledge, label, check, progress, held=True, how=how)
        # Looked for by the thread that calls: beside it, modules may have others in their places for a while.
        return move_by(self._mover, call._replace(objection=self._object()), async_op)

    @property
    def changes(self) -> Changes | None:
        """What sends changes alone, where it does."""
        return self._changes

    def _object(self) -> str:
        """What speaks against a move: tensors that are no longer where they were; "" for nothing."""
        return "".join(filter(None, attempt(self._find_fault)))

    def _find_fault(self) -> str:
        return find_fault(self._at or [], self._modules)
