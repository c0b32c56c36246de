"""Placements: how one mesh axis divides one dimension.

1. A placement has `dim` and `split(n, parts) -> tuple of Runs`: which positions of a length n each part
   keeps. That is the whole protocol. Its author gets planning, proof, execution and the laws,
   because Layout composes placements; make it a frozen dataclass, so that equal placements are equal.
2. A dividing placement's parts are in bounds, disjoint and covering; parts may be empty.
   A placement with `overlaps = True`, as `Table` has, may hold a position in several parts: a rank that needs it
   receives it from any of them. For any other placement, overlapping parts are an error when a Layout is made.
3. Built-in placements are also one or two digits each (`digits`), so that they compose fast.
4. `Replicate` is not a digit. `Partial` is one more dimension, whose coordinate is the addend.

>>> for part in StridedShard(0, split_factor=2).split(9, 2):
...     print(part)
[0:3 5:7]
[3:5 7:9]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias, cast

from shardmath.base.arguments import as_integer, known, listed
from shardmath.base.errors import PlacementError
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.layouts.algebra.cuts import BalancedChunks as BalancedCut
from shardmath.layouts.algebra.cuts import Chunks, FixedBlock, Sizes, Splits, UserCut
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.layouts.algebra.stages import Digit, Stage

__all__ = [
    "OPS",
    "Balanced",
    "BlockCyclic",
    "BuiltIn",
    "Packed",
    "Partial",
    "Placement",
    "Ragged",
    "Replicate",
    "Shard",
    "Spec",
    "StridedShard",
    "Table",
    "check_protocol",
    "stage_of",
]

OPS = ("sum", "avg", "product", "max", "min")
"""The reductions that a Partial may wait for."""


@public
class Placement(Splits, Protocol):
    """The protocol of placements that divide a tensor dimension `dim`: `split(n, parts)` divides its length n, and
    returns a Runs (positions) per part."""

    @property
    def dim(self) -> int:
        """The tensor dimension that the placement divides, counted from the end if negative."""
        ...

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        ...


@public
@dataclass(frozen=True, slots=True)
class Replicate:
    """A placement: all ranks along the mesh axis hold the same elements."""


@public
@dataclass(frozen=True, slots=True)
class Partial:
    """A placement: each rank along the mesh axis holds partial values, and their reduction by `op`, such as "sum" or
    "max", over these ranks is the tensor.

    `op` is "sum", "avg", "max", "min" or "product". Addends are reduced in the order of the mesh.
    Raises PlacementError for any other `op`.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        op = known(self.op, OPS)
        if op is None:
            raise PlacementError(
                f"Partial({shown(self.op)}) is not a known reduction; use one of {', '.join(OPS)}"
            )
        object.__setattr__(self, "op", op)


Spec: TypeAlias = Placement | Replicate | Partial
"""What a layout may give for one mesh axis."""


_Ranges: TypeAlias = list[tuple[int, int]]


