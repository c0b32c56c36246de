"""Styles: how tensor parallelism divides a module's weights, by patterns of names.

1. A pattern (fnmatch, where `*` crosses dots) matches names of modules, of which a style is about
   `weight` and `bias` (`softmax_offset`: that parameter); or a parameter's full name, which counts
   as a bias if it ends so, and as a weight otherwise.
2. The first pattern that is about a parameter counts. One that is about none is an error.
3. A parameter with several names is one: patterns that are about several of them must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias, get_args

from torch import nn

from shardmath.base.errors import PlacementError
from shardmath.base.public import public
from shardmath.layouts.placement import Packed, Replicate, Shard, StridedShard

__all__ = [
    "STYLES",
    "AnyStyle",
    "Asked",
    "Division",
    "Fused",
    "TorchStyle",
    "StyleName",
    "check_styles",
    "match_parameters",
]

Division: TypeAlias = Shard | StridedShard | Packed | Replicate
"""What tensor parallelism does to a parameter."""


class TorchStyle(NamedTuple):
    """The dimension divided of a weight and of a bias, None for none; which parameters of a module it is about."""

    weight: int | None
    bias: int | None
    names: tuple[str, ...] = ("weight", "bias")


StyleName: TypeAlias = Literal[
    "column", "row", "replicate", "vocabulary", "row_norm", "softmax_offset"
]

STYLES: dict[str, TorchStyle] = {
    "column": TorchStyle(0, 0),  # output features
    "row": TorchStyle(1, None),  # input features; the bias is for after the all-reduce
    "replicate": TorchStyle(None, None, ("*",)),
    "vocabulary": TorchStyle(0, 0),  # rows of an embedding
    "row_norm": TorchStyle(
        0, 0
    ),  # a norm of what goes into a row-parallel matrix: its features are divided
    "softmax_offset": TorchStyle(0, 0, ("softmax_offset",)),  # an offset a head
}


@public
@dataclass(frozen=True, slots=True)
class Fused:
    """The style of components along dimension 0, each divided for itself: their whole sizes, or a number of equal ones.

    >>> Fused((8, 2, 2)).placement(12), Fused((4, 4)).placement(8), Fused(2).placement(8)
    (Packed(dim=0, sizes=(8, 2, 2)), StridedShard(dim=0, split_factor=2), StridedShard(dim=0, split_factor=2))
    """

    components: int | tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = self.components if isinstance(self.components, tuple) else (self.components,)
        positive = all(type(size) is int and size > 0 for size in sizes)
        if not sizes or not positive:
            fix = "give a tuple of sizes above 0, or a number of components"
            raise PlacementError(f"Fused({self.components!r}); {fix}")

    def placement(self, n: int) -> Division:
        """What divides a dimension of length n.

        Raises PlacementError where the components do not add up to it.
        """
        if isinstance(self.components, int):
            if n % self.components:
                what = f"{n} are not {self.components} equal ones"
                raise PlacementError(f"{what}; give a tuple of their whole sizes")
            return StridedShard(0, self.components)
        total = sum(self.components)
        if total != n:
            raise PlacementError(f"they add up to {total}, not {n}; give sizes on the whole weight")
        if len(set(self.components)) == 1:
            return StridedShard(0, len(self.components))
        return Packed(0, self.components)


AnyStyle: TypeAlias = StyleName | Fused


class Asked(NamedTuple):
    """What a pattern says of a parameter: the style, and the dimension that it divides."""

    pattern: str
    style: AnyStyle
    dim: int | None

    def placement(self, n: int) -> Division:
        """What divides a dimension of length n.

        Raises PlacementError where components do not add up to it.
        """
        assert self.dim is not None
        if isinstance(self.style, Fused):
            return self.style.placement(n)
        return Shard(self.dim)


def check_styles(styles: object) -> dict[str, AnyStyle]:
    """The styles, if they are. Raises PlacementError otherwise."""
    if not isinstance(styles, Mapping):
        fix = "give a mapping from patterns to styles, {} to replicate all"
        raise PlacementError(f"styles is {styles!r}; {fix}")
    for pattern, style in styles.items():
        if not isinstance(pattern, str):
            fix = "give text, such as '*.q_proj'"
            raise PlacementError(f"{pattern!r} is not a pattern of names; {fix}")
        if not isinstance(style, Fused) and style not in get_args(StyleName):
            known = ", ".join(STYLES)
            what = f"style {style!r} of {pattern!r} is unknown"
            raise PlacementError(f"{what}; use {known}, or Fused(sizes)")
    return dict(styles)


def match_parameters(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, AnyStyle]
) -> Iterator[tuple[str, nn.Parameter, Asked | None]]:
    """Each parameter once, what is asked of it, and the name by which; None where no pattern is about it.

    Raises PlacementError for a pattern that is about none, and for two that differ about one.
    """
    asked_of = _match_first(module, parameters, styles)
    names_of: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        matched = [name for name in names if name in asked_of]
        for other in matched[1:]:
            _check_agreed(matched[0], other, asked_of)
        name = matched[0] if matched else names[0]
        yield name, parameters[name], asked_of.get(name)


def _match_first(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, AnyStyle]
) -> dict[str, Asked]:
    """What the first pattern that is about each name says."""
    out: dict[str, Asked] = {}
    for pattern, style in styles.items():
        matched = [name for name in parameters if _is_about(pattern, style, name)]
        if not matched:
            raise PlacementError(_explain_unmatched(pattern, style, module))
        dims = _look_up(style)
        for name in matched:
            dim = dims.bias if name.endswith("bias") else dims.weight
            out.setdefault(name, Asked(pattern, style, dim))
    return out


def _look_up(style: AnyStyle) -> TorchStyle:
    """The style in the table; components are divided along dimension 0, as columns are."""
    return STYLES["column"] if isinstance(style, Fused) else STYLES[style]


def _is_about(pattern: str, style: AnyStyle, name: str) -> bool:
    """Whether the pattern matches the parameter's full name, or its module where the style is about such ones."""
    if fnmatchcase(name, pattern):
        return True
    path, _, leaf = name.rpartition(".")
    if not fnmatchcase(path, pattern):
        return False
    return any(fnmatchcase(leaf, known) for known in _look_up(style).names)


def _explain_unmatched(pattern: str, style: AnyStyle, module: nn.Module) -> str:
    """Why a pattern is about no parameter, and what to write."""
    names = [name for name, _ in module.named_modules()]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if matched:
        lacking = " or ".join(_look_up(style).names)
        what = f"{pattern!r} matches module {matched[0]!r}, which has no parameter {lacking}"
        return f"{what}; write the full name of the parameter that is to be {style!r}"
    shown = ", ".join(map(repr, names[:8]))
    return f"{pattern!r} matches no module and no parameter; modules are {shown}, for example"


def _check_agreed(a: str, b: str, asked_of: Mapping[str, Asked]) -> None:
    """Raise PlacementError where patterns ask different things of one parameter with two names."""
    x, y = asked_of[a], asked_of[b]
    if (x.dim, _components_of(x)) == (y.dim, _components_of(y)):
        return
    as_a = f"{x.style!r} as {a!r} (by {x.pattern!r})"
    as_b = f"{y.style!r} as {b!r} (by {y.pattern!r})"
    fix = "let patterns be about one of its names"
    raise PlacementError(f"one shared parameter is to be {as_a} and {as_b}; {fix}")


def _components_of(asked: Asked) -> int | tuple[int, ...]:
    return asked.style.components if isinstance(asked.style, Fused) else 1
