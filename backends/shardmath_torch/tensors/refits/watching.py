"""Watching: a run of a loader on tensors without data, which records the elements of each copy.

1. Logical tensors are on the meta device. Nothing is written into targets: copies into their memory are noted, with
   the strides of both sides.
2. Copies and casts of views are followed; operations that work element by element are followed with their names. The
   contents of any other result are unknown; a target into which it is copied is not explained.
3. A target that was written as a whole may be read again: some loaders store first, and then a function of it. Reading
   its values is an error, since nothing was written there.
4. Bits viewed as another type are followed as long as they are only copied; a cast of them is a computation.
5. A torch mode belongs to one thread. Threads that a watched thread starts enter it when they begin (`threads`); in any
   other thread the class of logical tensors enters it for operations on these, or on results made from them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmath.base.digest import digest
from shardmath.base.errors import StoreError
from shardmath.models.recordings.pieces import Piece, overlap
from shardmath_torch.groups import compat
from shardmath_torch.tensors.probes.patterns import as_words
from shardmath_torch.tensors.refits.before import describe, key_of, storage_of
from shardmath_torch.tensors.refits.collectives import Barriers, is_barrier, is_collective
from shardmath_torch.tensors.refits.contents import BLANK, Content, is_dense
from shardmath_torch.tensors.refits.operations import (
    CALLS_PYTHON,
    GIVES_MEMORY,
    find_written,
    list_tensors,
    makes_views,
)
from shardmath_torch.tensors.refits.threads import FollowingMode, OtherThread

__all__ = ["Watch", "Write"]

aten = torch.ops.aten

COPIES = {aten.clone.default, aten._to_copy.default, aten.contiguous.default}
"""Operations that copy elements into new memory."""
STORES = {aten.copy_.default, aten.fill_.Tensor}
"""Operations that write their second argument into their first."""
ADDRESSES = {Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
"""Functions that return a tensor's address, which all tensors without data share."""
IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
"""The function that torch calls for `tensor.is_meta`."""
GOES_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result has a type or shape that depends on values."""
BLANKS = {"fill_", "zero_", "normal_", "uniform_"}
"""Operations that fill padding before or after the weights are written."""


class Write(NamedTuple):
    """The record of a copy that a weight loader made into one of the model's tensors. `pieces` says which checkpoint
    elements it wrote where, and is None if this is unknown; `made` has the names of the operations that computed the
    values.

    `carries` says whether the write had elements of logical tensors, known or not.
    """

    pieces: tuple[Piece, ...] | None
    made: tuple[str, ...]
    carries: bool = False


class _Call(NamedTuple):
    """An operation and its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Watch(FollowingMode):
    """A torch mode that records which elements of `sources` a weight loader copies where in `targets`. `sources` are on
    the meta device, and nothing is written into `targets`.
    """

    def __init__(
        self, sources: Mapping[str, Tensor], targets: Sequence[Tensor], barriers: Barriers
    ) -> None:
        super().__init__()
        self._barriers = barriers
        self.writes: dict[int, list[Write]] = {key_of(target): [] for target in targets}
        self.noted: set[int] = set()
        # The constants that filled each memory of targets.
        self.filled: dict[int, set[str]] = {}
        # The error of an operation, kept since a loader may catch it and continue.
        self.failure: Exception | None = None
        # Whether the loader has called a collective.
        self.collective = False
        # Memory into which elements of logical tensors were written, and which was not read since.
        self.unread: set[int] = set()
        self._class = _make_class(self)
        self._reads = _ReadMode(self)
        self._lock = threading.RLock()
        # A key identifies memory only while it lives, so all known memory is kept alive. A tensor does not keep its
        # memory: a loader may give it other memory.
        self._alive = [storage_of(tensor) for tensor in (*sources.values(), *targets)]
        self._contents: dict[int, Content | None] = {}
        # The operations, except copies, that made the content of each memory.
        self._operations: dict[int, tuple[str, ...]] = {}
        # Numbers for arguments without values, in the order of their use.
        self._numbers: dict[tuple[object, ...], int] = {}
        # The type of the elements in each memory, as whatever type it is viewed.
        self._dtypes: dict[int, torch.dtype] = {}
        self._target_dtypes = _find_dtypes(targets)
        for name, tensor in sources.items():
            shape = tuple(tensor.shape)
            self._keep(tensor, Content(name, shape, tensor.stride(), 0, tensor.dtype))

    def __enter__(self) -> Watch:
        """Watch this thread, those that it starts, and other threads' operations on logical tensors."""
        self.followed.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop watching."""
        self.followed.__exit__()
        self._reads.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Give up the memory that is kept alive, and what is known of it. The writes stay."""
        # Threads of a pool that outlives the run keep their modes, and these keep the watch.
        with self._lock:
            self._alive.clear()
            self._contents.clear()
            self._operations.clear()
            self._dtypes.clear()

    def enter_thread(self) -> None:
        """Watch this thread, which a watched thread has started."""
        super().enter_thread()
        _ReadMode(self).__enter__()  # type: ignore[no-untyped-call]

    def give(self, source: Tensor) -> Tensor:
        """Return `source` as an instance of a Tensor subclass, to pass to the weight loader; the data are shared. This
        Watch then sees the operations on it in every thread.
        """
        given: Tensor = source.as_subclass(self._class)
        return given

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the operation, and run it unless it writes into a target."""
        try:
            with self._lock:
                return self._run(func, args, dict(kwargs or {}))
        except Exception as error:
            self.failure = error
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation unless it writes into a target; note what its results contain."""
        # Views are in memory that is known already, and a loader makes several for each copy.
        if makes_views(func):
            return func(*args, **kwargs)
        if is_barrier(func):
            return self._barriers.call(func, args, kwargs)
        self._check_collective(func)
        written = find_written(func, args, kwargs)
        if written:
            return self._write(func, written, args, kwargs)
        arguments = list(list_tensors((args, kwargs)))
        if self.unread:
            self.unread.difference_update(map(key_of, arguments))
        followed = [tensor for tensor in arguments if key_of(tensor) in self._contents]
        if not followed:
            return func(*args, **kwargs)
        if not GOES_BY_VALUES.isdisjoint(func.tags):
            self.check_values(followed)
        if "device" in kwargs:
            # There is no data that could go to another device.
            kwargs["device"] = followed[0].device
        result = func(*args, **kwargs)
        self._follow(_Call(func, args, kwargs), followed, result)
        return result

    def _check_collective(self, func: Any) -> None:
        """Raise StoreError for a collective: it does nothing without data, and its schema does not name what it
        writes."""
        if is_collective(func):
            self.collective = True
            raise StoreError(
                f"the loader calls {func}, which moves nothing without data; record it with "
                f"ways=('numbers',)"
            )

    def check_values(self, read: Iterable[Tensor]) -> None:
        """Raise StoreError if the weight loader reads values of a tensor that stands for checkpoint data and has no
        data itself. `read` has the tensors that are read; the error is also kept as `failure`.
        """
        for tensor in read:
            if tensor.device.type != "meta" and key_of(tensor) in self._contents:
                self.failure = StoreError(
                    "the loader reads values of a tensor that has no data yet; record it with "
                    "ways=('numbers',)"
                )
                raise self.failure

    def check_address(self, tensor: Tensor) -> None:
        """Raise StoreError if the tensor has no data, and so no address; keep the error as `failure`."""
        if tensor.device.type == "meta":
            self.failure = StoreError(
                "the loader asks for the address of a tensor without data; record it with "
                "ways=('numbers',)"
            )
            raise self.failure

    def check_function(self, func: Any, args: Sequence[Any]) -> None:
        """Raise StoreError for a function of torch that a loader may not call with these arguments while it is
        watched."""
        if not self.followed.is_on:
            return
        if func in ADDRESSES:
            self.check_address(args[0])
        if func in CALLS_PYTHON:
            self.check_call(func, list_tensors(args))

    def check_call(self, func: Any, given: Iterable[Tensor]) -> None:
        """Raise StoreError for a function that changes elements of tensors without data, which it skips; keep the error
        as `failure`. `given` has the tensors that the function gets.
        """
        tensors = list(given)
        self.check_values(tensors)
        if any(tensor.device.type == "meta" for tensor in tensors):
            self.failure = StoreError(
                f"the loader calls {func.__name__}, which does nothing to a tensor without data; "
                f"record it with ways=('numbers',)"
            )
            raise self.failure

    def has_elements(self, tensor: Tensor) -> bool:
        """Whether the loader has copied, or may have, elements into this tensor."""
        if key_of(tensor) in self.writes:
            return self._is_written(tensor)
        return self._contents.get(key_of(tensor), BLANK) is not BLANK

    def _write(
        self, func: Any, written: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note writes into targets, and run an operation that only writes elsewhere."""
        arguments = list(list_tensors((args, kwargs)))
        if self.unread:
            # What the operation only writes, it does not read.
            read = set(map(key_of, arguments)) - set(map(key_of, written))
            self.unread.difference_update(read)
        is_target = False
        for into in written:
            key = key_of(into)
            if key in self.writes:
                is_target = True
                self._note(func, into, args, arguments)
                continue
            if self._carries(arguments, into):
                self.unread.add(key)
            # Memory that a constant fills without gaps has no elements; after other writes it is unknown.
            self._keep(into, BLANK if _is_blank(func) and is_dense(into) else None)
            self._operations[key] = (str(func),)
        return _return_written(func, written) if is_target else func(*args, **kwargs)

    def explain(self, tensor: Tensor, into: Tensor) -> Write:
        """Return a Write that describes a copy of `tensor` into `into`, which the weight loader fills: which checkpoint
        elements go where, if known, and the names of the operations that computed their values.
        """
        content = self._contents.get(key_of(tensor))
        made_by = self._operations.get(key_of(tensor), ())
        if content is BLANK:  # filled with constants, which are not elements
            return Write((), ())
        has_elements = self._carries([tensor], into)
        dtype = self._find_copied_dtype(tensor, into)
        if content is None or dtype is None:
            return Write(None, made_by, has_elements)
        operations = content.explain(dtype)
        stored = self._target_dtypes.get(key_of(into), into.dtype)
        if stored != dtype:
            # The bits of one type are stored as another: no cast gives these values.
            operations = *operations, f"bits of {dtype} seen as {stored}".replace("torch.", "")
        try:
            return Write(tuple(content.read(tensor, into)), operations, has_elements)
        except (StoreError, RuntimeError):
            return Write(None, made_by, has_elements)

    def _carries(self, given: Iterable[Tensor], into: Tensor) -> bool:
        """Whether a given tensor, in other memory than `into`, has elements of logical tensors."""
        for tensor in given:
            key = key_of(tensor)
            has_elements = self._contents.get(key, BLANK) is not BLANK
            if has_elements and key != key_of(into) and tensor.numel():
                return True
        return False

    def _note(
        self, func: Any, target: Tensor, args: tuple[Any, ...], given: Sequence[Tensor]
    ) -> None:
        """Note a write into a target, and what the target contains then."""
        key = key_of(target)
        self.noted.add(key)
        content = dtype = None
        stored = self._target_dtypes[key]
        # A view with elements of another size does not write whole cells.
        is_by_cell = stored is not None and stored.itemsize == target.element_size()
        # A write without pieces, (), is one of a constant; pieces that are None are unknown.
        if is_by_cell and _is_blank(func):
            self.filled.setdefault(key, set()).add(f"{func} {args[1:]}")
            write = Write((), ())
        elif is_by_cell and func in STORES:
            write = self.explain(args[1], target)
            if write.pieces == ():
                self.filled.setdefault(key, set()).add(str(func))
            dtype = self._find_copied_dtype(args[1], target)
            content = self._content_of_copy(args[1], target)
        else:
            write = Write(None, (str(func),), self._carries(given, target))
        if write.pieces == ():
            if not self._is_written(target):
                if key not in self._contents:
                    self._keep(target, BLANK)
                return
            # A constant overwrites known cells; which of them are left is read from runs on numbers.
            write = Write(None, (str(func),))
        self.writes[key].append(write)
        self._keep(target, content, dtype)
        self._operations[key] = write.made

    def _content_of_copy(self, source: Tensor, target: Tensor) -> Content | None:
        """The content of a target after a copy of the source; None if unknown, or if other cells share its memory."""
        content = self._contents.get(key_of(source))
        if content is None or content is BLANK or self._find_copied_dtype(source, target) is None:
            return None
        return content.copied(source, target)

    def _find_copied_dtype(self, source: Tensor, into: Tensor) -> torch.dtype | None:
        """The type of the elements that a copy of known memory brings; None if bits are cast as numbers."""
        stored = self._target_dtypes.get(key_of(into), into.dtype)
        source_dtype = self._dtypes.get(key_of(source))
        if stored is None or source_dtype is None or _is_changed(source) or _is_changed(into):
            return None
        if (source.dtype, into.dtype) == (source_dtype, stored):
            return stored
        # Both are viewed as the same other type: their bits are copied.
        sizes = source_dtype.itemsize, stored.itemsize
        are_bits = source.dtype == into.dtype and sizes == (source.itemsize, into.itemsize)
        return source_dtype if are_bits else None

    def _is_written(self, target: Tensor) -> bool:
        """Whether one of the target's cells was, or may have been, written before."""
        blocks = [(n, stride, 0) for n, stride in zip(target.shape, target.stride(), strict=True)]
        cells = Piece("", int(target.storage_offset()), 0, tuple(blocks))
        for write in self.writes[key_of(target)] if target.numel() else ():
            if write.pieces is None:
                return True
            # Side 1: a position of the stored tensor.
            if any(overlap((cells, piece), 1) is not None for piece in write.pieces):
                return True
        return False

    def _follow(self, call: _Call, followed: list[Tensor], result: Any) -> None:
        """Note the contents of the results of an operation on `followed`, the tensors in known memory."""
        for tensor in list_tensors(result):
            # Some operations return what they were given.
            if key_of(tensor) not in self._contents:
                content = self._content_of_result(call, followed, tensor)
                self._keep(tensor, content, self._find_copied_dtype(followed[0], tensor))
                before = self._operations.get(key_of(followed[0]), ())
                self._operations[key_of(tensor)] = (
                    before if call.func in COPIES else (*before, str(call.func))
                )

    def _content_of_result(
        self, call: _Call, followed: list[Tensor], result: Tensor
    ) -> Content | None:
        """The content of a result's memory; None if unknown."""
        func = call.func
        source = followed[0]
        before = self._contents[key_of(source)]
        is_alone = self._is_alone(call, followed)
        if before is None or not is_alone or not _is_by_element(func, source, result):
            return None
        if before is BLANK:
            return BLANK if func in COPIES else None
        # Seen as another type than its content's: only a copy keeps the elements.
        is_bits = source.dtype != self._dtypes[key_of(source)]
        if self._find_copied_dtype(source, result) is None or (is_bits and func not in COPIES):
            return None
        return before.copied(source, result, "" if func in COPIES else self._name(call, source))

    def _is_alone(self, call: _Call, followed: Sequence[Tensor]) -> bool:
        """Whether the operation takes one followed tensor (in known memory), and no target (without data) before
        anything was written into it.
        """
        for tensor in list_tensors((call.args, call.kwargs)):
            key = key_of(tensor)
            is_empty = key in self.writes and key not in self._contents
            if is_empty and tensor.device.type == "meta":
                return False
        return len(followed) == 1

    def _name(self, call: _Call, source: Tensor) -> str:
        """The operation with its arguments besides the source: equal names are equal functions of the source."""
        shown_arguments = ["_" if value is source else self._show(value) for value in call.args]
        shown_arguments += [f"{name}={self._show(value)}" for name, value in call.kwargs.items()]
        return (
            str(call.func)
            if shown_arguments == ["_"]
            else f"{call.func}({', '.join(shown_arguments)})"
        )

    def _show(self, argument: object) -> str:
        """A text for an argument of an operation; arguments with equal texts are equal."""
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(self._show, argument))}]"
        if not isinstance(argument, Tensor):
            return repr(argument)
        if argument.device.type == "meta":
            # Without values it equals only itself, which its place in memory identifies while that lives.
            self._alive.append(storage_of(argument))
            return f"tensor {self._numbers.setdefault(describe(argument), len(self._numbers))}"
        return f"tensor {digest((argument.dtype, argument.shape, _list_bytes(argument)))[:8]}"

    def _keep(
        self, tensor: Tensor, content: Content | None, dtype: torch.dtype | None = None
    ) -> None:
        """Note the content of a tensor's memory, None if unknown, and the type of its elements."""
        self._alive.append(storage_of(tensor))  # a key identifies memory only while it lives
        self._contents[key_of(tensor)] = content
        self._dtypes[key_of(tensor)] = dtype or tensor.dtype


