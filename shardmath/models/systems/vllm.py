"""vLLM: the storage of an engine, under its own names.

1. `vllm` gives the rows (`vllm_rows`), two meshes over the same ranks, and the spot of each layer. World rank is
   `(dp * PP + pp) * TP + tp`, dp slowest.
2. Data parallelism cuts experts: the experts of a pipeline stage lie on all its ranks, in the order dp, tp. With `ep`
   they are dealt whole, otherwise each is cut.
3. Layers keep their global numbers. If stages do not divide them, the last stage but one has one more, then the stage
   before it.
4. Models that vLLM cannot load, such as heads that tp does not divide, are errors when tensors are bound.

Source: vLLM 0.33.0, `distributed/utils.py`, `layers/fused_moe`, `layers/linear.py`.

>>> config = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 8}
>>> side = vllm({**config, "vocab_size": 100}, ranks=range(4), tp=2, pp=2)
>>> side.meshes
(Mesh(dp=1, pp=2, tp=2), Mesh(pp=2, ep=1, etp=2))
>>> side.indices["l"][1]
Spot(coords={'pp': 0}, chunk=0, number=1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardmath.base.arguments import known
from shardmath.base.errors import StoreError
from shardmath.base.moved import forward_names
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage.stored import Spot, Stored, replicates
from shardmath.models.systems.config import DRAFTS_ALONE, Config
from shardmath.models.systems.placing import divide_layers, place_layers
from shardmath.models.systems.vllm_rows import INTERLEAVES, VLLMForm, draft_table, table

__all__ = ["expert_tile", "vllm"]

if not TYPE_CHECKING:  # A type checker would believe that the module has every name.
    __getattr__ = forward_names(
        __name__,
        {
            "HALVES": "shardmath.models.systems.former.HALVES",
            "KV": "shardmath.models.systems.former.KV",
            "engine": "shardmath.models.systems.former.engine",
        },
    )

PLACEMENTS = ("linear", "round_robin")


class _Backend(NamedTuple):
    """What a backend of experts does to their storage.

    The multiple to which rows and columns of a rank's part of an expert are padded; the order of gate and up once
    weights are `processed`, "" if no row describes it, and the same for `tiled` FP8 experts; whether the backend
    `refines` FP8 tiles, which it reads in any size. Others get whole tiles of FP8 experts.
    """

    tile: int = 1
    processed: str = ""
    tiled: str = ""
    refines: bool = False


BACKENDS = {
    "triton": _Backend(processed="parts", tiled="parts", refines=True),
    "batched_triton": _Backend(processed="parts", tiled="parts", refines=True),
    "flashinfer_cutlass": _Backend(processed="swapped", tiled="swapped"),
    "flashinfer_trtllm": _Backend(tile=128, processed="blocked"),
    "cpu": _Backend(refines=True),
    # vLLM refines tiles before it chooses one, and then only among those that read these.
    "auto": _Backend(refines=True),
    # Of FP8 experts as they were loaded; vLLM has none of these for others without a quantization.
    **dict.fromkeys(("cutlass", "emulation", "hpc"), _Backend(tiled="parts")),
    **dict.fromkeys(
        (
            "aiter",
            "aiter_mega_moe",
            "aiter_triton_mxfp4_bf16",
            "aiter_triton_mxfp4_mxfp4",
            "b12x",
            "deep_gemm",
            "deep_gemm_mega_moe",
            "flashinfer_b12x",
            "flashinfer_cutedsl",
            "flashinfer_moe_ep_cutedsl",
            "flashinfer_moe_ep_mega_deep_gemm",
            "flydsl",
            "humming",
            "marlin",
            "rdna3",
            "triton_unfused",
            "xpu",
        ),
        _Backend(),
    ),
}
"""Backends of experts: all words of vLLM's option `--moe-backend`, and the backends of CPUs and Intel's GPUs."""
MOST_PADDED = 128
"""The multiple of the rows of an expert's part that no backend pads."""
UNREPEATED = ("gptoss",)
"""Kinds of model that vLLM does not load on more ranks than key heads."""
SMALLEST_TILE = 32
"""The smallest tile into which vLLM cuts the tiles of FP8 experts."""
VOCAB_MULTIPLE = 64
WHOLE_SHARED = ("deepseekv2", "deepseekv3", "nemotronh", "llama4", "qwen3next", "qwen35moe")
"""Kinds of model with whole shared experts on each rank if vLLM divides tokens instead."""


