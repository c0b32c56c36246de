"""Buffer pictures: flat buffers as standalone SVG.

1. The arrangement is as in `buffer_map`: a row is a bucket, and each rank's part is drawn below the rank's number.
2. Spans that are too narrow to be seen are joined, up to the next border between ranks; each box's title names its
   content and its padding.
3. Colors are Okabe and Ito's, which the color-blind can tell apart; paper and text are light or dark, as in all
   pictures.

>>> from shardmath.buffers import Param, distributed_optimizer
>>> picture = buffer_svg(distributed_optimizer([Param("a.w", (90,))], data_parallel_world_size=2), 2, title="a < b")
>>> print(picture.splitlines()[1], "90 elements at [0, 90), ranks 0-1" in picture)
<title>a &lt; b</title> True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardmath.base.text import show_share
from shardmath.buffers.param_layout import PerBufferParamLayout
from shardmath.display.pictures.buffer_text import (
    Bucket,
    BucketSpan,
    list_buckets,
    make_gap,
    read_arguments,
    shape_of,
    summarize,
)
from shardmath.display.pictures.elements import (
    LETTER,
    VERMILION,
    Drawing,
    box,
    document,
    every,
    words,
)
from shardmath.display.pictures.text import count, count_more

__all__ = ["LEFT", "RIGHT", "buffer_svg"]

LEFT, RIGHT, TOP = 92, 132, 104
"""Pixels to the left and right of, and above the rows."""
ROW, PITCH = 30, 46
"""Pixels of a row, and from one row to the next."""
BASELINE = 19
"""Pixels from the top of a row to the baseline of text in its middle."""
NARROW, SLIT = 4.0, 1.0
"""Pixels below which parameters, and padding, are joined with their neighbors."""
BLUES = (("#56b4e9", "#000"), ("#0072b2", "#fff"))
"""Fill and text of parameters, alternating."""
SEVERAL = ("#c8c8c8", "#000")
HATCHED = ("url(#shardmath-padding)", "padding")
"""Fill of padding, and its name in the heading."""
APART = 5
"""The least pixels between borders."""
NARROWEST = 480
"""The least width of a picture, in pixels."""

LEGEND = (
    (BLUES[0][0], ""),
    (BLUES[1][0], "parameters"),
    (SEVERAL[0], "several, too narrow"),
    HATCHED,
)
"""Fills and their meaning; a fill without words has the meaning of the next."""

HATCH = (
    '<defs><pattern id="shardmath-padding" width="6" height="6" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="2.2" height="6" fill="{VERMILION}"/></pattern></defs>'
)


def buffer_svg(
    layout: PerBufferParamLayout,
    shards: int,
    *,
    width: int = 960,
    most: int = 12,
    title: str = "flat buffer",
) -> str:
    """Return a flat buffer as a standalone SVG: a row for each of the first `most` buckets, divided from left to right
    among `shards` ranks.

    The picture is `width` pixels wide, plus margins. Raises ParamLayoutError if ranks do not divide a bucket evenly.
    """
    ranks, wide, most = read_arguments(layout, shards, width, NARROWEST, most)
    room = wide - LEFT - RIGHT
    buckets = list_buckets(layout, ranks, most)
    bottom = TOP + PITCH * len(buckets)
    step = every(ranks, room, APART)
    body = [HATCH, *_heading(layout, ranks, title, step)]
    body += _rank_numbers(ranks, room)
    body += _rows(buckets, ranks, room, bottom)
    more = count_more(len(layout.bucket_indices), most, "bucket")
    body += [words(LEFT, bottom + 8, line) for line in more]
    height = bottom + 22 * len(more)
    about = "; ".join(summarize(layout, ranks))
    return document(Drawing(wide, height, tuple(body)), title, about)


def _rows(buckets: Sequence[Bucket], ranks: int, room: int, bottom: int) -> Iterator[str]:
    """A row per bucket, and the borders between ranks."""
    if not buckets:
        return
    tops = range(TOP, bottom, PITCH)
    for bucket, y in zip(buckets, tops, strict=True):
        yield from _row(bucket, y, room)
    yield from _borders(ranks, room, TOP - 4, tops[-1] + ROW + 4)
    # Names are drawn last, above the borders of all rows.
    for bucket, y in zip(buckets, tops, strict=True):
        yield from _labels(bucket, y, room)


def _heading(layout: PerBufferParamLayout, ranks: int, title: str, step: int) -> Iterator[str]:
    """The title, the summary of the buffer, and the meaning of colors."""
    yield words(0, 18, title, font_size=14, font_weight="bold")
    # There is no room for a third line, about the worst bucket.
    summary = summarize(layout, ranks)[:2]
    for number, line in enumerate(summary):
        yield words(0, 36 + 15 * number, line)
    x = 0.0
    for fill, meaning in LEGEND:
        yield _rect(x, 63, 18, 12, fill)
        yield words(x + 23, 73, meaning)
        x += 19
        if meaning:
            x += len(meaning) * LETTER + 18
    yield _line(f"M{x:.6g} 62v14", 1.2)
    border = "border between ranks" if step == 1 else f"border, every {step} ranks"
    yield words(x + 8, 73, border)


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A rectangle with a tooltip."""
    edge = {"stroke": "#fff", "stroke_width": 0.5}
    if fill == HATCHED[0]:
        edge = {"stroke": VERMILION, "stroke_width": 0.8}
    return box(x, y, width, height, title, fill=fill, **edge)


