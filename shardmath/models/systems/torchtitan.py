"""torchtitan: the storage of a trainer, under its own names.

1. Tensor parallelism cuts first, and FSDP2 cuts its parts in dimension 0: as in `torch.chunk`, so that the last ranks
   may have less. With `ep` experts are dealt whole over `ep` and `efsdp`, otherwise they are cut like other layers.
   FSDP2 cuts dimension 1 of experts if torchtitan counts more ranks than experts (`expert_dim`). With context
   parallelism, `dp_shard` is the product of both, over which FSDP2 cuts.
2. Llama 3 rotates neighbors in a head, its checkpoint the two halves of a head. The rows of queries and keys are two
   tensors here, even and odd: pair by pair in torchtitan, head by head in the checkpoint (`checkpoint`) and in engines.
3. `stages` are the numbers of layers of pipeline stages; layers keep their global numbers.
4. Expert biases are buffers, which are whole on each rank.

Source: torchtitan 0.3.0 and 0.2.0, `models/*/state_dict_adapter.py`, `models/common/decoder_sharding.py`,
`models/common/moe_sharding.py`, `distributed/fsdp.py`, `distributed/parallel_dims.py`.

>>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
>>> side = torchtitan(config, ranks=range(8), dp_replicate=2, dp_shard=2, tp=2)
>>> print(side.rows[0])
tok_embeddings.weight @pp=0 = model.embed_tokens.weight : (tp fsdp n) h
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmath.base.arguments import known
from shardmath.base.errors import StoreError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage import rows
from shardmath.models.storage.stored import Shapes, Stored, replicates
from shardmath.models.systems.config import Config
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.placing import fill_sizes, place_layers
from shardmath.models.systems.reading import read_logical

__all__ = ["checkpoint", "logical_shapes", "torchtitan"]

TABLE = """
tok_embeddings.weight @pp=0   = model.embed_tokens.weight : (tp fsdp n) h
norm.weight @pp=-1            = model.norm.weight         : (fsdp n)
HEAD.weight @pp=-1            = lm_head.weight            : (tp fsdp n) h
also HEAD.weight @pp=-1       = model.embed_tokens.weight ! /lm_head.weight : (tp fsdp n) h
[layers.{l}. = model.layers.{l}.]
attention_norm.weight         = input_layernorm.weight          : (fsdp n)
ffn_norm.weight               = post_attention_layernorm.weight : (fsdp n)
[layers.{l}.attention. = model.layers.{l}.self_attn.]
QKV.wq.*                      = [q_even q_odd]_proj.* : (query_pairs (q_even + q_odd) | tp fsdp n) h
QKV.wk.*                      = [k_even k_odd]_proj.* : (key_pairs (k_even + k_odd) | tp fsdp n) h
wq.*                          = q_proj.*              ? kv_a_proj_with_mqa.weight : (tp fsdp n) h
QKV.wq.*                      = q_proj.*              : (tp fsdp n) h
QKV.wk.*                      = k_proj.*              : (tp fsdp n) h
QKV.wv.*                      = v_proj.*              : (tp fsdp n) h
wo.weight                     = o_proj.weight         : (fsdp h) (tp n)
wo.bias                       = o_proj.bias           : (fsdp n)
q_norm.weight                 = q_norm.weight         : (fsdp n)
k_norm.weight                 = k_norm.weight         : (fsdp n)
q_norm.weight                 = q_a_layernorm.weight  : (fsdp n)
kv_norm.weight                = kv_a_layernorm.weight : (fsdp n)
wq_a.weight                   = q_a_proj.weight       : (fsdp n) h
wkv_a.weight                  = kv_a_proj_with_mqa.weight : (fsdp n) h
wq_b.weight                   = q_b_proj.weight       : (tp fsdp n) h
wkv_b.weight                  = kv_b_proj.weight      : (tp fsdp n) h
[layers.{l}.feed_forward. = model.layers.{l}.mlp.]
DENSE
[layers.{l}.moe.shared_experts. = model.layers.{l}.mlp.shared_experts.]
DENSE
[layers.{l}.moe. = model.layers.{l}.mlp.]
router.gate.*                 = gate.*                : (fsdp n) h
BIAS                          = gate.e_score_correction_bias
EXPERTS.w1_EFD                = experts.{e}.gate_proj.weight : COLUMNS
EXPERTS.w3_EFD                = experts.{e}.up_proj.weight   : COLUMNS
EXPERTS.w2_EDF                = experts.{e}.down_proj.weight : ROWS
"""
DENSE = """
w1.weight                     = gate_proj.weight      : (tp fsdp n) h
w3.weight                     = up_proj.weight        : (tp fsdp n) h
w2.weight                     = down_proj.weight      : (fsdp h) (tp n)
"""
NAMES = {
    "0.3": {
        "HEAD": "lm_head",
        "QKV": "qkv_linear",
        "EXPERTS": "routed_experts.inner_experts",
        "BIAS": "expert_bias_E",
    },
    "0.2": {
        "HEAD": "output",
        "QKV.": "",
        "EXPERTS": "experts",
        "_EFD": "",
        "_EDF": "",
        "BIAS": "expert_bias",
    },
}
"""The names for words in the table, by version."""
ROUTED = {
    ("fsdp", 0): ("(fsdp e) (tp n) h", "(fsdp e) h (tp n)"),
    ("fsdp", 1): ("e (tp fsdp n) h", "e (fsdp h) (tp n)"),
    ("ep", 0): ("(ep efsdp e) n h", "(ep efsdp e) h n"),
    ("ep", 1): ("(ep e) (efsdp n) h", "(ep e) (efsdp h) n"),
}
"""Structures of experts' COLUMNS and ROWS, by the axis that deals them and the dimension that FSDP2 cuts."""
HALVES = """
[model.layers.{l}.self_attn. = model.layers.{l}.self_attn.]
q_proj.* = [q_even q_odd]_proj.* : (heads (q_even + q_odd)) h
k_proj.* = [k_even k_odd]_proj.* : (groups (k_even + k_odd)) h
"""
TURNED = ("llama",)
"""Kinds of model whose heads torchtitan rotates differently than their checkpoints."""
UNKNOWN = """
[layers.{l}. = model.layers.{l}.]
... = ...
[ = ]
... = ...
"""


