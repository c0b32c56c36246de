"""Reader: the text of a layout as tokens with their positions, and the axes and rules that names stand for.

Only what the grammar of `notation` needs: look at the next token, take it, or raise an error with a
caret under it.

>>> [token.text for token in list_tokens("(tp n)=<0:4 -2>")]
['(', 'tp', 'n', ')', '=<', '0', ':', '4', '-', '2', '>', '']
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn, TypeAlias

from shardmath.base.errors import NotationError
from shardmath.base.memo import memo
from shardmath.layouts.placement import Placement

__all__ = ["MARKS", "Axes", "Cursor", "LayoutReader", "Rules", "Token", "list_tokens", "join_names"]

Rules: TypeAlias = Mapping[str, Placement]
"""Placements by their names in the text."""
Axes: TypeAlias = Mapping[str, int]
"""Mesh axes and their sizes."""

DIGITS = 18
"""The most digits of an integer; more would not fit 64 bits."""

MARKS = "( ) [ ] { } < > + : | = =< ~ * @ - ..."
"""The marks of a layout's text."""


class Token(NamedTuple):
    """A token of a layout's text: its kind, its characters, and its offset in the text. The kind is `word`, `int`,
    `mark` (punctuation) or `end` (the end of the text)."""

    kind: str
    text: str
    at: int


@memo(16)
def _make_pattern(marks: str) -> re.Pattern[str]:
    """The pattern of a token with these marks; it takes the longest mark that fits."""
    longest_first = sorted(marks.split(), key=len, reverse=True)
    mark = "|".join(map(re.escape, longest_first))
    return re.compile(rf"\s*(?:(?P<word>[^\W\d]\w*)|(?P<int>[0-9]+)|(?P<mark>{mark}))")


def list_tokens(text: str, marks: str = MARKS) -> Iterator[Token]:
    """Yield the tokens of `text`, and then a token of kind "end". `marks` is the punctuation that can occur in `text`,
    as one string with blanks between the marks, such as "( ) | ...".

    Raises NotationError at a character that begins no token.
    """
    pattern = _make_pattern(marks)
    at, end = 0, len(text.rstrip())
    while at < end:
        match = pattern.match(text, at)
        if match is None:
            at = len(text) - len(text[at:].lstrip())  # the caret stands behind blanks
            fix = f"use names, integers and {marks}"
            raise NotationError(f"unexpected character {text[at]!r}", text, at, fix)
        kind = match.lastgroup or ""
        yield Token(kind, match[kind], match.start(kind))
        at = match.end()
    yield Token("end", "", len(text))


class Cursor:
    """A reader of a text, token by token from left to right."""

    def __init__(self, text: str, marks: str = MARKS) -> None:
        self.text = text
        self.tokens = list(list_tokens(text, marks))
        self.next = 0

    def fail(self, what: str, at: int, fix: str) -> NoReturn:
        """Raise NotationError for the text at position `at`. In the message, `what` says what is wrong, and `fix` says
        what to write instead."""
        raise NotationError(what, self.text, at, fix)

    @property
    def here(self) -> Token:
        """The next token, without moving past it."""
        return self.tokens[self.next]

    def _fail_expecting(self, expected: str, fix: str) -> NoReturn:
        """Raise NotationError: the next token is not the expected one."""
        _, text, at = self.here
        found = repr(text) if text else "the end of the text"
        self.fail(f"expected {expected}, found {found}", at, fix)

    def take(self) -> Token:
        """Return the next token and move past it."""
        self.next += 1
        return self.tokens[self.next - 1]

    def accept(self, text: str) -> bool:
        """Move past the next token if it is the punctuation `text`; return whether it was."""
        matches = self.here.kind == "mark" and self.here.text == text
        self.next += matches
        return matches

    def expect(self, text: str, fix: str) -> None:
        """Move past the next token, which must be the punctuation `text`. Otherwise raises NotationError; `fix`, the
        advice in its message, says what to write."""
        if not self.accept(text):
            self._fail_expecting(repr(text), fix)

    def integer(self) -> int:
        """Move past the next token and return it as an int. Raises NotationError if it is not an integer."""
        if self.here.kind != "int":
            self._fail_expecting("an integer", "write a number")
        _, digits, at = self.take()
        if len(digits) > DIGITS:
            self.fail(f"an integer of {len(digits)} digits", at, f"write at most {DIGITS} digits")
        return int(digits)

    def word(self, what: str) -> Token:
        """Move past the next token, which must be a word, and return it. Otherwise raises NotationError; `what`
        describes the expected word in its message, such as "a mesh axis"."""
        if self.here.kind != "word":
            self._fail_expecting(what, f"write {what}")
        return self.take()


class LayoutReader(Cursor):
    """A reader of a layout's text, made with the tensor's shape and the sizes of the mesh axes. It records which names
    of dimensions and which mesh axes the text has used so far."""

    def __init__(self, text: str, shape: tuple[int, ...], axes: Axes, rules: Rules) -> None:
        super().__init__(text)
        self.shape = shape
        self.axes = axes
        self.rules = rules
        self.names: dict[str, int] = {}  # free name -> its dimension
        self.used: dict[str, int] = {}  # mesh axis -> where it was used

    def axis(self) -> Token:
        """Move past the next token, a mesh axis's name, and return it. Raises NotationError for any other token."""
        token = self.word("a mesh axis")
        _, name, at = token
        if name not in self.axes:
            fix = f"use one of the mesh axes ({join_names(self.axes)})"
            self.fail(f"unknown mesh axis {name!r}", at, fix)
        return token


def join_names(names: Mapping[str, object]) -> str:
    """Join the keys of `names` with commas, for error messages; "none" if there are no names."""
    return ", ".join(names) or "none"
