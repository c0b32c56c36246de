"""What surprises in how vLLM stores weights, each by its own name; `test_recorded` has most of it as recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardmath import MeshError, ShardError, StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.storage.stored import Stored
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.vllm import expert_tile, vllm

Fails = Callable[[Callable[[], object], type[ShardError], str], None]

DENSE = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
}
SPARSE = {**DENSE, "model_type": "qwen3_moe", "num_experts": 10, "intermediate_size": 8}
LAYER = "model.layers.0."
ROUTED = f"{LAYER}mlp.experts.routed_experts."


def number(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.int64]]:
    """Arrays whose elements are 1, 2, 3, and so on, through all of them."""
    arrays = {}
    start = 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return arrays


def store(
    config: dict[str, Any], arrays: dict[str, NDArray[np.int64]], rank: int, **sizes: Any
) -> dict[str, NDArray[np.int64]]:
    """What a rank stores of the logical arrays; 0 where no element lies."""
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    side = vllm(config, ranks=range(world), **sizes)
    bound = bind(side, {name: (array.shape, "int64") for name, array in arrays.items()})
    return {name: array for (_, name), array in fill(bound, arrays, rank).items()}


def experts(
    count: int, ffn: int, hidden: int, *words: str, kind: str = "weight"
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of so many experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for e in range(count):
        for word in words:
            shape = (hidden, ffn) if word == "down" else (ffn, hidden)
            name = f"{LAYER}mlp.experts.{e}.{word}_proj.{kind}"
            shapes[name] = shape[:1] if kind == "bias" else shape
    return shapes


def numbers_of(stack: NDArray[np.int64], arrays: dict[str, NDArray[np.int64]]) -> list[int]:
    """Which experts lie in a stack."""
    by_first = {int(array.flat[0]): name for name, array in arrays.items()}
    return [int(by_first[int(own.flat[0])].split(".")[5]) for own in stack]


def test_data_parallelism_cuts_experts() -> None:
    """Rule 1: without EP, experts are cut over tp and dp; ranks of different dp are no replicas."""
    arrays = number(experts(2, 8, 4, "down"))
    for rank in range(4):
        held = store(SPARSE, arrays, rank, tp=2, dp=2)[f"{ROUTED}w2_weight"]
        first = arrays[f"{LAYER}mlp.experts.0.down_proj.weight"]
        assert np.array_equal(held[0], first[:, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(
    ("kind", "rows"), [("deepseek_v3", 8), ("nemotron_h", 8), ("glm4_moe", 4), ("ernie4_5_moe", 4)]
)
def test_shared_experts_are_whole_where_tokens_are_divided(kind: str, rows: int) -> None:
    """Rule 2: with EP, tp and dp some kinds have shared experts whole; with one engine none has."""
    arrays = number({f"{LAYER}mlp.shared_experts.up_proj.weight": (8, 4)})
    config = {**SPARSE, "model_type": kind}
    assert next(iter(store(config, arrays, 1, tp=2, dp=2, ep=True).values())).shape == (rows, 4)
    assert next(iter(store(config, arrays, 1, tp=2, ep=True).values())).shape == (4, 4)


def test_the_first_ranks_get_one_expert_more() -> None:
    """Rule 4: 10 experts on 4 ranks, dp slower than tp; vLLM's docstring says the last."""
    arrays = number(experts(10, 4, 2, "up"))
    held = [
        numbers_of(store(SPARSE, arrays, rank, tp=2, dp=2, ep=True)[f"{ROUTED}w13_weight"], arrays)
        for rank in range(4)
    ]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("groups", "dp", "first"),
    [(1, 1, [0, 1, 2, 3, 4]), (2, 1, [0, 2, 4, 6, 8]), (2, 2, [0, 1, 2])],
)
def test_round_robin_silently_becomes_linear(groups: int, dp: int, first: list[int]) -> None:
    """Rule 5: it needs groups of experts, and one engine."""
    arrays = number(experts(10, 4, 2, "up"))
    config = {**SPARSE, "n_group": groups}
    sizes: dict[str, Any] = {"tp": 2, "dp": dp, "ep": True, "placement": "round_robin"}
    assert numbers_of(store(config, arrays, 0, **sizes)[f"{ROUTED}w13_weight"], arrays) == first


def test_redundant_experts_are_copies_of_the_first() -> None:
    """Rule 6: 10 experts and 2 copies on 4 ranks: the last has expert 9, then 0 and 1 again."""
    arrays = number(experts(10, 4, 2, "up"))
    sizes: dict[str, Any] = {"tp": 4, "ep": True, "redundant": 2}
    held = [
        numbers_of(store(SPARSE, arrays, rank, **sizes)[f"{ROUTED}w13_weight"], arrays)
        for rank in range(4)
    ]
    assert held == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 0, 1]]


