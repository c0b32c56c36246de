"""Entry: one move whose bytes are all here, beside its destination; and how several end together.

1. All entries of a commit are put in place in one call, and only then counted.
2. `Standing` counts what was committed: it is the same on all ranks but where one is in doubt.
3. However a commit ends, `word_end` says what this rank's destination holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmath.protocol import Event
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.party import Party
from shardmath_torch.commits.conclude import conclude
from shardmath_torch.commits.shadows import Pair, put_in_place

__all__ = ["Entry", "Standing", "commit_entries", "word_end"]


@dataclass
class Standing:
    """How many moves of a mover were committed; `in_doubt`: whether that is known of one less than were tried."""

    version: int = 0
    in_doubt: bool = False


class Entry(NamedTuple):
    """A move in words, how autograd is told of it, what is put in place, and the version that this makes."""

    claim: str
    mark: Callable[[], None]
    pairs: Sequence[Pair]
    standing: Standing
    version: int


def commit_entries(
    party: Party, promise: Ballot, entries: Sequence[Entry], patience: float | None = None
) -> None:
    """Put all of them in place on all ranks, or none on any. Raises as `conclude` does."""

    def place() -> None:
        for entry in entries:
            entry.mark()
        put_in_place(pair for entry in entries for pair in entry.pairs)
        for entry in entries:
            entry.standing.version = entry.version

    try:
        conclude(party, promise, place, patience)
    finally:
        is_lost = party.turns.protocol.verdict is Event.LOSE
        for entry in entries:
            entry.standing.in_doubt = is_lost


def word_end(standing: Standing, former: int) -> str:
    """What a rank's destination holds after a commit that was left, begun at version `former`."""
    if standing.in_doubt:
        why = "the group's store, which has what was decided, does not answer"
        here = f"here all is as it was, version {standing.version}"
        return f"unknown whether the others have the new version: {why}; {here}"
    if standing.version > former:
        return f"all ranks committed: the new is in place here, version {standing.version}"
    return f"nothing was committed: here all is as it was, version {standing.version}"
