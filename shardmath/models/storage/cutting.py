"""Cutting: the positions of its components that a structure stores at one coordinate.

A structure is visited once for every choice of its numbers' parts; each component is cut by the words left of it,
outermost first. The stage after a `|` cuts everything before it as one sequence.

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
"""Parts that are always allowed: visiting them takes no time, even if there are fewer positions."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The integer value of each name in a text that says how ranks store a tensor. A mesh axis has its size, a part of
    a fused tensor (such as q of qkv) its length, and a named number (such as hd=64, a head size) its value.

    With `exact`, axes and numbers must divide what they cut; otherwise parts are ceil-chunks, as in torch.chunk.
    """

    axes: Mapping[str, int]
    numbers: Mapping[str, int]
    lengths: Mapping[str, int]
    exact: bool = True

    def number(self, number: Number) -> int:
        """The integer that `number`, an integer or a name, stands for. Raises LayoutError for an unknown name."""
        if isinstance(number, int):
            return number
        if number not in self.numbers:
            known = ", ".join(self.numbers) or "none"
            what = f"unknown number {number!r}; the numbers of this side are: {known}"
            fix = f"or pass it where the side is made, as {number}= or in numbers="
            raise LayoutError(f"{what}; write one of them or an integer, {fix}")
        return self.numbers[number]

    def is_axis(self, word: Word) -> bool:
        """Whether `word` names a mesh axis."""
        return word.name in self.axes

    def is_number(self, word: Word) -> bool:
        """Whether `word` is an integer, or the name of a number in `numbers`."""
        return isinstance(word.name, int) or word.name in self.numbers


class _WordCut(NamedTuple):
    """Keep part `part` of `parts`; the word says how the parts are cut."""

    word: Word
    parts: int
    part: int


class _Operands(NamedTuple):
    """A term's words by role: those left of its component, the component (None before a group), those right of it."""

    left: tuple[Word, ...]
    leaf: Word | None
    right: tuple[Word, ...]


_Piece: TypeAlias = tuple[int, int]
"""Start and stop of consecutive positions; (-1, n) is a hole of n cells."""


def lay_out(group: GroupedDim, frame: Frame, coords: Mapping[str, int]) -> Runs:
    """Return which indices of a dimension are on the ranks at the mesh coordinates `coords`, as Runs: a sequence of
    index ranges. `group` is the parsed notation for the dimension, such as (tp n), and `frame` has the values of names
    in it.

    Positions count the components (q, k, v), one after the other. Raises LayoutError for unknown words, and if an axis
    or a number does not divide what it cuts.
    """
    return _GroupLayer(frame, coords).lay(group)


def axes_of(group: GroupedDim, frame: Frame) -> tuple[str, ...]:
    """Return the mesh axes that occur in `group`, in mesh order. `group` is a dimension that a text in parentheses
    describes, such as (tp n); `frame` has the names of all mesh axes."""
    named = {word.name for word in list_words((group,))}
    return tuple(axis for axis in frame.axes if axis in named)


