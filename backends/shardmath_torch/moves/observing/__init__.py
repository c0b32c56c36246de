"""Observing: bytes, messages and times of a move on this rank.

In reading order:

- `laps`: the phases of a call, by name;
- `traffic`: messages and bytes that a rank sends and receives, by peer;
- `moved`: the summary of a move, for people and programs;
- `logs`: a log line per move;
- `bars`: progress, for a callback and on a terminal;
- `spelling`: a timed call as spans of a trace;
- `tracers`: the calls timed inside of a trace;
- `stopwatch`: the timing of one call;
- `tracing`: `trace`, which writes the calls timed inside of it.
"""
