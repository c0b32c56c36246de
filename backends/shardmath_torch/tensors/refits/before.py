"""Before: a snapshot of modules and mappings before a loader runs, to restore them afterwards.

1. It has the names, their order and their values: in mappings, in modules and their submodules, and in dicts, lists and
   sets that are attributes of these; and the modules' classes.
2. For each tensor there it has the memory, shape, strides, class, gradient and attributes.
3. It has the bytes of whole memory, as other tensors may lie in it: of CPU tensors from the start, since only their
   memory can be written without torch, and of other tensors before they are written.
4. All is restored, even if one tensor cannot be, or Ctrl-C interrupts.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardmath.base.errors import StoreError
from shardmath.base.text import word_error
from shardmath.models.recordings.recorded import label
from shardmath_torch.groups import compat

__all__ = ["Before", "describe", "is_plain", "key_of", "storage_of"]

_Container: TypeAlias = MutableMapping[Any, Any] | list[Any] | set[Any]


def key_of(tensor: Tensor) -> int:
    """Return a key of the tensor's memory: equal for tensors that share a storage, while that lives."""
    return int(storage_of(tensor)._cdata)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the tensor's memory, without a call of `__torch_function__`. It lives while this is kept, even if the
    tensor is given other memory.
    """
    with compat.without_torch_function():
        return tensor.untyped_storage()


class Before:
    """A snapshot of modules and mappings, and of the memory, shapes and attributes of their tensors, for `put_back` to
    restore. It has no values of tensors until `keep_bytes` copies them.
    """

    def __init__(self, holders: Sequence[nn.Module | MutableMapping[str, Tensor]]) -> None:
        # Each container with a shallow copy of it, and each module with its class.
        self._containers: list[tuple[_Container, Any]] = []
        self._classes = list(_list_classes(holders))
        self._tensors: list[_TensorBefore] = []
        known: set[int] = set()
        for chunk, start, container in _list_containers(holders):
            self._containers.append((container, _copy(container)))
            for key, value in _list_items(container):
                if isinstance(value, Tensor) and id(value) not in known:
                    known.add(id(value))
                    self._tensors.append(_TensorBefore(label(chunk, f"{start}{key}"), value))
                    for attributes in _list_attributes(value):
                        self._containers.append((attributes, _copy(attributes)))
        # What the last `put_back` could not restore, with why.
        self._faults: list[str] = []
        # By key of memory, its bytes and a copy of them.
        self._bytes: dict[int, tuple[Tensor, Tensor]] = {}
        # The bytes of memory when a loader began, if these are not the bytes to restore.
        self._spoiled: dict[int, Tensor] = {}

    def keep_bytes(self, device: str = "") -> None:
        """Copy the bytes of the snapshot's tensors, unless copied before. If `device`, such as "cpu", is given, only
        tensors on this device are copied.
        """
        for tensor in self._tensors:
            memory = tensor.memory
            if memory is None or memory.is_meta or key_of(memory) in self._bytes:
                continue
            if not device or memory.device.type == device:
                live = _view_bytes(memory)
                self._bytes[key_of(memory)] = live, live.clone()

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return the copied values of a tensor, as a view of the copy of its memory."""
        _, saved = self._bytes[key_of(tensor)]
        values = torch.empty(0, dtype=tensor.dtype, device=saved.device)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return values.set_(saved.untyped_storage(), *place)

    def spoil(self, keys: Iterable[int]) -> None:
        """Change all values in the storages with these `keys`, to find out whether a weight loader reads what it
        overwrites. The lowest bit of each byte is flipped; `put_back` restores the bytes that `keep_bytes` has copied.
        """
        for key in keys:
            live, saved = self._bytes[key]
            # Every type then has another value of about the same size; bools are inverted.
            self._spoiled[key] = saved ^ 1
            live.copy_(self._spoiled[key])

    def find_written(self) -> set[int]:
        """Return the keys of memories whose bytes have changed since `keep_bytes` copied or `spoil` flipped them."""
        changed = set()
        for key, (live, saved) in self._bytes.items():
            if not torch.equal(_view_bytes(live), self._spoiled.get(key, saved)):
                changed.add(key)
        return changed

    @property
    def copied(self) -> Set[int]:
        """The keys (`key_of`) of the memories whose bytes `keep_bytes` has copied."""
        return self._bytes.keys()

    def put_back(self) -> None:
        """Restore the modules, mappings and tensors of the snapshot, and the memory whose bytes `keep_bytes` has
        copied. A KeyboardInterrupt is raised after that; `check` raises for what cannot be restored.
        """
        try:
            self._put_back()
        except KeyboardInterrupt:
            # From the start, since the step that it interrupted may be half done.
            self.put_back()
            raise

    def _put_back(self) -> None:
        """Restore everything that can be restored, and keep why the rest cannot."""
        self._spoiled.clear()
        self._faults = []
        for tensor in self._tensors:
            self._try(repr(tensor.name), tensor.put_back)
        for live, saved in self._bytes.values():
            # Memory that could not be given its size again is too small for its bytes.
            if live.untyped_storage().nbytes() >= saved.numel():
                self._try("memory", partial(live.copy_, saved))
        for module, kind in self._classes:
            if type(module) is not kind:
                self._try(f"a {kind.__name__}", partial(setattr, module, "__class__", kind))
        for container, before in self._containers:
            self._try(f"a {type(container).__name__}", partial(_restore, container, before))

    def _try(self, name: str, step: Callable[[], object]) -> None:
        """Make a step of `put_back`; if it fails, keep why, so that all others are made."""
        try:
            step()
        except Exception as error:
            self._faults.append(f"{name} ({word_error(error)})")

    def check(self) -> None:
        """Raise StoreError if the last `put_back` could not restore something."""
        if self._faults:
            raise StoreError(
                f"what the loader did to {', '.join(self._faults)} cannot be undone; build the module "
                f"again, and record a loader that copies into its tensors"
            )


