"""Megatron-Core: what the rows of a configuration store, against what its modules make."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

from shardmath import StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.systems.megatron import logical_shapes, megatron


def test_routers_have_biases_where_linear_layers_do_and_softmax_an_offset_a_head() -> None:
    """As `router.py` and `dot_product_attention.py` of Megatron-Core 0.16.1 make them, and GPT-OSS has them."""
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "num_moe_experts": 2}
    config |= {"softmax_type": "learnable"}
    shapes = logical_shapes(config, vocab=8)
    bound = bind(megatron(config, ranks=range(2), tp=2, vocab=8), shapes)
    stored = {name: shape for (_, name), shape in bound.natives(1).items()}
    assert stored["decoder.layers.0.mlp.router.bias"] == (2,)
    assert stored["decoder.layers.0.self_attention.core_attention.softmax_offset"] == (2,)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ("conv1d.weight", "conv1d.bias")),
        ({"mamba_training_ssm_states_dtype": None}, ("conv1d_weight", "conv1d_bias")),
    ],
    ids=["0.16", "0.19"],
)
def test_the_convolution_of_mamba_has_the_name_of_the_version(more: dict, names: tuple) -> None:
    """A module until 0.18, two parameters of the mixer from 0.19 on, whose configuration has a field for them."""
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "is_hybrid_model": True}
    shapes = logical_shapes(config | more, vocab=8, pattern="M")
    bound = bind(megatron(config | more, ranks=range(2), tp=2, vocab=8), shapes)
    stored = {name.rpartition("mixer.")[2] for (_, name), _ in bound.natives(1).items()}
    assert {name for name in stored if name.startswith("conv1d")} == set(names)


SPARSE = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
}
LATER = {"mtp_use_repeated_layer": False}
"""A field of 0.17 and later."""


def list_stored(config: dict[str, Any], rank: int = 0, **more: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of what a rank stores, by name, of all chunks."""
    given = {name: more.pop(name) for name in ("tied", "positions") if name in more}
    given["pattern"] = more.get("pattern")
    sizes = {name: more.get(name, 1) for name in ("tp", "pp")}
    side = megatron(config, ranks=range(sizes["tp"] * sizes["pp"]), vocab=8, **more)
    bound = bind(side, logical_shapes(config, vocab=8, **given))
    return {f"{chunk}.{name}": shape for (chunk, name), shape in bound.natives(rank).items()}


@pytest.mark.parametrize(
    ("spec", "more", "last"),
    [
        ("te", {}, "linear_fc1.weight3"),
        ("te", {"moe_use_legacy_grouped_gemm": True}, "weight2"),
        ("local", {}, "weight2"),
        ("local", LATER, "local_experts.3.linear_fc2.weight"),
        ("te", {**LATER, "moe_single_grouped_weight": True}, "linear_fc2.weight"),
        (
            "local",
            {**LATER, "moe_single_grouped_weight": True},
            "local_experts.3.linear_fc2.weight",
        ),
    ],
)
def test_the_configuration_decides_how_experts_are_grouped(
    spec: str, more: dict[str, Any], last: str
) -> None:
    """As the spec providers of 0.16.1 and 0.19 choose modules of experts."""
    stored = list_stored(SPARSE | more, spec=spec)
    assert f"0.decoder.layers.1.mlp.experts.{last}" in stored


@pytest.mark.parametrize(("more", "name"), [({}, "transformer_layer"), (LATER, "mtp_model_layer")])
def test_a_further_layer_has_the_name_of_the_version(more: dict[str, Any], name: str) -> None:
    stored = list_stored(SPARSE | {"mtp_num_layers": 1} | more, tp=2)
    assert stored[f"0.mtp.layers.0.{name}.self_attention.linear_proj.weight"] == (8, 4)


def test_the_last_norm_is_behind_the_last_layer_if_further_layers_are_alone() -> None:
    """`has_final_layernorm_in_this_stage`; without further layers it is where the head is."""
    layout = {"pipeline_model_parallel_layout": "Et|t|mL", "mtp_num_layers": 1}
    stages = [list_stored(SPARSE | layout, rank, pp=3) for rank in range(3)]
    has_norm = ["0.decoder.final_layernorm.weight" in stored for stored in stages]
    assert has_norm == [False, True, False]
    assert "0.mtp.layers.0.eh_proj.weight" in stages[2]
    plain = {"pipeline_model_parallel_layout": "Et|t|L"}
    assert "0.decoder.final_layernorm.weight" in list_stored(SPARSE | plain, 2, pp=3)


def test_further_layers_have_the_chunk_that_the_layout_says() -> None:
    layout = {"pipeline_model_parallel_layout": "Et|t||mL", "mtp_num_layers": 1}
    stored = list_stored(SPARSE | layout, 1, pp=2, vpp=2)
    assert "1.mtp.layers.0.hnorm.weight" in stored
    assert "0.decoder.final_layernorm.weight" in stored


