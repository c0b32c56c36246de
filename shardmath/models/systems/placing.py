"""Placing: the pipeline stage of each layer, and the sizes of a mesh's axes.

1. A system's rule (`divide_layers`), or the user's `stages`, gives the number of layers of each stage. Stages get their
   layers in order (`place_layers`).
2. With several chunks (virtual stages) per stage, every stage's chunk 0 comes before any stage's chunk 1.
3. Sizes of axes multiply to the number of ranks; one that is None is computed from the others (`fill_sizes`).

>>> place_layers(divide_layers(3, 2), layers=3, pp=2)[-1]
Spot(coords={'pp': 1}, chunk=0, number=2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardmath.base.errors import MeshError, StoreError
from shardmath.models.storage.stored import Spot

__all__ = ["divide_layers", "fill_sizes", "place_layers"]


def divide_layers(layers: int, pp: int, *, spared: int = 0) -> list[int]:
    """List the number of layers on each of `pp` pipeline stages, divided as evenly as possible. The last `spared`
    stages get no extra layer; the stages just before them get the extra layers, one each.

    >>> divide_layers(7, 4), divide_layers(7, 4, spared=1)
    ([1, 2, 2, 2], [2, 2, 2, 1])
    """
    each, surplus = divmod(layers, pp)
    end = pp - spared
    return [each + (end - surplus <= stage < end) for stage in range(pp)]


def place_layers(
    counts: Sequence[int],
    *,
    layers: int,
    pp: int,
    chunks: int = 1,
    renumber: bool = False,
    fix: str = "give the number of layers of each stage",
) -> tuple[Spot, ...]:
    """Return the Spot (pipeline stage, chunk, layer number) of each layer, where stage s has `counts[c * pp + s]`
    layers in chunk (virtual stage) c. Layers are numbered through the model or, with `renumber`, in each chunk of a
    stage; `fix` is advice in the error if `counts` do not fit.

    Raises StoreError, with `fix` as advice, when `counts` have another length than pp times `chunks`, another sum than
    `layers`, or a negative number.

    >>> place_layers([1, 0, 0, 2], layers=3, pp=2, chunks=2, renumber=True)[-1]
    Spot(coords={'pp': 1}, chunk=1, number=1)
    """
    if len(counts) != pp * chunks or sum(counts) != layers or min(counts, default=0) < 0:
        chunked = "" if chunks == 1 else f" of {chunks} chunks"
        raise StoreError(
            f"{layers} layers do not fall to {pp} stages{chunked} as {list(counts)}; {fix}"
        )
    spots: list[Spot] = []
    for position, count in enumerate(counts):
        chunk, stage = divmod(position, pp)
        start = 0 if renumber else len(spots)
        coords = {"pp": stage}
        spots += [Spot(coords, chunk, start + n) for n in range(count)]
    return tuple(spots)


def fill_sizes(total: int, sizes: Mapping[str, int | None], of: str = "ranks") -> dict[str, int]:
    """Return the sizes of mesh axes, where an axis of size None in `sizes` gets `total` divided by the product of the
    other sizes. Error messages use `of` as the noun after the total, as in "8 ranks".

    Raises MeshError if the others do not divide the total.

    >>> fill_sizes(8, {"pp": 2, "dp": None, "tp": 2})
    {'pp': 2, 'dp': 2, 'tp': 2}
    """
    given = {axis: size for axis, size in sizes.items() if size is not None}
    known = math.prod(given.values())
    if min([total, *given.values()]) < 1 or total % known:
        words = " ".join(f"{axis}={size}" for axis, size in given.items())
        what = f"{words}: the product {known} does not divide {total} {of}"
        raise MeshError(f"{what}; choose sizes of 1 or more whose product divides it")
    return {axis: total // known if size is None else size for axis, size in sizes.items()}
