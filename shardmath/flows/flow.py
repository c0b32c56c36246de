"""Flow: which holder of a line of bytes sends how much of it, so that no rank sends too much.

1. A **line** is a number of bytes that any of its **holders** may send, cut at any integer. A rank's
   **load** is what it sends of all lines.
2. Loads are lexicographically optimal: the largest is as small as any choice can make it, then the
   next, and so on. Over the reals these loads are unique; here each is rounded down or up, and no
   integers are better.
3. `levels` says what forces them: without the ranks of the levels above, and the lines that only
   those hold, the ranks of a level hold as many bytes that nobody else holds as they carry. The
   first level is the witness of the optimum: max over sets S of ranks of the bytes that are held
   only in S, divided by |S|.
4. Ties are broken by rank id. The order of the lines means nothing; lines with the same holders are
   one line.
5. Few pieces: fewer than lines and ranks together.
6. Integers of any size and no float: every machine finds the same.

Ranks that hold the same lines are one **kind**. Kinds that lines connect are decomposed into levels
(see `network`) and the flow is rounded (see `forest`); a kind's bytes are wrapped around its ranks
(McNaughton 1959).

With nodes, a rank takes exactly `cap` bytes: its share of lines, and what is missing from a further
line of `cap` bytes, the rest of which its node takes. So a node takes as many bytes as its ranks
send, and the same decomposition balances nodes.

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
from shardmath.flows.forest import Piece, pieces
from shardmath.flows.network import Network, leaves

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

    `lengths` are bytes, 0 or more; `holders` are one or more distinct ranks, ascending. A rank's
    load is its load in `levels`, rounded down or up, and no integer loads, sorted from the largest,
    are lexicographically less.

    With `nodes` (rank -> node):
    1. no rank sends more than `cap`: the load of a rank in the first level, rounded up, which no
       choice can beat;
    2. of all integer choices that keep 1, node loads (sums over the node's ranks), sorted from the
       largest, are lexicographically the least; so the largest is as small as it can be;
    3. given what of each line leaves from each node, rank loads are as good as they are without
       `nodes`.

    Raises PlanError: a negative length, holders that are none or not ascending, a holder without a
    node.
    """
    groups = _group_lines(lengths, holders)
    total = _sum_groups(groups)
    sent = _divide_by_rank(total) if nodes is None else _divide_by_node(total, nodes)
    out: list[list[int]] = [[]] * len(holders)
    for held, lines in groups.items():
        for line, row in _deal(lines, sent[held]):
            out[line] = row
    return out


