"""Blocks: several moves that are committed together.

with smt.commit(first, second):         # or smt.commit(group), for all movers of the group
    first(gradients, out=buffers)       # received beside the destinations
    second(weights, out=shards)
                                        # here all of it is put in place, on all ranks, or none on any

1. A block is of one group and one thread; every rank enters it, makes the same moves, and leaves it.
2. Its end is one promise of all ranks, for all that was moved. One that left by an exception says so
   in its own, and all others raise it; where they are still in a move, that move does.
3. What any call inside is refused by, all ranks have heard of: the block has then ended on all of
   them, and makes no promise. So it is if the first call inside hears that a rank has left.
4. Left by Ctrl-C, as any call is that is under way, it breaks the group. So it does where it is left by an exception
   while others may be in a move about which ranks agreed before: there they would not hear of it.
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
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.groups.agreement.turns import Turns, in_thread, turns_of
from shardmath_torch.moves.commits.entry import Entry, commit_entries, word_end
from shardmath_torch.moves.observing.laps import COMMITTED
from shardmath_torch.moves.observing.stopwatch import Ledger

__all__ = ["CommitBlock", "HasMember", "Member", "block_of", "commit"]

DEFAULT_TIMEOUT_S = 60.0

LONGEST_GRACE_S = 5.0
"""For finding out who failed, as where a plan is compiled."""


class Member(NamedTuple):
    """A mover as blocks see it: its group, a key that no other mover of the group has, and its name.

    `timeout` in seconds: what it was compiled with. `agrees_once`: ranks may be in a move of it about which they are
    not asked.
    """

    group: compat.Group
    key: str
    name: str
    is_beside: bool
    timeout: float
    agrees_once: bool = False


class HasMember(Protocol):
    """What a block takes: a mover, or what moves by one."""

    @property
    def member(self) -> Member:
        """The mover as blocks see it."""


class CommitBlock:
    """The moves of one commit on this rank; those `named` have to be made, none is where all may."""

    def __init__(self, turns: Turns, named: dict[str, Member]) -> None:
        self._turns = turns
        self._named = named
        self._refusals = turns.heard.refusals
        self._goodbyes = turns.heard.goodbyes
        self._keys: set[str] = set()
        self._agrees_once = any(one.agrees_once for one in named.values())
        self._timeouts = [one.timeout for one in named.values()]
        self.entries: list[Entry] = []
        self.objection = ""
        self.is_open = True

    @property
    def was_refused(self) -> bool:
        """Whether all ranks that are in it have heard that it comes to nothing."""
        heard = self._turns.heard
        # Who left before anything moved does not come to its end; who left later does.
        has_nobody = heard.goodbyes != self._goodbyes and not self.entries
        return heard.refusals != self._refusals or has_nobody

    def check(self, member: Member) -> None:
        """Raise ExchangeError for a mover that cannot be part of it."""
        if not member.is_beside:
            what = f"{member.name} writes to its destination as it moves"
            raise ExchangeError(f"{what}; compile it with commit='all' to move in smt.commit")
        if self._named and member.key not in self._named:
            names = ", ".join(one.name for one in self._named.values())
            raise ExchangeError(
                f"smt.commit is given {names}, and {member.name} moves in it; give it that, too"
            )
        if member.key in self._keys:
            what = f"{member.name} moves twice in one smt.commit"
            raise ExchangeError(f"{what}; compile the plan once more for the second")

    def add(self, member: Member, entry: Entry) -> None:
        """The move's bytes are here."""
        self._keys.add(member.key)
        self._agrees_once |= member.agrees_once
        self._timeouts.append(member.timeout)
        self.entries.append(entry)

    @property
    def timeout(self) -> float:
        """Seconds to wait for all ranks to come to its end: the longest of its movers'."""
        return max(self._timeouts, default=DEFAULT_TIMEOUT_S)

    def close(self) -> None:
        """It is over: what has come beside destinations is let go of."""
        self.is_open = False
        self.entries = []

    @property
    def may_be_unheard(self) -> bool:
        """Whether others may be in a move without a vote, in which nobody hears what this rank objects to."""
        return self._agrees_once and (not self._named or bool(self._list_missing()))

    def _list_missing(self) -> list[str]:
        """The movers that have not moved in it, of those that have to."""
        return [one.name for key, one in self._named.items() if key not in self._keys]

    def object(self) -> str:
        """What speaks against its end; "" for nothing."""
        missing = self._list_missing()
        if missing and not self.objection:
            return f"smt.commit is given {', '.join(missing)}, which did not move in it"
        # The caller has had the destinations since they were looked at.
        lost = (entry.find_lost() for entry in self.entries)
        return self.objection or next(filter(None, lost), "")

    @property
    def claim(self) -> str:
        """What its end commits, as all ranks must say. Moves say in which thread, by the name that they were given."""
        moves = "; ".join(entry.claim for entry in self.entries) or f"none{in_thread(None)}"
        return f"commit {plural(self.entries, 'move')}: {moves}"


