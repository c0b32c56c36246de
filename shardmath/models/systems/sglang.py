"""SGLang: the storage of an engine, under its own names.

1. `sglang` gives the rows (`sglang_rows`), three meshes over the same ranks, and the spot of each layer. A replica's
   rank is `pp * TP + tp`; each replica is a separate world to SGLang, and replicas are numbered one after the other.
2. Within a stage the ranks of tp form a mesh adp, acp, atp for attention, and a mesh mdp, ep, etp for experts.
3. Layers keep their global numbers. If stages do not divide them, the last stages have one more.
4. A vocabulary is padded to a multiple of 64 or, if the ranks that share it do not divide that, of 64 per rank.

Source: SGLang 0.5.23, `srt/runtime_context.py`, `srt/distributed/utils.py`, `srt/layers/vocab_parallel_embedding.py`.

>>> config = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 8}
>>> side = sglang({**config, "vocab_size": 100}, ranks=range(8), tp=4, pp=2, ep=2, attn_dp=2)
>>> side.meshes[1:]
(Mesh(dp=1, pp=2, adp=2, acp=1, atp=2), Mesh(dp=1, pp=2, mdp=1, ep=2, etp=2))
>>> side.indices["l"][1]
Spot(coords={'pp': 1}, chunk=0, number=1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmath.base.errors import StoreError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage.stored import Stored, replicates
from shardmath.models.systems.config import Config
from shardmath.models.systems.placing import divide_layers, fill_sizes, place_layers
from shardmath.models.systems.sglang_rows import SGLangForm, table

__all__ = ["sglang"]

VOCAB_MULTIPLE = 64


def sglang(
    config: object,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    attn_dp: int = 1,
    attn_cp: int = 1,
    moe_dp: int = 1,
    moe_dense_tp: int | None = None,
    dp_lm_head: bool = False,
    whole_shared: bool = False,
    fused_shared: bool = False,
    stages: Sequence[int] | None = None,
    unknown: str = "refuse",
) -> Stored:
    """Return a Stored that says how the `ranks` of an SGLang engine store a loaded model with this Hugging Face
    `config`, given its parallel sizes and the options below.

    `dp` are replicas, `attn_dp` the data parallelism of attention within tp (`--dp-size` with `--enable-dp-attention`),
    `moe_dense_tp` and `dp_lm_head` as in SGLang's arguments, `whole_shared` for an all-to-all backend with shared
    experts on each rank, `fused_shared` unless `--disable-shared-experts-fusion`, `stages` the layers of each pipeline
    stage, SGLang's own choice if not given; `unknown` is "refuse" or "replicate". Raises MeshError if ranks do not
    factor, StoreError if layers do not fit the stages, and for options that rows cannot describe.
    """
    fields = Config(config)
    _check_options(fused_shared, moe_dense_tp, tp)
    whole = Mesh(dp=dp, pp=pp, tp=tp, ranks=ranks)
    attention = fill_sizes(tp, {"adp": attn_dp, "acp": attn_cp, "atp": None}, "ranks of tp")
    experts = fill_sizes(tp, {"mdp": moe_dp, "ep": ep, "etp": None}, "ranks of tp")
    meshes = (whole, whole.split("tp", **attention), whole.split("tp", **experts))
    counts = divide_layers(fields.layers, pp) if stages is None else stages
    layers = place_layers(counts, layers=fields.layers, pp=pp)
    form = SGLangForm(
        words_in="atp" if attn_dp > 1 else "tp",
        words_out="atp" if dp_lm_head else "tp",
        staged=pp > 1,
        scales=fields.tile is not None,
        unknown=replicates(unknown),
    )
    numbers = {
        **_list_numbers(fields, form, meshes),
        "dense": tp if moe_dense_tp == 1 else 1,
        "alike": tp if whole_shared else 1,
    }
    return Stored(table(fields.kind, form), meshes, {"l": layers}, numbers)


def _check_options(fused_shared: bool, moe_dense_tp: int | None, tp: int) -> None:
    """Raise StoreError for options that rows cannot describe."""
    if fused_shared:
        raise StoreError(
            "fused_shared=True: fused shared experts lie behind the routed ones of each rank, which no "
            "row describes; start SGLang with --disable-shared-experts-fusion, or record its loader"
        )
    if moe_dense_tp not in (None, 1, tp):
        what = f"moe_dense_tp={moe_dense_tp}: SGLang divides dense layers over 1 rank or tp={tp}"
        raise StoreError(f"{what}; pass 1 or {tp}")


def _list_numbers(
    config: Config, form: SGLangForm, meshes: tuple[Mesh, Mesh, Mesh]
) -> dict[str, int]:
    """The values of the numbers in rows, except for layers that options make whole."""
    dense, attention, experts = meshes
    tp = dense.axis_size("tp")
    atp = attention.axis_size("atp")
    etp = experts.axis_size("etp")
    parts = {"tp": tp, "atp": atp}
    return {
        "in_vocab": _pad_vocab(config, parts[form.words_in]),
        "out_vocab": _pad_vocab(config, parts[form.words_out]),
        "hd": config.head_dim,
        "rep": max(1, atp // config.kv_heads),
        "own": max(1, config.heads // atp),
        "own_keys": max(1, config.kv_heads // atp),
        "tile": 1,
        # So wide that the first part has all of a bias, and the other parts are padding.
        "wide": config.hidden * etp,
        "own_ffn": config.ffn // etp,
    }


def _pad_vocab(config: Config, parts: int) -> int:
    """Stored rows of a vocabulary over this number of ranks."""
    vocab = int(config.get("vocab_size", 0))
    padded = _round_up(vocab, VOCAB_MULTIPLE)
    # SGLang takes a larger multiple only if ranks could not divide the padded rows evenly.
    return _round_up(vocab, VOCAB_MULTIPLE * parts) if padded % parts else padded


def _round_up(count: int, multiple: int) -> int:
    """The next multiple from `count` on."""
    return -(-count // multiple) * multiple
