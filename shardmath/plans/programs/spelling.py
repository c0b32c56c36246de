"""Spelling: the transfers of parts, all at once.

1. They are those that `spell_transfers` lists stretch by stretch, which defines them.
2. Most parts of a model are alike: the same elements of a unit, between ranks that hold the same.
   Each kind is expanded once; what is left to do is to lay columns beside each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, distinct, lengths, number_alike
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.pieces import BoxPiece, Transfer, expand
from shardmath.plans.plan import Plan
from shardmath.plans.programs.stretch_parts import Stretches, StretchParts
from shardmath.plans.template import Template

__all__ = ["spell_parts"]


def spell_parts(
    plan: Plan, demands: Demands, given: Stretches, relayed: Bools, parts: StretchParts
) -> tuple[list[Transfer], Offsets]:
    """The transfers of parts of stretches of these lines of the plan, and which are each part's.

    The sender of a `relayed` stretch is a rank of the destination and sends what it has received,
    folded in already. Raises MeshError for ranks that do not hold their side of it.
    """
    ends = _Ends(
        batch=demands.batch[parts.row],
        relayed=relayed[parts.stretch],
        sender=given.sender[parts.stretch],
        receiver=given.receiver[parts.stretch],
    )
    unit = demands.unit[parts.row]
    expanded = _expand_parts(plan.batches, ends, unit, parts)
    part, tensor, pieces = _repeat(parts, expanded)
    transfers = _spell(plan, ends.take(part), tensor, pieces)
    counts = np.bincount(part, minlength=len(expanded))
    return transfers, Offsets.of_counts(counts)


def _repeat(
    parts: StretchParts, expanded: list[list[BoxPiece]]
) -> tuple[Ints, Ints, list[BoxPiece]]:
    """The pieces of all tensors of parts, given those of one: of which part and tensor each is."""
    count = lengths(expanded)
    by_part = Offsets.of_counts(parts.copies * count)
    part = by_part.owners()
    # All pieces of a tensor, then those of the next.
    inside = np.arange(len(part)) - by_part.first[part]
    copy, piece = np.divmod(inside, count[part])
    places = zip(part.tolist(), piece.tolist(), strict=True)
    pieces = [expanded[i][k] for i, k in places]
    return part, parts.tensor[part] + copy, pieces


class _Ends(NamedTuple):
    """Of some parts: of which batch they are, whether relayed, and from whom to whom they go."""

    batch: Ints
    relayed: Bools
    sender: Ints
    receiver: Ints

    def take(self, some: Ints) -> _Ends:
        """Those of some of the parts, in this order."""
        return _Ends(
            self.batch[some],
            self.relayed[some],
            self.sender[some],
            self.receiver[some],
        )


def _spell(plan: Plan, ends: _Ends, tensor: Ints, pieces: list[BoxPiece]) -> list[Transfer]:
    """The pieces as transfers, each of the tensor of this number of its batch."""
    names = _list_names(plan.batches, ends.batch, tensor)
    here, there = _list_local_names(plan, ends, names)
    fields = range(len(BoxPiece._fields))
    src, dst, at, shape, nbytes, addend = (map(itemgetter(i), pieces) for i in fields)
    columns = (
        names,
        ends.sender.tolist(),
        ends.receiver.tolist(),
        _list_operations(plan.batches, ends, pieces),
        here,
        src,
        there,
        dst,
        shape,
        nbytes,
        at,
        addend,
    )
    # What Transfer(...) does in the end, and all of it in C.
    make = partial(tuple.__new__, Transfer)
    rows = zip(*columns, strict=True)
    return list(map(make, rows))


def _list_names(batches: Sequence[Batch], batch: Ints, tensor: Ints) -> list[str]:
    """The name of tensor number `tensor[i]` of batch number `batch[i]`, for all i."""
    names = [one.names for one in batches]
    every = list(itertools.chain.from_iterable(names))
    by_batch = Offsets.of_counts(lengths(names))
    number = by_batch.first[batch] + tensor
    return [every[i] for i in number.tolist()]


def _list_local_names(plan: Plan, ends: _Ends, names: list[str]) -> tuple[list[str], list[str]]:
    """What holds tensors of these names at their senders, and at their receivers."""
    here = list(names)
    there = list(names)
    # Most tensors are one window on both sides, and have no local names.
    has_windows = np.array([_has_windows(plan, batch) for batch in plan.batches], bool)
    some = np.flatnonzero(has_windows[ends.batch])
    for i in some.tolist():
        name = names[i]
        batch = plan.batches[ends.batch[i]]
        there[i] = plan.dst[name].local_name(name, batch.target)
        if ends.relayed[i]:
            here[i] = there[i]
        else:
            here[i] = plan.src[name].local_name(name, batch.source)
    return here, there


def _has_windows(plan: Plan, batch: Batch) -> bool:
    """Whether its tensors are several windows on some side."""
    name = batch.names[0]
    return len(plan.src[name]) > 1 or len(plan.dst[name]) > 1


def _list_operations(batches: Sequence[Batch], ends: _Ends, pieces: list[BoxPiece]) -> list[str]:
    """The operation with which each piece enters."""
    ops = ["copy"] * len(pieces)
    rules = [batch.template.reduction for batch in batches]
    folds = np.array([bool(rule.folded) for rule in rules], bool)
    folded = folds[ends.batch] & ~ends.relayed
    for i in np.flatnonzero(folded).tolist():
        rule = rules[ends.batch[i]]
        ops[i] = rule.op_of(pieces[i].addend)
    return ops


# What parts are in pieces


def _expand_parts(
    batches: Sequence[Batch], ends: _Ends, unit: Ints, parts: StretchParts
) -> list[list[BoxPiece]]:
    """The pieces of each part, as one tensor has them."""
    here, there = _find_positions(batches, ends)
    templates, of_batch = _number_templates(batches)
    columns = [
        of_batch[ends.batch],
        unit,
        here,
        there,
        parts.lo,
        parts.hi,
        ends.relayed.astype(np.int64),
    ]
    first, kind = number_alike(columns)
    kinds = [column[first].tolist() for column in columns]
    known = []
    for number, *which, relayed in zip(*kinds, strict=True):
        template = templates[number]
        pieces = expand(template, *which, relayed=bool(relayed))
        known.append(pieces)
    return [known[i] for i in kind.tolist()]


def _number_templates(batches: Sequence[Batch]) -> tuple[list[Template], Ints]:
    """The templates, each once, and the number of each batch's."""
    templates = [batch.template for batch in batches]
    each_once = list(dict.fromkeys(templates))
    number = {template: i for i, template in enumerate(each_once)}
    numbers = [number[template] for template in templates]
    return each_once, np.array(numbers, np.int64)


def _find_positions(batches: Sequence[Batch], ends: _Ends) -> tuple[Ints, Ints]:
    """The positions of senders and of receivers on their sides."""
    sources = [batch.src for batch in batches]
    targets = [batch.dst for batch in batches]
    # What is relayed is sent from the destination.
    relaying = ends.batch + len(batches)
    sending = np.where(ends.relayed, relaying, ends.batch)
    here = _look_up([*sources, *targets], sending, ends.sender)
    there = _look_up(targets, ends.batch, ends.receiver)
    return here, there


def _look_up(meshes: Sequence[Mesh], which: Ints, ranks: Ints) -> Ints:
    """The position of each rank in mesh number `which`."""
    # A pair as one number, so that each is looked up once.
    most = 1 + int(ranks.max(initial=0))
    pairs, at = distinct(which * most + ranks)
    numbers, members = np.divmod(pairs, most)
    positions = []
    for number, rank in zip(numbers.tolist(), members.tolist(), strict=True):
        position = meshes[number].position(rank)
        positions.append(position)
    found = np.array(positions, np.int64)
    return found[at]
