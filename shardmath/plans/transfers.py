"""Transfers: the pieces of a plan, each one box of one tensor between two ranks.

`spelling` lists the transfers of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from shardmath.base.public import public
from shardmath.layouts.holdings import Windows
from shardmath.plans.demands import Batch, Demands

__all__ = ["Planned", "Transfer"]


@public
class Transfer(NamedTuple):
    """One box of one tensor that a rank sends to another rank, or keeps if both ranks are the same.

    It prints as `sender -> receiver op [global box] of [box in the sender's tensor] to [box in the
    receiver's], bytes`. Both sides list `shape` elements row-major. `op` is "copy", or the operation
    that combines the piece with the value that is there; pieces of one element enter in order of `addend`.
    """

    tensor: str
    src_rank: int
    dst_rank: int
    op: str
    src_tensor: str
    src_slices: tuple[slice, ...]
    dst_tensor: str
    dst_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    global_slices: tuple[slice, ...]
    addend: int = 0

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.tensor else ""
        box = _show_box(self.global_slices)
        src = _show_box(self.src_slices)
        dst = _show_box(self.dst_slices)
        ends = f"{self.src_rank} -> {self.dst_rank}"
        return f"{name}{ends} {self.op} {box} of {src} to {dst}, {self.nbytes} B"


def _show_box(slices: tuple[slice, ...]) -> str:
    ranges = ", ".join(f"{s.start}:{s.stop}" for s in slices)
    return f"[{ranges}]"


class Planned(Protocol):
    """The parts of a Plan from which its transfers are listed: source and destination layouts by tensor name, groups of
    equally sharded tensors, and a table of the bytes that ranks hold and need."""

    @property
    def src(self) -> Mapping[str, Windows]: ...
    @property
    def dst(self) -> Mapping[str, Windows]: ...
    @property
    def batches(self) -> tuple[Batch, ...]: ...
    @property
    def lines(self) -> Demands: ...
    @property
    def src_ranks(self) -> tuple[int, ...]: ...
