"""`compile_quantise`: ranks that cut blocks agree on a tensor once, and quantise their parts as often as wanted.

1. A call measures, sends the amaxes of blocks that are cut, and casts, as `shardmath.values.amaxes` has it. Every rank
   makes it, also where no block is cut.
2. What is wrong with a rank's tensors is found before ranks vote: all raise, and no output has changed.
3. Numbers are rounded to nothing before: bfloat16 and float16 are exact in float32. What travels is float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.base.digest import digest
from shardmath.base.errors import ExchangeError, PlanError
from shardmath.base.public import public
from shardmath.base.text import plural, shown
from shardmath.layouts.holdings import holdings_digest
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan, plan
from shardmath.values.amaxes.amaxes import Amaxes, plan_amaxes
from shardmath.values.formats.floats import Floats
from shardmath.values.formats.format import Format
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.naming import attempt
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.moves.commits.shadows import Pair
from shardmath_torch.moves.exchange.local import Local, Tensors, Wanted, by_key, check
from shardmath_torch.moves.movers.compile import make_ready
from shardmath_torch.moves.movers.mover import Mover
from shardmath_torch.moves.movers.settings import DEFAULT_TIMEOUT_S, Settings
from shardmath_torch.moves.movers.stages import Stage
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.tensors.formats.quantising import amax_of, quantise
from shardmath_torch.tensors.transforms.agreeing import agree, join_group
from shardmath_torch.tensors.transforms.packing import Packing

__all__ = ["Quantiser", "compile_quantise"]

EXACT = ("float32", "bfloat16", "float16")
"""Types whose numbers float32 has."""

SHOWN = 24
"""Hexadecimal digits of a digest that a claim has."""


_Named: TypeAlias = dict[str, tuple[tuple[int, ...], Layout]]
"""Local tensors by name: their shape, and their layout."""


class _Call:
    """What one call gives as `out`, and gets; between the two, the rank's numbers, and the amaxes of its own part."""

    def __init__(self, out: object) -> None:
        self.out = out
        self.made: tuple[Tensor, ...] = ()
        self.numbers: Tensor | None = None
        self.own: Floats = np.zeros(0, np.float32)


class _Ends(Stage):
    """What a rank does before slots travel, and of those that have come."""

    def __init__(self, amaxes: Amaxes, party: Party) -> None:
        rank = party.rank
        layout = amaxes.layout
        self._amaxes = amaxes
        self._rank = rank
        self._device = party.wire.device
        self._is_holder = rank in layout.mesh
        tensors: _Named = {}
        parts: _Named = {}
        self._received: dict[str, Tensor] = {}
        if self._is_holder:
            tensors[""] = layout.local_shape(rank), layout
            for part, lies in zip(amaxes.format.parts, amaxes.layouts, strict=True):
                parts[part.name] = lies.local_shape(rank), lies
            self._received = _make_slots(amaxes, "destination", rank, self._device)
            self._packing = Packing(layout, rank, self._device)
            self._pieces = list(amaxes.list_pieces(rank))
        self._tensor = Wanted("source", rank, tensors, single=True)
        self._parts = Wanted("destination", rank, parts, single=False)
        self._writes = False
        self._call = _Call(None)

    def bind(self, src: Local, out: Any) -> tuple[Local, Local]:
        """The slots of the tensor. Raises what speaks against quantising it."""
        self._writes = False
        call: _Call = out
        here = by_key(self._tensor, src)
        there = self._read_outputs(call.out)
        check((self._tensor, self._parts), (here, there), self._device)
        call.made = tuple(there.values())
        self._call = call
        if not self._is_holder:
            return {}, {}
        call.numbers = self._packing.read(here[""])
        call.own = self._measure(call.numbers)
        sent = {}
        for key, slots in self._amaxes.send(self._rank, call.own).items():
            row = torch.from_numpy(slots)
            sent[key] = row.to(self._device)
        return sent, self._received

    def _read_outputs(self, given: object) -> Tensors:
        """What the rank makes by name, where callers want it. Raises ExchangeError for another number."""
        wanted = self._parts.tensors
        if given is None:
            return self._make_outputs()
        if not isinstance(given, tuple | list):
            what = f"out is {type(given).__name__}"
            raise ExchangeError(f"{what}; pass a tuple of {', '.join(wanted) or 'nothing'}")
        if len(given) != len(wanted):
            what = f"out has {plural(given, 'tensor')}"
            raise ExchangeError(f"{what}; pass {', '.join(wanted) or 'nothing'}")
        named = dict(zip(wanted, given, strict=True))
        return by_key(self._parts, named)

    def _make_outputs(self) -> Tensors:
        made = {}
        for name, (shape, layout) in self._parts.tensors.items():
            kind = dtype_of(layout.dtype)
            made[name] = torch.empty(shape, dtype=kind, device=self._device)
        return made

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """Data and scales, in their place."""
        if not self._is_holder:
            return ()
        slots = {}
        for key, row in self._received.items():
            slots[key] = row.cpu().numpy()
        call = self._call
        format, amax = self._amaxes.settle(self._rank, call.own, slots)
        self._writes = True
        self._cast(format, amax)
        self._writes = False
        return ()

    def _measure(self, numbers: Tensor) -> Floats:
        """The amax of each block that the rank touches, of its own part."""
        known = self._amaxes.find_known(self._rank)
        if known is not None:
            return known
        shape = self._amaxes.count_blocks(self._rank)
        largest = torch.zeros(shape, dtype=torch.float32, device=self._device)
        for piece in self._pieces:
            found = amax_of(self._amaxes.format, numbers[piece.here])
            own = largest[piece.blocks]
            torch.maximum(own, found, out=own)
        return largest.cpu().numpy()

    def _cast(self, format: Format, amax: Floats) -> None:
        """Data and scales in their place."""
        numbers = self._call.numbers
        assert numbers is not None, "bound before"
        amaxes = torch.from_numpy(amax).to(self._device)
        for piece in self._pieces:
            into = []
            for out, target in zip(self._call.made, piece.targets, strict=True):
                into.append(out[target])
            quantise(format, numbers[piece.here], into, amaxes[piece.blocks])

    def end(self) -> None:
        """The caller's tensors are kept no longer."""
        self._call = _Call(None)

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Outputs, where it has begun to write them."""
        return tuple(self._parts.tensors) if self._writes else ()


def _make_slots(amaxes: Amaxes, end: str, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Memory for the slots that come."""
    made = {}
    for key in amaxes.list_local(end, rank):
        count = amaxes.count_slots(end, rank)
        made[key] = torch.empty(count, dtype=torch.float32, device=device)
    return made


