"""`tools/words.py`: sentences that it finds, and sentences that it leaves alone."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"


@pytest.fixture(scope="module")
def words() -> ModuleType:
    """The module of the tool, which is in no package."""
    spec = importlib.util.spec_from_file_location("words", ROOT / "tools" / "words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "A thread of its own.",
        "Programs are refused.",
        "A plan is a value. So is a layout.",
        "A plan is a value; neither is it changed.",
        "It waits so long.",
        "Ranks 8:4 are none.",
        "It is no slice.",
        "The layout follows from that of the tensor.",
        "Beside it lies another.",
        "The former checkpoint stays.",
        "Also where nobody reads them.",
        "The mover goes on.",
        "Quantised formats.",
    ],
)
def test_finds(words: ModuleType, text: str) -> None:
    (place,) = words.find_words(PAGE, f"One line.\n{text}")
    assert str(place).startswith("README.md:2: ")


@pytest.mark.parametrize(
    "text",
    [
        "A separate thread.",
        "So many that it is slow; as long as it lasts.",
        "None if there are none; there is no limit; `out` is None.",
        "It is no longer there, besides.",
        "See `Custom(beside=...)`.",
        "```sh\nmake anew\n```",
        ">>> beside\nanew\n",
    ],
)
def test_leaves_alone(words: ModuleType, text: str) -> None:
    assert not list(words.find_words(PAGE, text))


def test_text_after_an_example_counts(words: ModuleType) -> None:
    (place,) = words.find_words(PAGE, ">>> beside\n1\n\nMade anew.")
    assert place.line == 4


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("What a rank holds.", 1),
        ("As `fill`.", 1),
        ("The tensors of a rank.", 0),
        ("Whether it fits.", 0),
        ("Assign ranks.", 0),
    ],
)
def test_a_docstring_has_a_head(words: ModuleType, text: str, number: int) -> None:
    assert len(list(words.find_in_docstring(PAGE, text, 1))) == number


def test_public_docstrings(words: ModuleType) -> None:
    source = '''
"""A module."""
class Public:
    """A class."""
    def method(self):
        """A method."""
    def _private(self):
        """Private."""
def _private():
    """Private."""
'''
    found = list(words.list_docstrings(ast.parse(source)))
    assert found == [(2, "A module."), (4, "A class."), (6, "A method.")]
