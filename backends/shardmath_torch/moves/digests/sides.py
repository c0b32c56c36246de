"""Sides: this rank's shares of a side, and all ranks' shares.

1. A patch is a set of elements of a tensor that the same ranks hold, and a share is the sum of their bits, times
   weights. Ranks exchange 8 bytes for each patch that they hold of a tensor: one patch if holdings do not overlap in
   part.
2. All ranks know each rank's number of shares from the layouts, so it is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.layouts.algebra.box import Box
from shardmath.layouts.holdings import Windows
from shardmath.values.digests.patches import Portion, list_held
from shardmath.values.digests.shares import Shares, list_shares, weigh_boxes
from shardmath.values.digests.weighing import NUMPY, Array, Library
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.digests.library import see

__all__ = ["AllShares", "DigestSide", "count_shares", "divide_shares", "gather_numbers"]

AllShares: TypeAlias = dict[str, Shares]
"""Every rank's shares, by tensor."""

PIECE = 1 << 18
"""Bytes per message, as in `agreement.gather`."""


@dataclass(frozen=True, slots=True)
class DigestSide:
    """The tensors at the source, or those at the destination, of a move: this rank's local tensors, and all ranks'
    layouts of each tensor. If several layouts each describe a part of a tensor, the local tensor for layout i has the
    name `name[i]`."""

    windows: Mapping[str, Windows]
    rank: int
    tensors: Mapping[str, Tensor]
    seed: int = 0

    def list_shares(self) -> list[int]:
        """Return the numbers that this rank adds to the digests (checksums) of the tensors, tensor by tensor. This
        rank's elements of a tensor are grouped by the set of ranks that hold them, and each group gives one number."""
        shares: list[int] = []
        with torch.inference_mode():
            for name, windows in self.windows.items():
                arrays, library = self._see(name)
                shares += list_shares(windows, self.rank, arrays, self.seed, library)
        return shares

    def weigh(self, name: str, portions: Sequence[Portion], boxes: Sequence[Box]) -> list[int]:
        """Return a list with a checksum for each of `boxes` (index ranges) of the tensor `name`: the sum of the
        elements' bits, as integers, times random weights that depend on the index. Only elements in `portions`, which
        list elements that this rank holds, are added."""
        with torch.inference_mode():
            arrays, library = self._see(name)
            return weigh_boxes(portions, arrays, boxes, self.seed, library)

    def _see(self, name: str) -> tuple[dict[int, Array], Library]:
        """The arrays of a tensor's windows, and the library for their arithmetic."""
        library = NUMPY
        arrays = {}
        windows = self.windows[name]
        for window, local_name in enumerate(windows.local_names(name)):
            if self.rank in windows[window].mesh:
                arrays[window], library = see(self.tensors[local_name])
        return arrays, library


def count_shares(side: Mapping[str, Windows], rank: int) -> int:
    """Return how many shares (numbers that are summed into a digest) `rank` has in the digests of all tensors of `side`
    together."""
    held = [list_held(windows).get(rank, ()) for windows in side.values()]
    return sum(map(len, held))


def divide_shares(side: Mapping[str, Windows], unread: Mapping[int, Iterator[int]]) -> AllShares:
    """Divide the numbers that ranks computed for digests (checksums) among the tensors of `side`, and return them as
    tensor name -> rank -> list. They are taken from `unread`, which has an iterator of each rank's numbers."""
    by_name: AllShares = {}
    for name, windows in side.items():
        by_rank = {}
        for rank, held in list_held(windows).items():
            by_rank[rank] = list(islice(unread[rank], len(held)))
        by_name[name] = by_rank
    return by_name


def gather_numbers(
    party: Party, own_numbers: Sequence[int], counts: Mapping[int, int]
) -> dict[int, list[int]]:
    """Gather every rank's `own_numbers`, and return them as rank -> list; `counts` has the length of each rank's list.
    Raises PeerFailure if a rank fails or does not answer in time."""
    # Records of one size: shorter ones are padded.
    nbytes = 8 * max(counts.values(), default=0)
    record = np.array(own_numbers, np.int64).tobytes().ljust(nbytes, b"\0")
    records = [b""] * len(party.ranks)
    for start in range(0, nbytes, PIECE):
        pieces = party.gather(record[start : start + PIECE])
        records = list(map(bytes.__add__, records, pieces))
    by_rank = {}
    for rank, gathered in zip(party.ranks, records, strict=True):
        numbers = np.frombuffer(gathered, np.int64)
        by_rank[rank] = numbers[: counts[rank]].tolist()
    return by_rank