def _make_property(name: str) -> property:
    """A tensor's attribute as a property that does not call `__torch_function__`."""
    get = compat.tensor_property(name).__get__

    def get_quietly(tensor: Tensor) -> Any:
        with compat.without_torch_function():
            return get(tensor)

    return property(get_quietly)


def _make_class(watch: Watch) -> type[Tensor]:
    """The class of logical tensors. A torch mode watches one thread; the class watches what others do to them."""

    class Logical(Tensor):
        """A checkpoint tensor as a weight loader gets it. Operations on it and on their results are observed in every
        thread, to record where the loader stores each element.
        """

        # Loaders are to take it for a weight, and not to treat it as a tensor without data.
        is_meta = False
        # A loader reads these ten times per copy, and torch would call the function below each time.
        shape = _make_property("shape")
        ndim = _make_property("ndim")

        def __deepcopy__(self, memo: object) -> Tensor:
            return self.clone()

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            try:
                watch.check_function(func, args)
                # Once the watch has ended nothing is watched; a followed thread's mode sees the operation already.
                if not watch.followed.is_on or watch.followed.is_here():
                    return _call_as(cls, func, args, kwargs)
                with OtherThread(watch):
                    return _call_as(cls, func, args, kwargs)
            except Exception as error:
                watch.failure = error
                raise

    return Logical


