"""What `import shardmath` brings along: numpy and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy
import {module}
print(" ".join(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def imported(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "shardmath",
        "shardmath.display.cli",
        "shardmath.layouts.store, shardmath.display.pictures, shardmath.models.systems.rules",
    ],
)
def test_the_core_imports_neither_torch_nor_hypothesis_nor_scipy(module: str) -> None:
    others = {
        "torch",
        "hypothesis",
        "scipy",
        "einops",
        "safetensors",
        "transformers",
        "rich",
        "ml_dtypes",
        "pytest",
    }
    assert not imported(module) & others
    assert not {name for name in imported(module) if name.startswith("shardmath_")}


def test_public_names_are_there() -> None:
    import shardmath

    assert all(hasattr(shardmath, name) for name in shardmath.__all__)
    assert len(set(shardmath.__all__)) == len(shardmath.__all__)


LISTED = """
import sys
import shardmath
assert not [name for name in sys.modules if name.startswith("shardmath.plans")]
listed = dir(shardmath)
assert {"plan", "verify", "store", "__version__"} <= set(listed)
assert set(shardmath.__all__) <= set(listed)
"""


def test_what_is_imported_on_use_is_listed_before() -> None:
    """So that names complete in a notebook."""
    subprocess.run([sys.executable, "-c", LISTED], check=True)
