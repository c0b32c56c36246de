"""Buffer pictures: flat buffers as SVG, which stands alone; strings only.

1. What is drawn where is as in `buffer_map`: a row is a bucket, below a rank stands what that rank holds.
2. What is too narrow to see is drawn as one, from one border between ranks to the next; each box says in its title what
   it is, and how much of it is padding.
3. Colours are Okabe and Ito's, whom the colour-blind can follow; text is of a grey that shows on white and on black.

>>> from shardmath.buffers import Param, distributed_optimizer
>>> picture = buffer_svg(distributed_optimizer([Param("a.w", (90,))], data_parallel_world_size=2), 2, title="a < b")
>>> print(picture.splitlines()[1], "90 elements at [0, 90), ranks 0-1" in picture)
<title>a &lt; b</title> True
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from shardmath.buffers.param_layout import PerBufferParamLayout
from shardmath.pictures.buffer_text import (
    Bucket,
    Piece,
    buckets_of,
    checked,
    count,
    every,
    gap,
    more_of,
    shape_of,
    share,
    summary,
)

__all__ = ["LEFT", "RIGHT", "buffer_svg"]

LEFT, RIGHT, TOP = 92, 132, 104
"""Pixels beside and above the rows."""
ROW, PITCH = 30, 46
"""Pixels of a row, and from one to the next."""
NARROW, SLIT = 4.0, 1.0
"""Pixels below which parameters, and padding, are drawn with what is beside them."""
LETTER = 6.05
"""Pixels of a character of a label."""
BLUES = (("#56b4e9", "#000"), ("#0072b2", "#fff"))
"""Fill and text of parameters, in turns."""
SEVERAL = ("#c8c8c8", "#000")
GREY, VERMILION = "#777", "#d55e00"

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
    """The same as a self-contained SVG of `width` pixels: a row a bucket, ranks from left to right.

    Raises ParamLayoutError where ranks do not divide a bucket evenly.
    """
    ranks, wide, most = checked(layout, shards, width, 480, most)
    room = wide - LEFT - RIGHT
    buckets = buckets_of(layout, ranks, most)
    bottom = TOP + PITCH * len(buckets)
    more = more_of(len(layout.bucket_indices), most, "bucket")
    body = [
        *_heading(layout, ranks, title, every(ranks, room, 5)),
        *_rank_numbers(ranks, room),
        *(
            box
            for row, bucket in enumerate(buckets)
            for box in _row(bucket, TOP + PITCH * row, room)
        ),
        *(_borders(ranks, room, TOP - 4, bottom - PITCH + ROW + 4) if buckets else ()),
        *(
            label
            for row, bucket in enumerate(buckets)
            for label in _labels(bucket, TOP + PITCH * row, room)
        ),
        *(_text(LEFT, bottom + 8, line) for line in more),
    ]
    return _document(wide, bottom + 22 * len(more), [HATCH, *body], _plain(title))


def _document(width: int, height: int, body: Iterable[str], title: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = f'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="10" fill="{GREY}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>'
    return "\n".join([head, f"<title>{title}</title>", *body, "</svg>", ""])


def _plain(text: str) -> str:
    """Text that XML may hold."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def _text(x: float, y: float, text: str, **attributes: object) -> str:
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.6g}" y="{y:.6g}"{given}>{_plain(text)}</text>'


def _heading(layout: PerBufferParamLayout, ranks: int, title: str, step: int) -> Iterator[str]:
    yield _text(8, 18, title, font_size=14, font_weight="bold")
    for number, line in enumerate(summary(layout, ranks)[:2]):
        yield _text(8, 36 + 15 * number, line, font_size=11)
    x = 8.0
    for fill, what in (
        (BLUES[0][0], ""),
        (BLUES[1][0], "parameters"),
        (SEVERAL[0], "several, too narrow"),
        HATCHED,
    ):
        yield _rect(x, 63, 18, 12, fill)
        yield _text(x + 23, 73, what)
        x += 19 + bool(what) * (len(what) * LETTER + 18)
    yield _line(f"M{x:.6g} 62v14", 1.2)
    yield _text(x + 8, 73, "border between ranks" if step == 1 else f"border, every {step} ranks")


HATCHED = ("url(#shardmath-padding)", "padding")


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    edge = (
        f' stroke="{VERMILION}" stroke-width="0.8"'
        if fill == HATCHED[0]
        else ' stroke="#fff" stroke-width="0.5"'
    )
    inside = f"><title>{_plain(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.6g}" y="{y}" width="{width:.6g}" height="{height}" fill="{fill}"{edge}{inside}'


def _line(path: str, thick: float) -> str:
    """A black line in a white one, which shows on everything."""
    return (
        f'<path d="{path}" stroke="#fff" stroke-width="{thick + 1.2:.3g}" opacity="0.7"/>'
        f'<path d="{path}" stroke="#000" stroke-width="{thick:.3g}"/>'
    )


