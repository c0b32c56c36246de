"""How commands end, and what they read."""

from __future__ import annotations

import argparse
import sys

import pytest

from shardmath import ShardError
from shardmath_torch.commands.command_line import make_parser, read_count, run_command


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (None, 0, ""),
        (ShardError("no such axis; name one"), 1, "show: no such axis; name one\n"),
        (KeyboardInterrupt(), 130, "show: interrupted\n"),
    ],
)
def test_how_a_command_ends(
    raised: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if raised is not None:
            raise raised

    assert run_command("show", work) == status
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "²", "many"])
def test_what_is_not_a_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of 1 or more"):
        read_count(text)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [("/bin/shardmath", "shardmath"), ("/here/shardmath/__main__.py", "python -m shardmath")],
)
def test_a_parser_says_which_command(
    monkeypatch: pytest.MonkeyPatch, typed: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "argv", [typed, "show"])
    assert make_parser("show", "Print it.").format_usage().startswith(f"usage: {shown} show")
