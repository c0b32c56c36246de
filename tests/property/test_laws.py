"""Every law of shardmath.testing, on the values that its strategies draw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import testing
from shardmath.placement import Table


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
        if law.__name__ != "disjoint" or not isinstance(case[0], Table):
            law(*case)

    check()


def test_laws_have_names_and_say_what_they_mean() -> None:
    names = [law.name for law in testing.LAWS]
    assert len(names) == len(set(names))
    assert all(law.check.__doc__ for law in testing.LAWS)
