"""Shapes: names, shapes and dtypes of a real model's checkpoint, from its transformers config only.

1. The model is built on the meta device: no memory, no data and, for a config or a name of MODELS,
   no network.
2. Names, shapes and dtypes are the Hugging Face checkpoint's: persistent buffers are
   included (DeepSeek-V3's router biases), and tied tensors only under the first name
   (`lm_head.weight` tied to the embedding is not there).
3. transformers 5 stacks experts, `experts.gate_up_proj` (E, 2I, H), while the checkpoint has one
   tensor per expert. UNSTACK lists how to undo it, by model type; for other types, transformers'
   own conversion is used, which is slower: experts that are stacked in the checkpoint, too, stay
   stacked (gpt-oss), and renamed modules have their old names.
4. Floating-point tensors have `dtype`, or the config's; those that transformers keeps in float32
   (router biases, and from 5.24 on the routers of DeepSeek-V3 and many others) are float32.
5. `parameters` are the trained tensors, as Params for the rules of `shardmath.buffers`, in forward
   order.

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
from shardmath.base.text import word_error
from shardmath.buffers import Param
from shardmath_torch.commands.models.configs import MODELS
from shardmath_torch.commands.models.flat_buffers import embeddings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "UNSTACK",
    "Unstack",
    "parameters",
    "shapes",
]

Entry: TypeAlias = tuple[tuple[int, ...], str]
"""Global shape and dtype."""


class Unstack(NamedTuple):
    """A rule to rename or split a tensor whose name ends with `stacked`; `parts` are the suffixes for the new names. A
    suffix with {e}, such as "{e}.gate", stands for one slice of the tensor for each expert e.

    Parts without {e} are other names for the unchanged tensor.

    Dimension 0 of the tensor is the expert {e}, and dimension 1 is divided evenly among the parts.
    """

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
"""How experts are named in the checkpoint, by model type (transformers 5.24 `conversion_mapping.py`)."""


def shapes(model: PretrainedConfig | str, *, dtype: str | None = None) -> dict[str, Entry]:
    """Return a dict from tensor name to (global shape, dtype) for the checkpoint of `model` (a config, or the name of
    one), in the model's order; `dtype` replaces the config's dtype.

    `model` is a config, or the name of one: of MODELS, else what `AutoConfig.from_pretrained` takes
    (a folder, a Hub id). The architecture is the config's `architectures[0]` if that is a model of
    transformers, else the causal language model, else the bare model; custom code is never run,
    and nothing prompts for it. `dtype` is the floating-point dtype, by default the config's, else
    float32. Raises ShardError for a model that cannot be built, and for experts that do not fit
    UNSTACK.
    """
    config = _find_config(model)
    network = _build(config)
    return _name_as_stored(network, dict(_list_stored(network)), _choose_dtype(config, dtype))


def parameters(
    model: PretrainedConfig | str, *, dtype: str | None = None, shared: Collection[str] = ()
) -> tuple[Param, ...]:
    """Return the trainable parameters of `model` as Params (name, shape, dtype and more) for laying out flat buffers,
    in the model's order. Parameters named in `shared` get `shared_embedding=True`.

    Experts have `.experts.` in their names; embeddings and output layers are not managed by LayerWise optimizers;
    `model` and `dtype` are as in `shapes`. Raises ShardError as `shapes` does, and for a name in `shared` that is not a
    parameter's.
    """
    config = _find_config(model)
    network = _build(config)
    default = _choose_dtype(config, dtype)
    table_ids = embeddings(network)
    trained: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for name, tensor in _list_stored(network):
        if tensor.requires_grad:
            trained[name] = tensor
            if id(tensor) in table_ids:
                tables[name] = tensor
    entries = _name_as_stored(network, trained, default)
    unmanaged = _name_as_stored(network, tables, default)
    _check_shared(shared, entries, unmanaged)
    params = []
    for name, (shape, kind) in entries.items():
        param = Param(
            name,
            shape,
            kind,
            shared_embedding=name in shared,
            expert_parallel=".experts." in name,
            managed=False if name in unmanaged else None,
        )
        params.append(param)
    return tuple(params)


def _check_shared(
    shared: Collection[str], entries: Collection[str], embeddings: Collection[str]
) -> None:
    """Raise ShardError for a name of a shared embedding that no parameter has."""
    missing = sorted(set(shared) - set(entries))
    if missing:
        known = ", ".join(embeddings) or "none"
        what = f"shared names {missing[0]!r}, and no parameter is called that"
        raise ShardError(f"{what}; give names of parameters, such as these embeddings: {known}")


# The model


def _find_config(model: PretrainedConfig | str) -> PretrainedConfig:
    """The config, or the config of that name. Raises ShardError if there is none."""
    if not isinstance(model, str):
        return model
    from transformers import AutoConfig

    if model in MODELS:
        kind, settings = MODELS[model]
        return AutoConfig.for_model(kind, **settings)
    fix = f"give a config, a folder with config.json, or one of {', '.join(MODELS)}"
    # Only what looks like the Hub id owner/name is looked for on the Hub.
    if not Path(model).exists() and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        raise ShardError(f"no config for {model!r}: there is no such file or folder; {fix}")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the file is the user's, and what reads it transformers'
        what = f"no config for {model!r}: {word_error(error).splitlines()[0]}"
        raise ShardError(f"{what}; {fix}") from error


def _choose_dtype(config: PretrainedConfig, dtype: str | None) -> str:
    """The dtype of floating-point elements, by its name in layouts."""
    return dtypes.canonical(dtype or getattr(config, "dtype", None) or "float32")


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        with torch.device("meta"), _bound_modules():
            return _make_network(config)
    except Exception as error:  # the settings are the user's, and what takes them transformers'
        what = f"no model can be made of {type(config).__name__}: {word_error(error)}"
        fix = "give a config of which transformers' AutoModel.from_config makes a model"
        raise ShardError(f"{what}; {fix}") from error


def _make_network(config: PretrainedConfig) -> PreTrainedModel:
    """The model of the config's first architecture, if transformers has it, else an automatic one."""
    import transformers

    config = copy.deepcopy(config)
    # Attention does not change shapes, and other implementations may load code from the Hub.
    config._attn_implementation = "eager"
    wanted = (config.architectures or [""])[0]
    if wanted in _list_own_models():
        model = getattr(transformers, wanted)
        if isinstance(model, type) and issubclass(model, transformers.PreTrainedModel):
            return model(config)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    return auto.from_config(config, trust_remote_code=False)


