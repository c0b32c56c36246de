"""Blocks: the elements that have to move between ranks, as values and as arrays.

A **block** is bytes of distinct elements that exactly its holders have before the move, and its receivers
need after it. `read_blocks` numbers ranks, nodes, sets of ranks and addends, so that bounds are found with
whole arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.arrays import Ints, Offsets
from shardmath.base.errors import PlanError
from shardmath.base.text import count_ranks
from shardmath.plans.flows.topology import Topology

__all__ = ["Block", "Machine", "NumberedSets", "BlockTable", "read_blocks", "sum_by_code"]

MOST_BYTES = 1 << 62
"""More bytes than any program moves; sums and differences of them stay exact in 64 bits."""


class Block(NamedTuple):
    """`nbytes` bytes of distinct elements: before a move, each of `holders` has all these bytes; after the move, each
    of `receivers` needs all of them.

    Exactly the holders have them before the move. Ranks may be in any order and repeat; a receiver
    that is a holder asks for nothing. Blocks are disjoint sets of elements unless they are of one
    `group` and differ in `addend`: then they may be addends of the same elements. Blocks of
    different groups are of different elements.
    """

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    nbytes: int
    addend: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """The ranks of a program in ascending order, the node of each of these ranks, the number of these ranks on each
    node, and the speeds of links.

    `intra` and `inter` are what the links of one rank carry, in bytes per second.
    """

    ranks: Ints
    node: Ints
    size: Ints
    intra: Fraction
    inter: Fraction


@dataclass(frozen=True, slots=True, eq=False)
class NumberedSets:
    """A set of ranks for each block of bytes: block i has set number `of[i]` of `count` distinct sets. One such object
    lists the ranks that hold each block; another lists the ranks that need it.

    Members are listed for all `count` sets in one table: set `owner[j]` has the rank at position
    `member[j]`.
    """

    of: Ints
    count: int
    owner: Ints
    member: Ints


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """A table of a plan's blocks of bytes: for each block, the ranks that hold it, the ranks that need it, its size,
    and its `key`. Blocks with equal keys belong to the same group of tensors and the same partial value.

    `key` numbers (group, addend), ascending; `group` has the group of each key. `wanted` sums the
    blocks by receivers and key: (set, key, bytes).
    """

    holders: NumberedSets
    receivers: NumberedSets
    nbytes: Ints
    key: Ints
    group: Ints
    wanted: tuple[Ints, Ints, Ints]


def read_blocks(
    blocks: Sequence[Block], ranks: Iterable[int], topology: Topology
) -> tuple[BlockTable, Machine]:
    """Make a BlockTable of `blocks`, and a Machine of `ranks` with their nodes and links in `topology`.

    Raises PlanError for a block with a rank not among `ranks`, without a holder, or of a negative
    size.
    """
    _check(blocks)
    machine = _read_machine(ranks, topology)
    return _read_table(blocks, machine), machine


def _check(blocks: Sequence[Block]) -> None:
    """Raise PlanError for sizes that are not integers or are negative, and for bytes that no rank holds."""
    total = 0
    for block in blocks:
        nbytes = as_integer(block.nbytes, "the size of a block", PlanError)
        if nbytes < 0:
            raise PlanError(f"the size of a block is {nbytes} bytes; give 0 or more")
        if not block.holders:
            who = count_ranks(block.receivers)
            what = f"no rank holds the {block.nbytes} bytes that {who} must have"
            raise PlanError(f"{what}; add a rank to the holders of the block")
        total += nbytes
    if total >= MOST_BYTES:
        raise PlanError(f"the blocks have {total} bytes in all; give fewer than {MOST_BYTES}")


def _read_machine(ranks: Iterable[int], topology: Topology) -> Machine:
    """The ranks of the program in their nodes."""
    listed: list[int] = []
    sizes = []
    for members in topology.nodes(ranks).values():
        listed += members
        sizes.append(len(members))
    size = np.array(sizes, np.int64)
    node = Offsets.of_counts(size).owners()
    intra = Fraction(topology.intra_bytes_per_s)
    inter = Fraction(topology.inter_bytes_per_s)
    return Machine(np.array(listed, np.int64), node, size, intra, inter)


def _read_table(blocks: Sequence[Block], machine: Machine) -> BlockTable:
    """The blocks, their sets of ranks and their keys numbered."""
    sizes = [block.nbytes for block in blocks]
    nbytes = np.array(sizes, np.int64)
    key, group = _number_keys(blocks)
    wanted_by = [block.receivers for block in blocks]
    held_by = [block.holders for block in blocks]
    receivers = _number_sets(wanted_by, machine)
    holders = _number_sets(held_by, machine)
    # (set, key) as one number, so that equal pairs are summed as equal numbers.
    keys = len(group)
    pairs = receivers.of * keys + key
    code, amount = sum_by_code(pairs, nbytes)
    sets, key_of_sum = np.divmod(code, keys)
    wanted = (sets, key_of_sum, amount)
    return BlockTable(holders, receivers, nbytes, key, group, wanted)


def _number_keys(blocks: Sequence[Block]) -> tuple[Ints, Ints]:
    """By block, the number of its key, which is (group, addend); and by key, the number of its group.

    Keys and groups are numbered in ascending order, so that the keys of a group, which may be addends of the same
    elements, stand together.
    """
    keys = [(block.group, block.addend) for block in blocks]
    number: dict[tuple[int, int], int] = {}
    number_of_group: dict[int, int] = {}
    group_of_key = []
    for key in sorted(set(keys)):
        number[key] = len(number)
        group, _ = key
        group_of_key.append(number_of_group.setdefault(group, len(number_of_group)))
    key_of_block = [number[key] for key in keys]
    return np.array(key_of_block, np.int64), np.array(group_of_key, np.int64)


def _number_sets(given: Sequence[tuple[int, ...]], machine: Machine) -> NumberedSets:
    """The sets, numbered by value. Raises PlanError for a rank that the machine does not have."""
    # Most blocks share their tuples: each object is hashed once.
    by_id = {id(ranks): ranks for ranks in given}
    number: dict[tuple[int, ...], int] = {}
    number_of_id = {}
    for key, ranks in by_id.items():
        number_of_id[key] = number.setdefault(ranks, len(number))
    numbers = [number_of_id[id(ranks)] for ranks in given]
    number_of_block = np.array(numbers, np.int64)
    owner, member = _place_members(number, machine)
    return NumberedSets(number_of_block, len(number), owner, member)


def _place_members(sets: Collection[tuple[int, ...]], machine: Machine) -> tuple[Ints, Ints]:
    """(number of a set, position of one of its ranks in the machine) for all ranks of all sets."""
    listed: list[int] = []
    sizes = []
    for ranks in sets:
        listed += ranks
        sizes.append(len(ranks))
    counts = np.array(sizes, np.int64)
    owner = Offsets.of_counts(counts).owners()
    member = _find_positions(np.array(listed, np.int64), machine)
    return owner, member


def _find_positions(ranks: Ints, machine: Machine) -> Ints:
    """The position of each rank in the machine. Raises PlanError for a rank that it does not have."""
    position = np.searchsorted(machine.ranks, ranks)
    found = position < len(machine.ranks)
    # A rank above all of the machine's has no position at which to compare.
    found[found] = machine.ranks[position[found]] == ranks[found]
    if not found.all():
        program = count_ranks(tuple(machine.ranks.tolist()))
        what = f"rank {ranks[~found][0]} of a block is not among the {program} of the program"
        raise PlanError(f"{what}; add it to ranks")
    return position


def sum_by_code(code: Ints, amount: Ints) -> tuple[Ints, Ints]:
    """Return the distinct numbers in `code`, ascending, and for each the sum of its entries in `amount`."""
    distinct, at = np.unique(code, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, at, amount)
    return distinct, total
