"""Buffer maps: flat buffers as text for people, what lies where and how much is padding; strings only.

1. A row is a bucket, and its columns are ranks: rank r of n has the r-th n-th of every bucket, so that below a rank
   stands what that rank holds. Rows are equally long, whatever their buckets hold; numbers beside them say that.
2. What no parameter has is padding, between parameters as at the end of a bucket; shares are of elements.
3. The first `most` buckets are drawn. The `most` largest parameters of each have a letter, and a line that says where
   they lie: in the buffer, and in the flat array of the first rank that has some of them.

>>> from shardmath.buffers import Param, distributed_optimizer
>>> params = [Param("w", (20, 10)), Param("b", (100,)), Param("emb", (300,), shared_embedding=True)]
>>> print(buffer_map(distributed_optimizer(params, data_parallel_world_size=2), 2, width=40))
3 parameters in 2 buckets: 768 elements, 168 of them padding (21.88 %)
2 ranks have 384 elements each; least padding: 28 on rank 0, most: 140 on rank 1
bucket with the largest share of padding: 0, 21.88 %
a-z parameters, #= others, . padding, | between ranks; "at" is where in the flat array of its first rank
<BLANKLINE>
bucket 0 [0, 384): 1 parameter, 84 padding (21.88 %)
     |0                   |1                   |
     |aaaaaaaaaaaaaaaaaaaa|aaaaaaaaaaa.........|
   elements  ranks  at  shape   parameter
a  [0, 300)  0-1    0   (300,)  emb
<BLANKLINE>
bucket 1 [384, 768): 2 parameters, 84 padding (21.88 %)
     |0                   |1                   |
     |aaaaaaaaaa...bbbbbbb|bbbbbbbbbbbbbb......|
   elements    ranks  at   shape     parameter
a  [384, 484)  0      192  (100,)    b
b  [512, 712)  0-1    320  (20, 10)  w
"""

from __future__ import annotations

import heapq
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from shardmath.base import dtypes
from shardmath.base.arrays import Ints
from shardmath.base.errors import ParamLayoutError
from shardmath.base.text import make_table, show_bytes, show_share
from shardmath.buffers.grouping import BufferKey, FullParamLayout
from shardmath.buffers.param import read_positive
from shardmath.buffers.param_layout import PerBufferParamLayout
from shardmath.buffers.shares import shard_numel
from shardmath.pictures.elements import every
from shardmath.pictures.text import count, count_more

__all__ = [
    "Bucket",
    "Span",
    "buffer_map",
    "buffer_table",
    "list_buckets",
    "make_gap",
    "read_arguments",
    "shape_of",
    "summarize",
]

LETTERS = string.ascii_lowercase + string.ascii_uppercase
OTHERS, PADDING = "#=", "."
KEY = 'a-z parameters, #= others, . padding, | between ranks; "at" is where in the flat array of its first rank'


class Span(NamedTuple):
    """Elements start..end-1 of a bucket: of one parameter, of padding (""), or, drawn as one, of `several`."""

    start: int
    end: int
    name: str = ""
    shape: tuple[int, ...] | None = None
    padding: int = 0
    several: int = 1

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.start


class Bucket(NamedTuple):
    """One bucket to be drawn: where it lies, and its spans in order of their addresses, without a gap."""

    number: int
    start: int
    numel: int
    spans: tuple[Span, ...]
    ranks: int

    @property
    def params(self) -> list[Span]:
        """The spans of parameters."""
        return [span for span in self.spans if span.several]

    @property
    def padding(self) -> int:
        """Elements of padding."""
        return sum(span.padding for span in self.spans)

    def within(self, span: Span) -> str:
        """Where in the buffer it lies."""
        return f"[{self.start + span.start:,}, {self.start + span.end:,})"

    def held_by(self, span: Span) -> str:
        """The ranks that have some of it."""
        if not span.numel:
            return "none"
        first = span.start * self.ranks // self.numel
        last = (span.end - 1) * self.ranks // self.numel
        return str(first) if first == last else f"{first}-{last}"

    def at(self, span: Span) -> int:
        """Where it begins in the flat array of the first rank that has some of it."""
        size = max(self.numel // self.ranks, 1)
        return self.start // self.ranks + span.start % size


def list_buckets(layout: PerBufferParamLayout, ranks: int, most: int) -> list[Bucket]:
    """The first `most` buckets."""
    borders = layout.bucket_indices[:most]
    shapes = layout.shapes or [None] * len(layout.placed)
    held: list[list[Span]] = [[] for _ in borders]
    for (name, (start, end, number)), shape in zip(layout.placed, shapes, strict=True):
        if number < len(borders):
            first, _ = borders[number]
            held[number].append(Span(start - first, end - first, name, shape))
    buckets = []
    for number, (start, end) in enumerate(borders):
        numel = end - start
        spans = _fill_gaps(held[number], numel)
        buckets.append(Bucket(number, start, numel, tuple(spans), ranks))
    return buckets


def _fill_gaps(spans: Iterable[Span], numel: int) -> Iterator[Span]:
    """The spans in order, and padding wherever there is none."""
    end = 0
    for span in sorted(spans, key=_PLACE):
        if span.start > end:
            yield make_gap(end, span.start)
        yield span
        end = span.end
    if end < numel:
        yield make_gap(end, numel)


_PLACE = itemgetter(0, 1)
"""Start and end of a span, by which spans are sorted."""


def make_gap(start: int, end: int) -> Span:
    """Padding."""
    return Span(start, end, padding=end - start, several=0)


# What a buffer holds, in numbers


def _filled_below(layout: PerBufferParamLayout) -> Callable[[Ints], Ints]:
    """The function from positions to how many elements of parameters lie below each."""
    filled = sorted((start, end) for _, (start, end, _) in layout.placed if end > start)
    starts, ends = np.array(filled or [(0, 0)], np.int64).T
    sizes = ends - starts
    before = sizes.cumsum() - sizes

    def below(at: Ints) -> Ints:
        # The last parameter that starts at or before a position, or the first.
        last = np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)
        within = np.clip(at - starts[last], 0, sizes[last])
        found: Ints = before[last] + within
        return found

    return below


