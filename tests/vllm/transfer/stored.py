"""Stored: trainers that hold a checkpoint's tensors as they are, such as quantized ones, each cut into rows."""

from __future__ import annotations

from pathlib import Path

from shardmath_vllm import Source
from tests.vllm import checkpoints
from tests.vllm.transfer import trainers

__all__ = ["join", "send"]


def join(rank: int, asked: trainers.Asked) -> None:
    """Meet the engines."""
    shapes = checkpoints.shapes_of(asked.folder)
    layouts = checkpoints.lay_out(shapes, asked.ranks)
    own = {}
    for name, tensor in checkpoints.read(asked.folder):
        own[name] = checkpoints.cut(tensor, layouts[name], rank)
    trainers.meet(rank, asked, Source(own, layouts, shapes, rank=rank))


def send(rank: int, folder: Path) -> None:
    """Take the weights of a checkpoint, and send them."""
    source, trainer = trainers.held["own"]
    for name, tensor in checkpoints.read(folder):
        source.tensors[name].copy_(checkpoints.cut(tensor, source.side[name], rank))
    trainer.send_weights()
