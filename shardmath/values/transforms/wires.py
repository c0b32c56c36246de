"""Wires: layouts of the tensors that travel, derived from the layouts of those that ranks hold.

1. A rank holds the same blocks of a component as of the tensor. At an end where nothing is computed the component is
   the tensor itself, in place; elsewhere it is a separate, packed array.
2. A layout that cuts inside a block raises PlanError, which names the block.
3. A Partial tensor is reduced as it is held: transformed addends do not add up to the transformed sum. So nothing may
   be computed at its source, and nothing is Partial at the destination of a transform.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((4, 128), Mesh(tp=2), "n (tp k)", dtype="bfloat16")
>>> print(lay(layout, Component("scale", "uint8", (32,)), "source", "w"))
uint8[4, 4] n (tp h) on tp=2
>>> lay(layout, Component("scale", "uint8", (48,)), "source", "w")
Traceback (most recent call last):
shardmath.PlanError: tensor 'w': rank 0 holds positions 0:64 of dimension 1 under bfloat16[4, 128] n (tp h) on tp=2, \
and so cuts a block of 48 of component 'scale uint8 per 48' at 64; divide the dimension at multiples of 48
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import FormatError, PlanError, ShardError
from shardmath.base.text import plural
from shardmath.layouts.holdings import LayoutOrWindows, holdings_digest, label
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
"""The layout, or windows, of each component; or of a tensor and each of its companions."""


class Wired(NamedTuple):
    """A transformed tensor: the components (tensors) that are sent instead of it, and their layouts at the source
    (`sent`) and at the destination (`received`).

    `suffixes` has the suffixes of the tensor's companions at each end.
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
    """Find the components (tensors) to send in place of the tensor `name`, and their layouts, as a Wired. `src` and
    `dst` list the layouts of the tensor and of its companions, such as scales, at both ends.

    Raises PlanError if the transform does not fit the tensor, or a layout cuts a block.
    """
    src_form, dst_form = _form_of(name, src[0]), _form_of(name, dst[0])
    components = _list_components(name, transform, src_form, dst_form)
    as_held = AsHeld(*transform.as_held(src_form, dst_form))
    sides: list[Held] = []
    suffixes = []
    for end, held, is_held in zip(ENDS, (src, dst), as_held, strict=True):
        for layouts in map(_list_layouts, held):
            _check_addends(name, layouts, end, is_held)
        companions = list_companions(transform, end)
        _check_windows(name, companions, held, end)
        lay_end = _keep_as_held if is_held else _lay_end
        sides.append(lay_end(name, transform, components, held, end))
        suffixes.append(tuple(companion.suffix for companion in companions))
    sent, received = sides
    first, last = suffixes
    wired = Wired(transform, src_form, dst_form, as_held, components, sent, received, (first, last))
    _check_shapes(name, wired)
    return wired


def _lay_end(
    name: str, transform: Transform, components: Sequence[Component], held: Held, end: End
) -> Held:
    """The components' layouts at an end where something is computed, made from `held`: the layouts of the tensor and
    of its companions. Raises PlanError for companions that do not fit the tensor, and for layouts that do not fit the
    transform."""
    _check_companions(name, list_companions(transform, end), held, end)
    tensor_held = held[0]
    if isinstance(transform, HasConditions):
        for layout in _list_layouts(tensor_held):
            transform.check_layout(layout, end, name)
    return tuple(_lay_all(tensor_held, part, end, name) for part in components)


def _check_companions(name: str, companions: Sequence[Companion], held: Held, end: End) -> None:
    """Raise PlanError if a rank holds other blocks of a companion than of the tensor."""
    tensor_layouts, *others = map(_list_layouts, held)
    for companion, layouts in zip(companions, others, strict=True):
        full_name = name + companion.suffix
        for layout, tensor_layout in zip(layouts, tensor_layouts, strict=True):
            wanted = lay(tensor_layout, companion.component, end, name)
            # `own`, a component of single positions, has the companion's layout without holes, as `wanted` is.
            packed = lay(layout, Component("own", layout.dtype), end, full_name)
            if holdings_digest(packed) != holdings_digest(wanted):
                what = f"{full_name!r} is {layout} at the {end}, but {name!r} {tensor_layout}"
                raise PlanError(f"{what}; give ranks the same blocks of both, as {wanted} does")


