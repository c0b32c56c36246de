"""Megatron-Core: the storage of a trainer, under its own names.

1. `megatron` gives the rows (`megatron_rows`), two meshes over the same ranks, and the spot of each layer.
2. The order string names axes from the fastest. Dense tensors lie on a mesh of all axes except ep; routed experts on a
   mesh with etp instead of tp, without cp, and with ep and edp over the remaining ranks.
3. Layers are assigned to stages and virtual stages (chunks) in order: evenly, or with given numbers for the first and
   last stage, or by a layout string (`Et|(tt|)*3L`).

4. The fields that a configuration has say which version of Megatron-Core it belongs to (`RENAMES`). Version 0.17 names
   a further layer's modules `mtp_model_layer`, 0.19 a Mamba layer's convolution `mixer.conv1d_weight`.

Source: Megatron-Core 0.16.1 and 0.19.2, `parallel_state.py`, `transformer_layer.py`, `mamba_mixer.py`,
`pipeline_parallel_layer_layout.py`.

>>> side = megatron({"num_layers": 4, "num_attention_heads": 2}, ranks=range(8), tp=2, pp=2, ep=2, etp=1, vocab=100)
>>> side.meshes
(Mesh(pp=2, dp=2, cp=1, tp=2), Mesh(pp=2, edp=2, ep=2, etp=1))
>>> side.indices["l"][2], side.numbers
(Spot(coords={'pp': 1}, chunk=0, number=0), {'vocab': 256, 'groups': 2})
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from shardmath.base.arguments import known
from shardmath.base.errors import MeshError, StoreError
from shardmath.base.moved import forward_names
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.storage import rows
from shardmath.models.storage.stored import Spot, Stored, replicates
from shardmath.models.systems.megatron_rows import table
from shardmath.models.systems.megatron_shapes import (
    SINCE_0_17,
    SINCE_0_19,
    MegatronConfig,
    logical_shapes,
)
from shardmath.models.systems.placing import fill_sizes, place_layers

__all__ = ["logical_shapes", "megatron", "pad_vocab"]

if not TYPE_CHECKING:  # A type checker would believe that the module has every name.
    __getattr__ = forward_names(
        __name__,
        {
            "trainer": "shardmath.models.systems.former.trainer",
        },
    )

ORDER = "tp-cp-ep-dp-pp"
REPEAT = re.compile(r"\(([^()]*)\)\*(\d+)|([^()])\*(\d+)")
"""A repeated group, letter or end of a stage in a layout string."""

LETTERS = {"t": "decoder", "m": "mtp"}
"""Layers in a layout string; others are the embedding and the loss."""

OF_EXPERTS = {"tp": "etp", "dp": "edp", "ep": "ep", "pp": "pp"}
"""The routed experts' axis for each axis of the order."""

RENAMES = (
    (SINCE_0_17, ".transformer_layer.", ".mtp_model_layer."),
    (SINCE_0_19, "mixer.conv1d.*", "mixer.conv1d_*"),
)
"""(Field, old, new) parts of rows: if a configuration has the field, whatever its value, the new part is right."""

GROUPED = {
    (True, True): "stacked",
    (True, False): "stacked weights",
    (False, True): "stacked biases",
    (False, False): "grouped",
}
"""The form of TransformerEngine's grouped experts, by whether weights and biases are stacked."""

REARRANGED = (
    ("use_grouped_gemm_for_shared_expert", "shared experts"),
    ("use_grouped_gemm_for_dense_mlp", "dense MLPs"),
)
"""Fields with which TransformerEngine may keep gate and up of these modules interleaved, by its version."""

NORMS = ("check", "keep")

FIX = (
    "set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage, "
    "or pipeline_model_parallel_layout"
)


