"""Words that make a reader read a sentence twice, found in pages, notebooks and public docstrings.

    python tools/words.py                each place: file, line, what stands there, and what to write
    python tools/words.py --check        the same, and exits 1 if there is any

Pages are README.md, AGENTS.md, CONTRIBUTING.md and docs/, without code. Public docstrings belong to modules, and to
classes and functions whose names, and whose class's name, begin without an underscore. A pattern cannot see everything,
such as a verb that is too far from its subject: that needs a reader.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FRONT = ("README.md", "AGENTS.md", "CONTRIBUTING.md")
PACKAGES = ("shardmath", "backends", "integrations")

CODE = re.compile(
    r"^ *```.*?^ *```$"  # a block of a page
    r"|^ *>>> .*?(?=\n\s*\n|\Z)"  # an example of a docstring, up to an empty line
    r"|`[^`\n]*`",
    re.MULTILINE | re.DOTALL,
)

BRITISH = (
    "behaviour|centre|colour|favour|grey|honour|initialis|labell|materialis|modell|neighbour"
    "|normalis|optimis|quantis|recognis|synchronis"
)

PATTERNS = {
    r"\bof (its|their|your|our) own\b": "its own X, separate, custom",
    r"\b(is|are|was|were) refused\b": "who raises what, or 'not supported'",
    r"(^|[.:;] )(so|nor|neither) (is|are|has|have|had|does|do|did|was|were|can|may)\b": (
        "a sentence that begins with its subject"
    ),
    r"\banew\b": "again",
    r"\bin the places? of\b": "instead of",
    r"\bunder ?way\b": "in flight, running",
    r"\bbut for\b": "except",
    r"\bso (many|much|long)\b(?! (as|that))": "the number, this long",
    r"(?<!there )\b(is|are|was|were) (?-i:none|nobody's)\b": "does not have one, is not one",
    r"(?<!there )\bis no (?!longer|more|less|such|different|way|need|other)": "is not a",
    r"\b(that|those|same) of\b": "the noun again",
    r"\bbeside\b|\bthe former\b": "next to, in addition to, together with; previous",
    r"\balike\b": "equally, in the same way",
    r"\balso (where|if)\b": "even if",
    r"\bgo(es)? on\b": "continues",
    r"\bby which\b": "a sentence that says who does it",
    rf"\b({BRITISH})": "American spelling",
}
"""What to look for, in any case, and what to write instead."""

HEADLESS = re.compile(r"(What|Who|Which|Where|That of|Those of|As|So)\b")
"""How a docstring does not begin."""


class Place(NamedTuple):
    """A place where a pattern was found, and what to write instead."""

    path: Path
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT)
        return f"{path}:{self.line}: {self.found.strip()!r}; write {self.instead}"


def find_words(path: Path, text: str, first: int = 1) -> Iterator[Place]:
    """The patterns in a text that begins at line `first` of a file; code does not count."""
    prose = CODE.sub(lambda code: re.sub(".", "x", code[0]), text)
    for pattern, instead in PATTERNS.items():
        for match in re.finditer(pattern, prose, re.MULTILINE | re.IGNORECASE):
            line = first + prose.count("\n", 0, match.start())
            yield Place(path, line, match[0], instead)


def find_in_docstring(path: Path, text: str, first: int) -> Iterator[Place]:
    """The patterns in a docstring, and its beginning if that is neither a noun nor a verb."""
    yield from find_words(path, text, first)
    if HEADLESS.match(text):
        yield Place(path, first, text.splitlines()[0][:60], "a noun, or an imperative")


def find_all() -> Iterator[Place]:
    """The patterns in all pages, notebooks and public docstrings."""
    for page in [*(ROOT / name for name in FRONT), *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from find_words(page, page.read_text())
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield from find_words(notebook, "".join(cell["source"]))
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, text in list_docstrings(ast.parse(path.read_text())):
                yield from find_in_docstring(path, text, line)


def list_docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and texts of the public docstrings of a module or a class, and within it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield node.body[0].lineno, text
    if isinstance(node, ast.Module | ast.ClassDef):
        for inner in node.body:
            if not getattr(inner, "name", "_").startswith("_"):
                yield from list_docstrings(inner)


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    places = list(find_all())
    for place in places:
        print(place)
    return int(bool(places) and list(arguments) == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
