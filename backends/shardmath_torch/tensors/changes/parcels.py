"""Parcels: the part of each message that is sent: all of it, a packet of numbered elements, or nothing.

Notices are sent first, with the counts of elements of each message.

>>> from shardmath.plans.programs.messages import make_message
>>> message = make_message((0, 0, 0), 0, 3, 1, ())
>>> list_parcels([message, message, message], [(2,), (2,), (2,)], [(5,), None, (0,)])[0].payload
30
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardmath.plans.programs.messages import Message
from shardmath_torch.tensors.changes.packets import count_bytes, list_sizes

__all__ = ["Notice", "Packet", "Parcel", "list_parcels", "make_notices"]

COUNT_BYTES = 8
"""The size of a count in a notice, an int64."""


class Packet(Message):
    """A message of which only the changed elements are sent, each with its position in the message; `nbytes` is the
    size of both together.
    """

    __slots__ = ()

    @property
    def payload(self) -> int:
        """The bytes to send: the changed elements, and the position of each in the message, together."""
        return self.nbytes


class Notice(Message):
    """A message, sent before the elements of a move, that tells how many changed elements each later message of the
    move from its sender to its receiver has."""

    __slots__ = ()

    @property
    def payload(self) -> int:
        """The bytes of tensor elements in the notice: 0, since it has only counts."""
        return 0


Parcel: TypeAlias = Message | None
"""A message as it is sent; None if nothing is sent."""


def list_parcels(
    messages: Sequence[Message],
    element_sizes: Sequence[Sequence[int]],
    changed_counts: Sequence[Sequence[int] | None],
) -> list[Parcel]:
    """Return, for each message, the Message itself if it is sent whole, a Packet if only its changed elements are sent,
    or None if no element has changed. `changed_counts[i]` is None for a message to send whole, else the number of
    changed elements of each size in `element_sizes[i]` (a message can hold several dtypes).
    """
    parcels: list[Parcel] = []
    for message, sizes, counts in zip(messages, element_sizes, changed_counts, strict=True):
        parcel: Parcel = message
        if counts is not None:
            nbytes = count_bytes(sizes, counts)
            parcel = Packet(*message._replace(nbytes=nbytes)) if nbytes else None
        parcels.append(parcel)
    return parcels


def make_notices(messages: Iterable[Message]) -> list[Notice]:
    """Return one Notice, which carries the counts of changed elements, for each pair of sender and receiver in
    `messages`. `messages` are sorted by round; a Notice is sent in the round of its pair's first message.
    """
    first_of_pair: dict[tuple[int, int], Message] = {}
    # How many counts a notice carries: one for each size of element in each message of the pair.
    counts: Counter[tuple[int, int]] = Counter()
    for message in messages:
        pair = message.src_rank, message.dst_rank
        first_of_pair.setdefault(pair, message)
        counts[pair] += len(list_sizes(message))
    return [
        Notice(*message._replace(nbytes=COUNT_BYTES * counts[pair]))
        for pair, message in first_of_pair.items()
    ]
