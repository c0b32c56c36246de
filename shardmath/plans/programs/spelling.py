"""Spelling: the transfers of parts, all at once.

1. They equal the transfers that `spell_transfers` lists stretch by stretch, which defines them.
2. Most parts of a model are of few kinds: the same elements of a unit, between ranks that hold the same.
   Each kind is expanded once; the transfers are then the rows of a table of columns.
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
from shardmath.plans.pieces import BoxPiece, expand
from shardmath.plans.plan import Plan
from shardmath.plans.programs.stretch_parts import Stretches, StretchParts
from shardmath.plans.template import Template
from shardmath.plans.transfers import Transfer

__all__ = ["spell_parts"]


def spell_parts(
    plan: Plan, demands: Demands, given: Stretches, relayed: Bools, parts: StretchParts
) -> tuple[list[Transfer], Offsets]:
    """Return the transfers that send `parts` (parts of the byte ranges `given`), part by part, and Offsets that say
    which transfers send each part. `demands` is the table of the plan's bytes; where `relayed` is true, a range is sent
    from the sender's destination tensors, where it arrived before.

    The sender of a `relayed` stretch is a rank of the destination. In a reduction it sends what it has
    received and folded. Raises MeshError if a rank is not in the mesh of its side.
    """
    ends = _PartEnds(
        batch=demands.batch[parts.row],
        relayed=relayed[parts.stretch],
        sender=given.sender[parts.stretch],
        receiver=given.receiver[parts.stretch],
    )
    unit = demands.unit[parts.row]
    expanded = _expand_parts(plan.batches, ends, unit, parts)
    part, tensor, pieces = _repeat_for_tensors(parts, expanded)
    transfers = _spell(plan, ends.take(part), tensor, pieces)
    counts = np.bincount(part, minlength=len(expanded))
    return transfers, Offsets.of_counts(counts)


def _repeat_for_tensors(
    parts: StretchParts, expanded: list[list[BoxPiece]]
) -> tuple[Ints, Ints, list[BoxPiece]]:
    """The part, the tensor and the piece of all pieces, given those of one tensor of each part."""
    count = lengths(expanded)
    by_part = Offsets.of_counts(parts.copies * count)
    part = by_part.owners()
    # All pieces of a tensor, then those of the next.
    inside = np.arange(len(part)) - by_part.first[part]
    copy, piece = np.divmod(inside, count[part])
    places = zip(part.tolist(), piece.tolist(), strict=True)
    pieces = [expanded[i][k] for i, k in places]
    return part, parts.tensor[part] + copy, pieces


class _PartEnds(NamedTuple):
    """By part: its batch, whether it is relayed, its sender and its receiver."""

    batch: Ints
    relayed: Bools
    sender: Ints
    receiver: Ints

    def take(self, some: Ints) -> _PartEnds:
        """Return a table of the rows with the indices `some`, in the order of `some`. A row has the sending and the
        receiving rank of some elements."""
        return _PartEnds(
            self.batch[some],
            self.relayed[some],
            self.sender[some],
            self.receiver[some],
        )


def _spell(plan: Plan, ends: _PartEnds, tensor: Ints, pieces: list[BoxPiece]) -> list[Transfer]:
    """The pieces as transfers; piece i is of tensor number `tensor[i]` of its batch."""
    names = _list_names(plan.batches, ends.batch, tensor)
    src_names, dst_names = _list_local_names(plan, ends, names)
    fields = range(len(BoxPiece._fields))
    src, dst, at, shape, nbytes, addend = (map(itemgetter(i), pieces) for i in fields)
    columns = (
        names,
        ends.sender.tolist(),
        ends.receiver.tolist(),
        _list_operations(plan.batches, ends, pieces),
        src_names,
        src,
        dst_names,
        dst,
        shape,
        nbytes,
        at,
        addend,
    )
    # The same as Transfer(...), and all of it in C.
    make = partial(tuple.__new__, Transfer)
    rows = zip(*columns, strict=True)
    return list(map(make, rows))


def _list_names(batches: Sequence[Batch], batch: Ints, tensor: Ints) -> list[str]:
    """The name of tensor number `tensor[i]` of batch number `batch[i]`, for all i."""
    names_by_batch = [b.names for b in batches]
    all_names = list(itertools.chain.from_iterable(names_by_batch))
    offsets = Offsets.of_counts(lengths(names_by_batch))
    positions = offsets.first[batch] + tensor
    return [all_names[i] for i in positions.tolist()]


def _list_local_names(plan: Plan, ends: _PartEnds, names: list[str]) -> tuple[list[str], list[str]]:
    """For each row i of `ends`, the local name of tensor `names[i]` at its sender; and the same at its receiver."""
    src_names = list(names)
    dst_names = list(names)
    # Most tensors are one window on both sides, whose local name is the tensor's.
    has_windows = np.array([_has_windows(plan, batch) for batch in plan.batches], bool)
    for i in np.flatnonzero(has_windows[ends.batch]).tolist():
        name = names[i]
        batch = plan.batches[ends.batch[i]]
        dst_names[i] = plan.dst[name].local_name(name, batch.target)
        if ends.relayed[i]:
            # A relay sends from its tensor at the destination, in which the bytes arrived.
            src_names[i] = dst_names[i]
        else:
            src_names[i] = plan.src[name].local_name(name, batch.source)
    return src_names, dst_names


def _has_windows(plan: Plan, batch: Batch) -> bool:
    """Whether the batch's tensors are windows on some side: several, or one that is left of several."""
    name = batch.names[0]
    return not (plan.src[name].is_single and plan.dst[name].is_single)