def pad_vocab(vocab: int, tp: int, multiple: int = 128) -> int:
    """Return the vocabulary size that Megatron stores: `vocab` rounded up to a multiple of `multiple` times `tp`."""
    step = multiple * tp
    return -(-vocab // step) * step


def megatron(
    config: object,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    order: str = ORDER,
    spec: str = "te",
    experts: str | None = None,
    vocab: int | None = None,
    vocab_multiple: int = 128,
    unknown: str = "refuse",
    pattern: str | None = None,
    norms: str = "check",
) -> Stored:
    """Return a Stored that says how the `ranks` of a Megatron trainer store a model with the TransformerConfig
    `config`, given its parallel sizes and the options below.

    `etp` is tp if not given, `order` the order of the axes, first fastest, `vpp` the virtual stages of a rank, `spec`
    "te" or "local", `experts` "grouped", "sequential", "stacked" or "legacy", by the configuration if not given,
    `vocab` the vocabulary before padding, `unknown` "refuse" or "replicate", `pattern` a hybrid model's.

    `norms` is "keep" to send weights of norms as they are stored. If it is "check", StoreError is raised if they are
    stored less one (`layernorm_zero_centered_gamma`).

    Raises MeshError if ranks do not factor, StoreError if layers do not fit the stages, and for options with which
    weights are stored as no row describes.
    """
    fields = MegatronConfig(config)
    _check_norms(fields, norms)
    if spec == "te":
        _check_arranged(fields)
    etp = tp if etp is None else etp
    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    meshes = _make_meshes(tuple(ranks), sizes, order)
    experts = experts or _find_experts(fields, spec)
    fused_down = spec == "te" and bool(fields.get("mla_down_proj_fusion"))
    text = table(spec, experts, unknown=replicates(unknown), fused_down=fused_down)
    text = _rename(text, fields, is_hybrid=bool(pattern or fields.get("is_hybrid_model")))
    numbers = _list_numbers(fields, etp)
    if "glu_blocks" in numbers and experts in GROUPED.values():
        # Blocks of gate and up alternate, so each rank has as many of either.
        text = text.replace("(etp (gate + up))", "(etp glu_blocks (gate + up))")
    if vocab is not None:
        numbers = {"vocab": pad_vocab(vocab, tp, vocab_multiple), **numbers}
    return Stored(rows.parse(text), meshes, _place_layers(fields, pp, vpp, pattern), numbers)


def _check_norms(config: MegatronConfig, norms: str) -> None:
    """Raise StoreError if norms are stored less one, unless they are to be sent as they are."""
    if known(norms, NORMS) is None:
        raise StoreError(f"norms={norms!r} is not known; use one of {', '.join(NORMS)}")
    if norms == "check" and config.get("layernorm_zero_centered_gamma"):
        what = "layernorm_zero_centered_gamma is set, so norms store their weights less one"
        fix = "pass norms='keep' if the other side stores them so, too, or if rules= of the refit add one"
        raise StoreError(f"{what}, and rows add nothing; {fix}")


def _check_arranged(config: MegatronConfig) -> None:
    """Raise StoreError if gate and up of a module may be interleaved in a way that depends on TransformerEngine."""
    for field, modules in REARRANGED:
        if config.get(field) and config.get("gated_linear_unit"):
            what = f"{field} is set, with which gate and up of {modules} may be interleaved"
            fix = "if they are not, pass the configuration as a mapping without this field"
            raise StoreError(f"{what}, as no row describes; {fix}")


def _list_numbers(config: MegatronConfig, etp: int) -> dict[str, int]:
    """The numbers in rows that follow from the configuration. Raises StoreError if blocks of gate and up do not fit."""
    numbers = {}
    if config.get("num_attention_heads"):
        numbers["groups"] = config.groups
    block = config.get("moe_mlp_glu_interleave_size")
    if block and config.get("gated_linear_unit"):
        blocks, rest = divmod(config.expert_ffn, etp * block)
        if rest:
            what = f"moe_mlp_glu_interleave_size={block} and etp={etp} do not divide experts of {config.expert_ffn}"
            raise StoreError(f"{what}; choose sizes that do")
        numbers["glu_blocks"] = blocks
    return numbers


def _rename(text: str, config: MegatronConfig, *, is_hybrid: bool) -> str:
    """The rows with the names of the configuration's version and kind of model."""
    if is_hybrid:
        text = text.replace("decoder.final_layernorm", "decoder.final_norm")
    # Megatron tests for None: with 0 further layers, too, the norm is behind the last layer.
    elif config.get("mtp_num_layers") is not None:
        # Further layers may be alone on the last stage; the norm is behind the last other layer.
        text = text.replace("decoder.final_layernorm.* @pp=-1", "decoder.final_layernorm.* @l=-1")
    for field, old, new in RENAMES:
        if field in config.fields:
            text = text.replace(old, new)
    return text


def _place_layers(
    config: MegatronConfig, pp: int, vpp: int, pattern: str | None
) -> dict[str, tuple[Spot, ...]]:
    """The spot of each layer. Layers that predict further tokens are numbered from 0."""
    stage_layout = config.get("pipeline_model_parallel_layout")
    stages = [] if stage_layout is None else _read_layout(stage_layout)
    main = (pattern or "").split("/")[0]
    if "|" in main:
        counts = [len(segment) for segment in main.split("|")]
    else:
        counts = [stage.count("decoder") for stage in stages] or _count_evenly(config, pp, vpp)
    layers = place_layers(counts, layers=config.layers, pp=pp, chunks=vpp, renumber=True, fix=FIX)
    stage, chunk = _find_further(stages, pp, vpp)
    further = tuple(Spot({"pp": stage}, chunk, m) for m in range(config.mtp))
    indices = {"l": layers, "m": further}
    if all(spot.chunk < vpp - 1 for spot in layers + further):
        # The head is in the last chunk even if no stage has a layer there; an index without rows says which this is.
        indices["last"] = (Spot({"pp": pp - 1}, vpp - 1, 0),)
    return indices


def _find_further(stages: list[list[str]], pp: int, vpp: int) -> tuple[int, int]:
    """The stage and the chunk of layers that predict further tokens: the last ones, unless the layout has others."""
    found = [position for position, stage in enumerate(stages) if "mtp" in stage]
    if not found:
        return pp - 1, vpp - 1
    chunk, stage = divmod(found[0], pp)
    if chunk > 0 and stage == 0:
        what = f"the layout has layers that predict further tokens in chunk {chunk} of stage 0"
        why = "which has the embedding in chunk 0, and no row describes a second copy there"
        raise StoreError(f"{what}, {why}; put them on another stage")
    return stage, chunk


def _find_experts(config: MegatronConfig, spec: str) -> str:
    """The form in which routed experts are stored."""
    if not config.get("moe_grouped_gemm"):
        return "sequential"
    if spec == "te":
        if config.get("moe_use_legacy_grouped_gemm"):
            return "legacy"
        weights = bool(config.get("moe_single_grouped_weight"))
        biases = bool(config.get("moe_single_grouped_bias"))
        return GROUPED[weights, biases]
    # From 0.17 on, Megatron's own modules of experts are not grouped, whatever the configuration says.
    return "sequential" if SINCE_0_17 in config.fields else "legacy"


def _make_meshes(ranks: tuple[int, ...], sizes: Mapping[str, int], order: str) -> tuple[Mesh, ...]:
    """The meshes of dense tensors and of routed experts. Raises MeshError if ranks do not factor."""
    names = _read_order(order)
    dense = [name for name in names if name != "ep"]
    routed = [OF_EXPERTS[name] for name in names if name != "cp"]
    # Data parallelism, dp or edp, has no given size: it gets the ranks that the other axes leave.
    return tuple(
        Mesh(fill_sizes(len(ranks), {axis: sizes.get(axis) for axis in axes}), ranks=ranks)
        for axes in (dense, routed)
    )


def _read_order(order: str) -> list[str]:
    """All axes, slowest first, by an order string, which names the fastest first. Axes that it omits are slowest."""
    known = ORDER.split("-")
    names = order.split("-")
    names += [name for name in known if name not in names]
    if sorted(names) != sorted(known):
        raise MeshError(f"order {order!r} names other axes than {ORDER}; write each of them once")
    return names[::-1]


def _count_evenly(config: MegatronConfig, pp: int, vpp: int) -> list[int]:
    """Equal numbers of layers per virtual stage, except for a first or last stage with a given number."""
    first = config.get("num_layers_in_first_pipeline_stage")
    last = config.get("num_layers_in_last_pipeline_stage")
    # Embedding and loss may count as a layer each for the balance; they are subtracted from their stages below.
    embedding = int(bool(config.get("account_for_embedding_in_pipeline_split")))
    loss = int(bool(config.get("account_for_loss_in_pipeline_split")))
    total = config.layers + embedding + loss
    stages = _divide_among_stages(total, pp, first, last)
    # Chunk 0 of every stage comes before chunk 1 of any, as the schedule interleaves them.
    counts = [count // vpp for _ in range(vpp) for count in stages]
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _divide_among_stages(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """The layers of each stage: given numbers for the first and last, equal parts of the rest for the others."""
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    each = rest // middle if middle else 0
    stages = [each] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages


def _read_layout(stage_layout: object) -> list[list[str]]:
    """The names of the layers in each virtual stage of a layout of stages: text, lists of names or of LayerType, or
    the PipelineParallelLayerLayout that a TransformerConfig makes of these."""
    stage_layout = getattr(stage_layout, "input_data", stage_layout)
    if not isinstance(stage_layout, str):
        return [[_name_layer(layer) for layer in stage] for stage in _flatten(stage_layout)]
    text = stage_layout.replace(",", "").replace(" ", "")
    while REPEAT.search(text):
        text = REPEAT.sub(_repeat, text)
    return [[LETTERS.get(letter, letter) for letter in stage] for stage in text.split("|")]


def _name_layer(layer: object) -> str:
    """The name of a layer in a list, which is a LayerType or a name in any case."""
    return str(getattr(layer, "name", layer)).strip().lower()


def _repeat(match: re.Match[str]) -> str:
    """Write out a group or a letter that is repeated."""
    repeated = match[1] or match[3] or ""
    return repeated * int(match[2] or match[4])


def _flatten(stage_layout: object) -> list[list[str]]:
    """The stages in a list of stages, or in a list of lists of stages, one per chunk."""
    if not isinstance(stage_layout, list | tuple):
        what = (
            f"pipeline_model_parallel_layout={stage_layout!r} is neither text nor a list of stages"
        )
        raise StoreError(f"{what}; write text such as 'Et|tL', or a list of names per stage")
    stages: list[list[str]] = []
    for entry in stage_layout:
        is_nested = bool(entry) and isinstance(entry[0], list | tuple)
        stages += entry if is_nested else [entry]
    return stages
