"""A transformers model's weights move into a Megatron model, which then runs, and come back.

1. Rank 0 stores the checkpoint, under the names that transformers would save, and is a rank of the trainer too.
2. Nothing but the rows knows how either side stores a tensor. What they say is also what the plain reference says,
   whose order of components is thereby that of Megatron's logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.megatron_shapes import logical_shapes
from shardmath.storage import Stored, parse, show
from shardmath_vllm import read_megatron
from tests.megatron import configs, further, trainer
from tests.megatron.cases import VOCAB, Case, Found, is_before
from tests.references.checkpoint import unstack
from tests.references.megatron import Trainer, store

__all__ = ["move"]

STARCODER = """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
c_fc.*   = up_proj.*
c_proj.* = down_proj.*
[ = ]
...      = ...
"""
"""StarCoder2: rows of `hugging_face` leave its names as they are, as vLLM does."""


def move(rank: int, case: Case) -> Found:
    """The weights to Megatron, its logits against those of transformers, and the weights back."""
    original = _make_model(case)
    config = configs.configure(case, original.config)
    chunks = trainer.build(case, config, original.config)
    stored = _list_stored(original)
    checkpoint = _declare_checkpoint(case, original.config, stored)
    trained = _declare_trainer(case, config)
    shapes = logical_shapes(config, vocab=VOCAB, tied=case.tied, pattern=case.pattern)
    own = [_list_own(case, chunk) for chunk in chunks]
    dead = _list_dead(case)

    there = smt.Refit(sm.refit(checkpoint, trained, shapes), timeout=30.0)
    there.prepare(stored if rank == 0 else None, own, own=dead)
    there(acknowledge=True)
    strange = _list_strange(case, original, own, rank)
    strange += sorted(_read(case, chunks, original.config).keys() ^ shapes.keys())
    tokens = torch.arange(32).mul(37).remainder(VOCAB).view(2, 16)
    logits = trainer.forward(chunks, tokens)

    returned = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    back = smt.Refit(sm.refit(trained, checkpoint, shapes), timeout=30.0)
    back.prepare(own, returned if rank == 0 else None, own=dead)
    back(acknowledge=True)
    not_back = _list_changed(stored, returned) if rank == 0 else []
    if logits is None:
        return Found(None, None, None, not_back, strange)
    with torch.no_grad():
        wanted = [original(tokens).logits, *further.predict(original, tokens, case.further)]
    found = [_compare(has, wants) for has, wants in zip(logits, wanted, strict=True)]
    differences, largest, greedy = zip(*found, strict=True)
    return Found(max(differences), min(largest), all(greedy), not_back, strange)


def _compare(has: Tensor, wants: Tensor) -> tuple[float, float, bool]:
    """The greatest difference, the largest logit wanted, and whether the same tokens are the likeliest."""
    # The last positions have no further token to predict.
    has = has[:, : wants.shape[1]]
    difference = float((has - wants).abs().max())
    return difference, float(wants.abs().max()), torch.equal(has.argmax(-1), wants.argmax(-1))


def _list_dead(case: Case) -> list[str]:
    """What no row has, since Megatron never reads it: with tied embeddings, a stage uses its embedding as the head."""
    # A stage with the head alone reads it.
    is_alone = case.layout is not None and case.layout.endswith("|L")
    unread = case.tied and case.further and case.pp > 1 and not is_alone
    return ["output_layer.weight"] if unread else []


def _make_model(case: Case) -> Any:
    """The same on every rank. Weights are so large that logits are, and that attention is far from uniform."""
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**case.fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    if case.further:
        further.add_further(model, 1 if case.repeated else case.further, case.again)
    random = torch.Generator().manual_seed(1)
    for tensor in trainer.own_tensors(model).values():
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.5
        drawn = torch.randn(tensor.shape, generator=random) * scale
        # Weights of norms are about 1; biases are too, where other values would do as well.
        tensor.data = drawn if tensor.dim() > 1 else 1 + drawn
    return model


def _list_own(case: Case, chunk: Any) -> dict[str, Tensor]:
    """What a Megatron rank moves: its model's own tensors."""
    own = trainer.own_tensors(chunk)
    if case.legacy:
        # Declared flat, and viewed as a stack of matrices where they are multiplied.
        stack, hidden = chunk.config.num_moe_experts // case.ep, chunk.config.hidden_size
        for name in [name for name in own if name.endswith("experts.weight1")]:
            own[name] = own[name].view(stack, hidden, -1)
        for name in [name for name in own if name.endswith("experts.weight2")]:
            own[name] = own[name].view(stack, -1, hidden)
    return own