def vllm(
    config: object,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: bool = False,
    placement: str = "linear",
    redundant: int = 0,
    backend: str = "triton",
    stages: Sequence[int] | None = None,
    processed: bool = False,
    draft: bool = False,
    unknown: str = "refuse",
) -> Stored:
    """Return a Stored that says how the `ranks` of a vLLM engine store a model with this Hugging Face `config`, given
    its parallel sizes and the options below.

    `ep` deals experts whole, by `placement`, with `redundant` copies of the first ones; `backend` is the experts'
    backend, as in vLLM's option `--moe-backend`; `stages` are the layers of each pipeline stage, vLLM's own choice if
    not given; `processed` is the storage after `process_weights_after_loading`, `draft` the model that predicts further
    tokens; `unknown` is "refuse" or "replicate". Raises MeshError if ranks do not factor, StoreError if layers do not
    fit the stages, for an unknown word, for processed weights whose order rows cannot describe, and for the backend
    "auto" where the storage depends on vLLM's choice.
    """
    fields = Config(config)
    meshes = _make_meshes(ranks, tp, pp, dp, ep)
    deal = _choose_deal(fields, dp, ep, placement, redundant)
    backend = _name_backend(backend)
    of_backend = BACKENDS[backend]
    parts = 1 if ep else tp * dp
    if backend == "auto" and fields.experts:
        _check_chosen(fields, parts, processed)
    gated = _choose_gated(fields, backend) if processed else "parts"
    whole = _has_whole_tiles(fields, parts, of_backend)
    form = VLLMForm(deal, gated, fields.tile is not None, replicates(unknown), whole)
    make = draft_table if draft else table
    layers = _place_layers(fields, pp, stages)
    experts = _list_expert_numbers(fields, parts, redundant, of_backend.tile)
    # If vLLM divides tokens over ranks, it does not divide shared experts: all tp ranks hold them alike.
    has_whole_shared = ep and dp > 1 and fields.kind in WHOLE_SHARED
    numbers = {**_list_numbers(fields, tp), **experts, "alike": tp if has_whole_shared else 1}
    if fields.tile is not None:
        numbers |= _list_tile_numbers(fields, parts, backend)
    return Stored(make(fields.kind, form), meshes, layers, numbers)


def _name_backend(backend: str) -> str:
    """The name of the backend in `BACKENDS`, spelled as vLLM's option allows. Raises StoreError for an unknown name."""
    plain = backend.lower().replace("-", "_") if isinstance(backend, str) else backend
    chosen = known(plain, tuple(BACKENDS))
    if chosen is None:
        listed = ", ".join(BACKENDS)
        raise StoreError(f"backend={backend!r} is not a backend of experts; use one of {listed}")
    return chosen


def _check_chosen(config: Config, parts: int, processed: bool) -> None:
    """Raise StoreError if experts are stored as the backend that vLLM chooses needs them: once they are processed, or
    if a part's rows are padded. FP8 tiles are not padded for a backend that vLLM chooses."""
    is_padded = config.tile is None and config.expert_ffn // parts % MOST_PADDED > 0
    if processed or is_padded:
        how = "processed" if processed else "padded"
        what = f"backend='auto' lets vLLM choose the backend, and the backend decides how experts are {how}"
        fix = "pass the backend that vLLM has chosen, which its log names, such as 'triton'"
        raise StoreError(f"{what}; {fix}")


def _choose_gated(config: Config, backend: str) -> str:
    """The order of gate and up in an expert whose weights are processed: "parts", "swapped" for up first, or "blocked"
    for blocks with up first. Raises StoreError if rows cannot describe it."""
    if not config.experts:
        return "parts"
    chosen = BACKENDS[backend]
    gated = chosen.processed if config.tile is None else chosen.tiled
    what = ""
    if not gated:
        what = "FP8 experts" if chosen.processed else "experts"
    elif gated != "parts" and config.kind in INTERLEAVES:
        what = "experts that store gate and up row by row in turn"
    if what:
        raise StoreError(
            f"backend={backend!r} arranges processed {what} in a way that no row describes; "
            f"pass processed=False, and refit before weights are processed"
        )
    return gated


def _make_meshes(ranks: Iterable[int], tp: int, pp: int, dp: int, ep: bool) -> tuple[Mesh, Mesh]:
    """The meshes of dense tensors and of routed experts. Raises MeshError if ranks do not factor."""
    dense = Mesh(dp=dp, pp=pp, tp=tp, ranks=ranks)
    # World ranks count dp slowest, so the ranks of one stage are not consecutive.
    stages = dense.transpose(["pp", "dp", "tp"]).merge(["dp", "tp"], into="parts")
    size = dp * tp
    return dense, stages.split("parts", ep=size if ep else 1, etp=1 if ep else size)


def _choose_deal(config: Config, dp: int, ep: bool, placement: str, redundant: int) -> str:
    """The way in which experts are dealt. Raises StoreError for an unknown placement."""
    chosen = known(placement, PLACEMENTS)
    if chosen is None:
        listed = ", ".join(PLACEMENTS)
        raise StoreError(f"placement={placement!r} is not an option; use one of {listed}")
    if not ep:
        return "linear"
    if redundant:
        return "redundant"
    # vLLM falls back to linear, with only a line in its log, if experts have no groups, or if dp > 1, which takes
    # all-to-all kernels.
    grouped = int(config.get("n_group", 1)) > 1
    return chosen if grouped and dp == 1 else "linear"


