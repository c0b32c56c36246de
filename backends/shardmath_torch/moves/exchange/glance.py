"""Glance: checks of many tensors at once, by columns of facts.

1. Nearly always all tensors fit. A few calls into C show whether they do, while checking each tensor alone takes longer
   than copying it, if tensors are small.
2. A glance only passes tensors. If it does not pass some, the checks of each alone (`local`) decide, and word errors.

>>> halves = dict(enumerate(torch.zeros(2 * MANY, 3).split(2)))
>>> seen = look({str(key): half for key, half in halves.items()}, sign_memory(halves))
>>> seen is not None and are_apart(seen)
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from shardmath_torch.moves.exchange.memory import count_reached
from shardmath_torch.moves.exchange.overlaps import cells_meet

__all__ = ["FACTS", "Glance", "are_apart", "look", "sign_memory"]

MANY = 64
"""Fewest tensors for which a glance takes less time than the checks of each alone."""

FACTS = 10
"""Facts of a tensor in a signature."""

PLAIN = {Tensor, Parameter}
META = torch.device("meta")


class _Form(NamedTuple):
    """Shape, strides and dtype of tensors."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def has(self, shape: tuple[int, ...], dtype: str) -> bool:
        """Whether shape and dtype are these."""
        return self.shape == shape and str(self.dtype).removeprefix("torch.") == dtype

    def measure(self) -> tuple[int, int]:
        """The bytes of an element, and those from the first element to the end of the last; 0 of an empty tensor."""
        reached = count_reached(self.shape, self.strides) if math.prod(self.shape) else 0
        return self.dtype.itemsize, reached * self.dtype.itemsize


def sign_memory(tensors: Mapping[Any, Tensor]) -> list[Any]:
    """Return all facts that a check depends on, in one flat list: all keys, then FACTS facts of each tensor. The list
    with a tensor without memory equals no other.

    For many small tensors this takes as long as copying them, hence one list, and no call per tensor.
    """
    # No tuple from a generator: if another thread lists all objects meanwhile, as a refit's `prepare` does, CPython
    # 3.11 fails to finish the tuple (SystemError).
    facts: list[Any] = [*tensors]
    for tensor in tensors.values():
        try:
            storage = tensor.untyped_storage()
            facts += (
                type(tensor),
                storage.data_ptr(),
                # A storage that shrank may keep its address.
                storage.nbytes(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        except (AttributeError, RuntimeError):
            # Not a tensor, or one without memory.
            facts.append(object())
    return facts


class Glance(NamedTuple):
    """Many plain tensors in existing memory: the distinct forms, the number of each tensor's form by its key, the
    devices, and the addresses of the first byte of each and of one past its last. An empty tensor ends where it starts.
    """

    forms: list[_Form]
    form_of: dict[Any, int]
    devices: set[torch.device]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def fits(self, wanted: Mapping[str, tuple[tuple[int, ...], Any]], device: torch.device) -> bool:
        """Whether all tensors that are wanted, by key as (shape, layout), have that shape and the layout's dtype, and
        are on `device`."""
        if self.devices != {device} or not wanted or not wanted.keys() <= self.form_of.keys():
            return False
        shapes, layouts = zip(*wanted.values(), strict=True)
        dtypes = map(attrgetter("dtype"), layouts)
        numbers = map(self.form_of.__getitem__, wanted)
        return all(
            self.forms[number].has(shape, dtype)
            for number, shape, dtype in set(zip(numbers, shapes, dtypes, strict=True))
        )

    @property
    def is_writable(self) -> bool:
        """Whether no tensor has several elements at one address."""
        return not any(cells_meet(form.shape, form.strides) for form in self.forms)


def look(tensors: Mapping[str, Tensor], signed: Sequence[Any]) -> Glance | None:
    """Return a Glance of the tensors, of which `signed` is the signature. Return None if they are few, or if one of
    them may be anything but an ordinary tensor whose elements all lie in existing memory."""
    count = len(tensors)
    # Sparse tensors, nested tensors and wrappers of torch.func have no storage or no single shape, hence fewer facts.
    if count < MANY or len(signed) != count * (1 + FACTS):
        return None
    columns = (signed[count + fact :: FACTS] for fact in range(FACTS))
    kinds, addresses, sizes, offsets, shapes, strides, dtypes, devices, conj, neg = columns
    # Strides on the meta device may exceed 64 bits.
    if not set(kinds) <= PLAIN or any(conj) or any(neg) or META in devices:
        return None
    # Many tensors have few forms.
    forms = [*starmap(_Form, set(zip(shapes, strides, dtypes, strict=True)))]
    number_of: dict[Any, int] = {form: number for number, form in enumerate(forms)}
    numbers = [*map(number_of.__getitem__, zip(shapes, strides, dtypes, strict=True))]
    itemsizes, nbytes = np.array([*map(_Form.measure, forms)], np.int64)[numbers].T
    begins = itemsizes * np.array(offsets, np.int64)
    starts = np.array(addresses, np.int64)
    exists = (np.array(sizes, np.int64) >= begins + nbytes) & (starts != 0)
    if not (exists | (nbytes == 0)).all():
        return None
    starts += begins
    form_of = dict(zip(tensors, numbers, strict=True))
    return Glance(forms, form_of, set(devices), starts, starts + nbytes)


def are_apart(*seen: Glance) -> bool:
    """Whether no two tensors overlap, from the first byte that a tensor uses to its last."""
    starts = np.concatenate([each.starts for each in seen])
    ends = np.concatenate([each.ends for each in seen])
    has_elements = ends > starts
    starts, ends = starts[has_elements], ends[has_elements]
    order = starts.argsort()
    # Each must start after all that start before it have ended.
    return bool((starts[order][1:] >= np.maximum.accumulate(ends[order])[:-1]).all())
