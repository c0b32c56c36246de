"""Plans of transformers: the part of each parameter that a rank loads, from a model's `tp_plan` and `ep_plan`.

1. A plan maps patterns to styles. A pattern is the name of a parameter, or of its module, with `*` for a number between
   dots; the parameter's own rule has priority over its module's.
2. `STYLES` has the dimension that a style divides: parts are as in `torch.chunk`, so that the last ranks may have less.
   A packed style divides each half. Parameters that no rule names, or no style divides, are whole on each rank.
3. Experts with a rule of `ep_plan` follow no rule of `tp_plan`; they lie on a separate mesh over the ranks.
4. A configuration has the plans of its base model: names get its prefix, and embedding and head their own rules.

Source: transformers 5.24, `distributed/tensor_parallel.py`, `distributed/expert_parallel.py`, `distributed/mixin.py`.

>>> shapes = {"model.layers.0.mlp.gate_up_proj.weight": ((12, 4), "float32"), "model.norm.weight": ((4,), "float32")}
>>> plan = {"model.layers.*.mlp.gate_up_proj": "packed_colwise"}
>>> for layout in hf_parallel(plan, shapes, Mesh(tp=2)).values():
...     print(layout)
float32[12, 4] (2 tp n) h on tp=2
float32[4] n on tp=2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardmath.base.errors import LayoutError, MeshError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.models.storage.names import matches
from shardmath.models.systems.hf import Shapes

__all__ = ["STYLES", "HFStyle", "ep_plan", "hf_parallel", "tp_plan"]


class HFStyle(NamedTuple):
    """How a tensor-parallel style of the Hugging Face library transformers, such as "colwise", divides a parameter.
    `dim` is the dimension that is divided among ranks, or None if each rank has the whole parameter.

    `halves` divides each half. `biases` and `vectors` say whether tensors named `bias` and tensors of one dimension are
    divided too; halves of vectors never are. With `even` it is an error if the axis does not divide the dimension.
    """

    dim: int | None = None
    halves: bool = False
    biases: bool = True
    vectors: bool = True
    even: bool = False


WHOLE = HFStyle()
COLUMN = HFStyle(-2)
ROW = HFStyle(-1, biases=False)
STYLES: dict[str, HFStyle] = {
    "colwise": COLUMN,
    "colwise_rep": COLUMN,
    "colwise_gather_output": COLUMN,
    "rowwise": ROW,
    "rowwise_rep": ROW,
    "rowwise_split_input": ROW,
    "packed_colwise": HFStyle(-2, halves=True),
    "packed_rowwise": HFStyle(-1, halves=True, vectors=False),
    "embedding_rowwise": HFStyle(0),
    "embedding_colwise": HFStyle(1),
    "grouped_gemm": HFStyle(0, even=True),
    "sequence_parallel": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
    "mla_kv_a_proj": WHOLE,
    "all_reduce": WHOLE,
    "moe_tp_experts": WHOLE,
    "moe_identity_expert": WHOLE,
    "local_params": WHOLE,
    "ep_dispatch_experts": WHOLE,
    "replicate": WHOLE,
}
"""The division of a module's parameters under each style."""

NUMBER = re.compile(r"\.\d+(\.|$)")
EMBEDDING = {"embed_tokens": "embedding_rowwise"}
HEAD = {"lm_head": "colwise_gather_output"}


def tp_plan(config: object, *, prefix: str = "model.") -> dict[str, str]:
    """Return the tensor-parallel plan (pattern -> style) of Hugging Face transformers for a language model with this
    `config`: the plan of its base model, and a rule for "lm_head". `prefix` is put before the base model's patterns.

    Rules for embedding and head are added.
    """
    base = _read_plan(config, "base_model_tp_plan")
    named = {**EMBEDDING, **base} if base else {}
    return {**HEAD, **{f"{prefix}{pattern}": style for pattern, style in named.items()}}


def ep_plan(config: object, *, prefix: str = "model.") -> dict[str, str]:
    """Return transformers' expert-parallel plan for a model with this `config`: a dict from pattern to style, with
    `prefix` put before each pattern. The dict is empty if the model has no such plan."""
    base = _read_plan(config, "base_model_ep_plan")
    return {f"{prefix}{pattern}": style for pattern, style in base.items()}


def _read_plan(config: object, field: str) -> dict[str, str]:
    """A plan of a configuration object, or of the mapping of its fields."""
    given = config.get(field) if isinstance(config, Mapping) else getattr(config, field, None)
    return dict(given or {})