WORDS = "0.embedding.word_embeddings.weight"
HEAD = "0.output_layer.weight"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("text", "further"), [("Et|t|m|L", 2), ("Et|tm|L", 1), ("Ettm|L", 0), ("Et|t|mL", 2)]
)
def test_further_layers_have_the_stage_that_the_layout_says(
    text: str, further: int, tied: bool
) -> None:
    """`GPTModel` builds the embedding there too, and the head on the last stage: as a copy of a tied embedding, unless
    the last stage has the embedding, from which it then computes logits."""
    pp = text.count("|") + 1
    config = SPARSE | {"pipeline_model_parallel_layout": text, "mtp_num_layers": 1}
    stages = [list_stored(config, rank, tied=tied, pp=pp) for rank in range(pp)]
    assert _find("0.mtp.layers.0.eh_proj.weight", stages) == [further]
    assert _find(WORDS, stages) == sorted({0, further})
    assert _find(HEAD, stages) == ([] if tied and further == pp - 1 else [pp - 1])


def _find(name: str, stages: list[dict[str, tuple[int, ...]]]) -> list[int]:
    """The stages that store a tensor of this name."""
    return [number for number, stage in enumerate(stages) if name in stage]


def test_three_copies_of_an_embedding_are_one_tensor() -> None:
    config = SPARSE | {"pipeline_model_parallel_layout": "Et|t|m|L", "mtp_num_layers": 1}
    side = megatron(config, ranks=range(8), tp=2, pp=4, vocab=8)
    bound = bind(side, logical_shapes(config, vocab=8, tied=True))
    mesh = bound.layouts["model.embed_tokens.weight"].mesh
    assert (mesh.axis_size("copy"), mesh.ranks) == (3, (0, 1, 4, 5, 6, 7))


def test_further_layers_in_a_later_chunk_of_the_first_stage_are_refused() -> None:
    layout = {"pipeline_model_parallel_layout": "Et|t|m|L", "mtp_num_layers": 1}
    with pytest.raises(StoreError, match="in chunk 1 of stage 0, which has the embedding"):
        megatron(SPARSE | layout, ranks=range(2), pp=2, vpp=2, vocab=8)


class LayerType(enum.Enum):
    """Megatron-Core's words for layers."""

    embedding = 1
    loss = 2
    decoder = 4
    mtp = 5


class PipelineParallelLayerLayout:
    """What a TransformerConfig makes of a layout that it is given."""

    def __init__(self, given: object) -> None:
        self.input_data = given


TOKENS = [LayerType.embedding, LayerType.decoder]
ENDING = [LayerType.mtp, LayerType.loss]


@pytest.mark.parametrize(
    "layout",
    [
        PipelineParallelLayerLayout("Et|t|mL"),
        PipelineParallelLayerLayout([TOKENS, [LayerType.decoder], ENDING]),
        [["embedding", " Decoder"], ["DECODER"], ["mtp", "Loss"]],
    ],
    ids=["text", "types", "names"],
)
def test_a_layout_is_read_as_a_configuration_has_it(layout: object) -> None:
    text = {"pipeline_model_parallel_layout": "Et|t|mL", "mtp_num_layers": 1}
    given = text | {"pipeline_model_parallel_layout": layout}
    for rank in range(3):
        assert list_stored(SPARSE | given, rank, pp=3) == list_stored(SPARSE | text, rank, pp=3)


@pytest.mark.parametrize("pattern", [None, "*E/*-/*-"])
def test_a_layer_that_predicts_all_further_tokens_is_stored_once(pattern: str | None) -> None:
    """`MultiTokenPredictionBlock` of 0.17 and later makes one layer."""
    config = SPARSE | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    stored = list_stored(config, pattern=pattern)
    layers = {name.split(".")[3] for name in stored if name.startswith("0.mtp.layers.")}
    assert layers == {"0"}


@pytest.mark.parametrize("pattern", ["M/*-", "M*-/*-"])
def test_a_pattern_has_as_many_layers_as_the_configuration(pattern: str) -> None:
    count = len(pattern.split("/")[0])
    with pytest.raises(StoreError, match=f"has {count} layers before any '/', and num_layers is 2"):
        logical_shapes(SPARSE, vocab=8, pattern=pattern)


