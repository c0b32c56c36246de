"""The second figure of docs/storage.md: where the rows of qkv_proj on an engine's rank come from.

python tools/stored_figure.py      # writes docs/stored.svg
"""

from __future__ import annotations

from pathlib import Path

import shardmath as sm
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.models.systems.vllm import vllm

FIGURE = Path(__file__).parents[1] / "docs" / "stored.svg"

VOCAB = 100
MEGATRON = {
    "num_layers": 1,
    "hidden_size": 32,
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
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
}


def figure() -> str:
    """The picture of the page's refit."""
    trainer = megatron(MEGATRON, ranks=range(2), tp=2, vocab=VOCAB)
    engine = vllm(LLAMA, ranks=range(2, 6), tp=4)
    shapes = logical_shapes(MEGATRON, vocab=VOCAB, dtype="bfloat16")
    planned = sm.refit(trainer, engine, shapes)
    return planned.svg("model.layers.0.self_attn.qkv_proj.weight", rank=4)


if __name__ == "__main__":
    FIGURE.write_text(figure())
