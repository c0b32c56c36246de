"""Network: lines of bytes and the sinks that take them, decomposed into levels by maximum flows.

1. Kinds that lines connect are decomposed (Fujishige 1980): try to give every sink the average. A maximum flow does it,
   or its minimum cut separates the sinks that must take more from the others, which then take all that both may.
2. Bytes are multiplied by the weight of a part, so that its average is a whole number: there is no float.
3. The flow found is freed of cycles, so that it is a forest, and rounded from the roots on: every sum at a line or a
   sink stays what it was, rounded down or up.

>>> network = Network(2, [6, 4], [[2, 3], [3, 4]], {2: 1, 3: 1, 4: 1}, {2: 0, 3: 0, 4: 0})
>>> sorted(pieces(network))
[(0, 2, 4), (0, 3, 2), (1, 3, 1), (1, 4, 3)]
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

__all__ = ["Leaf", "Network", "Part", "Piece", "leaves", "pieces"]

Piece: TypeAlias = tuple[int, int, int]
"""Two places and the bytes that lie at both."""

SPREAD = 7919
"""A prime, so that its multiples are anywhere in a list."""


class Network(NamedTuple):
    """Lines and the sinks that take them; sinks are numbered after the lines, from `first` on.

    A sink takes level x `weight` - `base` bytes at some level. `reach` (of a line: its sinks) and `base` change as
    lines are left to fewer sinks: a line that is left to one sink has become part of its base.
    """

    first: int
    nbytes: list[int]
    reach: list[list[int]]
    weight: dict[int, int]
    base: dict[int, int]


# Levels


class Part(NamedTuple):
    """Lines and sinks that are decomposed by themselves."""

    lines: list[int]
    sinks: list[int]


class Leaf(NamedTuple):
    """Sinks that reach one level, `nbytes / weight`, by a flow `sent[sink][line]` of bytes times `weight`."""

    nbytes: int
    weight: int
    sinks: list[int]
    sent: dict[int, dict[int, int]]


def leaves(network: Network, *, top: bool = False) -> Iterator[Leaf]:
    """The decomposition; with `top`, of no part but those that may have the highest level. Uses the network up."""
    parts = [Part(list(range(network.first)), list(network.weight))]
    while parts:
        for part in _connected(network, parts.pop()):
            leaf, high = _averaged(network, part)
            if not high:
                yield leaf
                continue
            low = _without(network, part, high)
            parts += [low] * (not top)
            parts.append(
                Part([x for x in part.lines if x in high], [x for x in part.sinks if x in high])
            )


def _averaged(network: Network, part: Part) -> tuple[Leaf, Mapping[int, int]]:
    """The part with every sink at the average, and what has too much among itself for that."""
    nbytes = sum([network.nbytes[line] for line in part.lines]) + sum(
        [network.base[sink] for sink in part.sinks]
    )
    weight = sum([network.weight[sink] for sink in part.sinks])
    flow = _greedy(network, part, nbytes, weight)
    return Leaf(nbytes, weight, part.sinks, flow.sent), _overfull(network, flow)


def _undecided(network: Network, lines: list[int]) -> list[int]:
    """Lines that have several sinks; the others join the base of theirs."""
    out = []
    for line in lines:
        sinks = network.reach[line]
        if len(sinks) == 1:
            network.base[sinks[0]] += network.nbytes[line]
        else:
            out.append(line)
    return out


def _without(network: Network, part: Part, high: Mapping[int, int]) -> Part:
    """What remains without the high part; lines that both could take go to the sinks that remain."""
    low = [line for line in part.lines if line not in high]
    for line in low:
        network.reach[line] = [sink for sink in network.reach[line] if sink not in high]
    return Part(low, [sink for sink in part.sinks if sink not in high])


def _connected(network: Network, part: Part) -> list[Part]:
    """The part, as parts that share nothing, without lines that have one sink."""
    lines, sinks = _undecided(network, part.lines), part.sinks
    if lines and _all_near(network, lines) == len(sinks):
        return [Part(lines, sinks)]
    label = {sink: sink for sink in sinks}
    members = {sink: [sink] for sink in sinks}
    for line in lines:
        found = {label[sink] for sink in network.reach[line]}
        if len(found) > 1:
            _join(label, members, found)
    parts = {part: Part([], []) for part in members}
    for sink in sinks:
        parts[label[sink]].sinks.append(sink)
    for line in lines:
        parts[label[network.reach[line][0]]].lines.append(line)
    return list(parts.values())


def _all_near(network: Network, lines: list[int]) -> int:
    """How many sinks two passes find to be connected to the first line."""
    seen = set(network.reach[lines[0]])
    for line in itertools.chain(lines, reversed(lines)):
        if not seen.isdisjoint(network.reach[line]):
            seen.update(network.reach[line])
    return len(seen)


def _join(label: dict[int, int], members: dict[int, list[int]], found: set[int]) -> None:
    """Make the found parts one, under the label of the largest."""
    keep = max(found, key=lambda part: len(members[part]))
    for part in found - {keep}:
        label.update(dict.fromkeys(members[part], keep))
        members[keep] += members.pop(part)


# Maximum flow (Dinic 1970)


class _Flow(NamedTuple):
    """Bytes times a scale: `left` of each line, `spare` at each sink, `sent[sink][line]`; no zeros but in `spare`.

    Sinks that are `over` carry more than they may before any line is sent.
    """

    left: dict[int, int]
    spare: dict[int, int]
    sent: dict[int, dict[int, int]]
    over: list[int]


def _greedy(network: Network, part: Part, nbytes: int, weight: int) -> _Flow:
    """Longest line first, each whole to the sink with most to spare if it fits: whole lines are few pieces."""
    scale = weight or 1
    room = {sink: nbytes * network.weight[sink] - scale * network.base[sink] for sink in part.sinks}
    over = [sink for sink, spare in room.items() if spare < 0]
    flow = _Flow({}, room | dict.fromkeys(over, 0), {sink: {} for sink in part.sinks}, over)
    spare, sent = flow.spare, flow.sent
    most = spare.__getitem__
    for line in sorted(part.lines, key=network.nbytes.__getitem__, reverse=True):
        size, sinks = network.nbytes[line] * scale, network.reach[line]
        sink = max(sinks, key=most)
        if size <= spare[sink]:
            spare[sink] -= size
            sent[sink][line] = size
        else:
            _spill(flow, line, size, sorted(sinks, key=most, reverse=True))
    return flow


def _spill(flow: _Flow, line: int, size: int, sinks: list[int]) -> None:
    """Fill the sinks with the line, one after the other; some of it may be left."""
    for sink in sinks:
        amount = min(size, flow.spare[sink])
        if amount:
            flow.spare[sink] -= amount
            flow.sent[sink][line] = amount
            size -= amount
    if size:
        flow.left[line] = size


def _overfull(network: Network, flow: _Flow) -> Mapping[int, int]:
    """Make the flow maximum; lines and sinks that then have too much among themselves, the most there are.

    Shortest paths from all that is left, as Dinic has it. But what is left of one line does not pass another that has
    something left, and along a chain that takes a turn each: so every other turn starts from one line alone, anywhere.
    """
    for turn in itertools.count():
        starts = list(flow.left)
        if starts and turn > 8 and turn % 2:
            starts = [starts[turn * SPREAD % len(starts)]]
        layers, room = _layers(network, flow, starts)
        if room:
            _augment(network, flow, layers, room)
        elif len(starts) == len(flow.left):
            break
    return layers | dict.fromkeys(flow.over, 0)


def _augment(network: Network, flow: _Flow, layers: dict[int, int], room: int) -> None:
    """Send what is left to sinks with room, layer by layer, until no path is left or no sink has room."""
    arcs: dict[int, list[int]] = {}
    for line in [line for line in flow.left if line in layers]:
        while room and line in flow.left and (path := _path(network, flow, layers, arcs, line)):
            _push(flow, path)
            room -= not flow.spare[path[-1]]


def _layers(network: Network, flow: _Flow, starts: list[int]) -> tuple[dict[int, int], int]:
    """Distances of lines and sinks from the lines `starts`, and how many of the sinks have room."""
    layers = dict.fromkeys(starts, 0)
    front, depth, room = starts, 0, 0
    while front:
        depth += 2
        sinks = _fresh(layers, depth - 1, [network.reach[line] for line in front])
        room += sum([flow.spare[sink] > 0 for sink in sinks])
        front = _fresh(layers, depth, [flow.sent[sink] for sink in sinks])
    return layers, room


def _fresh(layers: dict[int, int], depth: int, ahead: Iterable[Iterable[int]]) -> list[int]:
    """What is ahead and in no layer yet; now it is in this one."""
    out = []
    for row in ahead:
        for node in row:
            if node not in layers:
                layers[node] = depth
                out.append(node)
    return out


def _path(
    network: Network, flow: _Flow, layers: dict[int, int], arcs: dict[int, list[int]], line: int
) -> list[int]:
    """Line, sink, line, ..., a sink with room, a layer further each; empty if there is no such path.

    `arcs` are what is ahead of each node and not yet known to lead nowhere.
    """
    path = [line]
    while path:
        node = path[-1]
        ahead = arcs.get(node)
        if node >= network.first:
            if flow.spare[node]:
                return path
            taken = flow.sent[node]
            while ahead and ahead[-1] not in taken:
                ahead.pop()
        if ahead is None:
            row: Iterable[int] = network.reach[node] if node < network.first else flow.sent[node]
            ahead = arcs[node] = [other for other in row if layers.get(other) == layers[node] + 1]
        if ahead:
            path.append(ahead[-1])
        else:
            path.pop()
            if path:
                arcs[path[-1]].pop()
    return path


def _push(flow: _Flow, path: list[int]) -> None:
    """Send along the path as much as it takes."""
    lines, sinks = path[::2], path[1::2]
    back = list(zip(lines[1:], sinks, strict=False))
    amount = min(
        flow.left[lines[0]], flow.spare[sinks[-1]], *[flow.sent[sink][line] for line, sink in back]
    )
    for line, sink in zip(lines, sinks, strict=True):
        flow.sent[sink][line] = flow.sent[sink].get(line, 0) + amount
    for line, sink in back:
        _take(flow.sent[sink], line, amount)
    _take(flow.left, lines[0], amount)
    flow.spare[sinks[-1]] -= amount


def _take(row: dict[int, int], line: int, amount: int) -> None:
    if row[line] == amount:
        del row[line]
    else:
        row[line] -= amount


# From a flow to integers


def pieces(network: Network) -> Iterator[Piece]:
    """What every sink takes of every line, in bytes; the network is used up."""
    for leaf in leaves(network):
        yield from _rounded(_forest(leaf.sent), leaf.weight or 1)
    for line, sinks in enumerate(network.reach):
        if len(sinks) == 1:
            yield line, sinks[0], network.nbytes[line]


def _forest(sent: dict[int, dict[int, int]]) -> list[Piece]:
    """The flow without cycles, as (child, parent, amount) of nodes (lines or sinks), children first. Uses `sent` up."""
    near: dict[int, dict[int, None]] = defaultdict(dict)
    for sink, row in sent.items():
        for line in row:
            near[line][sink] = near[sink][line] = None
    out: list[Piece] = []
    _peel(near, sent, out)
    arcs = {node: list(others) for node, others in near.items() if others}
    for root in arcs:
        if arcs[root]:
            _walk(arcs, sent, root, out)
    return out


def _peel(
    near: dict[int, dict[int, None]], sent: dict[int, dict[int, int]], out: list[Piece]
) -> None:
    """Put what is on no cycle into the forest, from the leaves on."""
    leaves = [node for node, others in near.items() if len(others) == 1]
    for leaf in leaves:
        if near[leaf]:
            parent, _ = near[leaf].popitem()
            del near[parent][leaf]
            out.append((leaf, parent, sent[max(leaf, parent)].pop(min(leaf, parent))))
            if len(near[parent]) == 1:
                leaves.append(parent)


def _walk(
    arcs: dict[int, list[int]], sent: dict[int, dict[int, int]], root: int, out: list[Piece]
) -> None:
    """Put all that is connected to the root into the forest.

    Walk on until an edge closes a cycle: move an amount around it until an edge of it is empty. Or until there is no
    way on: the last edge is one of the forest.
    """
    path, place = [root], {root: 0}
    while path:
        node, came = path[-1], path[-2] if len(path) > 1 else -1
        onward = _onward(arcs[node], sent, node, came)
        if onward is None:
            arcs[node].clear()
            del place[path.pop()]
            if path:
                out.append((node, came, sent[max(node, came)].pop(min(node, came))))
        elif onward in place:
            cycle = path[place[onward] :]
            _cancel(sent, cycle)
            del path[place[onward] + 1 :]
            for node in cycle[1:]:
                del place[node]
        else:
            place[onward] = len(path)
            path.append(onward)


def _onward(arcs: list[int], sent: dict[int, dict[int, int]], node: int, came: int) -> int | None:
    """A neighbour along an edge that is left, other than the one that we came from; edges that are gone are dropped."""
    onward, back = None, False
    while arcs and onward is None:
        other = arcs.pop()
        if other == came:
            back = True
        elif (node in sent[other]) if node < other else (other in sent[node]):
            onward = other
    if back:
        arcs.append(came)
    if onward is not None:
        arcs.append(onward)
    return onward


def _cancel(sent: dict[int, dict[int, int]], cycle: list[int]) -> None:
    """Move the least amount of every other edge of the cycle to the edges between."""
    if cycle[0] > cycle[1]:
        cycle = cycle[1:] + cycle[:1]
    lines, sinks = cycle[::2], cycle[1::2]
    back = lines[1:] + lines[:1]
    amount = min([sent[sink][line] for line, sink in zip(back, sinks, strict=True)])
    for line, sink, other in zip(lines, sinks, back, strict=True):
        sent[sink][line] += amount
        _take(sent[sink], other, amount)


def _rounded(forest: list[Piece], scale: int) -> Iterator[Piece]:
    """Every edge by `scale`, down or up, so that every sum at a line or sink is what it was, rounded down or up.

    From the roots on: what rounding has added at a node so far stays within a byte.
    """
    added: dict[int, int] = defaultdict(int)
    for child, parent, amount in reversed(forest):
        nbytes, rest = divmod(amount, scale)
        if rest:
            up = 2 * (rest - added[parent]) > scale
            nbytes += up
            added[parent] += scale * up - rest
            added[child] += scale * up - rest
        if nbytes:
            yield min(child, parent), max(child, parent), nbytes
