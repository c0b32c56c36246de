"""Mover: a plan or program made ready on this rank, for any number of moves.

1. Every call is a turn of the group: ranks vote on it, and then move. A rank's wrong tensor is an
   objection, hence an error on all ranks, and no destination has changed.
2. When a sender's call returns, its bytes have left, but may not have arrived. With `acknowledge=True` ranks vote
   again at the end, so a call that returns proves that every destination has all its bytes. With `check="digest"`
   they also compare the contents of source and destination (`digests.checking`).
3. A failure names the plan's tensor that the failed rank was to send or receive.
4. A mover consists of a carrier and stages. With `commit="all"` bytes arrive next to the destination, and are put in
   place once all ranks have promised that theirs arrived (`commits`). Otherwise bytes arrive in the destination, and
   after a failure `torn` lists the destinations that may be neither old nor new.
5. Stages compute with the arrived tensors before a rank promises: an error there is an objection, and nothing is put in
   place.
6. With `agree="once"` ranks vote only on the first move of a kind. After that, an objection of one rank is its failure,
   and breaks the group.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Literal

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import describe_crossing, word_objection
from shardmath_torch.groups.agreement.party import Party, retake
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
from shardmath_torch.moves.observing.stopwatch import Ledger, Stopwatch

__all__ = ["Mover", "ask_again", "forget", "move_by", "replan_by"]


@public
class Mover(Leaving):
    """A compiled plan or program: `move(src_tensors, out=dst_tensors)`, called on all ranks, any number of times, moves
    tensors.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings,
    and None if this rank is not on that side. Padding in a destination is left as it is. `plan` is
    the plan, or the one that the program carries out. Raises ExchangeError.
    """

    def __init__(self, ready: Ready) -> None:
        self._landing = Landing(ready.carrier.is_beside)
        self._take(ready)

    def _take(self, ready: Ready) -> None:
        """Move by `ready` from now on."""
        self.plan, self.rounds = ready.part.plan, ready.part.rounds
        self._ready = ready
        self._party = ready.party
        self._party.listen()
        self._carrier = ready.carrier
        self._stages = ready.stages
        self._landing = self._landing.follow(ready.version)
        self._move_count = 0
        rank = ready.party.rank
        self._ledger = Ledger(ready.name, ready.given, rank, lambda: ready.carrier.posted)
        self._agreed_kinds: set[CallKind] = set()
        if not ready.keeps_bound:
            self._bound = BoundTensors(self.plan, rank)

    def __repr__(self) -> str:
        broken = self._party.turns.broken
        state = f"broken: {broken}" if broken else f"{self._move_count} moves"
        state = "closed" if self._closed else state
        rounds = plural(self.rounds, "round")
        return f"<mover of {self._ready.given!r} on rank {self._party.rank}, {rounds}, {state}>"

    @property
    def thread(self) -> str | None:
        """The name, as passed to `compile`, under which ranks pair the mover's calls; None if none was passed."""
        return self._ready.thread

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of staging memory, which holds messages that cannot be sent or received in place; 0 before
        the first move.

        The group's movers share this memory.
        """
        return self._carrier.staging_bytes

    @property
    def shadow_bytes(self) -> int:
        """Number of bytes of the second buffers in which this rank keeps received values until all ranks have theirs.
        They are allocated by the first move, and exist only with commit="all" (otherwise 0)."""
        return self._carrier.shadow_bytes

    @property
    def version(self) -> int:
        """Number of this mover's moves that all ranks have committed and whose values are in place on this rank. It is
        normally equal on all ranks.

        It can differ on a rank that is `in_doubt` or `torn`, and on a rank that has joined by a replan and not moved
        yet. Always 0 without commit="all".
        """
        return self._landing.standing.version

    @property
    def is_broken(self) -> bool:
        """Whether a failure has broken the mover's process group, so that every later call raises an error. If so, make
        another group, and call `replan` with it."""
        return bool(self._party.turns.broken)

    @property
    def in_doubt(self) -> bool:
        """Whether other ranks might have committed the last move although this rank has not, because the group's store
        did not answer."""
        return self._landing.standing.in_doubt

    @property
    def torn(self) -> tuple[str, ...]:
        """The names of this rank's destinations whose values might be partly updated after a failed move.

        The keys are the keys of the dict passed as `out`, or "" for one tensor.
        """
        return self._landing.standing.torn

    @property
    def last(self) -> Moved | None:
        """The report of the latest successful move on this rank: bytes, messages, and seconds by phase and peer."""
        return self._ledger.last

    @property
    def member(self) -> Member:
        """The mover's group, name and options, which `commit` checks. Raises ExchangeError if the mover was closed."""
        self.check_open()
        party, agrees_once = self._party, self._ready.agree == ONCE
        is_beside = self._landing.is_beside
        return Member(party.group, party.key, self._name, is_beside, party.timeout, agrees_once)

    @property
    def _name(self) -> str:
        """The mover's name in claims and errors."""
        return f"{self._ready.name} (mover {self._party.key})"

    @compat.untraced
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
        """Move `src`, this rank's source tensors, into `out`, its destination tensors.

        - `timeout`: seconds to wait for all ranks to make this call, if that may take longer than `compile`'s timeout,
          as when an engine waits for the next refit; may differ between ranks.
        - `acknowledge`: return only once every rank has all its bytes; equal on all ranks.
        - `label`: this rank's word for the move, in logs, traces and `last`.
        - `check="digest"`: compare the destination with the source, and the source with its earlier content; equal on
          all ranks. On a difference, all ranks raise an ExchangeError that names the tensor and the box, and the
          destination stays as it arrived. Reads the source twice and the destination once.
        - `async_op=True`: return a handle at once. Leave the tensors alone until `handle.wait()` has returned, which
          raises the call's errors.
        - `progress`: called with this rank's bytes moved and bytes in all, both ways together, as messages are received
          and sent, by the thread that moves. Its exceptions are raised once the move has ended.
        """
        call = Call(src, out, timeout, acknowledge, label, check, progress)
        return move_by(self, call, async_op)

    @compat.untraced
    def replan(
        self,
        plan: Plan | Transposed | Program,
        *,
        group: compat.Group | None = None,
        timeout: float | None = None,
    ) -> None:
        """Make later moves follow another `plan`: collective over `group` (default: the mover's own), like `compile`.

        Ranks that join compile the plan, with the arguments of this mover's `compile`, while the others call this.
        Unchanged parts are kept: connections, staging, and if ranks of the plan have only left, or come back
        (`shardmath.without`), messages and views of tensors. `timeout` replaces the mover's, in seconds.
        Raises ExchangeError, on every rank, as `compile` does; then the mover stays as it was.
        """
        replan_by(self, plan, group, timeout)

    def _find_former(self, party: Party) -> Former:
        """The state that a replan by the calling thread continues from; `party` was the mover's as the replan began."""
        ready = self._ready
        device = ready.party.wire.device
        # None: moves of any unfinished commit block are in the way.
        objection = self._word_closed() or self._landing.word_waiting(None)
        if ready.party.group is not party.group:
            what = "another thread has replanned the mover to another process group meanwhile"
            objection = f"{what}; call replan again"
        return Former(ready.part, ready.carrier, device, ready.peers, self.version, objection)

    def _find_objection_beside(self, async_op: object) -> str:
        """Why a move cannot run in the background of the calling thread; "" if it can. Raises inside of a call."""
        self._party.turns.refuse_nested()
        return find_objection(self._party, self.thread, async_op)

    def _start(self, call: Call) -> Handle:
        """Move in a background thread, with claims that name the calling thread."""
        copied = call.keep()._replace(thread=in_thread(self.thread))
        return start(self._party, functools.partial(self._run, copied, self._party.group))

    def _run(self, call: Call, group: compat.Group | None = None) -> None:
        """Make the move in the mover's group, timed. Raises ExchangeError if that is not `group`, if given."""

        def take(party: Party, begin: Callable[[], None]) -> None:
            with self._ledger.time(call.label, call.progress) as watch:
                self._take_turn(party, begin, call, watch)

        def find() -> Party:
            # A background move waits in its group's line, and would overtake others in another's.
            if group is not None and self._party.group is not group:
                what = "another thread has replanned the mover to another process group since"
                raise ExchangeError(f"{what} this background move was called; call it again")
            return self._party

        retake(find, take)

    def _take_turn(
        self, party: Party, begin: Callable[[], None], call: Call, watch: Stopwatch
    ) -> None:
        """Make the move as a turn of the group of `party`, which `begin` finds to be the mover's still (`retake`)."""
        self.check_open()
        if not compat.is_there(party.group):
            what = f"the process group of {self._name} was {compat.word_gone(party.group)}"
            raise ExchangeError(f"{what}; make a new group, and compile the plan on it")
        block = block_of(party.group)

        def move() -> str:
            begin()
            return self._move(call, block, watch)

        # If the group breaks, the error says what the destinations hold.
        with self._landing.telling(party.turns):
            difference = party.together(
                move,
                lambda failure, rank: describe_crossing(self._ready.given, failure.tensor, rank),
                "mover",
                call.patience or 0.0,
            )
        if block is not None and block.objection:
            raise ExchangeError(block.objection)
        # All ranks have moved, and found the same difference: the group stays whole.
        if difference:
            raise ExchangeError(difference)

    def _move(self, call: Call, block: CommitBlock | None, watch: Stopwatch) -> str:
        """Vote, and then move; return the difference that `check` found, or ""."""
        watch.lap(laps.QUEUED)
        self.check_open()
        checked = self._check(call, block, watch)
        kind = call.kind(self._carrier.word(call.how), block is not None)
        ballot = self._make_ballot(call, kind, checked)
        watch.name = ballot.claim
        watch.lap(laps.PREPARED)
        self._agree(ballot, kind, call.patience)
        watch.lap(laps.AGREED, self._party.turns.latest)
        # From here on every rank moves, so all count the move, even if it fails.
        self._move_count += 1
        if self._stages:
            self._party.answer_for(lambda: stages.begin(self._stages))
            watch.lap(laps.PREPARED)
        comparison = Check(self.plan, self._party.rank, checked.src, checked.dst)
        if kind.check:
            self._party.answer_for(comparison.begin)
            watch.lap(laps.COMPARED)
        self._carry(checked, call.held, ballot, block, watch)
        if kind.acknowledge:
            receipt = ballot._replace(claim=f"{ballot.claim}: all is there")
            self._party.vote(receipt)
            watch.lap(laps.AGREED)
        difference = ""
        if kind.check:
            self._party.answer_for(comparison.end)
            difference = comparison.compare(self._party)
            watch.lap(laps.COMPARED)
        # Within the turn: an interrupt here breaks the group, so that no rank continues without having ended the move.
        if block is None:
            self._end()
        if difference:
            self._carrier.forget()
        return difference

    def _agree(self, ballot: Ballot, kind: CallKind, patience: float | None) -> None:
        """Vote, unless ranks agreed on this kind earlier. Raises Refused if a rank objects, and PeerFailure."""
        if kind not in self._agreed_kinds:
            self._party.vote(ballot, patience)
            if self._ready.agree == ONCE:
                self._agreed_kinds.add(kind)
            return
        # A checksum on all messages, so that ranks that do different things never take each other's bytes.
        mark = zlib.crc32(ballot.claim.encode(errors="backslashreplace"))
        self._party.go_on(Unasked(mark, patience))
        if ballot.objection:
            # The others move already.
            raise PeerFailure(self._party.rank, ballot.objection)

    def _carry(
        self,
        checked: Checked,
        held: bool,
        ballot: Ballot,
        block: CommitBlock | None,
        watch: Stopwatch,
    ) -> None:
        """Carry the bytes, and put them in place."""
        carry = functools.partial(self._carrier.carry, checked.src, checked.dst, held, watch)
        if not self._landing.is_beside:
            self._party.answer_for(lambda: self._write(carry, watch))
            return
        results: list[Arrived] = []
        self._party.answer_for(lambda: results.append(carry()))
        (arrived,) = results
        tensors, put = arrived
        finish = functools.partial(stages.finish, self._stages, tensors)
        keys = stages.name_torn(self._stages, tuple(checked.dst))
        record_addresses = functools.partial(witness, checked.dst, checked.out)
        arrival = Arrival(keys, finish, put, self._end, record_addresses)
        self._landing.commit(self._party, ballot, arrival, self.member, block)
        watch.lap(laps.COMMITTED)

    def _write(self, carry: Callable[[], Arrived], watch: Stopwatch) -> None:
        """Carry the bytes into the destination, and finish the stages; on an error, note the torn destinations."""
        list_torn = self._carrier.list_torn
        try:
            arrived = carry()
            # Once all bytes have arrived, only stages may leave torn destinations: the carrier lists none.
            list_torn = tuple
            for pair in stages.finish(self._stages, arrived.tensors):
                put_in_place([pair])
            if self._stages:
                watch.lap(laps.FINALIZED)
        except BaseException:
            self._landing.standing.torn = stages.name_torn(self._stages, list_torn())
            raise

    def _end(self) -> None:
        """Tell carrier and stages that all bytes are in place."""
        self._landing.standing.torn = ()
        self._carrier.end()
        stages.end(self._stages)

    def _make_ballot(self, call: Call, kind: CallKind, checked: Checked) -> Ballot:
        """This rank's ballot, made even of invalid arguments, which the objection reports."""
        claim = kind.claim(self._move_count + 1, self._name)
        claim += in_thread(self.thread) if call.thread is None else call.thread
        return Ballot(claim, call.purpose, call.records_gradient, checked.objection)

    def _check(self, call: Call, block: CommitBlock | None, watch: Stopwatch) -> Checked:
        """The call's tensors, or an objection.

        Errors become objections, since the other ranks wait for this rank's vote.
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
    """Make the mover's next move send all bytes, even unchanged ones. The call does not communicate, but all ranks must
    make it between the same two moves."""
    mover._carrier.forget()


def ask_again(mover: Mover) -> None:
    """Make ranks vote on whether all of them can make the mover's next move, even with agree="once", which has them
    vote only before the first move with the same options. Call it on all ranks."""
    mover._agreed_kinds.clear()


def replan_by(
    mover: Mover,
    plan: Plan | Transposed | Program,
    group: compat.Group | None,
    timeout: float | None,
    besides: Callable[[], None] = lambda: None,
) -> None:
    """Change the mover to another plan, as `Mover.replan` does. Then call `besides`, with which the caller changes its
    other state; if ranks do not agree to the plan, `besides` is not called."""

    def take(ready: Ready) -> None:
        mover._take(ready)
        besides()

    while True:
        party = mover._party
        new_group = party.group if group is None else group
        is_other = new_group is not party.group
        if not is_other:
            # On another group a closed mover is an objection in the vote; in its own, all ranks know of it.
            mover.check_open()
        # A turn of the other group does not keep this group's moves out while the mover changes.
        with party.alone() if is_other else party.replanning():
            # Another thread may have replanned the mover while this one waited.
            if mover._party is party:
                former = functools.partial(mover._find_former, party)
                mover._ready.again(plan, new_group, timeout, former, take)
                return


def move_by(mover: Mover, call: Call, async_op: bool = False) -> Handle | None:
    """Move tensors by `mover` with the arguments in `call`; return a handle if `async_op`, else None."""
    if async_op is not False:
        objection = mover._find_objection_beside(async_op)
        if not objection:
            return mover._start(call)
        # The other ranks wait for this rank's vote, so it votes with the objection; and in this thread, for which the
        # refused vote must count.
        call = call._replace(objection=objection)
    mover._run(call)
    return None
