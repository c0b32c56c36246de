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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shardmath.base.errors import NotationError

__all__ = ["STARS", "Choice", "Index", "Name", "Rest", "Star", "parse", "split"]

STARS = ("weight", "bias")
"""What a star stands for."""

REST = "..."

PART = re.compile(
    r"\[(?P<choice>[^\]]*)\]|\{(?P<index>[^}]*)\}|(?P<star>\*)|(?P<plain>[^\[\]{}*]+)"
)
# Between dots alone: the 1 of conv1d and w1 is part of a word. Others than str(number) are words too: 07, and what
# does not fit 64 bits.
NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")


@dataclass(frozen=True, slots=True)
class Choice:
    """One word per component."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"[{' '.join(self.words)}]"


@dataclass(frozen=True, slots=True)
class Index:
    """A number, and how it is spread over mesh axes: the words of a stage, most significant first."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{{{' '.join(self.words)}}}"

    @property
    def name(self) -> str:
        """The words as one: of an index alone its name, of a spread one how it is spread."""
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Star:
    """Weight or bias."""

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True)
class Rest:
    """Any rest of a name."""

    def __str__(self) -> str:
        return REST


Part: TypeAlias = str | Choice | Index | Star | Rest


@dataclass(frozen=True, slots=True)
class Name:
    """A pattern of names, in parts."""

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def components(self) -> tuple[str, ...]:
        """The words of its choice; none where there is no choice."""
        for part in self.parts:
            if isinstance(part, Choice):
                return part.words
        return ()

    @property
    def indices(self) -> tuple[Index, ...]:
        """Its numbers, in order."""
        return tuple(part for part in self.parts if isinstance(part, Index))

    @property
    def starred(self) -> bool:
        """Whether it has a star."""
        return Star() in self.parts

    @property
    def is_open(self) -> bool:
        """Whether it ends in any rest."""
        return Rest() in self.parts

    def close(self, rest: str) -> Name:
        """The name with this in the place of any rest: a template, of which each {} becomes a number of its own."""
        for i in range(rest.count("{}")):
            rest = rest.replace("{}", f"{{rest{i}}}", 1)
        return parse(str(self).removesuffix(REST) + rest)

    def fill(self, numbers: Mapping[str, object], component: str = "", star: str = "") -> str:
        """The name with these numbers, by index, in their places."""
        words = []
        for part in self.parts:
            if isinstance(part, Choice):
                words.append(component)
            elif isinstance(part, Star):
                words.append(star)
            elif isinstance(part, Index):
                words.append(str(numbers[part.name]))
            elif isinstance(part, Rest):
                continue
            else:
                words.append(part)
        return "".join(words)

    def template(self, component: str = "", star: str = "") -> str:
        """The name with {} for every number, as `split` gives it."""
        return self.fill({index.name: "{}" for index in self.indices}, component, star)


def split(name: str) -> tuple[str, tuple[int, ...]]:
    """A tensor's name as a template with {} for each number between dots, and the numbers."""
    words = NUMBER.split(name)
    return "{}".join(words[::2]), tuple(map(int, words[1::2]))


def parse(text: str) -> Name:
    """The pattern that the text is. Raises NotationError with a caret."""
    parts: list[Part] = []
    at = 0
    end = len(text) - len(REST) * text.endswith(REST)
    while at < end:
        match = PART.match(text, at, end)
        if match is None:
            raise NotationError(
                f"unexpected {text[at]!r} in a name",
                text,
                at,
                "write [q k v], {l} or {ep e}, and *",
            )
        parts.append(_read_part(match, text))
        at = match.end()
    if end < len(text):
        parts.append(Rest())
    for kind, what in ((Choice, "choice [...]"), (Star, "star")):
        if sum(isinstance(part, kind) for part in parts) > 1:
            raise NotationError(f"a name has one {what} at most", text, 0, "split the row in two")
    return Name(tuple(parts))


def _read_part(match: re.Match[str], text: str) -> Part:
    """What the match stands for. Raises NotationError where brackets have nothing in them."""
    kind = match.lastgroup
    if kind == "star":
        return Star()
    if kind == "plain":
        return match["plain"]
    words = tuple(match[kind or ""].split())
    if not words:
        raise NotationError("nothing between the brackets", text, match.start(), "write a word")
    return Choice(words) if kind == "choice" else Index(words)
