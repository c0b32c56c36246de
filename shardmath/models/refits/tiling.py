"""Tiling: errors for engines that cut a tensor inside a tile of its scales.

1. Scales are cut as their tensor is. If a rank's part is not a whole number of tiles, binding only reports that the
   number of scales does not divide; the tensor's layout gives the cut, the tile, and the nearest cuts.
2. The number of scales may divide even if whole tiles do not: 192 rows in tiles of 128 on two ranks. Then a rank has
   values without their scale, which is an error. Data may be cut anywhere if each rank has all scales of its values.
3. In a fused tensor every part begins with a tile, where its scales begin: readers of it do not know the parts.
4. A rule that makes scales says how large their tiles are. If scales are sent as they are, the numbers of the engine's
   declaration say it (`imply`), as `vllm` gives them. Scales of other tiles are an error (`check_shapes`).

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.values.formats.fp8 import FP8Blocks
>>> from shardmath.models.storage import rows
>>> from shardmath.values.transforms.quantizing import Quantize
>>> data, scales = (rows.parse(f"{name} = {name} : (tp n) h") for name in ("w", "w_scale_inv"))
>>> side = Stored(data + scales, (Mesh(tp=4),))
>>> names = Vocabulary({"w": ((768, 8), "float8_e4m3fn"), "w_scale_inv": ((6, 1), "float32")})
>>> explain_cut(side, names, {"w": Quantize(FP8Blocks())})
"tensor 'w': rank 0 holds positions 0:192 of dimension 0 under float8_e4m3fn[768, 8] (tp n) h on tp=4, \
and so cuts a block of 128 of component 'scales float32 per 128 x 128' at 192; \
divide the dimension at multiples of 128"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shardmath.base.errors import PlanError, StoreError
from shardmath.layouts.layout import Layout
from shardmath.models.storage.binding import Bound, bind
from shardmath.models.storage.stored import KnownSide, Slot, Stored, Vocabulary
from shardmath.values.formats.fp8 import FP8Blocks
from shardmath.values.formats.scales import lay_blocks
from shardmath.values.transforms.choosing import choose
from shardmath.values.transforms.components import Companion, Component, Transform, list_companions
from shardmath.values.transforms.quantizing import Quantize
from shardmath.values.transforms.wires import lay

__all__ = ["check_places", "check_scales", "check_shapes", "explain_cut", "imply"]

SUFFIX = "_scale_inv"
"""What the names of scales add to the names of their tensors."""
EXPERT = re.compile(r"\.experts\.\d+\.")
MATRIX = 2
"""Dimensions of a tensor with tiles."""


def imply(side: object, of: Vocabulary, rules: Mapping[str, Transform]) -> dict[str, Transform]:
    """Return the transforms that would make the scales which `side` is sent as they are, by tensor, in addition to
    `rules`. `of` has the tensors' shapes and dtypes. There are none if the side's numbers give no size of tiles.

    >>> from shardmath.layouts.algebra.mesh import Mesh
    >>> side = Stored((), (Mesh(),), numbers={"tile_rows": 128, "tile_columns": 128})
    >>> of = Vocabulary({"w": ((256, 256), "float8_e4m3fn"), "w_scale_inv": ((2, 2), "float32")})
    >>> imply(side, of, {})
    {'w': Quantize(format=FP8Blocks(block=(128, 128), power_of_two=False, data='e4m3'), at='source',
                   suffixes=('_scale_inv',), wire='bfloat16')}
    """
    if not isinstance(side, Stored) or "tile_rows" not in side.numbers:
        return {}
    formats = _list_formats(side.numbers)
    implied: dict[str, Transform] = {}
    fitting: dict[object, Transform | None] = {}
    for name, shape, scales in _list_sent(of, rules):
        # Layers and experts have few shapes.
        key = shape, scales
        if key not in fitting:
            fits = (one for one in formats.values() if one.scale_shape(shape) == scales)
            fitting[key] = next(map(Quantize, fits), None)
        rule = fitting[key]
        if rule is not None:
            implied[name] = rule
    return implied


def check_shapes(
    engine: str, side: object, stored: KnownSide, of: Vocabulary, rules: Mapping[str, Transform]
) -> None:
    """Raise StoreError if the scales that `side`, called `engine`, is sent as they are belong to tiles of another size
    than its numbers give. `stored` is the side bound to `of`, the tensors' shapes and dtypes; the transforms `rules`
    make other scales."""
    if not isinstance(side, Stored) or "tile_rows" not in side.numbers:
        return
    formats = _list_formats(side.numbers)
    for name, shape, scales in _list_sent(of, rules):
        tile = formats[EXPERT.search(name) is not None]
        needed = tile.scale_shape(shape)
        if scales != needed and name + SUFFIX in stored.layouts:
            rows, columns = tile.block
            what = f"{engine}: {name + SUFFIX!r} is {scales}, but the engine stores {needed}"
            why = f"a scale per {rows} x {columns} elements of {name!r}, which is {shape}"
            raise StoreError(f"{what}, {why}; give scales of tiles of this size")


def _list_sent(
    of: Vocabulary, rules: Mapping[str, Transform]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(name, shape, shape of the scales) of each matrix whose scales are sent as they are."""
    try:
        ruled = choose(rules, list(of.shapes)) if rules else {}
    except PlanError:  # raised again where the rules are applied
        return
    for name, (shape, _) in of.shapes.items():
        scales = of.shapes.get(name + SUFFIX)
        if scales is not None and name not in ruled and len(shape) == MATRIX:
            yield name, shape, scales[0]


