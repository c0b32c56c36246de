"""Landing: the state of a mover's destinations on this rank, and its words in errors.

1. Bytes carried into the destination may leave it torn if the move fails.
2. Bytes carried next to it change it only in `commit`, or at the end of a block.
3. An error that breaks the group during a move describes the mover's destination (`telling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.turns import Turns
from shardmath_torch.moves.commits.blocks import CommitBlock, Member
from shardmath_torch.moves.commits.entry import Entry, Standing, commit_entries, word_end, word_torn
from shardmath_torch.moves.commits.shadows import Pair, put_in_place

__all__ = ["Arrival", "Landing"]


class Arrival(NamedTuple):
    """The received bytes of one move, still in memory separate from the destinations `keys`, and the functions that put
    the bytes in place.

    `finish` computes further values to store, `put` puts the bytes in place, and `end` is called after that. `witness`
    returns a function that later tells why the bytes can no longer be put in place, "" if they can.
    """

    keys: tuple[str, ...]
    finish: Callable[[], Iterable[Pair]]
    put: Callable[[], None]
    end: Callable[[], None]
    witness: Callable[[], Callable[[], str]]


@dataclass
class Landing:
    """The state of one mover's destination tensors on this rank: how many moves were committed, which tensors might be
    partly updated, and the latest `smt.commit` block in which it moved.

    `is_beside` is whether bytes arrive next to the destinations, as with commit="all". `former` is the number of moves
    that others committed before this mover joined.
    """

    is_beside: bool = False
    standing: Standing = field(default_factory=Standing)
    former: int = 0
    _state_words: str = ""
    """What the failure that broke the group left in the destination, for errors; "" without one."""
    _block: CommitBlock | None = None
    """The latest commit block in which the mover moved."""

    def word_waiting(self, block: CommitBlock | None) -> str:
        """Return why the mover cannot move now, if its bytes wait for the end of a `commit` block other than `block`;
        "" if they do not."""
        other = self._block
        if other is None or other is block or not other.is_open:
            return ""
        what = "this mover has moved in a smt.commit block that has not ended, here or in another thread"
        return f"{what}; call it again after the block, or compile the plan once more"

    def check_free(self, block: CommitBlock | None) -> None:
        """Raise ExchangeError if bytes of the mover wait for the end of a `commit` block other than `block`."""
        waiting = self.word_waiting(block)
        if waiting:
            raise ExchangeError(waiting)

    def follow(self, former: int) -> Landing:
        """Return the state of this mover's destinations for its next plan, with the same version (number of committed
        moves). The next commit sets the version to 1 + the larger of this version and `former`, the highest version on
        other ranks.

        The torn (perhaps partly updated) tensors stay the same, too. Whether other ranks have committed one move more
        is no longer in doubt: `former` tells.
        """
        standing = Standing(self.standing.version, torn=self.standing.torn)
        return Landing(self.is_beside, standing, former)

    def commit(
        self,
        party: Party,
        ballot: Ballot,
        arrival: Arrival,
        member: Member,
        block: CommitBlock | None,
    ) -> None:
        """Commit a move on all ranks or on none: write the received bytes in `arrival`, and values computed from them,
        to the destinations. This is done now or, with `block`, at the end of that `smt.commit` context; `ballot` is
        this rank's vote for the move, and `member` describes the mover.

        An error before the promise is an objection. Raises as `conclude` does.
        """
        pairs: list[Pair] = []
        objection = ""
        try:
            pairs += arrival.finish()
        except Exception as error:
            objection = word_objection(error)

        def put() -> None:
            arrival.put()
            put_in_place(pairs)

        version = max(self.standing.version, self.former) + 1
        entry = Entry(ballot.claim, arrival.keys, put, arrival.end, self.standing, version)
        if block is not None:
            entry = entry._replace(find_lost=arrival.witness())
            block.objection = block.objection or objection
            block.add(member, entry)
            self._block = block
            return
        promise = ballot._replace(claim=f"{ballot.claim}: commit", objection=objection)
        commit_entries(party, promise, [entry])

    @contextmanager
    def telling(self, turns: Turns) -> Iterator[None]:
        """Return a context manager: if the group breaks in the `with` statement, the error says whether this rank's
        destinations are old, new, or perhaps partly updated. Later errors say so, too; `turns` tells whether the group
        is broken.

        `turns` is the state of the group.
        """
        was_broken = turns.broken
        version_before = self.standing.version
        try:
            yield
        except BaseException as error:
            if turns.broken and not was_broken:
                self._state_words = self._word_state(version_before)
            if not self._state_words:
                raise
            if isinstance(error, ExchangeError):
                raise ExchangeError(
                    f"{message_of(error)}; {self._state_words}"
                ) from error.__cause__
            error.add_note(self._state_words)
            raise

    def _word_state(self, version_before: int) -> str:
        """Words for the destination after a failure; "" if it did not change."""
        if self.is_beside:
            return word_end(self.standing, version_before)
        return word_torn(self.standing.torn) if self.standing.torn else ""