def _count_padding(layout: PerBufferParamLayout, ranks: int) -> tuple[list[int], Ints]:
    """Elements of padding of each bucket, and of each rank."""
    below = _filled_below(layout)
    by_bucket = []
    by_rank = np.zeros(ranks, np.int64)
    for start, end in layout.bucket_indices:
        size = (end - start) // ranks
        borders = start + size * np.arange(ranks + 1, dtype=np.int64)
        padding = size - np.diff(below(borders))
        by_bucket.append(int(padding.sum()))
        by_rank += padding
    return by_bucket, by_rank


def summarize(layout: PerBufferParamLayout, ranks: int) -> list[str]:
    """Lines on the whole buffer: how much it holds, how much of that is padding, and where most of it is."""
    by_bucket, by_rank = _count_padding(layout, ranks)
    params = count(len(layout.placed), "parameter")
    buckets = count(len(by_bucket), "bucket")
    part = show_share(layout.padding, layout.numel)
    padding = f"{layout.padding:,} of them padding ({part})"
    lines = [f"{params} in {buckets}: {count(layout.numel, 'element')}, {padding}"]
    lines.append(_compare_ranks(layout, by_rank))
    if len(by_bucket) > 1 and layout.padding:
        sizes = [end - start for start, end in layout.bucket_indices]
        parts = [own / size if size else 0.0 for own, size in zip(by_bucket, sizes, strict=True)]
        worst = parts.index(max(parts))
        found = show_share(by_bucket[worst], sizes[worst])
        lines.append(f"bucket with the largest share of padding: {worst:,}, {found}")
    return lines


def _compare_ranks(layout: PerBufferParamLayout, by_rank: Ints) -> str:
    """What each rank has."""
    ranks = len(by_rank)
    least = int(by_rank.argmin())
    most = int(by_rank.argmax())
    each = f"{layout.numel // ranks:,} elements"
    if ranks == 1:
        return f"1 rank has {each}"
    if by_rank[least] == by_rank[most]:
        return f"{ranks:,} ranks have {each} each, {by_rank[least]:,} of them padding"
    lowest, highest = f"{by_rank[least]:,} on rank {least}", f"{by_rank[most]:,} on rank {most}"
    return f"{ranks:,} ranks have {each} each; least padding: {lowest}, most: {highest}"


def read_arguments(
    layout: PerBufferParamLayout, shards: int, width: int, narrowest: int, most: int
) -> tuple[int, int, int]:
    """Shards, width and `most`. Raises ParamLayoutError."""
    if not isinstance(layout, PerBufferParamLayout):
        raise ParamLayoutError(
            f"{type(layout).__name__} is not a layout of one buffer; draw each value of full_layout"
        )
    ranks = read_positive(shards, "shards")
    wide = read_positive(width, "width")
    shard_numel(layout, ranks)
    if wide < narrowest:
        raise ParamLayoutError(f"width is {wide}; give at least {narrowest}")
    return ranks, wide, read_positive(most, "most (buckets to draw)")


