"""Buffer maps: flat buffers as text for people, with the positions of parameters and the amount of padding.

1. A row is a bucket, and its columns are ranks: rank r of n holds the r-th of n equal parts of every bucket, which is
   drawn below the rank's number. Rows are equally long for buckets of any size; numbers next to them tell the size.
2. Elements of no parameter are padding, between parameters and at the end of a bucket; shares are of elements.
3. The first `most` buckets are drawn. The `most` largest parameters of each have a letter, and a line with their
   position in the buffer, and in the flat array of the first rank that holds some of them.

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

from shardmath.base.arrays import Ints
from shardmath.base.errors import ParamLayoutError
from shardmath.base.text import show_share
from shardmath.buffers.param import read_positive
from shardmath.buffers.param_layout import PerBufferParamLayout
from shardmath.buffers.shares import shard_numel
from shardmath.display.pictures.elements import every
from shardmath.display.pictures.text import align, count, count_more, replace_unprintable

__all__ = [
    "Bucket",
    "BucketSpan",
    "buffer_map",
    "list_buckets",
    "make_gap",
    "read_arguments",
    "shape_of",
    "summarize",
]

LETTERS = string.ascii_lowercase + string.ascii_uppercase
OTHERS, PADDING = "#=", "."
KEY = 'a-z parameters, #= others, . padding, | between ranks; "at" is where in the flat array of its first rank'


class BucketSpan(NamedTuple):
    """A range of a bucket that is drawn as one piece in a picture. `several` is the number of parameters in the range:
    0 for padding, 1 for a single parameter, more for parameters that are drawn together."""

    start: int
    end: int
    name: str = ""
    shape: tuple[int, ...] | None = None
    padding: int = 0
    several: int = 1

    @property
    def numel(self) -> int:
        """The number of elements in the span."""
        return self.end - self.start


class Bucket(NamedTuple):
    """One bucket to be drawn: its position in the buffer, and its spans of parameters and padding, without gaps."""

    number: int
    start: int
    numel: int
    spans: tuple[BucketSpan, ...]
    ranks: int

    @property
    def params(self) -> list[BucketSpan]:
        """The spans that are parameters, not padding."""
        return [span for span in self.spans if span.several]

    @property
    def padding(self) -> int:
        """The number of padding elements in the bucket."""
        return sum(span.padding for span in self.spans)

    def within(self, span: BucketSpan) -> str:
        """The range of the span in the buffer as text, such as "[384, 484)"."""
        return f"[{self.start + span.start:,}, {self.start + span.end:,})"

    def held_by(self, span: BucketSpan) -> str:
        """A text, such as "0-1", with the ranks that hold some of the span; "none" if the span is empty."""
        if not span.numel:
            return "none"
        first = span.start * self.ranks // self.numel
        last = (span.end - 1) * self.ranks // self.numel
        return str(first) if first == last else f"{first}-{last}"

    def at(self, span: BucketSpan) -> int:
        """Return the position at which `span` begins in the flat array of the first rank that holds some of the span.
        Each rank's array consists of the rank's shares of all buckets, one after another."""
        size = max(self.numel // self.ranks, 1)
        return self.start // self.ranks + span.start % size


def list_buckets(layout: PerBufferParamLayout, ranks: int, most: int) -> list[Bucket]:
    """Return the first `most` buckets of the buffer with their spans (parameters and padding), for a picture of their
    division among `ranks` ranks."""
    borders = layout.bucket_indices[:most]
    params = _list_params(layout, borders)
    buckets = []
    for number, (start, end) in enumerate(borders):
        numel = end - start
        spans = tuple(_fill_gaps(params[number], numel))
        buckets.append(Bucket(number, start, numel, spans, ranks))
    return buckets


def _list_params(
    layout: PerBufferParamLayout, borders: Sequence[tuple[int, int]]
) -> list[list[BucketSpan]]:
    """The parameters in each of the buffer's first buckets, given by their borders."""
    by_bucket: list[list[BucketSpan]] = [[] for _ in borders]
    shapes = layout.shapes or [None] * len(layout.placed)
    for (name, where), shape in zip(layout.placed, shapes, strict=True):
        start, end, number = where
        if number < len(borders):
            first, _ = borders[number]
            by_bucket[number].append(BucketSpan(start - first, end - first, name, shape))
    return by_bucket


def _fill_gaps(spans: Iterable[BucketSpan], numel: int) -> Iterator[BucketSpan]:
    """The spans in order, with padding in all gaps."""
    end = 0
    for span in sorted(spans, key=_PLACE):
        if span.start > end:
            yield make_gap(end, span.start)
        yield span
        end = span.end
    if end < numel:
        yield make_gap(end, numel)


_PLACE = itemgetter(0, 1)
"""The sort key of spans: start and end."""


def make_gap(start: int, end: int) -> BucketSpan:
    """A span of padding from `start` to `end`."""
    return BucketSpan(start, end, padding=end - start, several=0)


