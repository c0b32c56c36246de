"""Landing: what of a mover's bytes is in place on this rank, and what is said of it.

1. Carried into the destination itself, they may leave it torn where the move fails.
2. Carried beside it, they change it in `commit` alone, or at the end of a block.
3. Whatever breaks the group while a mover moves says what its destination holds (`telling`).
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
    """What has arrived beside these destinations.

    `finish` gives what is stored besides, `put` puts what has come in place, and `end` is called when that is over.
    `witness` gives what is asked, later, why that cannot be put in place any more; it says "" where it can.
    """

    keys: tuple[str, ...]
    finish: Callable[[], Iterable[Pair]]
    put: Callable[[], None]
    end: Callable[[], None]
    witness: Callable[[], Callable[[], str]]


@dataclass
class Landing:
    """One mover's, on this rank; `former` is how many moves were committed on others before it was there."""

    is_beside: bool = False
    standing: Standing = field(default_factory=Standing)
    former: int = 0
    _left: str = ""
    _block: CommitBlock | None = None

    def word_waiting(self, block: CommitBlock | None) -> str:
        """Where what came in another block waits beside destinations for its end, why nothing else may; else ""."""
        other = self._block
        if other is None or other is block or not other.is_open:
            return ""
        what = "this mover has moved in a smt.commit that this or another thread has not left"
        return f"{what}; go on after it, or compile the plan once more"

    def check_free(self, block: CommitBlock | None) -> None:
        """Raise ExchangeError where what came in another block waits."""
        waiting = self.word_waiting(block)
        if waiting:
            raise ExchangeError(waiting)

    def follow(self, former: int) -> Landing:
        """That of a mover that goes on from here in another group, or by another plan.

        What was in doubt is known: the others have no more than `former`.
        """
        standing = Standing(self.standing.version, torn=self.standing.torn)
        return Landing(self.is_beside, standing, former)

    def commit(
        self,
        party: Party,
        mine: Ballot,
        arrival: Arrival,
        member: Member,
        block: CommitBlock | None,
    ) -> None:
        """Put in place what has arrived, and what is made of it: on all ranks or on none, now or with the block.

        `mine` is what this rank said of the move. What fails here before the promise is an objection. Raises as
        `conclude` does.
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
        entry = Entry(mine.claim, arrival.keys, put, arrival.end, self.standing, version)
        if block is not None:
            entry = entry._replace(find_lost=arrival.witness())
            block.objection = block.objection or objection
            block.add(member, entry)
            self._block = block
            return
        promise = mine._replace(claim=f"{mine.claim}: commit", objection=objection)
        commit_entries(party, promise, [entry])

    @contextmanager
    def telling(self, turns: Turns) -> Iterator[None]:
        """What breaks the group inside says in what state that leaves this rank's destination, then and ever after."""
        was_broken = turns.broken
        former = self.standing.version
        try:
            yield
        except BaseException as error:
            if turns.broken and not was_broken:
                self._left = self._word_state(former)
            if not self._left:
                raise
            if isinstance(error, ExchangeError):
                raise ExchangeError(f"{message_of(error)}; {self._left}") from error.__cause__
            error.add_note(self._left)
            raise

    def _word_state(self, former: int) -> str:
        """What the destination holds after a failure; "" where that is what it did."""
        if self.is_beside:
            return word_end(self.standing, former)
        return word_torn(self.standing.torn) if self.standing.torn else ""
