"""What commands print with --json, compared with stored copies: a change of a form is seen.

A key that is new goes into the copy; one that is gone, or means something else, needs a new number of the schema.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardmath as sm
from shardmath.display import cli
from shardmath.display.completion import OPTION, SHELLS

STORED = Path(__file__).parents[1] / "vectors" / "command_json"

SIDES = ["dp=2 tp=2", "tp=2 ranks=4:6", "9,4", "(tp dp n) h", "n (tp h)"]

COMMANDS = {
    "show": ["show", "dp=4 tp=2", "9,4", "(tp dp n) h", "--json"],
    "plan": ["plan", *SIDES, "--dtype", "bfloat16", "--nodes", "4", "--json"],
    "plan_without_nodes": ["plan", *SIDES, "--json"],
    "verify": ["verify", *SIDES, "--json"],
    "formats": ["formats", "--json"],
    "prove": ["prove", "dp=4 tp=2", "(tp dp n) h", "--json"],
    "error": ["show", "tp=2", "9,4", "(ep n) h", "--json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_as_stored(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(COMMANDS[name])
    said = capsys.readouterr()
    assert said.err == "" and status == (1 if name == "error" else 0)
    assert json.loads(said.out) == json.loads((STORED / f"{name}.json").read_text())


def test_every_rank_and_transfer_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the page lists the first ones only."""
    assert cli.main(["show", "a=300", "900", "(a n)", "--json"]) == 0
    shown: Any = json.loads(capsys.readouterr().out)
    assert [each["rank"] for each in shown["ranks"]] == list(range(300)) and shown["more"] == 0
    assert cli.main(["plan", "a=64", "a=64", "4096", "(a n)", "(n a)", "--json"]) == 0
    planned: Any = json.loads(capsys.readouterr().out)
    assert len(planned["transfers"]) == 4096 and planned["all"]
    assert sum(each["bytes"] for each in planned["transfers"]) == 4096 * 4


def test_a_picture_beside_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("show", "plan"):
        file = tmp_path / f"{name}.svg"
        assert cli.main([*COMMANDS[name], "--svg", str(file)]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == f"shardmath.{name}/1"
        assert file.read_text().startswith("<svg")
    missing = tmp_path / "none" / "a.svg"
    assert cli.main(["show", "tp=2", "4", "(tp n)", "--svg", str(missing)]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_nodes_say_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *SIDES, "--nodes", "2"]) == 0
    *_, cost, proof = capsys.readouterr().out.splitlines()
    assert cost.startswith("144 B cross nodes; ") and "times the bound" in cost
    assert proof.startswith("proved: ")
    with pytest.raises(SystemExit):
        cli.main(["plan", *SIDES, "--nodes", "0"])
    assert "'0' is not a number of 1 or more" in capsys.readouterr().err


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *SIDES]) == 0
    assert capsys.readouterr().out.startswith("proved: the destination holds every element")
    part = ["tp=2", "tp=2", "4,4", "(tp n) h", "(n)=<0:3> (tp h)"]
    assert cli.main(["verify", *part, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)
    assert error["schema"] == "shardmath.error/1" and error["code"] == sm.errors.PlanError.code


def test_codes_of_errors_are_one_each() -> None:
    classes = [getattr(sm.errors, name) for name in sm.errors.__all__]
    codes = [each.code for each in classes]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"SM1\d\d", code) for code in codes)


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    typed = " ".join(f"'{word}'" for word in ("shardmath", *words))
    asked = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shardmath; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete(script, "pl") == ["plan"]
    assert set(complete(script, "")) >= {
        "show",
        "plan",
        "prove",
        "verify",
        "explore",
        "formats",
        "trace",
    }
    assert complete(script, "plan", "--no") == ["--nodes"]
    assert complete(script, "show", "--") == ["--help", "--dtype", "--svg", "--json"]
    assert complete(script, "trace", "/etc/host") != []


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_every_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in ("show", "plan", "verify", "explore", "formats", "trace"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        options = OPTION.findall(capsys.readouterr().out)
        lines = [line for line in script.splitlines() if name in line]
        assert all(any(option.strip("-") in line for line in lines) for option in options)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
    assert "choose from" in capsys.readouterr().err
