"""Show: values as text for people; strings only. A notebook shows the picture of a value that has one.

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
from shardmath.plans.relabelling.relabelling import Relabelling

__all__ = ["Shown", "align", "buffer_table", "count", "count_more", "replace_unprintable", "show"]


def count(number: int, what: str) -> str:
    """How many.

    >>> count(1, "bucket"), count(5059, "bucket")
    ('1 bucket', '5,059 buckets')
    """
    plural = "" if number == 1 else "s"
    return f"{number:,} {what}{plural}"


def count_more(number: int, most: int, what: str) -> list[str]:
    """A line that counts what is not shown, if there is any."""
    if number <= most:
        return []
    more = count(number - most, f"more {what}")
    return [f"... and {more}"]


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines in which columns begin one below the other.

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
    """The name on one line, with blanks for what cannot be printed."""
    signs = [sign if sign.isprintable() else " " for sign in name]
    return "".join(signs)


LEGEND = "sender -> receiver operation [box of the tensor] of [box at the sender] to [box at the receiver], bytes"
"""What stands where in a transfer's line."""

MOST = 1 << 24
"""Lines; more than anybody reads."""


class Shown(str):
    """The text of `value`. Its repr is the text itself, and a notebook shows the value's picture, if it has one."""

    value: object

    def __new__(cls, text: str, value: object = None) -> Shown:
        made = super().__new__(cls, text)
        made.value = value
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html(self.value)


def show(value: object, most: int = 32) -> Shown:
    """Any value of shardmath as text: a layout as what each rank holds, a plan as what each rank sends and receives.

    At most `most` ranks, and of a plan as many transfers, are listed. A notebook shows meshes, layouts, plans and
    programs as pictures. Raises ShardError for what is not a value of shardmath.
    """
    room = as_integer(most, "most", PlanError)
    if not 0 <= room <= MOST:
        raise PlanError(f"most={room}; show at least 0 and at most {MOST} ranks and transfers")
    return Shown(_text(value, room), value)


@singledispatch
def _text(value: object, most: int) -> str:
    """The text of a value, which lists at most so many of its parts."""
    raise PlanError(f"{shown(value)} is not a value of shardmath; show takes a Layout or a Plan")


def _more(number: int, most: int, what: str) -> str:
    """A line that counts what is not listed."""
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
    """The first transfers, below a line that says what stands where."""
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
    rounds = f"{plural(program.slots, 'slot')} of {plural(program.turns, 'turn')}"
    room = f"at most {show_bytes(program.max_inflight_bytes)} under way per rank"
    head = f"{tensors} between {between}, {program.word_nodes()}: {rounds}, {room}"
    rows = [_program_row(program, rank) for rank in program.ranks[:most]]
    loads = make_table(["rank", "rounds", "messages", "sends", "receives"], rows)
    more = _more(len(program.ranks), most, "rank")
    operations = {str(one) for one in program.collectives.values()}
    found = [f"\nas one operation: {one}" for one in sorted(operations)[:most]]
    return f"{head}\n{loads}{more}{''.join(found)}"


def _program_row(program: Program, rank: int) -> list[object]:
    """What one rank does: rounds, messages, bytes sent and received."""
    rounds = program.for_rank(rank)
    count = sent = received = 0
    for one in rounds:
        count += len(one.messages)
        sent += sum(message.nbytes for message in one.sends)
        received += sum(message.nbytes for message in one.receives)
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
def _(relabelling: Relabelling, most: int) -> str:
    changed = [(old, new) for old, new in relabelling.pairs if old != new]
    listed = make_table(["rank", "becomes"], changed[:most])
    more = _more(len(changed), most, "rank")
    return f"{relabelling}\n{listed}{more}"


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
    """The buffers of a model, a line each: which parameters share it, how many, elements, padding, gradients' bytes.

    Raises ParamLayoutError for what is not a FullParamLayout.
    """
    if not isinstance(layouts, FullParamLayout):
        raise ParamLayoutError(
            f"{type(layouts).__name__} is not the buffers of a model; give what full_layout returns"
        )
    rows = []
    for key, layout in layouts.entries:
        nbytes = _count_bytes([(key, layout)])
        row = [*_describe(key), *_count([layout]), nbytes]
        rows.append(row)
    if len(rows) > 1:
        several = list(layouts.values())
        nbytes = _count_bytes(layouts.entries)
        row = ["all", "", "", "", *_count(several), nbytes]
        rows.append(row)
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
"""Of the columns of a table."""


def _describe(key: BufferKey) -> list[str]:
    """The first columns: what the parameters of a buffer have in common."""
    expert = "yes" if key.is_expert_parallel else "no"
    managed = "yes" if key.is_managed_by_layer_wise_optimizer else "no"
    return [key.param_dtype, key.grad_dtype, expert, managed]


def _count(layouts: Sequence[PerBufferParamLayout]) -> list[str]:
    """The columns of numbers, of several buffers together."""
    params = sum(len(one.placed) for one in layouts)
    buckets = sum(len(one.bucket_indices) for one in layouts)
    numel = sum(one.numel for one in layouts)
    padding = sum(one.padding for one in layouts)
    texts = [f"{amount:,}" for amount in (params, buckets, numel, padding)]
    share = show_share(padding, numel)
    return [*texts, share]


def _count_bytes(entries: Iterable[tuple[BufferKey, PerBufferParamLayout]]) -> str:
    """The bytes of the gradients."""
    total = 0
    for key, layout in entries:
        itemsize = dtypes.itemsize(key.grad_dtype)
        total += layout.numel * itemsize
    return show_bytes(total)
