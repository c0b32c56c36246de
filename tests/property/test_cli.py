"""The command line: two commands, errors, exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from unittest import mock

import pytest

import shardmath
from shardmath import Layout, Mesh, plan
from shardmath.display import cli
from shardmath.display.pictures.text import show


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "dp=4 tp=2", "9,4", "(tp dp n) h"]) == 0
    assert capsys.readouterr().out == show(Layout((9, 4), Mesh(dp=4, tp=2), "(tp dp n) h")) + "\n"


def test_show_a_scalar_and_a_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "tp=2 ranks=5,3", "", "{sum: tp}", "--dtype", "int8"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "int8[] {sum: tp} on tp=2"


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["plan", "tp=4", "tp=2 ranks=4:6", "8,4", "(tp n) h", "n (tp h)", "--dtype", "bfloat16"]
        )
        == 0
    )
    p = plan(
        Layout((8, 4), Mesh(tp=4), "(tp n) h", dtype="bfloat16"),
        Layout((8, 4), Mesh(tp=2, ranks=(4, 5)), "n (tp h)", dtype="bfloat16"),
    )
    proof = (
        "proved: the destination holds every element, and each destination rank receives each of "
        "its elements once"
    )
    assert capsys.readouterr().out == f"{show(p)}\n{proof}; digest {p.digest[:16]}\n"


def test_a_plan_to_a_window_says_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    part = "(n)=<0:3>"
    assert cli.main(["plan", "tp=2", "tp=2", "4,4", "(tp n) h", f"{part} (tp h)"]) == 1
    refused = capsys.readouterr()
    assert refused.out == "" and "no rank of the destination holds element (3, 0)" in refused.err
    assert cli.main(["plan", "--window", "tp=2", "tp=2", "4,4", "(tp n) h", f"{part} (tp h)"]) == 0
    shown = capsys.readouterr().out
    assert "1 tensor, 1 of which the destination holds in part\n" in shown
    proof = (
        "proved: what the destination holds arrives exactly once; element (3, 0) is not held there"
    )
    assert shown.splitlines()[-1].startswith(f"{proof}; digest ")


def test_errors_of_ours_are_one_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "tp=2", "9", "(ep n)"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(
        "error: 'ep' and 'n' are both free names: neither is a mesh axis\n    (ep n)\n        ^\n"
    )


@pytest.mark.parametrize("argv", [["show", "tp=2", "9;4", "n"], ["show"], ["plan", "tp=2"]])
def test_wrong_arguments(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Usage names the program as it was typed, which in a test is pytest.
    monkeypatch.setattr("sys.argv", ["shardmath/__main__.py", *argv])
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "usage: python -m shardmath" in err
    assert "9;4" not in argv or "'9;4' is not a shape; write sizes with commas: 9,4" in err


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    captured = capsys.readouterr()
    assert "commands:" in captured.out and captured.err == ""
    for name in ("plan", "show", "trace", "buffers", "refit"):
        assert any(
            line.split()[:1] == [name] and len(line.split()) > 4
            for line in captured.out.splitlines()
        )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardmath {shardmath.__version__}\n"
    assert shardmath.__version__ == version("shardmath")


def test_the_caret_is_below_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """It was below text that rules had been added to."""
    assert cli.main(["show", "dp=4,tp=2", "9,4", "n h"]) == 1
    told = capsys.readouterr().err
    assert "\n    dp=4,tp=2\n" in told and "*" not in told and "then ':'" not in told
    assert cli.main(["show", "dp=4: * ...", "9,4", "n h"]) == 1
    told = capsys.readouterr().err
    assert "expected only a mesh, found ': * ...' after it\n    dp=4: * ...\n        ^" in told


@pytest.mark.parametrize("typed", ["shardmath", "python -m shardmath"])
def test_usage_names_the_command_that_was_typed(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "/bin/shardmath" if typed == "shardmath" else "/lib/shardmath/__main__.py"
    monkeypatch.setattr(sys, "argv", [program])
    cli.main([])
    assert capsys.readouterr().out.startswith(f"usage: {typed} COMMAND")
    with pytest.raises(SystemExit):
        cli.main(["show", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {typed} show ")


def test_an_interrupt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 45 lines of traceback."""

    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.BUILT_IN, "show", interrupted)
    assert cli.main(["show"]) == 130
    assert capsys.readouterr() == ("", "show: interrupted\n")


@pytest.mark.parametrize(
    "text", ["Shard(0)", "[Replicate(), Partial('sum')]", "_StridedShard(dim=0)"]
)
def test_placements_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "tp=2", "8,4", text]) == 1
    told = capsys.readouterr().err
    assert "write (tp n) h for Shard(0) on tp, n h for Replicate(), n h {sum: tp} for" in told


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["move"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("unknown command 'move'\n") and captured.out == ""


def test_backends_add_commands(capsys: pytest.CaptureFixture[str]) -> None:
    points = [
        EntryPoint("works", f"{__name__}:nothing", "shardmath.commands"),
        EntryPoint("lacks", "no_such_package:command", "shardmath.commands"),
    ]
    with (
        mock.patch.object(
            cli, "entry_points", lambda group: points if group == "shardmath.commands" else []
        ),
        mock.patch.object(EntryPoint, "load", load),
    ):
        assert cli.main(["works", "a", "b"]) == 7
        assert cli.main(["lacks"]) == 1
    assert (
        capsys.readouterr().err == "error: lacks needs no_such_package; install shardmath[torch]\n"
    )


def load(point: EntryPoint):
    if point.name == "lacks":
        raise ModuleNotFoundError("no", name="no_such_package")
    return lambda argv: 7 if argv == ["a", "b"] else 0


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardmath", "show", "tp=2", "4", "(tp n)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("float32[4] (tp n) on tp=2\n")


@pytest.mark.parametrize("buffered", ["1", ""])
def test_a_reader_that_has_had_enough(buffered: str) -> None:
    """As `| head -1` is: no traceback, and no failure."""
    line = [sys.executable, "-m", "shardmath", "show", "dp=4", "9,4", "(dp n) h"]
    env = os.environ | {"PYTHONUNBUFFERED": buffered}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.wait(timeout=60) == 0 and run.stderr.read() == b""
