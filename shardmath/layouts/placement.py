"""Placements: what people say about one dimension and one mesh axis.

1. A placement has `dim` and `split(n, parts) -> tuple of Runs`: which positions of a length n each part keeps.
   That is the whole protocol. Whoever writes one gets planning, proof, execution and the laws, because
   Layout does the composing; make it a frozen dataclass, so that equal placements are equal.
2. A dividing placement's parts are in bounds, disjoint and covering; one part changes nothing; parts may be empty.
   `Table` may overlap: whoever needs a piece takes it from any of its holders.
3. The built-in ones are also one or two digits each (`digits`), which is how they compose fast.
4. `Replicate` is no digit. `Partial` is one more dimension, whose coordinate is the addend.

>>> for part in StridedShard(0, split_factor=2).split(9, 2):
...     print(part)
[0:3 5:7]
[3:5 7:9]
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast

from shardmath.algebra.cuts import Balanced as BalancedCut
from shardmath.algebra.cuts import Block, Chunks, Rule, Sizes, Splits
from shardmath.algebra.runs import Runs, from_ranges
from shardmath.algebra.stages import Digit, Stage
from shardmath.base.errors import PlacementError
from shardmath.base.given import known, listed, plural, shown
from shardmath.base.integers import whole
from shardmath.base.public import public

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
    """What a user's placement has: the tensor dimension and how a length is split."""

    @property
    def dim(self) -> int:
        """The tensor dimension that it divides; negative ones count from the end."""
        ...

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts over 0..n-1."""
        ...


@public
@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same."""


@public
@dataclass(frozen=True, slots=True)
class Partial:
    """Every coordinate of the axis holds one addend; the value is their reduction by `op`, in mesh order."""

    op: str = "sum"

    def __post_init__(self) -> None:
        op = known(self.op, OPS)
        if op is None:
            raise PlacementError(
                f"Partial({shown(self.op)}) is not a known reduction; use one of {', '.join(OPS)}"
            )
        object.__setattr__(self, "op", op)


Spec: TypeAlias = Placement | Replicate | Partial
"""What may stand for one mesh axis."""


