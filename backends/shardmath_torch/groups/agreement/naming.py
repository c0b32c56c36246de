"""Naming: the words of votes and failures for plans and errors.

1. A plan is named by the beginning of its digest, so that ranks with other plans disagree.
2. A failure names a tensor of the plan that the failed rank was to send or receive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, TypeVar

from shardmath.base.errors import ShardError
from shardmath.base.text import message_of, word_error
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program

__all__ = ["attempt", "describe_crossing", "name_given", "word_objection"]

DIGEST_SHOWN = 24
"""Hexadecimal digits of a digest in a claim: 96 bits tell plans apart."""

_T = TypeVar("_T")


def word_objection(error: BaseException) -> str:
    """Return the text of this rank's objection in a vote: the message of `error`, with its class's name in front unless
    it is a ShardError."""
    message = message_of(error) if isinstance(error, ShardError) else ""
    return message or word_error(error)


def attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return (result of `make`, ""); if `make` raises, return (None, objection), where the objection is the text for
    this rank's vote."""
    try:
        return make(), ""
    except Exception as error:
        return None, word_objection(error)


def name_given(plan: Plan | Transposed | Program) -> str:
    """Return the plan or program in words: its kind ("plan" or "program") and the beginning of its digest."""
    kind = "program" if isinstance(plan, Program) else "plan"
    return f"{kind} {plan.digest[:DIGEST_SHOWN]}"


_Way: TypeAlias = Literal["send", "receive"]


def describe_crossing(given: object, tensor: str | None, rank: int | None) -> str:
    """Return words for an error message, such as "tensor 'w' had to be sent by it", about the failed rank `rank` in a
    move by the plan `given`. If `tensor` is None, they name the first tensor that `rank` exchanges with others."""
    if not isinstance(given, Plan | Transposed | Program):
        return "ranks were to agree"
    if tensor is None and rank is not None:
        sent = _list_crossing(given, rank, "send")
        received = _list_crossing(given, rank, "receive")
        tensor = next(itertools.chain(sent, received), None)
    if tensor is None:
        return "it had no tensor to send or receive"
    # A plan of one tensor calls it "".
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    is_sent = rank is not None and tensor in _list_crossing(given, rank, "send")
    return f"{name} had to be {'sent' if is_sent else 'received'} by it"


def _list_crossing(plan: Plan | Transposed | Program, rank: int, way: _Way) -> Iterator[str]:
    """The names of the tensors that the rank sends to others, or receives from them."""
    if isinstance(plan, Program):
        for program_round in plan.for_rank(rank):
            messages = program_round.sends if way == "send" else program_round.receives
            yield from (piece.tensor for message in messages for piece in message.pieces)
        return
    transfers = plan.transfers(src=rank) if way == "send" else plan.transfers(dst=rank)
    for transfer in transfers:
        if transfer.src_rank != transfer.dst_rank:
            yield transfer.tensor