# The content of a buffer, in numbers


def _filled_below(layout: PerBufferParamLayout) -> Callable[[Ints], Ints]:
    """A function from positions to the numbers of parameters' elements below each position."""
    filled = [(start, end) for _, (start, end, _) in layout.placed if end > start]
    filled.sort()
    starts, ends = np.array(filled or [(0, 0)], np.int64).T
    sizes = ends - starts
    before = sizes.cumsum() - sizes

    def below(positions: Ints) -> Ints:
        # The last parameter that starts at or before each position; if there is none, the first one.
        started = np.searchsorted(starts, positions, side="right")
        last = np.maximum(started - 1, 0)
        within = np.clip(positions - starts[last], 0, sizes[last])
        filled_below: Ints = before[last] + within
        return filled_below

    return below


def _count_padding(layout: PerBufferParamLayout, ranks: int) -> tuple[list[int], Ints]:
    """The padding elements of each bucket, and of each rank."""
    count_filled_below = _filled_below(layout)
    by_bucket = []
    by_rank = np.zeros(ranks, np.int64)
    for start, end in layout.bucket_indices:
        size = (end - start) // ranks
        borders = start + size * np.arange(ranks + 1, dtype=np.int64)
        padding = size - np.diff(count_filled_below(borders))
        by_bucket.append(int(padding.sum()))
        by_rank += padding
    return by_bucket, by_rank


def summarize(layout: PerBufferParamLayout, ranks: int) -> list[str]:
    """Lines of text about a buffer on `ranks` ranks: size, padding, and how padding differs by rank and bucket."""
    by_bucket, by_rank = _count_padding(layout, ranks)
    params = count(len(layout.placed), "parameter")
    buckets = count(len(by_bucket), "bucket")
    numel = count(layout.numel, "element")
    share = show_share(layout.padding, layout.numel)
    padding = f"{layout.padding:,} of them padding ({share})"
    lines = [f"{params} in {buckets}: {numel}, {padding}"]
    lines.append(_compare_ranks(layout, by_rank))
    if len(by_bucket) > 1 and layout.padding:
        lines.append(_name_worst(layout, by_bucket))
    return lines


def _name_worst(layout: PerBufferParamLayout, padding: Sequence[int]) -> str:
    """A line about the bucket with the largest share of padding, given each bucket's padding."""
    sizes = [end - start for start, end in layout.bucket_indices]
    shares = [amount / size if size else 0.0 for amount, size in zip(padding, sizes, strict=True)]
    worst = shares.index(max(shares))
    share = show_share(padding[worst], sizes[worst])
    return f"bucket with the largest share of padding: {worst:,}, {share}"


def _compare_ranks(layout: PerBufferParamLayout, by_rank: Ints) -> str:
    """A line about the size of each rank's part, and the least and the most padding; `by_rank` is each rank's."""
    ranks = len(by_rank)
    least = int(by_rank.argmin())
    most = int(by_rank.argmax())
    each = f"{layout.numel // ranks:,} elements"
    if ranks == 1:
        return f"1 rank has {each}"
    if by_rank[least] == by_rank[most]:
        return f"{ranks:,} ranks have {each} each, {by_rank[least]:,} of them padding"
    lowest = f"{by_rank[least]:,} on rank {least}"
    highest = f"{by_rank[most]:,} on rank {most}"
    return f"{ranks:,} ranks have {each} each; least padding: {lowest}, most: {highest}"


def read_arguments(
    layout: PerBufferParamLayout, shards: int, width: int, narrowest: int, most: int
) -> tuple[int, int, int]:
    """Check the arguments for a picture of the buffer `layout`, in which at most `most` buckets are drawn; return
    `shards`, `width` and `most` as ints. Raises ParamLayoutError for values that are not positive integers, for
    `shards` that do not fit the buffer, and for a `width` below `narrowest`."""
    if not isinstance(layout, PerBufferParamLayout):
        raise ParamLayoutError(
            f"{type(layout).__name__} is not a PerBufferParamLayout; "
            f"pass each value of full_layout's result separately"
        )
    ranks = read_positive(shards, "shards")
    wide = read_positive(width, "width")
    shard_numel(layout, ranks)
    if wide < narrowest:
        raise ParamLayoutError(f"width is {wide}; give at least {narrowest}")
    return ranks, wide, read_positive(most, "most (buckets to draw)")


def buffer_map(layout: PerBufferParamLayout, shards: int, *, width: int = 96, most: int = 8) -> str:
    """Return text about a flat buffer in `shards` shards: a summary, and for each of its first `most` buckets a bar of
    about `width` characters and a list of the largest parameters.

    The list has up to `most` of the bucket's largest parameters. The share of padding is of all buckets. A buffer that
    every rank holds whole has one shard. Raises ParamLayoutError if ranks do not divide a bucket evenly.
    """
    ranks, wide, most = read_arguments(layout, shards, width, narrowest=16, most=most)
    lines = [*summarize(layout, ranks), KEY]
    for bucket in list_buckets(layout, ranks, most):
        lines += ["", *_draw_bucket(bucket, wide, most)]
    for line in count_more(len(layout.bucket_indices), most, "bucket"):
        lines += ["", line]
    return "\n".join(lines)