def _chunks(lo: int, hi: int, parts: int) -> list[tuple[int, int]]:
    """torch.chunk of the range, padded with empty ranges."""
    step = -(-(hi - lo) // parts)
    return [(min(hi, lo + i * step), min(hi, lo + (i + 1) * step)) for i in range(parts)]


def _dealt(pieces: list[list[tuple[int, int]]]) -> tuple[Runs, ...]:
    """Part r is the r-th range of every piece, one after the other."""
    return tuple(from_ranges(part) for part in zip(*pieces, strict=True))


@public
@dataclass(frozen=True, slots=True)
class Shard:
    """Ceil-chunks, as torch.chunk and DTensor: trailing parts short or empty."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n."""
        return _dealt([_chunks(0, n, parts)])

    def digits(self, parts: int) -> tuple[Chunks]:
        """The cuts; the last one's parts go to the mesh axis, the others stay in order."""
        return (Chunks(parts),)


@public
@dataclass(frozen=True, slots=True)
class Balanced:
    """Parts whose sizes differ by at most one, larger first, as numpy.array_split."""

    dim: int

    def __post_init__(self) -> None:
        _check_dim(self)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n."""
        step, extra = divmod(n, parts)
        ends = list(itertools.accumulate((step + (i < extra) for i in range(parts)), initial=0))
        return _dealt([list(itertools.pairwise(ends))])

    def digits(self, parts: int) -> tuple[BalancedCut]:
        """The cuts; the last one's parts go to the mesh axis."""
        return (BalancedCut(parts),)


@public
@dataclass(frozen=True, slots=True)
class StridedShard:
    """Ceil-chunk into `split_factor` pieces and each piece into the parts: DTensor's `_StridedShard`."""

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        _check_dim(self)
        factor = whole(
            self.split_factor, f"the split factor of StridedShard({self.dim}, ...)", PlacementError
        )
        if factor < 1:
            raise PlacementError(
                f"StridedShard({self.dim}, {factor}): the split factor is a number of pieces; give 1 or more"
            )
        object.__setattr__(self, "split_factor", factor)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n."""
        return _dealt([_chunks(lo, hi, parts) for lo, hi in _chunks(0, n, self.split_factor)])

    def digits(self, parts: int) -> tuple[Chunks, Chunks]:
        """The cuts; the last one's parts go to the mesh axis, the others stay in order."""
        return Chunks(self.split_factor), Chunks(parts)


@public
@dataclass(frozen=True, slots=True)
class Packed:
    """Components of given sizes one after the other, each chunked: gate/up, QKV, Mamba's in_proj."""

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim(self)
        object.__setattr__(self, "sizes", _sizes("Packed", self.sizes))

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n. Raises PlacementError unless the sizes add up to n."""
        Sizes(self.sizes).count(n)
        ends = itertools.accumulate(self.sizes, initial=0)
        return _dealt([_chunks(lo, hi, parts) for lo, hi in itertools.pairwise(ends)])

    def digits(self, parts: int) -> tuple[Sizes, Chunks]:
        """The cuts; the last one's parts go to the mesh axis, the others stay in order."""
        return Sizes(self.sizes), Chunks(parts)


@public
@dataclass(frozen=True, slots=True)
class Ragged:
    """Consecutive parts of given sizes, one a coordinate: veScale's RaggedShard, flat optimizer shards."""

    dim: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_dim(self)
        object.__setattr__(self, "sizes", _sizes("Ragged", self.sizes))

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n. Raises PlacementError unless the sizes fit both."""
        self.digits(parts)[0].count(n)
        return _dealt([list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))])

    def digits(self, parts: int) -> tuple[Sizes]:
        """The cuts; the last one's parts go to the mesh axis."""
        if len(self.sizes) != parts:
            raise PlacementError(
                f"{self} has {plural(self.sizes, 'size')} for {plural(parts, 'coordinate')}; give one size a coordinate"
            )
        return (Sizes(self.sizes),)


@public
@dataclass(frozen=True, slots=True)
class BlockCyclic:
    """Blocks dealt round robin, as ScaLAPACK; block 1 is round-robin experts."""

    dim: int
    block: int = 1

    def __post_init__(self) -> None:
        _check_dim(self)
        block = whole(
            self.block, f"the block of BlockCyclic({self.dim}, {self.block!r})", PlacementError
        )
        if block < 1:
            raise PlacementError(
                f"BlockCyclic({self.dim}, {block}): a block has at least one position; give 1 or more"
            )
        object.__setattr__(self, "block", block)

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The Runs of each of `parts` parts of a length n."""
        blocks = [(lo, min(n, lo + self.block)) for lo in range(0, n, self.block)]
        return tuple(from_ranges(blocks[i::parts]) for i in range(parts))

    def digits(self, parts: int) -> tuple[Block, Block]:
        """The cuts; the last one's parts go to the mesh axis, the others stay in order."""
        return Block(self.block * parts), Block(self.block)


@public
@dataclass(frozen=True, slots=True)
class Table:
    """Part i is the given Runs; parts may overlap: slices of layouts, expert maps with duplicates."""

    dim: int
    parts: tuple[Runs, ...]
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_dim(self)
        parts = listed(self.parts, "Table parts", PlacementError)
        for i, part in enumerate(parts):
            if not isinstance(part, Runs):
                fix = "give Runs, for example shardmath.from_ranges([(0, 5)])"
                raise PlacementError(f"Table({self.dim}, ...): part {i} is {part!r}; {fix}")
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "_hash", hash((self.dim, parts)))

    def __hash__(self) -> int:
        return self._hash

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The given parts. Raises PlacementError unless they are `parts` many and inside a length n."""
        if len(self.parts) != parts:
            raise PlacementError(
                f"Table of {plural(self.parts, 'part')} for {plural(parts, 'coordinate')}; give one part a coordinate"
            )
        return self.parts


def _check_dim(placement: Placement) -> None:
    """The dimension is an integer, and Python's."""
    dim = whole(placement.dim, f"the dimension of a {type(placement).__name__}", PlacementError)
    object.__setattr__(placement, "dim", dim)


def _sizes(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    given = listed(sizes, f"{name} sizes", PlacementError)
    out = tuple(whole(n, f"a size of {name}", PlacementError) for n in given)
    if not out or min(out) < 0:
        raise PlacementError(
            f"{name} sizes {list(out)} are not sizes; give one or more numbers >= 0"
        )
    return out


BuiltIn: TypeAlias = Shard | Balanced | StridedShard | Packed | Ragged | BlockCyclic
"""The placements that are digits."""


def stage_of(placement: Placement, axes: tuple[str, ...], sizes: tuple[int, ...]) -> Stage:
    """The stage that the placement is on these flattened mesh axes.

    Any placement but the built-in ones is one Rule. Raises PlacementError if it has no `split` or cannot be hashed.
    """
    parts = math.prod(sizes)
    if type(placement) in BuiltIn.__args__:
        *local, last = cast(BuiltIn, placement).digits(parts)
        return (*(Digit(cut) for cut in local), Digit(last, axes, sizes))
    check_protocol(placement)
    return (Digit(Rule(placement, parts), axes, sizes),)


def check_protocol(placement: Placement) -> None:
    """Raise PlacementError unless it has `dim` and `split`, and can be hashed."""
    if (
        isinstance(placement, type)
        or not callable(getattr(placement, "split", None))
        or not hasattr(placement, "dim")
    ):
        raise PlacementError(
            f"{placement!r} is not a placement; give it `dim` and `split(n, parts) -> tuple of Runs`"
        )
    try:
        hash(placement)
    except TypeError:
        raise PlacementError(
            f"{placement!r} cannot be hashed, so equal layouts could not be found equal; make it a frozen dataclass"
        ) from None
