"""Shapes: what a checkpoint of a real architecture holds, from its transformers config alone.

1. The model is built on the meta device: no memory, no data and, for a config or a name of MODELS, no network.
2. Names, shapes and dtypes are those of the Hugging Face checkpoint: persistent buffers are included (DeepSeek-V3's
   router biases), and of tied tensors the first name alone (`lm_head.weight` tied to the embedding is not there).
3. transformers 5 keeps experts stacked, `experts.gate_up_proj` (E, 2I, H), where the checkpoint has one tensor an
   expert. UNSTACK says how to undo it, by model type; all other types go by what transformers 5 itself would save,
   slower: experts that are stacked in the checkpoint, too, stay so (gpt-oss), and renamed modules have their old names.
4. Elements are of `dtype`, or of the config's own; what transformers keeps in float32 (router biases) is float32.
5. `parameters` are those that are trained, as the rules of `shardmath.buffers` see them, in forward order.

>>> from transformers import MixtralConfig
>>> small = MixtralConfig(num_hidden_layers=1, num_local_experts=2, hidden_size=8, intermediate_size=6, vocab_size=32,
...                       num_attention_heads=2, num_key_value_heads=1)
>>> for name, (shape, dtype) in shapes(small, dtype="bfloat16").items():
...     print(name, shape, dtype) if "experts" in name else None
model.layers.0.block_sparse_moe.experts.0.w1.weight (6, 8) bfloat16
model.layers.0.block_sparse_moe.experts.1.w1.weight (6, 8) bfloat16
model.layers.0.block_sparse_moe.experts.0.w3.weight (6, 8) bfloat16
model.layers.0.block_sparse_moe.experts.1.w3.weight (6, 8) bfloat16
model.layers.0.block_sparse_moe.experts.0.w2.weight (8, 6) bfloat16
model.layers.0.block_sparse_moe.experts.1.w2.weight (8, 6) bfloat16
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook

from shardmath import ShardError
from shardmath.base import dtypes
from shardmath.buffers import Param
from shardmath_torch.models.flat_buffers import embeddings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "DEEPSEEK_V3",
    "MODELS",
    "NEMOTRON_NANO",
    "NEMOTRON_SUPER",
    "QWEN3_235B",
    "QWEN3_30B",
    "QWEN3_4B",
    "UNSTACK",
    "Unstack",
    "parameters",
    "shapes",
]

Entry: TypeAlias = tuple[tuple[int, ...], str]
"""Global shape and dtype."""

DEEPSEEK_V3 = "deepseek-ai/DeepSeek-V3"
QWEN3_235B = "Qwen/Qwen3-235B-A22B"
QWEN3_30B = "Qwen/Qwen3-30B-A3B"
QWEN3_4B = "Qwen/Qwen3-4B"
NEMOTRON_NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NEMOTRON_SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"

NEMOTRON: dict[str, object] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_shared_experts": 1,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""What the hybrids of Mamba, experts and attention have in common; without layers of multi-token prediction."""

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    DEEPSEEK_V3: (
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_235B: (
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_30B: (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_4B: (
        "qwen3",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    NEMOTRON_NANO: (
        "nemotron_h",
        {
            **NEMOTRON,
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "moe_intermediate_size": 1856,
            "n_routed_experts": 128,
            "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
    ),
    NEMOTRON_SUPER: (
        "nemotron_h",
        {
            **NEMOTRON,
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "n_routed_experts": 512,
            "moe_shared_expert_intermediate_size": 5376,
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
            "EMEMEMEME",
        },
    ),
}
"""Model type and configuration of models known without a network: what is published of their shapes."""


class Unstack(NamedTuple):
    """A tensor that ends in `stacked`, (E, ...), is E tensors a name of `parts`: dimension 0 is the expert {e}, and
    dimension 1 is cut evenly among the parts. A part without {e} is another name for the tensor as it is."""

    stacked: str
    parts: tuple[str, ...]


PROJ = (
    Unstack("experts.gate_up_proj", ("experts.{e}.gate_proj.weight", "experts.{e}.up_proj.weight")),
    Unstack("experts.down_proj", ("experts.{e}.down_proj.weight",)),
)
W123 = (
    Unstack(
        "mlp.experts.gate_up_proj",
        ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
    ),
    Unstack("mlp.experts.down_proj", ("block_sparse_moe.experts.{e}.w2.weight",)),
    Unstack("mlp.gate.weight", ("block_sparse_moe.gate.weight",)),
    Unstack("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    Unstack("mlp.e_score_correction_bias", ("block_sparse_moe.e_score_correction_bias",)),
)

UNSTACK: dict[str, tuple[Unstack, ...]] = {
    **dict.fromkeys(
        ("afmoe", "beam", "deepseek_v2", "deepseek_v3", "deepseek_v32", "flex_olmo", "glm4_moe"),
        PROJ,
    ),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "jamba", "longcat_flash", "mellum"), PROJ),
    **dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open"), PROJ),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral", "phimoe"), W123),
}
"""How experts are named in the checkpoint, by model type (transformers 5.23 `conversion_mapping.py`)."""


def shapes(model: PretrainedConfig | str, *, dtype: str | None = None) -> dict[str, Entry]:
    """Global shape and dtype of every tensor of the checkpoint, by name, in the model's order.

    `model` is a config, or the name of one: of MODELS, else what `AutoConfig.from_pretrained` takes (a folder, a Hub
    id). The architecture is the config's `architectures[0]` if that is a model of transformers, else the causal
    language model, else the bare model; nobody else's code is run, and nothing is asked.
    `dtype` is that of the floating-point elements; the config's own if not given, else float32. Raises ShardError for a
    model that cannot be built, and for experts that do not fit UNSTACK.
    """
    config = _config(model)
    network = _build(config)
    return _named(network, dict(_stored(network)), _kind(config, dtype))


def parameters(
    model: PretrainedConfig | str, *, dtype: str | None = None, shared: Collection[str] = ()
) -> tuple[Param, ...]:
    """The tensors of `shapes` that are trained, as rules of buffers see them, in forward order.

    Experts are what is named `.experts.`; embeddings and output layers are not managed by LayerWise optimizers, what is
    named in `shared` is a shared embedding. Raises ShardError as `shapes` does, and for a name that is none of them.
    """
    config = _config(model)
    network, kind = _build(config), _kind(config, dtype)
    trained = {name: tensor for name, tensor in _stored(network) if tensor.requires_grad}
    known, tables = _named(network, trained, kind), embeddings(network)
    words = _named(
        network, {name: tensor for name, tensor in trained.items() if id(tensor) in tables}, kind
    )
    missing = sorted(set(shared) - set(known))
    if missing:
        raise ShardError(
            f"no parameter is called {missing[0]!r}; embeddings are {', '.join(words) or 'none'}"
        )
    return tuple(
        Param(
            name,
            *entry,
            shared_embedding=name in shared,
            expert_parallel=".experts." in name,
            managed=False if name in words else None,
        )
        for name, entry in known.items()
    )


def _kind(config: PretrainedConfig, dtype: str | None) -> str:
    return dtypes.canonical(dtype or getattr(config, "dtype", None) or "float32")


def _named(network: PreTrainedModel, tensors: dict[str, Tensor], kind: str) -> dict[str, Entry]:
    """Shape and dtype of tensors of the network under the names that its checkpoint has for them, and cut alike."""
    wide = tuple(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    rules = UNSTACK.get(network.config.model_type)
    out = {}
    for name, tensor in (tensors if rules else _as_saved(network, tensors)).items():
        entry = _dtype(name, tensor, kind, wide)
        out.update(
            {
                key: (shape, entry)
                for key, shape in _unstacked(name, tuple(tensor.shape), rules or ())
            }
        )
    return out


def _config(model: PretrainedConfig | str) -> PretrainedConfig:
    if not isinstance(model, str):
        return model
    from transformers import AutoConfig

    if model in MODELS:
        kind, settings = MODELS[model]
        return AutoConfig.for_model(kind, **settings)
    if not Path(model).exists() and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        raise ShardError(f"no config for {model!r}: there is no such file or folder; {_wanted()}")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the file is the user's, and what reads it transformers'
        what = (
            f"no config for {model!r}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        )
        raise ShardError(f"{what}; {_wanted()}") from error


def _wanted() -> str:
    return f"give a config, a folder with config.json, or one of {', '.join(MODELS)}"


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        with torch.device("meta"), _bounded():
            return _network(config)
    except Exception as error:  # the settings are the user's, and what takes them transformers'
        what = f"{type(config).__name__} builds no model: {type(error).__name__}: {error}"
        raise ShardError(
            f"{what}; give a transformers config, with what its architecture needs"
        ) from error


def _network(config: PretrainedConfig) -> PreTrainedModel:
    import transformers

    config = copy.deepcopy(config)
    config._attn_implementation = (
        "eager"  # any other may name code on the Hub, and none changes a shape
    )
    wanted = (config.architectures or [""])[0]
    if wanted in _registered():
        model = getattr(transformers, wanted)
        if isinstance(model, type) and issubclass(model, transformers.PreTrainedModel):
            return model(config)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return auto.from_config(config, trust_remote_code=False)


@functools.cache
def _registered() -> frozenset[str]:
    """The names of transformers' own models; a config may name anything else that transformers has, too."""
    from transformers.models.auto import modeling_auto

    tables = [
        names for name, names in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")
    ]
    found = (one for names in tables for one in names.values())
    return frozenset(name for one in found for name in ((one,) if isinstance(one, str) else one))


MOST_MODULES = 300_000
"""More than any model has, DeepSeek-V3 with an expert a module 60,000; a config may ask for any number of layers."""


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Raises ShardError as soon as more modules than that have been made."""
    made = itertools.count(1)

    def count(*_: object) -> None:
        if next(made) > MOST_MODULES:
            raise ShardError(f"it has more than {MOST_MODULES} modules")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _stored(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all that a checkpoint stores: of tied tensors the first."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _as_saved(network: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names, and cut as, transformers saves them; in the model's order, not sorted as there."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, modules are named and cut as their checkpoints
        return tensors
    found: dict[str, Tensor] = revert_weight_conversion(network, tensors)
    alone = (revert_weight_conversion(network, {name: tensor}) for name, tensor in tensors.items())
    names = dict.fromkeys(name for part in alone for name in part if name in found)
    return {name: found[name] for name in (*names, *found)}


def _dtype(name: str, tensor: Tensor, kind: str, wide: tuple[str, ...]) -> str:
    if not tensor.is_floating_point():
        return dtypes.canonical(tensor.dtype)
    return "float32" if any(part in name for part in wide) else kind


def _unstacked(
    name: str, shape: tuple[int, ...], rules: tuple[Unstack, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors that this one is in the checkpoint."""
    rule = next((rule for rule in rules if name.endswith(f".{rule.stacked}")), None)
    if rule is None:
        yield name, shape
        return
    prefix = name.removesuffix(rule.stacked)
    yield from ((f"{prefix}{part}", part_shape) for part, part_shape in _parts(name, shape, rule))


def _parts(
    name: str, shape: tuple[int, ...], rule: Unstack
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if "{e}" not in rule.parts[0]:
        yield rule.parts[0], shape
        return
    experts, rows, *rest = shape
    if rows % len(rule.parts):
        what = f"{name!r} of shape {shape} does not fall into {len(rule.parts)} equal parts along dimension 1"
        raise ShardError(f"{what}; UNSTACK[model_type] is wrong for this version of transformers")
    cut = (rows // len(rule.parts), *rest)
    for part in rule.parts:
        yield from ((part.format(e=e), cut) for e in range(experts))