def test_an_expert_without_gate_is_up_alone() -> None:
    """Rule 7."""
    arrays = number(experts(2, 8, 4, "up"))
    assert store(SPARSE, arrays, 1, tp=2)[f"{ROUTED}w13_weight"].shape == (2, 4, 4)


def test_cutlass_swaps_gate_and_up_once_processed() -> None:
    """Rule 8: [gate; up] when loaded, [up; gate] afterwards."""
    arrays = number(experts(1, 4, 2, "gate", "up"))
    sizes: dict[str, Any] = {"tp": 2, "backend": "flashinfer_cutlass"}
    loaded = store(SPARSE, arrays, 1, **sizes)[f"{ROUTED}w13_weight"][0]
    processed = store(SPARSE, arrays, 1, processed=True, **sizes)[f"{ROUTED}w13_weight"][0]
    assert np.array_equal(processed, np.concatenate([loaded[2:], loaded[:2]]))


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "flashinfer_trtllm"])
def test_processing_leaves_the_biases_of_experts(backend: str) -> None:
    """vLLM passes only the weights of unquantized experts to the backend's arrangement."""
    shapes = {f"{LAYER}mlp.experts.0.{part}_proj.bias": (4,) for part in ("gate", "up")}
    arrays = number(shapes)
    sizes: dict[str, Any] = {"tp": 2, "backend": backend}
    loaded = store(SPARSE, arrays, 1, **sizes)
    processed = store(SPARSE, arrays, 1, processed=True, **sizes)
    assert np.array_equal(processed[f"{ROUTED}w13_bias"], loaded[f"{ROUTED}w13_bias"])


def test_trtllm_pads_each_part_of_an_expert() -> None:
    """Rule 9: to 128 rows of gate, 128 of up, and 128 columns."""
    arrays = number(experts(1, 8, 4, "gate", "up", "down"))
    held = store(SPARSE, arrays, 1, tp=2, backend="flashinfer_trtllm")
    w13, w2 = held[f"{ROUTED}w13_weight"][0], held[f"{ROUTED}w2_weight"][0]
    assert w13.shape == (256, 4) and w2.shape == (4, 128)
    assert np.array_equal(w13[:4], arrays[f"{LAYER}mlp.experts.0.gate_proj.weight"][4:])
    assert np.array_equal(w13[128:132], arrays[f"{LAYER}mlp.experts.0.up_proj.weight"][4:])
    assert not w13[4:128].any() and not w13[132:].any() and not w2[:, 4:].any()


