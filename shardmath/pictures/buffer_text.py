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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmath.base import dtypes
from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.param import positive
from shardmath.buffers.param_layout import BufferKey, FullParamLayout, PerBufferParamLayout
from shardmath.buffers.shares import shard_numel
from shardmath.pictures.text import nbytes, table

__all__ = [
    "Bucket",
    "Piece",
    "buckets_of",
    "buffer_map",
    "buffer_table",
    "checked",
    "count",
    "every",
    "gap",
    "more_of",
    "shape_of",
    "share",
    "summary",
]

LETTERS = string.ascii_lowercase + string.ascii_uppercase
OTHERS, PADDING = "#=", "."
KEY = 'a-z parameters, #= others, . padding, | between ranks; "at" is where in the flat array of its first rank'


class Piece(NamedTuple):
    """Elements start..end-1 of a bucket: of one parameter, of padding (""), or, drawn as one, of `several`."""

    start: int
    end: int
    name: str = ""
    shape: tuple[int, ...] | None = None
    padding: int = 0
    several: int = 1

    @property
    def numel(self) -> int:
        return self.end - self.start


class Bucket(NamedTuple):
    """One bucket to be drawn: where it lies, and its pieces in order of their addresses, without a gap."""

    number: int
    start: int
    numel: int
    pieces: tuple[Piece, ...]
    ranks: int

    @property
    def params(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.several]

    @property
    def padding(self) -> int:
        return sum(piece.padding for piece in self.pieces)

    def within(self, piece: Piece) -> str:
        """Where in the buffer it lies."""
        return f"[{self.start + piece.start:,}, {self.start + piece.end:,})"

    def held_by(self, piece: Piece) -> str:
        """The ranks that have some of it."""
        if not piece.numel:
            return "none"
        first, last = (at * self.ranks // self.numel for at in (piece.start, piece.end - 1))
        return str(first) if first == last else f"{first}-{last}"

    def at(self, piece: Piece) -> int:
        """Where it begins in the flat array of the first rank that has some of it."""
        size = max(self.numel // self.ranks, 1)
        return self.start // self.ranks + piece.start % size


def buckets_of(layout: PerBufferParamLayout, ranks: int, most: int) -> list[Bucket]:
    """The first `most` buckets."""
    shapes = layout.shapes or [None] * len(layout.placed)
    spans = layout.bucket_indices[:most]
    held: list[list[Piece]] = [[] for _ in spans]
    for (name, (start, end, number)), shape in zip(layout.placed, shapes, strict=True):
        if number < len(spans):
            first = spans[number][0]
            held[number].append(Piece(start - first, end - first, name, shape))
    return [
        Bucket(number, start, end - start, tuple(_without_gaps(pieces, end - start)), ranks)
        for number, ((start, end), pieces) in enumerate(zip(spans, held, strict=True))
    ]


def _without_gaps(pieces: Iterable[Piece], numel: int) -> Iterator[Piece]:
    """The pieces in order, and padding wherever there is none."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece[:2]):
        if piece.start > end:
            yield gap(end, piece.start)
        yield piece
        end = piece.end
    if end < numel:
        yield gap(end, numel)


def gap(start: int, end: int) -> Piece:
    return Piece(start, end, padding=end - start, several=0)


def share(part: int, whole: int) -> str:
    """A part as people read it; what is there is never called nothing.

    >>> share(1, 8), share(0, 8), share(1, 10**6), share(0, 0)
    ('12.50 %', '0.00 %', '<0.01 %', '0.00 %')
    """
    percent = 100 * part / whole if whole else 0.0
    return "<0.01 %" if 0 < percent < 0.005 else f"{percent:.2f} %"


def count(number: int, what: str) -> str:
    """How many.

    >>> count(1, "bucket"), count(5059, "bucket")
    ('1 bucket', '5,059 buckets')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"


def more_of(number: int, most: int, what: str) -> list[str]:
    return [f"... and {count(number - most, f'more {what}')}"] if number > most else []


# What a buffer holds, in numbers


def _filled_below(layout: PerBufferParamLayout) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """The function from positions to how many elements of parameters lie below each."""
    spans = sorted((start, end) for _, (start, end, _) in layout.placed if end > start)
    starts, ends = np.array(spans or [(0, 0)], np.int64).T
    before = np.concatenate([[0], np.cumsum(ends - starts)[:-1]])

    def below(at: NDArray[np.int64]) -> NDArray[np.int64]:
        last = np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)
        filled: NDArray[np.int64] = before[last] + np.clip(
            at - starts[last], 0, ends[last] - starts[last]
        )
        return filled

    return below


def _paddings(layout: PerBufferParamLayout, ranks: int) -> tuple[list[int], NDArray[np.int64]]:
    """Elements of padding of each bucket, and of each rank."""
    below, by_rank, by_bucket = _filled_below(layout), np.zeros(ranks, np.int64), list[int]()
    for start, end in layout.bucket_indices:
        size = (end - start) // ranks
        borders = start + size * np.arange(ranks + 1, dtype=np.int64)
        padding = size - np.diff(below(borders))
        by_bucket.append(int(padding.sum()))
        by_rank += padding
    return by_bucket, by_rank


def summary(layout: PerBufferParamLayout, ranks: int) -> list[str]:
    by_bucket, by_rank = _paddings(layout, ranks)
    what = f"{count(len(layout.placed), 'parameter')} in {count(len(by_bucket), 'bucket')}"
    padding = f"{layout.padding:,} of them padding ({share(layout.padding, layout.numel)})"
    lines = [f"{what}: {count(layout.numel, 'element')}, {padding}", _even(layout, by_rank)]
    sizes = [end - start for start, end in layout.bucket_indices]
    if len(sizes) > 1 and layout.padding:
        worst = max(range(len(sizes)), key=lambda i: by_bucket[i] / sizes[i] if sizes[i] else 0.0)
        found = share(by_bucket[worst], sizes[worst])
        lines.append(f"bucket with the largest share of padding: {worst:,}, {found}")
    return lines


def _even(layout: PerBufferParamLayout, by_rank: NDArray[np.int64]) -> str:
    """What each rank has."""
    ranks, least, most = len(by_rank), int(by_rank.argmin()), int(by_rank.argmax())
    each = f"{layout.numel // ranks:,} elements"
    if ranks == 1:
        return f"1 rank has {each}"
    if by_rank[least] == by_rank[most]:
        return f"{ranks:,} ranks have {each} each, {by_rank[least]:,} of them padding"
    lowest, highest = f"{by_rank[least]:,} on rank {least}", f"{by_rank[most]:,} on rank {most}"
    return f"{ranks:,} ranks have {each} each; least padding: {lowest}, most: {highest}"


def checked(
    layout: PerBufferParamLayout, shards: int, width: int, narrowest: int, most: int
) -> tuple[int, int, int]:
    """Shards, width and `most`. Raises ParamLayoutError."""
    if not isinstance(layout, PerBufferParamLayout):
        raise ParamLayoutError(
            f"{type(layout).__name__} is no layout of one buffer; draw each value of full_layout"
        )
    ranks, wide = positive(shards, "shards"), positive(width, "width")
    shard_numel(layout, ranks)
    if wide < narrowest:
        raise ParamLayoutError(f"width is {wide}; give at least {narrowest}")
    return ranks, wide, positive(most, "most (buckets to draw)")


# Text


def buffer_map(layout: PerBufferParamLayout, shards: int, *, width: int = 96, most: int = 8) -> str:
    """The buckets of a buffer that `shards` ranks share, as bars of `width` characters and a list of parameters.

    Of all buckets it says the share of padding; of the first `most` it shows what lies where. A buffer that every rank
    has whole has one shard. Raises ParamLayoutError where ranks do not divide a bucket evenly.
    """
    ranks, wide, most = checked(layout, shards, width, 16, most)
    lines = [*summary(layout, ranks), KEY]
    for bucket in buckets_of(layout, ranks, most):
        lines += ["", *_bucket_lines(bucket, wide, most)]
    return "\n".join(
        [*lines, *(f"\n{line}" for line in more_of(len(layout.bucket_indices), most, "bucket"))]
    )


def _bucket_lines(bucket: Bucket, width: int, most: int) -> Iterator[str]:
    listed = heapq.nlargest(min(most, len(LETTERS)), bucket.params, key=lambda piece: piece.numel)
    listed.sort(key=lambda piece: piece[:2])
    letters = {piece.name: letter for piece, letter in zip(listed, LETTERS, strict=False)}
    padding = f"{bucket.padding:,} padding ({share(bucket.padding, bucket.numel)})"
    span = bucket.within(Piece(0, bucket.numel))
    yield f"bucket {bucket.number:,} {span}: {count(len(bucket.params), 'parameter')}, {padding}"
    yield from _bar(bucket, letters, width)
    rows = [
        (
            letters[p.name],
            bucket.within(p),
            bucket.held_by(p),
            f"{bucket.at(p):,}",
            shape_of(p),
            _on_one_line(p.name),
        )
        for p in listed
    ]
    yield from _columns([("", "elements", "ranks", "at", "shape", "parameter"), *rows])
    yield from more_of(len(bucket.params), len(listed), "parameter")


def _on_one_line(name: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in name)


def shape_of(piece: Piece) -> str:
    return "?" if piece.shape is None else str(piece.shape)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _bar(bucket: Bucket, letters: dict[str, str], width: int) -> tuple[str, str]:
    """The numbers of the ranks, and what lies below each."""
    each = width // bucket.ranks
    if each < 4:
        return f"     |{_ticks(bucket.ranks, width)}|", f"     |{_cells(bucket, letters, width)}|"
    cells = _cells(bucket, letters, each * bucket.ranks)
    ruler = "|".join(str(rank).ljust(each) for rank in range(bucket.ranks))
    return (
        f"     |{ruler}|",
        f"     |{'|'.join(cells[i : i + each] for i in range(0, len(cells), each))}|",
    )


def _ticks(ranks: int, width: int) -> str:
    """Ranks' numbers where there is room for some only: each stands at its rank's first character."""
    step = every(ranks, width, len(str(ranks)) + 3)
    out = [" "] * width
    for rank in range(0, ranks, step):
        at, text = rank * width // ranks, f"|{rank}" if rank else "0"
        out[at : at + len(text)] = text
    return "".join(out)[:width].ljust(width)


def every(ranks: int, width: float, room: float) -> int:
    """The least power of two such that so many ranks have room."""
    step = 1
    while step < ranks and step * width / ranks < room:
        step *= 2
    return step


def _cells(bucket: Bucket, letters: dict[str, str], width: int) -> str:
    """What has most of each of `width` equal parts of the bucket."""
    found: list[Counter[str]] = [Counter() for _ in range(width)]
    for number, piece in enumerate(bucket.pieces):
        sign = PADDING if piece.padding else letters.get(piece.name, OTHERS[number % 2])
        lo, hi = piece.start * width, piece.end * width
        for cell in range(lo // bucket.numel, -(-hi // bucket.numel)) if piece.numel else ():
            found[cell][sign] += min(hi, (cell + 1) * bucket.numel) - max(lo, cell * bucket.numel)
    return "".join(cell.most_common(1)[0][0] if cell else PADDING for cell in found)


def buffer_table(layouts: FullParamLayout) -> str:
    """The buffers of a model, a line each: which parameters share it, how many, elements, padding, gradients' bytes.

    Raises ParamLayoutError for what is no FullParamLayout.
    """
    if not isinstance(layouts, FullParamLayout):
        raise ParamLayoutError(
            f"{type(layouts).__name__} is not the buffers of a model; give what full_layout returns"
        )
    head = [
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
    ]
    rows = [
        [*_kind(key), *_counts([layout]), _bytes([(key, layout)])]
        for key, layout in layouts.entries
    ]
    if len(rows) > 1:
        rows.append(["all", "", "", "", *_counts(list(layouts.values())), _bytes(layouts.entries)])
    return table(head, rows)


def _kind(key: BufferKey) -> list[str]:
    marks = (key.is_expert_parallel, key.is_managed_by_layer_wise_optimizer)
    return [key.param_dtype, key.grad_dtype, *("yes" if mark else "no" for mark in marks)]


def _counts(layouts: Sequence[PerBufferParamLayout]) -> list[str]:
    numbers = [
        (len(one.placed), len(one.bucket_indices), one.numel, one.padding) for one in layouts
    ]
    params, buckets, numel, padding = map(sum, zip(*numbers, strict=True))
    return [f"{params:,}", f"{buckets:,}", f"{numel:,}", f"{padding:,}", share(padding, numel)]


def _bytes(entries: Iterable[tuple[BufferKey, PerBufferParamLayout]]) -> str:
    return nbytes(sum(layout.numel * dtypes.itemsize(key.grad_dtype) for key, layout in entries))
