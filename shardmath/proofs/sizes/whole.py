"""Whole: whether ranks hold each element of a dimension, or each that another side needs, at every length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlacementError
from shardmath.layouts.algebra.cuts import FixedBlock
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, divide_lengths
from shardmath.layouts.algebra.partition import list_spans
from shardmath.layouts.algebra.runs import Runs
from shardmath.proofs.sizes.family import (
    MOST_PARTS,
    MOST_PIECES,
    TESTED,
    Family,
    count_lengths,
    list_blocks,
    read_family,
)
from shardmath.proofs.sizes.verdict import Counterexample, Decided

__all__ = ["decide_arrives", "decide_whole", "doubt_losses", "find_missing"]


def decide_whole(name: str, family: Family) -> tuple[Decided, Counterexample | None]:
    """Decide whether under the `family` of the dimension `name`, at every length, ranks hold each element. Return how
    it was decided, and the smallest counterexample or None."""
    if family.is_custom:
        return _decide_custom(name, [family])
    return _decide_cuts(name, [family])


def decide_arrives(name: str, src: Family, dst: Family) -> tuple[Decided, Counterexample | None]:
    """Decide whether at every length of the dimension `name` ranks of `src` hold each element that a rank of `dst`
    holds. Return how it was decided, and the smallest counterexample or None."""
    if not src.is_custom and not dst.is_custom:
        return _decide_cuts(name, [src, dst])
    decided, found = _decide_custom(name, [src, dst])
    if found is None:
        decided = doubt_losses(decided, {"the source": src, "the destination": dst})
    return decided, found


def doubt_losses(decided: Decided, families: Mapping[str, Family]) -> Decided:
    """Return `decided`, or that the law was only tested if a custom placement of `families` (in words -> Family) does
    not hold all elements: nothing keeps ranges with gaps between them apart at lengths that were not tried."""
    for words, family in families.items():
        if decided.how != "every" or not family.is_custom:
            continue
        _, lost = _decide_custom(decided.name, [family])
        if lost is not None:
            why = f"{words} does not hold all elements at {decided.name} = {lost.size}"
            return Decided(decided.name, "tested", decided.lengths, why)
    return decided


def _decide_custom(name: str, families: list[Family]) -> tuple[Decided, Counterexample | None]:
    """Decide, length by length, about one family, or about a source and a destination, with custom placements."""
    decided = _count_custom(name, [family for family in families if family.is_custom])
    for n in range(decided.lengths):
        found = find_missing(name, n, families)
        if found is not None:
            return decided, found
    return decided, None


def _count_custom(name: str, custom: list[Family]) -> Decided:
    """How many lengths decide about custom placements, and on what that relies."""
    reasons = [family.why for family in custom if family.growth is None]
    if reasons:
        return Decided(name, "tested", TESTED, "; ".join(dict.fromkeys(reasons)))
    lengths = max(family.growth.deciding for family in custom if family.growth)
    relied = dict.fromkeys(family.why for family in custom)
    return Decided(name, "every", lengths, " and ".join(relied))


def _decide_cuts(name: str, families: list[Family]) -> tuple[Decided, Counterexample | None]:
    """Run families of built-in cuts, of which each divides every length without loss, at the lengths that decide.

    If these are too many, the definition of the cuts decides.
    """
    deciding: list[int] = []
    tested: list[int] = []
    for family in families:
        for layer in _split_layers(family):
            decided, found = _run_layer(name, layer)
            if found is not None:
                return decided, found
            (tested if decided.how == "tested" else deciding).append(decided.lengths)
    if tested:
        # All layers were run at these lengths, or at all that decide about the layer.
        return Decided(name, "definition", min(tested)), None
    return Decided(name, "every", max(deciding, default=0)), None


def _split_layers(family: Family) -> Iterator[Family]:
    """The stages of a family, each as a family of its own, and blocks apart from the cuts before them.

    Every layer divides what the ones before it leave: if each divides all lengths without loss, so do all together.
    """
    for stage in family.stages:
        for _, digits in itertools.groupby(stage, lambda digit: isinstance(digit.cut, FixedBlock)):
            yield read_family(Dimension(0, (Field(0, (tuple(digits),)),)))


def _run_layer(name: str, family: Family) -> tuple[Decided, Counterexample | None]:
    """Look for a length at which ranks do not hold each element."""
    if family.is_counted:
        decided = count_lengths(name, family.growth, family.pieces, MOST_PIECES, "")
        sizes: Iterable[int] = _list_untiled(family, decided.lengths)
    else:
        decided = count_lengths(name, family.growth, _count_blocks(family), MOST_PARTS, "")
        sizes = range(decided.lengths)
    for n in sizes:
        found = find_missing(name, n, [family])
        if found is not None:
            return decided, found
    return decided, None


def _count_blocks(family: Family) -> int:
    """The parts of all coordinates, each as often as it has blocks in two periods."""
    cuts = [digit.cut for stage in family.stages for digit in stage]
    sizes = [cut.size for cut in cuts if isinstance(cut, FixedBlock)]
    return family.coordinates * (max(sizes) // min(sizes))


def _list_untiled(family: Family, lengths: int) -> Iterator[int]:
    """The lengths at which the pieces of all ranks do not lie end to end."""
    for tried in list_blocks(lengths, family.pieces):
        starts, sizes = (
            held.reshape(len(tried), -1) for held in divide_lengths(family.stages, tried)
        )
        # By start; an empty piece stands before one that begins where it lies.
        order = np.argsort(2 * starts + (sizes > 0), axis=1, kind="stable")
        starts = np.take_along_axis(starts, order, 1)
        stops = starts + np.take_along_axis(sizes, order, 1)
        ends = np.stack((starts[:, 0], tried - stops[:, -1]))
        tiled = (starts[:, 1:] == stops[:, :-1]).all(1) & ~ends.any(0)
        yield from tried[~tiled].tolist()


def find_missing(name: str, n: int, families: list[Family]) -> Counterexample | None:
    """Return, for length `n`, the first element that the last family holds (if there is only one: the first of all
    elements) and the first family does not hold, or why there is no such layout; None if nothing is missing."""
    try:
        held, *others = (cells(family.at(n)) for family in families)
    except PlacementError as error:
        return Counterexample(name, n, str(error))
    starts, stops = _join_spans(held)
    begin, end = _join_spans(others[0]) if others else (np.array([0]), np.array([n]))
    # The joined range at or before each wanted one, and how far it reaches.
    before = starts.searchsorted(begin, "right")
    reach = np.append(0, stops)[before]
    reached = np.maximum(reach, begin)
    missing = reached[reached < end]
    if not len(missing):
        return None
    holder = "rank of the source" if others else "rank"
    return Counterexample(name, n, f"no {holder} holds element {missing[0]}")


def _join_spans(held: tuple[Runs, ...]) -> tuple[Ints, Ints]:
    """The starts and stops of the ranges that some part holds, joined where they touch or overlap."""
    starts, stops, _, _ = list_spans(held)
    reach = np.maximum.accumulate(stops)
    apart = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
    last = np.append(apart[1:], True)[: len(starts)]
    return starts[apart], reach[last]