def _draw_bucket(bucket: Bucket, width: int, most: int) -> Iterator[str]:
    """The lines of a bucket: a heading, a bar, and its largest parameters."""
    listed = _pick_largest(bucket, most)
    names = [span.name for span in listed]
    letters = dict(zip(names, LETTERS, strict=False))
    yield _head_bucket(bucket)
    yield from _draw_bar(bucket, letters, width)
    rows = [("", "elements", "ranks", "at", "shape", "parameter")]
    rows += [_make_row(bucket, span, letters[span.name]) for span in listed]
    yield from align(rows)
    yield from count_more(len(bucket.params), len(listed), "parameter")


def _pick_largest(bucket: Bucket, most: int) -> list[BucketSpan]:
    """The largest parameters, at most `most`, in order of position."""
    room = min(most, len(LETTERS))
    listed = heapq.nlargest(room, bucket.params, key=lambda span: span.numel)
    listed.sort(key=_PLACE)
    return listed


def _make_row(bucket: Bucket, span: BucketSpan, letter: str) -> tuple[str, str, str, str, str, str]:
    """The row of a parameter in the list."""
    elements = bucket.within(span)
    ranks = bucket.held_by(span)
    offset = f"{bucket.at(span):,}"
    name = replace_unprintable(span.name)
    return letter, elements, ranks, offset, shape_of(span), name


def _head_bucket(bucket: Bucket) -> str:
    """The heading of a bucket: its position, parameters and padding."""
    where = bucket.within(BucketSpan(0, bucket.numel))
    params = count(len(bucket.params), "parameter")
    share = show_share(bucket.padding, bucket.numel)
    return f"bucket {bucket.number:,} {where}: {params}, {bucket.padding:,} padding ({share})"


def shape_of(span: BucketSpan) -> str:
    """The shape of the span's parameter as text; "?" if it is unknown."""
    return "?" if span.shape is None else str(span.shape)


def _draw_bar(bucket: Bucket, letters: dict[str, str], width: int) -> tuple[str, str]:
    """The line of the ranks' numbers, and the line of the elements below them."""
    part_width = width // bucket.ranks
    # Narrow parts have no room for their ranks' numbers, nor for borders between them.
    if part_width < 4:
        ruler = _ticks(bucket.ranks, width)
        bar = _draw_cells(bucket, letters, width)
    else:
        cells = _draw_cells(bucket, letters, part_width * bucket.ranks)
        starts = range(0, len(cells), part_width)
        parts = [cells[i : i + part_width] for i in starts]
        numbers = [str(rank).ljust(part_width) for rank in range(bucket.ranks)]
        bar = "|".join(parts)
        ruler = "|".join(numbers)
    return f"     |{ruler}|", f"     |{bar}|"


def _ticks(ranks: int, width: int) -> str:
    """The numbers of some ranks, if there is no room for all; each stands at its rank's first character."""
    # The longest number, its line and two spaces.
    step = every(ranks, width, len(str(ranks)) + 3)
    ruler = [" "] * width
    for rank in range(0, ranks, step):
        start = rank * width // ranks
        text = f"|{rank}" if rank else "0"
        ruler[start : start + len(text)] = text
    # The last number may extend beyond the end.
    return "".join(ruler[:width])


def _draw_cells(bucket: Bucket, letters: dict[str, str], width: int) -> str:
    """The sign that fills most of each of `width` equal cells of the bucket."""
    amounts: list[Counter[str]] = [Counter() for _ in range(width)]
    for number, span in enumerate(bucket.spans):
        other = OTHERS[number % 2]
        sign = PADDING if span.padding else letters.get(span.name, other)
        for cell, amount in _measure_overlaps(span, bucket.numel, width):
            amounts[cell][sign] += amount
    return "".join(map(_pick_sign, amounts))


def _measure_overlaps(span: BucketSpan, numel: int, width: int) -> Iterator[tuple[int, int]]:
    """(cell, amount) of each overlap of a span with one of `width` equal cells of a bucket of `numel` elements."""
    if not span.numel:
        return
    # In units of 1/width of an element, a cell is `numel` long and all borders are integers.
    lo = span.start * width
    hi = span.end * width
    for cell in range(lo // numel, -(-hi // numel)):
        start = cell * numel
        begin = max(lo, start)
        end = min(hi, start + numel)
        yield cell, end - begin


def _pick_sign(cell: Counter[str]) -> str:
    """The sign with the largest amount in a cell; padding for an empty cell."""
    if not cell:
        return PADDING
    return max(cell, key=cell.__getitem__)
