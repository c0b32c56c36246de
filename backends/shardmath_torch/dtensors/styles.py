"""Styles: how tensor parallelism divides a module's weights, by patterns of names.

1. A pattern (fnmatch, where `*` crosses dots) matches names of modules, of which a style is about `weight` and `bias`
   (`softmax_offset`: that parameter); or a parameter's full name, which counts as a bias if it ends so, and as a weight
   otherwise.
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
    "Style",
    "StyleName",
    "asked",
    "checked",
]

Division: TypeAlias = Shard | StridedShard | Packed | Replicate
"""What tensor parallelism does to a parameter."""


class Style(NamedTuple):
    """The dimension divided of a weight and of a bias, None for none; which parameters of a module it is about."""

    weight: int | None
    bias: int | None
    names: tuple[str, ...] = ("weight", "bias")


StyleName: TypeAlias = Literal[
    "column", "row", "replicate", "vocabulary", "row_norm", "softmax_offset"
]

STYLES: dict[str, Style] = {
    "column": Style(0, 0),  # output features
    "row": Style(1, None),  # input features; the bias is for after the all-reduce
    "replicate": Style(None, None, ("*",)),
    "vocabulary": Style(0, 0),  # rows of an embedding
    "row_norm": Style(
        0, 0
    ),  # a norm of what goes into a row-parallel matrix: its features are divided
    "softmax_offset": Style(0, 0, ("softmax_offset",)),  # an offset a head
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
        given = self.components if isinstance(self.components, tuple) else (self.components,)
        if not given or not all(type(n) is int and n > 0 for n in given):
            raise PlacementError(
                f"Fused({self.components!r}); give a tuple of sizes above 0, or a number of components"
            )

    def placement(self, n: int) -> Division:
        """What divides a dimension of length n. Raises PlacementError where the components do not add up to it."""
        if isinstance(self.components, int):
            if n % self.components:
                raise PlacementError(
                    f"{n} are not {self.components} equal ones; give a tuple of their whole sizes"
                )
            return StridedShard(0, self.components)
        if sum(self.components) != n:
            raise PlacementError(
                f"they add up to {sum(self.components)}, not {n}; give sizes on the whole weight"
            )
        same = len(set(self.components)) == 1
        return StridedShard(0, len(self.components)) if same else Packed(0, self.components)


AnyStyle: TypeAlias = StyleName | Fused


class Asked(NamedTuple):
    """What a pattern says of a parameter: the style, and the dimension that it divides."""

    pattern: str
    style: AnyStyle
    dim: int | None

    def placement(self, n: int) -> Division:
        """What divides a dimension of length n. Raises PlacementError where components do not add up to it."""
        assert self.dim is not None
        return self.style.placement(n) if isinstance(self.style, Fused) else Shard(self.dim)


def checked(styles: object) -> dict[str, AnyStyle]:
    """The styles, if they are. Raises PlacementError otherwise."""
    if not isinstance(styles, Mapping):
        raise PlacementError(
            f"styles is {styles!r}; give a mapping from patterns to styles, {{}} to replicate all"
        )
    for pattern, style in styles.items():
        if not isinstance(pattern, str):
            raise PlacementError(
                f"{pattern!r} is no pattern of names; give text, such as '*.q_proj'"
            )
        if not isinstance(style, Fused) and style not in get_args(StyleName):
            raise PlacementError(
                f"style {style!r} of {pattern!r} is unknown; use {', '.join(STYLES)}, or Fused(sizes)"
            )
    return dict(styles)


def asked(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, AnyStyle]
) -> Iterator[tuple[str, nn.Parameter, Asked | None]]:
    """Each parameter once, what is asked of it, and the name by which; None where no pattern is about it.

    Raises PlacementError for a pattern that is about none, and for two that differ about one.
    """
    said = _first(module, parameters, styles)
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        about = [name for name in same if name in said]
        for other in about[1:]:
            _check_agreed(about[0], other, said)
        name = (about or same)[0]
        yield name, parameters[name], said.get(name)


def _first(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, AnyStyle]
) -> dict[str, Asked]:
    """What the first pattern that is about each name says."""
    out: dict[str, Asked] = {}
    for pattern, style in styles.items():
        about = [name for name in parameters if _about(pattern, style, name)]
        if not about:
            raise PlacementError(_unmatched(pattern, style, module))
        for name in about:
            rule = _rule(style)
            out.setdefault(
                name, Asked(pattern, style, rule.bias if name.endswith("bias") else rule.weight)
            )
    return out


def _rule(style: AnyStyle) -> Style:
    return STYLES["column"] if isinstance(style, Fused) else STYLES[style]


def _about(pattern: str, style: AnyStyle, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    by_module = fnmatchcase(path, pattern) and any(
        fnmatchcase(leaf, one) for one in _rule(style).names
    )
    return by_module or fnmatchcase(name, pattern)


def _unmatched(pattern: str, style: AnyStyle, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules()]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if matched:
        what = f"{pattern!r} matches module {matched[0]!r}, which has no parameter {' or '.join(_rule(style).names)}"
        return f"{what}; write the full name of the parameter that is to be {style!r}"
    shown = ", ".join(map(repr, names[:8]))
    return f"{pattern!r} matches no module and no parameter; modules are {shown}, for example"


def _check_agreed(a: str, b: str, said: Mapping[str, Asked]) -> None:
    x, y = said[a], said[b]
    if (x.dim, _components(x)) != (y.dim, _components(y)):
        ways = (
            f"{x.style!r} as {a!r} (by {x.pattern!r}) and {y.style!r} as {b!r} (by {y.pattern!r})"
        )
        raise PlacementError(
            f"one shared parameter is to be {ways}; let patterns be about one of its names"
        )


def _components(asked: Asked) -> int | tuple[int, ...]:
    return asked.style.components if isinstance(asked.style, Fused) else 1
