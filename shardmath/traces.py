"""`shardmath.traces`: what takes time on ranks, measured or modeled, on one line of time."""

from shardmath.display.traces.chrome import read, write
from shardmath.display.traces.drawing import svg
from shardmath.display.traces.merging import merge
from shardmath.display.traces.model import model
from shardmath.display.traces.spans import Clock, Place, Span, Trace, Vote

__all__ = ["Clock", "Place", "Span", "Trace", "Vote", "merge", "model", "read", "svg", "write"]