def _place_layers(
    config: Config, pp: int, stages: Sequence[int] | None
) -> dict[str, tuple[Spot, ...]]:
    """The spot of each layer. Layers that predict further tokens are numbered behind the others, or alone."""
    # The last stage has the head, and the first the embedding: extra layers go to the stages just before the last.
    counts = divide_layers(config.layers, pp, spared=1) if stages is None else stages
    layers = place_layers(counts, layers=config.layers, pp=pp)
    first = 0 if config.kind in DRAFTS_ALONE else config.layers
    further = tuple(Spot({"pp": pp - 1}, 0, first + m) for m in range(config.drafts))
    return {"l": layers, "m": further}


def _list_expert_numbers(config: Config, parts: int, redundant: int, tile: int) -> dict[str, int]:
    """The values of the numbers in experts' rows, for experts cut into this number of parts, each padded to a multiple
    of `tile`."""
    return {
        "slots": config.experts + redundant,
        "tile": tile,
        # So wide that the first part has all of a bias, and the other parts are padding.
        "wide": config.hidden * parts,
        "own_ffn": config.ffn // parts,
    }


def expert_tile(
    config: object, *, tp: int = 1, dp: int = 1, ep: bool = False, backend: str = "triton"
) -> tuple[int, int] | None:
    """Return the rows and columns of the tiles for which a vLLM engine stores a scale of its routed experts, given a
    model's Hugging Face `config` and the arguments of `vllm`; None for a model without such scales. The tiles are
    smaller than the checkpoint's if ranks would cut these. Raises StoreError for an unknown backend.

    >>> config = {"hidden_size": 512, "moe_intermediate_size": 384}
    >>> config["quantization_config"] = {"weight_block_size": [128, 128]}
    >>> expert_tile(config, tp=2), expert_tile(config, tp=4), expert_tile(config, tp=4, ep=True)
    ((64, 64), (32, 32), (128, 128))
    """
    fields = Config(config)
    parts = 1 if ep else tp * dp
    tile = fields.tile
    refines = BACKENDS[_name_backend(backend)].refines
    if tile is None or not refines or not _cuts_tiles(fields, parts):
        return tile
    # As `refine_fp8_moe_block_shape` does; it repeats the scales of larger tiles, which changes no value.
    size = math.gcd(*tile, fields.expert_ffn // parts, fields.hidden)
    return tile if size < SMALLEST_TILE else (size, size)


def _cuts_tiles(config: Config, parts: int) -> bool:
    """Whether experts that are divided into this number of parts are cut inside a tile, or joined inside one."""
    rows, columns = config.tile or (1, 1)
    own = config.expert_ffn // parts
    return own % rows > 0 or (parts > 1 and own % columns > 0)


def _has_whole_tiles(config: Config, parts: int, backend: _Backend) -> bool:
    """Whether parts of experts are made of whole tiles, so that the last ranks have fewer, and padding."""
    if parts == 1 or backend.refines or not _cuts_tiles(config, parts):
        return False
    # As in `pad_tp_shard_to_weight_blocks`: vLLM cannot load other experts, and binding them raises.
    rows, columns = config.tile or (1, 1)
    return rows == columns and config.expert_ffn % rows == 0 and config.hidden % rows == 0


def _list_tile_numbers(config: Config, parts: int, backend: str) -> dict[str, int]:
    """The sizes of tiles: those of all weights, and those of experts; and the length of experts with whole tiles."""
    rows, columns = config.tile or (1, 1)
    own = -(-config.expert_ffn // parts)
    tiles = -(-own // rows)
    finer = expert_tile(config.given, tp=parts, backend=backend) or (rows, columns)
    return {
        "tile_rows": rows,
        "tile_columns": columns,
        "expert_tile_rows": finer[0],
        "expert_tile_columns": finer[1],
        "whole": parts * tiles * rows,
        "whole_scales": parts * tiles,
    }


def _list_numbers(config: Config, tp: int) -> dict[str, int]:
    """The values of the numbers in all rows except experts'."""
    vocab = int(config.get("vocab_size", 0))
    return {
        "vocab": -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hd": config.head_dim,
        # Without repeated heads, a tp above their number does not divide them, which is an error in binding.
        "rep": 1 if config.kind in UNREPEATED else max(1, tp // config.kv_heads),
        "own": max(1, config.heads // tp),
        "own_keys": max(1, config.kv_heads // tp),
        "own_linear": max(1, config.linear_key_heads // tp),
        "group": max(1, int(config.get("ssm_state_size", 1))),
        "shared": tp if config.groups == 1 else 1,
    }
