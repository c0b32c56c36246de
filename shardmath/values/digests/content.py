"""Digests of tensors' content, the same under every layout; and where two sides differ.

1. A digest depends on the dtype, the global shape, and the bits of every element: not on who holds what,
   nor in which order, nor on what lies in holes.
2. Replicas are compared, and count once.
3. Sides that are not alike differ in the digest of some part. Asking for digests of ever smaller parts
   finds the box in which they differ (`bounds`); nothing but digests is compared.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(tp=2)
>>> rows = Layout((4, 2), mesh, "(tp n) h", dtype="int32")
>>> columns = Layout((4, 2), mesh, "n (tp h)", dtype="int32")
>>> w = np.arange(8, dtype=np.int32).reshape(4, 2)
>>> digest_of(rows, {0: w[:2], 1: w[2:]}) == digest_of(columns, {0: w[:, :1], 1: w[:, 1:]})
True
>>> find_difference(rows, {0: w[:2], 1: w[2:] + 1}, columns, {0: w[:, :1], 1: w[:, 1:]})
Difference(name='', box=((2, 4), (0, 2)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import ne
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import as_integer
from shardmath.base.errors import DigestError
from shardmath.base.public import public_in
from shardmath.base.text import shown
from shardmath.layouts.algebra.box import Box, full
from shardmath.layouts.holdings import LayoutOrWindows, Windows, read_windows
from shardmath.layouts.layout import Layout
from shardmath.values.digests.bounds import find_bounds
from shardmath.values.digests.field import PRIME
from shardmath.values.digests.patches import Portion, hull, list_patches, list_portions
from shardmath.values.digests.shares import (
    Unlike,
    add_patches,
    check_digestible,
    counted_portions,
    find_unlike,
    label,
    list_shares,
    seal,
    weigh_boxes,
    word_unlike,
)
from shardmath.values.formats.elements import describe_type

__all__ = ["Difference", "digest_of", "find_difference", "read_side"]

_Array: TypeAlias = NDArray[Any]
_Arrays: TypeAlias = dict[int, dict[int, _Array]]
"""The arrays of one tensor, by rank and window."""

Held: TypeAlias = LayoutOrWindows | Mapping[str, LayoutOrWindows]
"""How callers say what a side holds: of one tensor, or of several by name."""
Given: TypeAlias = Mapping[int, _Array] | Mapping[int, Mapping[str, _Array]]
"""Local arrays by rank; of several tensors or windows, by rank and local tensor name."""


@public_in("content")
class Difference(NamedTuple):
    """The first tensor that differs, "" for one without a name, and the smallest box with all that does."""

    name: str
    box: Box


@overload
def digest_of(held: LayoutOrWindows, arrays: Given, *, seed: int = 0) -> int: ...
@overload
def digest_of(
    held: Mapping[str, LayoutOrWindows], arrays: Given, *, seed: int = 0
) -> dict[str, int]: ...
def digest_of(held: Held, arrays: Given, *, seed: int = 0) -> int | dict[str, int]:
    """The digest of a tensor from what all ranks hold of it, 0 to 2^61 - 2; of several, by name.

    `arrays` are local arrays by rank, of a mapping or of windows by rank and local name (`name`, or
    `name[i]` for window i), as `simulate` takes them. Of an array's dtype only the size of an element
    counts, since numpy lacks some of the layouts'. Tensors that differ have equal digests with a
    probability below 2^-54 for each seed. Raises DigestError where replicas differ, for a Partial
    layout, for one that leaves an element to nobody, and for arrays that do not fit.
    """
    number = as_integer(seed, "seed", DigestError)
    side = read_side(held)
    out = {}
    for name, windows in side.items():
        local = _read_arrays(name, windows, arrays, isinstance(held, Mapping))
        out[name] = _digest(name, windows, local, number)
    return out if isinstance(held, Mapping) else out[""]


def read_side(held: Held) -> dict[str, Windows]:
    """Each tensor's windows. Raises DigestError for what is none, or has no digest."""
    side = read_windows(held if isinstance(held, Mapping) else {"": held}, DigestError)
    for name, windows in side.items():
        first = windows[0]
        for layout in windows:
            if (layout.shape, layout.dtype) != (first.shape, first.dtype):
                what = f"{label(name)}: windows {first} and {layout}"
                raise DigestError(f"{what} are not of one tensor; give one shape and dtype")
        check_digestible(name, windows)
    return side


def _digest(name: str, windows: Windows, arrays: _Arrays, seed: int) -> int:
    """The digest of one tensor. Raises DigestError where replicas differ."""
    shares = {rank: list_shares(windows, rank, own, seed) for rank, own in arrays.items()}
    unlike = find_unlike(windows, shares)
    if unlike is not None:
        box = _bound_unlike(windows, arrays, unlike, seed)
        raise DigestError(word_unlike(name, unlike, box))
    return seal(windows, add_patches(windows, shares))


