"""Checking: whether a move's destination equals its source, and whether the source stayed unchanged.

1. Each rank weighs its source before the move, and its source and destination after it: it sums the bits of
   elements, times weights. Its **shares** are these sums, one for each **patch** that it holds, which is a
   set of elements of a tensor that the same ranks hold. Then all ranks exchange their shares once.
2. A source whose digest changed was written during the move: then the right content of the destination is
   not known. Otherwise a destination whose digest differs from the source's received wrong bytes.
3. A plan that reduces makes elements that no source has, and a plan for a part of a tensor leaves the rest
   out: `check` is not supported for either.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.text import show_ranks, shown
from shardmath.layouts.holdings import Windows
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Movable
from shardmath.values.digests.patches import hull, list_held, list_patches
from shardmath.values.digests.shares import Shares, add_patches, label, show_box
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.digests.comparing import bound_sides, find_odd_replica
from shardmath_torch.moves.digests.sides import (
    AllShares,
    DigestSide,
    count_shares,
    divide_shares,
    gather_numbers,
)

__all__ = ["Check", "check_checkable"]

Tensors = Mapping[str, Tensor]


def check_checkable(check: object, plan: Movable) -> None:
    """Raise ExchangeError if `check` is neither None nor "digest", or is given for a plan whose destination differs
    from its source in content, such as a reduction."""
    if check is None:
        return
    if not isinstance(check, str) or check != "digest":
        raise ExchangeError(f"check={shown(check)} is unknown; pass 'digest', or leave it out")
    why = _find_change_of_content(plan)
    if why:
        what = "check='digest' compares the destination with the source"
        fix = "leave check= out; smt.digest compares tensors that should be equal"
        raise ExchangeError(f"{what}, but {why}; {fix}")


def _find_change_of_content(plan: Movable) -> str:
    """Why the plan's destination differs from its source in content; "" if it does not."""
    if isinstance(plan, Transposed):
        return "the adjoint of a plan adds up elements of several ranks"
    for side in (plan.src, plan.dst):
        for name, windows in side.items():
            for layout in windows:
                if layout.addend_axes:
                    return f"{label(name)} is Partial, so that a move reduces it: {layout}"
    for name in plan.in_part:
        return f"the destination has only a part of {label(name)}: {plan.dst[name][0]}"
    return ""


class Check:
    """A check of a move by digests (checksums of whole tensors): the source's digests after the move must equal those
    before it, and the destination's must equal the source's."""

    def __init__(self, plan: Movable, rank: int, src: Tensors, dst: Tensors) -> None:
        self._src = DigestSide(plan.src, rank, src)
        self._dst = DigestSide(plan.dst, rank, dst)
        # Shares of the digests: of the source before the move, then of the source and the destination after it.
        self._shares: list[int] = []

    def begin(self) -> None:
        """Compute the numbers that this rank adds to the digests (checksums) of the source tensors, before the move.
        They are kept in this object for `compare`, which gathers all ranks' numbers."""
        self._shares = self._src.list_shares()

    def end(self) -> None:
        """Compute the numbers that this rank adds to the digests (checksums) of the source and destination tensors,
        after the move. They are kept in this object for `compare`, which gathers all ranks' numbers."""
        self._shares += self._src.list_shares()
        self._shares += self._dst.list_shares()

    def compare(self, party: Party) -> str:
        """Return the error text, the same on all ranks, for the first tensor that fails the check of a move: its source
        changed during the move, it arrived wrong, or its replicas differ. Returns "" if there is none; `party` is this
        rank as a member of the process group.

        Raises PeerFailure.
        """
        before, after, arrived = self._gather(party)
        changed = _find_changed(self._src.windows, before, after)
        if changed:
            return changed
        difference = find_odd_replica(party, self._src, after)
        if difference:
            return f"replicas of the source differed before the move already: {difference}"
        return self._find_wrong(party, after, arrived)

    def _gather(self, party: Party) -> tuple[AllShares, AllShares, AllShares]:
        """All ranks' shares of the source before the move and after it, and of the destination."""
        src = self._src.windows
        dst = self._dst.windows
        sides = (src, src, dst)
        counts = {rank: sum(count_shares(side, rank) for side in sides) for rank in party.ranks}
        numbers = gather_numbers(party, self._shares, counts)
        # Iterators, so that each side's shares begin where the previous side's ended.
        unread = {rank: iter(shares) for rank, shares in numbers.items()}
        before, after, arrived = (divide_shares(side, unread) for side in sides)
        return before, after, arrived

    def _find_wrong(self, party: Party, source: AllShares, arrived: AllShares) -> str:
        """The error for the first tensor whose destination differs from its source; "" if there is none."""
        for name, windows in self._src.windows.items():
            dst_windows = self._dst.windows[name]
            source_sum = add_patches(windows, source[name])
            if source_sum != add_patches(dst_windows, arrived[name]):
                box = bound_sides(party, name, (self._src, self._dst))
                return (
                    f"{label(name)} differs from its source in {show_box(box)} after the move, and the source has "
                    f"not changed: something wrote to the destination, or bytes arrived wrong; move it again"
                )
        fix = "something wrote to them, or bytes arrived wrong; move it again"
        difference = find_odd_replica(party, self._dst, arrived, fix)
        return f"some replicas of the destination are wrong: {difference}" if difference else ""


def _find_changed(side: Mapping[str, Windows], before: AllShares, after: AllShares) -> str:
    """The error for the first tensor of which a rank's part changed; "" if there is none."""
    for name, windows in side.items():
        changed_parts = _list_changed(windows, before[name], after[name])
        if changed_parts:
            ranks = sorted({rank for rank, _ in changed_parts})
            _, first_patch = changed_parts[0]
            box = hull(list_patches(windows)[first_patch])
            return (
                f"the source of {label(name)} changed while it was moved: {show_ranks(ranks)} has "
                f"other bits than before in {show_box(box)}; do not write to it during a move"
            )
    return ""


def _list_changed(windows: Windows, before: Shares, after: Shares) -> list[tuple[int, int]]:
    """(rank, patch number) of each part that changed."""
    changed = []
    for rank, held_patches in list_held(windows).items():
        shares = zip(held_patches, before[rank], after[rank], strict=True)
        changed += [(rank, patch) for (patch, _), old, new in shares if old != new]
    return changed