ROW_MAP = [8 * (row % 4) + row // 4 for row in range(32)]
"""FlashInfer's `srcToDstBlk32RowMap`."""


def block(matrix: np.ndarray) -> np.ndarray:
    """As FlashInfer shuffles rows in blocks of 32, and vLLM puts blocks of 64 columns one after the other."""
    shuffled = np.empty_like(matrix)
    for row, values in enumerate(matrix):
        shuffled[row // 32 * 32 + ROW_MAP[row % 32]] = values
    blocks = [shuffled[:, at : at + 64] for at in range(0, matrix.shape[1], 64)]
    return np.concatenate([one.ravel() for one in blocks]).reshape(matrix.shape)


def test_trtllm_blocks_experts_once_processed() -> None:
    """Rule 9: up and gate alternate row by row, then blocks; padding moves with the others."""
    arrays = number(experts(1, 200, 64, "gate", "up", "down"))
    sizes: dict[str, Any] = {"tp": 2, "backend": "flashinfer_trtllm"}
    loaded = store(SPARSE, arrays, 1, **sizes)
    processed = store(SPARSE, arrays, 1, processed=True, **sizes)
    gate, up = np.split(loaded[f"{ROUTED}w13_weight"][0], 2)
    paired = np.stack([up, gate], 1).reshape(256, 64)
    assert np.array_equal(processed[f"{ROUTED}w13_weight"][0], block(paired))
    down = loaded[f"{ROUTED}w2_weight"][0]
    assert np.array_equal(processed[f"{ROUTED}w2_weight"][0], block(down))


@pytest.mark.parametrize("backend", ["triton", "flashinfer_cutlass", "flashinfer_trtllm"])
def test_experts_of_a_kind_without_own_names_are_arranged_too(backend: str) -> None:
    """Experts w1, w2 and w3 lie as gate, down and up do."""
    usual = number(experts(2, 128, 64, "gate", "up", "down"))
    words = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {
        ".".join(words.get(part, part) for part in name.split(".")): array
        for name, array in usual.items()
    }
    sizes: dict[str, Any] = {"tp": 2, "backend": backend, "processed": True}
    wanted = store(SPARSE, usual, 1, **sizes)
    held = store({**SPARSE, "model_type": "unheard_of"}, renamed, 1, **sizes)
    assert held.keys() == wanted.keys()
    assert all(np.array_equal(held[name], array) for name, array in wanted.items())


@pytest.mark.parametrize(
    ("kind", "backend", "what"),
    [
        ("qwen3_moe", "deep_gemm", "experts"),
        ("qwen3_moe", "cpu", "experts"),
        ("gpt_oss", "flashinfer_trtllm", "experts that store gate and up row by row in turn"),
        ("gpt_oss", "flashinfer_cutlass", "experts that store gate and up row by row in turn"),
    ],
)
def test_processed_experts_that_no_row_describes_are_refused(
    kind: str, backend: str, what: str, fails: Fails
) -> None:
    config = {**SPARSE, "model_type": kind}
    vllm(config, ranks=range(1), backend=backend)
    fails(
        lambda: vllm(config, ranks=range(1), backend=backend, processed=True),
        StoreError,
        f"backend={backend!r} arranges processed {what} in a way that no row describes; "
        "pass processed=False, and refit before weights are processed",
    )


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("backend", ["auto", "cutlass", "deep_gemm", "flashinfer_trtllm"])
def test_every_backend_stores_a_dense_model_alike(backend: str, processed: bool) -> None:
    config = {**SPARSE, "model_type": "llama", "num_experts": 0}
    usual = vllm(config, ranks=range(2), tp=2)
    sizes: dict[str, Any] = {"ranks": range(2), "tp": 2, "processed": processed}
    assert vllm(config, backend=backend, **sizes).rows == usual.rows


@pytest.mark.parametrize("backend", ["cutlass", "hpc", "emulation"])
def test_fp8_experts_that_a_backend_leaves_as_loaded(backend: str) -> None:
    scaled = {**SPARSE, "quantization_config": {"weight_block_size": [128, 128]}}
    loaded = vllm(scaled, ranks=range(1), backend=backend)
    assert vllm(scaled, ranks=range(1), backend=backend, processed=True) == loaded


def test_a_backend_that_vllm_chooses(fails: Fails) -> None:
    """It stores what is loaded as Triton, if no backend pads it. FP8 tiles are refined, and never padded."""
    sparse = {**SPARSE, "moe_intermediate_size": 256, "hidden_size": 256}
    scaled = {**sparse, "quantization_config": {"weight_block_size": [128, 128]}}
    for config, tp in ((sparse, 1), (sparse, 2), (scaled, 2), (scaled, 4)):
        usual = vllm(config, ranks=range(tp), tp=tp)
        assert vllm(config, ranks=range(tp), tp=tp, backend="auto") == usual
    assert expert_tile(scaled, tp=4, backend="auto") == expert_tile(scaled, tp=4) == (64, 64)
    what = "backend='auto' lets vLLM choose the backend, and the backend decides how experts are "
    fix = "; pass the backend that vLLM has chosen, which its log names, such as 'triton'"
    fails(
        lambda: vllm(sparse, ranks=range(4), tp=4, backend="auto"),
        StoreError,
        f"{what}padded{fix}",
    )
    for config in (sparse, scaled):
        fails(
            lambda config=config: vllm(config, ranks=range(1), backend="auto", processed=True),
            StoreError,
            f"{what}processed{fix}",
        )


@pytest.mark.parametrize("backend", ["flashinfer-cutlass", "FlashInfer_Cutlass"])
def test_a_backend_is_spelled_as_vllms_option_allows(backend: str) -> None:
    usual = vllm(SPARSE, ranks=range(1), backend="flashinfer_cutlass", processed=True)
    assert vllm(SPARSE, ranks=range(1), backend=backend, processed=True) == usual


@pytest.mark.parametrize("backend", ["flashinfer cutlass", "nonsense", "", None, 3])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    what = f"backend={backend!r} is not a backend of experts; use one of triton, batched_triton, "
    scaled = {**SPARSE, "quantization_config": {"weight_block_size": [128, 128]}}
    makes: list[Callable[[], object]] = [
        lambda: vllm(SPARSE, ranks=range(1), backend=backend),
        lambda: expert_tile(scaled, backend=backend),
        lambda: expert_tile(SPARSE, backend=backend),
    ]
    for make in makes:
        with pytest.raises(StoreError, match=re.escape(what)):
            make()


def test_what_trtllm_has_blocked_is_not_read_back(fails: Fails) -> None:
    """A trainer cannot send it; and with scales, which are blocked in another way, no row says how it lies."""
    arrays = number(experts(1, 128, 64, "up"))
    shapes = {name: (array.shape, "int64") for name, array in arrays.items()}
    sizes: dict[str, Any] = {"backend": "flashinfer_trtllm", "processed": True}
    side = vllm(SPARSE, ranks=range(1), **sizes)
    stored = {0: fill(bind(side, shapes), arrays, 0)}
    fails(
        lambda: gather(bind(side, shapes), stored, [0]),
        StoreError,
        f"'{ROUTED}w13_weight' is stored as blocks(...), whose cells are not read back; "
        "gather it before it is arranged",
    )
    scaled = {**SPARSE, "quantization_config": {"weight_block_size": [128, 128]}}
    fails(
        lambda: vllm(scaled, ranks=range(1), **sizes),
        StoreError,
        "backend='flashinfer_trtllm' arranges processed FP8 experts in a way that no row describes; "
        "pass processed=False, and refit before weights are processed",
    )


def test_key_heads_below_tp_are_repeated() -> None:
    """Rule 10: rank r has key head r // (tp / heads), also of biases; row-parallel biases are whole."""
    shapes: dict[str, tuple[int, ...]] = {f"{LAYER}self_attn.q_proj.bias": (16,)}
    shapes |= {f"{LAYER}self_attn.{name}_proj.bias": (4,) for name in "kvo"}
    arrays = number(shapes)
    q, k, v, o = (arrays[f"{LAYER}self_attn.{name}_proj.bias"] for name in "qkvo")
    held = store(DENSE, arrays, 5, tp=8)
    fused = np.concatenate([q[10:12], k[2:4], v[2:4]])
    assert np.array_equal(held[f"{LAYER}self_attn.qkv_proj.bias"], fused)
    assert np.array_equal(held[f"{LAYER}self_attn.o_proj.bias"], o)


def test_gpt_oss_has_no_more_ranks_than_key_heads() -> None:
    """Rule 11: other kinds repeat key heads, as on 4 ranks of 2 heads."""
    shapes: dict[str, tuple[int, ...]] = {f"{LAYER}self_attn.q_proj.weight": (16, 4)}
    shapes |= {f"{LAYER}self_attn.{name}_proj.weight": (4, 4) for name in "kv"}
    arrays = number(shapes)
    with pytest.raises(
        StoreError,
        match="'k' has 2 positions or blocks, which do not divide into 4 equal parts for 'tp/rep'",
    ):
        store({**DENSE, "model_type": "gpt_oss"}, arrays, 0, tp=4)
    assert store(DENSE, arrays, 0, tp=4)[f"{LAYER}self_attn.qkv_proj.weight"].shape == (8, 4)


def test_heads_are_not_cut() -> None:
    """Six rows of three heads do not fall to two ranks, though six is even."""
    arrays = number({f"{LAYER}self_attn.{name}_proj.weight": (6, 4) for name in "qkv"})
    config = {**DENSE, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(
        StoreError,
        match="'q' has 3 positions or blocks, which do not divide into 2 equal parts for 'tp'",
    ):
        store(config, arrays, 0, tp=2)


def test_gpt_oss_keeps_gate_and_up_in_turn() -> None:
    """Rule 11: rows in turn are cut as rows; one rank has the bias of the output, the others zeros."""
    config = {**SPARSE, "model_type": "gpt_oss"}
    arrays = number(experts(1, 8, 4, "gate", "up") | experts(1, 8, 4, "down", kind="bias"))
    gate, up, bias = arrays.values()
    for rank in range(2):
        held = store(config, arrays, rank, tp=2)
        rows = slice(4 * rank, 4 * rank + 4)
        in_turn = np.stack([gate[rows], up[rows]], axis=1).reshape(8, 4)
        assert np.array_equal(held[f"{ROUTED}w13_weight"][0], in_turn)
        assert np.array_equal(held[f"{ROUTED}w2_bias"][0], bias if rank == 0 else 0 * bias)


def test_the_vocabulary_is_padded_and_then_cut() -> None:
    """Rule 13: 100 words are 128 on 8 ranks: the seventh has some, the last none. 3 ranks are refused."""
    arrays = number({"model.embed_tokens.weight": (100, 2)})
    (seventh,) = store(DENSE, arrays, 6, tp=8).values()
    (last,) = store(DENSE, arrays, 7, tp=8).values()
    assert np.count_nonzero(seventh) == 2 * 4 and last.shape == (16, 2) and not last.any()
    with pytest.raises(
        StoreError,
        match="'n=vocab' has 128 positions or blocks, which do not divide into 3 equal parts for 'tp'",
    ):
        store(DENSE, arrays, 0, tp=3)


def test_the_checkpoint_decides_what_is_tied() -> None:
    """Rule 14: with its own head there are two tensors; without one the last stage has the embedding too."""
    tied = number({"model.embed_tokens.weight": (100, 2), "model.norm.weight": (2,)})
    config = {**DENSE, "num_hidden_layers": 2, "tie_word_embeddings": True}
    assert set(store(config, tied, 1, pp=2)) == {"model.embed_tokens.weight", "model.norm.weight"}
    own = tied | number({"lm_head.weight": (100, 2)})
    assert set(store(config, own, 1, pp=2)) == {"lm_head.weight", "model.norm.weight"}


def test_down_projections_of_latent_attention_are_whole() -> None:
    """Rule 15: fused where queries are latent, alone where they are not."""
    latent = number(
        {f"{LAYER}self_attn.{name}.weight": (4, 4) for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    )
    (fused,) = store(DENSE, latent, 1, tp=2).values()
    assert np.array_equal(fused, np.concatenate(list(latent.values())))
    direct = number(
        {f"{LAYER}self_attn.{name}.weight": (4, 4) for name in ("q_proj", "kv_a_proj_with_mqa")}
    )
    held = store(DENSE, direct, 1, tp=2)
    assert held[f"{LAYER}self_attn.q_proj.weight"].shape == (2, 4)
    assert held[f"{LAYER}self_attn.kv_a_proj_with_mqa.weight"].shape == (4, 4)


@pytest.mark.parametrize(("groups", "rows"), [(1, 4 + 4 + 8 + 8 + 2), (2, 4 + 4 + 8 + 8 + 2)])
def test_one_group_of_a_mamba_layer_is_whole(groups: int, rows: int) -> None:
    """Rule 17: B and C of one group are whole on each rank, of more groups they are cut."""
    config = {**DENSE, "model_type": "mamba2", "n_groups": groups, "state_size": 8}
    sizes = {"z": 8, "x": 8, "B": 8 * groups, "C": 8 * groups, "dt": 4}
    arrays = number({f"{LAYER}mixer.{name}.weight": (n, 2) for name, n in sizes.items()})
    (held,) = store(config, arrays, 1, tp=2).values()
    assert held.shape == (rows, 2)
    assert (held[8] == arrays[f"{LAYER}mixer.B.weight"][8 * (groups - 1)]).all()


def test_groups_that_tp_does_not_divide_are_refused() -> None:
    """Rule 17."""
    config = {**DENSE, "model_type": "mamba2", "n_groups": 3, "state_size": 4}
    shapes = {f"{LAYER}mixer.{name}.weight": (8, 2) for name in ("z", "x", "dt")}
    arrays = number(shapes | {f"{LAYER}mixer.{name}.weight": (12, 2) for name in "BC"})
    with pytest.raises(StoreError, match=r"'B' has 3 .* into 2 equal parts"):
        store(config, arrays, 0, tp=2)


def test_a_is_computed_where_a_delta_net_keeps_its_logarithm() -> None:
    """Rules 17 and 18."""
    side = vllm(DENSE, ranks=range(2), tp=2)
    names = f"{LAYER}mixer.A_log", f"{LAYER}linear_attn.A_log"
    slots = bind(side, dict.fromkeys(names, ((4,), "float32"))).slots(1)
    assert [(slots[name].native, slots[name].function) for name in names] == [
        (f"{LAYER}mixer.A", "neg_exp"),
        (f"{LAYER}linear_attn.A_log", ""),
    ]


@pytest.mark.parametrize(("kind", "order"), [("qwen3_next", "qkvzqkvz"), ("qwen3_5", "qqkkvvzz")])
def test_delta_nets_are_fused_by_heads_or_by_parts(kind: str, order: str) -> None:
    """Rule 18: with four key heads on two ranks, rank 1 has heads 2 and 3."""
    config = {**DENSE, "model_type": kind, "linear_num_key_heads": 4, "linear_key_head_dim": 1}
    shapes = {f"{LAYER}linear_attn.{name}.weight": (4, 1) for name in "qkvz"}
    arrays = number(shapes)
    (held,) = store(config, arrays, 1, tp=2).values()
    words = dict(zip("qkvz", arrays.values(), strict=True))
    rows = {name: iter(array[2:, 0]) for name, array in words.items()}
    assert held[:, 0].tolist() == [next(rows[name]) for name in order]


def test_the_second_projection_of_mamba_is_cut_by_columns() -> None:
    """Rule 19: and in_proj is [x; z], part by part."""
    config = {**DENSE, "model_type": "mamba"}
    arrays = number({f"{LAYER}mixer.x_proj.weight": (3, 4), f"{LAYER}mixer.in_x.weight": (4, 2)})
    arrays |= {f"{LAYER}mixer.in_z.weight": -arrays[f"{LAYER}mixer.in_x.weight"]}
    held = store(config, arrays, 1, tp=2)
    whole = arrays[f"{LAYER}mixer.x_proj.weight"]
    assert np.array_equal(held["backbone.layers.0.mixer.x_proj.weight"], whole[:, 2:])
    x = arrays[f"{LAYER}mixer.in_x.weight"][2:]
    assert np.array_equal(held["backbone.layers.0.mixer.in_proj.weight"], np.concatenate([x, -x]))


@pytest.mark.parametrize(
    ("kind", "shapes"), [("minimax_m2", [(4,), (2,)]), ("olmoe", [(16,), (4,)])]
)
def test_norms_of_all_heads_are_cut_in_minimax_and_whole_in_olmoe(
    kind: str, shapes: list[object]
) -> None:
    """Rule 20: like q, and like k with its repetition; OLMoE's are whole."""
    arrays = number(
        {f"{LAYER}self_attn.q_norm.weight": (16,), f"{LAYER}self_attn.k_norm.weight": (4,)}
    )
    held = store({**DENSE, "model_type": kind}, arrays, 3, tp=4)
    assert [array.shape for array in held.values()] == shapes


def test_glm_cuts_gate_and_up_as_one_tensor() -> None:
    """As vLLM runs it by the modules of transformers: the first of two ranks has all of gate."""
    shapes = {f"{LAYER}mlp.{name}_proj.weight": (8, 4) for name in ("gate", "up")}
    arrays = number(shapes)
    for rank, name in enumerate(shapes):
        (held,) = store({**DENSE, "model_type": "glm"}, arrays, rank, tp=2).values()
        assert np.array_equal(held, arrays[name])


def test_llama4_stores_even_rows_of_a_head_first() -> None:
    """Rule 21: with heads of four rows, from the checkpoint to a rank."""
    config = {**DENSE, "model_type": "llama4_text", "head_dim": 4, "num_attention_heads": 2}
    names = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
    stored = number(dict.fromkeys(names, (8, 1)))
    shapes = logical_shapes(config, dict.fromkeys(names, ((8, 1), "int64")))
    reference = bind(hugging_face(config), shapes)
    natives = {(0, name): array for name, array in stored.items()}
    logical = gather(reference, {0: natives}, [0])
    (held,) = store(config, logical, 1, tp=2).values()
    q, k, v = (array[4:, 0] for array in stored.values())
    head = [0, 2, 1, 3]
    assert held[:, 0].tolist() == [*q[head], *k[head], *v]


def test_query_and_output_gate_lie_head_by_head() -> None:
    """Rule 22."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{LAYER}self_attn.{name}_proj.weight": (16, 1) for name in "qg"
    }
    shapes |= {f"{LAYER}self_attn.{name}_proj.weight": (4, 1) for name in "kv"}
    arrays = number(shapes)
    (held,) = store(DENSE, arrays, 1, tp=2).values()
    q, g, k, v = (array[:, 0] for array in arrays.values())
    by_head = np.stack([q[8:].reshape(4, 2), g[8:].reshape(4, 2)], axis=1).ravel()
    assert held[:, 0].tolist() == [*by_head, *k[2:], *v[2:]]


@pytest.mark.parametrize(("pp", "counts"), [(2, [4, 3]), (3, [2, 3, 2]), (4, [2, 2, 2, 1])])
def test_stages_before_the_last_have_the_layers_left_over(pp: int, counts: list[int]) -> None:
    """Rule 24: seven layers, which keep their numbers."""
    side = vllm({**DENSE, "num_hidden_layers": 7}, ranks=range(pp), pp=pp)
    spots = side.indices["l"]
    assert [sum(spot.coords["pp"] == stage for spot in spots) for stage in range(pp)] == counts
    assert [spot.number for spot in spots] == list(range(7))


def test_stages_may_be_given(fails: Fails) -> None:
    side = vllm({**DENSE, "num_hidden_layers": 3}, ranks=range(2), pp=2, stages=[1, 2])
    assert [spot.coords["pp"] for spot in side.indices["l"]] == [0, 1, 1]
    fails(
        lambda: vllm({**DENSE, "num_hidden_layers": 3}, ranks=range(2), pp=2, stages=[1, 1]),
        StoreError,
        "3 layers do not fall to 2 stages as [1, 1]; give the number of layers of each stage",
    )


def test_a_draft_has_an_embedding_of_its_own_under_the_models_name() -> None:
    """Rule 25."""
    config = {**DENSE, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    arrays = number({"mtp.0.embed_tokens.weight": (100, 2), "mtp.0.eh_proj.weight": (4, 8)})
    arrays |= number({"mtp.0.mlp.down_proj.weight": (4, 8)})
    held = store(config, arrays, 1, tp=2, draft=True)
    assert {name: array.shape for name, array in held.items()} == {
        "model.embed_tokens.weight": (64, 2),
        "model.layers.1.eh_proj.weight": (4, 8),
        "model.layers.1.mtp_block.mlp.down_proj.weight": (4, 4),
    }


def test_scales_are_cut_as_their_weights() -> None:
    """Rule 28: fused_qkv_a has its parts' scale rows, one after the other; experts have a stack of scales."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**SPARSE, "quantization_config": quantization}
    shapes: dict[str, tuple[int, ...]] = {
        f"{LAYER}self_attn.q_a_proj.weight_scale_inv": (1, 2),
        f"{LAYER}self_attn.kv_a_proj_with_mqa.weight_scale_inv": (2, 2),
        f"{LAYER}mlp.experts.0.gate_proj.weight_scale_inv": (4, 2),
        f"{LAYER}mlp.experts.0.up_proj.weight_scale_inv": (4, 2),
        f"{LAYER}mlp.down_proj.weight_scale_inv": (2, 6),
    }
    held = store(config, number(shapes), 1, tp=2)
    assert {name: array.shape for name, array in held.items()} == {
        f"{LAYER}self_attn.fused_qkv_a_proj.weight_scale_inv": (3, 2),
        f"{LAYER}mlp.down_proj.weight_scale_inv": (2, 3),
        f"{ROUTED}w13_weight_scale_inv": (1, 4, 2),
    }
    odd = number({f"{LAYER}mlp.experts.0.up_proj.weight_scale_inv": (3, 2)})
    with pytest.raises(
        StoreError,
        match="'n' has 3 positions or blocks, which do not divide into 2 equal parts for 'etp'",
    ):
        store(config, odd, 1, tp=2)


@pytest.mark.parametrize(
    ("kind", "logical", "native"),
    [
        ("gpt_oss", "self_attn.o_proj.weight", "model.layers.0.attn.o_proj.weight"),
        ("lfm2", "mlp.down_proj.weight", "model.layers.0.feed_forward.w2.weight"),
        ("jamba", "self_attn.o_proj.weight", "model.layers.0.o_proj.weight"),
        ("falcon_h1", "mixer.out_proj.weight", "model.layers.0.mamba.mamba.out_proj.weight"),
        ("granitemoe", "mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
        ("nemotron_h", "mlp.down_proj.weight", "model.layers.0.mixer.down_proj.weight"),
        ("bloom", "self_attn.o_proj.weight", "transformer.h.0.self_attention.dense.weight"),
        (
            "Qwen3_5MoeText",
            "mlp.shared_experts.down_proj.weight",
            "model.layers.0.mlp.shared_expert.down_proj.weight",
        ),
    ],
)
def test_kinds_call_modules_otherwise(kind: str, logical: str, native: str) -> None:
    """Rule 29."""
    arrays = number({f"{LAYER}{logical}": (4, 4)})
    assert list(store({**DENSE, "model_type": kind}, arrays, 0)) == [native]


def test_some_kinds_have_all_ends_on_all_stages() -> None:
    arrays = number({"model.embed_tokens.weight": (100, 2), "lm_head.weight": (100, 2)})
    config = {**SPARSE, "num_hidden_layers": 2}
    assert set(store(config, arrays, 0, pp=2)) == set(store(config, arrays, 1, pp=2)) == set(arrays)
    dense = {**config, "model_type": "llama"}
    assert list(store(dense, arrays, 1, pp=2)) == ["lm_head.weight"]


def test_unknown_tensors_are_refused_or_whole() -> None:
    arrays = number({f"{LAYER}mlp.own.3.weight": (4, 4), "model.own": (2,)})
    with pytest.raises(StoreError, match="no row stores"):
        store(DENSE, arrays, 0, tp=2)
    held = store(DENSE, arrays, 1, tp=2, unknown="replicate")
    assert all(np.array_equal(held[name], array) for name, array in arrays.items())


def test_words_that_are_none(fails: Fails) -> None:
    fails(
        lambda: vllm(DENSE, ranks=range(2), unknown="guess"),
        MeshError,
        "ranks= has 2 ranks, but the mesh dp=1 pp=1 tp=1 has 1; give one rank for each coordinate, 1 in all",
    )
    fails(
        lambda: vllm(DENSE, ranks=range(1), unknown="guess"),
        StoreError,
        "unknown='guess' is not an option; use one of refuse, replicate",
    )
    fails(
        lambda: vllm(DENSE, ranks=range(1), placement="random"),
        StoreError,
        "placement='random' is not an option; use one of linear, round_robin",
    )


@pytest.mark.parametrize("make", [vllm, sglang])
@pytest.mark.parametrize(
    ("kind", "queries", "keys", "own"),
    [
        ("cohere", (4, 8), (2, 8), [(2, 8), (1, 8)]),
        ("minimax_m2", (32,), (16,), [(16,), (8,)]),
    ],
)
def test_norms_of_all_heads_are_cut_as_heads_are(
    make: Callable[..., Stored],
    kind: str,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    own: list[tuple[int, ...]],
) -> None:
    """As `commandr.py` and `minimax_m2.py` of both engines load them."""
    config = {"model_type": kind, "num_hidden_layers": 1, "hidden_size": 32}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    prefix = "model.layers.0.self_attn."
    shapes = {
        f"{prefix}q_norm.weight": (queries, "bfloat16"),
        f"{prefix}k_norm.weight": (keys, "bfloat16"),
    }
    bound = bind(make(config, ranks=range(2), tp=2), shapes)
    assert list(bound.natives(1).values()) == own


def draft_of(kind: str, natives: dict[str, tuple[int, ...]], **more: Any) -> Any:
    """The numbered arrays of a checkpoint, and what rank 1 of two stores of its draft."""
    config = {**DENSE, "model_type": kind, **more}
    stored = number(natives)
    shapes = logical_shapes(
        config, {name: (array.shape, "int64") for name, array in stored.items()}
    )
    disk = bind(hugging_face(config, natives), shapes)
    logical = gather(disk, {0: {(0, name): array for name, array in stored.items()}}, [0])
    side = vllm(config, ranks=range(2), tp=2, draft=True)
    bound = bind(side, shapes, unused=("model.*", "lm_head.*"))
    return stored, {name: array for (_, name), array in fill(bound, logical, 1).items()}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "exaone_moe"])
def test_a_draft_that_is_a_module_apart_is_numbered_from_0(kind: str) -> None:
    """Rule 25: its projection is cut by rows, and it reads the model's embedding and head."""
    natives = {"mtp.fc.weight": (4, 8), "mtp.norm.weight": (4,), "lm_head.weight": (100, 4)}
    natives |= {"mtp.pre_fc_norm_hidden.weight": (4,), "mtp.pre_fc_norm_embedding.weight": (4,)}
    natives |= {
        "mtp.layers.0.self_attn.o_proj.weight": (4, 16),
        "model.embed_tokens.weight": (100, 4),
    }
    stored, held = draft_of(kind, natives)
    assert np.array_equal(held["model.fc.weight"], stored["mtp.fc.weight"][2:])
    o_proj = stored["mtp.layers.0.self_attn.o_proj.weight"]
    assert np.array_equal(held["model.layers.0.self_attn.o_proj.weight"], o_proj[:, 8:])
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        assert np.array_equal(held[f"model.{name}.weight"], stored[f"mtp.{name}.weight"])
    assert np.array_equal(held["lm_head.weight"][:36], stored["lm_head.weight"][64:])
    assert len(held) == len(natives)


def test_nemotron_predicts_a_token_by_several_layers() -> None:
    """Rule 25: the first has the projection, which is cut by rows, the last the norm."""
    natives = {f"mtp.layers.0.{name}.weight": (4,) for name in ("enorm", "hnorm", "norm")}
    natives |= {"mtp.layers.0.eh_proj.weight": (4, 8), "mtp.layers.0.mixer.o_proj.weight": (4, 16)}
    natives |= {"mtp.layers.1.norm.weight": (4,), "mtp.layers.1.final_layernorm.weight": (4,)}
    natives |= {f"mtp.layers.1.mixer.experts.{e}.up_proj.weight": (8, 4) for e in range(2)}
    natives["mtp.layers.1.mixer.gate.weight"] = 2, 4
    stored, held = draft_of("nemotron_h", natives, n_routed_experts=2)
    eh_proj = stored["mtp.layers.0.eh_proj.weight"]
    assert np.array_equal(held["model.layers.0.eh_proj.weight"], eh_proj[2:])
    names = ("final_layernorm.weight", "norm.weight")
    for name in names:
        assert np.array_equal(held[f"model.layers.1.{name}"], stored[f"mtp.layers.1.{name}"])
    ups = [stored[f"mtp.layers.1.mixer.experts.{e}.up_proj.weight"][4:] for e in range(2)]
    routed = "model.layers.1.mixer.experts.routed_experts.w13_weight"
    assert np.array_equal(held[routed], np.stack(ups))


def test_ernie_numbers_its_draft_behind_its_layers() -> None:
    """Rule 25: its checkpoint counts from 0, in four modules; the projection is whole."""
    natives = {"model.mtp_emb_norm.0.weight": (4,), "model.mtp_hidden_norm.0.weight": (4,)}
    natives |= {"model.mtp_linear_proj.0.weight": (4, 8)}
    natives |= {"model.mtp_block.0.mlp.down_proj.weight": (4, 8)}
    stored, held = draft_of("ernie4_5_moe", natives)
    projection = stored["model.mtp_linear_proj.0.weight"]
    assert np.array_equal(held["model.layers.1.mtp_linear_proj.weight"], projection)
    down = stored["model.mtp_block.0.mlp.down_proj.weight"]
    assert np.array_equal(held["model.layers.1.mtp_block.mlp.down_proj.weight"], down[:, 4:])
