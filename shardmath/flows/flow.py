"""Flow: which holder of a line of bytes sends how much of it, so that no rank sends more than it must.

1. A **line** is a number of bytes that any of its **holders** may send, cut at any integer. A rank's **load** is what
   it sends of all lines.
2. Loads are lexicographically optimal: the largest is as small as any choice can make it, then the next, and so on.
   Over the reals these loads are unique; here each is rounded down or up, and no integers are better.
3. `levels` says what forces them: without the ranks of the levels above, and the lines that only those hold, the ranks
   of a level hold as many bytes that nobody else holds as they carry. The first level is the witness of the optimum:
   max over sets S of ranks of the bytes that are held only in S, divided by |S|.
4. Ties are broken by rank id. The order of the lines means nothing; lines with the same holders are one line.
5. Few pieces: fewer than lines and ranks together.
6. Integers of any size and no float: every machine finds the same.

Ranks that hold the same lines are one **kind**. Kinds that lines connect are decomposed (Fujishige 1980): try to give
every rank the average. A maximum flow does it, or its minimum cut separates the ranks that must carry more from the
others, who then send all that both hold. The flow found is freed of cycles, so that it is a forest, and rounded from
the roots on; a kind's bytes are wrapped around its ranks (McNaughton 1959).

With nodes, a rank takes exactly `cap` bytes: its share of lines, and what is missing from a further line of `cap`
bytes, the rest of which its node takes. So a node takes as many bytes as its ranks send, and the same decomposition
balances nodes.

>>> shares([6, 4], [(0, 1), (1, 2)])
[[4, 2], [1, 3]]
>>> levels([60, 2, 3], [(0, 1), (1, 2), (2, 3)])
[Level(nbytes=60, ranks=(0, 1)), Level(nbytes=5, ranks=(2, 3))]
>>> shares([60, 2, 3], [(0, 1), (1, 2), (2, 3)])
[[30, 30], [0, 2], [1, 2]]
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import PlanError
from shardmath.flows.network import Network, Piece, leaves, pieces

__all__ = ["Level", "levels", "shares"]

Holders: TypeAlias = tuple[int, ...]


class Level(NamedTuple):
    """Ranks that carry `nbytes` bytes between them, `nbytes / len(ranks)` each, whatever is chosen."""

    nbytes: int
    ranks: tuple[int, ...]


def shares(
    lengths: Sequence[int], holders: Sequence[Holders], nodes: Mapping[int, int] | None = None
) -> list[list[int]]:
    """For each line the bytes that each of its holders sends, in the order of the holders.

    `lengths` are bytes, 0 or more; `holders` are one or more distinct ranks, ascending. A rank's load is its load in
    `levels`, rounded down or up, and no integer loads, sorted from the largest, are lexicographically less.

    With `nodes` (rank -> node):
    1. no rank sends more than `cap`: the load of a rank in the first level, rounded up, which no choice can beat;
    2. of all integer choices that keep 1, node loads (sums over the node's ranks), sorted from the largest, are
       lexicographically the least; so the largest is as small as it can be;
    3. given what of each line leaves from each node, rank loads are as good as they are without `nodes`.

    Raises PlanError: a negative length, holders that are none or not ascending, a holder without a node.
    """
    groups = _groups(lengths, holders)
    total = {held: sum(lines.values()) for held, lines in groups.items()}
    sent = _by_rank(total) if nodes is None else _by_node(total, nodes)
    out: list[list[int]] = [[]] * len(holders)
    for held, lines in groups.items():
        for line, row in _dealt(lines, sent[held]):
            out[line] = row
    return out


def levels(lengths: Sequence[int], holders: Sequence[Holders]) -> list[Level]:
    """What forces the loads, highest load a rank first; every holder is in one level, and no two have the same load.

    Raises PlanError as `shares` does.
    """
    total = {held: sum(lines.values()) for held, lines in _groups(lengths, holders).items()}
    kinds = _kinds(total)
    out: dict[tuple[int, int], list[int]] = defaultdict(list)
    network = _network(total, kinds)
    for leaf in leaves(network):
        common = math.gcd(leaf.nbytes, leaf.weight)
        ranks = [rank for sink in leaf.sinks for rank in kinds[sink - network.first].ranks]
        out[leaf.nbytes // common, leaf.weight // common] += ranks
    found = [
        Level(nbytes * len(ranks) // weight, tuple(sorted(ranks)))
        for (nbytes, weight), ranks in out.items()
    ]
    return sorted(found, key=functools.cmp_to_key(_lower))


def _lower(a: Level, b: Level) -> int:
    """Above 0 where the load of a rank of `a` is lower than of `b`."""
    return b.nbytes * len(a.ranks) - a.nbytes * len(b.ranks)


# Lines with one set of holders are one line


def _groups(lengths: Sequence[int], holders: Sequence[Holders]) -> dict[Holders, dict[int, int]]:
    """By set of holders, in sorted order: the number and the bytes of its lines."""
    if len(lengths) != len(holders):
        raise PlanError(
            f"{len(lengths)} lengths and {len(holders)} sets of holders; give one of each for every line"
        )
    groups: dict[Holders, dict[int, int]] = {}
    for line, (held, length) in enumerate(zip(holders, lengths, strict=True)):
        if length < 0:
            raise PlanError(f"line {line} has {length} bytes; give lengths of 0 or more")
        groups.setdefault(held, {})[line] = operator.index(length)
    for held, lines in groups.items():
        if not held or not all(map(operator.lt, held, held[1:])):
            _refuse(next(iter(lines)), held)
    return {held: groups[held] for held in sorted(groups)}


def _refuse(line: int, held: Holders) -> None:
    """Say what is wrong with holders."""
    for a, b in itertools.pairwise(held):
        if a >= b:
            raise PlanError(
                f"line {line}: holder {b} comes after {a}; give its holders as tuple(sorted(set(...)))"
            )
    raise PlanError(f"line {line} has no holders; leave it out, or name a rank that holds it")


def _dealt(lines: dict[int, int], sent: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Lines of one set of holders, longest first, and what of each every holder sends."""
    if len(lines) == 1:
        yield next(iter(lines)), sent
        return
    order = sorted(lines, key=lambda line: -lines[line])
    rows = [[0] * len(sent) for _ in order]
    for i, j, nbytes in _wrapped([lines[line] for line in order], sent):
        rows[i][j] = nbytes
    yield from zip(order, rows, strict=True)


def _wrapped(rows: Iterable[int], columns: Iterable[int]) -> Iterator[Piece]:
    """McNaughton's wrap-around: two lists of the same sum laid along each other, as (row, column, bytes)."""
    at = enumerate(columns)
    j, room = 0, 0
    for i, nbytes in enumerate(rows):
        while nbytes > room:
            if room:
                yield i, j, room
            nbytes -= room
            j, room = next(at)
        if nbytes:
            yield i, j, nbytes
            room -= nbytes


def _even(nbytes: int, count: int) -> list[int]:
    """Parts that differ by at most one byte, larger first."""
    size, longer = divmod(nbytes, count)
    return [size + 1] * longer + [size] * (count - longer)


# Ranks that hold the same lines are one kind


class _Kind(NamedTuple):
    """Ranks of one node that hold the same `lines` and each send `base` bytes that nobody else holds."""

    node: int
    base: int
    lines: tuple[int, ...]
    ranks: list[int]


def _shared(total: dict[Holders, int]) -> list[Holders]:
    """Lines that somebody has to divide; lines are numbered by their place here."""
    return [held for held, nbytes in total.items() if nbytes and len(held) > 1]


def _kinds(total: dict[Holders, int], nodes: Mapping[int, int] | None = None) -> list[_Kind]:
    """The kinds, by lowest rank."""
    lines: dict[int, list[int]] = {
        rank: [] for rank in sorted({rank for held in total for rank in held})
    }
    for line, held in enumerate(_shared(total)):
        for rank in held:
            lines[rank].append(line)
    kinds: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, shared in lines.items():
        kinds[nodes[rank] if nodes else 0, total.get((rank,), 0), tuple(shared)].append(rank)
    return [_Kind(*key, ranks) for key, ranks in kinds.items()]


def _network(total: dict[Holders, int], kinds: list[_Kind]) -> Network:
    """Every kind takes the level for each of its ranks."""
    nbytes = [total[held] for held in _shared(total)]
    reach: list[list[int]] = [[] for _ in nbytes]
    for sink, kind in enumerate(kinds, len(nbytes)):
        for line in kind.lines:
            reach[line].append(sink)
    weight = {sink: len(kind.ranks) for sink, kind in enumerate(kinds, len(nbytes))}
    base = {sink: len(kind.ranks) * kind.base for sink, kind in enumerate(kinds, len(nbytes))}
    return Network(len(nbytes), nbytes, reach, weight, base)


def _by_rank(total: dict[Holders, int]) -> dict[Holders, list[int]]:
    """By set of holders: what each holder sends of its line."""
    kinds = _kinds(total)
    network = _network(total, kinds)
    sent: list[dict[int, int]] = [{} for _ in network.nbytes]
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for line, sink, nbytes in pieces(network):
        ranks = kinds[sink - network.first].ranks
        if len(ranks) == 1:
            sent[line][ranks[0]] = nbytes
        else:
            rows[sink].append((line, nbytes))
    for sink, row in rows.items():
        _wrap(sorted(row), kinds[sink - network.first].ranks, sent)
    out = {held: [nbytes] + [0] * (len(held) - 1) for held, nbytes in total.items()}
    for held, by_rank in zip(_shared(total), sent, strict=True):
        out[held] = [by_rank.get(rank, 0) for rank in held]
    return out


def _wrap(row: list[tuple[int, int]], ranks: list[int], sent: list[dict[int, int]]) -> None:
    """Divide what a kind takes of its lines evenly among its ranks."""
    sizes = [nbytes for _, nbytes in row]
    for i, j, nbytes in _wrapped(sizes, _even(sum(sizes), len(ranks))):
        sent[row[i][0]][ranks[j]] = nbytes


# Nodes


def _by_node(total: dict[Holders, int], nodes: Mapping[int, int]) -> dict[Holders, list[int]]:
    """The same, with nodes balanced before ranks."""
    for held in total:
        for rank in held:
            if rank not in nodes:
                raise PlanError(
                    f"rank {rank} holds a line but is not in nodes; give every holder a node"
                )
    parts = list(_node_parts(total, nodes))
    rows = shares([nbytes for _, _, nbytes in parts], [local for _, local, _ in parts])
    sent = {held: dict.fromkeys(held, 0) for held in total}
    for (held, local, _), row in zip(parts, rows, strict=True):
        sent[held] |= zip(local, row, strict=True)
    return {held: list(row.values()) for held, row in sent.items()}


def _node_parts(
    total: dict[Holders, int], nodes: Mapping[int, int]
) -> Iterator[tuple[Holders, Holders, int]]:
    """What of each line leaves from each node: its holders, those of them in the node, bytes."""
    kinds, shared = _kinds(total, nodes), _shared(total)
    network = _node_network(_network(total, kinds), kinds, _cap(_network(total, kinds)))
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for line, sink, nbytes in pieces(network):
        if line < len(shared):
            sent[line, kinds[sink - network.first].node] += nbytes
    for (line, node), nbytes in sent.items():
        yield shared[line], tuple(rank for rank in shared[line] if nodes[rank] == node), nbytes
    yield from ((held, held, nbytes) for held, nbytes in total.items() if len(held) == 1)


def _cap(network: Network) -> int:
    """The highest level, rounded up."""
    return max((-(-leaf.nbytes // leaf.weight) for leaf in leaves(network, top=True)), default=0)


def _node_network(ranks: Network, kinds: list[_Kind], cap: int) -> Network:
    """Every kind takes what fills its ranks to `cap`; a further line of as many bytes may go there or to its node."""
    lines, first = ranks.first, ranks.first + len(kinds)
    sink_of = {
        node: sink
        for sink, node in enumerate(sorted({kind.node for kind in kinds}), first + len(kinds))
    }
    room = [len(kind.ranks) * (cap - kind.base) for kind in kinds]
    base = {first + i: -nbytes for i, nbytes in enumerate(room)} | dict.fromkeys(
        sink_of.values(), 0
    )
    for kind in kinds:
        base[sink_of[kind.node]] += len(kind.ranks) * kind.base
    reach = [[sink - lines + first for sink in sinks] for sinks in ranks.reach]
    reach += [
        [first + i, sink_of[kind.node]] if room[i] else [first + i] for i, kind in enumerate(kinds)
    ]
    weight = dict.fromkeys(base, 0) | dict.fromkeys(sink_of.values(), 1)
    return Network(first, ranks.nbytes + room, reach, weight, base)
