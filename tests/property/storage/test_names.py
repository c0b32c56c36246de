"""Names: patterns, what fills them, and what they are split into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import NotationError
from shardmath.models.storage import names

WORDS = st.lists(st.sampled_from(["layers", "mlp", "w1", "conv1d", "experts", "a_b"]), min_size=1)
NUMBERS = st.lists(st.integers(0, 300), max_size=3)


@given(WORDS, NUMBERS)
def test_numbers_between_dots_are_split_off(words: list[str], numbers: list[int]) -> None:
    mixed: list[str] = []
    for i, word in enumerate(words):
        mixed.append(word)
        mixed += [str(numbers[i])] if i < len(numbers) else []
    template, found = names.split(".".join(mixed))
    assert list(found) == numbers[: len(words)]
    assert template.replace("{}", "%d") % found == ".".join(mixed)


def test_a_name_is_filled() -> None:
    name = names.parse("layers.{l}.experts.local.{ep e}.[gate up]_proj.*")
    assert str(name) == "layers.{l}.experts.local.{ep e}.[gate up]_proj.*"
    assert name.components == ("gate", "up")
    filled = name.fill({"l": 2, "ep e": 0}, component="up", star="bias")
    assert filled == "layers.2.experts.local.0.up_proj.bias"
    assert name.template("gate", "weight") == "layers.{}.experts.local.{}.gate_proj.weight"


@pytest.mark.parametrize(
    ("text", "position", "what"),
    [
        ("a.{", 2, "unexpected '{' in a name"),
        ("a.[]", 2, "nothing between the brackets []"),
        ("[a b].[c d]", 0, "a name has one choice [...] at most"),
        ("*.*", 0, "a name has one star at most"),
    ],
)
def test_what_is_no_name(text: str, position: int, what: str) -> None:
    with pytest.raises(NotationError) as caught:
        names.parse(text)
    assert (caught.value.what, caught.value.position) == (what, position)
