"""Legal: the sizes of a dimension at which no rank cuts a block, for all sizes at once.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> halves = Layout((8,), Mesh(tp=2), "(tp n)").dims[0]
>>> print(find_uncut(halves, [4], 1, "dimension 0"))
n = 1, and every n with n mod 8 = 0 or 7
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from shardmath.base.errors import FormatError
from shardmath.layouts.algebra.dimension import Dimension, divide_lengths
from shardmath.proofs.sizes.family import MOST_PAIRS, MOST_PARTS, Family, list_blocks, read_family
from shardmath.proofs.sizes.lengths import Lengths
from shardmath.proofs.sizes.settling import Growth
from shardmath.values.formats.scales import find_bad_cut

__all__ = ["find_uncut"]


def find_uncut(dim: Dimension, blocks: Iterable[int | None], multiple: int, what: str) -> Lengths:
    """Return the set of all lengths of a dimension, divided as `dim` is, that are multiples of `multiple`, and at which
    no part begins or ends inside a block of any of the sizes `blocks` (None: the whole dimension). If nothing can be
    cut, a dimension of fixed size has this one length.

    `what` names the dimension in messages. Raises FormatError if not all lengths can be decided.
    """
    sizes = {block or 1 for block in blocks} - {1}
    family = read_family(dim)
    if not sizes and family.size is not None:
        return Lengths((family.size,), settled=family.size + 1, period=1, remainders=())
    is_undivided = family.size is None and not family.stages
    if not sizes or is_undivided:
        return Lengths.of([n == 0 for n in range(multiple)], settled=0, period=multiple)
    growth = _find_growth(family, what)
    # Every border moves by the same number in each period, so its place in a block repeats after this many periods.
    settled = growth.settled
    period = math.lcm(growth.period * math.lcm(*sizes), multiple)
    members = _try_lengths(family, settled + period, sizes, what)
    for n in range(len(members)):
        members[n] &= n % multiple == 0
    return Lengths.of(members, settled=settled, period=period)


def _find_growth(family: Family, what: str) -> Growth:
    """Return how the borders move as the dimension grows. Raises FormatError if that is not known for all lengths."""
    if family.growth is None or not family.is_counted:
        why = "it has listed sizes, blocks, padding or a table"
        if family.is_custom:
            why = "a custom placement divides it"
        raise FormatError(f"{what}: not all sizes can be decided: {why}; try the shapes you have")
    return family.growth


def _try_lengths(family: Family, lengths: int, sizes: set[int], what: str) -> list[bool]:
    """For each length whether no part begins or ends inside a block. Raises FormatError for too many lengths."""
    is_single = all(digit.axes for stage in family.stages for digit in stage)
    if lengths * family.pieces > (MOST_PAIRS if is_single else MOST_PARTS):
        why = f"{lengths} sizes would decide, more than can be tried"
        raise FormatError(f"{what}: {why}; try the shapes you have")
    find = _find_uncut_pieces if is_single else _find_uncut_parts
    return find(family, lengths, sizes)


def _find_uncut_parts(family: Family, lengths: int, sizes: set[int]) -> list[bool]:
    """For each length whether no part begins or ends inside a block."""
    dims = map(family.at, range(lengths))
    return [all(find_bad_cut(dim, block) is None for block in sizes) for dim in dims]


def _find_uncut_pieces(family: Family, lengths: int, sizes: set[int]) -> list[bool]:
    """The same, if each part is one piece: for all lengths at once."""
    fits: list[bool] = []
    for tried in list_blocks(lengths, family.pieces):
        starts, lengths_of = divide_lengths(family.stages, tried)
        stops = starts + lengths_of
        ends = tried[:, None, None]
        cut = np.zeros(stops.shape, bool)
        for block in sizes:
            cut |= (starts % block > 0) | ((stops % block > 0) & (stops < ends))
        cut &= lengths_of > 0
        is_cut = np.logical_or.reduce(cut, axis=(1, 2)).tolist()
        fits += [not one for one in is_cut]
    return fits
