"""The table of operations is whole, and agrees with itself."""

from __future__ import annotations

import pytest

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.operations import OPERATIONS
from shardmath.layouts.placement import OPS


def test_every_operation_has_a_row() -> None:
    assert tuple(OPERATIONS) == OPS


@pytest.mark.parametrize("name", OPS)
def test_a_fold_is_an_operation_that_folds_as_itself(name: str) -> None:
    operation = OPERATIONS[name]
    fold = OPERATIONS[operation.fold]
    assert operation.name == name
    assert fold.fold == fold.name and not fold.divides
    assert operation.identity is fold.identity


@pytest.mark.parametrize("name", OPS)
def test_where_one_receives_the_others_have_an_identity(name: str) -> None:
    operation = OPERATIONS[name]
    assert not operation.one_receives or operation.identity is not None


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_what_has_no_sum_has_no_average(dtype: str) -> None:
    assert OPERATIONS["avg"].refuse(dtype) or not OPERATIONS["sum"].refuse(dtype)
