"""A mover: a plan or program made ready on this rank, which moves tensors as often as wanted.

1. Every call is a turn of the group: ranks vote on it, and then move. A rank's wrong tensor is an
   objection, hence an error on all ranks, and no destination has changed.
2. That a sender's call returns says that its bytes have left, not that they arrived. With
   `acknowledge=True` ranks vote once more at the end, so whose call returns knows that every
   destination has all its bytes. With `check="digest"` they compare what source and destination hold, too
   (`digests.checking`).
3. A plan's failures are told in its own words: which tensor was to come from whom, or to go to whom.
4. A mover is made of a carrier and of stages. Carried beside the destination (`commit="all"`), bytes are put in place
   once all ranks have promised that all is there (`commits`). Carried into it, `torn` says after a failure which
   destinations may be neither old nor new.
5. What stages make of what has arrived they make before a rank promises: where that fails, it is an objection, and
   nothing is put in place.
6. Ranks that agree once (`agree="once"`) vote on the first move of its kind. After that nobody is asked, so what
   speaks against a move on one rank is its failure, and breaks the group.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import describe_crossing, name_given, word_objection
from shardmath_torch.groups.agreement.turns import Unasked, check_thread, in_thread
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.moves.commits.blocks import CommitBlock, Member, block_of
from shardmath_torch.moves.commits.landing import Arrival, Landing
from shardmath_torch.moves.commits.shadows import put_in_place
from shardmath_torch.moves.digests.checking import Check
from shardmath_torch.moves.exchange.local import Local, witness
from shardmath_torch.moves.movers import stages
from shardmath_torch.moves.movers.bound import BoundTensors
from shardmath_torch.moves.movers.calls import ONCE, Call, CallKind, Checked, check_call
from shardmath_torch.moves.movers.carriers import Arrived
from shardmath_torch.moves.movers.handles import Handle, find_objection, start
from shardmath_torch.moves.movers.leaving import Leaving
from shardmath_torch.moves.movers.ready import Former, Ready
from shardmath_torch.moves.observing import laps
from shardmath_torch.moves.observing.bars import Progress
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Mover", "ask_again", "forget", "move_by", "replan_by"]


@public
class Mover(Leaving):
    """A compiled plan or program: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings,
    None where this rank is not on that side. Destination cells that are not the tensor's own
    (padding) are left as they are. `plan` is the plan, of a program the one that it carries out.
    Raises ExchangeError.
    """

    def __init__(self, ready: Ready) -> None:
        self._landing = Landing(ready.carrier.is_beside)
        self._take(ready)

    def _take(self, ready: Ready) -> None:
        """Be a mover of that from now on."""
        self.plan, self.rounds = ready.part.plan, ready.part.rounds
        self._ready = ready
        self._party = ready.party
        self._party.listen()
        self._carrier = ready.carrier
        self._stages = ready.stages
        self._landing = self._landing.follow(ready.version)
        self._moves = 0
        self._ledger = ready.open_ledger()
        self._agreed: set[CallKind] = set()
        if not ready.keeps_bound:
            self._bound = BoundTensors(self.plan, ready.party.rank)

    def __repr__(self) -> str:
        broken = self._party.turns.broken
        state = f"broken: {broken}" if broken else f"{self._moves} moves"
        state = "closed" if self._closed else state
        rounds = plural(self.rounds, "round")
        return f"<mover of {self._ready.given!r} on rank {self._party.rank}, {rounds}, {state}>"

    @property
    def thread(self) -> str | None:
        """The name by which ranks pair its calls, where `compile` was given one."""
        return self._ready.thread

    @property
    def staging_bytes(self) -> int:
        """Bytes that its messages take which cannot be sent or received in place; 0 before the first move.

        The memory is the group's: all its movers use the same.
        """
        return self._carrier.staging_bytes

    @property
    def shadow_bytes(self) -> int:
        """Bytes of this rank's shadows, held from the first move on; 0 without commit="all"."""
        return self._carrier.shadow_bytes

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
        """The mover as `commit` sees it. Raises ExchangeError for one that was closed."""
        self.check_open()
        party, agrees_once = self._party, self._ready.agree == ONCE
        is_beside = self._landing.is_beside
        return Member(party.group, party.key, self._name, is_beside, party.timeout, agrees_once)

    @property
    def _name(self) -> str:
        """What ranks call it."""
        return f"{name_given(self._ready.given)} (mover {self._party.key})"

    def __call__(
        self,
        src: Local,
        *,
        out: Local = None,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        check: Literal["digest"] | None = None,
        async_op: bool = False,
        progress: Progress | None = None,
    ) -> Handle | None:
        """Moves `src`, this rank's source tensors, into `out`, its destination tensors.

        `timeout`: seconds to wait for all ranks to make this call, where that may be longer than
        what `compile` was given, as when an engine waits for the next refit; each rank may pass its
        own. `acknowledge`, on all ranks alike: return only once every rank has all its bytes.
        `label` is this rank's own word for the move, in logs, traces and `last`. `check="digest"`, on all
        ranks alike, compares what the destination then holds with the source, and the source with what it was
        before: an ExchangeError on all ranks names the tensor and the box that differs, and the destination is
        as it came. It reads the source twice and the destination once. With `async_op=True` the call returns a
        handle at once: the tensors are the move's until `handle.wait()` has returned, which raises what the
        call would.

        `progress` is called with this rank's bytes that have moved and all that are to move, both ways together, as
        messages come and leave, by the thread that moves. What it raises is raised once the move has ended.
        """
        call = Call(src, out, timeout, acknowledge, label, check, progress)
        return move_by(self, call, async_op)

    def replan(
        self,
        plan: Plan | Transposed | Program,
        *,
        group: compat.Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Goes on with another plan: collective over `group` (default: the mover's own), like compiling it there.

        Ranks that join compile the plan, with the arguments that this mover was compiled with, where the others call
        this. What did not change is kept: connections, staging, and where only ranks of the plan have left, or are
        back (`shardmath.without`), messages and what was bound to tensors. `timeout` is that from now on, in seconds.
        Raises ExchangeError, on every rank, as `compile` does; then this goes on as it was.
        """
        replan_by(self, plan, group, timeout)

    @property
    def _former(self) -> Former:
        """What there is to go on from."""
        ready = self._ready
        device = ready.party.wire.device
        objection = self._word_closed() or self._landing.word_waiting(None)
        return Former(ready.part, ready.carrier, device, ready.peers, self.version, objection)

    def _find_objection_beside(self, async_op: object) -> str:
        """Why a move of the calling thread cannot go on beside it; "" where it can. Raises as `_run` does at once."""
        self._party.turns.refuse_nested()
        return find_objection(self._party, self.thread, async_op)

    def _start(self, call: Call) -> Handle:
        """Move on a thread beside, in the name of this one."""
        mine = call.keep()._replace(thread=in_thread(self.thread))
        return start(self._party, lambda: self._run(mine))

    def _run(self, call: Call) -> None:
        """The move, timed."""
        with self._ledger.time(call.label, call.progress) as watch:
            self._take_turn(call, watch)

    def _take_turn(self, call: Call, watch: Stopwatch) -> None:
        """The move, as a turn of the group."""
        self.check_open()
        if not compat.is_there(self._party.group):
            what = f"the process group of this mover was {compat.word_gone(self._party.group)}"
            raise ExchangeError(f"{what}; compile again on a group that is there")
        block = block_of(self._party.group)
        with self._landing.telling(self._party.turns):
            found = self._party.together(
                lambda: self._move(call, block, watch),
                lambda failure, rank: describe_crossing(self._ready.given, failure.tensor, rank),
                "mover",
                call.patience or 0.0,
            )
        if block is not None and block.objection:
            raise ExchangeError(block.objection)
        # All ranks have moved, and found the same: the group goes on.
        if found:
            raise ExchangeError(found)

    def _move(self, call: Call, block: CommitBlock | None, watch: Stopwatch) -> str:
        """Vote, and then move. What was found wrong where the move is compared; "" for nothing."""
        watch.lap(laps.QUEUED)
        self.check_open()
        ready = self._check(call, block, watch)
        kind = call.kind(self._carrier.word(call.how), block is not None)
        mine = self._make_ballot(call, kind, ready)
        watch.name = mine.claim
        watch.lap(laps.PREPARED)
        self._agree(mine, kind, call.patience)
        watch.lap(laps.AGREED, self._party.turns.latest)
        # From here on every rank moves, so all count alike, also where the move fails.
        self._moves += 1
        if self._stages:
            self._party.answer_for(lambda: stages.begin(self._stages))
            watch.lap(laps.PREPARED)
        compared = Check(self.plan, self._party.rank, ready.src, ready.dst)
        if kind.check:
            self._party.answer_for(compared.begin)
            watch.lap(laps.COMPARED)
        self._carry(ready, call.held, mine, block, watch)
        if kind.acknowledge:
            receipt = mine._replace(claim=f"{mine.claim}: all is there")
            self._party.vote(receipt)
            watch.lap(laps.AGREED)
        found = ""
        if kind.check:
            self._party.answer_for(compared.end)
            found = compared.compare(self._party)
            watch.lap(laps.COMPARED)
        # Within the turn: who is interrupted here breaks the group, and does not go on knowing less than the others.
        if block is None:
            self._end()
        if found:
            self._carrier.forget()
        return found

    def _agree(self, mine: Ballot, kind: CallKind, patience: float | None) -> None:
        """Vote, unless this was agreed on. Raises Refused where a rank objects, and PeerFailure."""
        if kind not in self._agreed:
            self._party.vote(mine, patience)
            if self._ready.agree == ONCE:
                self._agreed.add(kind)
            return
        mark = zlib.crc32(mine.claim.encode(errors="backslashreplace"))
        self._party.go_on(Unasked(mark, patience))
        if mine.objection:
            # Others move already.
            raise PeerFailure(self._party.rank, mine.objection)

    def _carry(
        self, ready: Checked, held: bool, mine: Ballot, block: CommitBlock | None, watch: Stopwatch
    ) -> None:
        """Carry the bytes, and put them in place."""
        carry = functools.partial(self._carrier.carry, ready.src, ready.dst, held, watch)
        if not self._landing.is_beside:
            self._party.answer_for(lambda: self._write(carry, watch))
            return
        come: list[Arrived] = []
        self._party.answer_for(lambda: come.append(carry()))
        ((tensors, put),) = come
        make = functools.partial(stages.finish, self._stages, tensors)
        keys = stages.name_torn(self._stages, tuple(ready.dst))
        watched = functools.partial(witness, ready.dst, ready.out)
        arrival = Arrival(keys, make, put, self._end, watched)
        self._landing.commit(self._party, mine, arrival, self.member, block)
        watch.lap(laps.COMMITTED)

    def _write(self, carry: Callable[[], Arrived], watch: Stopwatch) -> None:
        """Carry into the destination itself."""
        torn = self._carrier.list_torn
        try:
            arrived = carry()
            # A carrier that has brought all leaves nothing torn; stages still may.
            torn = tuple
            for pair in stages.finish(self._stages, arrived.tensors):
                put_in_place([pair])
            if self._stages:
                watch.lap(laps.FINALIZED)
        except BaseException:
            self._landing.standing.torn = stages.name_torn(self._stages, torn())
            raise

    def _end(self) -> None:
        """All is in place: whoever has waited for that goes on."""
        self._landing.standing.torn = ()
        self._carrier.end()
        stages.end(self._stages)

    def _make_ballot(self, call: Call, kind: CallKind, ready: Checked) -> Ballot:
        """What this rank is about to do. Nothing in it is known to be what it should be, but for the objection."""
        claim = kind.claim(self._moves + 1, self._name)
        claim += in_thread(self.thread) if call.thread is None else call.thread
        return Ballot(claim, call.purpose, call.records_gradient, ready.objection)

    def _check(self, call: Call, block: CommitBlock | None, watch: Stopwatch) -> Checked:
        """What is to be moved, or what speaks against it.

        Nothing is raised: the other ranks wait for this one's vote, in which it objects.
        """
        try:
            if call.objection:
                raise ExchangeError(call.objection)
            if call.thread is None:
                check_thread(self._party.turns, self.thread)
            self._landing.check_free(block)
            if block is not None:
                block.check(self.member)
            check_call(call, self.plan, block is not None)
            device = self._party.wire.device
            src, dst = self._bound.prepare(call, self._stages, self._carrier, device)
            self._carrier.load(src, dst, call.how, watch)
        except Exception as error:
            return Checked({}, {}, word_objection(error))
        return Checked(src, dst, "", call.out)


def forget(mover: Mover) -> None:
    """Carry all of it with the next move: called by all ranks alike, in a turn."""
    mover._carrier.forget()


def ask_again(mover: Mover) -> None:
    """Vote on the next move of any kind: called by all ranks alike."""
    mover._agreed.clear()


def replan_by(
    mover: Mover,
    plan: Plan | Transposed | Program,
    group: compat.Group | None,
    timeout: float | None,
    besides: Callable[[], None] = lambda: None,
) -> None:
    """As `Mover.replan`; what else goes on by the new plan `besides` changes, once all have agreed."""
    party = mover._party
    found = party.group if group is None else group
    elsewhere = found is not party.group
    if not elsewhere:
        # There others object in their turn; here they know of it.
        mover.check_open()

    def take(ready: Ready) -> None:
        mover._take(ready)
        besides()

    # The turn of another group says nothing of moves in this one, which go on by what is here now.
    with party.alone() if elsewhere else nullcontext():
        mover._ready.again(plan, found, timeout, mover._former, take)


def move_by(mover: Mover, call: Call, async_op: bool = False) -> Handle | None:
    """A move as the call has it, of which some is for callers within the library alone."""
    if async_op is not False:
        objection = mover._find_objection_beside(async_op)
        if not objection:
            return mover._start(call)
        # Said in the vote, since others wait for it, and by this thread, which then knows that it was refused.
        call = call._replace(objection=objection)
    mover._run(call)
    return None
