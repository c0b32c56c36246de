"""Show: values as text for people. A notebook shows a value's picture instead, if it has one.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> print(show(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")))
float32[9, 4] (tp dp n) h on dp=4 tp=2
rank  dp tp  local shape  dimension 0  dimension 1
   0   0  0       (2, 4)        [0:2]        [0:4]
   1   0  1       (1, 4)        [5:6]        [0:4]
   2   1  0       (2, 4)        [2:4]        [0:4]
   3   1  1       (1, 4)        [6:7]        [0:4]
   4   2  0       (1, 4)        [4:5]        [0:4]
   5   2  1       (1, 4)        [7:8]        [0:4]
   6   3  0       (0, 4)           []        [0:4]
   7   3  1       (1, 4)        [8:9]        [0:4]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer
from shardmath.base.drawn import html
from shardmath.base.errors import ParamLayoutError, PlanError
from shardmath.base.text import make_table, plural, show_bytes, show_seconds, show_share, shown
from shardmath.buffers.grouping import BufferKey, FullParamLayout
from shardmath.buffers.param_layout import PerBufferParamLayout
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.collectives.collective import Collective
from shardmath.plans.flows.certificate import Certificate
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program
from shardmath.plans.relabeling.relabeling import Relabeling

__all__ = ["Shown", "align", "buffer_table", "count", "count_more", "replace_unprintable", "show"]


def count(number: int, what: str) -> str:
    """The number with its noun `what`, such as "1 bucket" or "5,059 buckets".

    >>> count(1, "bucket"), count(5059, "bucket")
    ('1 bucket', '5,059 buckets')
    """
    plural = "" if number == 1 else "s"
    return f"{number:,} {what}{plural}"


def count_more(number: int, most: int, what: str) -> list[str]:
    """Return a list with one line, such as "... and 3 more buckets", if only `most` of `number` items are shown; if
    `number` is not above `most`, return []. `what` is the singular noun for an item."""
    if number <= most:
        return []
    more = count(number - most, f"more {what}")
    return [f"... and {more}"]


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row as a line of text, with the columns aligned.

    >>> list(align([("a", "of"), ("three", "w")]))
    ['a      of', 'three  w']
    """
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join(cells)
        yield line.rstrip()


def replace_unprintable(name: str) -> str:
    """The name with its unprintable characters, line breaks included, replaced by blanks."""
    return "".join(character if character.isprintable() else " " for character in name)


LEGEND = "sender -> receiver operation [box of the tensor] of [box at the sender] to [box at the receiver], bytes"
"""The order of items in a transfer's line."""

MOST = 1 << 24
"""The most lines that `show` accepts; more than anybody reads."""


class Shown(str):
    """A str that describes the object `value`. Its repr is the text itself, without quotes; a notebook shows a picture
    of `value` instead, if there is one."""

    value: object

    def __new__(cls, text: str, value: object = None) -> Shown:
        self = super().__new__(cls, text)
        self.value = value
        return self

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html(self.value)


def show(value: object, most: int = 32) -> Shown:
    """Return text about `value`, such as a layout (with each rank's elements) or a plan (with each rank's bytes),
    listing at most `most` ranks and `most` transfers.

    A notebook shows meshes, layouts, plans, programs and certificates as pictures. Raises ShardError for anything but a
    value of shardmath.
    """
    room = as_integer(most, "most", PlanError)
    if not 0 <= room <= MOST:
        what = f"most={room} ranks and transfers cannot be shown"
        raise PlanError(f"{what}; pass a number from 0 to {MOST}")
    return Shown(_text(value, room), value)


@singledispatch
def _text(value: object, most: int) -> str:
    """The text of a value, with at most `most` items of each list. Raises PlanError for a class without a text."""
    kind = type(value).__name__
    raise PlanError(
        f"show cannot show a {kind}, {shown(value)}; pass a Mesh, a Layout, a Plan or a Program"
    )


def _more(number: int, most: int, what: str) -> str:
    """A line that counts the items beyond `most`, after a line break; "" if there are none."""
    if number <= most:
        return ""
    return f"\n... and {plural(number - most, f'more {what}')}"


@_text.register
def _(mesh: Mesh, most: int) -> str:
    sizes = [f"{name}={n}" for name, n in mesh.axes]
    axes = " ".join(sizes) or "one rank"
    rows = []
    for rank in mesh.ranks[:most]:
        coords = mesh.coords(rank)
        rows.append([rank, *coords.values()])
    listed = make_table(["rank", *mesh.shape], rows)
    more = _more(mesh.size, most, "rank")
    return f"{axes}\n{listed}{more}"


