"""Tiling: an engine's data and their scales, where it cuts a tensor inside a tile.

1. Scales are cut as their tensor is. Where a rank's part is no whole number of tiles, rows say no more of the scales
   than that their number does not divide; the tensor's own layout has the cut, the tile, and the nearest cuts.
2. The number of scales may divide where that of tiles does not: 192 rows in tiles of 128 on two ranks. Then a rank has
   numbers without their scale, which is an error. Data may be cut anywhere where ranks have every scale of theirs.
3. In a fused tensor every part begins with a tile, where its scales begin: who reads it knows nothing of parts.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.values.formats.fp8 import FP8Blocks
>>> from shardmath.models.storage import rows
>>> from shardmath.values.transforms.quantising import Quantise
>>> data, scales = (rows.parse(f"{name} = {name} : (tp n) h") for name in ("w", "w_scale_inv"))
>>> side = Stored(data + scales, (Mesh(tp=4),))
>>> names = Vocabulary({"w": ((768, 8), "float8_e4m3fn"), "w_scale_inv": ((6, 1), "float32")})
>>> explain_cut(side, names, {"w": Quantise(FP8Blocks())})
"tensor 'w': rank 0 holds positions 0:192 of dimension 0 under float8_e4m3fn[768, 8] (tp n) h on tp=4, \
and component 'scales float32 per 128 x 128' is cut every 128: the nearest cuts to 192 are 128 and 256; \
divide the dimension there"
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmath.base.errors import PlanError, StoreError
from shardmath.layouts.layout import Layout
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.stored import KnownSide, Slot, Stored, Vocabulary
from shardmath.values.formats.scales import lay_blocks
from shardmath.values.transforms.choosing import choose
from shardmath.values.transforms.components import Companion, Component, Transform, list_companions
from shardmath.values.transforms.wires import lay

__all__ = ["check_places", "check_scales", "explain_cut"]


def explain_cut(side: object, of: Vocabulary, rules: Mapping[str, Transform]) -> str | None:
    """What says that the side cuts a tensor inside a block of its scales.

    None where it does not, where it has other faults, and for a side that is not declared in rows.
    """
    beside = _list_beside(of, rules)
    if not isinstance(side, Stored) or not beside:
        return None
    bare = {name: entry for name, entry in of.shapes.items() if name not in beside}
    try:
        layouts = bind(side, bare).layouts
        for name, companion in beside.values():
            scales = Component("scales", companion.dtype, companion.grain)
            lay(layouts[name], scales, "destination", name)
    except StoreError:
        return None
    except PlanError as error:
        return str(error)
    return None


def check_scales(
    engines: Mapping[str, KnownSide], of: Vocabulary, rules: Mapping[str, Transform]
) -> None:
    """Raise StoreError where a rank of an engine has numbers of a tensor without their scale."""
    beside = _list_beside(of, rules)
    checked: set[tuple[int, int]] = set()
    for engine, side in engines.items():
        for own, (name, companion) in beside.items():
            if name not in side.layouts or own not in side.layouts:
                continue
            data, scales = side.layouts[name], side.layouts[own]
            # Layers and engines share layouts.
            pair = id(data), id(scales)
            if pair in checked:
                continue
            checked.add(pair)
            component = companion.component
            blocks = component.blocks(data.ndim, "destination")
            needed = lay_blocks(data, blocks, component.dtype, "scales", name, duplicated=True)
            rank = _find_short(needed, scales)
            if rank is not None:
                raise StoreError(
                    f"{engine}: rank {rank} has numbers of {name!r} without their scale: data are {data}, "
                    f"{own!r} is {scales}, a scale per {blocks}; cut both between blocks"
                )


def check_places(
    engines: Mapping[str, KnownSide], of: Vocabulary, rules: Mapping[str, Transform]
) -> None:
    """Raise StoreError where a part of a fused tensor begins inside a tile, or beside the scales of another part."""
    beside = _list_beside(of, rules)
    checked: set[object] = set()
    for engine, side in engines.items():
        # Engines that store alike do so at the same places.
        alike = (
            (side.stored.rows, *map(str, side.stored.meshes)) if isinstance(side, Bound) else engine
        )
        if beside and alike not in checked:
            checked.add(alike)
            for rank in sorted(side.ranks):
                _check_rank(engine, side, rank, beside)


def _check_rank(
    engine: str, side: KnownSide, rank: int, beside: Mapping[str, tuple[str, Companion]]
) -> None:
    slots = side.slots(rank)
    for own, (name, companion) in beside.items():
        if name not in slots or own not in slots:
            continue
        sizes = companion.component.block(side.layouts[name].ndim, "destination")
        both = _list_begins(slots[name]), _list_begins(slots[own])
        for d, (size, begin, scale) in enumerate(zip(sizes, *both, strict=True)):
            if size is None or begin == scale * size:
                continue
            where = f"{engine}: {name!r} begins at {begin} in dimension {d} of {slots[name].native!r} on rank {rank}"
            why = f"its scales at {scale} of {slots[own].native!r}, and a scale is of {size}"
            fix = "make the parts before it whole tiles, or store it apart"
            raise StoreError(f"{where}, {why}: its numbers would be read with other scales; {fix}")


def _list_begins(slot: Slot) -> list[int]:
    """Where the tensor begins in the stored one, in each of its own dimensions."""
    kept = [part.start for part in slot.cut if isinstance(part, slice)]
    return [kept[d] for d in slot.order]


def _find_short(needed: Layout, held: Layout) -> int | None:
    """The first rank that holds less than it needs."""
    for rank in needed.mesh.ranks:
        if rank not in held.mesh:
            return rank
        for wanted, own in zip(needed.indices(rank), held.indices(rank), strict=True):
            if not set(wanted.tolist()) <= set(own.tolist()):
                return rank
    return None


def _list_beside(
    of: Vocabulary, rules: Mapping[str, Transform]
) -> dict[str, tuple[str, Companion]]:
    """The tensors that are scales of another, by name. A trainer has none, and may cut its numbers anywhere."""
    try:
        chosen = choose(rules, list(of.shapes))
    except PlanError:
        return {}
    beside = {}
    for name, transform in chosen.items():
        for companion in list_companions(transform, "destination"):
            beside[name + companion.suffix] = name, companion
    return {own: of_whom for own, of_whom in beside.items() if own in of.shapes}
