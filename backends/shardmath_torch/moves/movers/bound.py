"""Bound: the tensors that a mover has checked, so that it checks the same ones only once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardmath.plans.plan import Movable
from shardmath_torch.moves.exchange.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.moves.movers import stages
from shardmath_torch.moves.movers.calls import Call
from shardmath_torch.moves.movers.carriers import Carrier
from shardmath_torch.moves.movers.stages import Stages

__all__ = ["BoundTensors"]


class _HeldTensors(NamedTuple):
    """Mappings that a caller keeps unchanged from move to move, and their tensors by local buffer key."""

    src: Local
    out: Local
    tensors: tuple[Tensors, Tensors]

    def is_of(self, src: Local, out: Local) -> bool:
        """Whether `src` and `out` are the same objects (tensors or dicts of tensors) for which this cache was made, so
        that its tensors can be used again."""
        return src is self.src and out is self.out


class BoundTensors:
    """The tensors that a rank passed to a mover, checked once, so that moves of the same tensors skip the check."""

    def __init__(self, plan: Movable, rank: int) -> None:
        self._wanted = wanted(plan, rank)
        # The signature of the tensors that were checked last.
        self._checked: object = None
        self._held: _HeldTensors | None = None

    def prepare(
        self, call: Call, ends: Stages, carrier: Carrier, device: torch.device
    ) -> tuple[Tensors, Tensors]:
        """Return dicts of the tensors to send and to receive into, made from the tensors of `call` by the stages in
        `ends`, such as casts. Also prepare `carrier`, which moves the bytes, for these tensors, which must be on
        `device`.

        Tensors whose memory is the same as in the previous call are not checked and prepared for again. Raises
        ExchangeError if the tensors do not fit the plan or are not on `device`.
        """
        src, out = stages.bind(ends, call.src, call.out)
        if call.held and self._held is not None and self._held.is_of(src, out):
            return self._held.tensors
        tensors = by_key(self._wanted[0], src), by_key(self._wanted[1], out)
        current_signature = signature(tensors)
        # The carrier is also prepared again when a caller begins or ends to keep its tensors.
        if current_signature != self._checked or call.held or self._held is not None:
            # Forgotten first, so that an error or interrupt leaves nothing half bound.
            self.let_go()
            is_direct = not carrier.is_beside
            check(self._wanted, tensors, device, is_direct, current_signature)
            carrier.prepare(*tensors, call.held)
            self._checked = current_signature
            self._held = _HeldTensors(src, out, tensors) if call.held else None
        return tensors

    def let_go(self) -> None:
        """Release all tensors; the next move checks its tensors again."""
        self._checked = self._held = None