def torchtitan(
    config: object,
    *,
    ranks: Iterable[int],
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    ep: int = 1,
    stages: Sequence[int] | None = None,
    expert_dim: int | None = None,
    names: str = "0.3",
    unknown: str = "refuse",
) -> Stored:
    """Return a Stored that says how the `ranks` of a torchtitan trainer store a model with this Hugging Face `config`,
    given its parallel sizes and the options below.

    Sizes are as in torchtitan's ParallelDims; `stages` are the layers of each pipeline stage, `expert_dim` is the
    dimension of experts that FSDP2 cuts, 0 or 1, the version's choice if not given, `names` the version whose names
    modules have, `unknown` "refuse" or "replicate". Raises MeshError if ranks do not factor, StoreError if layers do
    not fit the stages, and for an unknown word.
    """
    fields = Config(config)
    if known(names, tuple(NAMES)) is None:
        listed = ", ".join(NAMES)
        raise StoreError(f"names={names!r} is not a known version; use one of {listed}")
    counts = [fields.layers] if stages is None else stages
    layers = place_layers(counts, layers=fields.layers, pp=len(counts))
    sizes = {
        "pp": len(counts),
        "dp_replicate": dp_replicate,
        "fsdp": dp_shard,
        "tp": tp,
    }
    dense_mesh = Mesh(sizes, ranks=ranks)
    # Experts have the same ranks, with efsdp and ep instead of fsdp and tp; efsdp is what ep leaves.
    expert_sizes = fill_sizes(
        dp_shard * tp, {"efsdp": None, "ep": ep}, "ranks of dp_shard times tp"
    )
    shards = dense_mesh.merge(["fsdp", "tp"], into="shards")
    expert_mesh = shards.split("shards", **expert_sizes)
    if expert_dim is None:
        expert_dim = _choose_dim(fields.experts, sizes, ep, names)
    text = _write(expert_dim, ep, names)
    if replicates(unknown):
        text += UNKNOWN
    numbers = _list_numbers(fields)
    meshes = dense_mesh, expert_mesh
    return Stored(rows.parse(text), meshes, {"l": layers}, numbers, exact=False)


def _list_numbers(config: Config) -> dict[str, int]:
    """The values of the numbers in rows: pairs of neighbors in all heads."""
    pairs = config.head_dim // 2
    return {
        "query_pairs": config.heads * pairs,
        "key_pairs": config.kv_heads * pairs,
    }


def _choose_dim(experts: int, sizes: dict[str, int], ep: int, names: str) -> int:
    """The dimension of experts that FSDP2 cuts."""
    inner = sizes["fsdp"] * sizes["tp"]
    replicas = sizes["dp_replicate"]
    # Ranks that are compared with experts, by version and whether there is ep.
    counts = {
        ("0.3", True): inner,
        ("0.3", False): replicas * inner,
        ("0.2", True): replicas * inner,
        ("0.2", False): 0,
    }
    return int(counts[names, ep > 1] > experts)


def _write(expert_dim: int, ep: int, names: str) -> str:
    """The rows of a version, with experts cut in this dimension and dealt by ep or FSDP2."""
    text = TABLE.replace("DENSE", DENSE)
    for word, name in NAMES[names].items():
        text = text.replace(word, name)
    axis = "ep" if ep > 1 else "fsdp"
    columns, down = ROUTED[axis, expert_dim]
    text = text.replace("COLUMNS", columns)
    return text.replace("ROWS", down)


def checkpoint(config: object, names: Iterable[str] = ()) -> Stored:
    """Return a Stored that says how a Hugging Face checkpoint (taken as one rank) stores torchtitan's tensors. If
    `names`, the checkpoint's tensor names, are given, storage rules for tensors with other names are left out."""
    side = hugging_face(config, names)
    return side.extended(HALVES) if Config(config).kind in TURNED else side


def logical_shapes(config: object, shapes: Shapes) -> Shapes:
    """Return the shape and dtype of each torchtitan tensor, by name, from the `shapes` in a Hugging Face checkpoint."""
    return read_logical(checkpoint(config, shapes), shapes)