def _call_as(kind: type[Tensor], func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Call a function of tensors; its results are tensors of this class."""
    with compat.without_dispatch_by_class():
        result = func(*args, **kwargs) if kwargs else func(*args)
    result_type = type(result)
    if result_type is Tensor:
        # A tensor that is changed in place keeps its class.
        return result if any(result is given for given in args) else result.as_subclass(kind)
    if result_type is torch.Size or not isinstance(result, tuple | list):
        return result
    return result_type(one.as_subclass(kind) if type(one) is Tensor else one for one in result)


class _ReadMode(TorchFunctionMode):
    """The mode that checks functions that read memory, change it, or say where it is, outside of operations."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function. Raises StoreError if it needs memory into which something was really written."""
        watch = self._watch
        watch.check_function(func, args)
        if func in GIVES_MEMORY and watch.followed.is_on:
            watch.check_values(args[:1])
        result = func(*args, **(kwargs or {}))
        # Functions of torch.nn.init skip tensors on the meta device, and so would leave elements that they change.
        if func == IS_META and result and _is_asked_by(torch.nn.init.__name__):
            return not watch.followed.is_on or not watch.has_elements(args[0])
        return result


def _is_asked_by(module: str) -> bool:
    """Whether the code that called a mode's `__torch_function__`, which calls this, is of that module."""
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == module


def _list_bytes(tensor: Tensor) -> bytes:
    """The bytes of all elements of a tensor that has data."""
    words = as_words(tensor.cpu().contiguous())
    return bytes(words.numpy().tobytes())


def _is_changed(view: Tensor) -> bool:
    """Whether the view negates or conjugates the numbers of its memory."""
    return view.is_neg() or view.is_conj()


def _find_dtypes(targets: Iterable[Tensor]) -> dict[int, torch.dtype | None]:
    """The type of the targets in each memory; None if they have several."""
    dtypes: dict[int, torch.dtype | None] = {}
    for target in targets:
        key = key_of(target)
        if dtypes.setdefault(key, target.dtype) != target.dtype:
            dtypes[key] = None
    return dtypes


def _is_blank(func: Any) -> bool:
    """Whether the operation fills its first argument with a constant or noise."""
    return func not in STORES and func.overloadpacket.__name__ in BLANKS


def _return_written(func: Any, written: Sequence[Tensor]) -> Any:
    """The results of an operation that returns only the tensors it writes. Raises StoreError if it returns more."""
    returned = [result.alias_info for result in func._schema.returns]
    not_written = [alias for alias in returned if alias is None or not alias.is_write]
    if not_written or len(returned) > len(written):
        raise StoreError(
            f"{func} writes into a target and returns another tensor, which cannot be followed "
            f"without data; record the loader with ways=('numbers',)"
        )
    if len(returned) == 1:
        return written[0]
    return tuple(written) if returned else None


def _is_by_element(func: Any, source: Tensor, made: Tensor) -> bool:
    """Whether each element of the result is computed from the element at the same position."""
    by_element = func in COPIES or torch.Tag.pointwise in func.tags
    return by_element and source.shape == made.shape
