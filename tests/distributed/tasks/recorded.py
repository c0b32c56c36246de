"""Loaders as people write them, by hand and by rank: what they record has to be what rows say.

`by_views` copies into slices, as vLLM's loaders do; `by_making` concatenates, stacks and indexes first, as converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.systems.megatron import megatron
from shardmath.storage import Stored, bind
from tests.distributed.tasks import refits

Tensors = Mapping[str, Tensor]
Into = dict[str, Tensor]
Loader = Callable[[Tensors, Any, int], None]
"""Takes logical tensors, and what a rank stores: a mapping, or one per chunk."""
DENSE, SPARSE = (0, 2), (1, 3)
EXPERTS = range(4)
TP = 4


def trainer() -> Stored:
    """Two stages of two ranks, without virtual ones."""
    sizes = {"tp": 2, "pp": 2, "ep": 1, "etp": 2, "vocab": 10, "vocab_multiple": 1}
    return megatron(refits.LAYERS, ranks=range(4), **sizes)


def virtual_trainer() -> Stored:
    """The same with two virtual stages on each rank, of a layer each."""
    sizes = {"tp": 2, "pp": 2, "vpp": 2, "ep": 1, "etp": 2, "vocab": 10, "vocab_multiple": 1}
    return megatron(refits.LAYERS, ranks=range(4), **sizes)


def engine() -> Stored:
    return refits.engine(range(4, 8))


def part(tensor: Tensor, dim: int, rank: int, of: int) -> Tensor:
    """An equal part of one dimension."""
    n = tensor.shape[dim] // of
    return tensor.narrow(dim, rank * n, n)


def by_views(given: Tensors, own: Into, rank: int) -> None:
    """An engine's rank: every copy is from a view into a view."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = given[name][3 * rank : 3 * rank + 3]
        own[name].zero_()
        own[name][: len(rows)].copy_(rows)
    own["model.norm.weight"].data.copy_(given["model.norm.weight"])
    for layer in range(4):
        p = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            own[p + norm].data.copy_(given[p + norm])
        fused = own[p + "self_attn.qkv_proj.weight"]
        fused[0:2] = part(given[p + "self_attn.q_proj.weight"], 0, rank, TP)
        fused.narrow(0, 2, 2).copy_(part(given[p + "self_attn.k_proj.weight"], 0, rank // 2, 2))
        fused.data[4:].copy_(part(given[p + "self_attn.v_proj.weight"], 0, rank // 2, 2))
        attended = part(given[p + "self_attn.o_proj.weight"], 1, rank, TP)
        own[p + "self_attn.o_proj.weight"].copy_(-torch.exp(attended.float()))
    for layer in DENSE:
        p = f"model.layers.{layer}.mlp."
        own[p + "gate_up_proj.weight"][0::2] = part(given[p + "gate_proj.weight"], 0, rank, TP)
        own[p + "gate_up_proj.weight"][1::2] = part(given[p + "up_proj.weight"], 0, rank, TP)
        own[p + "down_proj.weight"].copy_(part(given[p + "down_proj.weight"], 1, rank, TP).clone())
    for layer in SPARSE:
        p = f"model.layers.{layer}.mlp."
        own[p + "gate.weight"].copy_(given[p + "gate.weight"])
        for e in EXPERTS:
            w13, w2 = own[p + "experts.w13_weight"], own[p + "experts.w2_weight"]
            for i, half in enumerate(("gate", "up")):
                tensor = part(given[f"{p}experts.{e}.{half}_proj.weight"], 0, rank, TP)
                w13[e, :, i].copy_(tensor.T.contiguous().squeeze(1))
            w2[e].copy_(part(given[f"{p}experts.{e}.down_proj.weight"], 1, rank, TP))


def by_making(given: Tensors, own: Into, rank: int) -> None:
    """The same, but for what is computed, of tensors that are made first."""
    by_views(given, own, rank)
    for layer in range(4):
        p = f"model.layers.{layer}.self_attn."
        fused = [part(given[p + "q_proj.weight"], 0, rank, TP)]
        fused += [given[p + f"{x}_proj.weight"].chunk(2)[rank // 2] for x in "kv"]
        own[p + "qkv_proj.weight"].copy_(torch.cat(fused))
    for layer in DENSE:
        p = f"model.layers.{layer}.mlp."
        halves = [part(given[f"{p}{x}_proj.weight"], 0, rank, TP) for x in ("gate", "up")]
        own[p + "gate_up_proj.weight"].copy_(torch.stack(halves, dim=1).flatten(0, 1))
        columns = torch.arange(4) + 4 * rank
        own[p + "down_proj.weight"].copy_(given[p + "down_proj.weight"].index_select(1, columns))
    for layer in SPARSE:
        p = f"model.layers.{layer}.mlp.experts."
        both = []
        for e in EXPERTS:
            halves = [part(given[f"{p}{e}.{x}_proj.weight"], 0, rank, TP) for x in ("gate", "up")]
            both.append(torch.cat(halves).T)
        own[p + "w13_weight"].copy_(torch.stack(both))


def load_trainer(given: Tensors, own: Into, rank: int) -> None:
    """A rank of Megatron: two layers of each stage, query groups cut by rows."""
    stage, tp = divmod(rank, 2)
    if stage == 0:
        own["embedding.word_embeddings.weight"].copy_(
            given["model.embed_tokens.weight"].chunk(2)[tp]
        )
    else:
        own["output_layer.weight"].copy_(given["lm_head.weight"].chunk(2)[tp])
        own["decoder.final_layernorm.weight"].copy_(given["model.norm.weight"])
    for local in range(2):
        _load_layer(
            given, own, f"model.layers.{2 * stage + local}.", f"decoder.layers.{local}.", tp
        )


def load_virtual_trainer(given: Tensors, chunks: list[Into], rank: int) -> None:
    """A rank of Megatron with two chunks: layers go round the stages."""
    stage, tp = divmod(rank, 2)
    first, last = chunks
    if stage == 0:
        first["embedding.word_embeddings.weight"].copy_(
            given["model.embed_tokens.weight"].chunk(2)[tp]
        )
    else:
        last["output_layer.weight"].copy_(given["lm_head.weight"].chunk(2)[tp])
        last["decoder.final_layernorm.weight"].copy_(given["model.norm.weight"])
    for chunk, own in enumerate(chunks):
        _load_layer(given, own, f"model.layers.{2 * chunk + stage}.", "decoder.layers.0.", tp)


def _load_layer(given: Tensors, own: Into, src: str, dst: str, tp: int) -> None:
    q, k, v, o = (given[f"{src}self_attn.{x}_proj.weight"] for x in "qkvo")
    rows = torch.cat([q.view(2, 4, 8), k.view(2, 2, 8), v.view(2, 2, 8)], dim=1)
    own[dst + "self_attention.linear_qkv.weight"].copy_(rows.flatten(0, 1).chunk(2)[tp])
    own[dst + "self_attention.linear_proj.weight"].copy_(o.chunk(2, dim=1)[tp])
    norm = given[src + "input_layernorm.weight"]
    own[dst + "self_attention.linear_qkv.layer_norm_weight"].copy_(norm)
    after = given[src + "post_attention_layernorm.weight"]
    if src + "mlp.gate_proj.weight" in given:
        own[dst + "mlp.linear_fc1.layer_norm_weight"].copy_(after)
        _load_mlp(given, own, src + "mlp.", dst + "mlp.", tp)
        return
    own[dst + "pre_mlp_layernorm.weight"].copy_(after)
    own[dst + "mlp.router.weight"].copy_(given[src + "mlp.gate.weight"])
    for e in EXPERTS:
        local = f"{dst}mlp.experts.local_experts.{e}."
        _load_mlp(given, own, f"{src}mlp.experts.{e}.", local, tp)


def _load_mlp(given: Tensors, own: Into, src: str, dst: str, tp: int) -> None:
    halves = [given[f"{src}{x}_proj.weight"].chunk(2)[tp] for x in ("gate", "up")]
    own[dst + "linear_fc1.weight"].copy_(torch.cat(halves))
    own[dst + "linear_fc2.weight"].copy_(given[src + "down_proj.weight"].chunk(2, dim=1)[tp])


def record(
    side: Stored, load: Loader, first: int, device: str = "meta", **more: Any
) -> sm.storage.RecordedSide:
    """What the loader stores on each rank of a side, into tensors of the shapes that the side has."""
    shapes = refits.shapes()
    bound = bind(side, shapes)
    ranks = {}
    for rank in bound.ranks:
        chunks: list[Into] = [{} for _ in range(1 + max(chunk for chunk, _ in bound.natives(rank)))]
        for (chunk, name), shape in bound.natives(rank).items():
            chunks[chunk][name] = torch.full(shape, 7.0, device=device)
        own = chunks if len(chunks) > 1 else chunks[0]
        functions = {name: "neg_exp" for name in chunks[0] if "o_proj" in name}
        ranks[rank] = smt.record(
            lambda given, own=own, rank=rank: load(given, own, rank - first),  # type: ignore[misc]
            shapes,
            own,
            functions=functions,
            **more,
        )
        held = [tensor for chunk in chunks for tensor in chunk.values() if not tensor.is_meta]
        assert all((tensor == 7).all() for tensor in held)
    return sm.storage.RecordedSide(ranks)


def move(rank: int, declared: bool) -> Any:
    """From a trainer, as rows or as recorded, into a recorded engine; what is wrong afterwards."""
    source = trainer() if declared else record(virtual_trainer(), load_virtual_trainer, 0)
    planned = sm.refit(source, record(engine(), by_making, 4), refits.shapes())
    refit = smt.Refit(planned, timeout=30.0)
    arrays = refits.draw(5)
    src = refits.make(planned.trainer, arrays, rank) if rank < 4 else None
    dst = None
    if rank >= 4:
        natives = bind(engine(), refits.shapes()).natives(rank).items()
        dst = {name: torch.zeros(shape) for (_, name), shape in natives}
    refit.prepare(src, dst)
    refit()
    if dst is None:
        return []
    wanted = {name: torch.zeros_like(tensor) for name, tensor in dst.items()}
    given = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    by_views(given, wanted, rank - 4)
    return refits._compare(dst, wanted)