def _line(path: str, thick: float) -> str:
    """A black line inside a white one, which is visible on every color."""
    return (
        f'<path d="{path}" stroke="#fff" stroke-width="{thick + 1.2:.3g}" opacity="0.7"/>'
        f'<path d="{path}" stroke="#000" stroke-width="{thick:.3g}"/>'
    )


def _rank_numbers(ranks: int, room: int) -> Iterator[str]:
    """The numbers of the ranks: in the middle of each rank's part if all have room, else at the start of some."""
    digits = len(str(ranks))
    step = every(ranks, room, 8 + LETTER * digits)
    middle = 0.5 if step == 1 else 0
    anchor = "middle" if step == 1 else "start"
    y = TOP - 8
    yield words(0, y, "rank")
    for rank in range(0, ranks, step):
        x = LEFT + (rank + middle) * room / ranks
        yield words(x, y, str(rank), text_anchor=anchor)


def _count_groups(ranks: int, room: int) -> int:
    """The number of groups of ranks between which borders are drawn."""
    return -(-ranks // every(ranks, room, APART))


def _borders(ranks: int, room: int, top: int, bottom: int) -> Iterator[str]:
    """A line at each border between ranks, or between groups of them."""
    step = every(ranks, room, APART)
    marks = []
    for rank in range(step, ranks, step):
        x = LEFT + rank * room / ranks
        marks.append(f"M{x:.6g} {top}V{bottom}")
    if marks:
        distance = step * room / ranks
        # Lines take at most a twentieth of the picture.
        yield _line("".join(marks), min(1.2, 0.05 * distance))


def _row(bucket: Bucket, y: int, room: int) -> Iterator[str]:
    """The boxes of a bucket, between its number and its sizes."""
    yield words(0, y + BASELINE, f"bucket {bucket.number:,}")
    for span, x, wide, (fill, _) in _boxes(bucket, room):
        title = _tooltip(bucket, span)
        yield _rect(x, y, wide, ROW, fill, title)
    right = LEFT + room + 10
    padding = show_share(bucket.padding, bucket.numel)
    yield words(right, y + 13, f"{bucket.numel:,}")
    yield words(right, y + 26, f"{padding} padding")


def _labels(bucket: Bucket, y: int, room: int) -> Iterator[str]:
    """The names of a bucket's spans, which hide the borders behind them."""
    style = {
        "text_anchor": "middle",
        # An outline in the box's color, painted before the letters, hides the borders behind them.
        "paint_order": "stroke",
        "stroke_width": 4,
        # The mouse points at the box behind the name, whose tooltip appears.
        "pointer_events": "none",
    }
    for span, x, wide, (box_color, text_color) in _boxes(bucket, room):
        label = _label(span, wide)
        if label:
            middle = x + wide / 2
            yield words(middle, y + BASELINE, label, fill=text_color, stroke=box_color, **style)


def _boxes(bucket: Bucket, room: int) -> Iterator[tuple[BucketSpan, float, float, tuple[str, str]]]:
    """Each box of a bucket: its span, left edge, width, and the colors of box and text."""
    if not bucket.numel:
        return
    turn = 0
    scale = room / bucket.numel
    groups = _count_groups(bucket.ranks, room)
    for span in _list_drawn(bucket, scale, groups):
        paint = HATCHED  # for padding, in which there are no parameters
        if span.several == 1:
            paint = BLUES[turn % 2]
            turn += 1
        elif span.several:
            paint = SEVERAL
        x = LEFT + span.start * scale
        wide = max(span.numel * scale, 0.75)
        yield span, x, wide, paint


def _list_drawn(bucket: Bucket, scale: float, groups: int) -> Iterator[BucketSpan]:
    """The spans; those too narrow to be seen are joined, but not across the borders between `groups`."""
    run: list[BucketSpan] = []
    for span in bucket.spans:
        least = SLIT if span.padding else NARROW
        is_wide = span.numel * scale >= least
        if run and (is_wide or _is_beyond(bucket, run[0], span, groups)):
            yield _merge(run)
            run = []
        if is_wide:
            yield span
        else:
            run.append(span)
    if run:
        yield _merge(run)


def _is_beyond(bucket: Bucket, first: BucketSpan, span: BucketSpan, groups: int) -> bool:
    """Whether a border between groups of ranks lies between the beginnings of the two spans."""
    first_group = first.start * groups // bucket.numel
    group = span.start * groups // bucket.numel
    return first_group != group


def _merge(run: Sequence[BucketSpan]) -> BucketSpan:
    """The spans as one span, of one parameter or of several with their padding."""
    start = run[0].start
    end = run[-1].end
    params = [span for span in run if span.several]  # not padding
    if not params:
        return make_gap(start, end)
    if len(run) == 1:
        return run[0]
    padding = sum(span.padding for span in run)
    names = params[0].name
    if len(params) > 1:
        names += f"\n... {params[-1].name}"
    return BucketSpan(start, end, names, params[0].shape, padding, len(params))


def _tooltip(bucket: Bucket, span: BucketSpan) -> str:
    """A box's content, position and ranks."""
    ranks = bucket.held_by(span)
    noun = "ranks" if "-" in ranks else "rank"
    where = f"{count(span.numel, 'element')} at {bucket.within(span)}, {noun} {ranks}"
    params = span.several
    if not params:
        return f"padding\n{where}"
    what = f"{params:,} parameters: {span.name}"
    if params == 1:
        what = f"{span.name} {shape_of(span)}"
    if span.padding:
        where += f"\n{span.padding:,} of them padding"
    return f"{what}\n{where}"


def _label(span: BucketSpan, wide: float) -> str:
    """The longest label that has room, "" if none has."""
    letters = int((wide - 6) / LETTER)  # 3 pixels on either side stay free
    for text in _list_labels(span):
        if len(text) <= letters:
            return text
    return ""


def _list_labels(span: BucketSpan) -> Iterator[str]:
    """The possible labels of a box, the longest first: ends of its name, or the number of parameters; none for
    padding."""
    params = span.several
    if params > 1:
        yield f"{params:,} parameters"
        yield f"{params:,}"
    if params == 1:
        parts = span.name.removesuffix(".weight").split(".")
        yield ".".join(parts)
        for i in range(1, len(parts)):
            yield "…" + ".".join(parts[i:])
