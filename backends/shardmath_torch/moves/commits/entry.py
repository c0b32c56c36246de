"""Entry: one move whose bytes have arrived next to its destination, and the common end of several.

1. All entries of a commit are put in place, and only then counted. An interrupt is raised once that is done.
2. `Standing` counts committed moves: it is equal on all ranks, except a rank in doubt.
3. However a commit ends, `word_end` describes this rank's destination.
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
"""Most names that an error shows."""


@dataclass
class Standing:
    """A mover's state on this rank: how many of its moves were committed, whether other ranks might have committed one
    more, and which destinations might be partly updated.

    `version` is the number of committed moves; `in_doubt` is whether the others may have one more. `torn` lists
    destinations that may be neither old nor new.
    """

    version: int = 0
    in_doubt: bool = False
    torn: tuple[str, ...] = ()


class Entry(NamedTuple):
    """A move whose bytes have arrived and wait to be put in place. `claim` is a text that tells which move it is,
    `keys` are the names of its destination tensors, and `version` is the mover's number of committed moves, this one
    included.

    `put` puts it in place, and may be repeated; `end` is called once all of the commit is in place. `find_lost` tells
    why the move can no longer be put in place; "" if it can, as by default `str()` is.
    """

    claim: str
    keys: tuple[str, ...]
    put: Callable[[], None]
    end: Callable[[], None]
    standing: Standing
    version: int
    find_lost: Callable[[], str] = str


def commit_entries(party: Party, promise: Ballot, entries: Sequence[Entry]) -> None:
    """Put the moves `entries` in place on all ranks or on none, once all ranks have sent the vote `promise` (that all
    bytes have arrived). `party` is this rank as a member of the process group.

    Raises Refused if a rank objects, PeerFailure if the group is broken, and any other error, such as Ctrl-C, once the
    ranks have decided.
    """

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
    """Note the commit's result in the movers' standings."""
    verdict = party.turns.protocol.verdict
    for entry in entries:
        standing = entry.standing
        # LOSE: the store, which has the ranks' decision, does not answer.
        standing.in_doubt = verdict is Event.LOSE
        # Committed, but memory could not be written, even by repetition.
        if verdict is Event.COMMIT and standing.version < entry.version:
            standing.torn = entry.keys


def word_torn(keys: tuple[str, ...]) -> str:
    """Return the error text for the destination tensors `keys`, whose values might be partly updated; it lists at most
    MOST_NAMES names."""
    names = "the destination tensor"
    # A plan of one tensor calls it "".
    if keys != ("",):
        names = f"destination tensors {', '.join(map(repr, keys[:MOST_NAMES]))}"
    if len(keys) > MOST_NAMES:
        names += f", ... ({len(keys)} in all)"
    return f"{names} here may be neither old nor new (mover.torn)"


def word_end(standing: Standing, former: int) -> str:
    """Return the text that says, after a failed commit, whether this rank's destinations are old, new, or torn (perhaps
    partly updated); `former` is the version (number of committed moves) before it."""
    if standing.in_doubt:
        why = "the process group's store, which has the ranks' decision, does not answer"
        here = f"here all is as it was, version {standing.version}"
        return f"unknown whether the others have the new version: {why}; {here}"
    if standing.torn:
        return f"all ranks committed, and this one could not: {word_torn(standing.torn)}"
    if standing.version > former:
        return f"all ranks committed: the new version {standing.version} is in place here"
    return f"nothing was committed: here all is as it was, version {standing.version}"
