"""Memory: whether a tensor's memory exists, and a plain tensor on it.

1. A subclass that only intercepts functions (`__torch_function__`) has a tensor's usual memory, and
   is replaced by a plain tensor.
2. A subclass with its own kernels (`__torch_dispatch__`: fake, quantized, wrapping another) may have
   no memory, or memory that means something else: it is rejected, except for the results of torch's
   asynchronous collectives, which are waited for.
3. A storage may be smaller than the strides reach if it was freed or resized under the tensor, as
   FSDP does to unsharded parameters. Reading there ends the process, or raises in the middle of a
   move.

>>> missing_memory(torch.zeros(2, 3)[:, 1])
''
>>> t = torch.zeros(2, 3)
>>> _ = t.untyped_storage().resize_(8)
>>> missing_memory(t)
'reaches 24 bytes into a storage of 8, which was freed or resized'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from shardmath_torch.groups import compat

__all__ = ["count_reached", "has_own_kernels", "mark_written", "missing_memory", "plain", "reach"]


def plain(tensor: Tensor) -> Tensor:
    """Return an ordinary torch.Tensor on the memory of `tensor`, after waiting if `tensor` is the result of an
    asynchronous collective. Parameters, and tensors of a class with a custom `__torch_dispatch__` such as DTensor, are
    returned unchanged."""
    if type(tensor) in (Tensor, Parameter):
        return tensor
    if isinstance(tensor, compat.AsyncCollectiveTensor):
        waited: Tensor = tensor.wait()
        return plain(waited)
    if has_own_kernels(tensor):
        return tensor
    with compat.without_dispatch_by_class(), torch.no_grad():
        return tensor.as_subclass(Tensor)


def has_own_kernels(tensor: Tensor) -> bool:
    """Whether the tensor's class implements operations itself, such as quantizing what is copied into it."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def missing_memory(tensor: Tensor) -> str:
    """Return why elements of `tensor` cannot be read or written; "" if they can. The text has no subject, such as "has
    no memory on 'meta'", so that the caller can put the tensor's name before it."""
    if has_own_kernels(tensor):
        return f"is a {type(tensor).__name__}, which has no plain memory"
    try:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        start = storage.data_ptr()
    except RuntimeError:
        # Or NotImplementedError, its subclass: wrappers of torch.func and functionalization.
        return "has no memory itself"
    end = (tensor.storage_offset() + reach(tensor)) * tensor.element_size()
    if not tensor.numel():
        return ""
    if nbytes < end:
        return f"reaches {end} bytes into a storage of {nbytes}, which was freed or resized"
    if not start or storage.device != tensor.device:
        return f"has no memory on '{tensor.device}'"
    return ""


def reach(tensor: Tensor) -> int:
    """Return the number of elements of memory that a tensor spans, from its first element to its last; not meaningful
    for an empty tensor."""
    return count_reached(tensor.shape, tensor.stride())


def count_reached(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory that a tensor with this shape and these strides spans, as `reach`."""
    last = 0
    for count, step in zip(shape, strides, strict=True):
        last += (count - 1) * step
    return last + 1


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that `tensors` change, so that a backward pass that needs their old values raises."""
    torch.autograd.graph.increment_version(list(tensors))