def _list_operations(
    batches: Sequence[Batch], ends: _PartEnds, pieces: list[BoxPiece]
) -> list[str]:
    """The operation, "copy" or a fold such as "sum", with which each piece enters its receiver's tensor."""
    ops = ["copy"] * len(pieces)
    rules = [batch.template.reduction for batch in batches]
    folds = np.array([bool(rule.folded) for rule in rules], bool)
    # A relay sends what it has folded in already.
    folded = folds[ends.batch] & ~ends.relayed
    for i in np.flatnonzero(folded).tolist():
        rule = rules[ends.batch[i]]
        ops[i] = rule.op_of(pieces[i].addend)
    return ops


# Parts as pieces


def _expand_parts(
    batches: Sequence[Batch], ends: _PartEnds, unit: Ints, parts: StretchParts
) -> list[list[BoxPiece]]:
    """The pieces of each part, for one of its tensors."""
    senders, receivers = _find_positions(batches, ends)
    templates, of_batch = _number_templates(batches)
    columns = [
        of_batch[ends.batch],
        unit,
        senders,
        receivers,
        parts.lo,
        parts.hi,
        ends.relayed.astype(np.int64),
    ]
    # Many parts have equal rows in these columns, and so the same pieces, which are listed once.
    first_of_kind, kind = number_alike(columns)
    kinds = [column[first_of_kind].tolist() for column in columns]
    pieces_of_kind = []
    for template_number, *unit_to_hi, relayed in zip(*kinds, strict=True):
        pieces = expand(templates[template_number], *unit_to_hi, relayed=bool(relayed))
        pieces_of_kind.append(pieces)
    return [pieces_of_kind[i] for i in kind.tolist()]


def _number_templates(batches: Sequence[Batch]) -> tuple[list[Template], Ints]:
    """The distinct templates, and the number of each batch's template."""
    templates = [batch.template for batch in batches]
    each_once = list(dict.fromkeys(templates))
    number_of = {template: number for number, template in enumerate(each_once)}
    template_of_batch = [number_of[template] for template in templates]
    return each_once, np.array(template_of_batch, np.int64)


def _find_positions(batches: Sequence[Batch], ends: _PartEnds) -> tuple[Ints, Ints]:
    """The positions of senders and of receivers on their sides."""
    sources = [batch.src for batch in batches]
    targets = [batch.dst for batch in batches]
    # The sender of a relayed part is a rank of the destination, whose meshes follow the source's.
    sending = np.where(ends.relayed, ends.batch + len(batches), ends.batch)
    senders = _look_up([*sources, *targets], sending, ends.sender)
    receivers = _look_up(targets, ends.batch, ends.receiver)
    return senders, receivers


def _look_up(meshes: Sequence[Mesh], which: Ints, ranks: Ints) -> Ints:
    """The position of each rank in mesh number `which`."""
    # (mesh, rank) as one number, so that each pair is looked up once.
    radix = 1 + int(ranks.max(initial=0))
    pairs, pair = distinct(which * radix + ranks)
    numbers, members = np.divmod(pairs, radix)
    positions = []
    for number, rank in zip(numbers.tolist(), members.tolist(), strict=True):
        positions.append(meshes[number].position(rank))
    return np.array(positions, np.int64)[pair]
