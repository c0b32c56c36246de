"""This rank's shares of a side, and everybody's.

1. What ranks tell each other is 8 bytes for each patch that they hold of a tensor: one patch where
   holdings do not overlap in part.
2. Layouts say how many numbers each rank has, so nobody says it.
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
"""Bytes that go at once, as in `agreement.gather`."""


@dataclass(frozen=True, slots=True)
class DigestSide:
    """This rank's tensors of a side, by local name, and how all ranks hold each."""

    windows: Mapping[str, Windows]
    rank: int
    tensors: Mapping[str, Tensor]
    seed: int = 0

    def list_shares(self) -> list[int]:
        """This rank's shares of all tensors, in the order of names."""
        shares: list[int] = []
        with torch.inference_mode():
            for name, windows in self.windows.items():
                arrays, library = self._see(name)
                shares += list_shares(windows, self.rank, arrays, self.seed, library)
        return shares

    def weigh(self, name: str, portions: Sequence[Portion], boxes: Sequence[Box]) -> list[int]:
        """What portions of this rank's of a tensor have in each box."""
        with torch.inference_mode():
            arrays, library = self._see(name)
            return weigh_boxes(portions, arrays, boxes, self.seed, library)

    def _see(self, name: str) -> tuple[dict[int, Array], Library]:
        """The arrays of a tensor's windows, and the library that they are of."""
        library = NUMPY
        arrays = {}
        windows = self.windows[name]
        for window, local in enumerate(windows.local_names(name)):
            if self.rank in windows[window].mesh:
                arrays[window], library = see(self.tensors[local])
        return arrays, library


def count_shares(side: Mapping[str, Windows], rank: int) -> int:
    """How many shares a rank has of all tensors."""
    held = [list_held(windows).get(rank, ()) for windows in side.values()]
    return sum(map(len, held))


def divide_shares(side: Mapping[str, Windows], rest: Mapping[int, Iterator[int]]) -> AllShares:
    """The shares of each tensor, given all ranks' of all tensors, of which as many are taken."""
    found: AllShares = {}
    for name, windows in side.items():
        of_tensor = {}
        for rank, held in list_held(windows).items():
            of_tensor[rank] = list(islice(rest[rank], len(held)))
        found[name] = of_tensor
    return found


def gather_numbers(
    party: Party, mine: Sequence[int], counts: Mapping[int, int]
) -> dict[int, list[int]]:
    """Every rank's numbers, of which each says as many as all know that it has. Raises PeerFailure."""
    nbytes = 8 * max(counts.values(), default=0)
    record = np.array(mine, np.int64).tobytes().ljust(nbytes, b"\0")
    texts = [b""] * len(party.ranks)
    for start in range(0, nbytes, PIECE):
        pieces = party.gather(record[start : start + PIECE])
        texts = list(map(bytes.__add__, texts, pieces))
    found = {}
    for rank, text in zip(party.ranks, texts, strict=True):
        numbers = np.frombuffer(text, np.int64)
        found[rank] = numbers[: counts[rank]].tolist()
    return found
