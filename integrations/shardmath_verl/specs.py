"""Specs: verl's ShardSpecs as layouts, and layouts as ShardSpecs.

1. A ShardSpec says how one tensor is divided, by a DeviceMesh and placements, or by the block that this rank holds.
2. verl reads a block's offset off strided placements only if shards are even. So other layouts become blocks.
3. What one side cannot express is an error: a verl that reads something else would send wrong elements.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from verl.workers.engine.spec import BlockPlacement, ShardSpec

from shardmath.base.errors import LayoutError, PlacementError, ShardError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.layouts.fitting import from_holdings
from shardmath.layouts.layout import Layout
from shardmath.layouts.per_axis import find_placements
from shardmath.layouts.placement import StridedShard
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.tensors.dtensors.devicemesh import device_mesh_of, group_for, mesh_of
from shardmath_torch.tensors.dtensors.placements import layout_of_placements, placements_of

__all__ = ["from_shard_spec", "to_shard_spec"]

DTYPE = "bfloat16"
"""What verl's engines export."""


# ShardSpec -> Layout


def from_shard_spec(spec: ShardSpec, dtype: str = DTYPE) -> Layout:
    """Return the layout of the tensor that `spec` describes. A whole tensor is replicated over all ranks.

    Strided placements are read in FSDP2's order, even if sizes do not divide evenly. Collective over
    `spec.gather_group` if the spec has a block. Raises LayoutError or PlacementError for a spec with a converter, with
    an offset instead of a block, with a block but no `gather_group`, or with blocks or placements that no layout has.
    """
    if spec.to_hf_chunk is not None or spec.hf_slots is not None:
        raise LayoutError(
            f"{spec} has a converter, but a layout is of one tensor without; make a layout per tensor of the checkpoint"
        )
    shape = tuple(map(int, spec.full_shape))
    if spec.place is not None:
        return _from_block(spec, shape, dtype)
    if spec.mesh is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return Layout(shape, Mesh(world=ranks), {}, dtype=dtype)
    read = layout_of_placements(shape, mesh_of(spec.mesh), tuple(spec.placements), dtype, "order")
    if isinstance(read, ShardError):
        raise read
    return read


def _from_block(spec: ShardSpec, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of a spec by blocks, of which each rank knows its own."""
    block = spec.place
    if not isinstance(block, BlockPlacement):
        raise LayoutError(
            f"{spec} has the offset place={block}, which does not say how much of the tensor a rank holds; pass a "
            f"BlockPlacement"
        )
    if spec.gather_group is None:
        raise LayoutError(
            f"{spec} has a block, but gather_group=None does not say which ranks have the others; pass their group, "
            f"such as torch.distributed.group.WORLD"
        )
    group = compat.group_of(spec.gather_group)
    mine = shape, tuple(block.global_offset), tuple(block.local_shape)
    blocks = gather(mine, group, "read a ShardSpec")
    if any(theirs != shape for theirs, _, _ in blocks):
        raise LayoutError(
            f"ranks {compat.ranks_of(group)} have blocks of tensors of different shapes, "
            f"{sorted({theirs for theirs, _, _ in blocks})}; pass the spec of one tensor on all of them"
        )
    held = {}
    for rank, (_, offset, size) in zip(compat.ranks_of(group), blocks, strict=True):
        held[rank] = tuple(_make_range(int(o), int(n)) for o, n in zip(offset, size, strict=True))
    layout = from_holdings(shape, held, dtype=dtype)
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"no single layout has the blocks of {spec}; pass one of its {len(layout)} parts"
        )
    return layout


def _make_range(offset: int, size: int) -> Runs:
    return from_ranges([(offset, offset + size)] if size else [])


# Layout -> ShardSpec


def to_shard_spec(layout: Layout, device_type: str = "cpu") -> ShardSpec:
    """Return a ShardSpec for this rank's part of a tensor, of which verl reads the elements that `layout` gives it.

    Collective over the default group on first use for a mesh. Raises PlacementError if a rank holds something other
    than one block, or an addend, or if blocks overlap.
    """
    blocks = {rank: _find_block(layout, rank) for rank in layout.mesh.ranks}
    if layout.partial:
        raise PlacementError(
            f"verl takes the addends of {layout} for the tensor itself; reduce them first"
        )
    if _is_read_by_verl(layout):
        mesh = device_mesh_of(layout.mesh, device_type)
        return ShardSpec(layout.shape, mesh=mesh, placements=placements_of(layout))
    rank = compat.rank_or_0()
    if rank not in blocks:
        raise LayoutError(
            f"rank {rank} is not on {layout.mesh}; call to_shard_spec on its ranks only"
        )
    held = sum(math.prod(block.local_shape) for block in set(blocks.values()))
    if held != math.prod(layout.shape):
        raise PlacementError(
            f"the blocks of {layout} are not each element once, as verl's ShardSpecs have it; plan a move to a layout "
            f"whose parts do not overlap"
        )
    first = next(each for each, block in blocks.items() if block == blocks[rank])
    group = group_for(layout.mesh.ranks) or dist.group.WORLD
    return ShardSpec(
        layout.shape, place=blocks[rank], gather_group=group, contributes=rank == first
    )


def _is_read_by_verl(layout: Layout) -> bool:
    """Whether DTensor has placements for the layout from which verl computes the right offsets."""
    try:
        placements, readings = find_placements(layout)
    except PlacementError:
        return False
    if not any(isinstance(placement, StridedShard) for placement in placements):
        return True
    is_even = all(dim.size % math.prod(dim.axes.values()) == 0 for dim in layout.dims)
    return is_even and "order" in readings


def _find_block(layout: Layout, rank: int) -> BlockPlacement:
    """The block that a rank holds. Raises PlacementError for anything else."""
    offset = []
    for runs in layout.runs(rank):
        if len(runs.segments) > 1 or runs.size < len(runs):
            raise PlacementError(
                f"rank {rank} holds {' '.join(map(str, layout.runs(rank)))} of {layout}, which is not one block, as "
                f"verl's ShardSpec has it; make a spec for each block"
            )
        offset.append(runs.segments[0][1] if runs.segments else 0)
    return BlockPlacement(layout.local_shape(rank), tuple(offset), layout.shape)
