"""Arranging: what is no stack of matrices, or no arrangement, is an error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardmath import Mesh, ShardError, StoreError
from shardmath.models.storage import rows
from shardmath.models.storage.arranging import ARRANGEMENTS, arrange
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.storage.stored import Stored

Fails = Callable[[Callable[[], object], type[ShardError], str], None]


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("shape", [(32,), (32, 64), (1, 1, 32, 64)])
def test_what_is_no_stack_of_matrices_is_refused(
    name: str, shape: tuple[int, ...], fails: Fails
) -> None:
    side = Stored(rows.parse(f"x = {name}(y)"), (Mesh(),))
    bound = bind(side, {"y": (shape, "float32")})
    fails(
        lambda: fill(bound, {"y": np.zeros(shape, "float32")}, 0),
        StoreError,
        f"{name}(...) arranges a stack of matrices, and the stored tensor is {shape}; "
        "stack tensors along an index, as in e (tp n) h",
    )


def test_an_unknown_arrangement_is_refused(fails: Fails) -> None:
    fails(
        lambda: arrange("blcks", np.zeros((1, 32, 64))),
        StoreError,
        "'blcks' is not an arrangement; use one of blocks, paired_blocks",
    )
