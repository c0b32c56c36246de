"""Reader: tokens and their places."""

from __future__ import annotations

from shardmath.layouts.reader import LayoutReader, join_names, list_tokens


def test_tokens_know_their_place() -> None:
    found = list(list_tokens(" (tp*dp~ [3 40]n)=<0:4 -2> ... {sum: pp} "))
    assert [t.text for t in found] == [
        *("(", "tp", "*", "dp", "~", "[", "3", "40", "]", "n", ")"),
        *("=<", "0", ":", "4", "-", "2", ">", "...", "{", "sum", ":", "pp", "}", ""),
    ]
    text = " (tp*dp~ [3 40]n)=<0:4 -2> ... {sum: pp} "
    assert all(text[t.at :].startswith(t.text) for t in found)
    assert [t.kind for t in found[:4]] == ["mark", "word", "mark", "word"]
    assert (found[6].kind, found[-1].kind, found[-1].at) == ("int", "end", len(text))


def test_reader_looks_takes_and_accepts() -> None:
    read = LayoutReader("a ( b", (1,), {"a": 2}, {})
    assert (
        read.here.text,
        read.take().text,
        read.accept(")"),
        read.accept("("),
        read.take().text,
    ) == (
        *("a", "a", False, True),
        "b",
    )
    assert read.here.kind == "end" and not read.accept("")
    assert join_names({}) == "none" and join_names({"a": 1, "b": 2}) == "a, b"
