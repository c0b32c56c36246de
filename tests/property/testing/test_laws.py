"""Every law of shardmath.testing, on the values that its strategies draw."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Runs, testing


@pytest.mark.parametrize("law", testing.LAWS, ids=lambda law: law.name)
def test_law(law: testing.Law) -> None:
    given(law.cases)(lambda case: law.check(*case))()


@st.composite
def _placed(draw: st.DrawFn) -> tuple[object, int, int]:
    n, parts = draw(testing.lengths()), draw(testing.parts())
    return draw(testing.placements(0, n, parts)), n, parts


@pytest.mark.parametrize("law", testing.PLACEMENT_LAWS, ids=lambda law: law.__name__)
def test_placement_law(law) -> None:
    @given(_placed())
    def check(case) -> None:
        law(*case)

    check()


@given(st.from_type(Mesh), st.from_type(Layout), st.from_type(Runs))
def test_types_are_registered(mesh: Mesh, layout: Layout, runs: Runs) -> None:
    assert mesh.size >= 1 and layout.mesh.size >= 1 and len(runs) >= runs.size


def test_hypothesis_finds_the_strategies_by_itself() -> None:
    code = "import hypothesis as h, shardmath; print(h.find(h.strategies.from_type(shardmath.Layout), bool))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert out.stdout.startswith("float64"), out.stderr


def test_laws_have_names_and_say_what_they_mean() -> None:
    names = [law.name for law in testing.LAWS]
    assert len(names) == len(set(names))
    assert all(law.check.__doc__ for law in testing.LAWS)
