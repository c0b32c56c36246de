"""Layers that predict further tokens, on any pipeline stage of a trainer with tied embeddings, move there and back."""

from __future__ import annotations

import pytest

from shardmath.models.storage.stored import KnownSide
from tests.distributed.pool import Pool
from tests.distributed.tasks import further
from tests.distributed.tasks.further import Trainer

APART = Trainer("Et|ttt|m|L", range(4))
LAST = Trainer("Ettt|tmL", range(4, 8), tp=2)
BEFORE_LAST = Trainer("Ettt|tm|L", range(3))


ENDS = ("embedding.word_embeddings.weight", "mtp.layers.0.eh_proj.weight", "output_layer.weight")
WORDS, FURTHER, HEAD = ENDS


@pytest.mark.parametrize(
    ("trainer", "stages"),
    [
        (APART, [[WORDS], [], [WORDS, FURTHER], [HEAD]]),
        (BEFORE_LAST, [[WORDS], [WORDS, FURTHER], [HEAD]]),
        # Megatron-Core also makes a head here, and never reads it.
        (LAST, [[WORDS], [WORDS], [WORDS, FURTHER], [WORDS, FURTHER]]),
    ],
    ids=["apart", "before last", "last"],
)
def test_stages_have_the_ends_that_megatron_makes(
    trainer: Trainer, stages: list[list[str]]
) -> None:
    side = further.plan(trainer, LAST).trainer
    found = [_list_ends(side, rank) for rank in trainer.ranks]
    assert found == stages


def _list_ends(side: KnownSide, rank: int) -> list[str]:
    return [end for end in ENDS if (0, end) in side.natives(rank)]


@pytest.mark.parametrize(
    ("one", "other"), [(APART, LAST), (LAST, BEFORE_LAST)], ids=["apart", "before last"]
)
def test_layers_that_predict_further_tokens_move_there_and_back(
    pool: Pool, one: Trainer, other: Trainer
) -> None:
    there, back = further.plan(one, other), further.plan(other, one)
    assert pool.run(further.move, there, back) == [[]] * 8
