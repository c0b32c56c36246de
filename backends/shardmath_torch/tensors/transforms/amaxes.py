"""`compile_quantize`: ranks whose layout cuts blocks agree on a tensor once, and quantize it any number of times.

1. A call measures amaxes, sends the amaxes of blocks that are cut, and casts, as `shardmath.values.amaxes` defines.
   Every rank makes the call, even if no block is cut.
2. Errors in a rank's tensors are found before ranks vote: all raise, and no output has changed.
3. Numbers are not rounded before: bfloat16 and float16 are exact in float32. Amaxes are sent as float32.
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
from shardmath_torch.tensors.formats.quantizing import amax_of, quantize
from shardmath_torch.tensors.transforms.agreeing import agree, join_group
from shardmath_torch.tensors.transforms.packing import Packing

__all__ = ["Quantizer", "compile_quantize"]

EXACT = ("float32", "bfloat16", "float16")
"""Dtypes whose numbers are exact in float32."""

SHOWN = 24
"""How many hexadecimal digits of a digest a claim has."""


_Named: TypeAlias = dict[str, tuple[tuple[int, ...], Layout]]
"""Local tensors by name: their shape, and their layout."""


class _QuantizeCall:
    """The `out` of one call and its results, and between the two, the rank's numbers and its part's amaxes."""

    def __init__(self, out: object) -> None:
        self.out = out
        self.made: tuple[Tensor, ...] = ()
        self.numbers: Tensor | None = None
        self.amaxes: Floats = np.zeros(0, np.float32)


class _QuantizeStage(Stage):
    """The stage of a quantizing move: measures before amaxes are sent, and casts with those received."""

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
            for part, part_layout in zip(amaxes.format.parts, amaxes.layouts, strict=True):
                parts[part.name] = part_layout.local_shape(rank), part_layout
            self._received = _make_slots(amaxes, "destination", rank, self._device)
            self._packing = Packing(layout, rank, self._device)
            self._pieces = list(amaxes.list_pieces(rank))
        self._tensor = Wanted("source", rank, tensors, single=True)
        self._parts = Wanted("destination", rank, parts, single=False)
        # Whether outputs are being written, so that a failure leaves them torn.
        self._writes = False
        self._call = _QuantizeCall(None)

    def bind(self, src: Local, out: Any) -> tuple[Local, Local]:
        """Compute the largest magnitude in each quantization block of `src`. Return two dicts of tensors: first, the
        magnitudes to send; second, memory to receive the magnitudes from other ranks. Raises ExchangeError if a tensor
        in `src`, or in `out` (for the quantized result), is not as planned.
        """
        self._writes = False
        call: _QuantizeCall = out
        inputs = by_key(self._tensor, src)
        outputs = self._read_outputs(call.out)
        check((self._tensor, self._parts), (inputs, outputs), self._device)
        call.made = tuple(outputs.values())
        self._call = call
        if not self._is_holder:
            return {}, {}
        call.numbers = self._packing.read(inputs[""])
        call.amaxes = self._measure(call.numbers)
        to_send = {}
        for key, slots in self._amaxes.send(self._rank, call.amaxes).items():
            row = torch.from_numpy(slots)
            to_send[key] = row.to(self._device)
        return to_send, self._received

    def _read_outputs(self, given: object) -> Tensors:
        """The output tensors by name, new ones if none are given. Raises ExchangeError for another number of them."""
        wanted = self._parts.tensors
        if given is None:
            return self._make_outputs()
        if not isinstance(given, tuple | list):
            what = f"out= is {type(given).__name__}, where a tuple of tensors is needed"
            raise ExchangeError(f"{what}; pass {_show_outputs(wanted)}")
        if len(given) != len(wanted):
            what = f"out= has {plural(given, 'tensor')}, where {len(wanted)} are needed"
            raise ExchangeError(f"{what}; pass {_show_outputs(wanted)}")
        named = dict(zip(wanted, given, strict=True))
        return by_key(self._parts, named)

    def _make_outputs(self) -> Tensors:
        """New tensors for this rank's data and scales, by name."""
        outputs = {}
        for name, (shape, layout) in self._parts.tensors.items():
            kind = dtype_of(layout.dtype)
            outputs[name] = torch.empty(shape, dtype=kind, device=self._device)
        return outputs

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """Quantize with the blocks' largest magnitudes over all ranks, and write data and scales; return (), as nothing
        is left to write.
        """
        if not self._is_holder:
            return ()
        slots = {}
        for key, row in self._received.items():
            slots[key] = row.cpu().numpy()
        call = self._call
        format, amax = self._amaxes.settle(self._rank, call.amaxes, slots)
        # Stays True if an error interrupts the writing, for `name_torn`.
        self._writes = True
        self._cast(format, amax)
        self._writes = False
        return ()

    def _measure(self, numbers: Tensor) -> Floats:
        """The amax of this rank's part of each block that it touches."""
        known = self._amaxes.find_known(self._rank)
        if known is not None:
            return known
        shape = self._amaxes.count_blocks(self._rank)
        largest = torch.zeros(shape, dtype=torch.float32, device=self._device)
        for piece in self._pieces:
            measured = amax_of(self._amaxes.format, numbers[piece.here])
            target = largest[piece.blocks]
            torch.maximum(target, measured, out=target)
        return largest.cpu().numpy()

    def _cast(self, format: Format, amax: Floats) -> None:
        """Quantize the rank's numbers into the outputs, piece by piece."""
        numbers = self._call.numbers
        assert numbers is not None, "bound before"
        amaxes = torch.from_numpy(amax).to(self._device)
        for piece in self._pieces:
            out_slices = []
            for out, target in zip(self._call.made, piece.targets, strict=True):
                out_slices.append(out[target])
            quantize(format, numbers[piece.here], out_slices, amaxes[piece.blocks])

    def end(self) -> None:
        """Drop the references to the caller's tensors."""
        self._call = _QuantizeCall(None)

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of all outputs if a failure interrupted writing them, else (); `keys` is not used."""
        return tuple(self._parts.tensors) if self._writes else ()


def _show_outputs(wanted: Iterable[str]) -> str:
    """The outputs to pass, for messages."""
    names = ", ".join(wanted)
    return f"the tensors {names}, in this order" if names else "an empty tuple"


def _make_slots(amaxes: Amaxes, end: str, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Memory for amaxes, which are sent as rows of slots, at one end."""
    slots = {}
    for key in amaxes.list_local(end, rank):
        count = amaxes.count_slots(end, rank)
        slots[key] = torch.empty(count, dtype=torch.float32, device=device)
    return slots


