"""Structure: the written form of how components lie along one dimension of a stored tensor.

1. A word is a **component** (`q`), a mesh axis (`tp`) or a number of the side (`groups`, or 2). Which one, is
   resolved when the structure is laid out; a term's component is its one word that is neither axis nor number.
2. Left of a component, most significant first, each word cuts it: an axis keeps its coordinate's part,
   a number goes through its parts in order. Before a group the cut is made in *each* component of the group:
   `tp (gate + up)` is the rank's part of gate, then its part of up.
3. `+` puts terms one after the other; `|` takes everything before it as one sequence and cuts it again.
4. Right of a component a number is its **grain**: cuts fall between blocks of that size. An axis there
   deals the blocks round robin.
5. `n=vocab` is stored as vocab positions, padded at the end; each part of `n^128` is padded to a multiple of 128.
   `e%slots` is stored as slots positions: after its end come copies of its first ones.
6. `tp/rep`: `rep` neighbors along tp keep the same part. `ep~`: sizes may differ by one, larger ones first.

>>> print(parse("(groups (q + k)|tp  n=vocab)"))
(groups (q + k) | tp n=vocab)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.errors import NotationError
from shardmath.layouts.reader import Cursor

__all__ = ["GroupedDim", "Number", "Structure", "Term", "Word", "list_words", "parse", "read_dims"]

MARKS = "( ) + | = ^ % ~ / ..."

MOST_NESTED = 64
"""The deepest nesting of groups, far below the limit of Python's stack."""

Number: TypeAlias = int | str
"""An integer, or the name of one."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word in the notation for a dimension of a stored tensor, such as (tp q): the name of a part (q) or of a mesh
    axis (tp), or a number. A suffix modifies it: `n=vocab` is n padded to the size vocab.

    `over` is the number after /, `stored` after =, `tile` after ^, `cycle` after %; `balanced` means ~.
    """

    name: Number
    over: Number | None = None
    balanced: bool = False
    stored: Number | None = None
    tile: Number | None = None
    cycle: Number | None = None

    def __str__(self) -> str:
        over = "" if self.over is None else f"/{self.over}"
        marks = {"=": self.stored, "^": self.tile, "%": self.cycle}
        written = [f"{mark}{number}" for mark, number in marks.items() if number is not None]
        return f"{self.name}{over}{'~' * self.balanced}{''.join(written)}"


@dataclass(frozen=True, slots=True)
class Term:
    """A term in the notation for a dimension of a stored tensor, such as `tp q`: first mesh axes or numbers (tp), and
    then the part that they divide (q). In `tp (q + k)`, tp divides each of the parts in parentheses."""

    words: tuple[Word, ...]
    group: tuple[Term, ...] = ()

    def __str__(self) -> str:
        words = [str(word) for word in self.words]
        if self.group:
            words.append(f"({_join_terms(self.group)})")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class GroupedDim:
    """The notation for a dimension of a stored tensor in parentheses, such as (q + k | tp n): q and k are concatenated,
    and then the result is divided over mesh axis tp into ranges of n elements.

    Each sum is a stage. Each stage cuts what the stages before it make.
    """

    stages: tuple[tuple[Term, ...], ...]

    def __str__(self) -> str:
        return f"({' | '.join(map(_join_terms, self.stages))})"


Structure: TypeAlias = GroupedDim | str
"""A dimension: a group, a free name that is not divided, or `...`."""


def _join_terms(terms: Iterable[Term]) -> str:
    return " + ".join(map(str, terms))


def list_words(dims: Iterable[Structure]) -> Iterator[Word]:
    """Yield every Word in the dimensions `dims`; only dimensions written in parentheses have any."""
    groups = [dim for dim in dims if isinstance(dim, GroupedDim)]
    terms = [term for group in groups for stage in group.stages for term in stage]
    while terms:
        term = terms.pop()
        terms += term.group
        yield from term.words


def parse(text: str) -> GroupedDim:
    """Parse one dimension written in parentheses, such as (tp n). Raises NotationError, which shows the position of the
    mistake, if `text` is something else."""
    dims = read_dims(text)
    if len(dims) != 1 or not isinstance(dims[0], GroupedDim):
        what = f"expected one dimension in parentheses, found {text!r}"
        raise NotationError(what, text, 0, "write one, such as (tp n)")
    return dims[0]


def read_dims(text: str) -> tuple[Structure, ...]:
    """Parse a text of dimensions, such as `(tp n) k`; return for each dimension a GroupedDim if it is in parentheses,
    else its text.

    Raises NotationError with a caret.
    """
    cursor = Cursor(text, MARKS)
    dims: list[Structure] = []
    while cursor.here.kind != "end":
        if cursor.accept("("):
            dims.append(_read_group(cursor))
        elif cursor.here.text == "...":
            _, _, position = cursor.take()
            if "..." in dims:
                cursor.fail("'...' twice", position, "write it once, for all remaining dimensions")
            dims.append("...")
        else:
            dims.append(cursor.word("a dimension: a name, ... or a group").text)
    return tuple(dims)


def _read_group(cursor: Cursor) -> GroupedDim:
    """The stages of a group, up to its closing parenthesis."""
    stages = [_read_terms(cursor)]
    while cursor.accept("|"):
        stages.append(_read_terms(cursor))
    cursor.expect(")", "close the group")
    return GroupedDim(tuple(stages))


def _read_terms(cursor: Cursor, depth: int = 0) -> tuple[Term, ...]:
    """Terms with + between them, inside `depth` groups."""
    terms = [_read_term(cursor, depth)]
    while cursor.accept("+"):
        terms.append(_read_term(cursor, depth))
    return tuple(terms)


def _read_term(cursor: Cursor, depth: int) -> Term:
    """Words, and the group behind them, if any."""
    if depth > MOST_NESTED:
        fix = f"write at most {MOST_NESTED} parentheses inside each other"
        cursor.fail(f"more than {MOST_NESTED} nested groups", cursor.here.at, fix)
    start = cursor.here.at
    words = []
    while cursor.here.kind in ("word", "int"):
        words.append(_read_word(cursor))
    # Words before a group cut each of its components; '|' would cut them as one, so only outermost groups have it.
    if cursor.accept("("):
        group = _read_terms(cursor, depth + 1)
        cursor.expect(")", "close the group with ')'; '|' is allowed only in the outermost group")
        return Term(tuple(words), group)
    if not words:
        found = repr(cursor.here.text) if cursor.here.text else "the end of the text"
        cursor.fail(f"expected a component, found {found}", start, "write a component, such as n")
    return Term(tuple(words))


def _read_word(cursor: Cursor) -> Word:
    """A word with its marks."""
    name = _read_number(cursor)
    over = _read_marked(cursor, "/")
    balanced = cursor.accept("~")
    stored = _read_marked(cursor, "=")
    tile = _read_marked(cursor, "^")
    cycle = _read_marked(cursor, "%")
    return Word(name, over, balanced, stored, tile, cycle)


def _read_marked(cursor: Cursor, mark: str) -> Number | None:
    """The number behind the mark; None if the mark is not next."""
    return _read_number(cursor) if cursor.accept(mark) else None


def _read_number(cursor: Cursor) -> Number:
    """An integer, or a name."""
    if cursor.here.kind == "int":
        return cursor.integer()
    return cursor.word("a name or a number").text
