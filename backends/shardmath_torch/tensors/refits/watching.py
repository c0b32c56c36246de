"""Watching: a loader run on tensors without data, and what each of its copies takes.

1. Logical tensors are on the meta device. Nothing is written into targets: copies into their memory are noted, with
   the strides of both sides.
2. Copies and casts of views are followed, and operations that work element by element are followed under their names.
   Anything else makes memory of which nothing is known; a target into which it is copied is not explained.
3. A target that was written as a whole may be read again: some loaders store first, and then a function of it. Its
   values may not: nothing was written there.
4. Bits seen as another type are followed as long as they are only copied; a cast of them is a computation.
5. A mode of torch is of one thread. Logical tensors are of a class that brings it into any thread in which something is
   done to them, or to what was made of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardmath.base.errors import StoreError
from shardmath.models.recordings.pieces import Piece, overlap
from shardmath_torch.tensors.refits.before import key_of
from shardmath_torch.tensors.refits.contents import BLANK, Content, is_dense

__all__ = ["Watch", "Write"]

aten = torch.ops.aten

COPIES = {aten.clone.default, aten._to_copy.default, aten.contiguous.default}
"""What makes the same elements in new memory."""
STORES = {aten.copy_.default, aten.fill_.Tensor}
"""What puts its second argument into its first."""
ADDRESSES = {Tensor.data_ptr, Tensor.untyped_storage}
"""What tells where a tensor is; without data, all tensors are in one place."""
GOES_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""What marks operations that do not only compute with what they read."""
GIVES_MEMORY = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
"""What reads memory past all operations, or lets others do that."""
BLANKS = {"fill_", "zero_", "normal_", "uniform_"}
"""What fills padding before or after the weights are written."""


class Write(NamedTuple):
    """What was copied into a target: pieces by cells of its memory, and what made them; None if it is not known.

    `carries` says whether it was something of logical tensors.
    """

    pieces: tuple[Piece, ...] | None
    made: tuple[str, ...]
    carries: bool = False