def _chunk(lo: int, hi: int, parts: int) -> _Ranges:
    """The ranges of torch.chunk of lo..hi-1, padded with empty ranges to `parts` of them."""
    length = hi - lo
    step = -(-length // parts)  # rounded up
    even = [lo + i * step for i in range(parts + 1)]
    ends = [min(hi, end) for end in even]
    return list(itertools.pairwise(ends))


def _list_consecutive(sizes: Iterable[int]) -> _Ranges:
    """Ranges of these sizes, one after the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _make_parts(pieces: list[_Ranges]) -> tuple[Runs, ...]:
    """The Runs of every part: part r has the r-th range of every piece, one after the other."""
    return tuple(from_ranges(part) for part in zip(*pieces, strict=True))


@public
@dataclass(frozen=True, slots=True)
class Shard:
    """A placement: dimension `dim` is cut into chunks of ceil(n / p) elements, one per rank along the mesh axis, as in
    DTensor. Here n is the length of the dimension, and p the number of ranks along the axis.

    If `parts` does not divide the length, the last parts are shorter, or empty.
    """

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        return _make_parts([_chunk(0, n, parts)])

    def digits(self, parts: int) -> tuple[Chunks]:
        """Return a tuple with the placement's only cut: into `parts` parts, one per rank along the mesh axis."""
        return (Chunks(parts),)


@public
@dataclass(frozen=True, slots=True)
class Balanced:
    """A placement: dimension `dim` is cut into parts whose sizes differ by at most one element, larger parts first, as
    by numpy.array_split."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        step, extra = divmod(n, parts)
        sizes = [step + 1] * extra + [step] * (parts - extra)
        return _make_parts([_list_consecutive(sizes)])

    def digits(self, parts: int) -> tuple[BalancedCut]:
        """Return a tuple with the placement's only cut: into `parts` parts, one per rank along the mesh axis."""
        return (BalancedCut(parts),)


@public
@dataclass(frozen=True, slots=True)
class StridedShard:
    """A placement, DTensor's `_StridedShard`: dimension `dim` is cut into `split_factor` pieces, and each piece is
    sharded over the mesh axis.

    Both cuts are made as Shard makes them. Each rank holds its part of every piece.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_dim(self)
        what = f"the split factor of StridedShard({self.dim}, ...)"
        factor = as_integer(self.split_factor, what, PlacementError)
        if factor < 1:
            raise PlacementError(
                f"the split factor of StridedShard({self.dim}, {factor}) is {factor}; "
                f"give the number of pieces, 1 or more"
            )
        object.__setattr__(self, "split_factor", factor)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        pieces = _chunk(0, n, self.split_factor)
        return _make_parts([_chunk(lo, hi, parts) for lo, hi in pieces])

    def digits(self, parts: int) -> tuple[Chunks, Chunks]:
        """Return the placement's two cuts: into pieces, and of each piece into `parts` parts, one per rank."""
        return Chunks(self.split_factor), Chunks(parts)


@public
@dataclass(frozen=True, slots=True)
class Packed:
    """A placement for fused weights such as QKV: dimension `dim` has components one after the other, of which component
    i has `sizes[i]` elements. Each component is sharded separately, as by Shard.

    Fused weights are stored this way: gate and up projections, QKV, Mamba's in_proj.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim(self)
        object.__setattr__(self, "sizes", _read_sizes("Packed", self.sizes))

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs.

        Raises PlacementError unless the sizes add up to n.
        """
        cut = Sizes(self.sizes)
        cut.count(n)  # raises if the sizes do not add up
        return _make_parts([_chunk(lo, hi, parts) for lo, hi in _list_consecutive(self.sizes)])

    def digits(self, parts: int) -> tuple[Sizes, Chunks]:
        """Return the placement's two cuts: into components, and of each component into `parts` parts, one per rank."""
        return Sizes(self.sizes), Chunks(parts)


@public
@dataclass(frozen=True, slots=True)
class Ragged:
    """A placement that cuts dimension `dim` into consecutive parts, one per rank along the mesh axis. Part i has
    `sizes[i]` elements.

    veScale's RaggedShard and shards of flat optimizer buffers are divided this way.
    """

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim(self)
        object.__setattr__(self, "sizes", _read_sizes("Ragged", self.sizes))

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs.

        Raises PlacementError unless there are `parts` sizes and they add up to n.
        """
        (cut,) = self.digits(parts)
        cut.count(n)  # raises if the sizes do not add up
        return _make_parts([_list_consecutive(self.sizes)])

    def digits(self, parts: int) -> tuple[Sizes]:
        """Return a tuple with the placement's only cut, in which part i has `sizes[i]` positions. `parts` is the number
        of ranks along the mesh axis, and must be the number of sizes.

        Raises PlacementError unless there are `parts` sizes.
        """
        if len(self.sizes) != parts:
            raise PlacementError(
                f"{self} has {plural(self.sizes, 'size')} for a mesh axis of {plural(parts, 'coordinate')}; "
                f"give one size per coordinate"
            )
        return (Sizes(self.sizes),)


@public
@dataclass(frozen=True, slots=True)
class BlockCyclic:
    """A placement: dimension `dim` is cut into blocks of `block` elements, dealt to ranks round robin, as in ScaLAPACK.

    With `block=1`, experts are placed round robin.
    """

    dim: int
    block: int = 1

    def __post_init__(self) -> None:
        _check_dim(self)
        what = f"the block of BlockCyclic({self.dim}, {self.block!r})"
        block = as_integer(self.block, what, PlacementError)
        if block < 1:
            raise PlacementError(
                f"the block of BlockCyclic({self.dim}, {block}) has {block} positions; "
                f"give blocks of 1 or more"
            )
        object.__setattr__(self, "block", block)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        size = self.block
        blocks = [(lo, min(n, lo + size)) for lo in range(0, n, size)]
        # Block i belongs to part i % parts.
        return tuple(from_ranges(blocks[part::parts]) for part in range(parts))

    def digits(self, parts: int) -> tuple[FixedBlock, FixedBlock]:
        """Return the placement's two cuts: first into groups of consecutive blocks, then each group into single blocks,
        one per rank. `parts` is the number of ranks, which is also the number of blocks in a group."""
        return FixedBlock(self.block * parts), FixedBlock(self.block)


@public
@dataclass(frozen=True, slots=True)
class Table:
    """A placement: rank i along the mesh axis holds the positions of dimension `dim` that are in `parts[i]`, a Runs.

    Parts may overlap, as in expert maps with duplicates and in slices of other layouts.
    """

    overlaps: ClassVar[bool] = True

    dim: int
    parts: tuple[Runs, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_dim(self)
        parts = listed(self.parts, "Table parts", PlacementError)
        for i, part in enumerate(parts):
            if not isinstance(part, Runs):
                fix = "give Runs, for example shardmath.from_ranges([(0, 5)])"
                raise PlacementError(f"part {i} of Table({self.dim}, ...) is {part!r}; {fix}")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "_hash", hash((self.dim, parts)))

    def __hash__(self) -> int:
        return self._hash

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Return the parts of the table, as Runs; `n`, the length of the dimension, is not used. Raises PlacementError
        unless the number of parts in the table equals `parts`."""
        if len(self.parts) != parts:
            raise PlacementError(
                f"Table({self.dim}, ...) has {plural(self.parts, 'part')} for a mesh axis of "
                f"{plural(parts, 'coordinate')}; give one part per coordinate"
            )
        return self.parts


def _check_dim(placement: Placement) -> None:
    """Make the dimension Python's int. Raises PlacementError if it is not an integer."""
    dim = as_integer(
        placement.dim, f"the dimension of a {type(placement).__name__}", PlacementError
    )
    object.__setattr__(placement, "dim", dim)


def _read_sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes as Python's integers. Raises PlacementError if there are no sizes, or a negative one."""
    given = listed(sizes, f"{name} sizes", PlacementError)
    read = tuple(as_integer(n, f"a size of {name}", PlacementError) for n in given)
    if not read or min(read) < 0:
        raise PlacementError(
            f"sizes of {name} are {list(read)}; give one or more sizes, each 0 or more"
        )
    return read


BuiltIn: TypeAlias = Shard | Balanced | StridedShard | Packed | Ragged | BlockCyclic
"""The placements that are made of digits."""


def stage_of(placement: Placement, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Stage:
    """Return the Stage (cuts in order) that `placement` makes along the mesh axes `axes`, as if they were merged into
    one. `sizes` has the size of each axis.

    A custom placement is one UserCut. Raises PlacementError if it has no `split` or cannot
    be hashed.
    """
    parts = math.prod(sizes)
    # A subclass of a built-in placement may override `split`, so it is a UserCut too.
    if type(placement) not in BuiltIn.__args__:
        check_protocol(placement)
        return (Digit(UserCut(placement, parts), axes, sizes),)
    # Only the last cut divides among ranks; of the earlier ones, every rank keeps all parts.
    *earlier_cuts, last_cut = cast(BuiltIn, placement).digits(parts)
    return (*map(Digit, earlier_cuts), Digit(last_cut, axes, sizes))


def check_protocol(placement: Placement) -> None:
    """Raise PlacementError unless `placement` has `dim` and `split`, and can be hashed."""
    splits = callable(getattr(placement, "split", None)) and hasattr(placement, "dim")
    if isinstance(placement, type) or not splits:
        raise PlacementError(
            f"{placement!r} is not a placement; use one such as shardmath.Shard(0), "
            f"or an object with `dim` and `split(n, parts) -> tuple of Runs`"
        )
    try:
        hash(placement)
    except TypeError:
        raise PlacementError(
            f"{placement!r} cannot be hashed, so equal layouts could not be found equal; "
            f"make it a frozen dataclass"
        ) from None