class _Here(threading.local):
    """The blocks that the calling thread is in."""

    def __init__(self) -> None:
        self.blocks: WeakKeyDictionary[compat.Group, CommitBlock] = WeakKeyDictionary()


_here = _Here()


def block_of(group: compat.Group) -> CommitBlock | None:
    """The block of the group that the calling thread is in. Raises ExchangeError where that has come to nothing."""
    block = _here.blocks.get(group)
    if block is not None and block.was_refused:
        raise ExchangeError(
            "a call in this smt.commit was refused, so that nothing in it is committed; leave it, "
            "and begin another on all ranks"
        )
    return block


@contextmanager
def commit(*what: HasMember | compat.Group, timeout: float | None = None) -> Iterator[None]:
    """All moves inside are put in place together as the block ends, on all ranks, or none is on any. Collective.

    `what` are the movers that move in it, compiled with commit="all", or their group (default: all ranks), for any of
    them. `timeout`: seconds to wait for all ranks to come to the end; the longest that its movers were compiled with
    if not given. Raises ExchangeError on all ranks where one leaves it by an exception or makes other moves; and for a
    block inside another of the group, or inside a move.
    """
    group, named = _read(what)
    if timeout is not None and not is_time(timeout):
        raise ExchangeError(word_bad_time(timeout))
    if group in _here.blocks:
        raise ExchangeError("this thread is in a smt.commit of the group; leave that one first")
    turns = turns_of(group)
    # Leaving it by that error would break the group in the middle of the move.
    turns.refuse_nested()
    block = CommitBlock(turns, named)
    _here.blocks[group] = block
    try:
        try:
            yield
        except BaseException as error:
            _leave(_join(group, block, timeout), block, error)
            raise
        finally:
            _here.blocks.pop(group, None)
        _end(_join(group, block, timeout), block)
    finally:
        block.close()


def _join(group: compat.Group, block: CommitBlock, timeout: float | None) -> Party:
    """This rank in the group, for the end of the block."""
    limit = block.timeout if timeout is None else timeout
    grace = min(LONGEST_GRACE_S, limit / 5)
    return join(group, limit - 1.2 * grace, grace)


def _read(what: tuple[HasMember | compat.Group, ...]) -> tuple[compat.Group, dict[str, Member]]:
    """The group, and the movers that are named. Raises ExchangeError."""
    if not what or isinstance(what[0], compat.Group):
        if len(what) > 1:
            raise ExchangeError("smt.commit takes one group, or movers; give the movers alone")
        return compat.group_of(what[0] if what else None), {}  # type: ignore[arg-type]
    named: dict[str, Member] = {}
    groups = set()
    for one in what:
        member = getattr(one, "member", None)
        if not isinstance(member, Member):
            raise ExchangeError(
                f"smt.commit takes movers, got {shown(one)}; give what smt.compile returns"
            )
        named[member.key] = member
        groups.add(member.group)
    if len(groups) > 1:
        what_is_wrong = "the movers are of several process groups, which do not decide together"
        raise ExchangeError(f"{what_is_wrong}; compile them on one")
    return compat.group_of(groups.pop()), named


def _leave(party: Party, block: CommitBlock, error: BaseException) -> None:
    """Let the others know that this rank has left the block, unless they do."""
    if block.was_refused or party.turns.broken:
        return
    if not isinstance(error, Exception) or block.may_be_unheard:
        party.leave(error)
        return
    if not block.objection:
        block.objection = f"left smt.commit by {word_error(error)}"
    try:
        _end(party, block)
    except ExchangeError as told:
        # What this rank goes on with is the error itself; the others have this one.
        error.add_note(f"smt.commit: {message_of(told)}")


def _end(party: Party, block: CommitBlock) -> None:
    """Promise all that was moved, and put it in place."""
    if block.was_refused:
        raise ExchangeError("a call in this smt.commit was refused: nothing in it is committed")
    promise = Ballot(block.claim, objection=block.object())
    former = [entry.standing.version for entry in block.entries]
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
        said = word_end(block.entries[0].standing, former[0])
        if isinstance(error, ExchangeError):
            raise ExchangeError(f"{message_of(error)}; {said}") from error.__cause__
        error.add_note(said)
        raise


def _commit_all(party: Party, promise: Ballot, entries: Sequence[Entry]) -> None:
    """Put all in place on all ranks, and let those know who wait for it; or nothing on any."""
    commit_entries(party, promise, entries)
    for entry in entries:
        entry.end()
