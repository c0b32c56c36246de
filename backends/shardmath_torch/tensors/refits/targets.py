"""Targets: the tensors into which a loader loads, by name, restored after each run.

1. A module's targets are its parameters and persistent buffers, a mapping's are its values. Names of the same memory
   are aliases of the first name.
2. With virtual stages there is one `into` per chunk. A tensor in a chunk behind the first is named "A of chunk 1".
3. Whatever a loader does to targets, or puts in their place, is undone (`before`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardmath.base.errors import StoreError
from shardmath.models.recordings.recorded import label
from shardmath_torch.moves.exchange.memory import has_own_kernels
from shardmath_torch.tensors.dtensors.modules import SHAPELESS
from shardmath_torch.tensors.probes.drawing import Run
from shardmath_torch.tensors.probes.patterns import as_words
from shardmath_torch.tensors.refits.before import Before, key_of
from shardmath_torch.tensors.refits.numbering import Found

__all__ = ["Into", "KeptTargets"]

Chunk: TypeAlias = nn.Module | MutableMapping[str, Tensor]
Into: TypeAlias = Chunk | Sequence[Chunk]


class KeptTargets:
    """The tensors that a weight loader writes into, and their state before loading. `into` is a module (its parameters
    and persistent buffers), a mapping from name to tensor, or a list of these.

    Raises StoreError if one is not plain.
    """

    def __init__(self, into: Into) -> None:
        self.chunks = _list_chunks(into)
        self.before = Before(self.chunks)
        # By a target's name here: its chunk's number, and its name in that.
        self.natives: dict[str, tuple[int, str]] = {}
        for chunk_number, chunk in enumerate(self.chunks):
            for name, _ in _list_places(chunk):
                known = self.natives.setdefault(label(chunk_number, name), (chunk_number, name))
                if known != (chunk_number, name):
                    raise StoreError(
                        f"into= has {name!r} in virtual stage {chunk_number}, which recording calls "
                        f"{known[1]!r}, as a tensor of virtual stage {known[0]}; rename one of both"
                    )
        self.places = self._find_places()
        self.found = self.find()
        # `data` are aliases with separate shapes and strides, which a loader cannot change.
        self.memory: dict[str, Tensor] = {}
        self.targets: dict[str, Tensor] = {}
        # By another name of the same memory: the target's name.
        self.aliases: dict[str, str] = {}
        first_names: dict[object, str] = {}
        for name, tensor in self.found.items():
            _check(name, tensor)
            where = key_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
            if first_names.setdefault(where, name) == name:
                self.targets[name] = tensor
                self.memory[name] = tensor.data
            else:
                self.aliases[name] = first_names[where]

    def find(self) -> dict[str, Tensor]:
        """Return the tensors that `into` holds now, by target name."""
        places = self._find_places()
        return {name: holder[key] for name, (holder, key) in places.items()}

    def _find_places(self) -> dict[str, _Place]:
        """(mapping, key) of each tensor, by name."""
        places = {}
        for number, chunk in enumerate(self.chunks):
            for name, place in _list_places(chunk):
                places[label(number, name)] = place
        return places

    def place(self, name: str, tensor: Tensor) -> None:
        """Put `tensor` in place of the target `name` and of its aliases."""
        for other, (holder, key) in self.places.items():
            if self.aliases.get(other, other) == name:
                holder[key] = tensor

    def occupy(self, run: Run, untouched: Collection[str] = ()) -> dict[str, Found]:
        """Fill the tensors to load into, except those named in `untouched`, with the start values of the trial run
        `run`, and return by name the values that each then has. If `run.keeps` is True, no tensor is filled.

        Targets on the meta device get memory, and are always filled. `untouched` are targets that the loader does not
        write, but may read.
        """
        self.before.keep_bytes()
        self._allocate()
        now = self.find()
        may_keep = self.targets if run.keeps else untouched
        unfilled = {name for name in may_keep if not self.targets[name].is_meta}
        for name, target in now.items():
            if self.aliases.get(name, name) not in unfilled:
                as_words(target.data).fill_(run.found(target.dtype))
        return {name: self._find_value(name, now[name], run, unfilled) for name in self.targets}

    def _allocate(self) -> None:
        """Put tensors with memory in place of the targets on the meta device."""
        # Targets that share memory share the new memory, too.
        storages: dict[int, torch.UntypedStorage] = {}
        for name, target in self.targets.items():
            if not target.is_meta:
                continue
            key = key_of(target)
            if key not in storages:
                storages[key] = torch.UntypedStorage(target.untyped_storage().nbytes())
            self.place(name, _materialize(target, storages[key]))

    def _find_value(self, name: str, target: Tensor, run: Run, unfilled: Collection[str]) -> Found:
        """What a run finds in a target: the word with which all of it was filled, or its values as a tensor."""
        if name not in unfilled:
            return run.found(target.dtype)
        if run.keeps:  # no target that has data was filled
            return self.before.values_of(self.memory[name])
        # Other targets that were filled may lie in the same memory.
        return target.detach().clone()


_Place: TypeAlias = tuple[MutableMapping[str, Tensor], str]


def _list_chunks(into: Into) -> list[Chunk]:
    """The modules or mappings of `into`, by chunk. Raises StoreError for anything else."""
    # Typed so that mypy keeps the checks: callers may pass anything.
    value: object = into
    chunks: list[Any] = [value]
    if isinstance(value, Iterable) and not isinstance(value, nn.Module | Mapping):
        chunks = list(value)
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, nn.Module | Mapping):
            raise StoreError(
                f"into= has {type(chunk).__name__} for virtual stage {number}, where a module or "
                f"a mapping is needed; pass a torch.nn.Module, or a dict from name to tensor"
            )
    return chunks


def _list_places(into: Chunk) -> Iterator[tuple[str, _Place]]:
    """(name, (mapping, key)) of each tensor in a chunk."""
    if not isinstance(into, nn.Module):
        for name in into:
            yield name, (into, name)
        return
    for prefix, module in into.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        hidden = module._non_persistent_buffers_set
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None and name not in hidden:
                    yield start + name, (registry, name)


def _check(name: str, tensor: object) -> None:
    """Raise StoreError unless the target is a plain strided tensor."""
    if not isinstance(tensor, Tensor) or has_own_kernels(tensor):
        kind = type(tensor).__name__
        raise StoreError(
            f"into= has {kind} as {name!r}, where a plain tensor is needed; replace it by a "
            f"torch.Tensor or Parameter of its local shape"
        )
    if is_lazy(tensor):
        raise StoreError(f"into= has {name!r}, which {SHAPELESS}, or call its materialize(shape)")
    if tensor.is_nested:
        raise StoreError(
            f"into= has {name!r}, a nested tensor, of {tensor.size(0)} parts without one shape; "
            f"put its parts into into= under separate names, from unbind()"
        )
    if tensor.layout != torch.strided:
        raise StoreError(
            f"into= has {name!r} with layout {tensor.layout}, where torch.strided is needed; "
            f"replace it by torch.empty({list(tensor.shape)})"
        )


def _materialize(target: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A tensor in this memory with the class and attributes of the target, so that a loader takes it for that."""
    stand_in = torch.empty(0, dtype=target.dtype, device="cpu")
    stand_in.set_(storage, target.storage_offset(), target.shape, target.stride())
    if isinstance(target, torch.nn.Parameter):
        stand_in = torch.nn.Parameter(stand_in, requires_grad=target.requires_grad)
        stand_in.__class__ = type(target)
    stand_in.__dict__.update(target.__dict__)
    return stand_in
