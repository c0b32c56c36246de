"""Megatron: hooks of Megatron-Core's reshard (`ReshardTransform`) as transforms, unchanged.

1. A hook has `should_transform(name)`, `prepare_send(name, slices, parameter)`, `prepare_recv(name, slices)` and
   `finalize_recv(name, slices, buffers)`.
2. Its slices are **boxes**: what a rank holds of a tensor, in as few boxes as its layout has, each as slices of the
   local tensor. Megatron calls a hook for each piece that is sent from one rank to another; here pieces are cut from
   the hook's result for a box, so it is called once per box, however many ranks need parts of it.
3. The tensors that a hook sends and receives are stated beforehand, as components, and checked when ranks compile, on
   both sides: `prepare_recv` is called then, once per box, and `prepare_send` on zeros, for a box of each shape.
   Another number of tensors, another shape or dtype raises on all ranks.
4. Each component has a separate wire name, so that copies that stay on a rank cannot be confused.
5. The buffers that `prepare_recv` gave are reused: received data are in them, at the same addresses, whenever
   `finalize_recv` is called. The hook stores the result itself: `out=` has no such tensor.
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
    """The interface of Megatron-Core's ReshardTransform, which converts tensors before and after they are sent."""

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
    """Return a transform that calls `hook`, a ReshardTransform of Megatron-Core; in place of a tensor, the tensors that
    `components` describe are sent.

    All ranks state the same components, in the hook's order; the hook itself may differ per rank. The transform's
    `rules` are for the tensors that the hook transforms. Raises PlanError for a value that is not a hook, and for
    invalid components.
    """
    missing = [name for name in METHODS if not callable(getattr(hook, name, None))]
    if missing:
        what = f"{type(hook).__name__} has no method {', '.join(missing)}"
        raise PlanError(f"{what}; pass an object like Megatron-Core's ReshardTransform")
    parts = listed(components, "components", PlanError)
    for part in parts:
        instance(part, Component, "pass sm.transforms.Component(name, dtype, grain)", PlanError)
    return MegatronHook(hook, parts)


class MegatronHook:
    """A transform that calls a Megatron-Core ReshardTransform; made by `megatron_hook`."""

    def __init__(self, hook: Hook, parts: tuple[Component, ...]) -> None:
        self.hook = hook
        self.parts = parts
        self._claimed_spans: list[tuple[int, int]] = []

    def __str__(self) -> str:
        return f"a Megatron hook of {', '.join(map(str, self.parts))}"

    def __repr__(self) -> str:
        return f"<{self}: {type(self.hook).__name__}>"

    def rules(self, names: Iterable[str]) -> dict[str, MegatronHook]:
        """Return a dict from name to this transform for the `names` that the hook's `should_transform` accepts."""
        return {name: self for name in names if self.hook.should_transform(name)}

    def components(self, src: Form, dst: Form) -> tuple[Component, ...]:
        """Return the Components given to `megatron_hook`. Each describes a tensor that the hook makes from a source
        tensor, and that is sent in its place. `src` and `dst` are not used.
        """
        return self.parts

    def as_held(self, src: Form, dst: Form) -> AsHeld:
        """Return two flags, both False: tensors are not sent as the source holds them (`source`), and do not arrive as
        the destination holds them (`destination`).
        """
        return AsHeld(False, False)

    def prepare(self, array: Array, src: Form, dst: Form) -> tuple[Array, ...]:
        """Raise PlanError: a hook takes tensors, not NumPy arrays."""
        raise PlanError(
            f"{self} takes torch tensors, not NumPy arrays; use smt.compile_transformed"
        )

    def finalize(self, arrays: tuple[Array, ...], src: Form, dst: Form) -> Array:
        """Raise PlanError: a hook takes tensors, not NumPy arrays."""
        raise PlanError(
            f"{self} takes torch tensors, not NumPy arrays; use smt.compile_transformed"
        )

    def claim(self, buffers: Sequence[Tensor]) -> bool:
        """Reserve the memory of `buffers` for received data, so that later calls cannot reserve overlapping memory, and
        return True. Return False at the first buffer that is not contiguous or overlaps reserved memory; the buffers
        before it stay reserved.
        """
        for buffer in buffers:
            if not buffer.is_contiguous():
                return False
            span = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            # Claimed spans are sorted and disjoint, so only the neighbors can overlap the new one.
            i = bisect.bisect_left(self._claimed_spans, span)
            previous_end = self._claimed_spans[i - 1][1] if i else 0
            next_start = self._claimed_spans[i][0] if i < len(self._claimed_spans) else span[1]
            if previous_end > span[0] or next_start < span[1]:
                return False
            self._claimed_spans.insert(i, span)
        return True

    def make_worker(
        self, job: WireJob, rank: int, end: End, device: torch.device
    ) -> _Sending | _Receiving:
        """Return the object that calls the hook to transform one local tensor of `rank`: before sending if `end` is
        "source", after receiving if "destination". `job` names this tensor, and the tensors sent or received in its
        place.

        Raises ExchangeError if the hook contradicts its rule.
        """
        if not self.hook.should_transform(job.tensor):
            what = f"a rule transforms {job.tensor!r} by the hook, whose should_transform says no"
            raise ExchangeError(
                f"{what}; pass the rules that the transform's rules(names) returns to sm.transforms.transformed"
            )
        make = _Sending if end == "source" else _Receiving
        return make(self, job, rank, device)


