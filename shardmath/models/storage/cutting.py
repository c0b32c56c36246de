"""Cutting: what a structure stores at one coordinate, as positions in its components.

A structure is run through once for every choice of its numbers' parts; each component is cut by the words left of
it, outermost first. A stage is cut as one sequence by the stage behind it.

>>> from shardmath.models.storage.structure import parse
>>> frame = Frame(axes={"tp": 2}, numbers={"groups": 2}, lengths={"q": 4, "k": 2})
>>> print(lay_out(parse("(groups (q + k) | tp n)"), frame, {"tp": 1}))
[2:4 5:6]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import LayoutError, RunsError
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.models.storage.structure import GroupedDim, Number, Term, Word, list_words

__all__ = ["Frame", "axes_of", "lay_out"]


FEW = 1 << 12
"""Parts that take no time, of however few positions."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What words stand for: sizes of axes, numbers, and how many positions each component has, in order.

    With `exact`, what cuts must divide; else parts are ceil-chunks, as torch.chunk makes them.
    """

    axes: Mapping[str, int]
    numbers: Mapping[str, int]
    lengths: Mapping[str, int]
    exact: bool = True

    def number(self, number: Number) -> int:
        """The integer. Raises LayoutError for a name that is none."""
        if isinstance(number, int):
            return number
        if number not in self.numbers:
            known = ", ".join(self.numbers) or "none"
            raise LayoutError(f"unknown number {number!r}; numbers of this side are {known}")
        return self.numbers[number]

    def is_axis(self, word: Word) -> bool:
        """Whether the word is a mesh axis."""
        return word.name in self.axes

    def is_number(self, word: Word) -> bool:
        """Whether the word is an integer, or names one."""
        return isinstance(word.name, int) or word.name in self.numbers


class _Cut(NamedTuple):
    """Keep part `at` of `parts`; the word says how they are cut."""

    word: Word
    parts: int
    at: int


class _Term(NamedTuple):
    """A term whose words are known: what stands left of its component, that, and what stands right of it."""

    left: tuple[Word, ...]
    leaf: Word | None
    right: tuple[Word, ...]


_Piece: TypeAlias = tuple[int, int]
"""Start and stop of consecutive positions; (-1, n) is a hole of n."""


def lay_out(group: GroupedDim, frame: Frame, coords: Mapping[str, int]) -> Runs:
    """What a rank at these coordinates stores, as positions in the components laid one after the other.

    Raises LayoutError for words that are nothing here, and for what does not divide.
    """
    return _Layer(frame, coords).lay(group)


def axes_of(group: GroupedDim, frame: Frame) -> tuple[str, ...]:
    """The mesh axes that the group names, in the order of the mesh."""
    named = {word.name for word in list_words((group,))}
    return tuple(axis for axis in frame.axes if axis in named)


class _Layer:
    """Lays a group out at one coordinate."""

    def __init__(self, frame: Frame, coords: Mapping[str, int]) -> None:
        self.frame = frame
        self.coords = coords
        ends = itertools.accumulate(frame.lengths.values())
        starts = [0, *ends]
        self.spans = dict(zip(frame.lengths, itertools.pairwise(starts), strict=True))
        self.before: list[_Piece] | None = None  # what the stages before have laid

    def lay(self, group: GroupedDim) -> Runs:
        """All stages, one on the other."""
        for stage in group.stages:
            self.before = self._lay_terms(stage, ())
        pieces = self.before or []
        try:
            return from_ranges(n if start < 0 else (start, n) for start, n in pieces)
        except RunsError as error:
            said = self._word_twice(group, pieces) or f"'{group}': {error}"
            raise LayoutError(said) from None

    def _word_twice(self, group: GroupedDim, pieces: Iterable[_Piece]) -> str:
        """What is wrong with pieces that have a position twice; "" for others."""
        spans = sorted(piece for piece in pieces if piece[0] >= 0)
        for (_, stop), (start, _) in itertools.pairwise(spans):
            if start < stop:
                return f"{self._word_position(group, start)}; store it once per rank"
        return ""

    def _word_position(self, group: GroupedDim, position: int) -> str:
        """That a position is stored twice at this coordinate."""
        axes = axes_of(group, self.frame)
        here = ", ".join(f"{axis}={self.coords[axis]}" for axis in axes)
        at = f" at {here}" if here else ""
        for name, (start, stop) in self.spans.items():
            if start <= position < stop:
                what = f"number {position - start} of {name!r}" if name else f"number {position}"
                return f"'{group}' stores {what} twice{at}"
        raise AssertionError(position)

    def _lay_terms(self, terms: Iterable[Term], cuts: tuple[_Cut, ...]) -> list[_Piece]:
        pieces: list[_Piece] = []
        for term in terms:
            pieces += self._lay_term(term, cuts)
        return pieces

    def _lay_term(self, term: Term, cuts: tuple[_Cut, ...]) -> list[_Piece]:
        """The term after these cuts: one run through it for every way to choose its numbers' parts."""
        read = self._read(term)
        self._check_parts(term, read.left, cuts)
        choices = [self._list_cuts(word) for word in read.left]
        pieces: list[_Piece] = []
        # The last word changes fastest, so that parts of a number left of another's stay together.
        for chosen in itertools.product(*choices):
            inner = cuts + chosen
            if read.leaf is None:
                pieces += self._lay_terms(term.group, inner)
            else:
                pieces += self._lay_leaf(read.leaf, read.right, inner)
        return pieces

    def _check_parts(self, term: Term, left: Sequence[Word], cuts: Iterable[_Cut]) -> None:
        """Raise LayoutError for numbers that make more parts than there is to divide: each part takes time."""
        frame = self.frame
        words = [*left, *(cut.word for cut in cuts)]
        numbers = [word for word in words if not frame.is_axis(word) and frame.is_number(word)]
        parts = math.prod(frame.number(word.name) for word in numbers)
        positions = sum(frame.lengths.values())
        if parts > max(positions, FEW):
            what = f"'{term}' has {parts} parts of {positions} positions"
            raise LayoutError(f"{what}; leave numbers out")

    def _read(self, term: Term) -> _Term:
        """The term with its component found. Raises LayoutError where there is none, or more than one."""
        frame = self.frame
        if term.group:
            self._check_marks(term, term.words)
            return _Term(term.words, None, ())
        free = []
        for i, word in enumerate(term.words):
            if word.name in frame.lengths or (
                not frame.is_axis(word) and not frame.is_number(word)
            ):
                free.append(i)
        if len(free) != 1:
            found = " and ".join(str(term.words[i]) for i in free) or "none"
            raise LayoutError(
                f"'{term}' needs one component, and has {found}; {self._list_meanings()}"
            )
        at = free[0]
        leaf, others = term.words[at], (*term.words[:at], *term.words[at + 1 :])
        self._check_marks(term, others)
        _check_cut(term, leaf)
        return _Term(term.words[:at], leaf, term.words[at + 1 :])

    def _check_marks(self, term: Term, cutting: Iterable[Word]) -> None:
        """Raise LayoutError for marks of a component on words that cut one, and for neighbours of a number."""
        for word in cutting:
            if (word.stored, word.tile, word.cycle) != (None, None, None):
                raise LayoutError(
                    f"'{word}' in '{term}': =, ^ and % say how a component is stored, and {word.name} is not one; "
                    f"write the mark at the component"
                )
            if word.over is not None and not self.frame.is_axis(word):
                raise LayoutError(
                    f"'{word}' in '{term}': / says which neighbours along an axis keep the same, and {word.name} is "
                    f"not a mesh axis; leave the mark out"
                )

    def _list_meanings(self) -> str:
        """What words may be here, for people."""
        frame = self.frame
        known = {
            "components": frame.lengths,
            "mesh axes": frame.axes,
            "numbers": frame.numbers,
        }
        listed = []
        for what, names in known.items():
            listed.append(f"{what}: {', '.join(names) or 'none'}")
        return "; ".join(listed)

    def _list_cuts(self, word: Word) -> list[_Cut]:
        """The cuts that the word stands for: one for an axis, all parts in order for a number."""
        frame = self.frame
        if not frame.is_axis(word):
            if not frame.is_number(word):
                raise LayoutError(f"unknown word '{word}'; {self._list_meanings()}")
            parts = frame.number(word.name)
            return [_Cut(word, parts, at) for at in range(parts)]
        size = frame.axes[str(word.name)]
        at = self.coords[str(word.name)]
        if word.over is not None:
            same = frame.number(word.over)
            if same < 1 or size % same:
                raise LayoutError(f"'{word}': {same} does not divide {word.name}={size}")
            size //= same
            at //= same
        return [_Cut(word, size, at)]

    def _lay_leaf(
        self, leaf: Word, right: tuple[Word, ...], cuts: tuple[_Cut, ...]
    ) -> list[_Piece]:
        """What the cuts leave of the component."""
        pieces = self._list_pieces(leaf)
        grain = self._find_grain(right)
        length = sum(map(_count, pieces))
        start, stop = self._span(leaf, length, grain, cuts)
        kept: list[_Piece] = []
        for block in self._list_blocks(right, start, stop):
            lo = block.start * grain
            hi = block.stop * grain
            kept += _slice(pieces, lo, hi)
        return self._fill_tiles(kept, leaf)

    def _list_blocks(self, right: Iterable[Word], start: int, stop: int) -> list[range]:
        """Runs of blocks: all of them, or those that an axis right of the component deals to this coordinate."""
        dealt = [word for word in right if self.frame.is_axis(word)]
        if not dealt:
            return [range(start, stop)]
        if len(dealt) > 1:
            axes = " and ".join(str(word) for word in dealt)
            raise LayoutError(
                f"{axes} both deal blocks of one component; write one of them left of it"
            )
        (cut,) = self._list_cuts(dealt[0])
        first = start + cut.at
        own = range(first, stop, cut.parts)
        return [range(block, block + 1) for block in own]

    def _fill_tiles(self, pieces: list[_Piece], leaf: Word) -> list[_Piece]:
        """The pieces of one part, padded to whole tiles."""
        if leaf.tile is None:
            return pieces
        tile = self.frame.number(leaf.tile)
        if tile < 1:
            raise LayoutError(f"'{leaf}': a tile of {tile} positions; give a positive number")
        length = sum(map(_count, pieces))
        padding = -length % tile
        return [*pieces, (-1, padding)] if padding else pieces

    def _span(self, leaf: Word, length: int, grain: int, cuts: tuple[_Cut, ...]) -> tuple[int, int]:
        """The blocks of the component that the cuts leave."""
        start, stop = 0, self._divide(length, grain, f"'{leaf}' into blocks of {grain}")
        for cut in cuts:
            start, stop = self._cut(start, stop, cut, leaf)
        return start, stop

    def _find_grain(self, right: Iterable[Word]) -> int:
        """Positions that no cut may part: the numbers right of a component."""
        numbers = [word.name for word in right if not self.frame.is_axis(word)]
        return math.prod(map(self.frame.number, numbers))

    def _list_pieces(self, leaf: Word) -> list[_Piece]:
        """The component's positions, padding included; a name that is none is all that was laid before."""
        if leaf.name in self.spans:
            pieces = [self.spans[str(leaf.name)]]
        elif self.before is not None:
            pieces = self.before
        elif len(self.spans) == 1:
            pieces = list(self.spans.values())
        else:
            raise LayoutError(f"unknown word '{leaf}'; {self._list_meanings()}")
        length = sum(map(_count, pieces))
        if leaf.cycle is not None:
            return self._repeat(pieces, length, leaf.cycle)
        if leaf.stored is None:
            return pieces
        stored = self.frame.number(leaf.stored)
        if stored < length:
            raise LayoutError(f"'{leaf}': {length} positions do not fit {stored}")
        return [*pieces, (-1, stored - length)]

    def _repeat(self, pieces: list[_Piece], length: int, cycle: Number) -> list[_Piece]:
        """The pieces again and again, up to so many positions."""
        slots = self.frame.number(cycle)
        most = length * math.prod(self.frame.axes.values())
        if slots > most:
            what = (
                f"'%{cycle}': {slots} slots are more than one copy of {length} positions for each"
            )
            raise LayoutError(f"{what} coordinate; give at most {most}")
        times = -(-slots // length) if length else 0
        return list(_slice(pieces * times, 0, slots))

    def _divide(self, length: int, parts: int, what: str) -> int:
        if parts < 1 or length % parts:
            raise LayoutError(f"{length} positions of {what} do not divide evenly")
        return length // parts

    def _cut(self, start: int, stop: int, cut: _Cut, leaf: Word) -> tuple[int, int]:
        """Part `at` of [start, stop)."""
        n = stop - start
        if cut.word.balanced:
            step, extra = divmod(n, cut.parts)
            larger = cut.at < extra
            lo = start + cut.at * step + min(cut.at, extra)
            return lo, lo + step + larger
        if self.frame.exact and n % cut.parts:
            raise LayoutError(
                f"'{cut.word}' has {cut.parts} parts, and '{leaf}' {n} to divide; "
                f"choose sizes that divide, or write '{cut.word}~'"
            )
        step = -(-n // cut.parts)  # rounded up, as torch.chunk
        lo = min(n, cut.at * step)
        return start + lo, start + min(n, lo + step)


def _check_cut(term: Term, leaf: Word) -> None:
    """Raise LayoutError for a mark of what cuts on the component, which is cut."""
    if leaf.over is not None or leaf.balanced:
        raise LayoutError(
            f"'{leaf}' in '{term}': / and ~ say how an axis or a number cuts, and {leaf.name} is cut; "
            f"leave the mark out"
        )


def _count(piece: _Piece) -> int:
    start, stop = piece
    return stop if start < 0 else stop - start


def _slice(pieces: Iterable[_Piece], lo: int, hi: int) -> Iterator[_Piece]:
    """Positions lo to hi of the pieces."""
    at = 0
    for start, stop in pieces:
        n = _count((start, stop))
        left = max(lo - at, 0)
        right = min(hi - at, n)
        if left < right:
            yield (-1, right - left) if start < 0 else (start + left, start + right)
        at += n
