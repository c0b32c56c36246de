"""Network: lines of bytes and the sinks that take them, decomposed into levels by maximum flows.

The maximum flow is our own because scipy.sparse.csgraph.maximum_flow counts in int32, and bytes do
not fit: it answers 0 for a single arc of capacity 2**40 (scipy 1.17).

1. Kinds that lines connect are decomposed (Fujishige 1980): try to give every sink the average. A
   maximum flow does it, or its minimum cut separates the sinks that must take more from the others.
   The others then take all lines that both could take.
2. Bytes are multiplied by the weight of a part, so that its average is a whole number: there is no
   float.

>>> network = Network(2, [6, 4], [[2, 3], [3, 4]], {2: 1, 3: 1, 4: 1}, {2: 0, 3: 0, 4: 0})
>>> [(leaf.nbytes, leaf.weight, leaf.sinks) for leaf in list_leaves(network)]
[(10, 3, [2, 3, 4])]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Leaf", "Network", "Subnetwork", "list_leaves", "take"]

SPREAD = 7919
"""A prime, so that its multiples are spread over a list of any length."""


class Network(NamedTuple):
    """A flow network that decides who sends which bytes: bytes flow to sinks, the groups of ranks (or nodes) that will
    send them. Bytes that the same sinks can send have one id, below `first`; ids of sinks begin at `first`.

    At a level, a sink takes level x `weight` - `base` bytes. `reach` (the sinks of each line) and
    `base` change as lines lose sinks: a line with one sink left becomes part of that sink's base.
    """

    first: int
    nbytes: list[int]
    reach: list[list[int]]
    weight: dict[int, int]
    base: dict[int, int]


# Levels


class Subnetwork(NamedTuple):
    """The ids of the lines and sinks in a part of a Network that is balanced separately. A sink is a group of ranks, or
    a node; a line is bytes that the same sinks can send."""

    lines: list[int]
    sinks: list[int]


class Leaf(NamedTuple):
    """Groups of ranks, with ids `sinks`, that together send `nbytes` bytes, each in proportion to its weight in the
    Network; `weight` is the sum of these weights. The number of bytes with id l that group s sends is `sent[s][l] /
    weight`."""

    nbytes: int
    weight: int
    sinks: list[int]
    sent: dict[int, dict[int, int]]


def list_leaves(network: Network, *, top: bool = False) -> Iterator[Leaf]:
    """Share the bytes of `network` as evenly as possible among its sinks (groups of ranks that can send them), and
    yield a Leaf for each set of sinks with equal load. With `top`, yield only those with the highest load.

    Each connected part has its highest load. `network` cannot be used again.
    """
    all_lines = list(range(network.first))
    all_sinks = list(network.weight)
    parts = [Subnetwork(all_lines, all_sinks)]
    while parts:
        for part in _divide_connected(network, parts.pop()):
            leaf, high = _average(network, part)
            if not high:
                yield leaf
                continue
            low = _leave_low(network, part, high)
            if not top:
                parts.append(low)
            lines = [line for line in part.lines if line in high]
            sinks = [sink for sink in part.sinks if sink in high]
            parts.append(Subnetwork(lines, sinks))


def _average(network: Network, part: Subnetwork) -> tuple[Leaf, Mapping[int, int]]:
    """The part with every sink at the average; and, as the keys of a dict, the lines and sinks that have too many bytes
    for that."""
    nbytes = 0
    weight = 0
    for line in part.lines:
        nbytes += network.nbytes[line]
    for sink in part.sinks:
        nbytes += network.base[sink]
        weight += network.weight[sink]
    flow = _start_greedily(network, part, nbytes, weight)
    high = _maximize(network, flow)
    return Leaf(nbytes, weight, part.sinks, flow.sent), high


def _settle_decided(network: Network, lines: list[int]) -> list[int]:
    """The lines that have several sinks; each other line is added to the base of its sink."""
    out = []
    for line in lines:
        sinks = network.reach[line]
        if len(sinks) == 1:
            network.base[sinks[0]] += network.nbytes[line]
        else:
            out.append(line)
    return out


def _leave_low(network: Network, part: Subnetwork, high: Mapping[int, int]) -> Subnetwork:
    """The part without its high lines and sinks.

    Lines that both could take go to the sinks that remain: the high sinks have too much already.
    """
    lines = [line for line in part.lines if line not in high]
    sinks = [sink for sink in part.sinks if sink not in high]
    for line in lines:
        reached = network.reach[line]
        network.reach[line] = [sink for sink in reached if sink not in high]
    return Subnetwork(lines, sinks)


def _divide_connected(network: Network, part: Subnetwork) -> list[Subnetwork]:
    """The connected parts of a part, without lines that have one sink."""
    lines = _settle_decided(network, part.lines)
    sinks = part.sinks
    # Usually all sinks are near the first line: this is found faster than labels.
    if lines and _count_near(network, lines) == len(sinks):
        return [Subnetwork(lines, sinks)]
    label, distinct_labels = _label_connected(network, lines, sinks)
    parts = {each: Subnetwork([], []) for each in distinct_labels}
    for sink in sinks:
        parts[label[sink]].sinks.append(sink)
    for line in lines:
        any_sink = network.reach[line][0]
        parts[label[any_sink]].lines.append(line)
    return list(parts.values())


def _label_connected(
    network: Network, lines: list[int], sinks: list[int]
) -> tuple[dict[int, int], list[int]]:
    """A label for each sink, the same for sinks that lines connect; and the distinct labels."""
    label = {sink: sink for sink in sinks}
    members = {sink: [sink] for sink in sinks}
    for line in lines:
        connected = {label[sink] for sink in network.reach[line]}
        if len(connected) > 1:
            _merge_labels(label, members, connected)
    return label, list(members)


def _count_near(network: Network, lines: list[int]) -> int:
    """The number of sinks that two passes find connected to the first line.

    Usually all are connected, and then this is faster than labels.
    """
    seen = set(network.reach[lines[0]])
    for line in itertools.chain(lines, reversed(lines)):
        if not seen.isdisjoint(network.reach[line]):
            seen.update(network.reach[line])
    return len(seen)


def _merge_labels(label: dict[int, int], members: dict[int, list[int]], found: set[int]) -> None:
    """Merge the parts with the labels `found`, under the label of the largest."""
    keep = max(found, key=lambda part: len(members[part]))
    for part in found - {keep}:
        joining = members.pop(part)
        label.update(dict.fromkeys(joining, keep))
        members[keep] += joining


# Maximum flow (Dinic 1970)


class _Flow(NamedTuple):
    """Bytes times a scale: `left` of each line, `spare` at each sink, and what each sink takes.

    `sent[sink][line]` is the amount that the sink takes of the line; only `spare` keeps zeros. Sinks
    that are `over` have more than the average before any line is sent.
    """

    left: dict[int, int]
    spare: dict[int, int]
    sent: dict[int, dict[int, int]]
    over: list[int]


def _start_greedily(network: Network, part: Subnetwork, nbytes: int, weight: int) -> _Flow:
    """A flow to begin with: longest line first, to the sink with most to spare.

    A line goes whole to one sink if it fits: whole lines are few pieces.
    """
    # A part whose sinks weigh nothing is not scaled.
    scale = weight or 1
    flow = _empty_flow(network, part, nbytes, scale)
    spare_of_sink = flow.spare.__getitem__
    longest_first = sorted(part.lines, key=network.nbytes.__getitem__, reverse=True)
    for line in longest_first:
        size = network.nbytes[line] * scale
        sinks = network.reach[line]
        sink = max(sinks, key=spare_of_sink)
        if size <= flow.spare[sink]:
            flow.spare[sink] -= size
            flow.sent[sink][line] = size
        else:
            _spill(flow, line, size, sorted(sinks, key=spare_of_sink, reverse=True))
    return flow


def _empty_flow(network: Network, part: Subnetwork, nbytes: int, scale: int) -> _Flow:
    """A flow that sends no line: every sink can spare what it lacks of the average, `nbytes` / `scale`."""
    spare = {}
    over = []
    for sink in part.sinks:
        # Times the scale, as all bytes of a flow, which makes it a whole number.
        room = nbytes * network.weight[sink] - scale * network.base[sink]
        spare[sink] = max(room, 0)
        if room < 0:
            over.append(sink)
    sent: dict[int, dict[int, int]] = {sink: {} for sink in part.sinks}
    return _Flow({}, spare, sent, over)


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


def _maximize(network: Network, flow: _Flow) -> Mapping[int, int]:
    """Make the flow maximum; return, as keys, the lines and sinks that then have too much among themselves.

    Each turn takes shortest paths from all lines that have bytes left (Dinic). But bytes of one such line
    do not pass another such line, so a long chain of them would take one turn per line: after a few
    turns, every other turn starts from one line only, at a spread-out place.
    """
    for turn in itertools.count():
        starts = list(flow.left)
        if starts and turn > 8 and turn % 2:
            starts = [starts[turn * SPREAD % len(starts)]]
        layers, open_sinks = _find_layers(network, flow, starts)
        if open_sinks:
            _augment(network, flow, layers, open_sinks)
        elif len(starts) == len(flow.left):
            break  # no path is left from any line
    return layers | dict.fromkeys(flow.over, 0)


def _augment(network: Network, flow: _Flow, layers: dict[int, int], room: int) -> None:
    """Send remaining bytes to sinks with room, layer by layer, until no path is left, or none of the `room` sinks that
    have room."""
    # By node, the nodes ahead that are not known to be dead ends.
    arcs: dict[int, list[int]] = {}
    # A list, since a push may remove the line from `flow.left`.
    for line in [line for line in flow.left if line in layers]:
        while room and line in flow.left:
            path = _find_path(network, flow, layers, arcs, line)
            if not path:
                break
            _push(flow, path)
            if not flow.spare[path[-1]]:
                room -= 1


def _find_layers(network: Network, flow: _Flow, starts: list[int]) -> tuple[dict[int, int], int]:
    """Distances of lines and sinks from the lines `starts`, and how many sinks have room."""
    layers = dict.fromkeys(starts, 0)
    front = starts
    depth = 0  # of lines; sinks are in the odd layers between
    room = 0
    while front:
        depth += 2
        sinks_of_lines = [network.reach[line] for line in front]
        sinks = _enter_layer(layers, depth - 1, sinks_of_lines)
        room += sum([flow.spare[sink] > 0 for sink in sinks])
        # A sink leads on to the lines of which it takes some: they could go elsewhere.
        lines_of_sinks = [flow.sent[sink] for sink in sinks]
        front = _enter_layer(layers, depth, lines_of_sinks)
    return layers, room


def _enter_layer(layers: dict[int, int], depth: int, ahead: Iterable[Iterable[int]]) -> list[int]:
    """Put those nodes of `ahead` that are in no layer yet into layer `depth`; return them."""
    entered = []
    for nodes in ahead:
        for node in nodes:
            if node not in layers:
                layers[node] = depth
                entered.append(node)
    return entered


def _find_path(
    network: Network, flow: _Flow, layers: dict[int, int], arcs: dict[int, list[int]], line: int
) -> list[int]:
    """A path line, sink, line, ..., to a sink with room, one layer further each step; [] if there is none.

    `arcs` has the nodes ahead of each node that are not known to be dead ends.
    """
    path = [line]
    while path:
        node = path[-1]
        ahead = arcs.get(node)
        is_sink = node >= network.first
        if is_sink:
            if flow.spare[node]:
                return path
            # A push may have emptied the sink's share of a line: that way back is gone.
            sent_lines = flow.sent[node]
            while ahead and ahead[-1] not in sent_lines:
                ahead.pop()
        if ahead is None:
            ahead = arcs[node] = _list_ahead(network, flow, layers, node)
        if ahead:
            path.append(ahead[-1])
        else:
            path.pop()
            if path:
                arcs[path[-1]].pop()
    return path


def _list_ahead(network: Network, flow: _Flow, layers: dict[int, int], node: int) -> list[int]:
    """The nodes of the next layer to which a node leads: a line's sinks, or the lines of which a sink takes some."""
    row: Iterable[int] = network.reach[node] if node < network.first else flow.sent[node]
    next_layer = layers[node] + 1
    return [other for other in row if layers.get(other) == next_layer]


def _push(flow: _Flow, path: list[int]) -> None:
    """Send as many bytes along the path (line, sink, line, ..., sink) as it can carry.

    Every sink takes more of the line before it, and every sink except the last takes less of the line after it.
    """
    lines = path[::2]
    sinks = path[1::2]
    first_line, *later = lines
    last_sink = sinks[-1]
    rows = [flow.sent[sink] for sink in sinks]
    # Each line after a sink, with the sink's row; there is none after the last sink.
    reduced = list(zip(later, rows, strict=False))
    amount = min(flow.left[first_line], flow.spare[last_sink])
    for line, row in reduced:
        amount = min(amount, row[line])
    for line, row in zip(lines, rows, strict=True):
        before = row.get(line, 0)
        row[line] = before + amount
    for line, row in reduced:
        take(row, line, amount)
    take(flow.left, first_line, amount)
    flow.spare[last_sink] -= amount


def take(row: dict[int, int], line: int, amount: int) -> None:
    """Subtract `amount` from `row[line]`; remove `line` from the dict `row` if nothing is left."""
    if row[line] == amount:
        del row[line]
    else:
        row[line] -= amount
