"""Whole: whether ranks hold each element of a dimension once, at every length."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlacementError
from shardmath.layouts.algebra.cuts import FixedBlock
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, divide_lengths
from shardmath.layouts.algebra.partition import list_spans
from shardmath.layouts.algebra.runs import Runs
from shardmath.proofs.sizes.family import Family, count_lengths, list_blocks, read_family
from shardmath.proofs.sizes.verdict import Counterexample, Decided

__all__ = ["decide_whole", "find_missing"]


def decide_whole(name: str, families: list[Family]) -> tuple[Decided, Counterexample | None]:
    """Decide whether under each of the `families` of the dimension `name`, at every length, ranks hold each element
    once. Return how it was decided, and the smallest counterexample or None."""
    decided = [Decided(name, "every", 0)]
    found = []
    for family in families:
        for layer in _split_layers(family):
            one, counterexample = _decide_layer(name, layer)
            decided.append(one)
            if counterexample is not None:
                found.append(counterexample)
    # The weakest answer, and of these the one with the most lengths.
    weakest = max(decided, key=lambda one: (one.how == "tested", bool(one.why), one.lengths))
    return weakest, min(found, key=lambda one: one.size, default=None)


def _split_layers(family: Family) -> Iterator[Family]:
    """The stages of a family, each as a family of its own, and blocks apart from the cuts before them.

    Every layer divides what the ones before it leave: if each divides all lengths without loss, so do all together.
    """
    if family.why:
        yield family
        return
    for stage in family.stages:
        for _, digits in itertools.groupby(stage, lambda digit: isinstance(digit.cut, FixedBlock)):
            yield read_family(Dimension(0, (Field(0, (tuple(digits),)),)))


def _decide_layer(name: str, family: Family) -> tuple[Decided, Counterexample | None]:
    """Decide whether at every length ranks hold each element once."""
    decided = count_lengths(name, family.growth, family.coordinates, family.why)
    sizes: Iterable[int] = range(decided.lengths)
    if family.is_counted:
        sizes = _list_untiled(family, decided.lengths)
    for n in sizes:
        found = find_missing(name, n, [family])
        if found is not None:
            return decided, found
    return decided, None


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
    return Counterexample(name, n, f"no rank holds element {missing[0]}")


def _join_spans(held: tuple[Runs, ...]) -> tuple[Ints, Ints]:
    """The starts and stops of the ranges that some part holds, joined where they touch or overlap."""
    starts, stops, _, _ = list_spans(held)
    reach = np.maximum.accumulate(stops)
    apart = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
    last = np.append(apart[1:], True)[: len(starts)]
    return starts[apart], reach[last]
