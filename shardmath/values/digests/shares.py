"""Shares: each rank's contribution to the digest of a tensor, and comparison of replicas.

1. A rank's shares are one number per patch that it holds, computed only from its local arrays.
2. All holders of a patch have the same share, unless their replicas differ. So a patch counts once, and a digest is the
   sum over patches, however the tensor is divided into patches.
3. The dtype and the shape are added at the end, so that zeros of different shapes have different digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardmath.base.errors import DigestError
from shardmath.base.memo import memo
from shardmath.base.text import show_ranks
from shardmath.layouts.algebra.box import Box
from shardmath.layouts.holdings import Windows, label
from shardmath.plans.uncovered import first_unheld, holds_all
from shardmath.values.digests.field import PRIME
from shardmath.values.digests.patches import (
    Holder,
    Portion,
    list_held,
    list_patches,
    list_portions,
    narrow,
)
from shardmath.values.digests.weighing import NUMPY, Array, Library, weigh

__all__ = [
    "MAKE_ALIKE",
    "Shares",
    "Unlike",
    "add_patches",
    "check_digestible",
    "counted_portions",
    "find_unlike",
    "label",
    "list_shares",
    "seal",
    "show_box",
    "weigh_boxes",
    "word_unlike",
]

Shares = Mapping[int, Sequence[int]]
"""The shares of each rank in the order of `list_portions`."""


def check_digestible(name: str, windows: Windows) -> None:
    """Raise DigestError if the tensor `name`, whose layouts are `windows`, is Partial, or has an element that no rank
    holds."""
    for layout in windows:
        if layout.addend_axes:
            raise DigestError(
                f"{label(name)} is Partial, so its ranks do not hold its content: {layout}; "
                f"reduce it first, by a plan to a layout without Partial"
            )
    if not holds_all(windows):
        raise DigestError(
            f"{label(name)}: no rank holds element {first_unheld(windows)} under {windows[0]}; "
            f"give every element to a rank, since a digest is of the whole tensor"
        )


def list_shares(
    windows: Windows,
    rank: int,
    arrays: Mapping[int, Array],
    seed: int,
    library: Library = NUMPY,
) -> list[int]:
    """Return a list of the weighted sums that `rank` contributes to the digest: one for each patch (elements that the
    same ranks hold) on the rank, in an order that all ranks share. `arrays` maps the index of a layout in `windows` to
    the rank's local array under that layout.

    The weights are random numbers drawn by `seed`; `library` computes with the arrays.
    """
    shares = []
    for portion in list_portions(windows, rank):
        array = arrays[portion.window]
        shares.append(weigh(array, portion.runs, seed, library))
    return shares


class Unlike(NamedTuple):
    """A patch (elements held by the same ranks) whose copies differ: its number, the holders that agree with the first
    one, and the others."""

    patch: int
    alike: tuple[Holder, ...]
    others: tuple[Holder, ...]


def find_unlike(windows: Windows, shares: Shares) -> Unlike | None:
    """Find the first patch (elements that the same ranks hold) whose copies have different checksums, and return it as
    an Unlike; None if all copies agree. `windows` are the layouts that define the patches; `shares` maps each rank to
    the checksums of its patches."""
    by_holder = _key_by_holder(windows, shares)
    for number, patch in enumerate(list_patches(windows)):
        first = by_holder[number, patch.holders[0]]
        alike: list[Holder] = []
        others: list[Holder] = []
        for holder in patch.holders:
            (alike if by_holder[number, holder] == first else others).append(holder)
        if others:
            return Unlike(number, tuple(alike), tuple(others))
    return None


def _key_by_holder(windows: Windows, shares: Shares) -> dict[tuple[int, Holder], int]:
    """The shares by patch number and holder."""
    by_holder = {}
    for rank, of_rank in shares.items():
        held = list_held(windows).get(rank, ())
        for (patch, window), share in zip(held, of_rank, strict=True):
            by_holder[patch, Holder(window, rank)] = share
    return by_holder


def add_patches(windows: Windows, shares: Shares) -> int:
    """Compute the sum, modulo 2^61 - 1, from which a tensor's digest is made. `shares` maps each rank to its weighted
    sums, one per patch (elements that the same ranks hold); each patch counts once, although several ranks have its
    sum."""
    by_holder = _key_by_holder(windows, shares)
    total = 0
    for number, patch in enumerate(list_patches(windows)):
        total += by_holder[number, patch.holders[0]]
    return total % PRIME


def seal(windows: Windows, total: int) -> int:
    """Return a tensor's digest: `total`, the weighted sum of all its elements, plus a number for its dtype and shape,
    modulo 2^61 - 1."""
    return (total + _draw_seal(windows[0].dtype, windows[0].shape)) % PRIME


@memo()
def _draw_seal(dtype: str, shape: tuple[int, ...]) -> int:
    """The number that is added for a dtype and a shape."""
    from hashlib import sha256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    text = f"shardmath digest of {dtype}{list(shape)}"
    drawn = sha256(text.encode()).digest()
    return int.from_bytes(drawn, "little") % PRIME


# The box in which replicas or sides differ


def counted_portions(windows: Windows, rank: int) -> tuple[Portion, ...]:
    """Return a Portion for each patch (elements held by the same ranks) of which `rank` is the first holder, so that
    all ranks together count each element once."""
    patches = list_patches(windows)
    counted = []
    for portion in list_portions(windows, rank):
        if patches[portion.patch].holders[0] == Holder(portion.window, rank):
            counted.append(portion)
    return tuple(counted)


def weigh_boxes(
    portions: Sequence[Portion],
    arrays: Mapping[int, Array],
    boxes: Sequence[Box],
    seed: int,
    library: Library = NUMPY,
) -> list[int]:
    """Return, for each of `boxes`, the sum of the elements in the box, each multiplied by a random weight that `seed`
    draws, modulo 2^61 - 1. Only elements in `portions` count: each portion is elements of one local array,
    `arrays[portion.window]`.

    `arrays` maps the index of each of the tensor's layouts to the rank's local array; `library` computes with these.
    """
    sums = []
    for box in boxes:
        total = 0
        for portion in portions:
            inside = narrow(portion, box)
            total += weigh(arrays[portion.window], inside.runs, seed, library)
        sums.append(total % PRIME)
    return sums


MAKE_ALIKE = "make the replicas equal, or use a layout with Partial if they are addends"


def word_unlike(name: str, unlike: Unlike, box: Box, fix: str = MAKE_ALIKE) -> str:
    """Return the error message that says that ranks hold different values of the tensor `name` in `box`, although they
    are replicas. `unlike` tells which ranks agree with the first replica, and which do not; `fix`, advice for the user,
    ends the message."""
    others = sorted({holder.rank for holder in unlike.others})
    alike = sorted({holder.rank for holder in unlike.alike})
    holds = "holds" if len(others) == 1 else "hold"
    return (
        f"{label(name)}: {show_ranks(others)} {holds} other bits in {show_box(box)} "
        f"than {show_ranks(alike)}; {fix}"
    )


def show_box(box: Box) -> str:
    """Return the box as text, such as "[0:4, 2:3]".

    >>> show_box(((0, 4), (2, 3)))
    '[0:4, 2:3]'
    """
    spans = [f"{lo}:{hi}" for lo, hi in box]
    return f"[{', '.join(spans)}]"
