"""What workers do with fine-grained FP8 checkpoints. Imported by workers, so no pytest here.

A model is a tree of parameters under the checkpoint's names, in bfloat16, divided as trainers divide it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import distribute_tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.checkpoints import same
from tests.distributed.tasks.dtensors import caught, device_mesh, part, placements_of

TENSOR_PARALLEL = {r"(q|k|v|gate|up)_proj": "R S0", r"(o|down)_proj": "R S1", "": "R R"}
BOTH = {r"(q|k|v|gate|up)_proj": "SS0,2 S0", r"(o|down)_proj": "S0 S1", "": "S0 R"}


def tree(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Parameters of these names and shapes, all zero."""
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, last = name.split(".")
        for key in path:
            if key not in module._modules:
                module.add_module(key, nn.Module())
            module = module._modules[key]
        module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=dtype), False))
    return root


def divide(module: nn.Module, how: Mapping[str, str], shape: tuple[int, int]) -> None:
    """Makes DTensors of the parameters, as placements say of the first pattern that is in a name."""
    mesh = device_mesh(range(shape[0] * shape[1]), shape, ("dp", "tp"))
    for name, parameter in list(module.named_parameters()):
        text = next(text for pattern, text in how.items() if re.search(pattern, name))
        made = distribute_tensor(parameter, mesh, placements_of(text), src_data_rank=None)
        owner = module.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(made, False))


def filled(rank: int, path: str, wanted: str, how: str) -> list[str]:
    """Loads under that layout; names of what is not its slice of the numbers in the file `wanted`."""
    from torch.distributed.fsdp import fully_shard

    whole = load_file(wanted)
    module = tree({name: tuple(full.shape) for name, full in whole.items()})
    if how == "FSDP2":
        fully_shard(module, mesh=device_mesh(range(8), (8,)))
    elif how == "tensor parallel on four":
        divide(module, TENSOR_PARALLEL, (1, 4))
    else:
        divide(module, BOTH, (4, 2))
    smt.load_weights(path, module, format=formats.FP8Blocks())
    layouts = smt.layout_of(module)
    found = {name: local_of(parameter) for name, parameter in module.named_parameters()}
    return [
        name
        for name, lies in layouts.items()
        if rank in lies.mesh and not same(found[name], part(lies, rank, whole[name]))
    ]


def by_hand(rank: int, path: str, name: str, text: str) -> Any:
    """Loads data and scales of a tensor under its format's layouts, and dequantizes: the numbers, or why not."""
    one = formats.FP8Blocks()
    stored = smt.open_checkpoint(path)
    shape, _ = stored.shapes[name]

    def load() -> torch.Tensor:
        lies = sm.Layout(shape, sm.Mesh(dp=2, tp=4), text)
        data, scales = one.layouts(lies, name)
        found = smt.load(stored, {name: data, f"{name}_scale_inv": scales})
        own = [found[key].numpy() for key in (name, f"{name}_scale_inv")]
        return torch.from_numpy(one.dequantize(*own)).to(torch.bfloat16)

    return caught(lambda: load().tolist())


def in_other_formats(rank: int, path: str) -> Any:
    """Ranks say that tiles are not the same."""
    module = tree({"q_proj.weight": (300, 130)})
    one = formats.FP8Blocks(power_of_two=rank == 3)
    return caught(lambda: smt.load_weights(path, module, format=one))
