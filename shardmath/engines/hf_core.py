"""Hugging Face checkpoints: how one stores a model, and which logical tensors it has.

1. A checkpoint is one rank that stores everything. Read forwards, its rows (`hf_rows`) say how to make the
   checkpoint's tensors; read backwards, which logical tensors there are, and their shapes.
2. The numbers of rows come from the configuration: a mapping of its fields, or an object that has them.

>>> config = {"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
>>> config |= {"num_hidden_layers": 1}
>>> logical_shapes(config, {"model.layers.0.self_attn.qkv_proj.weight": ((16, 8), "float32")})
{'model.layers.0.self_attn.q_proj.weight': ((8, 8), 'float32'),
 'model.layers.0.self_attn.k_proj.weight': ((4, 8), 'float32'),
 'model.layers.0.self_attn.v_proj.weight': ((4, 8), 'float32')}
"""

from __future__ import annotations

from shardmath.algebra.mesh import Mesh
from shardmath.engines.config import Config
from shardmath.engines.hf_rows import table
from shardmath.engines.reading import read_logical
from shardmath.storage import rows
from shardmath.storage.stored import Shapes, Spot, Stored

__all__ = ["hf_checkpoint", "logical_shapes"]


def hf_checkpoint(config: object) -> Stored:
    """How the checkpoint of a model of this configuration stores it, on one rank."""
    fields = Config(config)
    mesh = Mesh(checkpoint=1)
    return Stored(
        rows.parse(table(fields.kind)), (mesh,), _list_layers(fields), _list_numbers(fields)
    )


def logical_shapes(config: object, checkpoint: Shapes) -> Shapes:
    """The logical tensors of a checkpoint whose tensors have these shapes and dtypes.

    Raises StoreError for shapes that the configuration's numbers do not fit.
    """
    return read_logical(hf_checkpoint(config), checkpoint)


def _list_layers(config: Config) -> dict[str, tuple[Spot, ...]]:
    """Layers under their own numbers, and behind them those that predict further tokens."""
    layers = tuple(Spot({}, 0, n) for n in range(config.layers))
    further = tuple(Spot({}, 0, config.layers + m) for m in range(config.drafts))
    return {"l": layers, "m": further} if config.layers else {}


def _list_numbers(config: Config) -> dict[str, int]:
    """What the words of rows stand for."""
    inner = int(config.get("mamba_num_heads", 0)) * int(config.get("mamba_head_dim", 0))
    return {
        "queries": config.heads * config.head_dim,
        "keys": config.kv_heads * config.head_dim,
        "heads": config.heads,
        "ffn": config.ffn,
        "inner": inner,
        "state": config.groups * int(config.get("ssm_state_size", 0)),
    }
