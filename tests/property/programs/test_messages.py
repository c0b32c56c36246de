"""Messages and rounds by hand; their laws are those of programs and of plans."""

from __future__ import annotations

from shardmath.plans.programs.messages import (
    Message,
    gather_rounds,
    keeps_fold_order,
    make_message,
    staging_bytes,
)
from shardmath.plans.transfers import Transfer

STEP = (0, 1, 2)


def piece(lo: int, hi: int, itemsize: int = 4, addend: int = 0) -> Transfer:
    at = (slice(lo, hi),)
    nbytes = (hi - lo) * itemsize
    return Transfer("w", 0, 1, "sum", "w", at, "w", at, (hi - lo,), nbytes, at, addend)


def message(src: int, dst: int, step: tuple[int, int, int] = STEP, leg: int = 1) -> Message:
    return make_message(step, src, dst, leg, [piece(0, 2)])


def test_pieces_begin_where_their_elements_may() -> None:
    """After an odd byte a word of four bytes begins at the next multiple of four."""
    made = make_message(STEP, 0, 1, 1, [piece(0, 3, itemsize=1), piece(0, 2), piece(0, 1)])
    assert made.starts == (0, 4, 12) and made.nbytes == 16


def test_what_is_relayed() -> None:
    assert [message(0, 1, leg=leg).relayed for leg in (1, 2, 3)] == [False, True, True]


def test_a_message_for_people() -> None:
    assert str(message(0, 1, leg=2)) == "8 B from rank 0 to rank 1 in 1 piece, leg 2"


def test_rounds_are_in_order_of_steps() -> None:
    """Others' messages are in none of them."""
    later, first, strange = message(0, 1), message(1, 0, (0, 0, 5)), message(1, 2)
    assert gather_rounds([], 0) == gather_rounds([strange], 0) == ()
    rounds = gather_rounds([later, strange, first], 0)
    assert [one.step for one in rounds] == [(0, 0, 5), STEP]
    assert rounds[0].receives == (first,) and rounds[1].sends == (later,)


def test_not_all_call_on_one_rank_first() -> None:
    """A rank sends to the next ranks first, and receives from the ranks before it first."""
    some = [message(2, r) for r in (0, 1, 2, 3, 4)] + [message(r, 2) for r in (0, 1, 3, 4)]
    (one,) = gather_rounds(some, 2)
    assert [m.dst_rank for m in one.sends] == [3, 4, 0, 1]
    assert [m.src_rank for m in one.receives] == [1, 0, 4, 3]
    assert one.messages == (*one.keeps, *one.receives, *one.sends)
    assert one.arriving == (*one.receives, *one.keeps) and len(one.keeps) == 1
    assert staging_bytes(one) == 8 * 16


def test_a_round_for_people() -> None:
    (one,) = gather_rounds([message(1, 1), message(1, 0), message(3, 1, leg=2)], 1)
    assert str(one) == (
        "phase 0, slot 1, turn 2\n"
        "  keep 8 B of rank 1 in 1 piece, leg 1\n"
        "  receive 8 B from rank 3 in 1 piece, leg 2\n"
        "  send 8 B to rank 0 in 1 piece, leg 1"
    )


def test_addends_in_order() -> None:
    """One after the other, or the same boxes in the same steps."""

    def brings(*some: tuple[int, int, int]) -> bool:
        made = []
        for slot, lo, addend in some:
            pieces = [piece(lo, lo + 2, addend=addend)]
            made.append(make_message((0, slot, 0), 0, 1, 1, pieces))
        return keeps_fold_order(gather_rounds(made, 1))

    assert brings((0, 0, 0), (1, 0, 1)) and brings((0, 0, 0), (0, 0, 1))
    assert brings((0, 0, 0), (1, 2, 0), (0, 0, 1), (1, 2, 1))
    assert not brings((1, 0, 0), (0, 0, 1))
    assert not brings((0, 0, 0), (1, 2, 0), (0, 2, 1), (1, 0, 1))