def hf_parallel(
    plan: Mapping[str, str],
    shapes: Shapes,
    mesh: Mesh,
    *,
    axis: str = "tp",
    experts: tuple[Mapping[str, str], Mesh] | None = None,
    unused: Sequence[str] = (),
) -> dict[str, Layout]:
    """Return the layout of every parameter in `shapes`, by name, after transformers has divided the model over `axis`
    of `mesh` by `plan` (pattern -> style). `experts` is the model's expert-parallel plan with its mesh; patterns that
    match no parameter are errors, except those that match a glob in `unused`.

    `plan` is a model's `tp_plan`; `experts` are its `ep_plan` and a mesh over the same ranks with an axis `ep`. Raises
    LayoutError for other patterns that match nothing, for a style that transformers does not have, and for experts that
    `ep` does not divide; MeshError for a mesh without the axis.
    """
    applied = [_AppliedPlan(dict(plan), mesh, axis)]
    if experts is not None:
        expert_plan, expert_mesh = experts
        of_experts = _AppliedPlan(dict(expert_plan), expert_mesh, "ep")
        applied = [of_experts, _drop_experts(applied[0], expert_plan)]
    rules = {pattern: style for each in applied for pattern, style in each.plan.items()}
    _check_styles(rules)
    _check_used(rules, shapes, unused)
    layouts = {}
    for name, (shape, dtype) in shapes.items():
        # The last plan, on `mesh`, lays out a parameter without a rule too: replicated.
        chosen = next((each for each in applied if each.find(name)), applied[-1])
        layouts[name] = chosen.lay_out(name, tuple(shape), dtype)
    return layouts


class _AppliedPlan(NamedTuple):
    """A plan with the mesh and the axis over which it is applied."""

    plan: dict[str, str]
    mesh: Mesh
    axis: str

    def find(self, name: str) -> str | None:
        """Return the style that the plan gives the parameter `name`. Without one, return the style that the plan gives
        the parameter's module, or None if there is no such style either."""
        generic = _generalize(name)
        module = generic.rpartition(".")[0]
        return self.plan.get(generic, self.plan.get(module))

    def lay_out(self, name: str, shape: tuple[int, ...], dtype: str) -> Layout:
        """Return the layout of the parameter `name`: divided over the mesh axis `self.axis` as its style in the
        transformers plan says, such as "colwise", or replicated.

        Raises LayoutError if the number of experts is not a multiple of the axis size, MeshError if the mesh lacks the
        axis.
        """
        style = STYLES[self.find(name) or "replicate"]
        if self.axis not in self.mesh.shape:
            axes = ", ".join(self.mesh.shape) or "none"
            raise MeshError(f"{self.mesh} has no axis {self.axis!r}; name one of its axes: {axes}")
        dim = _find_divided(style, name, shape)
        if dim is None:
            return Layout(shape, self.mesh, "...", dtype=dtype)
        size = self.mesh.axis_size(self.axis)
        if style.even and shape[dim] % size:
            raise LayoutError(
                f"{shape[dim]} experts of {name!r} cannot be divided evenly over {self.axis}={size}; "
                f"give a mesh whose {self.axis} divides {shape[dim]}"
            )
        words = [f"d{d}" for d in range(len(shape))]
        has_halves = style.halves and len(shape) > 1
        halves = "2 " if has_halves else ""
        words[dim] = f"({halves}{self.axis} n)"
        text = " ".join(words)
        return Layout(shape, self.mesh, text, dtype=dtype)


def _find_divided(style: HFStyle, name: str, shape: tuple[int, ...]) -> int | None:
    """The dimension of the parameter that the style divides; None if it divides none."""
    if style.dim is None or not shape:
        return None
    is_bias = name.rpartition(".")[2] == "bias"
    if (is_bias and not style.biases) or (len(shape) == 1 and not style.vectors):
        return None
    # The -2 of a style for matrices is the only dimension of a vector.
    return max(0, style.dim + len(shape)) if style.dim < 0 else style.dim


def _generalize(name: str) -> str:
    """The name with `*` for its numbers, as transformers writes it."""
    return NUMBER.sub(r".*\1", name)


def _drop_experts(applied: _AppliedPlan, experts: Mapping[str, str]) -> _AppliedPlan:
    """The plan without rules for the patterns of the experts' rules, or for anything inside these."""
    prefixes = tuple(f"{module}." for module in experts)
    rules = applied.plan.items()
    plan = {pattern: style for pattern, style in rules if not f"{pattern}.".startswith(prefixes)}
    return applied._replace(plan=plan)


def _check_styles(rules: Mapping[str, str]) -> None:
    """Raise LayoutError for an unknown style."""
    for pattern, style in rules.items():
        if style not in STYLES:
            raise LayoutError(
                f"rule {pattern!r} has style {style!r}, which transformers 5.24 does not have; "
                f"use one of {', '.join(STYLES)}"
            )


def _check_used(rules: Iterable[str], names: Iterable[str], unused: Sequence[str]) -> None:
    """Raise LayoutError for patterns that match no parameter and no module of a parameter."""
    modules: set[str] = set()
    for name in {_generalize(name) for name in names}:
        while name:
            modules.add(name)
            name = name.rpartition(".")[0]
    idle = []
    for pattern in rules:
        if pattern not in modules and not matches(pattern, unused):
            idle.append(pattern)
    if idle:
        listed = ", ".join(idle)
        raise LayoutError(
            f"rules match no parameter and no module of the model: {listed}; "
            f"write names that it has, or list these rules in unused=; unused=['*'] is for a model's own plan, whose "
            f"rules for other sizes of the model may match nothing"
        )