def test_further_layers_may_be_on_a_stage_before_the_head() -> None:
    """`mtp_standalone`: they have the second copy of the embedding, and the last stage has the head."""
    config = SPARSE | {"pipeline_model_parallel_layout": "Et|t||t|m|L", "mtp_num_layers": 1}
    stages = [list_stored(config | {"num_layers": 3}, rank, pp=3, vpp=2) for rank in range(3)]
    name = "1.mtp.layers.0.transformer_layer.mlp.router.weight"
    assert [name in stored for stored in stages] == [False, True, False]
    chunks = ["0.embedding.word_embeddings.weight", "1.embedding.word_embeddings.weight"]
    assert [[one in stored for one in chunks] for stored in stages] == [
        [True, False],
        [False, True],
        [False, False],
    ]
    assert "1.output_layer.weight" in stages[2]
    # Tied, the head is a third copy of the embedding.
    tied = logical_shapes(config | {"num_layers": 3}, vocab=8, tied=True)
    side = megatron(config | {"num_layers": 3}, ranks=range(3), pp=3, vpp=2, vocab=8)
    layout = bind(side, tied).layouts["model.embed_tokens.weight"]
    assert layout.mesh.shape["copy"] == 3 and layout.mesh.ranks == (0, 1, 2)


def test_a_hybrid_model_predicts_a_token_by_several_layers() -> None:
    config = SPARSE | LATER | {"is_hybrid_model": True, "mtp_num_layers": 2}
    stored = list_stored(config, pattern="*E/*-/*-")
    inner = "0.mtp.layers.1.mtp_model_layer.layers."
    assert f"{inner}0.self_attention.linear_qkv.weight" in stored
    assert f"{inner}1.mlp.linear_fc1.weight" in stored
    ends = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    assert all(f"0.mtp.layers.1.{name}.weight" in stored for name in ends)


def test_down_projections_of_latent_attention_may_be_one_module() -> None:
    """Each rank has its part of both, and the norm before them."""
    config = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "add_bias_linear": False,
        "multi_latent_attention": True,
        "q_lora_rank": 4,
        "kv_lora_rank": 6,
        "qk_pos_emb_head_dim": 2,
        "mla_down_proj_fusion": True,
    }
    stored = list_stored(config, tp=2)
    module = "0.decoder.layers.0.self_attention.linear_qkv_down_proj."
    assert stored[f"{module}weight"] == (6, 8)
    assert stored[f"{module}layer_norm_weight"] == (8,)
    apart = list_stored(config, tp=2, spec="local")
    assert stored.keys() - apart.keys() and f"{module}weight" not in apart


def test_a_layer_that_an_index_does_not_have() -> None:
    """@l=-1 is where the last layer is, @l=2 where the third one is."""
    side = megatron(SPARSE, ranks=range(1), vocab=8)
    bound = bind(side.extended("x @l=-1 = x"), {"x": ((2,), "int64")})
    assert bound.natives(0) == {(0, "x"): (2,)}
    with pytest.raises(StoreError, match="'@l=2' is not a number of index 'l', which has 2; use"):
        bind(side.extended("x @l=2 = x"), {"x": ((2,), "int64")})


def test_gate_and_up_of_grouped_experts_may_alternate_in_blocks() -> None:
    """As `TEGroupedMLP._remove_glu_interleaving` of 0.19 takes them apart, on each rank."""
    config = SPARSE | LATER | {"moe_ffn_hidden_size": 24, "add_bias_linear": True}
    config |= {"moe_mlp_glu_interleave_size": 2}
    shapes = logical_shapes(config, vocab=8)
    arrays = {
        name: np.random.default_rng(number).random(shape)
        for number, (name, (shape, _)) in enumerate(shapes.items())
    }
    bound = bind(megatron(config, ranks=range(2), tp=2, vocab=8), shapes)
    for rank in range(2):
        stored = fill(bound, arrays, rank)
        for part in ("weight", "bias"):
            given = stored[0, f"decoder.layers.1.mlp.experts.linear_fc1.{part}3"]
            blocks = given.reshape(-1, 2, 2, *given.shape[1:]).swapaxes(0, 1)
            for name, halves in zip(("gate", "up"), blocks, strict=True):
                whole = arrays[f"model.layers.1.mlp.experts.3.{name}_proj.{part}"]
                own = whole[12 * rank : 12 * (rank + 1)]
                assert np.array_equal(halves.reshape(own.shape), own)
    with pytest.raises(StoreError, match="size=2 and etp=8 do not divide experts of 24; choose"):
        megatron(config, ranks=range(8), tp=8, vocab=8)
    # Modules that are not grouped do not read the field.
    apart = {**config, "moe_grouped_gemm": False}
    plain = {**apart, "moe_mlp_glu_interleave_size": None}
    rows = [megatron(one, ranks=range(2), tp=2, vocab=8).rows for one in (apart, plain)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "field", ["use_grouped_gemm_for_shared_expert", "use_grouped_gemm_for_dense_mlp"]
)
def test_other_modules_whose_gate_and_up_may_alternate_are_refused(field: str) -> None:
    config = SPARSE | LATER | {field: True}
    with pytest.raises(StoreError, match=f"{field} is set, with which gate and up of"):
        megatron(config, ranks=range(1), vocab=8)
    megatron(config, ranks=range(1), spec="local", vocab=8)
    megatron({**config, "gated_linear_unit": False}, ranks=range(1), vocab=8)