def _rank_numbers(ranks: int, room: int) -> Iterator[str]:
    step = every(ranks, room, 8 + LETTER * len(str(ranks)))
    yield _text(8, TOP - 8, "rank")
    for rank in range(0, ranks, step):
        middle = 0.5 if step == 1 else 0
        anchor = "middle" if step == 1 else "start"
        yield _text(LEFT + (rank + middle) * room / ranks, TOP - 8, str(rank), text_anchor=anchor)


def _groups(ranks: int, room: int) -> int:
    """How many ranks, or groups of them, are drawn apart."""
    return -(-ranks // every(ranks, room, 5))


def _borders(ranks: int, room: int, top: int, bottom: int) -> Iterator[str]:
    step = every(ranks, room, 5)
    marks = "".join(
        f"M{LEFT + rank * room / ranks:.6g} {top}V{bottom}" for rank in range(step, ranks, step)
    )
    if marks:
        yield _line(marks, min(1.2, 0.05 * step * room / ranks))


def _row(bucket: Bucket, y: int, room: int) -> Iterator[str]:
    yield _text(8, y + 19, f"bucket {bucket.number:,}", font_size=11)
    for piece, x, wide, (fill, _) in _boxes(bucket, room):
        yield _rect(x, y, wide, ROW, fill, _tooltip(bucket, piece))
    yield _text(LEFT + room + 10, y + 13, f"{bucket.numel:,}")
    yield _text(LEFT + room + 10, y + 26, f"{share(bucket.padding, bucket.numel)} padding")


def _labels(bucket: Bucket, y: int, room: int) -> Iterator[str]:
    """Names, which hide the borders behind them."""
    hide = {
        "text_anchor": "middle",
        "paint_order": "stroke",
        "stroke_width": 4,
        "pointer_events": "none",
    }
    for piece, x, wide, (fill, colour) in _boxes(bucket, room):
        label = _label(piece, wide)
        if label:
            yield _text(x + wide / 2, y + 19, label, fill=colour, stroke=fill, **hide)


def _boxes(bucket: Bucket, room: int) -> Iterator[tuple[Piece, float, float, tuple[str, str]]]:
    """What is drawn, from where, how wide, and the colours of box and text."""
    turn, scale = 0, room / bucket.numel if bucket.numel else 0.0
    for piece in _drawn(bucket, scale, _groups(bucket.ranks, room)) if bucket.numel else ():
        paint = SEVERAL if piece.several > 1 else BLUES[turn % 2] if piece.several else HATCHED
        turn += piece.several == 1
        yield piece, LEFT + piece.start * scale, max(piece.numel * scale, 0.75), paint


def _drawn(bucket: Bucket, scale: float, groups: int) -> Iterator[Piece]:
    """The pieces, where those too narrow to see are one, from one border between `groups` to the next."""
    run: list[Piece] = []
    for piece in bucket.pieces:
        wide = piece.numel * scale >= (SLIT if piece.padding else NARROW)
        beyond = (
            run and run[0].start * groups // bucket.numel != piece.start * groups // bucket.numel
        )
        if run and (wide or beyond):
            yield _merged(run)
            run = []
        if wide:
            yield piece
        else:
            run.append(piece)
    if run:
        yield _merged(run)


def _merged(run: Sequence[Piece]) -> Piece:
    params = [piece for piece in run if piece.several]
    if len(run) == 1 or not params:
        return gap(run[0].start, run[-1].end) if not params else run[0]
    padding = sum(piece.padding for piece in run)
    names = params[0].name if len(params) == 1 else f"{params[0].name}\n... {params[-1].name}"
    return Piece(run[0].start, run[-1].end, names, params[0].shape, padding, len(params))


def _tooltip(bucket: Bucket, piece: Piece) -> str:
    ranks = (
        f"ranks {bucket.held_by(piece)}"
        if "-" in bucket.held_by(piece)
        else f"rank {bucket.held_by(piece)}"
    )
    where = f"{count(piece.numel, 'element')} at {bucket.within(piece)}, {ranks}"
    if not piece.several:
        return f"padding\n{where}"
    within = f"\n{piece.padding:,} of them padding" if piece.padding else ""
    what = (
        f"{piece.name} {shape_of(piece)}"
        if piece.several == 1
        else f"{piece.several:,} parameters: {piece.name}"
    )
    return f"{what}\n{where}{within}"


def _label(piece: Piece, wide: float) -> str:
    """As much of the end of its name as there is room for, in whole parts."""
    letters = int((wide - 6) / LETTER)
    if not piece.several:
        return ""
    if piece.several > 1:
        return next(
            (
                t
                for t in (f"{piece.several:,} parameters", f"{piece.several:,}")
                if len(t) <= letters
            ),
            "",
        )
    parts = piece.name.removesuffix(".weight").split(".")
    ends = (".".join(parts[i:]) for i in range(len(parts)))
    return next((t for i, end in enumerate(ends) if len(t := "…" * (i > 0) + end) <= letters), "")
