"""A mover: a plan or program made ready on this rank, which moves tensors as often as wanted.

1. Every call is a turn of the group: ranks vote on it, and then move. A rank's wrong tensor is an
   objection, hence an error on all ranks, and no destination has changed.
2. That a sender's call returns says that its bytes have left, not that they arrived. With
   `acknowledge=True` ranks vote once more at the end, so whose call returns knows that every
   destination has all its bytes. With `check="digest"` they compare what source and destination hold, too
   (`digests.checking`).
3. A plan's failures are told in its own words: which tensor was to come from whom, or to go to whom.
4. With shadows (`commit="all"`) bytes arrive beside the destination, and are put in place once all
   ranks have promised that all is there (`commits`). Without, `torn` says after a failure which
   destinations may be neither old nor new.
5. What makes something of what has arrived (`finalize`) does so before a rank promises: where that
   fails, it is an objection, and nothing is put in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, NoReturn

from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.part import Part
from shardmath.programs.program import Program
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot, read_label
from shardmath_torch.agreement.naming import describe_crossing, name_given, word_objection
from shardmath_torch.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.agreement.turns import check_thread, in_thread
from shardmath_torch.commits.blocks import Block, Member, block_of
from shardmath_torch.commits.landing import Arrival, Finalize, Landing, make_nothing
from shardmath_torch.commits.shadows import put_in_place
from shardmath_torch.digests.checking import Check, check_checkable
from shardmath_torch.exchange.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.task import Engine
from shardmath_torch.observing import laps
from shardmath_torch.observing.bars import Progress, check_progress
from shardmath_torch.observing.moved import Moved
from shardmath_torch.observing.stopwatch import Ledger, Stopwatch

__all__ = [
    "Mover",
    "describe_crossing",
    "move_bound",
    "move_held",
    "move_in_autograd",
    "name_given",
    "parts_of",
    "word_objection",
]


class _Call(NamedTuple):
    """What a mover was called with."""

    src: Local
    out: Local
    timeout: float | None = None
    acknowledge: bool = False
    label: str = ""
    records_gradient: bool = False
    objection: str = ""
    held: bool = False
    finalize: Finalize = make_nothing
    bind: Callable[[], tuple[Local, Local]] | None = None
    check: str | None = None
    first: Callable[[], None] | None = None
    progress: Progress | None = None


class _Held(NamedTuple):
    """Mappings that a caller holds on to, and what was bound of them."""

    src: Local
    out: Local
    tensors: tuple[Tensors, Tensors]

    def is_of(self, call: _Call) -> bool:
        """Whether the call is given the same mappings."""
        return call.src is self.src and call.out is self.out


@public
class Mover:
    """A compiled plan or program: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings,
    None where this rank is not on that side. Destination cells that are not the tensor's own
    (padding) are left as they are. `plan` is the plan, of a program the one that it carries out.
    Raises ExchangeError.
    """

    def __init__(
        self,
        given: Plan | Transposed | Program,
        party: Party,
        part: Part,
        engine: Engine,
        thread: str | None,
        landing: Landing | None = None,
    ) -> None:
        self.plan = part.plan
        self.rounds = part.rounds
        self._given = given
        self._part = part
        self._party = party
        self._engine = engine
        self._thread = thread
        self._landing = landing or Landing()
        self._wanted = wanted(self.plan, party.rank)
        self._moves = 0
        self._ledger = Ledger(name_given(given), given, party.rank, engine.posted)
        self._checked: object = None
        self._held: _Held | None = None

    def __repr__(self) -> str:
        broken = self._party.turns.broken
        state = f"broken: {broken}" if broken else f"{self._moves} moves"
        rounds = plural(self.rounds, "round")
        return f"<mover of {self._given!r} on rank {self._party.rank}, {rounds}, {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ExchangeError: what copies would share, and not know of each other, is how tensors lie in memory."""
        what = "a mover belongs to its process group on this rank, and cannot be copied or pickled"
        raise ExchangeError(f"{what}; use this one, or compile the plan where another is needed")

    @property
    def thread(self) -> str | None:
        """The name by which ranks pair its calls, where `compile` was given one."""
        return self._thread

    @property
    def staging_bytes(self) -> int:
        """Bytes that its messages take which cannot be sent or received in place; 0 before the first move.

        The memory is the group's: all its movers use the same.
        """
        return self._engine.staging_bytes

    @property
    def shadow_bytes(self) -> int:
        """Bytes of this rank's shadows, held from the first move on; 0 without commit="all"."""
        return self._landing.nbytes

    @property
    def version(self) -> int:
        """How many moves were committed, and are in place here: the same on all ranks but one `in_doubt`.

        Always 0 without commit="all".
        """
        return self._landing.standing.version

    @property
    def in_doubt(self) -> bool:
        """Whether the others may have one version more, since the group's store could not be asked."""
        return self._landing.standing.in_doubt

    @property
    def torn(self) -> tuple[str, ...]:
        """After a move that failed: this rank's destinations, by local buffer key, that may be neither old nor new.

        The key is that of the dict that is passed as `out`, and "" where that is one tensor.
        """
        return self._landing.standing.torn

    @property
    def last(self) -> Moved | None:
        """What the latest move that ended well did on this rank: bytes, messages, seconds by phase and peer."""
        return self._ledger.last

    @property
    def member(self) -> Member:
        """The mover as `commit` sees it."""
        name = f"{name_given(self._given)} (mover {self._party.key})"
        return Member(self._party.group, self._party.key, name, self._landing.shadows is not None)

    def __call__(
        self,
        src: Local,
        *,
        out: Local = None,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        check: Literal["digest"] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Moves `src`, this rank's source tensors, into `out`, its destination tensors.

        `timeout`: seconds to wait for all ranks to make this call, where that may be longer than
        what `compile` was given, as when an engine waits for the next refit; each rank may pass its
        own. `acknowledge`, on all ranks alike: return only once every rank has all its bytes.
        `label` says what the move is for: ranks that say otherwise disagree. `check="digest"`, on all
        ranks alike, compares what the destination then holds with the source, and the source with what
        it was before: an ExchangeError on all ranks names the tensor and the box that differs, and the
        destination is as it came. It reads the source twice and the destination once.

        `progress` is called with this rank's bytes that have moved and all that are to move, sent and received
        together, as messages come and leave. What it raises is raised once the move has ended.
        """
        self._run(_Call(src, out, timeout, acknowledge, label, check=check, progress=progress))

    def _run(self, call: _Call) -> None:
        """The move, timed."""
        with self._ledger.time(call.label, call.progress) as watch:
            self._take_turn(call, watch)

    def _take_turn(self, call: _Call, watch: Stopwatch) -> None:
        """The move, as a turn of the group."""
        if not compat.is_registered(self._party.group):
            what = "the process group of this mover was destroyed"
            raise ExchangeError(f"{what}; compile again on a group that is there")
        block = block_of(self._party.group)
        with self._landing.telling(self._party.turns):
            found = self._party.together(
                lambda: self._move(call, block, watch),
                lambda failure, rank: describe_crossing(self._given, failure.tensor, rank),
                "mover",
                call.timeout if is_time(call.timeout) else 0.0,
            )
        if block is not None and block.objection:
            raise ExchangeError(block.objection)
        # All ranks have moved, and found the same: the group goes on.
        if found:
            raise ExchangeError(found)

    def _move(self, call: _Call, block: Block | None, watch: Stopwatch) -> str:
        """Vote, and then move. What was found wrong where the move is compared; "" for nothing."""
        watch.lap(laps.QUEUED)
        tensors, label, objection = self._check(call, block)
        claim = watch.name = self._word_claim(call, block)
        patience = call.timeout if is_time(call.timeout) else None
        mine = Ballot(claim, label, call.records_gradient, objection)
        watch.lap(laps.PREPARED)
        self._party.vote(mine, patience)
        watch.lap(laps.AGREED, self._party.turns.latest)
        # From here on every rank moves, so all count alike, also where the move fails.
        self._moves += 1
        if call.first is not None:
            self._party.answer_for(call.first)
            watch.lap(laps.PREPARED)
        src, dst = tensors
        check = Check(self.plan, self._party.rank, src, dst)
        if call.check:
            self._party.answer_for(check.begin)
            watch.lap(laps.COMPARED)
        mark = functools.partial(mark_written, tuple(dst.values()))
        if self._landing.shadows is None:
            mark()
            self._party.answer_for(lambda: self._write(call, src, dst, watch))
        else:
            into = self._landing.shadows.tensors
            self._party.answer_for(lambda: self._engine.move(src, into, watch))
            arrival = Arrival(dst, mark, call.finalize, call.held)
            self._landing.commit(self._party, mine, arrival, self.member, block)
            watch.lap(laps.COMMITTED)
        if call.acknowledge:
            receipt = mine._replace(claim=f"{claim}: all is there")
            self._party.vote(receipt)
            watch.lap(laps.AGREED)
        if not call.check:
            return ""
        self._party.answer_for(check.end)
        found = check.compare(self._party)
        watch.lap(laps.COMPARED)
        return found

    def _write(self, call: _Call, src: Tensors, dst: Tensors, watch: Stopwatch) -> None:
        """Move into the destination itself."""
        try:
            self._engine.move(src, dst, watch)
        except BaseException:
            self._landing.standing.torn = self._part.list_torn(self._engine.begun)
            raise
        # One by one, so that one at a time takes memory.
        if call.finalize is not make_nothing:
            for pair in call.finalize(dst):
                put_in_place([pair])
            watch.lap(laps.FINALIZED)

    def _word_claim(self, call: _Call, block: Block | None) -> str:
        """What this rank is about to do. Made before anything is known to be what it should be."""
        claim = f"move {self._moves + 1} of {name_given(self._given)} (mover {self._party.key})"
        if call.acknowledge is True:
            claim += ", acknowledged"
        if isinstance(call.check, str) and call.check == "digest":
            claim += ", compared"
        if block is not None:
            claim += ", in smt.commit"
        return claim + in_thread(self._thread)

    def _check(self, call: _Call, block: Block | None) -> tuple[tuple[Tensors, Tensors], str, str]:
        """The tensors by local buffer key, the label, and what speaks against moving them.

        Nothing is raised: the other ranks wait for this one's vote, in which it objects.
        """
        try:
            if call.objection:
                raise ExchangeError(call.objection)
            check_thread(self._party.turns, self._thread)
            if block is not None:
                block.check(self.member)
            if not (call.timeout is None or is_time(call.timeout)):
                raise ExchangeError(word_bad_time(call.timeout))
            if not isinstance(call.acknowledge, bool):
                raise ExchangeError(f"acknowledge={shown(call.acknowledge)}; pass True or False")
            check_checkable(call.check, self.plan)
            check_progress(call.progress)
            if block is not None and call.check is not None:
                what = "in smt.commit nothing is in place before the block ends"
                raise ExchangeError(f"{what}; leave check= out, and compare by smt.digest after it")
            tensors = self._prepare(call)
            label = read_label(call.label)
        except Exception as error:
            return ({}, {}), "", word_objection(error)
        return tensors, label, ""

    def _prepare(self, call: _Call) -> tuple[Tensors, Tensors]:
        """The tensors by local buffer key, checked and bound, unless these were already."""
        if call.held and self._held is not None and self._held.is_of(call):
            return self._held.tensors
        src, out = (call.src, call.out) if call.bind is None else call.bind()
        tensors = by_key(self._wanted[0], src), by_key(self._wanted[1], out)
        signed = signature(tensors)
        if signed != self._checked or call.held or self._held is not None:
            # Forgotten first: where the check fails or is interrupted, these are not bound half-way.
            self._checked = self._held = None
            is_direct = self._landing.shadows is None
            check(self._wanted, tensors, self._party.wire.device_type, apart=is_direct)
            into = self._landing.receive_into(tensors[1])
            self._engine.prepare(tensors[0], into, held=call.held)
            self._checked = signed
            self._held = _Held(call.src, call.out, tensors) if call.held else None
        return tensors


def move_held(
    mover: Mover,
    src: Local,
    *,
    out: Local,
    objection: str,
    timeout: float | None,
    acknowledge: bool,
    label: str,
    first: Callable[[], None] | None = None,
    finalize: Finalize = make_nothing,
    progress: Progress | None = None,
) -> None:
    """A move of tensors that the caller holds and answers for: the same mappings mean the same memory.

    What speaks against the move, if anything does, is an error on all ranks. `first` is done once all ranks have agreed
    on the move, and `finalize` once all has arrived here. Both belong to the move: where one fails, this rank has
    failed.
    """
    call = _Call(src, out, timeout, acknowledge, label, objection=objection, held=True)
    mover._run(call._replace(first=first, finalize=finalize, progress=progress))


def parts_of(mover: Mover) -> tuple[Part, Party]:
    """What the mover does on this rank, and the rank in its group: for what moves the same otherwise."""
    return mover._part, mover._party


def move_bound(
    mover: Mover,
    bind: Callable[[], tuple[Local, Local]],
    *,
    timeout: float | None,
    acknowledge: bool,
    label: str,
    finalize: Finalize,
    progress: Progress | None = None,
) -> None:
    """A move of the tensors that `bind` gives, under the group's turn and before ranks vote.

    What `bind` raises is an error on all ranks, and nothing is moved. `finalize` is as in `move_held`.
    """
    call = _Call(None, None, timeout, acknowledge, label, finalize=finalize, bind=bind)
    mover._run(call._replace(progress=progress))


def move_in_autograd(
    mover: Mover,
    src: Tensor | None,
    *,
    out: Tensor | None,
    label: str = "",
    records_gradient: bool = False,
) -> None:
    """A move in a forward or a backward; all ranks say alike whether autograd records it as one of a gradient."""
    mover._run(_Call(src, out, label=label, records_gradient=records_gradient))
