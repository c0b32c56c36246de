"""Megatron-Core: the tensors of a GPTModel on a trainer's rank, and how all of its ranks store them.

1. Megatron's configuration says how tensors are divided (`models.systems.megatron`). Hugging Face's configuration says
   how vLLM's loader names them, and which of them Megatron has fused (`models.systems.hugging_face`). Megatron is not
   imported.
2. Tensors are the model's own, so that what a step changes in them is what is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from shardmath.base.arguments import known
from shardmath.base.dtypes import canonical
from shardmath.base.errors import StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.stored import Shapes, Stored
from shardmath.models.systems.config import Config
from shardmath.models.systems.megatron import NORMS, ORDER, logical_shapes, megatron
from shardmath_torch.groups.agreement.gather import gather
from shardmath_vllm.converting import declare_conversion
from shardmath_vllm.source import Source

__all__ = ["read_megatron"]

LESS_ONE = (
    *("gemma", "gemma2", "gemma3", "nemotron", "qwen3next"),
    *("qwen35", "qwen35moe", "rnj1", "step3p5", "step3p7"),
)
"""Kinds of model whose checkpoints store weights of norms less one."""
WHOLE = ".linear_attn.norm.weight"
"""The end of the name of a norm that these checkpoints store whole."""


def read_megatron(
    chunks: nn.Module | Sequence[nn.Module],
    config: object,
    *,
    spec: str = "te",
    order: str = ORDER,
    vocab_multiple: int = 128,
    dtype: str | None = None,
    norms: str = "check",
) -> Source:
    """Return a Source (this rank's tensors, and how all ranks store theirs) of a Megatron-Core GPTModel, given as
    `chunks`: the model, or a list of its virtual stages. `config` is the model's Hugging Face configuration. `spec`
    (kind of layers: "te" or "local"), `order` (of parallel axes) and `vocab_multiple` (vocabulary sizes are padded to
    it) are as in the trainer. Engines get parameters in `dtype` (default: the trainer's). Collective.

    `order` is like "tp-cp-ep-dp-pp", where tp varies fastest over the ranks; `vocab_multiple` is Megatron's
    make_vocab_size_divisible_by. Chunks may be wrapped, as by Megatron's DistributedDataParallel. `config` is an
    object, or a mapping of its fields. Engines get buffers always as they are. Collective over the default group.
    Raises StoreError for a model whose storage rows do not describe, and for norms that the trainer stores less one and
    checkpoints do not, or the reverse; `norms="keep"` sends these as they are.
    """
    modules = tuple(_unwrap(chunk) for chunk in _list_chunks(chunks))
    # Any, since Megatron, whose class this is, is not imported.
    first_chunk: Any = modules[0]
    model_config = first_chunk.config
    params_dtype = canonical(model_config.params_dtype)
    vocab = Config(config).get("vocab_size")
    if not isinstance(vocab, int):
        raise StoreError(
            f"config= is {type(config).__name__} with vocab_size={vocab!r}, where an integer is needed; pass "
            f"the model's Hugging Face configuration"
        )
    pattern = _find_pattern(first_chunk)
    shapes = logical_shapes(
        model_config,
        vocab=vocab,
        tied=first_chunk.share_embeddings_and_output_weights,
        positions=_count_positions(first_chunk),
        pattern=pattern,
        dtype=params_dtype,
    )
    _check_norms(model_config, Config(config).kind, shapes, norms)
    side = megatron(
        model_config,
        ranks=range(dist.get_world_size()),
        tp=model_config.tensor_model_parallel_size,
        pp=model_config.pipeline_model_parallel_size,
        cp=model_config.context_parallel_size,
        ep=model_config.expert_model_parallel_size,
        etp=model_config.expert_tensor_parallel_size,
        vpp=len(modules),
        order=order,
        spec=spec,
        vocab=vocab,
        vocab_multiple=vocab_multiple,
        pattern=pattern,
        norms="keep",  # they are checked above, with the kind of checkpoint
    )
    tensors = [_list_own(module) for module in modules]
    reports = _gather_reports(shapes, side, tensors)
    held_shapes = _correct(shapes, reports)
    served = _serve(held_shapes, reports, dtype)
    checkpoint = declare_conversion(config, served)
    return Source(tensors, side, held_shapes, served, checkpoint, modules, dist.get_rank())


def _find_pattern(chunk: Any) -> str | None:
    """The pattern of a hybrid model, which has another name from Megatron-Core 0.19 on; None for other models."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((getattr(chunk, name) for name in names if hasattr(chunk, name)), None)


def _count_positions(chunk: Any) -> int:
    """The number of learned positions; 0 if positions are not learned."""
    learned = getattr(chunk, "position_embedding_type", None) == "learned_absolute"
    return chunk.max_sequence_length if learned else 0


def _check_norms(model_config: Any, kind: str, shapes: Shapes, norms: str) -> None:
    """Raise StoreError if norms differ by one from the norms in checkpoints of this kind, unless norms are kept."""
    if known(norms, NORMS) is None:
        raise StoreError(f"norms={norms!r} is not known; use one of {', '.join(NORMS)}")
    if norms == "keep":
        return
    forms = ("whole", "less one")
    stored = bool(getattr(model_config, "layernorm_zero_centered_gamma", False))
    wanted = kind in LESS_ONE
    apart = next((name for name in shapes if name.endswith(WHOLE)), None) if wanted else None
    if stored == wanted and not (stored and apart):
        return
    which = "norms" if stored != wanted else repr(apart)
    what = f"with layernorm_zero_centered_gamma={stored} the trainer stores {which} {forms[stored]}"
    fix = "make the two equal, or pass norms='keep' and send changed tensors"
    raise StoreError(f"{what}, and checkpoints of {kind!r} {forms[not stored]}; {fix}")


def _list_chunks(chunks: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    """A module for each virtual stage. Raises TypeError for an empty list, and for anything but modules."""
    listed = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    if not listed or not all(isinstance(chunk, nn.Module) for chunk in listed):
        kinds = ", ".join(type(chunk).__name__ for chunk in listed) or "empty"
        raise TypeError(
            f"chunks= is {kinds}, where modules are needed; pass a GPTModel, or a list of one per "
            f"virtual stage"
        )
    return listed


def _unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside wrappers, which have it as `module`. Raises TypeError if it is not a Megatron-Core model."""
    model_or_wrapper: Any = chunk
    while isinstance(getattr(model_or_wrapper, "module", None), nn.Module):
        model_or_wrapper = model_or_wrapper.module
    if not hasattr(getattr(model_or_wrapper, "config", None), "tensor_model_parallel_size"):
        raise TypeError(
            f"{type(model_or_wrapper).__name__} has no Megatron-Core config (a TransformerConfig); pass a "
            f"GPTModel of Megatron-Core"
        )
    model: nn.Module = model_or_wrapper
    return model


class _TensorReport(NamedTuple):
    """Facts about a rank's tensors: the dtypes that differ from the trainer's usual one, and the names of buffers."""

    dtypes: dict[str, str]
    buffers: set[str]


def _list_own(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters and persistent buffers, such as the bias of a router, by name."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict(keep_vars=True)
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return tensors


def _gather_reports(
    shapes: Shapes, side: Stored, tensors: Sequence[Mapping[str, Tensor]]
) -> list[_TensorReport]:
    """The reports of all ranks about the dtypes and buffers among their tensors. Collective."""
    report = _TensorReport({}, set())
    for name, slot in bind(side, shapes).slots(dist.get_rank()).items():
        tensor = tensors[slot.chunk].get(slot.native)
        if tensor is None:
            # The refit reports it, with everything else that does not fit.
            continue
        dtype = canonical(tensor.dtype)
        if dtype != shapes[name][1]:
            report.dtypes[name] = dtype
        if not isinstance(tensor, nn.Parameter):
            report.buffers.add(name)
    return gather(report, None, "say of which dtypes tensors are")


def _correct(shapes: Shapes, reports: Sequence[_TensorReport]) -> Shapes:
    """The shapes with the dtypes that ranks hold, since some tensors are float32 in models of any dtype."""
    corrected = dict(shapes)
    for report in reports:
        for name, dtype in report.dtypes.items():
            corrected[name] = shapes[name][0], dtype
    return corrected


def _serve(shapes: Shapes, reports: Sequence[_TensorReport], dtype: str | None) -> Shapes:
    """The shapes and dtypes that engines get: parameters in `dtype`, and buffers unchanged."""
    if dtype is None:
        return shapes
    buffers: set[str] = set().union(*(report.buffers for report in reports))
    served = dict(shapes)
    for name, (shape, _) in shapes.items():
        if name not in buffers:
            served[name] = shape, dtype
    return served
