"""Styles: how tensor parallelism divides a module's weights, by patterns of names.

1. A pattern (fnmatch, in which `*` crosses dots) matches a module's name, and then its `weight` and
   `bias` (for `softmax_offset`, that parameter); or a parameter's full name, which counts as a bias
   if it ends in "bias", and as a weight otherwise.
2. The first pattern that matches a parameter counts. A pattern that matches none raises.
3. A parameter with several names is one parameter: patterns that match several must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias, get_args

from torch import nn

from shardmath.base.errors import PlacementError
from shardmath.base.public import public
from shardmath.base.text import plural
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
"""How tensor parallelism divides a parameter."""


class TorchStyle(NamedTuple):
    """A tensor-parallel style. `bias` is the dimension along which it divides biases, `weight` the one for all other
    parameters, each None if these are replicated; `names` are globs of the parameter names that it suits.
    """

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
    ),  # a norm of a row-parallel matrix's input, whose features are divided
    "softmax_offset": TorchStyle(0, 0, ("softmax_offset",)),  # an offset per head
}


@public
@dataclass(frozen=True, slots=True)
class Fused:
    """A style for `set_device_mesh` of a fused weight, such as QKV: each of its components along dimension 0 is divided
    among ranks separately.

    `components` are the components' sizes in the whole weight, or the number of equal components.

    >>> Fused((8, 2, 2)).placement(12), Fused((4, 4)).placement(8), Fused(2).placement(8)
    (Packed(dim=0, sizes=(8, 2, 2)), StridedShard(dim=0, split_factor=2), StridedShard(dim=0, split_factor=2))
    """

    components: int | tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = self.components if isinstance(self.components, tuple) else (self.components,)
        positive = all(type(size) is int and size > 0 for size in sizes)
        if not sizes or not positive:
            fix = "pass a tuple of integers above 0, or a number of equal components"
            raise PlacementError(f"Fused({self.components!r}) does not name components; {fix}")

    def placement(self, n: int) -> Division:
        """Return the placement that divides a dimension of length `n`. Raises PlacementError if the components' number
        or sizes do not fit `n`.
        """
        if isinstance(self.components, int):
            if n % self.components:
                what = f"length {n} does not divide into {self.components} equal components"
                raise PlacementError(f"{what}; pass Fused a tuple of the components' sizes")
            return StridedShard(0, self.components)
        total = sum(self.components)
        if total != n:
            what = f"components {self.components} add up to {total}, not to the whole length {n}"
            raise PlacementError(f"{what}; pass Fused the components' sizes in the whole weight")
        if len(set(self.components)) == 1:
            return StridedShard(0, len(self.components))
        return Packed(0, self.components)


AnyStyle: TypeAlias = StyleName | Fused


class Asked(NamedTuple):
    """The `style` that a matching `pattern` gives to a parameter, and the dimension `dim` along which the parameter is
    divided (None: not divided).
    """

    pattern: str
    style: AnyStyle
    dim: int | None

    def placement(self, n: int) -> Division:
        """Return the placement that divides a dimension of length `n`. Raises PlacementError if a Fused style's
        components do not fit `n`.
        """
        assert self.dim is not None
        if isinstance(self.style, Fused):
            return self.style.placement(n)
        return Shard(self.dim)


def check_styles(styles: object) -> dict[str, AnyStyle]:
    """Return `styles` as a dict. Raises PlacementError if it does not map patterns of names (text) to known styles."""
    if not isinstance(styles, Mapping):
        fix = "pass a mapping from patterns of names to styles, {} to replicate all"
        raise PlacementError(f"styles= is {styles!r}, which is not a mapping; {fix}")
    for pattern, style in styles.items():
        if not isinstance(pattern, str):
            fix = "pass text, such as '*.q_proj'"
            raise PlacementError(f"styles= has the key {pattern!r}, not a pattern of names; {fix}")
        if not isinstance(style, Fused) and style not in get_args(StyleName):
            known = ", ".join(STYLES)
            what = f"style {style!r} of {pattern!r} is unknown"
            raise PlacementError(f"{what}; pass {known}, or smt.Fused(sizes)")
    return dict(styles)


def match_parameters(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, AnyStyle]
) -> Iterator[tuple[str, nn.Parameter, Asked | None]]:
    """Yield (name, parameter, asked) for each parameter; `asked` is the Asked with its style, or None if no pattern in
    `styles` matches.

    A shared parameter is given by the first of its names that a pattern matches, or else by the first.

    Raises PlacementError for a pattern that matches no parameter, and for two that differ for one parameter.
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
    """The style of each name by the first pattern that matches it."""
    asked: dict[str, Asked] = {}
    for pattern, style in styles.items():
        matched = [name for name in parameters if _matches(pattern, style, name)]
        if not matched:
            raise PlacementError(_explain_unmatched(pattern, style, module))
        dims = _look_up(style)
        for name in matched:
            dim = dims.bias if name.endswith("bias") else dims.weight
            asked.setdefault(name, Asked(pattern, style, dim))
    return asked


def _look_up(style: AnyStyle) -> TorchStyle:
    """The style in the table; components are divided along dimension 0, as columns are."""
    return STYLES["column"] if isinstance(style, Fused) else STYLES[style]


def _matches(pattern: str, style: AnyStyle, name: str) -> bool:
    """Whether the pattern matches the parameter's full name, or its module's and the style has such a parameter."""
    if fnmatchcase(name, pattern):
        return True
    path, _, leaf = name.rpartition(".")
    if not fnmatchcase(path, pattern):
        return False
    return any(fnmatchcase(leaf, known) for known in _look_up(style).names)


def _explain_unmatched(pattern: str, style: AnyStyle, module: nn.Module) -> str:
    """The message of an error about a pattern that matches no parameter."""
    names = [name for name, _ in module.named_modules()]
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if matched:
        lacking = " or ".join(_look_up(style).names)
        what = f"{pattern!r} matches module {matched[0]!r}, which has no parameter {lacking}"
        return f"{what}; write the full name of a parameter for the style {style!r}"
    shown = ", ".join(map(repr, names[:8]))
    what = f"{pattern!r} matches no module and no parameter"
    return f"{what}; write a name of one of the {plural(names, 'module')}, such as {shown}"


def _check_agreed(a: str, b: str, asked_of: Mapping[str, Asked]) -> None:
    """Raise PlacementError if patterns give different styles to two names of one parameter."""
    first, second = asked_of[a], asked_of[b]
    if (first.dim, _components_of(first)) == (second.dim, _components_of(second)):
        return
    as_a = f"{first.style!r} as {a!r} (by {first.pattern!r})"
    as_b = f"{second.style!r} as {b!r} (by {second.pattern!r})"
    fix = "make the patterns match only one of its names"
    raise PlacementError(f"one shared parameter has the styles {as_a} and {as_b}; {fix}")


def _components_of(asked: Asked) -> int | tuple[int, ...]:
    """The components of a Fused style; 1, for the whole weight, of any other."""
    return asked.style.components if isinstance(asked.style, Fused) else 1