@public
class Quantizer:
    """A compiled quantization of a sharded tensor, made by `compile_quantize`: call it with the local tensor to get
    this rank's data and scales.

    Calls are collective; it can be called any number of times.

    `amaxes` is what was compiled, `plan` the plan that sends amaxes.
    """

    def __init__(self, amaxes: Amaxes, mover: Mover) -> None:
        self.amaxes = amaxes
        self._mover = mover

    def __repr__(self) -> str:
        return f"<quantizer to {self.amaxes.format.name} by {self._mover!r}>"

    @property
    def plan(self) -> Plan:
        """The plan that sends the largest magnitudes of blocks between ranks."""
        moved = self._mover.plan
        assert isinstance(moved, Plan), "as it was compiled"
        return moved

    @property
    def last(self) -> Moved | None:
        """The report of the latest successful call on this rank: bytes, messages and seconds; None before the first."""
        return self._mover.last

    @compat.untraced
    def __call__(
        self,
        tensor: Tensor | None,
        out: tuple[Tensor, ...] | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Return data and scales of this rank's part, in the layouts `amaxes.layouts`. Collective over the group.

        `tensor` is the local tensor of the layout; a rank outside the layout's mesh passes None, and gets (). `out`
        are tensors for the results, by default new ones. `timeout` is how many seconds to wait for all ranks to make
        this call. Raises ExchangeError on every rank if one rank's tensors do not fit.
        """
        # The mover's stage takes this object from `out`, and puts the results into it.
        call: Any = _QuantizeCall(out)
        self._mover(tensor, out=call, timeout=timeout)
        outputs: tuple[Tensor, ...] = call.made
        return outputs


@compat.untraced
def compile_quantize(
    format: Format,
    layout: Layout,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Quantizer:
    """Return a Quantizer, which quantizes a tensor of the layout `layout` to `format`. A block of elements with one
    scale can be divided over ranks. Collective.

    The layout may cut blocks that share a scale: each rank gets its part of the whole tensor's data and scales, bit by
    bit. The layout has the tensor's dtype: float32, bfloat16 or float16. Raises ExchangeError on every rank if ranks
    pass different formats or layouts, if `sm.formats.plan_amaxes` raises, and if the group lacks a rank of the layout.
    """
    process_group = compat.group_of(group)
    party = join_group(process_group, timeout)
    amaxes, objection = attempt(lambda: _check_and_plan(format, layout, party))
    claim = "compile_quantize"
    if amaxes is not None:
        claim = f"compile_quantize {_digest(amaxes)[:SHOWN]} to {amaxes.format.name}"
    agree(party, claim, objection)
    assert amaxes is not None, "who objects does not get past the vote"
    planned = plan(amaxes.src, amaxes.dst)
    ends = _QuantizeStage(amaxes, party)
    ready = make_ready(planned, process_group, Settings(timeout), (ends,))
    return Quantizer(amaxes, Mover(ready))


def _check_and_plan(format: Format, layout: Layout, party: Party) -> Amaxes:
    """Plan the amaxes. Raises ShardError to object."""
    amaxes = plan_amaxes(format, layout, "amaxes")
    if layout.dtype not in EXACT:
        what = f"{layout} has dtype {layout.dtype}, which is not one of {', '.join(EXACT)}"
        raise PlanError(
            f"{what}; cast the tensor, and make the layout with dtype {' or '.join(EXACT)}"
        )
    absent = set(layout.mesh.ranks).difference(party.ranks)
    if absent:
        what = f"{layout} has rank {min(absent)}, but the process group has {shown(party.ranks)}"
        raise PlanError(f"{what}; pass group= with all ranks that hold the tensor")
    return amaxes


def _digest(amaxes: Amaxes) -> str:
    """A digest of format and layout, equal for equal layouts, however they are spelled."""
    holdings = holdings_digest(amaxes.layout)
    return digest((repr(amaxes.format), *holdings))
