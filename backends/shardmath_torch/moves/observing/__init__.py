"""Observing: what a move does on this rank, and how long each part of it takes.

In reading order:

- `laps`: what a call's time goes into, by name;
- `traffic`: what a rank sends and receives, by peer;
- `moved`: what a move did, for people and programs;
- `logs`: a line per move;
- `bars`: progress, told to a callback and shown on a terminal;
- `spelling`: what was timed of a call, as spans;
- `tracers`: what is timed inside of a trace;
- `stopwatch`: one call, timed;
- `tracing`: `trace`, which writes what was timed inside it.
"""
