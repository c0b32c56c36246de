"""Blocks: several moves that are committed together.

with smt.commit(first, second):         # or smt.commit(group), for all movers of the group
    first(gradients, out=buffers)       # received next to the destinations
    second(weights, out=shards)
                                        # at the end all ranks put all moves in place, or none does

1. A block has one group and one thread; every rank enters it, makes the same moves, and leaves it.
2. Its end is one promise of all ranks, for all its moves. A rank whose block an exception ended
   objects in its promise, and all others raise that; if they are still in a move, the move raises.
3. If a call inside raises before anything moves, all ranks know it: the block has then ended on all ranks, without a
   promise. The same holds if the first call inside raises because a rank has left.
4. Ctrl-C breaks the group, as in any call. An exception also breaks it while others may be in a move without a vote,
   in which they would not receive the objection.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, plural, shown, word_error
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.groups.agreement.transport import join_within
from shardmath_torch.groups.agreement.turns import Turns, turns_of
from shardmath_torch.moves.commits.entry import Entry, commit_entries, word_end
from shardmath_torch.moves.observing.laps import COMMITTED
from shardmath_torch.moves.observing.stopwatch import Ledger

__all__ = ["CommitBlock", "HasMember", "Member", "block_of", "commit"]

DEFAULT_TIMEOUT_S = 60.0


class Member(NamedTuple):
    """The facts about a Mover (an object that moves tensors by a plan) that a `with commit(...)` block needs to put the
    results of several moves in place together: the Mover's process group, unique key, name and options.

    `is_beside` is whether it receives next to its destinations, as with commit="all". `timeout` is the one it was
    compiled with, in seconds. If `agrees_once`, ranks may move by it without a vote.
    """

    group: compat.Group
    key: str
    name: str
    is_beside: bool
    timeout: float
    agrees_once: bool = False


class HasMember(Protocol):
    """The interface of arguments of `commit`: a mover (an object that moves tensors by a plan), or an object that uses
    one, such as a Refit, which moves a model's weights from trainers to inference engines."""

    @property
    def member(self) -> Member:
        """The mover's group, name and options, which a `commit` block checks."""


class CommitBlock:
    """The moves inside one `with commit(...)` block on this rank, which are put in place together at its end.

    Every mover in `named` (by its key) must move in it; if `named` is empty, any mover of the group may.
    """

    def __init__(self, turns: Turns, named: dict[str, Member]) -> None:
        self._turns = turns
        self._named = named
        self._refusals_before = turns.heard.refusals
        self._goodbyes_before = turns.heard.goodbyes
        # Keys of the movers that have moved in the block.
        self._moved_keys: set[str] = set()
        self._agrees_once = any(member.agrees_once for member in named.values())
        self._timeouts = [member.timeout for member in named.values()]
        self.entries: list[Entry] = []
        self.objection = ""
        self.is_open = True

    @property
    def was_refused(self) -> bool:
        """Whether none of the block's moves will be committed, for one of two reasons: a call in the block failed on
        all ranks, or another rank left the group or closed its mover before the block's first move."""
        heard = self._turns.heard
        # A rank that left before any move does not vote at the block's end; one that left later does.
        lacks_rank = heard.goodbyes != self._goodbyes_before and not self.entries
        return heard.refusals != self._refusals_before or lacks_rank

    def check(self, member: Member) -> None:
        """Raise ExchangeError if the mover `member` cannot move in this block, for example because this mover has
        already moved in the block."""
        if not member.is_beside:
            what = f"{member.name} was compiled with commit='direct' and cannot move in smt.commit"
            raise ExchangeError(f"{what}; compile it with commit='all'")
        if self._named and member.key not in self._named:
            names = ", ".join(named.name for named in self._named.values())
            what = f"{member.name} moves in a smt.commit that was given only {names}"
            raise ExchangeError(f"{what}; pass this mover to smt.commit, too")
        if member.key in self._moved_keys:
            what = f"{member.name} moves twice in one smt.commit"
            raise ExchangeError(f"{what}; compile the plan once more for the second")

    def add(self, member: Member, entry: Entry) -> None:
        """Add `entry`, a move whose bytes have arrived, to the moves that are put in place together at the end of the
        block. `member` describes the mover (the object that made the move)."""
        self._moved_keys.add(member.key)
        self._agrees_once |= member.agrees_once
        self._timeouts.append(member.timeout)
        self.entries.append(entry)

    @property
    def timeout(self) -> float:
        """The seconds to wait for all ranks at the block's end: the longest timeout of its movers, or 60 without
        movers."""
        return max(self._timeouts, default=DEFAULT_TIMEOUT_S)

    def close(self) -> None:
        """Mark the block as ended, and drop its moves, so that their tensors can be freed."""
        self.is_open = False
        self.entries = []

    @property
    def may_be_unheard(self) -> bool:
        """Whether an error in this rank's `smt.commit` block might stay unknown to other ranks. A mover with
        agree="once" (no vote before each move) causes this, until all movers passed to `smt.commit`, if any, have
        moved."""
        return self._agrees_once and (not self._named or bool(self._list_missing()))

    def _list_missing(self) -> list[str]:
        """The named movers that have not moved in the block."""
        return [member.name for key, member in self._named.items() if key not in self._moved_keys]

    def object(self) -> str:
        """Return why this rank cannot commit the moves of its `smt.commit` block; "" if it can. Ranks vote on the
        commit, and the text makes the vote fail."""
        missing = self._list_missing()
        if missing and not self.objection:
            what = (
                f"smt.commit was given {', '.join(missing)}, but its block ended without that move"
            )
            return f"{what}; call each mover in the block, or do not pass it to smt.commit"
        # Since their moves the caller may have freed destinations.
        faults = (entry.find_lost() for entry in self.entries)
        return self.objection or next(filter(None, faults), "")

    @property
    def claim(self) -> str:
        """The text that names the moves to commit; ranks compare it when they vote."""
        # Without moves nothing tells which threads belong together, so the calling thread's name does not count.
        moves = "; ".join(entry.claim for entry in self.entries) or "none"
        return f"commit {plural(self.entries, 'move')}: {moves}"