@public
class Quantiser:
    """What `compile_quantise` returns: `quantise(tensor)`, collective, as often as wanted.

    `amaxes` is what it was made of, `plan` the plan of the amaxes that travel.
    """

    def __init__(self, amaxes: Amaxes, mover: Mover) -> None:
        self.amaxes = amaxes
        self._mover = mover

    def __repr__(self) -> str:
        return f"<quantiser to {self.amaxes.format.name} by {self._mover!r}>"

    @property
    def plan(self) -> Plan:
        """The plan of the amaxes."""
        found = self._mover.plan
        assert isinstance(found, Plan), "as it was compiled"
        return found

    @property
    def last(self) -> Moved | None:
        """What the latest call that ended well moved on this rank, and how long it took."""
        return self._mover.last

    def __call__(
        self,
        tensor: Tensor | None,
        out: tuple[Tensor, ...] | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Data and scales of this rank's part, as `amaxes.layouts` have them, on every rank of the group at once.

        `tensor` is the local tensor of the layout, None on a rank that the layout does not have, which gets (). `out`
        are tensors for what is made, new ones if not given. `timeout`: seconds to wait for all ranks to make this
        call. Raises ExchangeError on every rank where a rank's tensors are not as they should be.
        """
        call: Any = _Call(out)
        self._mover(tensor, out=call, timeout=timeout)
        made: tuple[Tensor, ...] = call.made
        return made


def compile_quantise(
    format: Format,
    layout: Layout,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Quantiser:
    """The quantising of a tensor that lies so, made ready on this rank. Collective over `group` (default: all ranks).

    Ranks may cut blocks that share a scale: each gets what it would have of the whole tensor's data and scales, to the
    bit. The layout's dtype is that of the tensor: float32, bfloat16 or float16. Raises ExchangeError on every rank
    where ranks pass other formats or layouts, or a rank cannot quantise: as `sm.formats.plan_amaxes` says, and where
    the group lacks a rank of the layout.
    """
    found = compat.group_of(group)
    party = join_group(found, timeout)
    amaxes, objection = attempt(lambda: _check_and_plan(format, layout, party))
    claim = "compile_quantise"
    if amaxes is not None:
        claim = f"compile_quantise {_digest(amaxes)[:SHOWN]} to {amaxes.format.name}"
    agree(party, claim, objection)
    assert amaxes is not None, "who objects does not get past the vote"
    planned = plan(amaxes.src, amaxes.dst)
    ends = _Ends(amaxes, party)
    ready = make_ready(planned, found, Settings(timeout), (ends,))
    return Quantiser(amaxes, Mover(ready))


def _check_and_plan(format: Format, layout: Layout, party: Party) -> Amaxes:
    """What this rank measures, sends and makes. Raises ShardError to object."""
    amaxes = plan_amaxes(format, layout, "amaxes")
    if layout.dtype not in EXACT:
        what = f"{layout} has numbers that float32 has not"
        raise PlanError(f"{what}; round them first, and give a layout of {' or '.join(EXACT)}")
    absent = set(layout.mesh.ranks).difference(party.ranks)
    if absent:
        what = f"{layout} has rank {min(absent)}, the process group {shown(party.ranks)}"
        raise PlanError(f"{what}; give a group of all ranks that hold the tensor")
    return amaxes


def _digest(amaxes: Amaxes) -> str:
    """Equal on ranks that quantise alike, however they spell the layout."""
    held = holdings_digest(amaxes.layout)
    return digest((repr(amaxes.format), *held))
