"""Wires: how the tensors that travel lie, which follows from how those that are held do.

1. A rank has of a component what it has of the tensor, block by block; where nothing is done it is the tensor, in its
   own place, and else an array of its own, packed.
2. A layout that cuts inside a block is an error, which names the nearest cuts between blocks.
3. A tensor whose ranks hold addends (Partial) is reduced as it is held: what is made of addends does not add up to what
   is made of their sum. So nothing may be done at its source, and nothing is Partial at the destination.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((4, 128), Mesh(tp=2), "n (tp k)", dtype="bfloat16")
>>> print(lay(layout, Component("scale", "uint8", (32,)), "source", "w"))
uint8[4, 4] n (tp h) on tp=2
>>> lay(layout, Component("scale", "uint8", (48,)), "source", "w")
Traceback (most recent call last):
shardmath.PlanError: tensor 'w': rank 0 holds positions 0:64 of dimension 1 under bfloat16[4, 128] n (tp h) on tp=2, \
and component 'scale uint8 per 48' is cut every 48: the nearest cuts to 64 are 48 and 96; divide the dimension there
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import FormatError, PlanError, ShardError
from shardmath.base.text import plural
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest
from shardmath.layouts.layout import Layout
from shardmath.values.formats.scales import lay_blocks, spread_last
from shardmath.values.transforms.components import (
    AsHeld,
    Companion,
    Component,
    End,
    Form,
    HasConditions,
    Transform,
    list_companions,
)

__all__ = ["Held", "Wired", "lay", "wire"]

Held: TypeAlias = tuple[LayoutOrWindows, ...]
"""How a side holds each component; or a tensor, and each of its companions."""


class Wired(NamedTuple):
    """A tensor, and what travels for it: `sent` and `received` are how the components lie at the two ends.

    `suffixes` are those of its companions at each end.
    """

    transform: Transform
    src: Form
    dst: Form
    as_held: AsHeld
    components: tuple[Component, ...]
    sent: Held
    received: Held
    suffixes: tuple[tuple[str, ...], tuple[str, ...]]

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.components))
        return f"{self.src} to {self.dst} by {self.transform} as {parts}"


def wire(name: str, transform: Transform, src: Held, dst: Held) -> Wired:
    """What travels for the tensor `name`, which is held so at its two ends, with its companions.

    Raises PlanError where the transform does not fit the tensor, or a layout cuts a block.
    """
    here, there = _form_of(name, src[0]), _form_of(name, dst[0])
    components = _list_components(name, transform, here, there)
    as_held = AsHeld(*transform.as_held(here, there))
    sides: list[Held] = []
    suffixes = []
    for end, held, is_held in zip(ENDS, (src, dst), as_held, strict=True):
        for one in held:
            layouts = _list_layouts(one)
            _check_addends(name, layouts, end, is_held)
        beside = list_companions(transform, end)
        _check_windows(name, beside, held, end)
        lay_end = _keep_as_held if is_held else _lay_end
        side = lay_end(name, transform, components, held, end)
        sides.append(side)
        suffixes.append(tuple(one.suffix for one in beside))
    sent, received = sides
    first, last = suffixes
    wired = Wired(transform, here, there, as_held, components, sent, received, (first, last))
    _check_shapes(name, wired)
    return wired


def _lay_end(
    name: str, transform: Transform, components: Sequence[Component], held: Held, end: End
) -> Held:
    """How the components lie where something is done. Raises PlanError for companions that lie otherwise."""
    beside = list_companions(transform, end)
    _check_companions(name, beside, held, end)
    if isinstance(transform, HasConditions):
        for layout in _list_layouts(held[0]):
            transform.check_layout(layout, end, name)
    return tuple(_lay_all(held[0], part, end, name) for part in components)


def _check_companions(name: str, beside: Sequence[Companion], held: Held, end: End) -> None:
    """Raise PlanError for a companion of which a rank has other blocks than of the tensor."""
    first, *others = map(_list_layouts, held)
    for companion, layouts in zip(beside, others, strict=True):
        own = name + companion.suffix
        for layout, whole in zip(layouts, first, strict=True):
            wanted = lay(whole, companion.component, end, name)
            found = lay(layout, Component("own", layout.dtype), end, own)
            if holdings_digest(found) != holdings_digest(wanted):
                what = f"{own!r} is {layout} at the {end}, beside {whole}"
                raise PlanError(f"{what}; ranks hold of both the same blocks as in {wanted}")


def _check_windows(name: str, beside: Sequence[Companion], held: Held, end: End) -> None:
    """Raise PlanError for a companion that has other windows than the tensor, or lies on other ranks."""
    first, *others = map(_list_layouts, held)
    for companion, layouts in zip(beside, others, strict=True):
        own = name + companion.suffix
        if len(layouts) != len(first):
            what = f"{own!r} has {plural(layouts, 'window')}, and {name!r} {len(first)}"
            raise PlanError(f"{what} at the {end}; give as many of both")
        for layout, whole in zip(layouts, first, strict=True):
            alone = set(layout.mesh.ranks) ^ set(whole.mesh.ranks)
            if alone:
                what = f"{own!r} is {layout} at the {end}, beside {whole}"
                raise PlanError(f"{what}: rank {min(alone)} has one of them; give it both")


ENDS: tuple[End, End] = ("source", "destination")


def _list_layouts(held: LayoutOrWindows) -> tuple[Layout, ...]:
    return held if isinstance(held, tuple) else (held,)


def _form_of(name: str, held: LayoutOrWindows) -> Form:
    """What the tensor is at one end. Raises PlanError where windows are of different tensors."""
    forms = {Form(layout.shape, layout.dtype) for layout in _list_layouts(held)}
    if len(forms) > 1:
        some = ", ".join(sorted(map(str, forms)))
        raise PlanError(f"tensor {name!r} has windows of {some}; give windows of one tensor")
    return forms.pop()


def _list_components(
    name: str, transform: Transform, src: Form, dst: Form
) -> tuple[Component, ...]:
    """The components. Raises PlanError for none, and for two of one name."""
    try:
        components = tuple(transform.components(src, dst))
    except ShardError as error:
        raise PlanError(f"tensor {name!r}: {error}") from error
    names = [part.name for part in components]
    if not names or len(set(names)) < len(names):
        what = f"tensor {name!r}: {transform} has components {names}"
        raise PlanError(f"{what}; give one at least, each with a name of its own")
    return components


def _keep_as_held(
    name: str, transform: Transform, components: Sequence[Component], held: Held, end: End
) -> Held:
    """What is held. Raises PlanError unless the components are the tensor itself, and its companions."""
    forms = [_form_of(name, one) for one in held]
    is_whole = ", ".join(map(str, forms))
    what = f"tensor {name!r}: {transform} does nothing at the {end}, where {is_whole} is held"
    found = [f"{part.dtype}{list(part.shape(forms[0], end))}" for part in components]
    if found != list(map(str, forms)):
        raise PlanError(f"{what}, and sends {', '.join(found)}; give it a function at the {end}")
    return held


def _check_shapes(name: str, wired: Wired) -> None:
    """Raise PlanError for a component of another shape at each end."""
    for part in wired.components:
        here = part.shape(wired.src, "source")
        there = part.shape(wired.dst, "destination")
        if here != there:
            what = f"tensor {name!r}: component {str(part)!r} is {list(here)} of {wired.src}"
            fix = "give shapes and grains that fit each other"
            raise PlanError(f"{what}, and {list(there)} of {wired.dst}; {fix}")


def _lay_all(held: LayoutOrWindows, part: Component, end: End, name: str) -> LayoutOrWindows:
    """The layouts of a component; as many windows as the tensor has."""
    if isinstance(held, tuple):
        return tuple(lay(layout, part, end, name) for layout in held)
    return lay(held, part, end, name)


def lay(layout: Layout, component: Component, end: End, name: str) -> Layout:
    """The packed layout of a component of the tensor `name`. Raises PlanError for a cut inside a block."""
    blocks = component.blocks(layout.ndim, end)
    what = f"component {str(component)!r}"
    try:
        laid = lay_blocks(layout, blocks, component.dtype, what, name)
    except FormatError as error:
        raise PlanError(str(error)) from error
    spread = component.spread_at(end)
    return laid if spread == 1 else spread_last(laid, spread)


def _check_addends(name: str, layouts: Sequence[Layout], end: End, is_held: bool) -> None:
    """Raise PlanError for a tensor whose ranks hold addends of which something would be made."""
    for layout in layouts:
        waiting = [axis for axis, _ in layout.partial if layout.mesh.axis_size(axis) > 1]
        if not waiting or (end == "source" and is_held):
            continue
        what = f"tensor {name!r} is Partial at the {end}: {layout}"
        if end == "source":
            why = "what is made of addends does not add up to what is made of their sum"
            raise PlanError(f"{what}; {why}: transform it at the destination, after the reduction")
        raise PlanError(f"{what}; transforms give values, not addends: reduce it to Replicate")