def _check_windows(name: str, companions: Sequence[Companion], held: Held, end: End) -> None:
    """Raise PlanError for a companion that has other windows than the tensor, or other ranks."""
    tensor_layouts, *others = map(_list_layouts, held)
    for companion, layouts in zip(companions, others, strict=True):
        full_name = name + companion.suffix
        if len(layouts) != len(tensor_layouts):
            what = (
                f"{full_name!r} has {plural(layouts, 'window')}, and {name!r} {len(tensor_layouts)}"
            )
            raise PlanError(f"{what} at the {end}; give both the same number of windows")
        for layout, tensor_layout in zip(layouts, tensor_layouts, strict=True):
            unpaired = set(layout.mesh.ranks) ^ set(tensor_layout.mesh.ranks)
            if unpaired:
                what = f"{full_name!r} is {layout} at the {end}, and {name!r} {tensor_layout}"
                fault = f"only one of them has rank {min(unpaired)}"
                raise PlanError(f"{what}: {fault}; put both on the same ranks")


ENDS: tuple[End, End] = ("source", "destination")


def _list_layouts(held: LayoutOrWindows) -> tuple[Layout, ...]:
    return held if isinstance(held, tuple) else (held,)


def _form_of(name: str, held: LayoutOrWindows) -> Form:
    """The tensor's shape and dtype at one end. Raises PlanError if its windows disagree about them."""
    forms = {Form(layout.shape, layout.dtype) for layout in _list_layouts(held)}
    if len(forms) > 1:
        listed = ", ".join(sorted(map(str, forms)))
        raise PlanError(
            f"{label(name)} has windows of {listed}; give all of them one shape and dtype"
        )
    return forms.pop()


def _list_components(
    name: str, transform: Transform, src: Form, dst: Form
) -> tuple[Component, ...]:
    """The transform's components. Raises PlanError if there are none, or two with one name."""
    try:
        components = tuple(transform.components(src, dst))
    except ShardError as error:
        raise PlanError(f"{label(name)}: {error}") from error
    names = [part.name for part in components]
    if not names or len(set(names)) < len(names):
        what = f"{label(name)}: {transform} has components {names}"
        raise PlanError(f"{what}; give one or more different names")
    return components


def _keep_as_held(
    name: str, transform: Transform, components: Sequence[Component], held: Held, end: End
) -> Held:
    """The layouts as given. Raises PlanError unless the components are the tensor and its companions."""
    forms = [_form_of(name, layouts) for layouts in held]
    held_forms = ", ".join(map(str, forms))
    what = f"{label(name)}: {transform} does nothing at the {end}, which holds {held_forms}"
    tensor_form = forms[0]
    sent = [str(Form(part.shape(tensor_form, end), part.dtype)) for part in components]
    if sent != list(map(str, forms)):
        fix = f"give it a function at the {end}"
        raise PlanError(f"{what}, but moves {', '.join(sent)}; {fix}")
    return held


def _check_shapes(name: str, wired: Wired) -> None:
    """Raise PlanError for a component whose shape differs between the ends."""
    for part in wired.components:
        sent = part.shape(wired.src, "source")
        received = part.shape(wired.dst, "destination")
        if sent != received:
            what = f"{label(name)}: component {str(part)!r} has shape {list(sent)} for {wired.src}"
            fix = "give grains, or tensors, with which both are the same"
            raise PlanError(f"{what}, but {list(received)} for {wired.dst}; {fix}")


def _lay_all(held: LayoutOrWindows, part: Component, end: End, name: str) -> LayoutOrWindows:
    """The layout of a component for each window of the tensor."""
    if isinstance(held, tuple):
        return tuple(lay(layout, part, end, name) for layout in held)
    return lay(held, part, end, name)


def lay(layout: Layout, component: Component, end: End, name: str) -> Layout:
    """Return the layout of `component`, a tensor that is sent in place of the tensor `name`. `layout` is the layout of
    the tensor `name` at the source or the destination, as `end` says.

    It has no holes. Raises PlanError for a cut inside a block.
    """
    blocks = component.blocks(layout.ndim, end)
    what = f"component {str(component)!r}"
    try:
        laid = lay_blocks(layout, blocks, component.dtype, what, name)
    except FormatError as error:
        raise PlanError(str(error)) from error
    spread = component.spread_at(end)
    return laid if spread == 1 else spread_last(laid, spread)


def _check_addends(name: str, layouts: Sequence[Layout], end: End, is_held: bool) -> None:
    """Raise PlanError for a Partial tensor at an end where its addends would be transformed or made."""
    for layout in layouts:
        if not layout.addend_axes or (end == "source" and is_held):
            continue
        what = f"{label(name)} is Partial at the {end}: {layout}"
        if end == "source":
            why = "and transformed addends do not add up to the transformed sum"
            raise PlanError(f"{what}, {why}; transform it at the destination instead")
        why = "but transforms give values, not addends"
        raise PlanError(f"{what}, {why}; give it a destination layout without Partial")
