"""The memory behind a tensor: whether it is there, and a plain tensor of it.

1. A subclass that only watches functions (`__torch_function__`) lies in memory as any tensor does,
   and is seen through.
2. A subclass that computes in a way of its own (`__torch_dispatch__`: fake, quantised, wrapping
   another) may have no memory, or memory that means something else: it is refused, and only what
   torch's collectives return is waited for.
3. A storage may be smaller than the strides reach, where it was freed or resized under the tensor,
   as FSDP does to unsharded parameters. Reading there ends the process or raises in the midst of a
   move.

>>> missing_memory(torch.zeros(2, 3)[:, 1])
''
>>> t = torch.zeros(2, 3)
>>> _ = t.untyped_storage().resize_(8)
>>> missing_memory(t)
'reaches 24 bytes into a storage of 8, which was freed or resized'
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import Parameter

__all__ = ["mark_written", "missing_memory", "plain", "reach"]


def plain(tensor: Tensor) -> Tensor:
    """The same memory without the subclass; the tensor itself where its subclass computes in a way of its own."""
    if type(tensor) in (Tensor, Parameter):
        return tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        found: Tensor = tensor.wait()
        return plain(found)
    if _computes_itself(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        return tensor.as_subclass(Tensor)


def _computes_itself(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def missing_memory(tensor: Tensor) -> str:
    """Why the tensor's elements cannot be read or written: "" where they can; words that follow its name otherwise."""
    if _computes_itself(tensor):
        return f"is a {type(tensor).__name__}, which has no plain memory"
    try:
        storage = tensor.untyped_storage()
        held = storage.nbytes()
        start = storage.data_ptr()
    except RuntimeError:
        # NotImplementedError is one: wrappers of torch.func and functionalization.
        return "has no memory of its own"
    end = (tensor.storage_offset() + reach(tensor)) * tensor.element_size()
    if not tensor.numel():
        return ""
    if held < end:
        return f"reaches {end} bytes into a storage of {held}, which was freed or resized"
    if not start or storage.device != tensor.device:
        return f"has no memory on '{tensor.device}'"
    return ""


def reach(tensor: Tensor) -> int:
    """Elements from the tensor's first to one past its last; at least 1."""
    last = 0
    for count, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (count - 1) * step
    return last + 1


def mark_written(tensors: Iterable[Tensor]) -> None:
    """Tells autograd that the tensors change, so that a backward which needs what they were is an error."""
    torch.autograd.graph.increment_version(list(tensors))
