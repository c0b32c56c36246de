"""Parcels: what really goes of each message: all of it, a packet of numbered elements, or nothing.

Notices go first: how many elements each message has.

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
"""Of an int64."""


class Packet(Message):
    """A message of which only so many bytes go."""

    __slots__ = ()

    @property
    def payload(self) -> int:
        """The bytes, those of numbers too."""
        return self.nbytes


class Notice(Message):
    """The counts of all messages from one rank to another, as int64, in the place of the first of them."""

    __slots__ = ()

    @property
    def payload(self) -> int:
        """Nothing of any tensor."""
        return 0


Parcel: TypeAlias = Message | None
"""A message as it goes; None where nothing does."""


def list_parcels(
    messages: Sequence[Message],
    element_sizes: Sequence[Sequence[int]],
    changed_counts: Sequence[Sequence[int] | None],
) -> list[Parcel]:
    """The parcel of each message, by the sizes of its pieces' elements and how many of each piece have changed.

    A message without counts is sent whole, one of which nothing has changed is not sent (None).
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
    """The notice of each pair of ranks that these messages, in order of their steps, go between."""
    first: dict[tuple[int, int], Message] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for message in messages:
        pair = message.src_rank, message.dst_rank
        first.setdefault(pair, message)
        counts[pair] += len(list_sizes(message))
    return [
        Notice(*message._replace(nbytes=COUNT_BYTES * counts[pair]))
        for pair, message in first.items()
    ]
