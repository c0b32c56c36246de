"""Where the pieces of messages lie in memory.

1. A **site** is a piece's cells in a tensor: sizes, strides and offset in elements; finding it needs the tensor's
   strides only, so sites are found once and used for every move of tensors that lie alike.
2. A message whose sites are one contiguous **stretch** of memory needs no packing: it is sent from, or received into,
   the tensor itself. Pieces that are folded into what is there are never received in place.
3. Other messages go through staging: a block of bytes, at least as large as the round that needs most of it. Each
   message of a round has its own part of the block.
4. A message is read from source tensors, or, where it is relayed (`Message.relayed`), from destination tensors.
5. Copies move words (`dtypes.words`), so every element type moves bit by bit. A move allocates views, no memory.

>>> site_of("w", (8, 1), (slice(2, 4), slice(0, 8)), (2, 8))
Site(key='w', shape=(2, 8), strides=(8, 1), offset=16)
>>> stretch_of([site_of("w", (8, 1), (slice(2, 4), slice(0, 8)), (2, 8))])
Site(key='w', shape=(16,), strides=(1,), offset=16)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.algebra.mesh import strides as row_major
from shardmath.programs.messages import Message, Round, aligned

__all__ = ["LaidRound", "Place", "Site", "lay", "site_of", "staging_needed", "stretch_of", "view"]


class Site(NamedTuple):
    """Cells of the tensor `key`: strides and offset in elements, the offset from the tensor's first."""

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Place(NamedTuple):
    """One end of a message: its pieces' sites, and the stretch that they are or the byte of staging where it begins."""

    message: Message
    sites: tuple[Site, ...]
    stretch: Site | None
    start: int


class LaidRound(NamedTuple):
    """A round whose ends have places; `keeps` have a source and a destination here."""

    sends: tuple[Place, ...]
    receives: tuple[Place, ...]
    keeps: tuple[tuple[Place, Place], ...]


Strides = Mapping[str, tuple[int, ...]]
"""Of each local tensor, in elements."""


def site_of(
    key: str, strides: Sequence[int], slices: Sequence[slice], shape: tuple[int, ...]
) -> Site:
    """The site of tensor[slices], for a tensor of these strides."""
    offset = sum(s.start * step for s, step in zip(slices, strides, strict=True))
    return Site(key, shape, tuple(strides), offset)


def view(tensors: Mapping[str, Tensor], site: Site) -> Tensor:
    """The site's cells."""
    tensor = tensors[site.key]
    return torch.as_strided(tensor, site.shape, site.strides, tensor.storage_offset() + site.offset)


def stretch_of(sites: Sequence[Site]) -> Site | None:
    """The sites, one after the other, as one contiguous site; None where they are not."""
    first, end = sites[0], sites[0].offset
    for site in sites:
        if site.key != first.key or site.offset != end or not _contiguous(site):
            return None
        end += math.prod(site.shape)
    return Site(first.key, (end - first.offset,), (1,), first.offset)


def _contiguous(site: Site) -> bool:
    rows = zip(site.shape, site.strides, row_major(site.shape), strict=True)
    return all(n == 1 or step == row for n, step, row in rows)


def lay(rounds: Sequence[Round], src: Strides, dst: Strides) -> tuple[LaidRound, ...]:
    """The rounds for tensors of these strides."""
    return tuple(_lay_round(one, src, dst) for one in rounds)


def staging_needed(rounds: Sequence[LaidRound]) -> int:
    """Bytes of staging of the round that needs most."""
    return max((_end(place) for one in rounds for place in (*one.receives, *one.sends)), default=0)


def _end(place: Place) -> int:
    return 0 if place.stretch else place.start + place.message.nbytes


def _lay_round(one: Round, src: Strides, dst: Strides) -> LaidRound:
    receives = tuple(_placed((_at_dst(m, dst) for m in one.receives), 0))
    free = max(map(_end, receives), default=0)
    sends = tuple(
        _placed((_at_src(m, dst if m.relayed else src) for m in one.sends), aligned(free))
    )
    return LaidRound(sends, receives, tuple((_at_src(m, src), _at_dst(m, dst)) for m in one.keeps))


def _placed(places: Iterator[Place], start: int) -> Iterator[Place]:
    """The places with parts of the block of their own, from byte `start` on."""
    for place in places:
        yield place._replace(start=start)
        start += 0 if place.stretch else aligned(place.message.nbytes)


def _at_src(m: Message, strides: Strides) -> Place:
    sites = tuple(
        site_of(p.src_tensor, strides[p.src_tensor], p.src_slices, p.shape) for p in m.pieces
    )
    return Place(m, sites, stretch_of(sites), 0)


def _at_dst(m: Message, strides: Strides) -> Place:
    sites = tuple(
        site_of(p.dst_tensor, strides[p.dst_tensor], p.dst_slices, p.shape) for p in m.pieces
    )
    overwrites = all(p.op == "copy" for p in m.pieces)
    return Place(m, sites, stretch_of(sites) if overwrites else None, 0)
