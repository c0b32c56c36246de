"""The figure of docs/storage.md: heads of q, k and v in a checkpoint, in Megatron-Core and in vLLM.

python tools/qkv_figure.py      # writes docs/qkv.svg

What each rank stores is filled in by the library from the two systems' rows, on tensors that hold the numbers of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import shardmath as sm
from shardmath.display.pictures.elements import (
    Drawing,
    below,
    beside,
    box,
    document,
    ink,
    lines,
    palette,
    words,
)
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.models.systems.vllm import vllm

FIGURE = Path(__file__).parents[1] / "docs" / "qkv.svg"

HEADS = [
    f"{kind}{head}" for kind, count in {"q": 4, "k": 2, "v": 2}.items() for head in range(count)
]
SIZE, HIDDEN, VOCAB = 8, 32, 100
"""Rows of a head, columns of the tensors, and words."""
MEGATRON = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
}
WIDTH, HEIGHT = 64.0, 26.0
"""Pixels of a head."""


def list_heads(side: sm.storage.Stored, native: str, ranks: range) -> Mapping[str, list[str]]:
    """The heads in the stored tensor, by rank."""
    shapes = logical_shapes(MEGATRON, vocab=VOCAB, dtype="float32")
    arrays = {name: np.zeros(shape, np.float32) for name, (shape, _) in shapes.items()}
    for number, head in enumerate(HEADS):
        first = SIZE * int(head[1])
        name = f"model.layers.0.self_attn.{head[0]}_proj.weight"
        arrays[name][first : first + SIZE] = number
    bound = sm.storage.bind(side, shapes)
    heads = {}
    for rank in ranks:
        stored = sm.storage.fill(bound, arrays, rank)
        (rows,) = [array[::SIZE, 0] for (_, name), array in stored.items() if name == native]
        heads[f"rank {rank}"] = [HEADS[int(number)] for number in rows]
    return heads


def draw_tensor(label: str, heads: list[str]) -> Drawing:
    """One tensor, its heads from top to bottom."""
    colors = dict(zip("qkv", palette(3), strict=True))
    parts = [words(0, 10, label)]
    for i, head in enumerate(heads):
        y = 18 + i * HEIGHT
        color = colors[head[0]]
        parts.append(box(0, y, WIDTH, HEIGHT, fill=color, stroke="currentColor"))
        parts.append(words(WIDTH / 2 - 6, y + HEIGHT / 2 + 4, head, fill=ink(color)))
    return Drawing(WIDTH, 18 + HEIGHT * len(heads), tuple(parts))


def draw_system(title: str, tensors: Mapping[str, list[str]]) -> Drawing:
    """A system's tensors from left to right, under its title."""
    row = beside([draw_tensor(label, heads) for label, heads in tensors.items()], 10)
    return below([lines([title]), row], 6)


def figure() -> str:
    """Heads in the three systems."""
    trainer = megatron(MEGATRON, ranks=range(2), tp=2, vocab=VOCAB)
    engine = vllm(LLAMA, ranks=range(2, 6), tp=4)
    checkpoint = {f"{kind}_proj": [head for head in HEADS if head[0] == kind] for kind in "qkv"}
    native = "decoder.layers.0.self_attention.linear_qkv.weight"
    systems = [
        draw_system("checkpoint", checkpoint),
        draw_system("Megatron's linear_qkv, tp=2", list_heads(trainer, native, range(2))),
        draw_system(
            "vLLM's qkv_proj, tp=4",
            list_heads(engine, "model.layers.0.self_attn.qkv_proj.weight", range(2, 6)),
        ),
    ]
    return document(
        beside(systems, 36),
        "q, k and v in a checkpoint, in Megatron-Core and in vLLM",
        "Four query heads and two key-value heads, from the first row of each stored tensor to the last.",
    )


if __name__ == "__main__":
    FIGURE.write_text(figure())