@_text.register
def _(layout: Layout, most: int) -> str:
    axes = " ".join(layout.mesh.shape)
    dimensions = [f"dimension {d}" for d in range(layout.ndim)]
    head = ["rank", axes, "local shape", *dimensions]
    rows: list[list[object]] = []
    for rank in layout.mesh.ranks[:most]:
        coords = _write_coords(layout.mesh, rank)
        shape = layout.local_shape(rank)
        rows.append([rank, coords, shape, *layout.runs(rank)])
    if not axes:
        # A mesh of one rank has no coordinates to show.
        del head[1]
        for row in rows:
            del row[1]
    listed = make_table(head, rows)
    more = _more(layout.mesh.size, most, "rank")
    return f"{layout}\n{listed}{more}"


def _write_coords(mesh: Mesh, rank: int) -> str:
    """The coordinates of a rank, each below the end of its axis's name."""
    coords = mesh.coords(rank).items()
    texts = [str(x).rjust(len(name)) for name, x in coords]
    return " ".join(texts)


@_text.register
def _(plan: Plan | Transposed, most: int) -> str:
    sent = plan.sent_bytes()
    received = plan.received_bytes()
    rows = []
    for rank in plan.ranks[:most]:
        row = [rank, show_bytes(sent[rank]), show_bytes(received[rank])]
        rows.append(row)
    loads = make_table(["rank", "sends", "receives"], rows)
    tensors = plural(plan.src, "tensor")
    if plan.in_part:
        tensors += f", {len(plan.in_part)} of which the destination holds in part"
    between = f"{len(plan.src_ranks)} and {len(plan.dst_ranks)} ranks"
    total = sum(sent.values())
    head = f"{show_bytes(total)} between {between}, {tensors}"
    more = _more(len(plan.ranks), most, "rank")
    return f"{head}\n{loads}{more}\n{_transfers(plan, most)}"


def _transfers(plan: Plan | Transposed, most: int) -> str:
    """The first transfers, below a line that explains their format."""
    listed = list(itertools.islice(plan.transfers(), most + 1))
    if not listed:
        return ""
    texts = [LEGEND, *map(str, listed[:most])]
    if len(listed) > most:
        texts.append("...")
    return "\n".join(texts)


@_text.register
def _(program: Program, most: int) -> str:
    p = program.plan
    tensors = plural(p.src, "tensor")
    between = f"{len(p.src_ranks)} and {len(p.dst_ranks)} ranks"
    room = f"at most {show_bytes(program.max_inflight_bytes)} under way per rank"
    rounds = program.word_rounds()
    head = f"{tensors} between {between}, {program.word_nodes()}: {rounds}, {room}"
    rows = [_program_row(program, rank) for rank in program.ranks[:most]]
    loads = make_table(["rank", "rounds", "messages", "sends", "receives"], rows)
    more = _more(len(program.ranks), most, "rank")
    operations = sorted({str(collective) for collective in program.collectives.values()})
    listed = [f"\nas one operation: {operation}" for operation in operations[:most]]
    return f"{head}\n{loads}{more}{''.join(listed)}"


def _program_row(program: Program, rank: int) -> list[object]:
    """A rank, and the numbers of its rounds, messages, and bytes sent and received."""
    rounds = program.for_rank(rank)
    count = sent = received = 0
    for turn in rounds:
        count += len(turn.messages)
        sent += sum(message.nbytes for message in turn.sends)
        received += sum(message.nbytes for message in turn.receives)
    return [rank, len(rounds), count, show_bytes(sent), show_bytes(received)]


@_text.register
def _(topology: Topology, most: int) -> str:
    node = f"nodes of {plural(topology.ranks_per_node, 'rank')}"
    inside = f"{show_bytes(topology.intra_bytes_per_s)}/s inside a node"
    between = f"{show_bytes(topology.inter_bytes_per_s)}/s to other nodes"
    latency = f"{show_seconds(topology.latency_s)} per message"
    return f"{node}; per rank and direction {inside}, {between}; {latency}"


