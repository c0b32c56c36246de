"""Where the pieces of messages lie in memory.

1. A **strided view** is a piece's elements in a tensor: sizes, strides and offset, in elements.
   Finding it needs the tensor's strides only, so views are found once and used for every move of
   tensors that lie alike.
2. A message whose views are one **contiguous** view needs no packing: it is sent from, or received
   into, the tensor itself. Pieces that are folded into what is there are never received in place.
3. Over some wires large pieces are messages of their own (`apart`), so that those go in place that
   are contiguous. Both ends divide a message alike, by the sizes of its pieces. That is for wires
   without groups: what bounds the messages of a group is counted before.
4. Other messages go through staging: a block of bytes, at least as large as the round that needs
   most of it. Each message of a round has its own part of the block.
5. A message is read from source tensors, or, where it is relayed (`Message.relayed`), from
   destination tensors.
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
from shardmath.plans.plan import Transfer
from shardmath.plans.programs.messages import Message, Round, Step, align, make_message

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
    """Elements of the tensor `key`: strides and offset in elements, the offset from the tensor's first."""

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Endpoint(NamedTuple):
    """One end of a message in memory: its pieces' views.

    `contiguous` is all of them as one view; where there is none, the message goes through staging,
    from byte `start` on. `folds`: whether some are to be folded into what is there.
    """

    message: Message
    views: tuple[StridedView, ...]
    contiguous: StridedView | None
    start: int
    folds: bool = False


class BoundRound(NamedTuple):
    """A round whose messages have endpoints here; `keeps` have two, a source and a destination."""

    step: Step
    sends: tuple[Endpoint, ...]
    receives: tuple[Endpoint, ...]
    keeps: tuple[tuple[Endpoint, Endpoint], ...]


Strides: TypeAlias = Mapping[str, tuple[int, ...]]
"""Of each local tensor, in elements."""


def locate(
    key: str, strides: Sequence[int], slices: Sequence[slice], shape: tuple[int, ...]
) -> StridedView:
    """Where tensor[slices], of this shape, lies in a tensor of these strides."""
    offset = 0
    for taken, step in zip(slices, strides, strict=True):
        offset += taken.start * step
    return StridedView(key, shape, tuple(strides), offset)


def select(tensor: Tensor, view: StridedView) -> Tensor:
    """The elements of the view of this tensor, without a copy."""
    offset = tensor.storage_offset() + view.offset
    return tensor.as_strided(view.shape, view.strides, offset)


def join(views: Sequence[StridedView]) -> StridedView | None:
    """The views, one after the other, as one contiguous view; None where they are not."""
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
    """The rounds, for source and destination tensors of these strides."""
    return tuple(_bind_round(one, src, dst) for one in rounds)


def drop_sends(rounds: Iterable[BoundRound], gone: Collection[int]) -> tuple[BoundRound, ...]:
    """The rounds without what goes to ranks that are gone; all else stays where it is in staging."""
    kept = []
    for one in rounds:
        sends = [end for end in one.sends if end.message.dst_rank not in gone]
        if sends or one.receives or one.keeps:
            kept.append(one._replace(sends=tuple(sends)))
    return tuple(kept)


def set_apart(rounds: Iterable[Round], nbytes: int | None) -> tuple[Round, ...]:
    """The rounds with pieces of at least so many bytes in messages of their own; as they are if it is None."""
    if nbytes is None:
        return tuple(rounds)
    return tuple(_set_apart(one, nbytes) for one in rounds)


def _set_apart(one: Round, nbytes: int) -> Round:
    sends = [part for message in one.sends for part in _divide(message, nbytes)]
    receives = [part for message in one.receives for part in _divide(message, nbytes)]
    return one._replace(sends=tuple(sends), receives=tuple(receives))


def _divide(message: Message, apart: int) -> Iterator[Message]:
    """The message in parts: each large piece, and what stands between them."""
    parts: list[list[Transfer]] = [[]]
    for piece in message.pieces:
        if piece.nbytes >= apart:
            parts += [piece], []
        else:
            parts[-1].append(piece)
    for part in filter(None, parts):
        yield make_message(message.step, message.src_rank, message.dst_rank, message.leg, part)


def count_staging_bytes(rounds: Iterable[BoundRound]) -> int:
    """Bytes of staging of the round that needs most."""
    most = 0
    for one in rounds:
        for endpoint in (*one.receives, *one.sends):
            most = max(most, _find_staging_end(endpoint))
    return most


def _bind_round(one: Round, src: Strides, dst: Strides) -> BoundRound:
    """The round, with a part of staging for each message that needs one."""
    receives = [_bind_to_destination(message, dst) for message in one.receives]
    receives = _lay_in_staging(receives, 0)
    # Sends lie behind receives: all messages of a round are on their way at once.
    used = max(map(_find_staging_end, receives), default=0)
    sends = []
    for message in one.sends:
        # What is relayed has been received before, hence lies in a destination.
        strides = dst if message.relayed else src
        sends.append(_bind_to_source(message, strides))
    sends = _lay_in_staging(sends, align(used))
    keeps = []
    for message in one.keeps:
        pair = _bind_to_source(message, src), _bind_to_destination(message, dst)
        keeps.append(pair)
    return BoundRound(one.step, tuple(sends), tuple(receives), tuple(keeps))


def _find_staging_end(endpoint: Endpoint) -> int:
    """One past the last byte of staging that the message takes; 0 where it takes none."""
    return 0 if endpoint.contiguous else endpoint.start + endpoint.message.nbytes


def _lay_in_staging(endpoints: Iterable[Endpoint], start: int) -> list[Endpoint]:
    """The endpoints with parts of the block of their own, from byte `start` on."""
    laid = []
    for endpoint in endpoints:
        laid.append(endpoint._replace(start=start))
        if not endpoint.contiguous:
            start += align(endpoint.message.nbytes)
    return laid


def _bind_to_source(message: Message, strides: Strides) -> Endpoint:
    """Where the message is read from tensors of these strides."""
    views = []
    for piece in message.pieces:
        key = piece.src_tensor
        views.append(locate(key, strides[key], piece.src_slices, piece.shape))
    return Endpoint(message, tuple(views), join(views), 0)


def _bind_to_destination(message: Message, strides: Strides) -> Endpoint:
    """Where the message is written to tensors of these strides."""
    views = []
    for piece in message.pieces:
        key = piece.dst_tensor
        views.append(locate(key, strides[key], piece.dst_slices, piece.shape))
    # Received in place, a piece would overwrite what it is to be folded into.
    folds = any(piece.op != "copy" for piece in message.pieces)
    return Endpoint(message, tuple(views), None if folds else join(views), 0, folds)