@functools.cache
def _list_own_models() -> frozenset[str]:
    """The names of transformers' own models; a config could also name any other object in transformers."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for table_name, table in vars(modeling_auto).items():
        if not table_name.endswith("_MAPPING_NAMES"):
            continue
        for names in table.values():
            found.update((names,) if isinstance(names, str) else names)
    return frozenset(found)


MOST_MODULES = 300_000
"""A limit above any model's (DeepSeek-V3 with a module per expert has 60,000), as a config may set any number."""


@contextlib.contextmanager
def _bound_modules() -> Iterator[None]:
    """Raise ShardError in the block as soon as more than MOST_MODULES modules have been made."""
    made = itertools.count(1)

    def count(*_: object) -> None:
        if next(made) > MOST_MODULES:
            raise ShardError(
                f"the model has more than {MOST_MODULES} modules; give a config with fewer layers or experts"
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


# The checkpoint's tensors


def _list_stored(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors that a checkpoint stores; tied tensors appear under their first name."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _name_as_stored(
    network: PreTrainedModel, tensors: dict[str, Tensor], default: str
) -> dict[str, Entry]:
    """Shape and dtype of tensors of the network, named and split as in its checkpoint."""
    wide = tuple(getattr(network, "_keep_in_fp32_modules_strict", None) or ())
    rules = UNSTACK.get(network.config.model_type, ())
    if not rules:
        tensors = _convert_as_saved(network, tensors)
    entries: dict[str, Entry] = {}
    for name, tensor in tensors.items():
        dtype = _find_dtype(name, tensor, default, wide)
        for part, shape in _unstack(name, tuple(tensor.shape), rules):
            entries[part] = shape, dtype
    return entries


def _convert_as_saved(network: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, named and split as transformers saves them, but in the model's order instead of sorted."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5, modules are named and cut as their checkpoints
        return tensors
    converted: dict[str, Tensor] = revert_weight_conversion(network, tensors)
    # Converting tensors one by one gives the order; results that need several tensors at once come last.
    order: dict[str, None] = {}
    for name, tensor in tensors.items():
        converted_alone = revert_weight_conversion(network, {name: tensor})
        order.update(dict.fromkeys(part for part in converted_alone if part in converted))
    order.update(dict.fromkeys(converted))
    return {name: converted[name] for name in order}


def _find_dtype(name: str, tensor: Tensor, default: str, wide: tuple[str, ...]) -> str:
    """The stored dtype: integers keep theirs, names that contain one of `wide` are float32, others are `default`."""
    if not tensor.is_floating_point():
        return dtypes.canonical(tensor.dtype)
    if any(part in name for part in wide):
        return "float32"
    return default


def _unstack(
    name: str, shape: tuple[int, ...], rules: tuple[Unstack, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the checkpoint's tensors for this one."""
    for rule in rules:
        if name.endswith(f".{rule.stacked}"):
            prefix = name.removesuffix(rule.stacked)
            for part, cut in _split_stack(name, shape, rule):
                yield f"{prefix}{part}", cut
            return
    yield name, shape


def _split_stack(
    name: str, shape: tuple[int, ...], rule: Unstack
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(end of the name, shape) of the parts of a stack. Raises ShardError if it does not divide evenly."""
    # A rule without {e} only renames the tensor.
    if "{e}" not in rule.parts[0]:
        yield rule.parts[0], shape
        return
    experts, rows, *rest = shape
    count = len(rule.parts)
    if rows % count:
        what = f"{name!r} of shape {shape} does not fall into {count} equal parts"
        fix = "install transformers 5.24, or change UNSTACK for this model type"
        raise ShardError(f"{what} along dimension 1; {fix}")
    cut = (rows // count, *rest)
    for part in rule.parts:
        for e in range(experts):
            yield part.format(e=e), cut