class _Box(NamedTuple):
    """A box of the local tensor, its shape, and the slices of each of its components in the wire buffers."""

    local: Slices
    shape: tuple[int, ...]
    wires: tuple[Slices, ...]


def _list_boxes(job: WireJob, rank: int, parts: Sequence[Component], end: End) -> list[_Box]:
    """The boxes that the rank holds. Raises ExchangeError for a box that begins or ends inside a block."""
    layout = job.layout
    # Per component and dimension: the slice of its blocks, by the first position of a range.
    places = []
    for part in parts:
        blocks = part.block(layout.ndim, end)
        places.append([_find_places(job, rank, d, block) for d, block in enumerate(blocks)])
    boxes = []
    for local, global_ranges in layout.boxes(rank):
        starts = [start for start, _ in global_ranges]
        wires = tuple(
            tuple(place[start] for place, start in zip(places_of, starts, strict=True))
            for places_of in places
        )
        slices = tuple(slice(start, stop) for start, stop in local)
        shape = tuple(stop - start for start, stop in local)
        boxes.append(_Box(slices, shape, wires))
    return boxes


def _find_places(job: WireJob, rank: int, d: int, size: int | None) -> dict[int, slice]:
    """The slice in the packed blocks of a dimension, for each range that the rank holds, by its first position."""
    layout: Layout = job.layout
    block = size or max(1, layout.shape[d])
    places = {}
    first_block = 0
    for _, start, n in sorted(layout.runs(rank)[d].segments, key=lambda segment: segment[1]):
        stop = start + n
        # Ranges of a block may be adjacent in the tensor and apart in the local one, where no box has the whole block.
        if start % block or (stop % block and stop != layout.shape[d]):
            what = f"rank {rank} holds {start}:{stop} of dimension {d} of {job.key!r}"
            raise ExchangeError(
                f"{what}, but a hook needs whole blocks of {block}; use a layout that cuts between blocks"
            )
        count = -(-n // block)
        places[start] = slice(first_block, first_block + count)
        first_block += count
    return places


class _HookWorker:
    """The base of both ends' workers: buffers keep their memory, as a hook may hold on to it."""

    opaque = True

    def let_go(self) -> None:
        """Do nothing: the hook may still use the buffers' memory."""


class _Sending(_HookWorker):
    """The worker of a hook at the source."""

    holds = False

    def __init__(self, owner: MegatronHook, job: WireJob, rank: int, device: torch.device) -> None:
        self.job = job
        self._hook = owner.hook
        self._message_start = f"prepare_send of {type(owner.hook).__name__} gives"
        self._boxes = _list_boxes(job, rank, owner.parts, "source")
        self.buffers: Mapping[str, Tensor] = make_buffers(job, rank, device)
        self._probe(rank, device)

    def _probe(self, rank: int, device: torch.device) -> None:
        """Call the hook on zeros, for a box of each shape. Raises ExchangeError for results that were not stated."""
        layout = self.job.layout
        zeros = torch.zeros(layout.local_shape(rank), dtype=dtype_of(layout.dtype), device=device)
        by_shape = {box.shape: box for box in self._boxes}
        for box in by_shape.values():
            self._call(box, zeros)

    def _call(self, box: _Box, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The hook's tensors for a box, each with its part of a wire buffer. Raises ExchangeError if one misfits."""
        whole = tensor
        if not isinstance(whole, Parameter):
            whole = Parameter(tensor, requires_grad=False)
        # Not in the inference mode of a move: a hook may keep tensors for use outside.
        with torch.inference_mode(False), torch.no_grad():
            components = self._hook.prepare_send(self.job.tensor, box.local, whole)
        targets = _cut_buffers(self.buffers, box)
        check_made(
            list(components),
            list(map(describe, targets)),
            self._message_start,
            f"for a box of shape {box.shape}",
        )
        return list(zip(components, targets, strict=True))

    def run(self, *tensors: Tensor) -> None:
        """Call `prepare_send` of Megatron's hook (a ReshardTransform) for each box (a slice of each dimension) of the
        given tensor, and copy the tensors that it returns into the buffers to send.
        """
        (tensor,) = tensors
        for box in self._boxes:
            for component, target in self._call(box, tensor):
                # As integers of the elements' size, so that bits are copied.
                words(target).copy_(words(component))


class _Receiving(_HookWorker):
    """The worker of a hook at the destination."""

    holds = True

    def __init__(self, owner: MegatronHook, job: WireJob, rank: int, device: torch.device) -> None:
        self.job = job
        self._hook = owner.hook
        self._boxes = _list_boxes(job, rank, owner.parts, "destination")
        self._hook_buffers: list[list[Tensor]] = []
        message_start = f"prepare_recv of {type(owner.hook).__name__} gives"
        for box in self._boxes:
            buffers = list(self._hook.prepare_recv(job.tensor, box.local))
            wanted = [
                f"{part.dtype}{[s.stop - s.start for s in place]}"
                for part, place in zip(owner.parts, box.wires, strict=True)
            ]
            check_made(buffers, wanted, message_start, f"for a box of shape {box.shape}")
            _check_devices(buffers, device, message_start)
            self._hook_buffers.append(buffers)
        self.buffers: Mapping[str, Tensor] = self._make_buffers(owner, rank, device)

    def _make_buffers(
        self, owner: MegatronHook, rank: int, device: torch.device
    ) -> Mapping[str, Tensor]:
        """The hook's buffers, so that nothing is copied, if there is one box and no other tensor has claimed their
        memory; else new buffers for all boxes."""
        if len(self._hook_buffers) == 1 and owner.claim(self._hook_buffers[0]):
            names = [key for key, _ in self.job.wires]
            return dict(zip(names, self._hook_buffers[0], strict=True))
        return make_buffers(self.job, rank, device)

    def run(self, *tensors: Tensor) -> None:
        """Store the received data by Megatron's hook (a ReshardTransform): for each box (a slice of each dimension),
        copy the data into the hook's buffers, and call its `finalize_recv`.

        Any `tensors` are ignored.
        """
        for box, targets in zip(self._boxes, self._hook_buffers, strict=True):
            for target, part in zip(targets, _cut_buffers(self.buffers, box), strict=True):
                if target.data_ptr() != part.data_ptr():
                    words(target).copy_(words(part))
            with torch.inference_mode(False), torch.no_grad():
                self._hook.finalize_recv(self.job.tensor, box.local, list(targets))


def _check_devices(tensors: Sequence[Tensor], device: torch.device, who: str) -> None:
    """Raise ExchangeError for a buffer that the group cannot receive into."""
    for tensor in tensors:
        if tensor.device != device:
            what = f"{who} a buffer on '{tensor.device}', but the process group moves tensors on"
            raise ExchangeError(f"{what} '{device}'; return buffers on '{device}'")


def _cut_buffers(buffers: Mapping[str, Tensor], box: _Box) -> list[Tensor]:
    """The box's part of each wire buffer."""
    return [buffer[place] for buffer, place in zip(buffers.values(), box.wires, strict=True)]
