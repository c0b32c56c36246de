"""What hypothesis draws of the core's classes, whichever library is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

DRAW = """
import sys
{imports}
assert "shardmath.testing" not in sys.modules
for drawn in (sm.Mesh, sm.Layout, sm.Runs):
    assert isinstance(hypothesis.find(hypothesis.strategies.from_type(drawn), lambda _: True), drawn)
assert "shardmath.testing" in sys.modules
"""
BY_HYPOTHESIS_ALONE = """
import sys, hypothesis
assert "shardmath_hypothesis" in sys.modules
print([name for name in ("numpy", "shardmath") if name in sys.modules])
"""


@pytest.mark.parametrize(
    "imports",
    ["import hypothesis, shardmath as sm", "import shardmath as sm, hypothesis"],
    ids=["hypothesis first", "shardmath first"],
)
def test_either_may_come_first(imports: str) -> None:
    subprocess.run([sys.executable, "-c", DRAW.format(imports=imports)], check=True, timeout=60)


def test_hypothesis_alone_brings_nothing_along() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BY_HYPOTHESIS_ALONE],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"
