"""What workers do with tensors that say which part they are. Imported by workers, so no pytest here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardmath as sm
import shardmath_torch as smt

ROWS = sm.Layout((9, 4), sm.Mesh(tp=8), "(tp n) h")
PADDED = sm.Layout((9, 4), sm.Mesh(dp=2, tp=4), "(tp n)=12 h")
WHOLE = torch.arange(36.0).view(9, 4)


def say(tensor: Tensor, layout: sm.Layout, rank: int) -> Tensor:
    """The tensor with the attributes of torch's CheckpointableTensor, as torch's documentation has them."""
    said: Any = tensor
    rows, columns = layout.runs(rank)
    boxes = [(at, first, n) for at, first, n in rows.segments]
    said.global_shape = layout.shape
    said.global_offsets = tuple((first, 0) for _, first, _ in boxes)
    said.local_offsets = tuple((at, 0) for at, _, _ in boxes)
    said.local_sizes = tuple((n, len(columns)) for _, _, n in boxes)
    return tensor


def own_part(layout: sm.Layout, rank: int) -> Tensor:
    """The rank's part of WHOLE, with zeros where nothing lies."""
    rows = torch.from_numpy(layout.indices(rank)[0])
    taken = functional.pad(WHOLE, (0, 0, 0, 1))[rows]
    return taken.clone()


class Parts(nn.Module):
    """A parameter, a buffer, and something that is whole."""

    def __init__(self, layout: sm.Layout, rank: int) -> None:
        super().__init__()
        part = own_part(layout, rank)
        self.w = nn.Parameter(part.clone())
        self.register_buffer("b", part.clone())
        self.bias = nn.Parameter(torch.ones(3))
        for tensor in (self.w, self.b):
            say(tensor, layout, rank)


def kept(rank: int, folder: str) -> list[bool]:
    """Whether layouts are what parts say, and nothing is lost that is saved, loaded otherwise, or exported."""
    module = Parts(ROWS, rank)
    found = [sm.equivalent(smt.layout_of(module)["w"], ROWS)]
    optimizer = torch.optim.AdamW(module.parameters())
    (module.w.square().sum() + module.bias.sum()).backward()
    optimizer.step()
    moment = optimizer.state[module.w]["exp_avg"]
    found.append(moment.equal(own_part(ROWS, rank) * 2 * (1 - 0.9)))
    with torch.no_grad():
        module.w.copy_(own_part(ROWS, rank))
    smt.save_state(f"{folder}/state", module, optimizer)
    smt.export(f"{folder}/module", module)
    smt.export(f"{folder}/tensors", {"w": module.w, "bias": module.bias})

    other = Parts(PADDED, rank)
    for tensor in other.state_dict().values():
        tensor.zero_()
    fresh = torch.optim.AdamW(other.parameters())
    smt.load_state(f"{folder}/state", other, fresh)
    wanted = own_part(PADDED, rank)
    found += [other.w.equal(wanted), other.b.equal(wanted)]
    found.append(fresh.state[other.w]["exp_avg"].equal(wanted * 2 * (1 - 0.9)))
    return found


def disagreeing(rank: int, shape: tuple[int, ...]) -> str:
    """What is said if one rank speaks of another shape."""
    module = Parts(ROWS, rank)
    if rank == 3:
        module.w.global_shape = shape  # type: ignore[assignment]
    try:
        smt.layout_of(module)
    except sm.LayoutError as error:
        return str(error)
    return "nothing"
