"""Endpoints: the pieces of messages in memory.

1. A **strided view** is a piece's elements in a tensor: sizes, strides and offset, in elements.
   Finding it needs only the tensor's strides, so views are found once and used for every move of
   tensors with equal strides.
2. A message whose views join into one **contiguous** view needs no packing: it is sent from, or
   received into, the tensor itself. Pieces that are reduced into the destination are never received
   in place.
3. Over some wires large pieces are separate messages (`apart`), so that the contiguous ones go in
   place. Both ends divide a message equally, by the sizes of its pieces. This is for wires without
   groups: the bound on a group's messages was applied before.
4. Other messages go through staging: a block of bytes that is large enough for every round. Each
   message of a round has its own part of the block.
5. A message is read from source tensors, or, if it is relayed (`Message.relayed`), from
   destination tensors. A message that is handed to this rank, to be sent on as it is, has no views: it
   stays in staging until then (`handing`).
6. Copies move words (`dtypes.words`), so every element type moves bit by bit. A move allocates
   views, no memory.

>>> rows = locate("w", (8, 1), (slice(2, 4), slice(0, 8)), (2, 8))
>>> rows
StridedView(key='w', shape=(2, 8), strides=(8, 1), offset=16)
>>> join([rows])
StridedView(key='w', shape=(16,), strides=(1,), offset=16)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from shardmath.layouts.algebra.mesh import strides as row_major
from shardmath.plans.programs.messages import Message, Round, Step, align, make_message
from shardmath.plans.transfers import Transfer

__all__ = [
    "BoundRound",
    "Endpoint",
    "StridedView",
    "bind",
    "drop_sends",
    "count_staging_bytes",
    "join",
    "locate",
    "select",
    "set_apart",
]


class StridedView(NamedTuple):
    """A view of the tensor `key`: its shape, strides, and offset from the tensor's first element, in elements."""

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Endpoint(NamedTuple):
    """One end of a message: the views of this rank's tensors that the message is read from or written to.

    `contiguous` is the views joined into one; if None, the message goes through staging, from byte
    `start` on. `folds` is whether some pieces are reduced into the destination. Without views, the message stays in
    staging, between two other ranks.
    """

    message: Message
    views: tuple[StridedView, ...]
    contiguous: StridedView | None
    start: int
    folds: bool = False


class BoundRound(NamedTuple):
    """A round of a plan: the messages that this rank sends and receives, each with the memory to read or write. `keeps`
    are the round's copies within this rank, each as a pair (from, to)."""

    step: Step
    sends: tuple[Endpoint, ...]
    receives: tuple[Endpoint, ...]
    keeps: tuple[tuple[Endpoint, Endpoint], ...]


Strides: TypeAlias = Mapping[str, tuple[int, ...]]
"""Strides of each local tensor, in elements, by local buffer key."""


def locate(
    key: str, strides: Sequence[int], slices: Sequence[slice], shape: tuple[int, ...]
) -> StridedView:
    """Return the view that `slices` (one per dimension, of step 1) select from the tensor with key `key` and strides
    `strides`. `shape` is the view's shape."""
    offset = 0
    for part, stride in zip(slices, strides, strict=True):
        offset += part.start * stride
    return StridedView(key, shape, tuple(strides), offset)


def select(tensor: Tensor, view: StridedView) -> Tensor:
    """Return the part of `tensor` that `view` describes, without a copy."""
    offset = tensor.storage_offset() + view.offset
    return tensor.as_strided(view.shape, view.strides, offset)


def join(views: Sequence[StridedView]) -> StridedView | None:
    """Join contiguous views that follow each other in memory into one contiguous view; return None for other views."""
    first = views[0]
    end = first.offset
    for view in views:
        follows = view.key == first.key and view.offset == end
        if not follows or not _is_contiguous(view):
            return None
        end += math.prod(view.shape)
    return StridedView(first.key, (end - first.offset,), (1,), first.offset)


def _is_contiguous(view: StridedView) -> bool:
    """Whether the elements lie one after the other, in row-major order."""
    dims = zip(view.shape, view.strides, row_major(view.shape), strict=True)
    # A dimension of one element is never stepped along, so its stride may be anything.
    return all(n == 1 or step == packed for n, step, packed in dims)


def bind(rounds: Iterable[Round], src: Strides, dst: Strides) -> tuple[BoundRound, ...]:
    """Return `rounds` with the views of this rank's tensors that each message is read from or written to; `src` and
    `dst` have the tensors' strides by name.

    What is handed to this rank has no place in staging yet that it keeps until the next round (`keep_handed`).
    """
    return tuple(_bind_round(unbound, src, dst) for unbound in rounds)


