"""`shardmath.traces`: what takes time on ranks, measured or modeled, on one line of time."""

from shardmath.base.moved import forward_names
from shardmath.display.traces.chrome import read, write
from shardmath.display.traces.drawing import svg
from shardmath.display.traces.merging import merge
from shardmath.display.traces.model import model
from shardmath.display.traces.spans import Clock, Span, Trace, TraceRank, Vote

__all__ = ["Clock", "Span", "Trace", "TraceRank", "Vote", "merge", "model", "read", "svg", "write"]

__getattr__ = forward_names("shardmath.traces", {"Place": "shardmath.traces.TraceRank"})
