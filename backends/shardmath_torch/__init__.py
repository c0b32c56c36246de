"""Plans on torch.distributed: `compile` once, then `move` many times; and DTensors as what they really are.

move = compile(plan)                        # collective; every rank of the group, once
move(src_tensors, out=dst_tensors)          # collective; many times, in the same order on every rank

move = compile_transformed(sm.transforms.transformed(src, dst, rules))   # where what travels is not what is held
quantise = compile_quantise(format, layout)                   # where ranks cut blocks that share a scale
data, scales = quantise(tensor)
with commit(move, other):                   # several moves: all in place on all ranks, or none on any
    ...

group = connect("host:port", rank, size)       # processes of several jobs, for any of these as group=group

refit = Refit(planned)                      # collective; a trainer's and an engine's own tensors, by their names
refit.prepare(src=..., dst=...)             # once; then refit() after every step

recorded = record(load, shapes, module)     # how a loader stores tensors, instead of rows that say it

data, scales = quantise(formats.MXFP8(), tensor)   # of any format, and dequantise, on any device

digest(layout, tensor)                      # a number for what all ranks hold, the same under every layout

layout = from_dtensor(dtensor)              # what every rank really holds
checkpointable(local, layout)               # a plain tensor that torch's own checkpoints take for a part
other = redistribute(dtensor, target)       # any mesh to any mesh, differentiable

save(path, tensors, layouts)                # what ranks hold, every element once
tensors = load(path, layouts)               # under any other layouts, on any number of ranks
export(path, module)                        # whole, as transformers and engines load it
"""

from __future__ import annotations

from shardmath_torch.checkpoints.checkpoint import load, save
from shardmath_torch.checkpoints.exports.export import export
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.states.training import load_state, save_state, state_of
from shardmath_torch.checkpoints.weights.filling import load_weights
from shardmath_torch.groups.joint.connect import connect, disconnect
from shardmath_torch.moves.commits.blocks import commit
from shardmath_torch.moves.movers.compile import compile
from shardmath_torch.moves.movers.handles import Handle
from shardmath_torch.moves.movers.mover import Mover
from shardmath_torch.moves.observing.bars import progress_bar
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.moves.observing.tracing import trace
from shardmath_torch.tensors.changes.changes import Changes, compile_changes
from shardmath_torch.tensors.contents.digest import digest
from shardmath_torch.tensors.dtensors.dtensor import from_dtensor, to_dtensor
from shardmath_torch.tensors.dtensors.modules import layout_of
from shardmath_torch.tensors.dtensors.redistribute import redistribute
from shardmath_torch.tensors.dtensors.scales import amax
from shardmath_torch.tensors.dtensors.styles import Fused
from shardmath_torch.tensors.dtensors.tensor_parallel import set_device_mesh
from shardmath_torch.tensors.formats.quantising import dequantise, quantise
from shardmath_torch.tensors.formats.views import quantised_parts, sendable
from shardmath_torch.tensors.parts.checkpointable import checkpointable
from shardmath_torch.tensors.refits.recording import record
from shardmath_torch.tensors.refits.refit import Refit
from shardmath_torch.tensors.transforms.amaxes import Quantiser, compile_quantise
from shardmath_torch.tensors.transforms.compile import TransformedMover, compile_transformed
from shardmath_torch.tensors.transforms.megatron import megatron_hook

__all__ = [
    "Changes",
    "CheckpointError",
    "Fused",
    "Handle",
    "Moved",
    "Mover",
    "Quantiser",
    "Refit",
    "TransformedMover",
    "amax",
    "checkpointable",
    "commit",
    "compile",
    "compile_changes",
    "compile_quantise",
    "compile_transformed",
    "connect",
    "dequantise",
    "digest",
    "disconnect",
    "export",
    "from_dtensor",
    "layout_of",
    "load",
    "load_state",
    "load_weights",
    "megatron_hook",
    "open_checkpoint",
    "progress_bar",
    "quantise",
    "quantised_parts",
    "record",
    "redistribute",
    "save",
    "save_state",
    "sendable",
    "set_device_mesh",
    "state_of",
    "to_dtensor",
    "trace",
]
