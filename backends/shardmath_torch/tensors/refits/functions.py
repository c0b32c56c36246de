"""Functions: those that rows of the built-in systems name, and whether a loader computes one of them.

>>> find_difference("neg_exp", torch.tensor([0.0]), torch.tensor([-1.0]))
''
>>> find_difference("neg_exp", torch.tensor([0.0]), torch.tensor([1.0]))
'neg_exp(0) is -1, and the loader stores 1'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shardmath_torch.groups.dtypes import dtype_of

__all__ = ["FUNCTIONS", "Function", "find_difference", "spread"]

Function: TypeAlias = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {"neg_exp": lambda tensor: -torch.exp(tensor.float())}
"""The functions that rows of the built-in systems name."""
LARGEST = 8.0
"""The largest value that is given to functions: of larger ones, exponentials are soon infinite or 0 in small types."""


def spread(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor of values for which functions that round differently have different results."""
    count = torch.Size(shape).numel()
    values = torch.arange(1, count + 1) * (LARGEST / max(count, 1))
    # Every part that a rank may have has both signs.
    values[1::2] *= -1
    return values.to(dtype_of(dtype)).reshape(shape)


def find_difference(name: str, values: Tensor, stored: Tensor) -> str:
    """Return where `stored`, which a loader has computed from `values`, is not the function called `name` of these; ""
    if it is everywhere, bit for bit.
    """
    # A loader may compute before it copies to the target's device or after, and devices round exponentials differently.
    faults = []
    for device in ("cpu", stored.device):
        wanted = FUNCTIONS[name](values.to(device)).to("cpu", stored.dtype)
        found = stored.cpu()
        differing = ((wanted != found) & ~(wanted.isnan() & found.isnan())).nonzero()
        if not len(differing):
            return ""
        place = int(differing[0])
        value, right, wrong = (float(t[place]) for t in (values, wanted, found))
        faults.append(f"{name}({value:.9g}) is {right:.9g}, and the loader stores {wrong:.9g}")
    return faults[-1]
