"""Parcels: what really goes of each message: all of it, a packet of numbered elements, or nothing.

>>> from shardmath.plans.programs.messages import make_message
>>> message = make_message((0, 0, 0), 0, 3, 1, ())
>>> list_parcels([message, message, message], [(2,), (2,), (2,)], [(5,), None, (0,)])[0].payload
30
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shardmath.plans.programs.messages import Message
from shardmath_torch.tensors.changes.packets import count_bytes

__all__ = ["Packet", "Parcel", "list_parcels"]


class Packet(Message):
    """A message of which only so many bytes go."""

    __slots__ = ()

    @property
    def payload(self) -> int:
        """The bytes, those of numbers too."""
        return self.nbytes


Parcel: TypeAlias = Message | None
"""A message as it goes; None where nothing does."""


def list_parcels(
    messages: Sequence[Message],
    sizes: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int] | None],
) -> list[Parcel]:
    """The parcel of each message, given the sizes of its elements and how many there are of each; None: it is whole."""
    parcels: list[Parcel] = []
    for message, of_size, count in zip(messages, sizes, counts, strict=True):
        parcel: Parcel = message
        if count is not None:
            nbytes = count_bytes(of_size, count)
            parcel = Packet(*message._replace(nbytes=nbytes)) if nbytes else None
        parcels.append(parcel)
    return parcels
