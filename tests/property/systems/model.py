"""A small model, what ranks hold of it, and what they should hold, by loops over the coordinates."""

from __future__ import annotations

from shardmath import Layout

EXPERTS, LAYERS = 4, 5


STAGES = (2, 1, 2)


def model(experts: int = EXPERTS, layers: int = LAYERS) -> dict[str, tuple[tuple[int, ...], str]]:
    """A small mixture of experts; layer 0 is dense."""
    block = {
        "self_attn.q_proj.weight": (16, 8),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 16),
    }
    block |= {
        "self_attn.k_proj.bias": (4,),
        "self_attn.kv_a_proj_with_mqa.weight": (6, 8),
        "norm.weight": (8,),
    }
    expert = {"gate_proj.weight": (8, 8), "up_proj.weight": (8, 8), "down_proj.weight": (8, 8)}
    moe = {
        f"mlp.experts.{e}.{name}": shape for e in range(experts) for name, shape in expert.items()
    }
    moe |= {"mlp.gate.weight": (experts, 8), "mlp.shared_experts.up_proj.weight": (16, 8)}
    dense = {"mlp.up_proj.weight": (16, 8), "mlp.down_proj.weight": (8, 16)}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 8)}
    for i in range(layers):
        out |= {
            f"model.layers.{i}.{name}": shape
            for name, shape in (block | (moe if i else dense)).items()
        }
    out |= {"model.norm.weight": (8,), "lm_head.weight": (64, 8)}
    return {
        name: (shape, "float32" if "gate.w" in name else "bfloat16") for name, shape in out.items()
    }


Held = dict[tuple[str, int], tuple[list[int], ...]]
"""The global indices of each dimension that a rank holds of a tensor; those it holds nothing of are left out."""


def held(side: dict[str, Layout]) -> Held:
    out: Held = {}
    for name, layout in side.items():
        for rank in layout.mesh.ranks:
            cells = tuple([i for i in index.tolist() if i >= 0] for index in layout.indices(rank))
            if all(cells):
                out[name, rank] = cells
    return out


def chunk(n: int, parts: int, at: int) -> list[int]:
    return list(range(n * at // parts, n * (at + 1) // parts))


def whole(shape: tuple[int, ...]) -> list[list[int]]:
    return [list(range(n)) for n in shape]


def divided(name: str, shape: tuple[int, ...], tp: int, at: int) -> tuple[list[int], ...]:
    """What coordinate `at` of tp holds, said once more: by the name's last module alone."""
    module, leaf = name.split(".")[-2:]
    dim = 0 if module in ("embed_tokens", "lm_head") else None
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        dim = 0
    if module in ("o_proj", "down_proj"):
        dim = 1 if leaf == "weight" else None
    cells = whole(shape)
    if dim is not None:
        cells[dim] = chunk(shape[dim], tp, at)
    return tuple(cells)
