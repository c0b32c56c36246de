"""Layers that predict further tokens, on any pipeline stage of a trainer with tied embeddings, move there and back."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import further
from tests.distributed.tasks.further import Trainer

APART = Trainer("Et|ttt|m|L", range(4))
LAST = Trainer("Ettt|tmL", range(4, 8), tp=2)
BEFORE_LAST = Trainer("Ettt|tm|L", range(3))


@pytest.mark.parametrize(
    ("one", "other"), [(APART, LAST), (LAST, BEFORE_LAST)], ids=["apart", "before last"]
)
def test_layers_that_predict_further_tokens_move_there_and_back(
    pool: Pool, one: Trainer, other: Trainer
) -> None:
    there, back = further.plan(one, other), further.plan(other, one)
    assert pool.run(further.move, there, back) == [[]] * 8
