"""Text: values as people read them, and sizes as people write them.

>>> show_bytes(23_800_000), show_share(1, 8), show_ranks([0, 1, 2, 5])
('23.80 MB', '12.50 %', 'ranks 0-2, 5')
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Sized

__all__ = [
    "count_ranks",
    "make_table",
    "message_of",
    "plural",
    "read_bytes",
    "show_bytes",
    "show_ranks",
    "show_seconds",
    "show_share",
    "shown",
    "word_error",
]

MOST_SHOWN = 200
"""The most characters of a value that a message shows."""

LONGEST_MESSAGE = 1 << 16
"""The most characters of a message that are sent: torch's store ends a connection over 16 MiB."""

UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""SI units; KiB to TiB are read, and never shown."""

SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,12})?)\s*(?:([KMGT])(I?))?B?\s*")
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def shown(value: object) -> str:
    """The repr of `value`, shortened if it is long; the name of its type if its repr fails.

    An integer of 5,000 digits cannot be printed.
    """
    try:
        out = repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"
    return out if len(out) <= MOST_SHOWN else f"{out[:MOST_SHOWN]}..."


def message_of(error: BaseException | str) -> str:
    """The message of `error`, or `error` if it is a str, made safe to print, send and store as UTF-8.

    It is cut after 65,536 characters. For an error whose `__str__` raises, a text that says so.

    >>> message_of(ValueError("too long")), message_of("half a surrogate pair: " + chr(0xD800))[-6:]
    ('too long', '\\\\ud800')
    """
    try:
        text = str(error)
    except (Exception, SystemExit):
        return "its message cannot be printed"
    return text[:LONGEST_MESSAGE].encode(errors="backslashreplace").decode()


def word_error(error: BaseException) -> str:
    """The type and the message of `error`, or only its type if it has no message; never "".

    >>> word_error(ValueError("too long")), word_error(KeyboardInterrupt())
    ('ValueError: too long', 'KeyboardInterrupt')
    """
    kind = type(error).__name__
    message = message_of(error)
    return f"{kind}: {message}" if message else kind


def plural(items: int | Sized, what: str, many: str = "") -> str:
    """Return a count with a noun, such as "1 rank" or "3 ranks". `items` is the count or a collection whose items are
    counted; the noun is `what` for 1, otherwise `many` (default: `what` with an s).

    >>> plural(1, "tensor"), plural([3, 4], "bucket"), plural(0, "box", "boxes")
    ('1 tensor', '2 buckets', '0 boxes')
    """
    count = items if isinstance(items, int) else len(items)
    if count == 1:
        return f"{count} {what}"
    return f"{count} {many or what + 's'}"


def show_bytes(n: float) -> str:
    """The number of bytes `n` as text with a unit, such as "2.70 TB".

    >>> show_bytes(512), show_bytes(2_700_000_000_000)
    ('512 B', '2.70 TB')
    """
    for unit, size in reversed(UNITS.items()):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{int(n)} B"


def show_seconds(s: float) -> str:
    """The duration `s`, in seconds, as text with a unit, such as "12.34 ms".

    >>> show_seconds(2.5), show_seconds(0.01234), show_seconds(1e-5)
    ('2.5 s', '12.34 ms', '10 us')
    """
    if s >= 1:
        return f"{s:.4g} s"
    return f"{s * 1e3:.4g} ms" if s >= 1e-3 else f"{s * 1e6:.4g} us"


def read_bytes(text: str) -> int | None:
    """The number of bytes that `text` means, such as "5GB", "1.5 kb", "64MiB" or "4096"; None if `text` is not a size.

    >>> read_bytes("5GB"), read_bytes("1.5 kb"), read_bytes("1KiB"), read_bytes("many")
    (5000000000, 1500, 1024, None)
    """
    match = SIZE.fullmatch(text.upper())
    if match is None:
        return None
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    factor = base ** POWERS[prefix] if prefix else 1
    # An integer stays exact; a float has 53 bits.
    return int(float(number) * factor) if "." in number else int(number) * factor


def show_share(part: int, whole: int) -> str:
    """`part` / `whole` in percent, such as "12.50 %"; a part above zero is never shown as zero.

    >>> show_share(0, 8), show_share(1, 10**6), show_share(0, 0)
    ('0.00 %', '<0.01 %', '0.00 %')
    """
    percent = 100 * part / whole if whole else 0.0
    return "<0.01 %" if 0 < percent < 0.005 else f"{percent:.2f} %"


def show_ranks(
    ranks: Iterable[int | range],
    *,
    noun: bool = True,
    joined_from: int | None = 2,
    most: int | None = None,
) -> str:
    """Return `ranks` as text, such as "ranks 4-5, 7", or "4-5, 7" if `noun` is False. `joined_from` is the least number
    of successive ranks to write as a range (None: no ranges); `most` limits the number of entries shown (None: no
    limit).

    The ranks stay in the given order. `joined_from` is 2 or more; None: each rank is an entry. Of more than `most`
    entries, the first half of `most` and the number of all ranks are shown.

    >>> show_ranks([3]), show_ranks([range(4, 6), 7]), show_ranks([0, 1, 3, 4, 5], noun=False, joined_from=3)
    ('rank 3', 'ranks 4-5, 7', '0, 1, 3-5')
    >>> show_ranks(range(17), joined_from=None, most=16)
    'ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (17 in all)'
    """
    runs = _join_ranges(ranks)
    # Not by len, which fails from 2**63 on: a caller may give a range of more ranks.
    count = sum(run.stop - run.start for run in runs)
    # One word more than may be shown, to see whether there are more; without `most`, all.
    end = most + 1 if most else most
    words = list(itertools.islice(_list_words(runs, joined_from), end))
    if most is not None and len(words) > most:
        words = [*words[: most // 2], f"... ({count:,} in all)"]
    listed = ", ".join(words)
    if not noun:
        return listed
    return f"{'rank' if count == 1 else 'ranks'} {listed}"


def _join_ranges(ranks: Iterable[int | range]) -> list[range]:
    """The ranks as ranges, joined if one begins where the one before ends."""
    runs: list[range] = []
    for item in ranks:
        run = item if isinstance(item, range) else range(item, item + 1)
        if runs and runs[-1].stop == run.start:
            runs[-1] = range(runs[-1].start, run.stop)
        else:
            runs.append(run)
    return runs


def _list_words(runs: Iterable[range], joined_from: int | None) -> Iterator[str]:
    """Each range of at least `joined_from` ranks as one word, other ranks one by one."""
    for run in runs:
        if joined_from is not None and run.stop - run.start >= joined_from:
            yield f"{run.start}-{run.stop - 1}"
        else:
            yield from map(str, run)


def count_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text with their number, such as "2 ranks (2, 3)"; of more than eight, only four are listed.

    For one rank, "rank 2".

    >>> count_ranks([3]), count_ranks([2, 3]), count_ranks(range(10))
    ('rank 3', '2 ranks (2, 3)', '10 ranks (0, 1, 2, ..., 9)')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 8:
        listed = ", ".join(map(str, ranks))
    else:
        first = ", ".join(map(str, ranks[:3]))
        listed = f"{first}, ..., {ranks[-1]}"
    return f"{len(ranks)} ranks ({listed})"


def make_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A text table with aligned columns: the heads in `head`, then `rows`."""
    cells = [list(head)]
    for row in rows:
        cells.append([str(x) for x in row])
    columns = zip(*cells, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for texts in cells:
        aligned = [x.rjust(width) for x, width in zip(texts, widths, strict=True)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
