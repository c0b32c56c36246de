"""Before: modules and mappings as they were before a loader ran, to be put back.

1. Names, their order and what is under each: of mappings, of modules and all modules in them, and of dicts, lists and
   sets that are attributes of these.
2. Of each tensor there its memory, shape and strides, its class, gradient and attributes.
3. Bytes of whole memory, as other tensors may lie in it: of tensors on the CPU from the start, as only that memory is
   written past torch, and of others once they are written.

>>> held = {"a": torch.zeros(2, 3)}
>>> before = Before([held])
>>> before.keep_bytes()
>>> _ = held["a"].t_().fill_(1)
>>> held["b"] = torch.ones(1)
>>> before.put_back()
>>> held
{'a': tensor([[0., 0., 0.],
        [0., 0., 0.]])}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Before", "describe", "key_of"]

_Container: TypeAlias = MutableMapping[Any, Any] | list[Any] | set[Any]


def key_of(tensor: Tensor) -> int:
    """The same for all tensors in one memory, while any of them lives."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


class Before:
    """These modules and mappings as they are now."""

    def __init__(self, holders: Sequence[nn.Module | MutableMapping[str, Tensor]]) -> None:
        self._containers: list[tuple[_Container, Any]] = []
        self._tensors: list[_Tensor] = []
        known: set[int] = set()
        for container in _list_containers(holders):
            self._containers.append((container, _copy(container)))
            for value in _list_values(container):
                if isinstance(value, Tensor) and id(value) not in known:
                    known.add(id(value))
                    self._tensors.append(_Tensor(value))
                    for own in _list_attributes(value):
                        self._containers.append((own, _copy(own)))
        self._bytes: dict[int, tuple[Tensor, Tensor]] = {}
        # What the memory had as a loader began, where that is not what is put back.
        self._spoiled: dict[int, Tensor] = {}

    def keep_bytes(self, device: str = "") -> None:
        """Copy the memory of all tensors, or of those on one kind of device, unless that was done before."""
        for one in self._tensors:
            now = one.memory
            if now is None or now.is_meta or key_of(now) in self._bytes:
                continue
            if not device or now.device.type == device:
                seen = _see_bytes(now)
                self._bytes[key_of(now)] = seen, seen.clone()

    def spoil(self, keys: Iterable[int]) -> None:
        """Change the lowest bit of each byte of memory that was copied before, until all is put back."""
        for key in keys:
            seen, kept = self._bytes[key]
            # Another number in each type, of about the same size: a bool is the other one.
            self._spoiled[key] = kept ^ 1
            seen.copy_(self._spoiled[key])

    def find_written(self) -> set[int]:
        """The keys of memory, copied before, that has other bytes now than as the loader began."""
        changed = set()
        for key, (seen, kept) in self._bytes.items():
            if not torch.equal(_see_bytes(seen), self._spoiled.get(key, kept)):
                changed.add(key)
        return changed

    @property
    def copied(self) -> Set[int]:
        """The keys of memory that was copied."""
        return self._bytes.keys()

    def put_back(self) -> None:
        """Everything as it was."""
        self._spoiled.clear()
        for one in self._tensors:
            one.put_back()
        for seen, kept in self._bytes.values():
            seen.copy_(kept)
        for container, before in self._containers:
            _restore(container, before)


class _Tensor:
    """One tensor as it is now, but for its bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.kind = type(tensor)
        self.attributes = vars(tensor)
        self.grad = tensor.grad if tensor.is_leaf else None
        self.requires_grad = tensor.requires_grad
        is_plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
        # An alias has a shape of its own, which no loader can reach.
        self.memory = tensor.data if is_plain else None
        self.size = self.memory.untyped_storage().nbytes() if self.memory is not None else 0

    def put_back(self) -> None:
        """Class, memory, shape, and gradient."""
        tensor = self.tensor
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        if self.memory is not None:
            self._take_memory(self.memory)
        if vars(tensor) is not self.attributes:
            tensor.__dict__ = self.attributes
        if not tensor.is_leaf:
            return
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad

    def _take_memory(self, memory: Tensor) -> None:
        storage = memory.untyped_storage()
        spare = storage.nbytes() - self.size
        # Memory that numpy has seen keeps its size, which may be more than before.
        if spare < 0 or (spare and storage.resizable()):
            storage.resize_(self.size)
        if describe(self.tensor) == describe(memory):
            return
        if self.tensor.device != memory.device:
            # A loader has swapped it for one without data, as torch's own may.
            torch.utils.swap_tensors(self.tensor, torch.empty_like(memory).as_subclass(self.kind))
        self.tensor.data = memory


def describe(tensor: Tensor) -> tuple[object, ...]:
    """Which cells of which memory, and as what."""
    where = key_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *where, tensor.dtype


def _see_bytes(tensor: Tensor) -> Tensor:
    """All memory of a tensor, as bytes."""
    seen = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return seen.set_(tensor.untyped_storage())


def _list_containers(
    holders: Iterable[nn.Module | MutableMapping[str, Tensor]],
) -> Iterator[_Container]:
    """Each thing that has names or members, once."""
    known: set[int] = set()
    for holder in holders:
        found: list[_Container] = [holder] if not isinstance(holder, nn.Module) else []
        for module in holder.modules() if isinstance(holder, nn.Module) else ():
            found += _list_attributes(module)
        for container in found:
            if id(container) not in known:
                known.add(id(container))
                yield container


def _list_attributes(owner: object) -> list[_Container]:
    """An object's attributes, and those of them that have members: of a module its registries are among them."""
    own = vars(owner)
    return [own, *(one for one in own.values() if isinstance(one, dict | list | set))]


def _list_values(container: _Container) -> Iterator[Any]:
    if isinstance(container, Mapping):
        # A mapping that is not a dict may have names without values.
        yield from (container[name] for name in list(container))
    else:
        yield from container


def _copy(container: _Container) -> Any:
    if isinstance(container, Mapping):
        return {name: container[name] for name in list(container)}
    return list(container) if isinstance(container, list) else set(container)


def _restore(container: _Container, before: Any) -> None:
    """The names and members of before, in their order."""
    if _is_same(container, before):
        return
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, dict | set):
        container.clear()
        container.update(before)
    else:
        for name in set(container) - set(before):
            del container[name]
        for name, value in before.items():
            container[name] = value


def _is_same(container: _Container, before: Any) -> bool:
    """Whether the very same objects are there, in the same order."""
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, list):
        return [*map(id, container)] == [*map(id, before)]
    if list(container) != list(before):
        return False
    return all(container[name] is before[name] for name in before)
