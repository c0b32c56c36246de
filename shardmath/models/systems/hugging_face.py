"""Hugging Face checkpoints: the storage of a model in one, and the logical tensors of one.

1. A checkpoint is one rank that stores everything. Its rows (`hugging_face_rows`) make the checkpoint's tensors from
   logical ones; read backwards, they give the logical tensors, with shapes, of a checkpoint.
2. The numbers in rows come from the configuration: a mapping of its fields, or an object with them as attributes.

>>> config = {"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
>>> config |= {"num_hidden_layers": 1}
>>> logical_shapes(config, {"model.layers.0.self_attn.qkv_proj.weight": ((16, 8), "float32")})
{'model.layers.0.self_attn.q_proj.weight': ((8, 8), 'float32'),
 'model.layers.0.self_attn.k_proj.weight': ((4, 8), 'float32'),
 'model.layers.0.self_attn.v_proj.weight': ((4, 8), 'float32')}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmath.base.moved import forward_names
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage import rows
from shardmath.models.storage.names import STARS, split
from shardmath.models.storage.rows import Row
from shardmath.models.storage.stored import Shapes, Spot, Stored
from shardmath.models.systems.config import DRAFTS_APART, Config
from shardmath.models.systems.hugging_face_rows import table
from shardmath.models.systems.reading import read_logical

__all__ = ["hugging_face", "logical_shapes"]

if not TYPE_CHECKING:  # A type checker would believe that the module has every name.
    __getattr__ = forward_names(
        __name__, {"hf_checkpoint": "shardmath.models.systems.hugging_face.hugging_face"}
    )


def hugging_face(config: object, names: Iterable[str] = ()) -> Stored:
    """Return a Stored that says how a Hugging Face checkpoint (taken as one rank) stores a model with this `config`. If
    `names`, the checkpoint's tensor names, are given, storage rules for tensors with other names are left out.

    Rows with other names are omitted. Without names, only fused tensors that belong to the kind of model are included.
    """
    fields = Config(config)
    templates = {split(name)[0] for name in names}
    table_rows = rows.parse(table(fields.kind, fused=bool(templates)))
    if templates:
        table_rows = tuple(row for row in table_rows if _is_among(row, templates))
    mesh = Mesh(checkpoint=1)
    return Stored(table_rows, (mesh,), _list_layers(fields), _list_numbers(fields))


def _is_among(row: Row, templates: set[str]) -> bool:
    """Whether one of these `templates` of tensors' names is the row's; True for an open row, which may take any."""
    if row.native.is_open:
        return True
    return any(row.native.template(star=star) in templates for star in STARS)


def logical_shapes(config: object, checkpoint: Shapes) -> Shapes:
    """Return the shape and dtype of each logical tensor, by name: this function splits fused tensors in `checkpoint`,
    such as qkv. `config`, the model's Hugging Face configuration, has the sizes of their parts.

    Raises StoreError for shapes that do not fit the configuration's numbers.
    """
    return read_logical(hugging_face(config, checkpoint), checkpoint)


def _list_layers(config: Config) -> dict[str, tuple[Spot, ...]]:
    """The spots of layers, under their own numbers, and of layers behind them or apart that predict further tokens."""
    layers = tuple(Spot({}, 0, n) for n in range(config.layers))
    first = 0 if config.kind in DRAFTS_APART else config.layers
    further = tuple(Spot({}, 0, first + m) for m in range(config.drafts))
    return {"l": layers, "m": further}


def _list_numbers(config: Config) -> dict[str, int]:
    """The values of the numbers in rows."""
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    return {
        "queries": queries,
        "keys": keys,
        "heads": config.heads,
        "groups": config.kv_heads,
        "query_pairs": queries // 2,
        "key_pairs": keys // 2,
        "ffn": config.ffn,
        "inner": config.inner,
        "state": config.state,
        "key_heads": config.linear_key_heads,
        "linear_keys": config.linear_keys,
        "linear_values": config.linear_values,
    }
