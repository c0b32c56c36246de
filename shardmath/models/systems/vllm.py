"""vLLM: which rank of an inference engine under tensor and data parallelism holds which tensor.

1. Tensors go by their Hugging Face names and shapes (`hf`); only what each rank holds is vLLM's.
2. Ranks form the mesh (dp, tp), tp fastest; an engine is one coordinate of dp, and all hold the same.
3. `styles.kind` divides over tp, experts too: gate and up by their rows, down by its columns. All else is
   replicated, also the down projections of latent attention (`q_a_proj`, `kv_a_proj_with_mqa`).
4. With fewer key-value heads than tp, rank r holds head r // (tp / kv_heads): tp is split into (kv, rep).
5. Vocabularies are padded at their end to a multiple of 64 before they are divided.
6. `stacked` says the same of the buffers w13 (E, 2I / tp, H), gate rows before up rows, and w2 (E, H, I / tp):
   each projection of each expert is then a tensor (1, ...) and a window of its buffer.

Replicas here are engines of their own. The data parallelism inside one engine cuts experts over all its ranks:
`engines.vllm_core` has that, and what is not expressed here: expert parallelism, fused tensors, a rank's own names.
Source: vLLM's `fused_moe/routed_experts.py` 002d6073, `vocab_parallel_embedding.py` 00db0119 and `linear.py`.

>>> shapes = {"embed_tokens.weight": ((70, 4), "bfloat16"), "layers.0.self_attn.k_proj.weight": ((6, 4), "bfloat16")}
>>> shapes |= {f"layers.0.mlp.experts.{e}.up_proj.weight": ((8, 4), "bfloat16") for e in range(3)}
>>> for layout in engine(shapes, ranks=range(8), tp=4, kv_heads=2).values():
...     print(layout)
bfloat16[70, 4] (tp n)=128 h on dp=2 tp=4
bfloat16[6, 4] (kv n) h on dp=2 kv=2 rep=2
bfloat16[8, 4] (tp n) h on dp=2 tp=4
bfloat16[8, 4] (tp n) h on dp=2 tp=4
bfloat16[8, 4] (tp n) h on dp=2 tp=4
>>> print(engine(shapes, ranks=range(4), tp=4, kv_heads=2, stacked=True)["layers.0.mlp.experts.1.up_proj.weight"])
bfloat16[1, 8, 4] (n)=<-1 0:1 -1> (2 tp h)=<-8 0:8> w on dp=1 tp=4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardmath.base.errors import LayoutError, MeshError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.layouts.styles import tp_text
from shardmath.models.systems.hf import Place, Shapes, cell, expert_counts, layouts, numbers

__all__ = ["HALVES", "KV", "engine"]

KV = ("k_proj", "v_proj")
"""The layers with one part per key-value head."""

HALVES: dict[str, int] = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}
"""Which half of the rows of w13 is whose."""


def engine(
    shapes: Shapes,
    *,
    ranks: Iterable[int],
    tp: int = 1,
    kv_heads: int | None = None,
    stacked: bool = False,
    vocab_multiple: int = 64,
) -> dict[str, Layout]:
    """The layout of every tensor of `shapes`, by name.

    `ranks` in the order dp, tp, last fastest. Without `kv_heads` there are at least tp of them. Raises
    MeshError where tp does not divide the ranks, LayoutError where it does not divide a dimension, nor
    key-value heads tp.
    """
    ids = tuple(ranks)
    size = len(ids)
    if tp < 1 or not size or size % tp:
        raise MeshError(
            f"{size} ranks do not fall into engines of tp={tp}; choose a multiple of tp"
        )
    mesh = Mesh(dp=size // tp, tp=tp, ranks=ids)
    counts = expert_counts(shapes) if stacked else None
    side = _Engine(mesh, _split_heads(mesh, tp, kv_heads), counts, vocab_multiple)
    return layouts(shapes, side.place)


def _split_heads(mesh: Mesh, tp: int, kv_heads: int | None) -> Mesh | None:
    """The mesh of key-value heads that are fewer than tp, None where tp divides them."""
    if kv_heads is None or (kv_heads > 0 and kv_heads % tp == 0):
        return None
    if kv_heads < 1 or tp % kv_heads:
        raise LayoutError(
            f"{kv_heads} key-value heads and tp={tp}: neither divides the other; "
            f"choose tp so that ranks hold whole heads, or each head lies on as many ranks"
        )
    return mesh.split("tp", kv=kv_heads, rep=tp // kv_heads)


@dataclass(frozen=True, slots=True)
class _Engine:
    """All that says where a tensor lies.

    `kv` is the mesh of few key-value heads, `counts` the experts of each layer where they are stacked.
    """

    mesh: Mesh
    kv: Mesh | None
    counts: Counter[int | None] | None
    vocab_multiple: int

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Where the tensor lies. Raises LayoutError for a dimension that is not divided evenly."""
        module = name.rsplit(".", 2)[-2] if "." in name else ""
        if self.kv is not None and module in KV:
            heads = self.kv.axis_size("kv")
            return Place(self.kv, tp_text(name, shape, tp=heads, axis="kv"), shape)
        tp = self.mesh.axis_size("tp")
        text = tp_text(name, shape, tp=tp, vocab_multiple=self.vocab_multiple)
        layer, expert = numbers(name)
        if self.counts is None or expert is None:
            return Place(self.mesh, text, shape)
        stored = cell(expert, self.counts[layer])
        return Place(self.mesh, _stack(text, module, shape, stored), (1, *shape))


def _stack(text: str, module: str, shape: tuple[int, ...], stored: str) -> str:
    """One expert's window: of the rows of w13 where the module is a half of it, else of w2."""
    if module not in HALVES:
        return f"(n)={stored} {text}"
    rows = shape[0]
    half = f"<-{rows} 0:{rows}>" if HALVES[module] else f"<0:{rows} -{rows}>"
    return f"(n)={stored} (2 tp d0)={half} ..."