def _list_stored(model: Any) -> dict[str, Tensor]:
    """What the checkpoint's rank moves: the model's own tensors, under the names of checkpoints."""
    stored = _list_tensors(model)
    plain = {name: one for name, one in stored.items() if not name.startswith("further.")}
    layers = further.list_published(stored, model.config)
    return revert_weight_conversion(model, plain) | layers


def _list_tensors(model: Any) -> dict[str, Tensor]:
    """The model's own tensors."""
    stored = trainer.own_tensors(model)
    for name, module in model.named_modules():
        # Qwen3-Next keeps these weights less one, and Megatron's own norm keeps them whole: arithmetic is not moved.
        if type(module).__name__ == "Qwen3NextRMSNorm":
            stored[f"{name}.weight"] = 1 + stored[f"{name}.weight"].detach()
    return stored


def _declare_checkpoint(case: Case, hf: Any, stored: dict[str, Tensor]) -> Stored:
    """How rank 0 stores it."""
    side = hugging_face(_list_fields(case, hf), stored)
    return replace(side, rows=parse(STARCODER)) if hf.model_type == "starcoder2" else side


def _list_fields(case: Case, hf: Any) -> dict[str, Any]:
    """The configuration that a checkpoint has."""
    depths = 1 if case.repeated else case.further
    fields = {"num_hidden_layers": hf.num_hidden_layers, "num_nextn_predict_layers": depths}
    return {**hf.to_dict(), **fields}


def _read(case: Case, chunks: list[Any], hf: Any) -> Shapes:
    """The logical tensors that a trainer of vLLM engines finds in the model itself."""
    fields = _list_fields(case, hf)
    # Of Qwen3-Next the test moves norms that are whole (`_list_tensors`), and its checkpoints store some less one.
    return read_megatron(chunks, fields, spec=case.spec, order=case.order, norms="keep").shapes


def _declare_trainer(case: Case, config: Any) -> Stored:
    """How the trainer stores its tensors, with the rows as they are or one structure swapped."""
    side = megatron(
        config,
        ranks=range(case.ranks),
        tp=case.tp,
        pp=case.pp,
        vpp=case.vpp,
        ep=case.ep,
        etp=case.etp,
        order=case.order,
        spec=case.spec,
        vocab=VOCAB,
    )
    if case.swap is None:
        return side
    text = show(side.rows)
    changed = text.replace(*case.swap)
    assert changed != text, case.swap
    return Stored(parse(changed), side.meshes, side.indices, side.numbers)


def _list_strange(case: Case, original: Any, own: list[dict[str, Tensor]], rank: int) -> list[str]:
    """The rank's tensors that are not as the plain reference fills them, but for padding, which nothing fills."""
    if not case.is_plain:
        return []
    state = {name: tensor.detach().numpy() for name, tensor in _list_tensors(original).items()}
    hf = original.config
    fields = {**hf.to_dict(), "num_hidden_layers": hf.num_hidden_layers}
    sizes = {"tp": case.tp, "pp": case.pp, "vpp": case.vpp, "ep": case.ep, "etp": case.etp}
    conv = "conv1d." if is_before("0.19") else "conv1d_"
    plain = Trainer(range(case.ranks), **sizes, te=case.spec == "te", multiple=128, conv=conv)
    filled = [store(unstack(state), fields, plain, rank, empty=empty) for empty in (0, 1)]
    strange = []
    for has, zeros, ones in zip(own, *filled, strict=True):
        strange += sorted(has.keys() ^ zeros.keys())
        for name in has.keys() & zeros.keys():
            elements = zeros[name] == ones[name]
            found = has[name].detach().numpy()
            if not np.array_equal(found[elements], zeros[name][elements]):
                strange.append(name)
    return strange


def _list_changed(stored: dict[str, Tensor], returned: dict[str, Tensor]) -> list[str]:
    """The tensors that did not come back bit for bit."""
    return [name for name, tensor in stored.items() if not torch.equal(tensor, returned[name])]