class _ThreadBlocks(threading.local):
    """The calling thread's open block of each group."""

    def __init__(self) -> None:
        self.blocks: WeakKeyDictionary[compat.Group, CommitBlock] = WeakKeyDictionary()


_this_thread = _ThreadBlocks()


def block_of(group: compat.Group) -> CommitBlock | None:
    """Return the group's `commit` block that the calling thread is in; None if it is in none. Raises ExchangeError if a
    call in the block failed."""
    block = _this_thread.blocks.get(group)
    if block is not None and block.was_refused:
        raise ExchangeError(
            "an earlier call in this smt.commit block failed, so that nothing in it is committed; "
            "leave the block, and begin another on all ranks"
        )
    return block


@contextmanager
@compat.untraced
def commit(*what: HasMember | compat.Group, timeout: float | None = None) -> Iterator[None]:
    """Commit all moves in the `with` block together: at its end, put all results in place, on all ranks or on none.
    Collective. Pass either the process group or all Movers that move in the block, compiled with commit="all";
    `timeout` limits the wait for all ranks at the end, in seconds.

    If `what` is a group (default: all ranks), any of its movers can move in the block. The default of `timeout` is the
    longest timeout of the movers. Raises ExchangeError on all ranks if an exception ends one rank's block, or it makes
    other moves; and for a block inside of another one of the group, or inside of a move.
    """
    group, named = _read(what)
    if timeout is not None and not is_time(timeout):
        raise ExchangeError(word_bad_time(timeout))
    if group in _this_thread.blocks:
        fault = "smt.commit was called inside of another smt.commit block of the same process group"
        raise ExchangeError(f"{fault}; end that block first, or use another group")
    turns = turns_of(group)
    # Before the block begins, since leaving it by this error would break the group in the middle of the move.
    turns.refuse_nested()
    block = CommitBlock(turns, named)
    _this_thread.blocks[group] = block
    try:
        try:
            yield
        except BaseException as error:
            _leave(_join(group, block, timeout), block, error)
            raise
        finally:
            _this_thread.blocks.pop(group, None)
        _end(_join(group, block, timeout), block)
    finally:
        block.close()


def _join(group: compat.Group, block: CommitBlock, timeout: float | None) -> Party:
    """Join the group for the block's end."""
    return join_within(group, block.timeout if timeout is None else float(timeout))


def _read(what: tuple[HasMember | compat.Group, ...]) -> tuple[compat.Group, dict[str, Member]]:
    """The arguments of `commit` as a group and its named movers by key. Raises ExchangeError."""
    if not what or isinstance(what[0], compat.Group):
        if len(what) > 1:
            fault = f"smt.commit got {len(what)} arguments, the first one a process group"
            raise ExchangeError(f"{fault}; pass only the group, or only movers")
        return compat.group_of(what[0] if what else None), {}  # type: ignore[arg-type]
    named: dict[str, Member] = {}
    groups = set()
    for mover in what:
        member = getattr(mover, "member", None)
        if not isinstance(member, Member):
            raise ExchangeError(
                f"smt.commit got {shown(mover)}, which is not a mover; pass what smt.compile returns"
            )
        named[member.key] = member
        groups.add(member.group)
    if len(groups) > 1:
        fault = f"smt.commit got movers of {len(groups)} process groups, where one is needed"
        raise ExchangeError(f"{fault}; compile all of them with the same group=")
    return compat.group_of(groups.pop()), named


def _leave(party: Party, block: CommitBlock, error: BaseException) -> None:
    """Tell the other ranks that an exception ended this rank's block, unless they know that the block has ended."""
    if block.was_refused or party.turns.broken:
        return
    # Ctrl-C waits for no vote; and ranks that move without votes may wait for this rank in a move.
    if not isinstance(error, Exception) or block.may_be_unheard:
        party.leave(error)
        return
    if not block.objection:
        block.objection = f"left smt.commit by {word_error(error)}; begin another on all ranks"
    try:
        _end(party, block)
    except ExchangeError as refusal:
        # This rank raises its own exception; the others raise the refusal.
        error.add_note(f"smt.commit: {message_of(refusal)}")


def _end(party: Party, block: CommitBlock) -> None:
    """Promise the block's moves, and put them in place."""
    if block.was_refused:
        what = "a call in this smt.commit block failed, so that nothing in it is committed"
        raise ExchangeError(f"{what}; begin another block on all ranks")
    promise = Ballot(block.claim, objection=block.object())
    versions = [entry.standing.version for entry in block.entries]
    try:
        with Ledger(block.claim, None, party.rank, logged=False).time("", None) as watch:
            party.together(
                lambda: _commit_all(party, promise, block.entries),
                lambda failure, rank: f"ranks were to {block.claim}",
                "smt.commit",
            )
            watch.lap(COMMITTED)
    except BaseException as error:
        if not party.turns.broken or not block.entries:
            raise
        state = word_end(block.entries[0].standing, versions[0])
        if isinstance(error, ExchangeError):
            raise ExchangeError(f"{message_of(error)}; {state}") from error.__cause__
        error.add_note(state)
        raise


def _commit_all(party: Party, promise: Ballot, entries: Sequence[Entry]) -> None:
    """Put all entries in place on all ranks, or none on any, and then end each."""
    commit_entries(party, promise, entries)
    for entry in entries:
        entry.end()