class _TensorBefore:
    """A snapshot of one tensor, without its bytes. `name` is for messages."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.kind = type(tensor)
        # The dict itself: what is in it is restored with the other containers.
        self.attributes = vars(tensor)
        self.grad = tensor.grad if tensor.is_leaf else None
        self.requires_grad = tensor.requires_grad
        # `data` is an alias with a separate shape and strides, which a loader cannot change.
        self.memory = tensor.data if is_plain(tensor) else None
        self.size = self.memory.untyped_storage().nbytes() if self.memory is not None else 0

    def put_back(self) -> None:
        """Restore the tensor's class, storage, shape, attributes and gradient. Its values are not restored."""
        tensor = self.tensor
        if self.memory is not None:
            self._resize(self.memory)
            self._take_kind(self.memory)
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        if self.memory is not None and describe(tensor) != describe(self.memory):
            tensor.data = self.memory
        if vars(tensor) is not self.attributes:
            tensor.__dict__ = self.attributes
        if not tensor.is_leaf:
            return
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad

    def _resize(self, memory: Tensor) -> None:
        """Give the memory the size that it had at the snapshot."""
        storage = memory.untyped_storage()
        growth = storage.nbytes() - self.size
        # Memory that numpy has seen keeps its size, which may be more than before.
        if growth < 0 or (growth and storage.resizable()):
            storage.resize_(self.size)

    def _take_kind(self, memory: Tensor) -> None:
        """Swap in a plain tensor, if the loader has swapped in one that cannot be given this memory: on another device,
        as torch's load_state_dict may, or a sparse or quantized one."""
        if self.tensor.device != memory.device or not is_plain(self.tensor):
            torch.utils.swap_tensors(self.tensor, torch.empty_like(memory).as_subclass(self.kind))


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor has one memory, with strides, and does not wrap others."""
    return tensor.layout == torch.strided and not compat.is_traceable_wrapper_subclass(tensor)


def describe(tensor: Tensor) -> tuple[object, ...]:
    """Return the tensor's storage, offset, shape, strides and dtype, as a value to compare."""
    where = key_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
    return *where, tensor.dtype


def _view_bytes(tensor: Tensor) -> Tensor:
    """All memory of a tensor, viewed as bytes."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    with torch.no_grad():
        return view.set_(tensor.untyped_storage())


def _list_classes(holders: Iterable[object]) -> Iterator[tuple[nn.Module, type]]:
    """(module, its class) for each module in the holders."""
    for holder in holders:
        if isinstance(holder, nn.Module):
            yield from ((module, type(module)) for module in holder.modules())


def _list_containers(
    holders: Iterable[nn.Module | MutableMapping[str, Tensor]],
) -> Iterator[tuple[int, str, _Container]]:
    """(chunk, start of its tensors' names, container) for each mapping, list or set in the holders, once."""
    known: set[int] = set()
    for number, holder in enumerate(holders):
        containers: list[tuple[str, _Container]] = []
        if isinstance(holder, nn.Module):
            for prefix, module in holder.named_modules():
                start = f"{prefix}." if prefix else ""
                containers += [(start, container) for container in _list_attributes(module)]
        else:
            containers.append(("", holder))
        for start, container in containers:
            if id(container) not in known:
                known.add(id(container))
                yield number, start, container


def _list_attributes(owner: object) -> list[_Container]:
    """An object's `__dict__`, and the containers in it, such as a module's registries of parameters and buffers."""
    attributes = vars(owner)
    return [attributes, *(v for v in attributes.values() if isinstance(v, dict | list | set))]


def _list_items(container: _Container) -> Iterator[tuple[str, Any]]:
    """The keys and values of a mapping, or the members of a list or set, with their numbers."""
    if isinstance(container, Mapping):
        # A mapping that is not a dict may have names without values.
        yield from ((str(name), container[name]) for name in list(container))
    else:
        yield from ((str(number), value) for number, value in enumerate(container))


def _copy(container: _Container) -> Any:
    """A shallow copy, as a plain dict, list or set."""
    if isinstance(container, Mapping):
        return {name: container[name] for name in list(container)}
    return list(container) if isinstance(container, list) else set(container)


def _restore(container: _Container, before: Any) -> None:
    """Restore the names and members of `before`; in their order, if the container is a list or a dict."""
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
    """Whether the container has the same objects as before, in the same order."""
    if isinstance(container, set):
        return bool(container == before)
    if isinstance(container, list):
        return [*map(id, container)] == [*map(id, before)]
    if list(container) != list(before):
        return False
    return all(container[name] is before[name] for name in before)
