"""Refit: a trainer's and an engine's stored tensors bound once, and moved any number of times.

refit = smt.Refit(sm.refit(trainer, engine, shapes))            # collective, once
refit.prepare(src=dict(model.named_parameters()))               # on a trainer rank; collective
refit.prepare(dst=dict(model.named_parameters()))               # on an engine rank
refit()                                                         # collective, after every step
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from shardmath.base.arguments import listed
from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import show_ranks, shown
from shardmath.models.recordings.recorded import label
from shardmath.models.refits.coverage import show_native
from shardmath.models.refits.refit import Refit as Planned
from shardmath.models.storage.stored import KnownSide
from shardmath.values.transforms.transformed import Transformed
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import attempt
from shardmath_torch.groups.agreement.party import Party, retake
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.moves.commits.blocks import Member
from shardmath_torch.moves.commits.shadows import Pair
from shardmath_torch.moves.exchange.local import Local, Tensors, check_written
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
from shardmath_torch.tensors.refits.functions import Function
from shardmath_torch.tensors.refits.gathered import check_not_gathered, find_groups, give_back
from shardmath_torch.tensors.refits.holders import Watched, find_fault, find_owners, watch
from shardmath_torch.tensors.refits.views import (
    Computed,
    Given,
    Natives,
    Views,
    are_related,
    bind_side,
    check_functions,
    check_named,
    compute,
    is_by_name,
    list_sides,
    name_natives,
    to_local,
)

if TYPE_CHECKING:
    from shardmath_torch.tensors.changes.changes import Changes
    from shardmath_torch.tensors.transforms.compile import EndStage

__all__ = ["Refit"]

SHOWN = 24
"""The number of a digest's hexadecimal digits in a ballot."""


class _RefitStage(Stage):
    """The stage of a refit in each move: it binds the refit's views, and computes what functions store."""

    def __init__(self, refit: Refit) -> None:
        self._refit = refit

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """Return the views of this rank's bound tensors to send and to receive into; `src` and `out` are not used.
        Raises ExchangeError if none are bound.
        """
        if self._refit._watched is None:
            raise ExchangeError(
                "this rank has not prepared the refit, or has released its tensors since; call "
                "prepare() on all ranks"
            )
        # None stands for a rank that is not on that side.
        return self._refit._src.tensors or None, self._refit._dst.tensors or None

    def begin(self) -> None:
        """Free the copies of the engines' parameters that FSDP2 has gathered: the move that begins now changes the
        parameters, and thus makes these copies outdated.
        """
        give_back(self._refit._fsdp_groups)

    def finish(self, arrived: Tensors) -> Iterator[Pair]:
        """Yield a pair (stored tensor, new value) for each tensor that a function computes from received tensors."""
        computed = self._refit._dst.computed
        mark_written(each.stored for each in computed)
        for each in computed:
            received = arrived[each.key]
            with torch.inference_mode():
                # A copy, as a function may write into its argument: check= reads what was received after this,
                # and the next changes are put into it.
                value = compute(each, received.clone())
                # `is_beside`: values wait for the commit, and may lie in memory that the function writes again.
                if self._refit.member.is_beside:
                    value = value.clone()
            yield from ((each.stored[box], value[box]) for box in each.boxes)


