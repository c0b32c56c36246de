"""Forest: the flow of a network freed of cycles and rounded, as edges of whole bytes.

The flow found is freed of cycles, so that it is a forest, and rounded from the roots on: every sum
at a line or a sink stays what it was, rounded down or up. A forest has fewer edges than lines and
sinks, so there are few pieces.

>>> from shardmath.plans.flows.network import Network
>>> network = Network(2, [6, 4], [[2, 3], [3, 4]], {2: 1, 3: 1, 4: 1}, {2: 0, 3: 0, 4: 0})
>>> sorted(list_edges(network))
[(0, 2, 4), (0, 3, 2), (1, 3, 1), (1, 4, 3)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from shardmath.plans.flows.network import Network, list_leaves, take

__all__ = ["Edge", "list_edges"]

Edge: TypeAlias = tuple[int, int, int]
"""Two nodes and the bytes between them."""

Sent: TypeAlias = dict[int, dict[int, int]]
"""The amount that each sink takes of each line: `sent[sink][line]`."""


def list_edges(network: Network) -> Iterator[Edge]:
    """Decide evenly who sends the bytes of `network`. Yield (line, sink, count): the group of ranks (or the node) with
    id `sink` sends `count` of the bytes that have the id `line`.

    Bytes are whole. Uses the network up.
    """
    for leaf in list_leaves(network):
        forest = _free_of_cycles(leaf.sent)
        yield from _round(forest, leaf.weight or 1)  # a network without sinks weighs 0
    # Lines that have one sink left are in no leaf.
    for line, sinks in enumerate(network.reach):
        if len(sinks) == 1:
            yield line, sinks[0], network.nbytes[line]


def _free_of_cycles(sent: Sent) -> list[Edge]:
    """The flow as a forest: (child, parent, amount) of nodes, children first. Uses `sent` up.

    Nodes are lines and sinks; a sink's number is higher than any line's.
    """
    near: dict[int, dict[int, None]] = defaultdict(dict)  # neighbors, as sets that keep their order
    for sink, row in sent.items():
        for line in row:
            near[line][sink] = None
            near[sink][line] = None
    out: list[Edge] = []
    _peel(near, sent, out)
    arcs = {node: list(others) for node, others in near.items() if others}
    for root in arcs:
        if arcs[root]:
            _cancel_cycles(arcs, sent, root, out)
    return out


def _peel(near: dict[int, dict[int, None]], sent: Sent, out: list[Edge]) -> None:
    """Move the edges that are on no cycle into the forest, beginning at the leaves."""
    leaf_nodes = [node for node, others in near.items() if len(others) == 1]
    for leaf in leaf_nodes:
        # Of two leaves with one edge, the first has taken the edge.
        if near[leaf]:
            parent, _ = near[leaf].popitem()
            del near[parent][leaf]
            amount = _pop_edge(sent, leaf, parent)
            out.append((leaf, parent, amount))
            if len(near[parent]) == 1:
                leaf_nodes.append(parent)  # the loop reaches it later


def _pop_edge(sent: Sent, a: int, b: int) -> int:
    """Remove the edge between two nodes from the flow; return its amount."""
    sink = max(a, b)
    line = min(a, b)
    return sent[sink].pop(line)


def _cancel_cycles(arcs: dict[int, list[int]], sent: Sent, root: int, out: list[Edge]) -> None:
    """Move everything that is connected to the root into the forest.

    Walk from the root. When an edge closes a cycle, move an amount around the cycle that empties one of
    its edges. When there is no way on, the last edge belongs to the forest.
    """
    path = [root]
    place = {root: 0}  # of each node of the path
    while path:
        node = path[-1]
        previous = path[-2] if len(path) > 1 else -1
        onward = _step(arcs[node], sent, node, previous)
        if onward is None:
            arcs[node].clear()
            path.pop()
            del place[node]
            if path:
                amount = _pop_edge(sent, node, previous)
                out.append((node, previous, amount))
        elif onward in place:
            start = place[onward]
            cycle = path[start:]
            _cancel(sent, cycle)
            del path[start + 1 :]
            for node in cycle[1:]:
                del place[node]
        else:
            place[onward] = len(path)
            path.append(onward)


def _step(arcs: list[int], sent: Sent, node: int, previous: int) -> int | None:
    """A neighbor along a remaining edge, other than the node that the walk came from; None if there is none.

    Drops edges that are gone from `arcs`.
    """
    onward = None
    saw_previous = False
    while arcs and onward is None:
        other = arcs.pop()
        if other == previous:
            saw_previous = True
        # Whether the edge is still in the flow; of its two nodes, the sink has the higher number.
        elif (node in sent[other]) if node < other else (other in sent[node]):
            onward = other
    # Both edges stay, the way back below the way on.
    if saw_previous:
        arcs.append(previous)
    if onward is not None:
        arcs.append(onward)
    return onward


def _cancel(sent: Sent, cycle: list[int]) -> None:
    """Take the least amount on every other edge of the cycle, which is of lines and sinks in turn, from all of these
    edges, and add it to the edges between them."""
    first, second = cycle[:2]
    if first > second:  # begin with a line: lines have lower numbers than sinks
        cycle = [*cycle[1:], first]
    lines = cycle[::2]
    sinks = cycle[1::2]
    next_lines = lines[1:] + lines[:1]  # the line after each sink
    rows = [sent[sink] for sink in sinks]
    amounts = [row[line] for line, row in zip(next_lines, rows, strict=True)]
    amount = min(amounts)
    for line, row, next_line in zip(lines, rows, next_lines, strict=True):
        row[line] += amount
        take(row, next_line, amount)


def _round(forest: list[Edge], scale: int) -> Iterator[Edge]:
    """Every edge divided by `scale` and rounded so that every sum at a line or sink is rounded down or up too.

    Rounding begins at the roots. The amount that it has added at a node stays within a byte.
    """
    added: dict[int, int] = defaultdict(int)
    for child, parent, amount in reversed(forest):
        nbytes, remainder = divmod(amount, scale)
        if remainder:
            # Up if that leaves less added or missing at the parent than down does.
            up = 2 * (remainder - added[parent]) > scale
            nbytes += up
            change = scale * up - remainder
            added[parent] += change
            added[child] += change
        if nbytes:
            # Of an edge's two nodes, the sink has the higher number.
            line = min(child, parent)
            sink = max(child, parent)
            yield line, sink, nbytes