def _list_formats(numbers: Mapping[str, int]) -> dict[bool, FP8Blocks]:
    """The formats with a scale per tile of all weights (False), and of experts (True)."""
    tile = numbers["tile_rows"], numbers["tile_columns"]
    rows, columns = numbers.get("expert_tile_rows"), numbers.get("expert_tile_columns")
    expert_tile = tile if rows is None or columns is None else (rows, columns)
    return {False: FP8Blocks(tile), True: FP8Blocks(expert_tile)}


def explain_cut(side: object, of: Vocabulary, rules: Mapping[str, Transform]) -> str | None:
    """Return an error message if `side` (a trainer or engine) cuts a quantized tensor between values that share a
    scale, otherwise None. `of` has the tensors' shapes and dtypes; the transforms `rules` make the scales.

    A side that has other faults, or is not declared in rows, gives None too.
    """
    companions = _list_scales(of, rules)
    if not isinstance(side, Stored) or not companions:
        return None
    without_scales = {name: entry for name, entry in of.shapes.items() if name not in companions}
    try:
        layouts = bind(side, without_scales).layouts
        for tensor, companion in companions.values():
            scales = Component("scales", companion.dtype, companion.grain)
            lay(layouts[tensor], scales, "destination", tensor)
    except StoreError:
        return None
    except PlanError as error:
        return str(error)
    return None


def check_scales(
    engines: Mapping[str, KnownSide], of: Vocabulary, rules: Mapping[str, Transform]
) -> None:
    """Raise StoreError if a rank of an engine has values of a quantized tensor but lacks some of their scales; tensors
    whose scales the engine does not store at all are skipped. `of` has the tensors' shapes and dtypes; the transforms
    `rules` make the scales."""
    companions = _list_scales(of, rules)
    checked: set[tuple[int, int]] = set()
    for engine, side in engines.items():
        for scales_name, (name, companion) in companions.items():
            if name not in side.layouts or scales_name not in side.layouts:
                continue
            data, scales = side.layouts[name], side.layouts[scales_name]
            # Layers and engines share layout objects, so each pair is checked once.
            pair = id(data), id(scales)
            if pair in checked:
                continue
            checked.add(pair)
            component = companion.component
            blocks = component.blocks(data.ndim, "destination")
            needed = lay_blocks(data, blocks, component.dtype, "scales", name, duplicated=True)
            rank = _find_lacking(needed, scales)
            if rank is not None:
                raise StoreError(
                    f"{engine}: rank {rank} has values of {name!r} without their scale: data are {data}, "
                    f"{scales_name!r} is {scales}, a scale per {blocks}; write rows that cut both "
                    f"between blocks"
                )


def check_places(
    engines: Mapping[str, KnownSide], of: Vocabulary, rules: Mapping[str, Transform]
) -> None:
    """Raise StoreError if, in any dimension, a quantized tensor's start index in an engine's stored tensor is not the
    block size times the start index of its scales. `of` has the shapes and dtypes of all tensors, and `rules` the
    transforms that make scales."""
    companions = _list_scales(of, rules)
    checked: set[object] = set()
    for engine, side in engines.items():
        # Engines that are declared alike have the same slots, so one of them is checked.
        form: object = side.stored if isinstance(side, Bound) else engine
        if companions and form not in checked:
            checked.add(form)
            for rank in sorted(side.ranks):
                _check_rank(engine, side, rank, companions)


def _check_rank(
    engine: str, side: KnownSide, rank: int, companions: Mapping[str, tuple[str, Companion]]
) -> None:
    """Raise StoreError as `check_places`, for one rank."""
    slots = side.slots(rank)
    for scales_name, (name, companion) in companions.items():
        if name not in slots or scales_name not in slots:
            continue
        sizes = companion.component.block(side.layouts[name].ndim, "destination")
        starts = zip(
            sizes, _list_starts(slots[name]), _list_starts(slots[scales_name]), strict=True
        )
        for d, (size, start, scale_start) in enumerate(starts):
            if size is None or start == scale_start * size:
                continue
            where = f"{engine}: {name!r} begins at {start} in dimension {d} of {slots[name].native!r} on rank {rank}"
            why = f"its scales at {scale_start} of {slots[scales_name].native!r}, and a scale is of {size}"
            fix = "make the parts before it whole tiles, or store it separately"
            raise StoreError(f"{where}, {why}: its values would be read with other scales; {fix}")


def _list_starts(slot: Slot) -> list[int]:
    """The first position of the tensor in the stored one, in each of its own dimensions."""
    starts = [part.start for part in slot.cut if isinstance(part, slice)]
    by_dimension = dict(zip(slot.order, starts, strict=True))
    return [by_dimension[d] for d in range(len(starts))]


def _find_lacking(needed: Layout, held: Layout) -> int | None:
    """The first rank that holds less than it needs; None if every rank holds enough."""
    for rank in needed.mesh.ranks:
        if rank not in held.mesh:
            return rank
        for needed_dim, held_dim in zip(needed.indices(rank), held.indices(rank), strict=True):
            if not set(needed_dim.tolist()) <= set(held_dim.tolist()):
                return rank
    return None


def _list_scales(
    tensors: Vocabulary, rules: Mapping[str, Transform]
) -> dict[str, tuple[str, Companion]]:
    """(tensor, companion) by the name of its scales. A trainer has no scales, and may cut its tensors anywhere."""
    try:
        chosen = choose(rules, list(tensors.shapes))
    except PlanError:  # a trainer may lack the tensors of a pattern
        return {}
    scales = {}
    for name, transform in chosen.items():
        for companion in list_companions(transform, "destination"):
            if name + companion.suffix in tensors.shapes:
                scales[name + companion.suffix] = name, companion
    return scales
