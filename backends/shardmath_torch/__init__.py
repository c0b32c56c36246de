"""Plans on torch.distributed: `compile` once, then `move` many times; and DTensors as what they really are.

move = compile(plan)                        # collective; every rank of the group, once
move(src_tensors, out=dst_tensors)          # collective; many times, in the same order on every rank

move = compile_transformed(sm.transforms.transformed(src, dst, rules))   # where what travels is not what is held
quantize = compile_quantize(format, layout)                   # where ranks cut blocks that share a scale
data, scales = quantize(tensor)
with commit(move, other):                   # several moves: all in place on all ranks, or none on any
    ...

group = connect("host:port", rank, size)       # processes of several jobs, for any of these as group=group

refit = Refit(planned)                      # collective; a trainer's and an engine's own tensors, by their names
refit.prepare(src=..., dst=...)             # once; then refit() after every step

recorded = record(load, shapes, module)     # how a loader stores tensors, instead of rows that say it

data, scales = quantize(formats.MXFP8(), tensor)   # of any format, and dequantize, on any device

digest(layout, tensor)                      # a number for what all ranks hold, the same under every layout

layout = from_dtensor(dtensor)              # what every rank really holds
checkpointable(local, layout)               # a plain tensor that torch's own checkpoints take for a part
other = redistribute(dtensor, target)       # any mesh to any mesh, differentiable

save(path, tensors, layouts)                # what ranks hold, every element once
tensors = load(path, layouts)               # under any other layouts, on any number of ranks
export(path, module)                        # whole, as transformers and engines load it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardmath.base.moved import find_former
from shardmath_torch.groups import forks as _forks  # noqa: F401, since it has to know of every fork

if TYPE_CHECKING:
    from shardmath_torch.checkpoints.checkpoint import load, save
    from shardmath_torch.checkpoints.exports.export import export
    from shardmath_torch.checkpoints.files.places import CheckpointError
    from shardmath_torch.checkpoints.opening import open_checkpoint
    from shardmath_torch.checkpoints.safetensors.headers import WeightsError
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
    from shardmath_torch.tensors.formats.quantizing import dequantize, quantize
    from shardmath_torch.tensors.formats.views import quantized_parts, sendable
    from shardmath_torch.tensors.parts.checkpointable import checkpointable
    from shardmath_torch.tensors.refits.recording import record
    from shardmath_torch.tensors.refits.refit import Refit
    from shardmath_torch.tensors.transforms.amaxes import Quantizer, compile_quantize
    from shardmath_torch.tensors.transforms.compile import TransformedMover, compile_transformed
    from shardmath_torch.tensors.transforms.megatron import megatron_hook

LATE = {
    "Changes": "tensors.changes.changes",
    "CheckpointError": "checkpoints.files.places",
    "Fused": "tensors.dtensors.styles",
    "Handle": "moves.movers.handles",
    "Moved": "moves.observing.moved",
    "Mover": "moves.movers.mover",
    "Quantizer": "tensors.transforms.amaxes",
    "Refit": "tensors.refits.refit",
    "TransformedMover": "tensors.transforms.compile",
    "WeightsError": "checkpoints.safetensors.headers",
    "amax": "tensors.dtensors.scales",
    "checkpointable": "tensors.parts.checkpointable",
    "commit": "moves.commits.blocks",
    "compile": "moves.movers.compile",
    "compile_changes": "tensors.changes.changes",
    "compile_quantize": "tensors.transforms.amaxes",
    "compile_transformed": "tensors.transforms.compile",
    "connect": "groups.joint.connect",
    "dequantize": "tensors.formats.quantizing",
    "digest": "tensors.contents.digest",
    "disconnect": "groups.joint.connect",
    "export": "checkpoints.exports.export",
    "from_dtensor": "tensors.dtensors.dtensor",
    "layout_of": "tensors.dtensors.modules",
    "load": "checkpoints.checkpoint",
    "load_state": "checkpoints.states.training",
    "load_weights": "checkpoints.weights.filling",
    "megatron_hook": "tensors.transforms.megatron",
    "open_checkpoint": "checkpoints.opening",
    "progress_bar": "moves.observing.bars",
    "quantize": "tensors.formats.quantizing",
    "quantized_parts": "tensors.formats.views",
    "record": "tensors.refits.recording",
    "redistribute": "tensors.dtensors.redistribute",
    "save": "checkpoints.checkpoint",
    "save_state": "checkpoints.states.training",
    "sendable": "tensors.formats.views",
    "set_device_mesh": "tensors.dtensors.tensor_parallel",
    "state_of": "checkpoints.states.training",
    "to_dtensor": "tensors.dtensors.dtensor",
    "trace": "moves.observing.tracing",
}
"""Where names are, which are imported on use."""

FORMER = {
    "Quantiser": "Quantizer",
    "compile_quantise": "compile_quantize",
    "dequantise": "dequantize",
    "quantise": "quantize",
    "quantised_parts": "quantized_parts",
}
"""Former names, and the present ones."""


def __getattr__(name: str) -> object:
    """What is imported on its first use. Raises AttributeError for what is not here."""
    if name in FORMER:
        return find_former(f"shardmath_torch.{name}", f"shardmath_torch.{FORMER[name]}")
    if name not in LATE:
        raise AttributeError(f"module 'shardmath_torch' has no attribute {name!r}")
    value = getattr(import_module(f"shardmath_torch.{LATE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What there is, imported or not."""
    return sorted(__all__)


__all__ = [
    "Changes",
    "CheckpointError",
    "Fused",
    "Handle",
    "Moved",
    "Mover",
    "Quantizer",
    "Refit",
    "TransformedMover",
    "WeightsError",
    "amax",
    "checkpointable",
    "commit",
    "compile",
    "compile_changes",
    "compile_quantize",
    "compile_transformed",
    "connect",
    "dequantize",
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
    "quantize",
    "quantized_parts",
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
