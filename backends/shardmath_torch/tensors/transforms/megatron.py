"""Megatron: hooks of Megatron-Core's reshard (`ReshardTransform`) as transforms, unchanged.

1. A hook has `should_transform(name)`, `prepare_send(name, slices, parameter)`, `prepare_recv(name, slices)` and
   `finalize_recv(name, slices, buffers)`.
2. Its slices are **boxes**: what a rank holds of a tensor, in as few boxes as its layout has, each as slices of the
   local tensor. Megatron calls it for each piece that goes from one rank to another; here pieces are cut out of what it
   made of a box, so it is called once per box however many ranks need some of it.
3. What it sends and receives is stated beforehand, as components, and looked at when ranks compile, on both sides:
   `prepare_recv` is called there, once per box, and `prepare_send` on zeros, for a box of each shape. Another number of
   tensors, another shape or dtype are errors on all ranks then.
4. Each component travels under a name of its own, so copies that stay on a rank cannot be taken for each other.
5. The buffers that `prepare_recv` gave are kept, and what arrives is in them whenever `finalize_recv` is called: at the
   same addresses from move to move. Where it stores what it makes of them is its own matter: `out=` has no such tensor.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from shardmath.base.arguments import instance, listed
from shardmath.base.errors import ExchangeError, PlanError
from shardmath.layouts.layout import Layout
from shardmath.values.formats.elements import Array
from shardmath.values.transforms.components import AsHeld, Component, End, Form
from shardmath.values.transforms.local import WireJob
from shardmath_torch.groups.dtypes import dtype_of, words
from shardmath_torch.tensors.transforms.functions import check_made, describe
from shardmath_torch.tensors.transforms.workers import make_buffers

__all__ = ["Hook", "MegatronHook", "megatron_hook"]

Slices: TypeAlias = tuple[slice, ...]


class Hook(Protocol):
    """What Megatron-Core calls a ReshardTransform."""

    def should_transform(self, param_name: str, /) -> bool: ...
    def prepare_send(
        self, param_name: str, src_slice: Slices, src_param: Parameter, /
    ) -> list[Tensor]: ...
    def prepare_recv(self, param_name: str, dst_slice: Slices, /) -> list[Tensor]: ...
    def finalize_recv(
        self, param_name: str, dst_slice: Slices, recv_buffers: list[Tensor], /
    ) -> None: ...


METHODS = ("should_transform", "prepare_send", "prepare_recv", "finalize_recv")


def megatron_hook(hook: Hook, components: Iterable[Component]) -> MegatronHook:
    """The hook as a transform, which sends these tensors for each of its own, in this order.

    All ranks state the same components; the hook itself may be another on each rank. `rules` of it takes the tensors
    that the hook says it transforms. Raises PlanError for what is not a hook, and for what are not components.
    """
    missing = [name for name in METHODS if not callable(getattr(hook, name, None))]
    if missing:
        raise PlanError(f"{type(hook).__name__} has no {', '.join(missing)}; pass a Megatron hook")
    parts = listed(components, "components", PlanError)
    for part in parts:
        instance(part, Component, "give transforms.Component(name, dtype, grain)", PlanError)
    return MegatronHook(hook, parts)


class MegatronHook:
    """A hook as a transform; made by `megatron_hook`."""

    def __init__(self, hook: Hook, parts: tuple[Component, ...]) -> None:
        self.hook = hook
        self.parts = parts
        self._claimed: list[tuple[int, int]] = []

    def __str__(self) -> str:
        return f"a Megatron hook of {', '.join(map(str, self.parts))}"

    def __repr__(self) -> str:
        return f"<{self}: {type(self.hook).__name__}>"

    def rules(self, names: Iterable[str]) -> dict[str, MegatronHook]:
        """A rule for each of these tensors that the hook says it transforms."""
        return {name: self for name in names if self.hook.should_transform(name)}

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Those stated."""
        return self.parts

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """At neither end."""
        return AsHeld(False, False)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Raises PlanError: a hook takes tensors."""
        raise PlanError(f"{self} takes torch's tensors; move them by smt.compile_transformed")

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Raises PlanError: a hook takes tensors."""
        raise PlanError(f"{self} takes torch's tensors; move them by smt.compile_transformed")

    def claim(self, buffers: Sequence[Tensor]) -> bool:
        """Whether the hook's buffers can be received into: in rows, and nobody else's, as scratch memory would be."""
        for one in buffers:
            if not one.is_contiguous():
                return False
            mine = one.data_ptr(), one.data_ptr() + one.nbytes
            at = bisect.bisect_left(self._claimed, mine)
            before = self._claimed[at - 1][1] if at else 0
            behind = self._claimed[at][0] if at < len(self._claimed) else mine[1]
            if before > mine[0] or behind < mine[1]:
                return False
            self._claimed.insert(at, mine)
        return True

    def make_worker(
        self, job: WireJob, rank: int, end: End, device: torch.device
    ) -> _Sending | _Receiving:
        """The worker of one tensor. Raises ExchangeError where the hook does not do what was stated."""
        if not self.hook.should_transform(job.tensor):
            what = f"the hook does not transform {job.tensor!r}, and a rule says so"
            raise ExchangeError(
                f"{what}; give transformed(...) the rules that hook.rules(names) has"
            )
        make = _Sending if end == "source" else _Receiving
        return make(self, job, rank, device)


class _Box(NamedTuple):
    """A box of the local tensor, and where each of its components lies in the wire buffers."""

    local: Slices
    shape: tuple[int, ...]
    wires: tuple[Slices, ...]