def buffer_map(layout: PerBufferParamLayout, shards: int, *, width: int = 96, most: int = 8) -> str:
    """The buckets of a buffer that `shards` ranks share, as bars of `width` characters and a list of parameters.

    Of all buckets it says the share of padding; of the first `most` it shows what lies where. A buffer that every rank
    has all of has one shard. Raises ParamLayoutError where ranks do not divide a bucket evenly.
    """
    ranks, wide, most = read_arguments(layout, shards, width, 16, most)
    lines = [*summarize(layout, ranks), KEY]
    for bucket in list_buckets(layout, ranks, most):
        drawn = _draw_bucket(bucket, wide, most)
        lines += ["", *drawn]
    for line in count_more(len(layout.bucket_indices), most, "bucket"):
        lines += ["", line]
    return "\n".join(lines)


def _draw_bucket(bucket: Bucket, width: int, most: int) -> Iterator[str]:
    """The lines of a bucket: what it holds, a bar, and its largest parameters."""
    room = min(most, len(LETTERS))
    listed = heapq.nlargest(room, bucket.params, key=lambda span: span.numel)
    listed.sort(key=_PLACE)
    letters = {span.name: letter for span, letter in zip(listed, LETTERS, strict=False)}
    yield _head_bucket(bucket)
    yield from _draw_bar(bucket, letters, width)
    rows = [("", "elements", "ranks", "at", "shape", "parameter")]
    for span in listed:
        at = f"{bucket.at(span):,}"
        place = (bucket.within(span), bucket.held_by(span), at)
        rows.append((letters[span.name], *place, shape_of(span), _on_one_line(span.name)))
    yield from _align(rows)
    yield from count_more(len(bucket.params), len(listed), "parameter")


def _head_bucket(bucket: Bucket) -> str:
    """Where a bucket lies and how much it holds."""
    where = bucket.within(Span(0, bucket.numel))
    params = count(len(bucket.params), "parameter")
    part = show_share(bucket.padding, bucket.numel)
    return f"bucket {bucket.number:,} {where}: {params}, {bucket.padding:,} padding ({part})"


def _on_one_line(name: str) -> str:
    """The name with blanks for what cannot be printed."""
    return "".join(sign if sign.isprintable() else " " for sign in name)


def shape_of(span: Span) -> str:
    """The shape of the span's parameter as people read it."""
    return "?" if span.shape is None else str(span.shape)


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns that begin one below the other."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _draw_bar(bucket: Bucket, letters: dict[str, str], width: int) -> tuple[str, str]:
    """The numbers of the ranks, and what lies below each."""
    each = width // bucket.ranks
    if each < 4:
        ruler = _ticks(bucket.ranks, width)
        bar = _draw_cells(bucket, letters, width)
    else:
        cells = _draw_cells(bucket, letters, each * bucket.ranks)
        starts = range(0, len(cells), each)
        bar = "|".join(cells[i : i + each] for i in starts)
        ruler = "|".join(str(rank).ljust(each) for rank in range(bucket.ranks))
    return f"     |{ruler}|", f"     |{bar}|"


def _ticks(ranks: int, width: int) -> str:
    """Ranks' numbers where there is room for some only: each stands at its rank's first character."""
    step = every(ranks, width, len(str(ranks)) + 3)
    out = [" "] * width
    for rank in range(0, ranks, step):
        at = rank * width // ranks
        text = f"|{rank}" if rank else "0"
        out[at : at + len(text)] = text
    return "".join(out)[:width].ljust(width)


def _draw_cells(bucket: Bucket, letters: dict[str, str], width: int) -> str:
    """What has most of each of `width` equal parts of the bucket."""
    found: list[Counter[str]] = [Counter() for _ in range(width)]
    numel = bucket.numel
    for number, span in enumerate(bucket.spans):
        if not span.numel:
            continue
        sign = PADDING if span.padding else letters.get(span.name, OTHERS[number % 2])
        # In units of which a cell has `numel` and an element `width`, all borders are integers.
        lo = span.start * width
        hi = span.end * width
        for cell in range(lo // numel, -(-hi // numel)):
            begin = max(lo, cell * numel)
            end = min(hi, (cell + 1) * numel)
            found[cell][sign] += end - begin
    signs = [cell.most_common(1)[0][0] if cell else PADDING for cell in found]
    return "".join(signs)


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
        rows.append([*_describe(key), *_count([layout]), _count_bytes([(key, layout)])])
    if len(rows) > 1:
        every = list(layouts.values())
        rows.append(["all", "", "", "", *_count(every), _count_bytes(layouts.entries)])
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
    return [f"{params:,}", f"{buckets:,}", f"{numel:,}", f"{padding:,}", show_share(padding, numel)]


def _count_bytes(entries: Iterable[tuple[BufferKey, PerBufferParamLayout]]) -> str:
    """The bytes of the gradients."""
    total = 0
    for key, layout in entries:
        total += layout.numel * dtypes.itemsize(key.grad_dtype)
    return show_bytes(total)
