"""Digests of tensors' content, the same under every layout; and the box in which two sides differ.

1. A digest depends on the dtype, the global shape, and the bits of every element. It does not depend on which rank
   holds what, in which order, nor on bytes in holes.
2. Replicas are compared, and count once.
3. Different tensors have different digests of some part. Comparing digests of ever smaller parts finds the box in
   which they differ (`bounds`); only digests are compared.

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
from shardmath.base.text import plural, shown
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
"""The layout, or windows, of one tensor, or of several by name."""
Given: TypeAlias = Mapping[int, _Array] | Mapping[int, Mapping[str, _Array]]
"""Local arrays by rank; of several tensors or windows, by rank and local tensor name."""


@public_in("content")
class Difference(NamedTuple):
    """The name of the first tensor that differs between two sets of tensors, such as those before and after a move, and
    the smallest box that contains all its differences."""

    name: str
    box: Box


@overload
def digest_of(held: LayoutOrWindows, arrays: Given, *, seed: int = 0) -> int: ...
@overload
def digest_of(
    held: Mapping[str, LayoutOrWindows], arrays: Given, *, seed: int = 0
) -> dict[str, int]: ...
def digest_of(held: Held, arrays: Given, *, seed: int = 0) -> int | dict[str, int]:
    """Compute the digest (a checksum, 0 to 2^61 - 2) of a tensor with layout `held` from all ranks' local `arrays`; for
    a dict of layouts, return a dict of digests by name. Digests can be compared only if their `seed` is equal.

    `arrays` has local arrays by rank; for a mapping or for windows, by rank and local name (`name`, or `name[i]` for
    window i), as `simulate` takes them. Only the element size of an array's dtype counts, since numpy lacks some
    dtypes. Different tensors have equal digests with a probability below 2^-54 for each seed. Raises DigestError if
    replicas differ, for a Partial layout, for an element that no rank holds, and for arrays that do not fit.
    """
    checked_seed = as_integer(seed, "seed", DigestError)
    side = read_side(held)
    digests = {}
    for name, windows in side.items():
        local = _read_arrays(name, windows, arrays, isinstance(held, Mapping))
        digests[name] = _digest(name, windows, local, checked_seed)
    return digests if isinstance(held, Mapping) else digests[""]


def read_side(held: Held) -> dict[str, Windows]:
    """Return a dict from each tensor's name in `held` ("" for a single tensor) to its Windows: a tuple of one layout,
    or of several that each hold a part of the tensor. Raises DigestError if a tensor is Partial, has an element that no
    rank holds, or has layouts of different shapes or dtypes."""
    side = read_windows(held if isinstance(held, Mapping) else {"": held}, DigestError)
    for name, windows in side.items():
        first = windows[0]
        for layout in windows:
            if (layout.shape, layout.dtype) != (first.shape, first.dtype):
                what = f"{label(name)} has windows {first} and {layout}"
                raise DigestError(f"{what}; give all of them one shape and dtype")
        check_digestible(name, windows)
    return side


def _digest(name: str, windows: Windows, arrays: _Arrays, seed: int) -> int:
    """The digest of one tensor. Raises DigestError if replicas differ."""
    shares = {rank: list_shares(windows, rank, local, seed) for rank, local in arrays.items()}
    unlike_patch = find_unlike(windows, shares)
    if unlike_patch is not None:
        box = _bound_unlike(windows, arrays, unlike_patch, seed)
        raise DigestError(word_unlike(name, unlike_patch, box))
    return seal(windows, add_patches(windows, shares))


def find_difference(
    src: Held, src_arrays: Given, dst: Held, dst_arrays: Given, *, seed: int = 0
) -> Difference | None:
    """Find the first tensor that differs between `src` and `dst` (layouts, with all ranks' arrays); return its name and
    the smallest box of its differences as a Difference, or None if all are equal. `seed` draws the random weights of
    the checksums that are compared.

    Takes arrays as `digest_of` does. Raises DigestError as `digest_of` does, and if the sides cannot be compared.
    """
    checked_seed = as_integer(seed, "seed", DigestError)
    src_side = read_side(src)
    dst_side = read_side(dst)
    _check_comparable(src_side, dst_side)
    for name, windows in src_side.items():
        dst_windows = dst_side[name]
        src_local = _read_arrays(name, windows, src_arrays, isinstance(src, Mapping))
        dst_local = _read_arrays(name, dst_windows, dst_arrays, isinstance(dst, Mapping))
        src_digest = _digest(name, windows, src_local, checked_seed)
        dst_digest = _digest(name, dst_windows, dst_local, checked_seed)
        if src_digest != dst_digest:
            src_weigher = _weigh_all(windows, src_local, checked_seed)
            dst_weigher = _weigh_all(dst_windows, dst_local, checked_seed)
            return Difference(name, _compare(full(windows[0].shape), src_weigher, dst_weigher))
    return None


def _check_comparable(src: Mapping[str, Windows], dst: Mapping[str, Windows]) -> None:
    """Raise DigestError unless both sides have the same tensors."""
    if src.keys() != dst.keys():
        unpaired = sorted(src.keys() ^ dst.keys())
        what = f"only one side has {plural(unpaired, 'tensor')}, {unpaired[:8]}"
        raise DigestError(f"{what}; compare sides whose tensors have the same names")
    for name, windows in src.items():
        for layout in dst[name]:
            if (layout.shape, layout.dtype) != (windows[0].shape, windows[0].dtype):
                what = f"{label(name)} is {windows[0]} on one side and {layout} on the other"
                raise DigestError(f"{what}; compare tensors of one shape and dtype")


# The box in which sides differ

_Weigher: TypeAlias = Callable[[list[Box]], list[int]]
"""Returns the weighted sum of each box."""


def _bound_unlike(windows: Windows, arrays: _Arrays, unlike: Unlike, seed: int) -> Box:
    """The box in which a patch differs between its first holder and a holder of other bits."""
    weighers = []
    for window, rank in (unlike.alike[0], unlike.others[0]):
        portions = list_portions(windows, rank)
        differing = [p for p in portions if (p.patch, p.window) == (unlike.patch, window)]
        weighers.append(_weigh({rank: differing}, arrays, seed))
    return _compare(hull(list_patches(windows)[unlike.patch]), *weighers)


def _weigh_all(windows: Windows, arrays: _Arrays, seed: int) -> _Weigher:
    """A weigher of a side's boxes, which counts each patch at its first holder."""
    counted = {rank: counted_portions(windows, rank) for rank in arrays}
    return _weigh(counted, arrays, seed)


def _weigh(portions: Mapping[int, Sequence[Portion]], arrays: _Arrays, seed: int) -> _Weigher:
    """A weigher of boxes, which counts these portions of each rank."""

    def weigh(boxes: list[Box]) -> list[int]:
        sums = [weigh_boxes(held, arrays[rank], boxes, seed) for rank, held in portions.items()]
        columns = zip(*sums, strict=True)
        return [sum(column) % PRIME for column in columns]

    return weigh


def _compare(box: Box, src: _Weigher, dst: _Weigher) -> Box:
    """The smallest box that contains every difference between two sides inside `box`."""

    def differ(boxes: list[Box]) -> list[bool]:
        return list(map(ne, src(boxes), dst(boxes)))

    return find_bounds(box, differ)


# Arrays


def _read_arrays(name: str, windows: Windows, given: Given, by_name: bool) -> _Arrays:
    """The tensor's arrays by rank and window. Raises DigestError for arrays that do not fit."""
    if not isinstance(given, Mapping):
        raise DigestError(f"arrays are {shown(given)}; give a mapping from rank to array")
    named = by_name or not windows.is_single
    arrays: _Arrays = {}
    for window, layout in enumerate(windows):
        key = windows.local_name(name, window)
        for rank in layout.mesh.ranks:
            array = _read_array(given, key, rank, layout, named)
            arrays.setdefault(rank, {})[window] = array
    return arrays


def _read_array(given: Given, key: str, rank: int, layout: Layout, named: bool) -> _Array:
    """One local array. Raises DigestError if it is missing, or does not fit the layout."""
    what = f"rank {rank}: array {key!r}" if named else f"the array of rank {rank}"
    held: object = given.get(rank)
    if named and isinstance(held, Mapping):
        held = held.get(key)
    elif named:
        held = None
    if held is None:
        raise DigestError(f"{what} is missing; give the arrays of all ranks of {layout}")
    if not isinstance(held, np.ndarray | np.generic):
        raise DigestError(f"{what} is of type {type(held).__name__}; give a numpy array")
    array = np.asarray(held)
    expected = layout.local_shape(rank)
    if array.shape != expected:
        raise DigestError(
            f"{what} has shape {array.shape}, but {layout} gives this rank {expected}; "
            f"pass an array of that shape"
        )
    return view_bits(what, array, layout)


BITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""The dtype as which elements of so many bytes are viewed. numpy has no integers of 16 bytes: complex numbers stand for
them, which are never compared or computed with, only copied and viewed as words (`weighing`)."""


def view_bits(what: str, array: _Array, layout: Layout) -> _Array:
    """View `array` as its elements' bits, in a dtype of the same size. Raises DigestError, whose message begins with
    `what`, if elements of `array` and `layout` differ in size, or if `array` has a foreign byte order."""
    if array.dtype.hasobject:
        fix = f"pass {layout.dtype}, or its bits as integers of that size"
        raise DigestError(f"{what} has elements of dtype {array.dtype}, which have no bits; {fix}")
    if array.itemsize != layout.itemsize:
        raise DigestError(
            f"{what} has elements of dtype {array.dtype}, {array.itemsize} B each, but {layout} has "
            f"{layout.itemsize} B; pass {layout.dtype}, or its bits as integers of that size"
        )
    if not array.dtype.isnative:
        raise DigestError(f"{what} {describe_type(array, '')}")
    return array.view(BITS[layout.itemsize])
