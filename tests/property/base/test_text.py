"""Texts for people: sizes that are read back, ranks that lose nobody, shares that are never called nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath.base.text import (
    LONGEST_MESSAGE,
    message_of,
    plural,
    read_bytes,
    show_bytes,
    show_ranks,
    show_share,
    word_error,
)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2.5e9, "2.50 GB")]
)
def test_sizes(nbytes: float, text: str) -> None:
    assert show_bytes(nbytes) == text


@given(st.integers(0, 10**15))
def test_sizes_are_read_back(nbytes: int) -> None:
    """To the three digits or more that are shown; and exactly as numbers."""
    assert read_bytes(str(nbytes)) == nbytes
    read = read_bytes(show_bytes(nbytes))
    assert read is not None and abs(read - nbytes) <= nbytes / 200


@pytest.mark.parametrize(
    "text", ["", "B", "MB", "-1", "1e3", "5 QB", "1.MB", "0x10", "\u00b2", "1" * 19]
)
def test_what_is_not_a_size(text: str) -> None:
    assert read_bytes(text) is None


RANKS = st.sets(st.integers(0, 40), min_size=1).flatmap(
    lambda ranks: st.sampled_from([sorted(ranks), list(ranks)[::-1]])
)


@given(RANKS, st.sampled_from([None, 2, 3]))
def test_ranks_are_all_named(ranks: list[int], joined_from: int | None) -> None:
    """In their order, read back from the text; and one word for one rank."""
    word, _, listed = show_ranks(ranks, joined_from=joined_from).partition(" ")
    found: list[int] = []
    for span in listed.split(", "):
        first, dash, last = span.partition("-")
        run = range(int(first), int(last or first) + 1)
        assert not dash or (joined_from is not None and len(run) >= joined_from)
        found += run
    assert found == ranks and word == ("rank" if len(ranks) == 1 else "ranks")
    assert show_ranks(ranks, noun=False, joined_from=joined_from) == listed


def test_many_ranks_are_counted() -> None:
    """Also more than Python counts in a range."""
    shown = show_ranks(range(0, 99, 2), most=6)
    assert shown == "ranks 0, 2, 4, ... (50 in all)"
    assert show_ranks([range(1, 10**20)]) == f"ranks 1-{10**20 - 1}"
    assert show_ranks([range(10**6)], joined_from=None, most=2) == "ranks 0, ... (1,000,000 in all)"
    assert show_ranks([], noun=False) == ""


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_shares(part: int, whole: int) -> None:
    assert (show_share(part, whole) == "0.00 %") == (part == 0 or whole == 0)


def test_counts() -> None:
    assert (plural(1, "rank"), plural([], "rank")) == ("1 rank", "0 ranks")


class Silent(Exception):
    def __str__(self) -> str:
        raise self


def test_an_error_that_cannot_be_printed() -> None:
    """Nobody who words an error for others is stopped by it."""
    assert message_of(Silent()) == "its message cannot be printed"
    assert word_error(Silent()) == "Silent: its message cannot be printed"


def test_what_others_say_can_be_stored() -> None:
    """Servers send half a surrogate pair, which UTF-8 has not, and torch's store takes no other text."""
    assert message_of("\ud800 é") == "\\ud800 é"
    assert message_of(ValueError("\ud800")) == "\\ud800"
    assert len(message_of(ValueError("a" * 10**7))) == LONGEST_MESSAGE


def test_an_error_is_never_nothing() -> None:
    """Where texts travel, "" is no error."""
    assert word_error(ValueError()) == "ValueError"
