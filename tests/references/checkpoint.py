"""Checkpoints: a transformers model's weights by the names of published checkpoints, an expert at a time.

Nothing in this folder knows of shardmath: what it says was read off Megatron-Core, vLLM and transformers, and is
written in loops, as slowly and plainly as can be.

>>> weights = unstack({"mlp.experts.gate_up_proj": np.arange(8).reshape(2, 4, 1)})
>>> {name: array.ravel().tolist() for name, array in weights.items()}
{'mlp.experts.0.gate_proj.weight': [0, 1], 'mlp.experts.0.up_proj.weight': [2, 3],
 'mlp.experts.1.gate_proj.weight': [4, 5], 'mlp.experts.1.up_proj.weight': [6, 7]}
>>> stack(weights)["mlp.experts.gate_up_proj"].ravel().tolist()
[0, 1, 2, 3, 4, 5, 6, 7]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Array",
    "Order",
    "Shapes",
    "Weights",
    "count_experts",
    "cut",
    "draw",
    "number",
    "stack",
    "unstack",
]

Array: TypeAlias = NDArray[Any]
Weights: TypeAlias = dict[str, Array]
Order: TypeAlias = Mapping[str, tuple[str, ...]]
"""In which order components are fused, by what they are fused into."""
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
STACKED = ("gate_up_proj", "up_proj", "down_proj")


def unstack(state: Mapping[str, Array]) -> Weights:
    """A transformers state, whose experts are one tensor, gate over up, as checkpoints have them."""
    weights: Weights = {}
    for name, array in state.items():
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts") or last not in STACKED:
            weights[name] = array
            continue
        for expert, matrix in enumerate(array):
            if last == "gate_up_proj":
                half = len(matrix) // 2
                weights[f"{prefix}.{expert}.gate_proj.weight"] = matrix[:half]
                weights[f"{prefix}.{expert}.up_proj.weight"] = matrix[half:]
            else:
                weights[f"{prefix}.{expert}.{last}.weight"] = matrix
    return weights


def stack(weights: Mapping[str, Array]) -> Weights:
    """The transformers state of a checkpoint."""
    state: Weights = {}
    experts: dict[str, list[Array]] = {}
    for name, array in weights.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            state[name] = array
            continue
        prefix, expert, last = found.groups()
        gate = weights.get(f"{prefix}.{expert}.gate_proj.weight")
        if last == "up_proj" and gate is not None:
            fused = np.concatenate([gate, array])
            experts.setdefault(f"{prefix}.gate_up_proj", []).append(fused)
        elif last != "gate_proj":
            experts.setdefault(f"{prefix}.{last}", []).append(array)
    return state | {name: np.stack(matrices) for name, matrices in experts.items()}


def count_experts(weights: Mapping[str, Array], prefix: str) -> int:
    """Routed experts of a layer."""
    count = 0
    while f"{prefix}.{count}.down_proj.weight" in weights:
        count += 1
    return count


def draw(shapes: Shapes, seed: int) -> Weights:
    """Random weights: so large that logits are, and that attention is far from uniform."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        drawn = random.standard_normal(shape)
        # Weights of norms are about 1; biases are too, where other values would do as well.
        value = drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + drawn / 2
        weights[name] = value.astype(np.float32)
    return weights


def number(shapes: Shapes) -> Weights:
    """Weights of which each element is its own number, from 1."""
    weights = {}
    start = 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        weights[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return weights


def cut(array: Array, index: int, parts: int, dim: int = 0) -> Array:
    """The part of this index, of so many equal ones along a dimension."""
    size, rest = divmod(array.shape[dim], parts)
    if rest:
        raise ValueError(f"{array.shape[dim]} positions do not fall into {parts} parts")
    return array.take(range(index * size, (index + 1) * size), axis=dim)
