"""The definition of a plan's transfers, stretch by stretch and tensor by tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from shardmath import Plan, Transfer
from shardmath.plans.demands import Demands
from shardmath.plans.stretches import Stretch, list_kept
from tests.property.drawn.pieces import expand

ListOthers = Callable[[Demands, int], Iterator[Stretch]]


def transfers_of(p: Plan, rank: int, list_others: ListOthers) -> list[Transfer]:
    """What stays on the rank, then what it sends or receives."""
    out: list[Transfer] = []
    for stretch in itertools.chain(list_kept(p.lines, rank), list_others(p.lines, rank)):
        out += spell_transfers(p, p.lines, stretch)
    return out


def spell_transfers(
    p: Plan, on: Demands, stretch: Stretch, relayed: bool = False
) -> Iterator[Transfer]:
    """A stretch has bytes lo..hi-1 of its block: of each row some tensors, and of each tensor some elements."""
    for row in range(int(on.row_first[stretch.block]), int(on.row_first[stretch.block + 1])):
        batch, unit, each = p.batches[on.batch[row]], int(on.unit[row]), int(on.each[row])
        itemsize = batch.template.src.itemsize
        for i in range(len(batch.names)):
            at = int(on.at[row]) + i * each
            first, last = (min(max(end - at, 0), each) for end in (stretch.lo, stretch.hi))
            if first < last:
                lo, hi = (int(on.lo[row]) + end // itemsize for end in (first, last))
                yield from _spell(p, batch, i, unit, stretch, lo, hi, relayed)


def _spell(p, batch, i, unit, stretch, lo, hi, relayed) -> Iterator[Transfer]:
    sender = (batch.dst if relayed else batch.src).position(stretch.sender)
    receiver = batch.dst.position(stretch.receiver)
    name = batch.names[i]
    dst_name = p.dst[name].local_name(name, batch.target)
    # A relay sends what it has received, where it is folded in already.
    src_name = dst_name if relayed else p.src[name].local_name(name, batch.source)
    pieces = expand(batch.template, unit, sender, receiver, lo, hi, relayed=relayed)
    for src, dst, box, shape, nbytes, addend in pieces:
        op = "copy" if relayed else batch.template.reduction.op_of(addend)
        ends = name, stretch.sender, stretch.receiver, op, src_name, src, dst_name, dst
        yield Transfer(*ends, shape, nbytes, box, addend)
