"""Naming: how votes and failures speak of plans, and of errors.

1. A plan is named by the beginning of its digest, so that ranks with other plans disagree.
2. A failure is told in the plan's own words: which tensor was to come from whom, or to go to whom.
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
"""Hexadecimal digits of a digest that a claim has: 96 bits, by which plans are told apart."""

_T = TypeVar("_T")


def word_objection(error: BaseException) -> str:
    """What a rank says of its error to the others: that of ours as it is, another by its kind; never ""."""
    own = message_of(error) if isinstance(error, ShardError) else ""
    return own or word_error(error)


def attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What is made, or why not, to be said in a vote: the others wait for this rank's, whatever went wrong here."""
    try:
        return make(), ""
    except Exception as error:
        return None, word_objection(error)


def name_given(plan: Plan | Transposed | Program) -> str:
    """How agreement names a plan or a program."""
    kind = "program" if isinstance(plan, Program) else "plan"
    return f"{kind} {plan.digest[:DIGEST_SHOWN]}"


_Way: TypeAlias = Literal["send", "receive"]


def describe_crossing(given: object, tensor: str | None, rank: int | None) -> str:
    """What was on its way from or to that rank; a tensor of the plan that crosses there where none is named."""
    if not isinstance(given, Plan | Transposed | Program):
        return "ranks were to agree"
    if tensor is None and rank is not None:
        sent = _list_crossing(given, rank, "send")
        received = _list_crossing(given, rank, "receive")
        tensor = next(itertools.chain(sent, received), None)
    if tensor is None:
        return "no tensor was on its way from or to it"
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    sends = rank is not None and tensor in _list_crossing(given, rank, "send")
    return f"{name} was to {'come from' if sends else 'go to'} it"


def _list_crossing(plan: Plan | Transposed | Program, rank: int, way: _Way) -> Iterator[str]:
    """The names of what the rank sends to others, or receives from them."""
    if isinstance(plan, Program):
        for one in plan.for_rank(rank):
            for message in one.sends if way == "send" else one.receives:
                yield from (piece.tensor for piece in message.pieces)
        return
    moved = plan.transfers(src=rank) if way == "send" else plan.transfers(dst=rank)
    for transfer in moved:
        if transfer.src_rank != transfer.dst_rank:
            yield transfer.tensor
