"""Flow: the bytes that each holder of a line sends, balanced so that no rank sends too much.

1. A **line** is a number of bytes that any of its **holders** may send, cut at any integer. A rank's
   **load** is what it sends of all lines.
2. Loads are lexicographically optimal: the largest is as small as any choice can make it, then the
   next, and so on. Over the reals these loads are unique; here each is rounded down or up, and no
   integers are better.
3. `find_levels` shows what forces these loads: leaving out the ranks of the levels above, and their
   lines, the ranks of a level send exactly the bytes that only they hold. The
   first level is the witness of the optimum: max over sets S of ranks of the bytes that are held
   only in S, divided by |S|.
4. Ties are broken by rank id. The order of the lines has no effect; lines with the same holders are
   one line.
5. Pieces are few: fewer than lines and ranks together.
6. Integers may have any size, and there are no floats: every machine finds the same result.

Ranks that hold the same lines are one **kind**. Kinds that lines connect are decomposed into levels
(see `network`) and the flow is rounded (see `forest`); a kind's bytes are wrapped around its ranks
(McNaughton 1959).

With nodes, every rank has a further line of `cap` bytes, which fills the rank up to exactly `cap`
bytes; its node takes the rest of that line. So a node takes as many bytes as its ranks
send, and the same decomposition balances nodes.

>>> shares([6, 4], [(0, 1), (1, 2)])
[[4, 2], [1, 3]]
>>> find_levels([60, 2, 3], [(0, 1), (1, 2), (2, 3)])
[Level(nbytes=60, ranks=(0, 1)), Level(nbytes=5, ranks=(2, 3))]
>>> shares([60, 2, 3], [(0, 1), (1, 2), (2, 3)])
[[30, 30], [0, 2], [1, 2]]
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import PlanError
from shardmath.plans.flows.forest import Edge, list_edges
from shardmath.plans.flows.network import Network, list_leaves

__all__ = ["Level", "find_levels", "shares"]

Holders: TypeAlias = tuple[int, ...]
"""The ranks, ascending, that have a line; a variable `held` is one such set."""


class Level(NamedTuple):
    """Ranks that each send the same number of bytes, `nbytes / len(ranks)`, when all bytes are shared as evenly as
    possible among the ranks that hold them."""

    nbytes: int
    ranks: tuple[int, ...]


def shares(
    lengths: Sequence[int], holders: Sequence[Holders], nodes: Mapping[int, int] | None = None
) -> list[list[int]]:
    """Return how many bytes each holder sends, so that loads are balanced: item i lists, for the ranks `holders[i]`,
    their shares of `lengths[i]` bytes. With `nodes` (rank -> node), loads of nodes are balanced too.

    `lengths` are bytes, 0 or more; `holders` are one or more distinct ranks, ascending. A rank's
    load is its load in `find_levels`, rounded down or up, and no integer loads, sorted from the largest,
    are lexicographically less.

    With `nodes` (rank -> node):
    1. no rank sends more than `cap`: the load of a rank in the first level, rounded up, which no
       choice can beat;
    2. of all integer choices that keep 1, node loads (sums over the node's ranks), sorted from the
       largest, are lexicographically the least; so the largest is as small as it can be;
    3. given the bytes of each line that leave from each node, rank loads are as good as without
       `nodes`.

    Raises PlanError for a negative length, for holders that are empty or not ascending, and for a holder
    without a node.
    """
    groups = _group_lines(lengths, holders)
    total = _sum_groups(groups)
    sent = _divide_by_rank(total) if nodes is None else _divide_by_node(total, nodes)
    out: list[list[int]] = [[]] * len(holders)
    for held, lines in groups.items():
        for line, row in _deal(lines, sent[held]):
            out[line] = row
    return out


def find_levels(lengths: Sequence[int], holders: Sequence[Holders]) -> list[Level]:
    """Share bytes as evenly as possible among the ranks that hold them, and list the ranks with equal loads as Levels,
    highest load first. Each of the ranks `holders[i]` can send any of `lengths[i]` bytes.

    Every holder is in one level, and no two levels have the same load. Raises PlanError as `shares`
    does.
    """
    total = _sum_groups(_group_lines(lengths, holders))
    kinds = _find_kinds(total)
    network = _rank_network(total, kinds)
    ranks_at: dict[Fraction, list[int]] = defaultdict(list)
    for leaf in list_leaves(network):
        load = Fraction(leaf.nbytes, leaf.weight)
        ranks_of_level = ranks_at[load]
        for sink in leaf.sinks:
            kind = _find_kind(network, kinds, sink)
            ranks_of_level += kind.ranks
    found = []
    for load in sorted(ranks_at, reverse=True):
        ranks = tuple(sorted(ranks_at[load]))
        nbytes = int(load * len(ranks))
        found.append(Level(nbytes, ranks))
    return found


# The bytes that a set of holders sends, line by line and rank by rank


def _deal(lines: dict[int, int], sent: list[int]) -> Iterator[tuple[int, list[int]]]:
    """(line, bytes that each holder sends) for the lines of one set of holders, longest first."""
    if len(lines) == 1:
        (line,) = lines
        yield line, sent
        return
    order = sorted(lines, key=lines.__getitem__, reverse=True)
    rows = [[0] * len(sent) for _ in order]
    sizes = [lines[line] for line in order]
    for i, j, nbytes in _wrap_around(sizes, sent):
        rows[i][j] = nbytes
    yield from zip(order, rows, strict=True)


def _wrap_around(rows: Iterable[int], columns: Iterable[int]) -> Iterator[Edge]:
    """McNaughton's wrap-around: two lists of the same sum laid along each other.

    Yields (row, column, bytes).
    """
    remaining = enumerate(columns)
    j = 0
    room = 0
    for i, nbytes in enumerate(rows):
        while nbytes > room:
            if room:
                yield i, j, room
            nbytes -= room
            j, room = next(remaining)
        if nbytes:
            yield i, j, nbytes
            room -= nbytes


def _even_parts(nbytes: int, count: int) -> list[int]:
    """Parts that differ by at most one byte, larger first."""
    size, longer = divmod(nbytes, count)
    return [size + 1] * longer + [size] * (count - longer)


# Ranks that hold the same lines are one kind


class _HolderKind(NamedTuple):
    """Ranks of one node that hold the same `lines` and each send `base` bytes that no other rank holds."""

    node: int
    base: int
    lines: tuple[int, ...]
    ranks: list[int]


def _find_kinds(
    total: dict[Holders, int], nodes: Mapping[int, int] | None = None
) -> list[_HolderKind]:
    """The kinds of holders, by lowest rank; `total` has the bytes that each set of ranks holds."""
    kinds: dict[tuple[int, int, tuple[int, ...]], _HolderKind] = {}
    for rank, lines in _list_lines_by_rank(total).items():
        node = nodes[rank] if nodes else 0
        base = total.get((rank,), 0)
        key = node, base, tuple(lines)
        kind = kinds.get(key)
        if kind is None:
            kind = _HolderKind(*key, ranks=[])
            kinds[key] = kind
        kind.ranks.append(rank)
    return list(kinds.values())


def _list_lines_by_rank(total: dict[Holders, int]) -> dict[int, list[int]]:
    """The shared lines of every holder; ranks and lines ascend."""
    holders = set(itertools.chain.from_iterable(total))
    lines: dict[int, list[int]] = {rank: [] for rank in sorted(holders)}
    for line, held in enumerate(_list_shared(total)):
        for rank in held:
            lines[rank].append(line)
    return lines


def _find_kind(network: Network, kinds: list[_HolderKind], sink: int) -> _HolderKind:
    """The kind of a sink of the network."""
    return kinds[sink - network.first]


def _rank_network(total: dict[Holders, int], kinds: list[_HolderKind]) -> Network:
    """The network in which every kind takes the level once for each of its ranks."""
    nbytes = [total[held] for held in _list_shared(total)]
    first_sink = len(nbytes)  # sinks are numbered after the lines
    reach: list[list[int]] = [[] for _ in nbytes]
    weight = {}
    base = {}
    for sink, kind in enumerate(kinds, first_sink):
        for line in kind.lines:
            reach[line].append(sink)
        count = len(kind.ranks)
        weight[sink] = count
        base[sink] = count * kind.base
    return Network(first_sink, nbytes, reach, weight, base)


def _divide_by_rank(total: dict[Holders, int]) -> dict[Holders, list[int]]:
    """By set of holders: the bytes that each holder sends of its line."""
    out = {}
    for holders, nbytes in total.items():
        # A line that is not shared has one holder, which sends everything, or no bytes.
        nothing = [0] * (len(holders) - 1)
        out[holders] = [nbytes, *nothing]
    shared_lines = _divide_lines(total)
    for holders, nbytes_by_rank in zip(_list_shared(total), shared_lines, strict=True):
        out[holders] = [nbytes_by_rank.get(rank, 0) for rank in holders]
    return out


def _divide_lines(total: dict[Holders, int]) -> list[dict[int, int]]:
    """By line, the bytes that ranks send of it; ranks that send nothing may be missing."""
    kinds = _find_kinds(total)
    network = _rank_network(total, kinds)
    sent: list[dict[int, int]] = [{} for _ in network.nbytes]
    # What a kind of several ranks takes of its lines, to be divided among these ranks.
    rows_by_sink: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for line, sink, nbytes in list_edges(network):
        kind = _find_kind(network, kinds, sink)
        if len(kind.ranks) == 1:
            (rank,) = kind.ranks
            sent[line][rank] = nbytes
        else:
            rows_by_sink[sink].append((line, nbytes))
    for sink, row in rows_by_sink.items():
        row.sort()
        kind = _find_kind(network, kinds, sink)
        _divide_kind(row, kind.ranks, sent)
    return sent


def _divide_kind(row: list[tuple[int, int]], ranks: list[int], sent: list[dict[int, int]]) -> None:
    """Divide the bytes that a kind of ranks sends evenly among its `ranks`, and add them to `sent`, by line and rank.
    `row` has (line, bytes) for each line of which the kind sends some."""
    sizes = [nbytes for _, nbytes in row]
    bytes_of_rank = _even_parts(sum(sizes), len(ranks))
    for i, j, nbytes in _wrap_around(sizes, bytes_of_rank):
        line, _ = row[i]
        rank = ranks[j]
        sent[line][rank] = nbytes


# Nodes


def _divide_by_node(
    total: dict[Holders, int], nodes: Mapping[int, int]
) -> dict[Holders, list[int]]:
    """By set of holders: the bytes that each holder sends, nodes balanced before ranks."""
    _check_nodes(total, nodes)
    # What leaves from one node is a line by itself, which only the holders there send.
    lengths = []
    local_holders = []
    all_holders = []
    for held, local, nbytes in _divide_among_nodes(total, nodes):
        lengths.append(nbytes)
        local_holders.append(local)
        all_holders.append(held)
    sent = {held: dict.fromkeys(held, 0) for held in total}
    rows = shares(lengths, local_holders)
    for held, local, row in zip(all_holders, local_holders, rows, strict=True):
        by_rank = zip(local, row, strict=True)
        sent[held].update(by_rank)
    amounts = {}
    for held, by_holder in sent.items():
        amounts[held] = list(by_holder.values())
    return amounts


def _check_nodes(total: dict[Holders, int], nodes: Mapping[int, int]) -> None:
    """Raise PlanError for a holder without a node."""
    for held in total:
        for rank in held:
            if rank not in nodes:
                what = f"rank {rank} is one of the holders {held}, but has no node in nodes="
                raise PlanError(f"{what}; add its node")


def _divide_among_nodes(
    total: dict[Holders, int], nodes: Mapping[int, int]
) -> Iterator[tuple[Holders, Holders, int]]:
    """(holders of a line, its holders in a node, bytes that leave from there) for all lines and nodes."""
    holders_by_line = _list_shared(total)
    for (line, node), nbytes in _sum_by_node(total, nodes).items():
        held = holders_by_line[line]
        local = tuple(rank for rank in held if nodes[rank] == node)
        yield held, local, nbytes
    # A line with one holder is not a shared line.
    for held, nbytes in total.items():
        if len(held) == 1:
            yield held, held, nbytes


def _sum_by_node(total: dict[Holders, int], nodes: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """By shared line and node: the bytes that leave from there."""
    kinds = _find_kinds(total, nodes)
    rank_network = _rank_network(total, kinds)
    line_count = rank_network.first
    cap = _find_cap(_rank_network(total, kinds))  # which uses up its network
    network = _node_network(rank_network, kinds, cap)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for line, sink, nbytes in list_edges(network):
        # The lines behind these only fill ranks up to the cap.
        if line < line_count:
            kind = _find_kind(network, kinds, sink)
            sent[line, kind.node] += nbytes
    return sent


def _find_cap(network: Network) -> int:
    """The highest load of a rank, rounded up; the network cannot be used again."""
    cap = 0
    for leaf in list_leaves(network, top=True):  # one in each connected part
        load = -(-leaf.nbytes // leaf.weight)
        cap = max(cap, load)
    return cap


def _node_network(ranks: Network, kinds: list[_HolderKind], cap: int) -> Network:
    """The network in which every kind takes the bytes that fill its ranks to `cap`.

    Each kind has a further line of as many bytes, which the kind or its node may take. Numbers go
    first to lines, then to those further lines, then to kinds as sinks, then to nodes as sinks.
    """
    further = len(kinds)
    first = ranks.first + further
    sink_of = _number_nodes(kinds, first + further)
    reach = []
    for sinks in ranks.reach:
        reach.append([sink + further for sink in sinks])
    room = []
    base = {}
    base_of_node = dict.fromkeys(sink_of.values(), 0)
    for sink, kind in enumerate(kinds, first):
        count = len(kind.ranks)
        spare = count * (cap - kind.base)
        node_sink = sink_of[kind.node]
        room.append(spare)
        reach.append([sink, node_sink] if spare else [sink])
        # A sink takes level x weight - base bytes: a kind, without weight, takes `spare` at any level.
        base[sink] = -spare
        base_of_node[node_sink] += count * kind.base
    weight = dict.fromkeys(base, 0) | dict.fromkeys(base_of_node, 1)
    return Network(first, ranks.nbytes + room, reach, weight, base | base_of_node)


def _number_nodes(kinds: list[_HolderKind], first: int) -> dict[int, int]:
    """The sink of each node, ascending, from `first` on."""
    nodes = sorted({kind.node for kind in kinds})
    return {node: sink for sink, node in enumerate(nodes, first)}


def _group_lines(
    lengths: Sequence[int], holders: Sequence[Holders]
) -> dict[Holders, dict[int, int]]:
    """Group lines of bytes by the ranks that hold them: for each set in `holders`, sorted, line number -> bytes."""
    if len(lengths) != len(holders):
        what = f"there are {len(lengths)} lengths and {len(holders)} sets of holders"
        raise PlanError(f"{what}; give one length and one set per line")
    groups: dict[Holders, dict[int, int]] = {}
    pairs = zip(holders, lengths, strict=True)
    for line, (held, length) in enumerate(pairs):
        if length < 0:
            raise PlanError(f"lengths[{line}] is {length} bytes; give lengths of 0 or more")
        lines = groups.setdefault(held, {})
        lines[line] = operator.index(length)
    for held, lines in groups.items():
        if not _is_ascending(held):
            first = next(iter(lines))
            _raise_unordered(first, held)
    return {held: groups[held] for held in sorted(groups)}


def _is_ascending(held: Holders) -> bool:
    """Whether there are holders, each after the one before."""
    # map, because this looks at every set of holders: three times as fast as a comprehension.
    return bool(held) and all(map(operator.lt, held, held[1:]))


def _sum_groups(groups: dict[Holders, dict[int, int]]) -> dict[Holders, int]:
    """For each set of holders, the total bytes of its lines."""
    return {held: sum(lines.values()) for held, lines in groups.items()}


def _raise_unordered(line: int, held: Holders) -> None:
    """Raise PlanError for holders that are empty or not ascending."""
    for a, b in itertools.pairwise(held):
        if a >= b:
            what = f"holders[{line}] has rank {b} after rank {a}"
            raise PlanError(f"{what}; give ascending ranks: tuple(sorted(set(...)))")
    raise PlanError(
        f"holders[{line}] is empty; give a rank that holds the bytes, or leave them out"
    )


def _list_shared(total: dict[Holders, int]) -> list[Holders]:
    """Return the sets of several holders whose lines have any bytes; their places in the list number shared lines."""
    shared = []
    for held, nbytes in total.items():
        if nbytes and len(held) > 1:
            shared.append(held)
    return shared
