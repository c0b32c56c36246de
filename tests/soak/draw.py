"""What a soak moves: random plans of a few tensors on four ranks, what fills them, and what is asked of each move.

All ranks draw the same from the same seed, so they need not tell each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

import shardmath as sm
from shardmath import transforms

SIZE = 4

MESHES = (
    sm.Mesh(x=4),
    sm.Mesh(x=2, y=2),
    sm.Mesh({"x": 2, "y": 2}, ranks=(3, 1, 2, 0)),
    sm.Mesh(x=3, ranks=(0, 2, 3)),
    sm.Mesh(x=2, ranks=(1, 3)),
)

KINDS = ("direct", "program", "all", "once", "changes", "all changes", "cast", "all cast")

ASKED = ("plain", "acknowledge", "digest", "label", "beside", "block", "wrong")

DTYPES = ("float32", "bfloat16", "int8", "float64")

LARGE = 600_000
"""Elements of a tensor that is longer than one message over gloo is without care."""

Rng = np.random.Generator
Array = np.ndarray[Any, np.dtype[Any]]


class Asked(NamedTuple):
    """One step: of which lanes, and how it is asked for."""

    how: str
    lanes: tuple[str, ...]


def draw_layout(rng: Rng, shape: tuple[int, ...], dtype: str) -> sm.Layout:
    """Every axis of a random mesh cuts a dimension, or copies."""
    mesh = MESHES[rng.integers(len(MESHES))]
    spec = {}
    for axis, _ in mesh.axes:
        d = int(rng.integers(len(shape)))
        choices = [
            sm.Shard(d),
            sm.BlockCyclic(d, max(int(rng.integers(1, 4)), shape[d] // 16)),
            sm.Replicate(),
        ]
        spec[axis] = choices[rng.integers(3)]
    return sm.Layout(shape, mesh, spec, dtype=dtype)


def draw_sides(rng: Rng, kind: str) -> tuple[dict[str, sm.Layout], dict[str, sm.Layout]]:
    """A few tensors on both sides."""
    src, dst = {}, {}
    for k in range(int(rng.integers(1, 5))):
        shape = tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 4)))
        if rng.random() < 0.05:
            shape = (LARGE,)
        dtype = "float32" if "cast" in kind else DTYPES[rng.integers(len(DTYPES))]
        src[f"t{k}"] = draw_layout(rng, shape, dtype)
        dst[f"t{k}"] = draw_layout(rng, shape, dtype)
    return src, dst


def cast(src: dict[str, sm.Layout], dst: dict[str, sm.Layout]) -> transforms.Transformed:
    """The same tensors, which travel in bfloat16."""
    return sm.transforms.transformed(
        src, dst, dict.fromkeys(src, transforms.Cast("bfloat16", lossy=True))
    )


def draw_content(rng: Rng, layout: sm.Layout) -> torch.Tensor:
    """A tensor of random bits."""
    nbytes = int(np.prod(layout.shape)) * layout.itemsize
    words = torch.from_numpy(np.frombuffer(rng.bytes(nbytes), np.uint8).copy())
    if layout.dtype == "float32":
        # A cast keeps only some bits of a NaN, so there are none.
        return torch.from_numpy(rng.standard_normal(layout.shape).astype(np.float32))
    return words.view(getattr(torch, layout.dtype)).reshape(layout.shape)


def change_some(rng: Rng, content: torch.Tensor) -> None:
    """Give a few elements other bits."""
    flat = content.reshape(-1).view(torch.uint8)
    places = rng.integers(0, len(flat), max(1, len(flat) // 2000))
    # The least byte: so no number becomes NaN.
    places -= places % content.element_size()
    flat[torch.from_numpy(places)] ^= 1


def cut(content: torch.Tensor, layout: sm.Layout, rank: int) -> torch.Tensor:
    """What the rank holds of the tensor; padding has all bits set."""
    local = torch.empty(layout.local_shape(rank), dtype=content.dtype)
    local.reshape(-1).view(torch.uint8).fill_(255)
    for here, there in layout.boxes(rank):
        mine = tuple(slice(*one) for one in here)
        local[mine] = content[tuple(slice(*one) for one in there)]
    return local


def draw_step(rng: Rng, lanes: list[str], kinds: dict[str, str]) -> Asked:
    """What is done next."""
    how = ASKED[rng.choice(len(ASKED), p=(0.3, 0.1, 0.15, 0.1, 0.15, 0.1, 0.1))]
    if how == "block":
        named = [lane for lane in lanes if kinds[lane].startswith("all")]
        return Asked(how, tuple(named))
    if how == "beside":
        first, second = rng.permutation(len(lanes))[:2]
        return Asked(how, (lanes[first], lanes[second]))
    one = lanes[rng.integers(len(lanes))]
    if how == "wrong" and kinds[one] == "once":
        # What is wrong there breaks the group, as it says.
        how = "plain"
    return Asked(how, (one,))
