"""A move that is compared says what went wrong, on all ranks, and the next move works."""

from __future__ import annotations

import shardmath as sm
from tests.distributed.pool import Pool
from tests.distributed.tasks.digests import checked_moves

EIGHT = sm.Mesh(dp=4, tp=2)


def test_what_goes_wrong_is_named(pool: Pool) -> None:
    def side(w: str) -> dict[str, sm.Layout]:
        return {"norm": sm.Layout((6,), EIGHT, "n"), "w": sm.Layout((16, 6), EIGHT, w)}

    plan = sm.plan(side("(dp n) (tp h)"), side("(tp dp n) h"))
    rows = sm.Layout((16, 6), EIGHT, "(tp n) h")
    reducing = sm.plan(sm.Layout((16, 6), EIGHT, "n h {sum: dp}"), rows)
    part = sm.plan(rows, sm.window(rows, ((0, 3), (0, 6))), window=True)
    answers = pool.run(checked_moves, plan, reducing, part)
    assert answers == [answers[0]] * 8
    what = "check='digest' compares the destination with the source, but "
    expected = [
        "",
        # Rank 5 is dp=2 tp=1 and has rows 12 and 13.
        "tensor 'w' differs from its source in [13:14, 1:6] after the move, and the source has not changed",
        "some replicas of the destination are wrong: tensor 'norm': rank 5 holds other bits in [2:4]",
        "the source of tensor 'w' changed while it was moved: rank 5 has other bits than before in [8:12, 3:6]",
        "replicas of the source differed before the move already: tensor 'norm': rank 5 holds other bits in [3:4]",
        "ranks disagree",
        "ranks 0-7: check='sum' is unknown; pass 'digest', or leave it out",
        f"ranks 0-7: {what}the tensor is Partial, so that a move reduces it",
        f"ranks 0-7: {what}the adjoint of a plan adds up elements of several ranks",
        f"ranks 0-7: {what}the destination has only a part of the tensor",
        "",
    ]
    for text, start in zip(answers[0], expected, strict=True):
        assert text.startswith(start) and bool(text) == bool(start), text