def levels(lengths: Sequence[int], holders: Sequence[Holders]) -> list[Level]:
    """What forces the loads, highest load per rank first.

    Every holder is in one level, and no two levels have the same load. Raises PlanError as `shares`
    does.
    """
    total = _sum_groups(_group_lines(lengths, holders))
    kinds = _find_kinds(total)
    network = _rank_network(total, kinds)
    ranks_at: dict[tuple[int, int], list[int]] = defaultdict(list)
    for leaf in leaves(network):
        common = math.gcd(leaf.nbytes, leaf.weight)
        load = (leaf.nbytes // common, leaf.weight // common)
        for sink in leaf.sinks:
            ranks_at[load] += kinds[sink - network.first].ranks
    found = []
    for (nbytes, weight), ranks in ranks_at.items():
        found.append(Level(nbytes * len(ranks) // weight, tuple(sorted(ranks))))
    return sorted(found, key=functools.cmp_to_key(_compare_loads))


def _compare_loads(a: Level, b: Level) -> int:
    """Above 0 where the load of a rank of `a` is lower than of `b`: highest loads sort first."""
    return b.nbytes * len(a.ranks) - a.nbytes * len(b.ranks)


# Lines with one set of holders are one line


def _group_lines(
    lengths: Sequence[int], holders: Sequence[Holders]
) -> dict[Holders, dict[int, int]]:
    """By set of holders, in sorted order: the number and the bytes of its lines."""
    if len(lengths) != len(holders):
        what = f"{len(lengths)} lengths and {len(holders)} sets of holders"
        raise PlanError(f"{what}; give one of each for every line")
    groups: dict[Holders, dict[int, int]] = {}
    for line, (held, length) in enumerate(zip(holders, lengths, strict=True)):
        if length < 0:
            raise PlanError(f"line {line} has {length} bytes; give lengths of 0 or more")
        groups.setdefault(held, {})[line] = operator.index(length)
    for held, lines in groups.items():
        if not held or not all(map(operator.lt, held, held[1:])):
            _refuse(next(iter(lines)), held)
    return {held: groups[held] for held in sorted(groups)}


def _sum_groups(groups: dict[Holders, dict[int, int]]) -> dict[Holders, int]:
    """By set of holders: the bytes of all its lines."""
    return {held: sum(lines.values()) for held, lines in groups.items()}


def _refuse(line: int, held: Holders) -> None:
    """Raise PlanError for holders that are none or not ascending."""
    for a, b in itertools.pairwise(held):
        if a >= b:
            what = f"line {line}: holder {b} comes after {a}"
            raise PlanError(f"{what}; give its holders as tuple(sorted(set(...)))")
    raise PlanError(f"line {line} has no holders; leave it out, or name a rank that holds it")


def _deal(lines: dict[int, int], sent: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Lines of one set of holders, longest first, and what of each every holder sends."""
    if len(lines) == 1:
        (line,) = lines
        yield line, sent
        return
    order = sorted(lines, key=lambda line: -lines[line])
    rows = [[0] * len(sent) for _ in order]
    sizes = [lines[line] for line in order]
    for i, j, nbytes in _wrap_around(sizes, sent):
        rows[i][j] = nbytes
    yield from zip(order, rows, strict=True)


def _wrap_around(rows: Iterable[int], columns: Iterable[int]) -> Iterator[Piece]:
    """McNaughton's wrap-around: two lists of the same sum laid along each other.

    Yields (row, column, bytes).
    """
    at = enumerate(columns)
    j = 0
    room = 0
    for i, nbytes in enumerate(rows):
        while nbytes > room:
            if room:
                yield i, j, room
            nbytes -= room
            j, room = next(at)
        if nbytes:
            yield i, j, nbytes
            room -= nbytes


def _even_parts(nbytes: int, count: int) -> list[int]:
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


def _list_shared(total: dict[Holders, int]) -> list[Holders]:
    """Lines that somebody has to divide; lines are numbered by their place here."""
    return [held for held, nbytes in total.items() if nbytes and len(held) > 1]


def _find_kinds(total: dict[Holders, int], nodes: Mapping[int, int] | None = None) -> list[_Kind]:
    """The kinds, by lowest rank."""
    holders = set(itertools.chain.from_iterable(total))
    lines: dict[int, list[int]] = {rank: [] for rank in sorted(holders)}
    for line, held in enumerate(_list_shared(total)):
        for rank in held:
            lines[rank].append(line)
    kinds: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, shared in lines.items():
        node = nodes[rank] if nodes else 0
        base = total.get((rank,), 0)
        kinds[node, base, tuple(shared)].append(rank)
    return [_Kind(*key, ranks) for key, ranks in kinds.items()]


def _rank_network(total: dict[Holders, int], kinds: list[_Kind]) -> Network:
    """The network in which every kind takes the level for each of its ranks."""
    nbytes = [total[held] for held in _list_shared(total)]
    reach: list[list[int]] = [[] for _ in nbytes]
    weight = {}
    base = {}
    for sink, kind in enumerate(kinds, len(nbytes)):
        for line in kind.lines:
            reach[line].append(sink)
        weight[sink] = len(kind.ranks)
        base[sink] = len(kind.ranks) * kind.base
    return Network(len(nbytes), nbytes, reach, weight, base)


def _divide_by_rank(total: dict[Holders, int]) -> dict[Holders, list[int]]:
    """By set of holders: what each holder sends of its line."""
    sent = _divide_lines(total)
    # Of a line that nobody has to divide, the only holder sends all; or there is nothing to send.
    out = {held: [nbytes] + [0] * (len(held) - 1) for held, nbytes in total.items()}
    for held, by_rank in zip(_list_shared(total), sent, strict=True):
        out[held] = [by_rank.get(rank, 0) for rank in held]
    return out


def _divide_lines(total: dict[Holders, int]) -> list[dict[int, int]]:
    """By line: what ranks send of it; ranks that send nothing may be missing."""
    kinds = _find_kinds(total)
    network = _rank_network(total, kinds)
    sent: list[dict[int, int]] = [{} for _ in network.nbytes]
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for line, sink, nbytes in pieces(network):
        ranks = kinds[sink - network.first].ranks
        if len(ranks) == 1:
            sent[line][ranks[0]] = nbytes
        else:
            rows[sink].append((line, nbytes))
    for sink, row in rows.items():
        ranks = kinds[sink - network.first].ranks
        _divide_kind(sorted(row), ranks, sent)
    return sent


def _divide_kind(row: list[tuple[int, int]], ranks: list[int], sent: list[dict[int, int]]) -> None:
    """Divide what a kind takes of its lines evenly among its ranks."""
    sizes = [nbytes for _, nbytes in row]
    even = _even_parts(sum(sizes), len(ranks))
    for i, j, nbytes in _wrap_around(sizes, even):
        line, _ = row[i]
        sent[line][ranks[j]] = nbytes


# Nodes


def _divide_by_node(
    total: dict[Holders, int], nodes: Mapping[int, int]
) -> dict[Holders, list[int]]:
    """By set of holders: what each holder sends, nodes balanced before ranks."""
    _check_nodes(total, nodes)
    parts = list(_divide_among_nodes(total, nodes))
    lengths = [nbytes for _, _, nbytes in parts]
    holders = [local for _, local, _ in parts]
    sent = {held: dict.fromkeys(held, 0) for held in total}
    for (held, local, _), row in zip(parts, shares(lengths, holders), strict=True):
        sent[held].update(zip(local, row, strict=True))
    return {held: list(row.values()) for held, row in sent.items()}


def _check_nodes(total: dict[Holders, int], nodes: Mapping[int, int]) -> None:
    """Raise PlanError for a holder without a node."""
    for held in total:
        for rank in held:
            if rank not in nodes:
                what = f"rank {rank} holds a line but is not in nodes"
                raise PlanError(f"{what}; give every holder a node")


def _divide_among_nodes(
    total: dict[Holders, int], nodes: Mapping[int, int]
) -> Iterator[tuple[Holders, Holders, int]]:
    """What of each line leaves from each node: its holders, those of them in the node, bytes."""
    kinds = _find_kinds(total, nodes)
    shared = _list_shared(total)
    cap = _find_cap(_rank_network(total, kinds))  # which uses up its network
    network = _node_network(_rank_network(total, kinds), kinds, cap)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for line, sink, nbytes in pieces(network):
        if line < len(shared):
            node = kinds[sink - network.first].node
            sent[line, node] += nbytes
    for (line, node), nbytes in sent.items():
        held = shared[line]
        local = tuple(rank for rank in held if nodes[rank] == node)
        yield held, local, nbytes
    for held, nbytes in total.items():
        if len(held) == 1:
            yield held, held, nbytes


def _find_cap(network: Network) -> int:
    """The highest level, rounded up; uses the network up."""
    cap = 0
    for leaf in leaves(network, top=True):
        load = -(-leaf.nbytes // leaf.weight)
        cap = max(cap, load)
    return cap


def _node_network(ranks: Network, kinds: list[_Kind], cap: int) -> Network:
    """The network in which every kind takes what fills its ranks to `cap`.

    There is a further line of as many bytes for each kind, which may go there or to its node. Lines
    are numbered from 0, then come those further lines, then kinds as sinks, then nodes as sinks.
    """
    lines = ranks.first
    first = lines + len(kinds)
    nodes = sorted({kind.node for kind in kinds})
    sink_of = {node: sink for sink, node in enumerate(nodes, first + len(kinds))}
    reach = []
    for sinks in ranks.reach:
        reach.append([sink - lines + first for sink in sinks])
    room = []
    base = {}
    base_of_node = dict.fromkeys(sink_of.values(), 0)
    for sink, kind in enumerate(kinds, first):
        count = len(kind.ranks)
        spare = count * (cap - kind.base)
        room.append(spare)
        reach.append([sink, sink_of[kind.node]] if spare else [sink])
        base[sink] = -spare
        base_of_node[sink_of[kind.node]] += count * kind.base
    # A kind takes exactly its room, whatever the level: it has no weight.
    weight = dict.fromkeys(base, 0) | dict.fromkeys(base_of_node, 1)
    return Network(first, ranks.nbytes + room, reach, weight, base | base_of_node)