def find_difference(
    src: Held, src_arrays: Given, dst: Held, dst_arrays: Given, *, seed: int = 0
) -> Difference | None:
    """Where two sides differ that hold tensors of the same names, shapes and dtypes; None where they do
    not.

    Takes arrays as `digest_of` does, and raises DigestError as it does, and where the sides cannot be
    compared.
    """
    number = as_integer(seed, "seed", DigestError)
    here = read_side(src)
    there = read_side(dst)
    _check_comparable(here, there)
    for name, windows in here.items():
        others = there[name]
        ours = _read_arrays(name, windows, src_arrays, isinstance(src, Mapping))
        theirs = _read_arrays(name, others, dst_arrays, isinstance(dst, Mapping))
        mine = _digest(name, windows, ours, number)
        other = _digest(name, others, theirs, number)
        if mine != other:
            ends = _weigh_all(windows, ours, number), _weigh_all(others, theirs, number)
            return Difference(name, _compare(full(windows[0].shape), *ends))
    return None


def _check_comparable(here: Mapping[str, Windows], there: Mapping[str, Windows]) -> None:
    """Raise DigestError unless both sides have the same tensors."""
    if here.keys() != there.keys():
        alone = sorted(here.keys() ^ there.keys())[:8]
        raise DigestError(f"one side alone has {alone}; compare sides of the same names")
    for name, windows in here.items():
        for layout in there[name]:
            if (layout.shape, layout.dtype) != (windows[0].shape, windows[0].dtype):
                what = f"{label(name)}: {windows[0]} on one side, {layout} on the other"
                raise DigestError(f"{what}; compare tensors of one shape and dtype")


# Where they differ

_Weigher: TypeAlias = Callable[[list[Box]], list[int]]
"""The digests of boxes."""


def _bound_unlike(windows: Windows, arrays: _Arrays, unlike: Unlike, seed: int) -> Box:
    """The box in which a replica differs from the first holder's."""
    ends = []
    for window, rank in (unlike.alike[0], unlike.others[0]):
        held = list_portions(windows, rank)
        own = [p for p in held if (p.patch, p.window) == (unlike.patch, window)]
        ends.append(_weigh({rank: own}, arrays, seed))
    return _compare(hull(list_patches(windows)[unlike.patch]), *ends)


def _weigh_all(windows: Windows, arrays: _Arrays, seed: int) -> _Weigher:
    """What a side has in boxes, each patch by its first holder."""
    counted = {rank: counted_portions(windows, rank) for rank in arrays}
    return _weigh(counted, arrays, seed)


def _weigh(portions: Mapping[int, Sequence[Portion]], arrays: _Arrays, seed: int) -> _Weigher:
    """What these portions of the ranks have in boxes."""

    def weigh(boxes: list[Box]) -> list[int]:
        sums = [weigh_boxes(own, arrays[rank], boxes, seed) for rank, own in portions.items()]
        columns = zip(*sums, strict=True)
        return [sum(column) % PRIME for column in columns]

    return weigh


def _compare(box: Box, here: _Weigher, there: _Weigher) -> Box:
    """The smallest box in which two sides differ."""

    def differ(boxes: list[Box]) -> list[bool]:
        return list(map(ne, here(boxes), there(boxes)))

    return find_bounds(box, differ)


# Arrays


def _read_arrays(name: str, windows: Windows, given: Given, by_name: bool) -> _Arrays:
    """The tensor's arrays by rank and window. Raises DigestError for those that do not fit."""
    if not isinstance(given, Mapping):
        raise DigestError(f"arrays are {shown(given)}; give a mapping from rank to array")
    named = by_name or len(windows) > 1
    arrays: _Arrays = {}
    for window, layout in enumerate(windows):
        key = windows.local_name(name, window)
        for rank in layout.mesh.ranks:
            array = _read_array(given, key, rank, layout, named)
            arrays.setdefault(rank, {})[window] = array
    return arrays


def _read_array(given: Given, key: str, rank: int, layout: Layout, named: bool) -> _Array:
    """One local array. Raises DigestError for one that is missing, or is not the layout's there."""
    what = f"rank {rank}: array {key!r}" if named else f"the array of rank {rank}"
    held: object = given.get(rank)
    if named and isinstance(held, Mapping):
        held = held.get(key)
    elif named:
        held = None
    if held is None:
        raise DigestError(f"{what} is missing; give what every rank of {layout} holds")
    if not isinstance(held, np.ndarray | np.generic):
        raise DigestError(f"{what} is {type(held).__name__}; give a numpy array")
    array = np.asarray(held)
    expected = layout.local_shape(rank)
    if array.shape != expected:
        there = f"{layout} has {expected} there"
        raise DigestError(f"{what} has shape {array.shape}, {there}; pass that local array")
    return view_bits(what, array, layout)


BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""What elements of so many bytes are looked at as, none of which changes when it is copied."""


def view_bits(what: str, array: _Array, layout: Layout) -> _Array:
    """The array as bits of the layout's elements. Raises DigestError where it has others."""
    if array.dtype.hasobject or array.itemsize != layout.itemsize:
        raise DigestError(
            f"{what} has elements of dtype {array.dtype}, {array.itemsize} B each; {layout} has "
            f"{layout.itemsize} B; pass {layout.dtype}, or its bits as integers of that size"
        )
    if not array.dtype.isnative:
        raise DigestError(f"{what} {describe_type(array, '')}")
    return array.view(BITS[layout.itemsize])