@public
class Refit(Leaves):
    """A mover for one rank of the planned refit (a trainer's weights to engines): `prepare` binds the rank's tensors,
    and each call moves them.

    `timeout`, `max_inflight_bytes`, `thread`, `commit` and `agree` are as in `compile`; ranks vote in every `prepare`.
    With `changes=True` a call sends the elements that have changed since the last call, as in `compile_changes`; the
    mover that does so is `changes`, which reports what it sent. Raises ExchangeError on all ranks if they plan
    differently.
    """

    @compat.untraced
    def __init__(
        self,
        planned: Planned,
        *,
        group: compat.Group | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        max_inflight_bytes: int | None = None,
        thread: str | None = None,
        commit: str = DIRECT,
        agree: str = EVERY,
        changes: bool = False,
    ) -> None:
        if not isinstance(planned, Planned):
            raise ExchangeError(
                f"smt.Refit got {type(planned).__name__}, where a planned refit is needed; "
                f"pass the result of sm.refit"
            )
        self.planned = planned
        settings = Settings(timeout, max_inflight_bytes, thread=thread, commit=commit, agree=agree)
        self._transform_stage: EndStage | None = None
        # The transforms of the refit that a replan is about to take.
        self._replanned: Transformed | None = None
        self._changes: Changes | None = None
        # In this order: making the mover sets the two above, and joining needs the mover and the timeout.
        self._mover = self._make_mover(group, settings, changes)
        self._timeout = timeout
        self._party = self._join()
        # The views that a call moves. A replan narrows `_src` to the plan's tensors, always starting from `_all_src`.
        self._all_src = self._src = self._dst = Views({}, [])
        # The tensors that are checked before each move; None if this rank is not prepared.
        self._watched: list[Watched] | None = None
        # The watched tensors that survived a replan, for prepare() without arguments; None if all must be given again.
        self._rebindable: list[Watched] | None = None
        self._modules: tuple[nn.Module, ...] | None = None
        self._fsdp_groups: list[object] = []

    def _make_mover(self, group: compat.Group | None, settings: Settings, changes: bool) -> Mover:
        """Make the mover, with its stages, and set `_transform_stage` and `_changes` if there are any. Collective."""
        moving = self.planned.plan
        stages: tuple[Stage, ...] = (_RefitStage(self),)
        transforms = self.planned.transforms
        agree_first: AgreeFirst | None = None
        if transforms is not None:
            # Imported on use: few refits have transforms, and these import all formats.
            from shardmath_torch.tensors.transforms.compile import make_ends

            joined = compat.group_of(group)
            timeout, commit = settings.timeout, settings.commit
            _, stage = make_ends(transforms, moving, joined, timeout, commit, holds=True)
            self._transform_stage = stage
            stages += (stage,)
            agree_first = functools.partial(self._agree_again, transforms, stage.rank)
        if changes:
            from shardmath_torch.tensors.changes.changes import make_changes

            self._changes = make_changes(
                moving, group, settings, stages=stages, agree_first=agree_first
            )
            return self._changes
        return Mover(make_ready(moving, group, settings, stages, agree_first=agree_first))

    def _agree_again(
        self,
        transforms: Transformed,
        rank: int,
        plan: object,
        group: compat.Group | None,
        settings: Settings,
    ) -> None:
        """Before a replan, agree on the mover's transforms, which stay. Collective."""
        from shardmath_torch.tensors.transforms.compile import agree_again

        agree_again(transforms, rank, plan, group, settings, self._replanned)

    @compat.untraced
    def replan(
        self,
        planned: Planned,
        *,
        group: compat.Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Use the refit `planned` from now on instead of the current one, for example after engines have left or come
        back. Collective.

        If engines have only left the same refit (`planned.without`), tensors stay bound. Otherwise all ranks prepare
        again; if engines have come back, `prepare()` without arguments binds the tensors that were bound. A process
        with another rank in `group` gives its tensors again, too. Raises ExchangeError on all ranks if the rules of
        `planned` are others than this refit's, or if there are rules and a process has another rank.
        """
        # A value that is not a refit is rejected in the vote, since the other ranks wait for it.
        plan = planned.plan if isinstance(planned, Planned) else planned
        self._replanned = planned.transforms if isinstance(planned, Planned) else None
        limit = self._timeout if timeout is None else timeout

        def adopt() -> None:
            # Called once all ranks have agreed.
            self._timeout = limit
            bound_rank = self._party.rank
            self._party = self._join()
            self._rebindable = self._find_rebindable(planned, bound_rank)
            none_is_back = set(planned.plan.left).issuperset(self.planned.plan.left)
            stays_bound = none_is_back and are_related(self.planned, planned)
            self._watched = self._rebindable if stays_bound else None
            self._src = self._all_src.keep(planned.moved)
            self.planned = planned

        replan_by(self._mover, plan, group, timeout, adopt)

    def _join(self) -> Party:
        """This rank in the mover's group, taking turns with the mover."""
        member = self.member
        party = join(member.group, self._timeout, Settings(self._timeout).grace)
        return replace(party, key=member.key)

    def _find_rebindable(self, planned: Planned, bound_rank: int) -> list[Watched] | None:
        """The watched tensors that `planned` moves too; None if tensors must be given again, as if they were bound for
        another rank. Drops all bound tensors of a rank that leaves."""
        rank = self._party.rank
        if rank in planned.plan.left:
            # A rank that leaves moves nothing, and lets its tensors go.
            self._all_src = self._dst = Views({}, [])
            return []
        if not are_related(self.planned, planned) or rank in self.planned.plan.left:
            return None
        if rank != bound_rank:
            return None
        if list_sides(self.planned, rank) != list_sides(planned, rank):
            return None
        # None are bound since an earlier replan, which kept some for the next one.
        return self._rebindable if self._watched is None else self._watched

    @property
    def version(self) -> int:
        """The number of moves that all ranks have committed and whose values are now in this rank's tensors, as in
        `Mover.version`.
        """
        return self._mover.version

    @property
    def is_broken(self) -> bool:
        """Whether a failure has broken the refit's group, so that every call raises until `replan` to another group."""
        return self._mover.is_broken

    @property
    def left(self) -> tuple[int, ...]:
        """The other ranks that are known to have closed this refit or left its group, ascending. After an error, an
        engine can stop if ranks of the trainer are among them. Once the group is broken, waits for its key-value store,
        at most 1 s."""
        return self._mover.left

    @property
    def in_doubt(self) -> bool:
        """Whether other ranks might have committed the last move although this rank has not, because the group's
        key-value store did not answer this rank.
        """
        return self._mover.in_doubt

    @property
    def torn(self) -> tuple[str, ...]:
        """The names, in the plan, of this rank's tensors that a failed call may have left torn (partly new)."""
        return self._mover.torn

    @property
    def last(self) -> Moved | None:
        """The report of the latest successful move on this rank, as in `Mover.last`."""
        return self._mover.last if self.changes is None else self.changes.moved

    @property
    def shadow_bytes(self) -> int:
        """The bytes of extra memory that this rank needs for `commit="all"`: received data stay there until all ranks
        have theirs, and then go to the destination.
        """
        shadows = None if self._transform_stage is None else self._transform_stage.shadows
        return self._mover.shadow_bytes + (0 if shadows is None else shadows.nbytes)

    @property
    def wire_bytes(self) -> int:
        """The bytes that this rank's buffers for transformed tensors take from the first move until `release`."""
        return 0 if self._transform_stage is None else self._transform_stage.nbytes

    @property
    def member(self) -> Member:
        """The handle through which `smt.commit` commits this refit's moves together with others."""
        return self._mover.member

    @compat.untraced
    def prepare(
        self,
        src: Given | None = None,
        dst: Given | Mapping[str, Given] | None = None,
        *,
        own: Sequence[str] = (),
        functions: Mapping[str, Function] | None = None,
        modules: Sequence[nn.Module] | None = None,
    ) -> None:
        """Set this rank's tensors for all later moves: `src` on a trainer rank, `dst` on an engine rank. Collective.
        `own` has globs for the names of engine tensors that the trainer lacks. `functions` maps names to functions,
        which compute engine tensors from received ones. Later calls raise an error if a parameter was replaced in
        `modules` (default: all live modules).

        Pass all parameters and persistent buffers, by the names under which the rank stores them. `src` are a trainer
        rank's tensors, `dst` an engine rank's, by engine if there are several; a mapping per chunk if the rank has
        virtual stages. `functions` are the functions that rows name. Replaced parameters are noticed in all live
        modules or, in less time, only in `modules` and their submodules, where replaced submodules are noticed too.
        With changes the next call moves all elements. Raises ExchangeError on all ranks, with everything that does not
        fit on one.
        """
        self._mover.check_open()

        def bind() -> None:
            # Without arguments: tensors that were bound before a replan stay bound.
            if src is None and dst is None and self._rebindable is not None:
                self._watched = self._rebindable
                return
            # Before binding: if that fails, some of the tensors that were bound have been replaced.
            self._rebindable = None
            watched = self._bind(src, dst, own, check_functions(functions or {}))
            self._modules = None if modules is None else _list_modules(modules)
            find_owners(watched, self._modules)
            self._watched = watched

        def take(party: Party, begin: Callable[[], None]) -> None:
            def agree() -> None:
                begin()
                self._agree(bind)

            party.together(agree, lambda failure, rank: "tensors were prepared")

        retake(lambda: self._party, take)

    @compat.untraced
    def release(self) -> None:
        """Release the bound tensors and free extra memory, like `Mover.let_go`; call prepare() before the next move."""
        self._mover.let_go(self._drop)

    def _drop(self) -> None:
        """Forget everything that `prepare` bound."""
        self._watched = self._rebindable = self._modules = None
        self._all_src = self._src = self._dst = Views({}, [])
        self._fsdp_groups = []
        # Here, since the mover of a rank that has left the plan has no stages to do it.
        if self._transform_stage is not None:
            self._transform_stage.let_go()

    @property
    def _name(self) -> str:
        """The refit as ballots name it."""
        return f"refit {self.planned.plan.digest[:SHOWN]}"

    def _part(self, why: str) -> None:
        """Leave the group, and forget everything that is bound."""
        self._mover._part(why, self._drop)

    def _agree(self, bind: Callable[[], None]) -> None:
        """Bind, and vote. Earlier bindings no longer count, even if this fails."""
        objection = self._mover.find_waiting()
        if not objection:
            self._watched = None
            _, objection = attempt(bind)
            forget(self._mover)
        try:
            self._party.vote(Ballot(f"prepare {self._name}", objection=objection))
        except BaseException:
            # Nothing is prepared, so the next call must fail: ranks vote on it, even if they agree only once.
            ask_again(self._mover)
            raise

    def _bind(
        self,
        src: Given | None,
        dst: Given | Mapping[str, Given] | None,
        own: Sequence[str],
        functions: Mapping[str, Function],
    ) -> list[Watched]:
        """Bind the given tensors; return them to be watched before every move."""
        rank = self._party.rank
        src_natives = name_natives(src)
        self._all_src = self._src = bind_side(self.planned, rank, None, src_natives, own, functions)
        tensors: dict[str, Tensor] = {}
        computed = []
        stored_by_engine: dict[str, Natives] = {}
        watched = watch("source", src, self._keep_stored(src_natives, self.planned.trainer))
        for engine, engine_tensors in self._name_engines(dst).items():
            natives = name_natives(engine_tensors)
            stored = self._keep_stored(natives, self.planned.engines[engine])
            check_not_gathered(stored)
            views = bind_side(self.planned, rank, engine, natives, own, functions)
            tensors |= views.tensors
            computed += views.computed
            stored_by_engine[engine] = stored
            watched += watch(engine, engine_tensors, stored)
        self._check_computed(computed, src_natives, stored_by_engine)
        self._dst = Views(tensors, computed)
        self._fsdp_groups = find_groups(
            [one for each in stored_by_engine.values() for one in each.values()]
        )
        return watched

    def _check_computed(
        self, computed: Sequence[Computed], sent: Natives, received: Mapping[str, Natives]
    ) -> None:
        """Raise ExchangeError for functions whose whole input is never there at one time, and for a tensor that they
        compute in memory of another."""
        if not computed:
            return
        if self.changes is not None and self.member.is_beside:
            what = f"a function computes {computed[0].name} from a whole received tensor"
            why = "with changes=True and commit='all' only its changed elements arrive"
            raise ExchangeError(f"{what}, but {why}; make the Refit without one of the two")
        # If bytes arrive next to the stored tensors, values are too, and are put in place after all tensors were sent.
        src = {}
        if not self.member.is_beside:
            src = {label(*native): to_local(tensor) for native, tensor in sent.items()}
        _check_written({each.name for each in computed}, src, received)

    def _keep_stored(self, natives: Natives, bound: KnownSide) -> Natives:
        """The given tensors that the side stores on this rank; its other tensors may be replaced at any time."""
        if self._party.rank not in bound.ranks:
            return {}
        stored = bound.natives(self._party.rank)
        return {native: tensor for native, tensor in natives.items() if native in stored}

    def _name_engines(self, dst: Given | Mapping[str, Given] | None) -> dict[str, Given | None]:
        """The given tensors of every engine that has this rank."""
        engines = self.planned.engines
        rank = self._party.rank
        own_engines = [name for name, bound in engines.items() if rank in bound.ranks]
        if len(engines) > 1 or is_by_name(dst, engines):
            return dict(check_named(rank, own_engines, dst))
        if not own_engines and name_natives(dst):  # type: ignore[arg-type]
            ranks = show_ranks(sorted(next(iter(engines.values())).ranks))
            raise ExchangeError(
                f"rank {rank} was given dst=, but the engine has {ranks}; leave dst= out on this rank"
            )
        return dict.fromkeys(own_engines, dst)  # type: ignore[arg-type]

    @compat.untraced
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
        """Move the bound tensors, as a mover does, and compute what functions store. Collective.

        With changes, `whole` sends all elements; give it on all ranks, as after other programs wrote an engine's
        weights. Raises ExchangeError on all ranks if one has not prepared, if a tensor has moved in memory, if a tensor
        in other memory has replaced one in the given mapping or in a module, or if a tensor has left all of its
        modules. FSDP2 gathers the engines' parameters again for its next forward.
        """
        how = self.changes.ask(whole) if self.changes is not None else None
        call = Call(None, None, timeout, acknowledge, label, check, progress, held=True, how=how)
        # Checked by the calling thread: during an asynchronous move modules may hold other tensors for a while.
        return move_by(self._mover, call._replace(objection=self._object()), async_op)

    @property
    def changes(self) -> Changes | None:
        """The mover that sends only changed elements; None unless the Refit was made with `changes=True`."""
        return self._changes

    def _object(self) -> str:
        """The objection to a move: a tensor that is no longer where it was; "" if there is none."""
        # (fault, ""), or (None, the error of the search itself).
        return "".join(filter(None, attempt(self._find_fault)))

    def _find_fault(self) -> str:
        """The error for the first watched tensor that has changed; "" if none has, or none is watched."""
        return find_fault(self._watched or [], self._modules)


def _check_written(
    computed: Collection[str], src: Tensors, received: Mapping[str, Natives]
) -> None:
    """Raise ExchangeError if one of the tensors in `received`, by engine, that is `computed` shares memory with another
    one or with a source."""
    written: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for engine, natives in received.items():
        start = f"{engine} " if len(received) > 1 else ""
        for native, tensor in natives.items():
            tensors = written if show_native(native) in computed else others
            tensors[start + label(*native)] = to_local(tensor)
    check_written(written, src, others)


def _list_modules(modules: object) -> tuple[nn.Module, ...]:
    """The modules of a list. Raises ExchangeError for one module: a Sequential would stand for its parts alone."""
    if not isinstance(modules, nn.Module):
        items = listed(modules, "modules=", ExchangeError)
        if all(isinstance(module, nn.Module) for module in items):
            return items
    raise ExchangeError(
        f"modules= is {shown(modules)}, where a list of modules is needed; pass [model]"
    )