class _GroupLayer:
    """Lays out a group at one coordinate."""

    def __init__(self, frame: Frame, coords: Mapping[str, int]) -> None:
        self.frame = frame
        self.coords = coords
        ends = itertools.accumulate(frame.lengths.values())
        starts = [0, *ends]
        self.spans = dict(zip(frame.lengths, itertools.pairwise(starts), strict=True))
        self.before: list[_Piece] | None = None  # the pieces of the stages laid so far

    def lay(self, group: GroupedDim) -> Runs:
        """Return which indices of a dimension are on the ranks at this object's mesh coordinates, as Runs: a sequence
        of index ranges. `group` is the parsed notation for the dimension, such as (tp n).

        Each stage cuts what the last left.
        """
        for stage in group.stages:
            self.before = self._lay_terms(stage, cuts=())
        pieces = self.before or []
        try:
            # `from_ranges` takes a hole as its length n; among pieces it is (-1, n).
            return from_ranges(stop if start < 0 else (start, stop) for start, stop in pieces)
        except RunsError as error:
            message = self._explain_repeat(group, pieces) or f"'{group}': {error}"
            raise LayoutError(message) from None

    def _explain_repeat(self, group: GroupedDim, pieces: Iterable[_Piece]) -> str:
        """The error for a position that is in two of the pieces; "" if there is none."""
        spans = sorted(piece for piece in pieces if piece[0] >= 0)  # without holes
        for (_, stop), (start, _) in itertools.pairwise(spans):
            if start < stop:
                fix = "write each component once, and at most its length after %"
                return f"{self._describe_repeat(group, start)}; {fix}"
        return ""

    def _describe_repeat(self, group: GroupedDim, position: int) -> str:
        """The statement that this coordinate stores a position twice."""
        coords = ", ".join(f"{axis}={self.coords[axis]}" for axis in axes_of(group, self.frame))
        at = f" at {coords}" if coords else ""
        for name, (start, stop) in self.spans.items():
            if start <= position < stop:
                what = f"number {position - start} of {name!r}" if name else f"number {position}"
                return f"'{group}' stores {what} twice{at}"
        raise AssertionError(position)

    def _lay_terms(self, terms: Iterable[Term], cuts: tuple[_WordCut, ...]) -> list[_Piece]:
        """The pieces of these terms, one after the other, inside these cuts."""
        pieces: list[_Piece] = []
        for term in terms:
            pieces += self._lay_term(term, cuts)
        return pieces

    def _lay_term(self, term: Term, cuts: tuple[_WordCut, ...]) -> list[_Piece]:
        """The pieces of the term inside these cuts, for each choice of one part per number left of the component."""
        operands = self._read(term)
        self._check_parts(term, operands.left, cuts)
        choices = [self._list_cuts(word) for word in operands.left]
        pieces: list[_Piece] = []
        # The last word changes fastest: its parts lie next to each other in one part of the word before it.
        for chosen in itertools.product(*choices):
            inner = cuts + chosen
            if operands.leaf is None:
                pieces += self._lay_terms(term.group, inner)
            else:
                pieces += self._lay_leaf(operands.leaf, operands.right, inner)
        return pieces

    def _check_parts(self, term: Term, left: Sequence[Word], cuts: Iterable[_WordCut]) -> None:
        """Raise LayoutError if numbers make more parts than there are positions: each part takes time."""
        frame = self.frame
        words = [*left, *(cut.word for cut in cuts)]
        numbers = [word for word in words if not frame.is_axis(word) and frame.is_number(word)]
        parts = math.prod(frame.number(word.name) for word in numbers)
        positions = sum(frame.lengths.values())
        if parts > max(positions, FEW):
            what = f"'{term}' cuts {positions} positions into {parts} parts"
            raise LayoutError(f"{what}; write numbers for at most {max(positions, FEW)} parts")

    def _read(self, term: Term) -> _Operands:
        """The term's words by role. Raises LayoutError unless one of them is a component."""
        frame = self.frame
        if term.group:
            self._check_marks(term, term.words)
            return _Operands(term.words, None, ())
        # The positions of components: known ones or, as n in (q + k | tp n), a name for all that is laid so far.
        found = []
        for i, word in enumerate(term.words):
            if word.name in frame.lengths or (
                not frame.is_axis(word) and not frame.is_number(word)
            ):
                found.append(i)
        if len(found) != 1:
            components = " and ".join(str(term.words[i]) for i in found) or "none"
            what = f"'{term}' must have one component, and has {components}"
            raise LayoutError(f"{what}; {self._list_meanings()}")
        (at,) = found
        left, leaf, right = term.words[:at], term.words[at], term.words[at + 1 :]
        self._check_marks(term, left + right)
        _check_leaf(term, leaf)
        return _Operands(left, leaf, right)

    def _check_marks(self, term: Term, cutting: Iterable[Word]) -> None:
        """Raise LayoutError for a component's mark on a word that cuts, and for / on a number."""
        for word in cutting:
            if (word.stored, word.tile, word.cycle) != (None, None, None):
                raise LayoutError(
                    f"'{word}' in '{term}': =, ^ and % say how a component is stored, and {word.name} is not one; "
                    f"write the mark at the component"
                )
            if word.over is not None and not self.frame.is_axis(word):
                raise LayoutError(
                    f"'{word}' in '{term}': / says which neighbors along an axis keep the same, and {word.name} is "
                    f"not a mesh axis; leave the mark out"
                )

    def _list_meanings(self) -> str:
        """The known words by meaning, for error messages."""
        frame = self.frame
        known = {
            "components": frame.lengths,
            "mesh axes": frame.axes,
            "numbers": frame.numbers,
        }
        listed = [f"{meaning}: {', '.join(names) or 'none'}" for meaning, names in known.items()]
        return f"write one of {'; '.join(listed)}"

    def _list_cuts(self, word: Word) -> list[_WordCut]:
        """The cuts that the word stands for: one for an axis, all parts in order for a number."""
        frame = self.frame
        if not frame.is_axis(word):
            if not frame.is_number(word):
                raise LayoutError(f"unknown word '{word}'; {self._list_meanings()}")
            parts = frame.number(word.name)
            return [_WordCut(word, parts, part) for part in range(parts)]
        size = frame.axes[str(word.name)]
        part = self.coords[str(word.name)]
        if word.over is not None:
            copies = frame.number(word.over)
            if copies < 1 or size % copies:
                what = f"'{word}': {copies} does not divide {word.name}={size}"
                raise LayoutError(f"{what}; write a divisor of {size} after /")
            size //= copies
            part //= copies
        return [_WordCut(word, size, part)]

    def _lay_leaf(
        self, leaf: Word, right: tuple[Word, ...], cuts: tuple[_WordCut, ...]
    ) -> list[_Piece]:
        """The pieces that the cuts leave of the component `leaf`, which is cut between blocks: the words `right` of it
        in the term are the numbers in a block, and perhaps an axis that deals out the blocks."""
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
        """Ranges of blocks: all of them, or those that an axis right of the component deals to this coordinate."""
        axes = [word for word in right if self.frame.is_axis(word)]
        if not axes:
            return [range(start, stop)]
        if len(axes) > 1:
            listed = " and ".join(map(str, axes))
            raise LayoutError(
                f"axes {listed} are both right of one component and deal out its blocks; "
                f"write only one of them there, and the other left of the component"
            )
        (cut,) = self._list_cuts(axes[0])
        # Round robin: every parts-th block, beginning with this coordinate's.
        dealt_here = range(start + cut.part, stop, cut.parts)
        return [range(block, block + 1) for block in dealt_here]

    def _fill_tiles(self, pieces: list[_Piece], leaf: Word) -> list[_Piece]:
        """The pieces of one part, with a hole behind them that completes the last tile."""
        if leaf.tile is None:
            return pieces
        tile = self.frame.number(leaf.tile)
        if tile < 1:
            what = f"'{leaf}' is padded to multiples of {tile}"
            raise LayoutError(f"{what}; write a positive number after ^")
        length = sum(map(_count, pieces))
        padding = -length % tile
        return [*pieces, (-1, padding)] if padding else pieces

    def _span(
        self, leaf: Word, length: int, grain: int, cuts: tuple[_WordCut, ...]
    ) -> tuple[int, int]:
        """First and end of the range of blocks that the cuts leave of the component."""
        if grain < 1 or length % grain:
            what = f"{length} positions of '{leaf}' do not divide evenly into blocks of {grain}"
            fix = f"write numbers after '{leaf}' whose product divides {length}"
            raise LayoutError(f"{what}; {fix}")
        start, stop = 0, length // grain
        for cut in cuts:
            start, stop = self._narrow(start, stop, cut, leaf)
        return start, stop

    def _find_grain(self, right: Iterable[Word]) -> int:
        """The size of a block, inside which nothing cuts: the product of the numbers right of a component."""
        numbers = [word.name for word in right if not self.frame.is_axis(word)]
        return math.prod(map(self.frame.number, numbers))

    def _list_pieces(self, leaf: Word) -> list[_Piece]:
        """The component's positions, with padding; a name of no component stands for all stages laid so far."""
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
        padded = self.frame.number(leaf.stored)
        if padded < length:
            raise LayoutError(
                f"'{leaf}': {length} positions do not fit into {padded}; write {length} or more after ="
            )
        hole = -1, padded - length
        return [*pieces, hole]

    def _repeat(self, pieces: list[_Piece], length: int, cycle: Number) -> list[_Piece]:
        """The pieces, of `length` positions together, repeated up to `cycle` positions."""
        slots = self.frame.number(cycle)
        # With more slots, a coordinate would store a position twice.
        most = length * math.prod(self.frame.axes.values())
        if slots > most:
            what = f"'%{cycle}' asks for {slots} slots, and {length} positions per coordinate are {most}"
            raise LayoutError(f"{what}; write at most {most} after %")
        times = -(-slots // length) if length else 0
        return list(_slice(pieces * times, 0, slots))

    def _narrow(self, start: int, stop: int, cut: _WordCut, leaf: Word) -> tuple[int, int]:
        """The cut's part of [start, stop)."""
        n = stop - start
        if cut.word.balanced:
            step, extra = divmod(n, cut.parts)
            # The first `extra` parts are larger by one, and those before this part shift it.
            lo = start + cut.part * step + min(cut.part, extra)
            return lo, lo + step + (cut.part < extra)
        if self.frame.exact and n % cut.parts:
            raise LayoutError(
                f"'{leaf}' has {n} positions or blocks, which do not divide into {cut.parts} equal "
                f"parts for '{cut.word}'; "
                f"choose sizes that divide, or write '{cut.word}~' for parts that differ by one, "
                "counted in each component by itself (so queries may lie apart from their keys)"
            )
        step = -(-n // cut.parts)  # rounded up, as torch.chunk
        lo = min(n, cut.part * step)
        return start + lo, start + min(n, lo + step)


def _check_leaf(term: Term, leaf: Word) -> None:
    """Raise LayoutError for a cutting word's mark on the component."""
    if leaf.over is not None or leaf.balanced:
        raise LayoutError(
            f"'{leaf}' in '{term}': / and ~ say how an axis or a number cuts, and {leaf.name} is cut; "
            f"leave the mark out"
        )


def _count(piece: _Piece) -> int:
    """The number of positions in the piece."""
    start, stop = piece
    return stop if start < 0 else stop - start


def _slice(pieces: Iterable[_Piece], lo: int, hi: int) -> Iterator[_Piece]:
    """Positions lo to hi of the pieces, counted over all of them."""
    passed = 0
    for start, stop in pieces:
        n = _count((start, stop))
        left = max(lo - passed, 0)
        right = min(hi - passed, n)
        if left < right:
            # Holes are (-1, their number).
            yield (-1, right - left) if start < 0 else (start + left, start + right)
        passed += n