class Watch(TorchDispatchMode):
    """Notes copies from the memory of `sources` into that of `targets`, by the key of that memory."""

    def __init__(self, sources: Mapping[str, Tensor], targets: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[int, list[Write]] = {key_of(target): [] for target in targets}
        self.noted: set[int] = set()
        # Memory of targets that was filled with constants, and with which.
        self.filled: dict[int, set[str]] = {}
        # Why an operation failed; a loader may have gone on otherwise.
        self.failure: Exception | None = None
        # Memory into which something of logical tensors was written, and that was not read since.
        self.unread: set[int] = set()
        self._class = _make_class(self)
        self._reads = _Reads(self)
        self.thread: int | None = None
        self._lock = threading.RLock()
        # Memory is known by its key as long as it lives, so all that is known is kept alive.
        self._alive: list[Tensor] = [*sources.values(), *targets]
        self._contents: dict[int, Content | None] = {}
        self._made: dict[int, tuple[str, ...]] = {}
        # What type the elements have that lie in this memory, however it is seen.
        self._dtype: dict[int, torch.dtype] = {}
        self._stored = _find_dtypes(targets)
        for name, tensor in sources.items():
            shape = tuple(tensor.shape)
            self._keep(tensor, Content(name, shape, tensor.stride(), 0, tensor.dtype))

    def __enter__(self) -> Watch:
        """Watch this thread, and what others do to logical tensors."""
        self.thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        """Watch nothing more."""
        self.thread = None
        self._reads.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def give(self, source: Tensor) -> Tensor:
        """The logical tensor for a loader."""
        given: Tensor = source.as_subclass(self._class)
        return given

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the operation, and carry it out unless it writes into a target."""
        try:
            with self._lock:
                return self._see(func, args, dict(kwargs or {}))
        except Exception as error:
            self.failure = error
            raise

    def _see(self, func: Any, args: tuple[Any, ...], own: dict[str, Any]) -> Any:
        # Views are in memory that is known already, and a loader makes several for each copy.
        if _makes_views(func):
            return func(*args, **own)
        written = _find_written(func, args, own)
        if written:
            return self._write(func, written, args, own)
        given = list(_list_tensors((args, own)))
        if self.unread:
            self.unread.difference_update(map(key_of, given))
        known = [tensor for tensor in given if key_of(tensor) in self._contents]
        if not known:
            return func(*args, **own)
        if not GOES_BY_VALUES.isdisjoint(func.tags):
            self.check_values(known)
        if "device" in own:
            # There is no data that could go to another device.
            own["device"] = known[0].device
        result = func(*args, **own)
        self._follow(func, known, result)
        return result

    def check_values(self, read: Iterable[Tensor]) -> None:
        """Raise StoreError, which no loader can hide, where memory of which something is known has other values."""
        for tensor in read:
            if tensor.device.type != "meta" and key_of(tensor) in self._contents:
                self.failure = StoreError("what is loaded is read without data; load it by numbers")
                raise self.failure

    def _write(
        self, func: Any, written: Sequence[Tensor], args: tuple[Any, ...], own: dict[str, Any]
    ) -> Any:
        """Note what is written into targets, and let other writes happen."""
        given = list(_list_tensors((args, own)))
        if self.unread:
            read = set(map(key_of, given)) - set(map(key_of, written))
            self.unread.difference_update(read)
        is_target = False
        for into in written:
            key = key_of(into)
            if key in self.writes:
                is_target = True
                self._note(func, into, args, given)
                continue
            if self._carries(given, into):
                self.unread.add(key)
            self._keep(into, BLANK if _is_blank(func) and is_dense(into) else None)
            self._made[key] = (str(func),)
        return _return_written(func, written) if is_target else func(*args, **own)

    def explain(self, tensor: Tensor, into: Tensor) -> Write:
        """What a copy of the tensor brings into another."""
        content = self._contents.get(key_of(tensor))
        made = self._made.get(key_of(tensor), ())
        if content is BLANK:
            return Write((), ())
        carries = self._carries([tensor], into)
        dtype = self._find_dtype(tensor, into)
        if content is None or dtype is None:
            return Write(None, made, carries)
        operations = content.explain(dtype)
        stored = self._stored.get(key_of(into), into.dtype)
        if stored != dtype:
            # No cast gives these numbers.
            operations = *operations, f"bits of {dtype} seen as {stored}".replace("torch.", "")
        try:
            return Write(tuple(content.read(tensor, into)), operations, carries)
        except (StoreError, RuntimeError):
            return Write(None, made, carries)

    def _carries(self, given: Iterable[Tensor], into: Tensor) -> bool:
        """Whether something of logical tensors is in the memory of one of these, which is not that written into."""
        for one in given:
            key = key_of(one)
            is_made = self._contents.get(key, BLANK) is not BLANK
            if is_made and key != key_of(into) and one.numel():
                return True
        return False

    def _note(
        self, func: Any, target: Tensor, args: tuple[Any, ...], given: Sequence[Tensor]
    ) -> None:
        """A write into a target."""
        key = key_of(target)
        self.noted.add(key)
        content = dtype = None
        stored = self._stored[key]
        # Cells of another size are not those of the target.
        is_by_cell = stored is not None and stored.itemsize == target.element_size()
        if is_by_cell and _is_blank(func):
            self.filled.setdefault(key, set()).add(f"{func} {args[1:]}")
            write = Write((), ())
        elif is_by_cell and func in STORES:
            write = self.explain(args[1], target)
            dtype = self._find_dtype(args[1], target)
            content = self._content_of_copy(args[1], target)
        else:
            write = Write(None, (str(func),), self._carries(given, target))
        if write.pieces == ():
            if not self._is_written(target):
                if key not in self._contents:
                    self._keep(target, BLANK)
                return
            # What it held is gone, and what of it is left is read from numbers.
            write = Write(None, (str(func),))
        self.writes[key].append(write)
        self._keep(target, content, dtype)
        self._made[key] = write.made

    def _content_of_copy(self, source: Tensor, target: Tensor) -> Content | None:
        """What a target has once the source was copied into it, if it is all of its memory."""
        content = self._contents.get(key_of(source))
        if content is None or content is BLANK or self._find_dtype(source, target) is None:
            return None
        return content.copied(source, target)

    def _find_dtype(self, source: Tensor, into: Tensor) -> torch.dtype | None:
        """The type of what a copy of known memory brings into another; None where bits are cast."""
        key = key_of(into)
        own = self._stored.get(key, into.dtype)
        kept = self._dtype.get(key_of(source))
        if own is None or kept is None or _is_changed(source) or _is_changed(into):
            return None
        as_seen = source.dtype, into.dtype
        if as_seen == (kept, own):
            return own
        sizes = kept.itemsize, own.itemsize
        are_bits = source.dtype == into.dtype and sizes == (source.itemsize, into.itemsize)
        return kept if are_bits else None

    def _is_written(self, target: Tensor) -> bool:
        """Whether one of these cells, or of cells of which it is not known, was written before."""
        blocks = [(n, stride, 0) for n, stride in zip(target.shape, target.stride(), strict=True)]
        cells = Piece("", int(target.storage_offset()), 0, tuple(blocks))
        for write in self.writes[key_of(target)] if target.numel() else ():
            if write.pieces is None:
                return True
            if any(overlap((cells, piece), 1) is not None for piece in write.pieces):
                return True
        return False

    def _follow(self, func: Any, known: list[Tensor], result: Any) -> None:
        """What is known of the results of an operation on what is known."""
        for made in _list_tensors(result):
            # Some operations return what they were given.
            if key_of(made) not in self._contents:
                self._keep(made, self._copy(func, known, made), self._find_dtype(known[0], made))
                before = self._made.get(key_of(known[0]), ())
                self._made[key_of(made)] = before if func in COPIES else (*before, str(func))

    def _copy(self, func: Any, known: list[Tensor], made: Tensor) -> Content | None:
        """What is in the memory of a result."""
        source = known[0]
        before = self._contents[key_of(source)]
        if before is None or len(known) > 1 or not _is_by_element(func, source, made):
            return None
        if before is BLANK:
            return BLANK if func in COPIES else None
        is_bits = source.dtype != self._dtype[key_of(source)]
        if self._find_dtype(source, made) is None or (is_bits and func not in COPIES):
            return None
        return before.copied(source, made, "" if func in COPIES else str(func))

    def _keep(
        self, tensor: Tensor, content: Content | None, dtype: torch.dtype | None = None
    ) -> None:
        self._alive.append(tensor)
        self._contents[key_of(tensor)] = content
        self._dtype[key_of(tensor)] = dtype or tensor.dtype


def _see(name: str) -> property:
    """An attribute of tensors that is not one."""
    find = getattr(torch._C.TensorBase, name).__get__

    def see(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return find(tensor)

    return property(see)


def _make_class(watch: Watch) -> type[Tensor]:
    """The class of logical tensors."""

    class Logical(Tensor):
        """A tensor that is watched in every thread, and so is what operations make of it."""

        # What loaders do otherwise with tensors without data is not what they do with weights.
        is_meta = False
        # A loader asks for these ten times per copy, and torch would ask the function below each time.
        shape = _see("shape")
        ndim = _see("ndim")

        def __deepcopy__(self, memo: object) -> Tensor:
            return self.clone()

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            try:
                if func in ADDRESSES and watch.thread is not None:
                    raise StoreError("a tensor without data is nowhere; load it by numbers")
                if watch.thread in (None, threading.get_ident()):
                    return _carry_out(cls, func, args, kwargs)
                with _Elsewhere(watch):
                    return _carry_out(cls, func, args, kwargs)
            except Exception as error:
                watch.failure = error
                raise

    return Logical


def _carry_out(kind: type[Tensor], func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """What a function makes of tensors, as tensors of this class."""
    with torch._C.DisableTorchFunctionSubclass():
        made = func(*args, **kwargs) if kwargs else func(*args)
    found = type(made)
    if found is Tensor:
        # What is changed in place stays what it was.
        return made if any(made is given for given in args) else made.as_subclass(kind)
    if found is torch.Size or not isinstance(made, tuple | list):
        return made
    return found(one.as_subclass(kind) if type(one) is Tensor else one for one in made)


class _Elsewhere(TorchDispatchMode):
    """The watch, in another thread."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As in the thread that is watched."""
        return self._watch.__torch_dispatch__(func, types, args, kwargs)


class _Reads(TorchFunctionMode):
    """Sees what reads memory past the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As it is, unless what it reads was not written there."""
        if func in GIVES_MEMORY:
            self._watch.check_values(args[:1])
        return func(*args, **(kwargs or {}))


def _is_changed(view: Tensor) -> bool:
    """Whether the view stands for other numbers than its memory has."""
    return view.is_neg() or view.is_conj()


def _find_dtypes(targets: Iterable[Tensor]) -> dict[int, torch.dtype | None]:
    """The type of the targets in each memory; None where they have several."""
    found: dict[int, torch.dtype | None] = {}
    for target in targets:
        key = key_of(target)
        first = found.setdefault(key, target.dtype)
        if first != target.dtype:
            found[key] = None
    return found


def _is_blank(func: Any) -> bool:
    return func not in STORES and func.overloadpacket.__name__ in BLANKS


def _find_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the operation writes into, alone or in lists."""
    written: list[Tensor] = []
    for i, name in _list_written(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        written += _list_tensors(value)
    return written


def _return_written(func: Any, written: Sequence[Tensor]) -> Any:
    """What the operation returns, if that is only what it writes into. Raises StoreError where it is more."""
    returned = [result.alias_info for result in func._schema.returns]
    fresh = [alias for alias in returned if alias is None or not alias.is_write]
    if fresh or len(returned) > len(written):
        raise StoreError(f"{func} writes into a target and returns more; load it by numbers")
    if len(returned) == 1:
        return written[0]
    return tuple(written) if returned else None


@functools.cache
def _makes_views(func: Any) -> bool:
    """Whether all results are views of what the operation is given."""
    results = [result.alias_info for result in func._schema.returns]
    return bool(results) and all(alias and not alias.is_write for alias in results)


@functools.cache
def _list_written(func: Any) -> tuple[tuple[int, str], ...]:
    """The place and the name of each argument that the operation writes into."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((i, argument.name))
    return tuple(written)


def _list_tensors(values: object) -> Iterator[Tensor]:
    """The tensors in arguments or results: plain ones, and lists of them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _list_tensors(values.values())
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from _list_tensors(value)


def _is_by_element(func: Any, source: Tensor, made: Tensor) -> bool:
    """Whether each element of the result is made of the one in its place."""
    by_element = func in COPIES or torch.Tag.pointwise in func.tags
    return by_element and source.shape == made.shape
