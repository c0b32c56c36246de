"""Names: the pattern of a tensor's name, with numbers, alternatives and a star in it.

1. `{l}` is an **index**, a number such as that of a layer. `{ep e}` is the index e spread over the mesh axis
   ep: a name that ranks store has the local number there, the logical name has `{e}`, the global one.
2. `[q k v]` is a choice: one word per **component** of a fused tensor.
3. `*` is `weight` or `bias`, the same one everywhere in a row.
4. `...` at the end is any rest of a name, the same one in both names of a row.

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
"""What a star stands for."""

REST = "..."

PART = re.compile(
    r"\[(?P<choice>[^\]]*)\]|\{(?P<index>[^}]*)\}|(?P<star>\*)|(?P<rest>\.\.\.\Z)"
    r"|(?P<plain>(?:[^\[\]{}*.]+|(?!\.\.\.\Z)\.)+)"
)
# Between dots alone: the 1 of conv1d and w1 is part of a word. Others than str(number) are words too: 07, and what
# does not fit 64 bits.
NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")

SHOWN = {"choice": "[{}]", "index": "{{{}}}"}
"""How parts of several words are written; others are their word."""


@dataclass(frozen=True, slots=True)
class PatternPart:
    """A part of a pattern, by its kind.

    A "choice" has a word per component, and an "index" the words of the stage that spreads a number, most significant
    first. A "star", the "rest" at the end and what is "plain" are one word, as written.
    """

    kind: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return SHOWN.get(self.kind, "{}").format(self.name)

    @property
    def name(self) -> str:
        """The words as one: of an index alone its name, of a spread one how it is spread."""
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Name:
    """A pattern of names, in parts."""

    parts: tuple[PatternPart, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    def _list(self, kind: str) -> tuple[PatternPart, ...]:
        return tuple(part for part in self.parts if part.kind == kind)

    @property
    def components(self) -> tuple[str, ...]:
        """The words of its choice; none where there is no choice."""
        return next((part.words for part in self._list("choice")), ())

    @property
    def indices(self) -> tuple[PatternPart, ...]:
        """Its numbers, in order."""
        return self._list("index")

    @property
    def starred(self) -> bool:
        """Whether it has a star."""
        return bool(self._list("star"))

    @property
    def is_open(self) -> bool:
        """Whether it ends in any rest."""
        return bool(self._list("rest"))

    def close(self, rest: str) -> Name:
        """The name with this in the place of any rest: a template, of which each {} becomes a number of its own."""
        for i in range(rest.count("{}")):
            rest = rest.replace("{}", f"{{rest{i}}}", 1)
        return parse(str(self).removesuffix(REST) + rest)

    def fill(self, numbers: Mapping[str, object], component: str = "", star: str = "") -> str:
        """The name with these numbers, by index, in their places."""
        given = {"choice": component, "star": star, "rest": ""}
        words = []
        for part in self.parts:
            word = numbers[part.name] if part.kind == "index" else given.get(part.kind, part.name)
            words.append(str(word))
        return "".join(words)

    def template(self, component: str = "", star: str = "") -> str:
        """The name with {} for every number, as `split` gives it."""
        return self.fill({index.name: "{}" for index in self.indices}, component, star)


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether the name fits one of the globs. Raises StoreError for a text, whose * alone would fit every name."""
    return any(fnmatchcase(name, glob) for glob in listed(globs, "globs of names", StoreError))


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """A tensor's name as a template with {} for each number between dots, and the numbers."""
    words = NUMBER.split(name)
    return "{}".join(words[::2]), tuple(map(int, words[1::2]))


def parse(text: str) -> Name:
    """The pattern that the text is. Raises NotationError with a caret."""
    parts: list[PatternPart] = []
    at = 0
    while at < len(text):
        match = PART.match(text, at)
        if match is None:
            what = f"unexpected {text[at]!r} in a name"
            raise NotationError(what, text, at, "write [q k v], {l} or {ep e}, and *")
        kind = match.lastgroup or ""
        words = tuple(match[kind].split()) if kind in SHOWN else (match[kind],)
        if not words:
            raise NotationError("nothing between the brackets", text, at, "write a word")
        parts.append(PatternPart(kind, words))
        at = match.end()
    for kind, what in (("choice", "choice [...]"), ("star", "star")):
        if sum(part.kind == kind for part in parts) > 1:
            raise NotationError(f"a name has one {what} at most", text, 0, "split the row in two")
    return Name(tuple(parts))