def test_norms_that_are_stored_less_one_are_refused() -> None:
    config = SPARSE | {"layernorm_zero_centered_gamma": True}
    with pytest.raises(
        StoreError, match="norms store their weights less one, and rows add nothing"
    ):
        megatron(config, ranks=range(1), vocab=8)
    kept = megatron(config, ranks=range(1), vocab=8, norms="keep")
    assert kept == megatron(SPARSE, ranks=range(1), vocab=8)
    with pytest.raises(StoreError, match="norms='whole' is not known; use one of check, keep"):
        megatron(SPARSE, ranks=range(1), vocab=8, norms="whole")


@pytest.mark.parametrize(
    ("stacked", "last"),
    [
        (("weight", "bias"), {"weight", "bias"}),
        (("weight",), {"weight", "bias3"}),
        (("bias",), {"weight3", "bias"}),
        ((), {"weight3", "bias3"}),
    ],
)
def test_weights_and_biases_of_experts_are_stacked_separately(
    stacked: tuple[str, ...], last: set[str]
) -> None:
    config = SPARSE | LATER | {"add_bias_linear": True}
    stored = list_stored(config | {f"moe_single_grouped_{part}": True for part in stacked})
    for linear in ("linear_fc1", "linear_fc2"):
        module = f"0.decoder.layers.1.mlp.experts.{linear}."
        names = {name.removeprefix(module) for name in stored if name.startswith(module)}
        assert names >= last and len(names) == 8 - 3 * len(stacked)


@pytest.mark.parametrize("text", ["Et|t||L", "Et|t||||L"])
def test_the_head_is_in_the_last_chunk_though_it_has_no_layers(text: str) -> None:
    vpp = (text.count("|") + 1) // 2
    layout = {"pipeline_model_parallel_layout": text}
    stored = list_stored(SPARSE | layout, 1, pp=2, vpp=vpp)
    ends = {name for name in stored if "output" in name or "final" in name}
    assert {name.split(".")[0] for name in ends} == {str(vpp - 1)}
    assert "0.decoder.layers.0.mlp.router.weight" in stored


def test_the_last_norm_is_behind_the_last_layer_if_there_are_0_further_layers() -> None:
    """Megatron tests whether `mtp_num_layers` is None."""
    layout = {"pipeline_model_parallel_layout": "Et|t|L", "mtp_num_layers": 0}
    stages = [list_stored(SPARSE | layout, rank, pp=3) for rank in range(3)]
    assert _find("0.decoder.final_layernorm.weight", stages) == [1]
    assert _find(HEAD, stages) == [2]


@pytest.mark.parametrize("text", ["Et|*3tL", "E(t|)*1|*2tL"])
def test_a_layout_may_repeat_the_end_of_a_stage(text: str) -> None:
    stages = [
        list_stored(SPARSE | {"pipeline_model_parallel_layout": text}, rank, pp=4)
        for rank in range(4)
    ]
    assert _find("0.decoder.layers.0.mlp.router.weight", stages) == [0, 3]


@pytest.mark.parametrize(
    ("pattern", "vpp", "counts"),
    [("M*-|M", 1, [3, 1]), ("|M|*-|M/*", 2, [2, 2]), ("M*-M", 1, [2, 2])],
)
def test_a_pattern_divides_a_hybrid_model_among_stages(
    pattern: str, vpp: int, counts: list[int]
) -> None:
    """`select_pipeline_segment` of 0.19: a segment for each chunk of a stage."""
    config = SPARSE | LATER | {"num_layers": 4, "mtp_num_layers": pattern.count("/") or None}
    stages = [list_stored(config, rank, pp=2, vpp=vpp, pattern=pattern) for rank in range(2)]
    found = [
        {tuple(name.split(".")[:4]) for name in stored if ".decoder.layers." in name}
        for stored in stages
    ]
    assert [len(layers) for layers in found] == counts
    assert _find(f"{vpp - 1}.decoder.final_norm.weight", stages) == [1]


@pytest.mark.parametrize("pattern", [None, "*E/*-"])
def test_the_copy_of_the_embedding_has_learned_positions_too(pattern: str | None) -> None:
    config = SPARSE | LATER | {"mtp_num_layers": 1}
    stages = [list_stored(config, rank, pp=2, pattern=pattern, positions=4) for rank in range(2)]
    assert _find("0.embedding.position_embeddings.weight", stages) == [0, 1]
    alone = [
        list_stored(SPARSE | LATER, rank, pp=2, pattern=pattern and "*E", positions=4)
        for rank in range(2)
    ]
    assert _find("0.embedding.position_embeddings.weight", alone) == [0]
