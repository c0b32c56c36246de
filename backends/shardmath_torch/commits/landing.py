"""Landing: where a mover's bytes arrive on this rank, and what of them is in place.

1. Without shadows they arrive in the destination itself, which a failure may leave torn.
2. With shadows the destination changes in `commit` alone, or at the end of a block.
3. Whatever breaks the group while a mover moves says what its destination holds (`telling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.naming import word_objection
from shardmath_torch.agreement.party import Party
from shardmath_torch.agreement.turns import Turns
from shardmath_torch.commits.blocks import Block, Member
from shardmath_torch.commits.entry import Entry, Standing, commit_entries, word_end, word_torn
from shardmath_torch.commits.shadows import Pair, Shadows

__all__ = ["Arrival", "Finalize", "Landing", "make_nothing"]

Tensors: TypeAlias = Mapping[str, Tensor]

Finalize: TypeAlias = Callable[[Tensors], Iterable[Pair]]
"""What is to be stored besides, made of what has arrived, by local buffer key."""


def make_nothing(arrived: Tensors) -> Iterable[Pair]:
    """What is stored where there is nothing besides."""
    return ()


class Arrival(NamedTuple):
    """What has arrived: for which tensors, how autograd is told that they are written, and what is made of it.

    `held` tensors stay where they are from move to move.
    """

    dst: Tensors
    mark: Callable[[], None]
    finalize: Finalize
    held: bool


@dataclass
class Landing:
    """One mover's, on this rank."""

    shadows: Shadows | None = None
    standing: Standing = field(default_factory=Standing)
    _left: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that shadows take."""
        return 0 if self.shadows is None else self.shadows.nbytes

    def receive_into(self, dst: Tensors) -> Tensors:
        """The tensors in which a move to these receives; room for them is made. Raises what torch raises."""
        return dst if self.shadows is None else self.shadows.receive_into(dst)

    def commit(
        self, party: Party, mine: Ballot, arrival: Arrival, member: Member, block: Block | None
    ) -> None:
        """Put in place what is in the shadows, and what is made of it: on all ranks or on none, now or with the block.

        `mine` is what this rank said of the move. What fails here before the promise is an objection. Raises as
        `conclude` does.
        """
        assert self.shadows is not None
        pairs: list[Pair] = []
        objection = ""
        try:
            pairs += self.shadows.pair(arrival.dst, arrival.held)
            pairs += arrival.finalize(self.shadows.tensors)
        except Exception as error:
            objection = word_objection(error)
        keys, version = tuple(arrival.dst), self.standing.version + 1
        entry = Entry(mine.claim, keys, arrival.mark, pairs, self.standing, version)
        if block is not None:
            block.objection = block.objection or objection
            block.add(member, entry)
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
        if self.shadows is not None:
            return word_end(self.standing, former)
        return word_torn(self.standing.torn) if self.standing.torn else ""