def drop_sends(rounds: Iterable[BoundRound], gone: Collection[int]) -> tuple[BoundRound, ...]:
    """Return the rounds without sends to the ranks in `gone`, and without rounds that this leaves empty; other messages
    keep their places in staging memory."""
    remaining = []
    for bound in rounds:
        sends = [end for end in bound.sends if end.message.dst_rank not in gone]
        if sends or bound.receives or bound.keeps:
            remaining.append(bound._replace(sends=tuple(sends)))
    return tuple(remaining)


def set_apart(rounds: Iterable[Round], nbytes: int | None) -> tuple[Round, ...]:
    """Return `rounds` with their messages split, so that each slice of a tensor of at least `nbytes` bytes is sent as a
    separate message. If `nbytes` is None, return the rounds unchanged."""
    if nbytes is None:
        return tuple(rounds)
    return tuple(_separate_large_pieces(whole, nbytes) for whole in rounds)


def _separate_large_pieces(whole: Round, nbytes: int) -> Round:
    """The round with a message for each piece of at least `nbytes`."""
    sends = [part for message in whole.sends for part in _split_message(message, nbytes)]
    receives = [part for message in whole.receives for part in _split_message(message, nbytes)]
    return whole._replace(sends=tuple(sends), receives=tuple(receives))


def _split_message(message: Message, nbytes: int) -> Iterator[Message]:
    """Split the message into one per piece of at least `nbytes`, and one per run of pieces between those."""
    if all(piece.nbytes < nbytes for piece in message.pieces):
        yield message
        return
    # The last part is open: small pieces are added to it. Empty parts are left out at the end.
    parts: list[list[Transfer]] = [[]]
    for piece in message.pieces:
        if piece.nbytes >= nbytes:
            parts += [[piece], []]
        else:
            parts[-1].append(piece)
    for part in filter(None, parts):
        yield make_message(message.step, message.src_rank, message.dst_rank, message.leg, part)


def count_staging_bytes(rounds: Iterable[BoundRound]) -> int:
    """Return the largest number of bytes of staging memory that any of `rounds` needs."""
    most = 0
    for bound in rounds:
        for endpoint in (*bound.receives, *bound.sends):
            most = max(most, _find_staging_end(endpoint))
    return most


def _bind_round(unbound: Round, src: Strides, dst: Strides) -> BoundRound:
    """Find the round's endpoints, with a part of staging for each message that needs one."""
    receives = []
    for message in unbound.receives:
        is_kept = message.is_handing
        receives.append(_pass_on(message) if is_kept else _bind_to_destination(message, dst))
    receives = _assign_staging(receives, 0)
    # Sends come after receives in staging: all messages of a round are in flight together.
    used = max(map(_find_staging_end, receives), default=0)
    sends = []
    for message in unbound.sends:
        # A relayed message was received in an earlier round, hence lies in a destination.
        strides = dst if message.relayed else src
        is_kept = message.is_handed
        sends.append(_pass_on(message) if is_kept else _bind_to_source(message, strides))
    sends = _assign_staging(sends, align(used))
    keeps = []
    for message in unbound.keeps:
        pair = _bind_to_source(message, src), _bind_to_destination(message, dst)
        keeps.append(pair)
    return BoundRound(unbound.step, tuple(sends), tuple(receives), tuple(keeps))


def _find_staging_end(endpoint: Endpoint) -> int:
    """One past the last byte of staging that the message takes; 0 if it takes no staging."""
    return 0 if endpoint.contiguous else endpoint.start + endpoint.message.nbytes


def _assign_staging(endpoints: Iterable[Endpoint], start: int) -> list[Endpoint]:
    """Give each endpoint that needs staging a separate part of the block, from byte `start` on."""
    assigned = []
    for endpoint in endpoints:
        assigned.append(endpoint._replace(start=start))
        if not endpoint.contiguous:
            start += align(endpoint.message.nbytes)
    return assigned


def _pass_on(message: Message) -> Endpoint:
    """The endpoint of a message that this rank is handed, or sends on."""
    return Endpoint(message, (), None, start=0)


def _bind_to_source(message: Message, strides: Strides) -> Endpoint:
    """The endpoint that reads the message from tensors of these strides."""
    views = []
    for piece in message.pieces:
        key = piece.src_tensor
        views.append(locate(key, strides[key], piece.src_slices, piece.shape))
    # Its place in staging is not known yet.
    return Endpoint(message, tuple(views), join(views), start=0)


def _bind_to_destination(message: Message, strides: Strides) -> Endpoint:
    """The endpoint that writes the message to tensors of these strides."""
    views = []
    for piece in message.pieces:
        key = piece.dst_tensor
        views.append(locate(key, strides[key], piece.dst_slices, piece.shape))
    # Received in place, a piece would overwrite the value that it is reduced into.
    folds = any(piece.op != "copy" for piece in message.pieces)
    contiguous = None if folds else join(views)
    return Endpoint(message, tuple(views), contiguous, start=0, folds=folds)
