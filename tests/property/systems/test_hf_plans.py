"""Parameters lie as transformers' own functions cut them, element for element, on each rank of a mesh."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from shardmath import LayoutError, Mesh, MeshError, ShardError
from shardmath.models.systems.hf_plans import STYLES, ep_plan, hf_parallel, tp_plan

Fails = Callable[[Callable[[], object], type[ShardError], str], None]

SMALL = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ROUTED = {"moe_intermediate_size": 10, "num_experts_per_tok": 2}
MODELS = {
    "llama": SMALL,
    "llama_biased": {**SMALL, "attention_bias": True, "mlp_bias": True},
    "qwen2": SMALL,
    "qwen3_moe": {**SMALL, **ROUTED, "num_experts": 6, "mlp_only_layers": [0]},
    "mixtral": {**SMALL, "num_local_experts": 6},
    "gpt_oss": {**SMALL, "num_local_experts": 6},
    "llama4_text": {**SMALL, "num_local_experts": 6, "intermediate_size_mlp": 40},
    "phi3": SMALL,
    "deepseek_v3": {
        **SMALL,
        **ROUTED,
        "num_key_value_heads": 6,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
    },
}


def make(kind: str) -> Any:
    """The model without data."""
    config = transformers.AutoConfig.for_model(kind.removesuffix("_biased"), **MODELS[kind])
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[Any]:
    """One rank's mesh, without others."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def number(shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(math.prod(shape)).reshape(shape)


def cut(parameter: torch.Tensor) -> NDArray[np.int64]:
    """What transformers reads of a checkpoint's tensor for a parameter."""
    whole = torch.from_numpy(number(tuple(parameter.shape)))
    if not hasattr(parameter, "placements"):
        return whole.numpy()
    operation: Any = DtensorShardOperation(parameter)  # type: ignore[arg-type]
    return np.asarray(operation.shard_tensor(whole).numpy())


def shapes_of(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(p.shape), "float32") for name, p in model.named_parameters()}


def assert_same(model: Any, layouts: Any, rank: int) -> int:
    """Every parameter is what its layout says; how many are divided."""
    divided = 0
    for name, parameter in model.named_parameters():
        layout = layouts[name]
        expected = number(layout.shape)[np.ix_(*layout.indices(rank))]
        assert np.array_equal(cut(parameter), expected), name
        divided += expected.size < math.prod(layout.shape)
    return divided


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_tensor_parallel_plan(kind: str, world: int) -> None:
    """Of two, three and four ranks only some divide the sizes."""
    model = make(kind)
    # Llama 4's own plan lacks the prefix of the model's names, and transformers applies none of it.
    plan = tp_plan(model.config) if kind == "llama4_text" else model.tp_plan
    idle = ["*.mlp.gate_proj", "*.mlp.up_proj", "*.mlp.down_proj", "*.feed_forward.*"]
    layouts = hf_parallel(plan, shapes_of(model), Mesh(tp=world), unused=idle)
    for rank in range(world):
        with as_rank(rank, world) as mesh:
            model = make(kind)
            apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))
            assert assert_same(model, layouts, rank)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_an_expert_parallel_plan(kind: str, world: int) -> None:
    """Experts over all ranks, and the others' rules over the same ones."""
    model = make(kind)
    ranks = Mesh(tp=world)
    layouts = hf_parallel(
        model.tp_plan,
        shapes_of(model),
        ranks,
        experts=(model.ep_plan, Mesh(ep=world)),
        unused=["*.mlp.*_proj"],
    )
    wanted: Any = transformers.distributed.DistributedConfig(tp_size=world, ep_size=world)
    for rank in range(world):
        with as_rank(rank, world) as mesh:
            model = make(kind)
            dense, experts, _ = model._resolve_parallel_plans(wanted)
            apply_tensor_parallelism(model, mesh, dense)
            apply_expert_parallelism(model, mesh, mesh, experts)
            assert assert_same(model, layouts, rank)


SIZES = ((7,), (10,), (7, 10), (10, 7), (6, 7, 10), (6, 10, 7))
FITTING = [
    (style, shape)
    for style, rule in STYLES.items()
    for shape in SIZES
    if not (rule.dim == 1 and len(shape) == 1) and not (rule.even and shape[0] % 3)
]
"""Without dimensions that are not there, and experts that three ranks refuse."""


@pytest.mark.parametrize(("style", "shape"), FITTING)
@pytest.mark.parametrize("leaf", ["weight", "bias", "gate_up_proj", "down_proj_bias"])
def test_each_style_on_each_shape(style: str, shape: tuple[int, ...], leaf: str) -> None:
    """Also where a style was not meant for it: sizes that three ranks do not divide, and odd halves."""
    layouts = hf_parallel({"module": style}, {f"module.{leaf}": (shape, "float32")}, Mesh(tp=3))
    for rank in range(3):
        with as_rank(rank, 3) as mesh:
            module = torch.nn.Module()
            module.register_parameter(leaf, torch.nn.Parameter(torch.empty(shape, device="meta")))
            ALL_PARALLEL_STYLES[style].shard_param(module, leaf, mesh)
            root = torch.nn.Module()
            root.add_module("module", module)
            assert_same(root, layouts, rank)


def test_all_styles_are_known() -> None:
    assert set(STYLES) == set(ALL_PARALLEL_STYLES)


@pytest.mark.parametrize("kind", sorted(MODELS.keys() - {"llama4_text"}))
def test_a_configuration_has_the_plans_of_its_model(kind: str) -> None:
    model = make(kind)
    assert tp_plan(model.config) == model.tp_plan
    assert ep_plan(model.config) == model.ep_plan


def test_what_does_not_fit(fails: Fails) -> None:
    shapes = {"model.experts.up_proj": ((6, 4, 4), "float32")}

    def lay(plan: dict[str, str], **given: Any) -> Callable[[], object]:
        return lambda: hf_parallel(plan, shapes, Mesh(tp=4), **given)

    fails(
        lay({"model.experts": "colwise", "model.norm": "colwise", "head": "rowwise"}),
        LayoutError,
        "rules match no parameter and no module of the model: model.norm, head; "
        "write names that it has, or list these rules in unused=; unused=['*'] is for a model's own plan, whose "
        "rules for other sizes of the model may match nothing",
    )
    fails(
        lay({"model.experts": "local_colwise"}),
        LayoutError,
        "rule 'model.experts' has style 'local_colwise', which transformers 5.24 does not have; "
        f"use one of {', '.join(STYLES)}",
    )
    fails(
        lay({}, experts=({"model.experts": "grouped_gemm"}, Mesh(ep=4))),
        LayoutError,
        "6 experts of 'model.experts.up_proj' cannot be divided evenly over ep=4; "
        "give a mesh whose ep divides 6",
    )
    fails(
        lay({}, axis="model"),
        MeshError,
        "Mesh(tp=4) has no axis 'model'; name one of its axes: tp",
    )


def test_a_rule_of_its_own_goes_before_the_module() -> None:
    shapes = {"a.0.experts.up": ((6, 4, 4), "float32"), "a.0.experts.bias": ((6, 4), "float32")}
    plan = {"a.*.experts": "moe_tp_experts", "a.*.experts.up": "rowwise"}
    whole, divided = hf_parallel(plan, dict(reversed(shapes.items())), Mesh(tp=2)).values()
    assert (whole.text, divided.text) == ("...", "h w (tp n)") or divided.local_shape(0) == (
        6,
        4,
        2,
    )
    assert whole.local_shape(0) == (6, 4)
