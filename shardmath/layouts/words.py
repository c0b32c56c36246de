"""Words: digits as a layout's text writes them, and the stages that the words of a field stand for.

1. Left of the free name a word cuts every piece into parts: by ceil-chunks, or as its mark says.
2. Right of it a word is made of fixed blocks: it counts blocks as large as all that is right of it.
   The free name counts the largest ones, as many as there are.
3. Without a free name the words multiply to the length that they divide.

>>> from shardmath.layouts.reader import LayoutReader
>>> words = [WrittenDigit(1, free="n"), WrittenDigit(3, axes=("tp",)), WrittenDigit(6, number=2)]
>>> field = make_field(LayoutReader("(n tp 2)", (9,), {"tp": 2}, {}), 9, [words])
>>> [str(field.runs({"tp": coordinate})) for coordinate in range(2)]
['[0:2 4:6 8:9]', '[2:4 6:8]']
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardmath.base.text import plural
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, Cut, FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.dimension import Field, divided, lengths_at
from shardmath.layouts.algebra.stages import Digit, Stage
from shardmath.layouts.reader import LayoutReader, join_names

__all__ = ["WrittenDigit", "make_field"]


class WrittenDigit(NamedTuple):
    """One item in the parentheses of a dimension in a layout's text, such as tp or n in (tp n). An item has mesh axes
    (`axes`), a number of parts (`number`), sizes of the parts (`sizes`), or a name for the remaining length (`free`).

    `at` is its position in the text.
    """

    at: int
    axes: tuple[str, ...] = ()
    number: int = 0
    sizes: tuple[int, ...] | None = None
    mark: str = ""
    free: str = ""


def make_field(reader: LayoutReader, n: int, stages: list[list[WrittenDigit]]) -> Field:
    """Return how a dimension of length `n` is divided among ranks, as a Field. Each of `stages` has the items of one
    parenthesized group of a layout text, such as tp and heads in (tp heads); it divides the parts that the stage before
    left.

    `reader` supplies the mesh and reports errors. Raises NotationError if the stages cannot divide the positions.
    """
    # The first sizes divide all n positions, so the caret can stand under them; `divided` raises for any others.
    first = stages[0][0]
    if first.sizes is not None and sum(first.sizes) != n:
        reader.fail(
            f"sizes {list(first.sizes)} add up to {sum(first.sizes)}, but divide {n} positions",
            first.at,
            f"write sizes that add up to {n}",
        )
    read_stages = tuple(_read_stage(reader, words) for words in stages)
    for number, words in enumerate(stages):
        # A free name stands for whatever length is left.
        if not any(word.free for word in words):
            _check_exact(reader, divided(n, read_stages[:number]), words)
    return divided(n, read_stages)


def _check_exact(reader: LayoutReader, earlier: Field, words: list[WrittenDigit]) -> None:
    """Raise NotationError unless the digits multiply to the length that they divide: the stage has no free name."""
    product = math.prod(_count_parts(reader, word) for word in words)
    wrong = lengths_at(earlier, len(earlier.stages)) - {product}
    if wrong:
        reader.fail(
            f"a group without a free name must divide exactly {product}, but divides {min(wrong)}",
            words[0].at,
            f"add a free name, or make the length {product}",
        )


def _count_parts(reader: LayoutReader, word: WrittenDigit) -> int:
    """The number of parts that a word stands for in a group without a free name."""
    if word.mark or word.sizes is not None:
        what = "a group with ~, sizes or a placement has no free name"
        reader.fail(what, word.at, "add one, as in (tp~ n)")
    return word.number or math.prod(_axis_sizes(reader, word))


def _axis_sizes(reader: LayoutReader, word: WrittenDigit) -> tuple[int, ...]:
    return tuple(reader.axes[name] for name in word.axes)


def _read_stage(reader: LayoutReader, words: list[WrittenDigit]) -> Stage:
    """The digits of one stage: cuts left of the free name, then blocks for it and the words right of it; only cuts
    without a free name."""
    free = [word for word in words if word.free]
    if len(free) > 1:
        first, second, *_ = free
        axes = f"a mesh axis ({join_names(reader.axes)}) or " if reader.axes else ""
        reader.fail(
            f"{first.free!r} and {second.free!r} are both free names: neither is a mesh axis",
            second.at,
            f"replace one of the two names by {axes}an integer",
        )
    if not free:
        return tuple(_make_cut(reader, word) for word in words)
    middle = words.index(free[0])
    left = [_make_cut(reader, word) for word in words[:middle]]
    blocks = _make_blocks(reader, words[middle + 1 :])  # the free name's own digit is the first
    return (*left, *blocks)


def _make_cut(reader: LayoutReader, word: WrittenDigit) -> Digit:
    """The digit of a word left of the free name: an integer, or axes."""
    sizes = _axis_sizes(reader, word)
    parts = word.number or math.prod(sizes)
    return Digit(_choose_cut(reader, word, parts), word.axes, sizes)


def _choose_cut(reader: LayoutReader, word: WrittenDigit, parts: int) -> Cut:
    """The cut into this number of parts that the word stands for."""
    if word.sizes is not None:
        if word.axes and len(word.sizes) != parts:
            reader.fail(
                f"{plural(word.sizes, 'size')} for {plural(parts, 'coordinate')} of {'*'.join(word.axes)}",
                word.at,
                "give one size per coordinate",
            )
        return Sizes(word.sizes)
    if word.mark == "~":
        return BalancedChunks(parts)
    if word.mark:
        return UserCut(reader.rules[word.mark], parts)
    return Chunks(parts)


def _make_blocks(reader: LayoutReader, words: list[WrittenDigit]) -> list[Digit]:
    """The digits of the free name, and of the words right of it.

    Each cuts into blocks that are as long as the numbers of all words right of its own, multiplied.
    """
    digits: list[Digit] = []
    block = 1
    for word in reversed(words):
        if word.mark or word.sizes is not None:
            reader.fail(
                "~, sizes or a placement is right of the free name",
                word.at,
                "write it left of the free name, as in (tp~ n)",
            )
        sizes = _axis_sizes(reader, word)
        digits.append(Digit(FixedBlock(block), word.axes, sizes))
        parts = word.number or math.prod(sizes)  # a word is a number, or axes
        block *= parts
    digits.append(Digit(FixedBlock(block)))
    return digits[::-1]
