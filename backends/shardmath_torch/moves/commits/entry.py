"""Entry: one move whose bytes are all here, beside its destination; and how several end together.

1. All entries of a commit are put in place, and only then counted. What interrupts that is raised when it is done.
2. `Standing` counts what was committed: it is the same on all ranks but where one is in doubt.
3. However a commit ends, `word_end` says what this rank's destination holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmath.plans.protocol import Event
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.commits.conclude import conclude

__all__ = ["Entry", "Standing", "commit_entries", "word_end", "word_torn"]

MOST_NAMES = 8
"""Names that an error shows."""


@dataclass
class Standing:
    """How many moves of a mover were committed.

    `in_doubt`: whether the others may have one more. `torn` are destinations that may be neither old nor new.
    """

    version: int = 0
    in_doubt: bool = False
    torn: tuple[str, ...] = ()


class Entry(NamedTuple):
    """A move in words, its destinations, and the version that it makes.

    `put` puts it in place, and may be called again; `end` is called once the commit is over, and all is in place.
    `find_lost` says why it cannot be put there any more; "" where it can.
    """

    claim: str
    keys: tuple[str, ...]
    put: Callable[[], None]
    end: Callable[[], None]
    standing: Standing
    version: int
    find_lost: Callable[[], str] = str


def commit_entries(party: Party, promise: Ballot, entries: Sequence[Entry]) -> None:
    """Put all of them in place on all ranks, or none on any. Raises as `conclude` does."""

    def place() -> None:
        for entry in entries:
            entry.put()
        for entry in entries:
            entry.standing.version = entry.version

    try:
        conclude(party, promise, place)
    finally:
        _note_end(party, entries)


def _note_end(party: Party, entries: Sequence[Entry]) -> None:
    """What is to be known of the movers when all is over."""
    verdict = party.turns.protocol.verdict
    for entry in entries:
        standing = entry.standing
        standing.in_doubt = verdict is Event.LOSE
        # Memory that could not be written, however often that was tried.
        if verdict is Event.COMMIT and standing.version < entry.version:
            standing.torn = entry.keys


def word_torn(keys: tuple[str, ...]) -> str:
    """What is said of destinations that may be neither; the first of many."""
    named = "the destination tensor"
    if keys != ("",):
        named = f"destination tensors {', '.join(map(repr, keys[:MOST_NAMES]))}"
    if len(keys) > MOST_NAMES:
        named += f", ... ({len(keys)} in all)"
    return f"{named} here may be neither old nor new (mover.torn)"


def word_end(standing: Standing, former: int) -> str:
    """What a rank's destination holds after a commit that was left, begun at version `former`."""
    if standing.in_doubt:
        why = "the group's store, which has what was decided, does not answer"
        here = f"here all is as it was, version {standing.version}"
        return f"unknown whether the others have the new version: {why}; {here}"
    if standing.torn:
        return f"all ranks committed, and this one could not: {word_torn(standing.torn)}"
    if standing.version > former:
        return f"all ranks committed: the new is in place here, version {standing.version}"
    return f"nothing was committed: here all is as it was, version {standing.version}"