def _list_boxes(job: WireJob, rank: int, parts: Sequence[Component], end: End) -> list[_Box]:
    """The boxes that the rank holds. Raises ExchangeError for one that ends inside a block."""
    layout = job.layout
    places = []
    for part in parts:
        blocks = part.block(layout.ndim, end)
        places.append([_place(job, rank, d, block) for d, block in enumerate(blocks)])
    boxes = []
    for local, there in layout.boxes(rank):
        starts = [start for start, _ in there]
        wires = tuple(
            tuple(place[start] for place, start in zip(places_of, starts, strict=True))
            for places_of in places
        )
        slices = tuple(slice(start, stop) for start, stop in local)
        shape = tuple(stop - start for start, stop in local)
        boxes.append(_Box(slices, shape, wires))
    return boxes


def _place(job: WireJob, rank: int, d: int, size: int | None) -> dict[int, slice]:
    """Where the stretch that begins at a position of the tensor lies in the packed blocks of a dimension."""
    layout: Layout = job.layout
    block = size or max(1, layout.shape[d])
    places = {}
    at = 0
    for _, start, n in sorted(layout.runs(rank)[d].segments, key=lambda segment: segment[1]):
        stop = start + n
        # Stretches of a block may meet in the tensor and lie apart here: as one tensor they are whole, as boxes not.
        if start % block or (stop % block and stop != layout.shape[d]):
            what = f"rank {rank} has {start}:{stop} of dimension {d} of {job.key!r} by itself"
            raise ExchangeError(
                f"{what}, and a hook takes whole blocks of {block}; lay them together"
            )
        count = -(-n // block)
        places[start] = slice(at, at + count)
        at += count
    return places


class _Kept:
    """What both ends have: what hooks were given, or gave, stays where it is."""

    opaque = True

    def let_go(self) -> None:
        """Nothing: a hook may go on with the memory."""


class _Sending(_Kept):
    """A hook at the source."""

    holds = False

    def __init__(self, owner: MegatronHook, job: WireJob, rank: int, device: torch.device) -> None:
        self.job = job
        self._hook = owner.hook
        self._who = f"prepare_send of {type(owner.hook).__name__} gives"
        self._boxes = _list_boxes(job, rank, owner.parts, "source")
        self.buffers: Mapping[str, Tensor] = make_buffers(job, rank, device)
        self._probe(rank, device)

    def _probe(self, rank: int, device: torch.device) -> None:
        """See what the hook makes of zeros, for a box of each shape. Raises ExchangeError where that does not fit."""
        layout = self.job.layout
        zeros = torch.zeros(layout.local_shape(rank), dtype=dtype_of(layout.dtype), device=device)
        by_shape = {box.shape: box for box in self._boxes}
        for box in by_shape.values():
            self._call(box, zeros)

    def _call(self, box: _Box, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the hook makes of a box, beside where it goes."""
        whole = tensor
        if not isinstance(whole, Parameter):
            whole = Parameter(tensor, requires_grad=False)
        # Not in the inference mode of a move: what a hook keeps is for use outside.
        with torch.inference_mode(False), torch.no_grad():
            made = self._hook.prepare_send(self.job.tensor, box.local, whole)
        targets = _cut(self.buffers, box)
        check_made(list(made), [describe(one) for one in targets], self._who, str(box.shape))
        return list(zip(made, targets, strict=True))

    def run(self, *tensors: Tensor) -> None:
        """The wire tensors of all boxes."""
        (tensor,) = tensors
        for box in self._boxes:
            for one, target in self._call(box, tensor):
                words(target).copy_(words(one))


class _Receiving(_Kept):
    """A hook at the destination."""

    holds = True

    def __init__(self, owner: MegatronHook, job: WireJob, rank: int, device: torch.device) -> None:
        self.job = job
        self._hook = owner.hook
        self._boxes = _list_boxes(job, rank, owner.parts, "destination")
        self._own: list[list[Tensor]] = []
        who = f"prepare_recv of {type(owner.hook).__name__} gives"
        for box in self._boxes:
            own = list(self._hook.prepare_recv(job.tensor, box.local))
            wanted = [
                f"{part.dtype}{[s.stop - s.start for s in place]}"
                for part, place in zip(owner.parts, box.wires, strict=True)
            ]
            check_made(own, wanted, who, str(box.shape))
            _check_devices(own, device, who)
            self._own.append(own)
        self.buffers: Mapping[str, Tensor] = self._make_buffers(owner, rank, device)

    def _make_buffers(
        self, owner: MegatronHook, rank: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """The hook's own where there is one box, so that what arrives is not copied; else buffers of all boxes."""
        if len(self._own) == 1 and owner.claim(self._own[0]):
            names = [key for key, _ in self.job.wires]
            return dict(zip(names, self._own[0], strict=True))
        return make_buffers(self.job, rank, device)

    def run(self, *tensors: Tensor) -> None:
        """Give the hook what has arrived, box by box."""
        for box, own in zip(self._boxes, self._own, strict=True):
            for one, part in zip(own, _cut(self.buffers, box), strict=True):
                if one.data_ptr() != part.data_ptr():
                    words(one).copy_(words(part))
            with torch.inference_mode(False), torch.no_grad():
                self._hook.finalize_recv(self.job.tensor, box.local, list(own))


def _check_devices(tensors: Sequence[Tensor], device: torch.device, who: str) -> None:
    """Raise ExchangeError for a buffer that the group cannot receive into."""
    for one in tensors:
        if one.device != device:
            what = f"{who} a buffer on '{one.device}', the process group moves tensors on"
            raise ExchangeError(f"{what} '{device}'; make it there")


def _cut(buffers: Mapping[str, Tensor], box: _Box) -> list[Tensor]:
    """The box's part of each wire buffer."""
    return [buffer[place] for buffer, place in zip(buffers.values(), box.wires, strict=True)]