@_text.register
def _(certificate: Certificate, most: int) -> str:
    witness = certificate.witness
    rows = [["plan", show_seconds(certificate.plan_s)]]
    rows.append(["bound", show_seconds(certificate.bound_s)])
    rows.append(["ratio", f"{certificate.ratio:.4g}"])
    if witness is not None:
        way = "must take in" if witness.direction == "in" else "must give out"
        rate = f"{show_bytes(witness.bytes_per_s)}/s"
        rows.append([way, f"{show_bytes(witness.nbytes)} at {rate}"])
        ranks = ", ".join(map(str, witness.ranks[:most]))
        if len(witness.ranks) > most:
            ranks += ", ..."
        rows.append(["ranks", ranks])
    width = max(len(name) for name, _ in rows)
    texts = [f"{name.rjust(width)}  {what}" for name, what in rows]
    return "\n".join([str(certificate), *texts])


@_text.register
def _(runs: Runs, most: int) -> str:
    holes = len(runs) - runs.size
    head = f"{plural(runs.size, 'position')} of a dimension, {plural(holes, 'hole')}"
    rows = []
    for local, start, n in runs.segments[:most]:
        row = [f"{local}:{local + n}", f"{start}:{start + n}"]
        rows.append(row)
    listed = make_table(["local", "global"], rows)
    more = _more(len(runs.segments), most, "range")
    return f"{head}\n{listed}{more}"


@_text.register
def _(relabeling: Relabeling, most: int) -> str:
    changed = [(old, new) for old, new in relabeling.pairs if old != new]
    listed = make_table(["rank", "becomes"], changed[:most])
    more = _more(len(changed), most, "rank")
    return f"{relabeling}\n{listed}{more}"


@_text.register
def _(collective: Collective, most: int) -> str:
    groups = collective.groups
    texts = [f"group of ranks {_members(group)}" for group in groups[:most]]
    listed = "\n".join([str(collective), *texts])
    more = _more(len(groups), most, "group")
    return f"{listed}{more}"


def _members(ranks: Sequence[int]) -> str:
    """The first ranks of a group."""
    texts = [str(rank) for rank in ranks[:MOST_MEMBERS]]
    if len(ranks) > MOST_MEMBERS:
        texts.append("...")
    return ", ".join(texts)


MOST_MEMBERS = 16
"""Ranks of a group that are listed."""


def buffer_table(layouts: FullParamLayout) -> str:
    """A text table with one row per flat buffer of a model: the dtypes of its parameters and gradients, and its numbers
    of parameters, elements, padding elements and bytes of gradients.

    Raises ParamLayoutError for anything but a FullParamLayout.
    """
    if not isinstance(layouts, FullParamLayout):
        raise ParamLayoutError(
            f"{type(layouts).__name__} is not a FullParamLayout; pass the result of full_layout"
        )
    rows = []
    for key, layout in layouts.entries:
        rows.append([*_describe_key(key), *_sum_sizes([layout]), _sum_bytes([(key, layout)])])
    if len(rows) > 1:
        sums = _sum_sizes(list(layouts.values()))
        rows.append(["all", "", "", "", *sums, _sum_bytes(layouts.entries)])
    return make_table(HEAD, rows)


HEAD = (
    "dtype",
    "gradients",
    "expert",
    "managed",
    "parameters",
    "buckets",
    "elements",
    "padding",
    "share",
    "bytes",
)
"""The columns of a buffer table."""


def _describe_key(key: BufferKey) -> list[str]:
    """The first columns: the properties that the parameters of a buffer share."""
    expert = "yes" if key.is_expert_parallel else "no"
    managed = "yes" if key.is_managed_by_layer_wise_optimizer else "no"
    return [key.param_dtype, key.grad_dtype, expert, managed]


def _sum_sizes(layouts: Sequence[PerBufferParamLayout]) -> list[str]:
    """The columns of numbers, summed over these buffers."""
    params = sum(len(layout.placed) for layout in layouts)
    buckets = sum(len(layout.bucket_indices) for layout in layouts)
    numel = sum(layout.numel for layout in layouts)
    padding = sum(layout.padding for layout in layouts)
    texts = [f"{amount:,}" for amount in (params, buckets, numel, padding)]
    return [*texts, show_share(padding, numel)]


def _sum_bytes(entries: Iterable[tuple[BufferKey, PerBufferParamLayout]]) -> str:
    """The bytes of the gradients of these buffers."""
    total = 0
    for key, layout in entries:
        itemsize = dtypes.itemsize(key.grad_dtype)
        total += layout.numel * itemsize
    return show_bytes(total)
