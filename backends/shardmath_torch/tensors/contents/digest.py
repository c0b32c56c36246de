"""`digest`: a number for the content of a tensor on all ranks, the same under every layout.

1. Each rank computes its shares of the digest on its device: a number for each set of elements that the same ranks
   hold. Ranks exchange 8 bytes per share, which is often one per tensor.
2. A digest is a turn of the group, as a move is: if one rank's tensor does not fit, or replicas differ, all ranks
   raise.
3. Numbers equal the results of `shardmath.content.digest_of`, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias, overload

from shardmath.base.arguments import as_integer
from shardmath.base.digest import digest as digest_text
from shardmath.base.errors import ExchangeError
from shardmath.layouts.holdings import LayoutOrWindows, Windows, holdings_digest
from shardmath.values.digests.content import Held, read_side
from shardmath.values.digests.shares import add_patches, seal
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.gather import party_of
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.agreement.transport import package_of
from shardmath_torch.groups.agreement.turns import check_thread, in_thread
from shardmath_torch.moves.digests.comparing import find_odd_replica
from shardmath_torch.moves.digests.sides import (
    DigestSide,
    count_shares,
    divide_shares,
    gather_numbers,
)
from shardmath_torch.moves.exchange.local import Local, Tensors, by_key, fits, want_side

__all__ = ["digest"]


@overload
def digest(
    held: LayoutOrWindows, tensors: Local, *, group: compat.Group | None = None, seed: int = 0
) -> int: ...
@overload
def digest(
    held: Mapping[str, LayoutOrWindows],
    tensors: Local,
    *,
    group: compat.Group | None = None,
    seed: int = 0,
) -> dict[str, int]: ...
@compat.untraced
def digest(
    held: Held, tensors: Local, *, group: compat.Group | None = None, seed: int = 0
) -> int | dict[str, int]:
    """Return a checksum of a sharded tensor that is the same under every layout, for equal `seed`. `held` is the layout
    and `tensors` this rank's part; if both are mappings by tensor name, the result is a dict of checksums by name.

    `held` is a layout, a tuple of layouts for a tensor in windows, or a mapping of either by name, the same on all
    ranks; `tensors` are this rank's, as a move takes them, or None if it holds nothing. The numbers equal
    `shardmath.content.digest_of`. Collective over `group` (default: all ranks), which has every rank of the layouts.
    Raises ExchangeError on every rank if tensors do not fit, if replicas differ, for a Partial layout, if no rank
    holds some element, or if ranks disagree.
    """
    process_group = compat.group_of(group)
    party = party_of(process_group)
    if party is None:
        package_of(process_group)  # raises an error that says which backends there are
        raise AssertionError("a backend without a party has no package")
    given = _Given(held, tensors, seed)
    digests = party.together(
        lambda: _agree_and_add(party, given), lambda failure, rank: "ranks were to compare digests"
    )
    # All ranks know that replicas differ, and their turn has ended.
    if isinstance(digests, str):
        raise ExchangeError(digests)
    return digests if isinstance(held, Mapping) else digests[""]


class _Given(NamedTuple):
    """The arguments of `digest`."""

    held: Held
    tensors: Local
    seed: int


_Prepared: TypeAlias = tuple[DigestSide, list[int]]
"""A side, and this rank's shares of it."""


def _agree_and_add(party: Party, given: _Given) -> dict[str, int] | str:
    """The digests by name, or a message about replicas that differ. Raises Refused, PeerFailure."""
    claim = "digest"
    objection = ""
    prepared: _Prepared | None = None
    # A failure becomes an objection, since the others wait for this rank's vote.
    try:
        prepared = _prepare(party, given)
        claim = f"digest of {_make_claim(prepared[0])}"
    except Exception as error:
        objection = word_objection(error)
    party.vote(Ballot(claim + in_thread(None), objection=objection), party.patience)
    assert prepared is not None, "who objects does not get past the vote"
    side, own_shares = prepared
    counts = {rank: count_shares(side.windows, rank) for rank in party.ranks}
    numbers = gather_numbers(party, own_shares, counts)
    # Iterators, so that each tensor's shares begin where the previous tensor's ended.
    unread = {rank: iter(shares) for rank, shares in numbers.items()}
    shares = divide_shares(side.windows, unread)
    difference = find_odd_replica(party, side, shares)
    if difference:
        return difference
    return {
        name: seal(windows, add_patches(windows, shares[name]))
        for name, windows in side.windows.items()
    }


def _prepare(party: Party, given: _Given) -> _Prepared:
    """The side with this rank's tensors, checked, and their shares. Raises ShardError to object."""
    # A digest has no `thread` argument: the thread goes by its own name.
    check_thread(party.turns, None)
    seed = as_integer(given.seed, "seed", ExchangeError)
    windows = read_side(given.held)
    _check_ranks(party, windows)
    single = not isinstance(given.held, Mapping) and windows[""].is_single
    held = _read_tensors(party.rank, windows, given.tensors, single)
    ordered = dict(sorted(windows.items()))
    side = DigestSide(ordered, party.rank, held, seed)
    return side, side.list_shares()


def _read_tensors(rank: int, side: Mapping[str, Windows], given: Local, single: bool) -> Tensors:
    """This rank's tensors by local name. Raises ExchangeError for those that do not fit."""
    wanted = want_side("given", rank, side, single)
    held = by_key(wanted, given)
    fits(wanted, held)
    return held


def _check_ranks(party: Party, side: Mapping[str, Windows]) -> None:
    """Raise ExchangeError if the group lacks a rank of a layout."""
    known = set(party.ranks)
    for windows in side.values():
        for layout in windows:
            outside = [rank for rank in layout.mesh.ranks if rank not in known]
            if outside:
                raise ExchangeError(
                    f"rank {outside[0]} of {layout} is not in the group of ranks {list(party.ranks)[:16]}; "
                    f"pass a group that has all of them"
                )


def _make_claim(side: DigestSide) -> str:
    """The text that must be equal on all ranks: the tensors, their layouts, and the seed."""
    layout_digests = []
    for name, windows in side.windows.items():
        layout_digests.append((name, tuple(map(holdings_digest, windows))))
    return f"{digest_text(layout_digests)[:24]}, seed={side.seed}"
