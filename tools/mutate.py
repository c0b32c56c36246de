"""Mutation tests of the core: mutmut's mutants, each shown to the tests that have to notice it.

    python tools/mutate.py run [1/N] [FILE ...]   mutate shardmath/FILE.py (all of only_mutate), or one in N of its
                                                  mutants, always the same; goes on where it stopped
    python tools/mutate.py results                score by file, and the survivors
    python tools/mutate.py show NAME              one of them

A mutant runs in a process of its own, forked before any test ran, since values are interned and cached: first the tests
of its own file, then, if it survives, all of `pytest_add_cli_args_test_selection`. Left alone: string literals, what an
error says, zip's `strict` (an assertion); and, by mutmut, decorated functions (properties, caches) and `__new__`.
"""

from __future__ import annotations

import ast
import collections
import importlib
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MUTANTS = Path("mutants")
RESULTS = MUTANTS / "results.jsonl"
SECONDS = {"own": 60, "all": 600}
"""After which a mutant is killed that still runs: what takes for ever is noticed."""
PROCESSES = 2


def generate() -> None:
    """Fill `mutants/` with the mutated sources and the tests."""
    from mutmut import __main__ as mutmut
    from mutmut.mutation import file_mutation, mutators
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths

    kept = [
        (node, operator)
        for node, operator in mutators.mutation_operators
        if operator is not mutators.operator_string
    ]
    file_mutation.mutation_operators = kept
    mutmut.set_mutant_under_test("mutant_generation")
    MUTANTS.mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    setup_source_paths()
    mutmut.store_lines_covered_by_tests()
    mutmut.create_mutants(PROCESSES)
    mutmut.set_mutant_under_test("none")


class _Meaning(ast.NodeTransformer):
    """Code without what errors say and without zip's `strict`."""

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if all(
            isinstance(target, ast.Name) and target.id in ("what", "fix", "shown")
            for target in node.targets
        ):
            node.value = ast.Constant("")
        return node


def mutants(file: str) -> Iterator[str]:
    """The names of the file's mutants that change more than a message."""
    tree = ast.parse((MUTANTS / "shardmath" / f"{file.replace('.', '/')}.py").read_text())
    functions = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and "__mutmut_" in node.name
    )
    bodies = {
        f.name: ast.dump(ast.Module([_Meaning().visit(line) for line in f.body], []))
        for f in functions
    }
    for name, body in bodies.items():
        original = f"{name.rpartition('__mutmut_')[0]}__mutmut_orig"
        if name != original and body != bodies[original]:
            yield f"shardmath.{file}.{name}"


def run(files: list[str], one_in: int) -> None:
    """Run all mutants that have no result yet, or one in so many of them."""
    generate()
    _preload()
    _, status = os.waitpid(_started("none", _all_tests()), 0)
    if status:
        sys.exit(
            "the tests fail without a mutant; see HYPOTHESIS_PROFILE=mutate .venv/bin/python -m pytest tests/property"
        )
    names = [
        name for file in files for name in mutants(file) if zlib.crc32(name.encode()) % one_in == 0
    ]
    known = results()
    first = [name for name in names if name not in known]
    survivors = _rounds(first, _own_tests)
    again = [name for name in names if known.get(name) == "own" or name in survivors]
    _rounds(again, lambda name: _all_tests())


def _preload() -> None:
    """Import what every mutant needs; hypothesis imports shardmath.testing, which has to be the mutated one."""
    sys.path.insert(0, str(MUTANTS.resolve()))
    for name in ("numpy", "hypothesis.strategies", "pytest", "pytest_timeout"):
        importlib.import_module(name)
    origin = Path(str(importlib.import_module("shardmath").__file__)).resolve()
    assert MUTANTS.resolve() in origin.parents, origin


def results() -> dict[str, str]:
    """For each mutant that has run: "killed", or the tests that it survived, "own" or "all"."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return dict(json.loads(line) for line in lines)


def _file(name: str) -> str:
    """The file that a mutant is in, a dot for each folder."""
    return name.removeprefix("shardmath.").rpartition(".")[0]


def _own_tests(name: str) -> list[str]:
    """Those of the file's own name; those of its folder where it has none."""
    folder, _, file = _file(name).rpartition(".")
    own = f"tests/property/{folder}/test_{file}.py"
    return [own if Path(own).exists() else f"tests/property/{folder}"]


def _all_tests() -> list[str]:
    from mutmut.configuration import config

    return list(config().pytest_add_cli_args_test_selection)


def _rounds(names: Iterable[str], tests: Callable[[str], list[str]]) -> set[str]:
    """Run the mutants against their tests, note what happens, and return the survivors."""
    running: dict[int, tuple[str, float]] = {}
    survivors: set[str] = set()
    waiting = collections.deque(names)
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            name = waiting.popleft()
            running[_started(name, tests(name))] = name, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, _ = running.pop(pid)
            lived = "all" if tests(name) == _all_tests() else "own"
            result = "killed" if status else lived
            survivors |= {name} - ({name} if status else set())
            with RESULTS.open("a") as file:
                file.write(json.dumps([name, result]) + "\n")
            print(f"\r{len(waiting)} left, {len(survivors)} alive ", end="", flush=True)
            continue
        for child, (name, began) in running.items():
            if time.monotonic() - began > SECONDS["all" if tests(name) == _all_tests() else "own"]:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    print()
    return survivors


def _started(name: str, tests: list[str]) -> int:
    """A process in which the mutant meets the tests; its exit status is 0 if they all pass."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.environ["MUTANT_UNDER_TEST"] = name
        os.chdir(MUTANTS)
        pytest = importlib.import_module("pytest")
        quiet = [
            "--rootdir=.",
            "-q",
            "-x",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "pytest_timeout",
            "-W",
            "ignore",
        ]
        code = int(pytest.main([*quiet, "-k", "not torch", *tests]))
    finally:
        os._exit(min(1, code))


def _mutated() -> list[str]:
    """The files that are mutated, without `shardmath/` and ending."""
    from mutmut.configuration import config

    found = sorted(path for pattern in config().only_mutate for path in Path().glob(pattern))
    return [
        str(path.relative_to("shardmath").with_suffix(""))
        for path in found
        if path.stem != "__init__"
    ]


def report() -> None:
    """Print the score of every file, and the survivors."""
    known = results()
    count = collections.Counter(map(_file, known))
    alive = sorted(name for name, result in known.items() if result != "killed")
    lived = collections.Counter(map(_file, alive))
    for file in [*count, "all"]:
        n, k = (count[file], lived[file]) if file != "all" else (len(known), len(alive))
        print(f"{file:20} {n:5} mutants {k:4} alive  {100 * (1 - k / max(1, n)):5.1f}%")
    print("\n".join(alive))


def main(argv: list[str]) -> None:
    os.environ.setdefault("HYPOTHESIS_PROFILE", "mutate")
    os.environ.setdefault("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    from mutmut.__main__ import get_diff_for_mutant

    match argv:
        case ["run", *files]:
            one_in = int(files.pop(0)[2:]) if files and files[0].startswith("1/") else 1
            run([path.replace("/", ".") for path in files or _mutated()], one_in)
        case ["results"]:
            report()
        case ["show", name]:
            print(get_diff_for_mutant(name))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
