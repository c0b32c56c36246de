"""Names: the pattern of a tensor's name, with numbers, alternatives and a star in it.

1. `{l}` is an **index**, such as a layer's number. `{ep e}` is the index e spread over the mesh axis ep: the native
   name has the local number there, the logical name has `{e}`, the global number.
2. `[q k v]` is a choice: one word per **component** of a fused tensor.
3. `*` is `weight` or `bias`, the same word everywhere in a row.
4. `...` at the end is any rest of a name, the same in both names of a row.

>>> name = parse("model.layers.{l}.self_attn.[q k v]_proj.*")
>>> name.components, [index.name for index in name.indices]
(('q', 'k', 'v'), ['l'])
>>> name.fill({"l": 3}, component="k", star="bias")
'model.layers.3.self_attn.k_proj.bias'
>>> split("model.layers.3.mlp.experts.17.up_proj.weight")
('model.layers.{}.mlp.experts.{}.up_proj.weight', (3, 17))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardmath.base.arguments import listed
from shardmath.base.errors import NotationError, StoreError

__all__ = ["STARS", "Name", "PatternPart", "matches", "parse", "split"]

STARS = ("weight", "bias")
"""The words for which a star stands."""

REST = "..."

PART = re.compile(
    r"\[(?P<choice>[^\]]*)\]|\{(?P<index>[^}]*)\}|(?P<star>\*)|(?P<rest>\.\.\.\Z)"
    r"|(?P<plain>(?:[^\[\]{}*.]+|(?!\.\.\.\Z)\.)+)"
)
# Only whole words between dots: the 1 of conv1d and w1 is part of a word. Digits that str(number) would not write,
# such as 07, are words, and so are numbers that do not fit 64 bits.
NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")

BRACKETS = {"choice": "[{}]", "index": "{{{}}}"}
"""The written form of parts with several words; other parts are written as their word."""


@dataclass(frozen=True, slots=True)
class PatternPart:
    """A part of a pattern of tensor names: plain text, a choice such as [q k v], an index such as {l}, `*` for "weight"
    or "bias", or `...` for any end of a name.

    A "choice" has a word per component, an "index" the words that spread its number, most significant first. A "star",
    the "rest" at the end and "plain" text are one word, as written.
    """

    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return BRACKETS.get(self.kind, "{}").format(self.name)

    @property
    def name(self) -> str:
        """The words of the part joined by blanks, such as "l" for the index {l}, or "ep e" for {ep e}."""
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Name:
    """A pattern of tensor names, such as `layers.{l}.[q k v].*`, parsed into PatternParts."""

    parts: tuple[PatternPart, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    def _list_parts(self, kind: str) -> tuple[PatternPart, ...]:
        return tuple(part for part in self.parts if part.kind == kind)

    @property
    def components(self) -> tuple[str, ...]:
        """The words of the pattern's choice, such as ("q", "k", "v") for [q k v]; empty without a choice."""
        return next((part.words for part in self._list_parts("choice")), ())

    @property
    def indices(self) -> tuple[PatternPart, ...]:
        """The indices of the pattern, such as {l}, in order, as PatternParts."""
        return self._list_parts("index")

    @property
    def starred(self) -> bool:
        """Whether the pattern has a star, which stands for `weight` or `bias`."""
        return bool(self._list_parts("star"))

    @property
    def is_open(self) -> bool:
        """Whether the pattern ends in `...`, which stands for any rest of a name."""
        return bool(self._list_parts("rest"))

    def close(self, rest: str) -> Name:
        """Replace the `...` at the pattern's end with `rest`, in which each {} becomes a named index {rest0}, {rest1},
        ...; return the new pattern."""
        for i in range(rest.count("{}")):
            rest = rest.replace("{}", f"{{rest{i}}}", 1)
        return parse(str(self).removesuffix(REST) + rest)

    def fill(self, numbers: Mapping[str, object], component: str = "", star: str = "") -> str:
        """Return the pattern as a name: with `numbers` for its indices such as {l}, `component` for its choice such as
        [q k v], and `star` for `*`.

        `numbers` has the number of each index by name; a `...` at the end is left out.
        """
        by_kind = {"choice": component, "star": star, "rest": ""}
        words = []
        for part in self.parts:
            plain = by_kind.get(part.kind, part.name)
            word = numbers[part.name] if part.kind == "index" else plain
            words.append(str(word))
        return "".join(words)

    def template(self, component: str = "", star: str = "") -> str:
        """Return the pattern as text, with {} for each index, `component` for its choice, and `star` for its `*`.

        A `...` at the end is left out.
        """
        return self.fill({index.name: "{}" for index in self.indices}, component, star)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether `name` matches any pattern in `globs`, as in fnmatch. Raises StoreError if `globs` is a single text."""
    return any(fnmatchcase(name, glob) for glob in listed(globs, "globs of names", StoreError))


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """Replace each dot-separated number in `name` (3, not 07) by {}; return this template and a tuple of numbers."""
    pieces = NUMBER.split(name)  # text and numbers in turn, text first
    return "{}".join(pieces[::2]), tuple(map(int, pieces[1::2]))


def parse(text: str) -> Name:
    """Parse a pattern of tensor names, such as `layers.{l}.[q k v].*`. Raises NotationError, which shows the position
    of the mistake, if `text` is malformed."""
    parts: list[PatternPart] = []
    at = 0
    while at < len(text):
        match = PART.match(text, at)
        if match is None:
            what = f"unexpected {text[at]!r} in a name"
            raise NotationError(what, text, at, "write plain text, [q k v], {l}, {ep e} or *")
        kind = match.lastgroup or ""
        words = tuple(match[kind].split()) if kind in BRACKETS else (match[kind],)
        if not words:
            fix = "write a word between them, such as [q k v] or {l}"
            raise NotationError(f"nothing between the brackets {match[0]}", text, at, fix)
        parts.append(PatternPart(kind, words))
        at = match.end()
    for kind, written in (("choice", "choice [...]"), ("star", "star")):
        if sum(part.kind == kind for part in parts) > 1:
            raise NotationError(
                f"a name has one {written} at most", text, 0, "keep one, and write a row per word"
            )
    return Name(tuple(parts))
